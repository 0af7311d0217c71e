//! Snapshots in memory that outlives the workers: what a successor takes up, and what it does not. The agents that lend
//! the memory are threads of the test here.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

use elastic_proto::worker::{Checkpoint, ToWorker};
use elastic_trainer::Environment;
use elastic_trainer::random::mix;
use rustix::fs::{MemfdFlags, memfd_create};
use rustix::process::Signal;

use crate::agent::{Agent, Commits, assignment};
use crate::worker::{Worker, environment, last_step, trace, train, wait_for};

fn memory() -> File {
    memfd_create("test", MemfdFlags::CLOEXEC).unwrap().into()
}

/// A worker alone with an agent that lends it `memory`.
fn start(folder: &Path, flags: &str, round: u64, memory: &File, resume: Option<&Checkpoint>) -> (Agent, Worker) {
    start_in(folder, flags, environment(0, 1, round, 0), memory, resume)
}

fn start_in(
    folder: &Path,
    flags: &str,
    mut environment: Environment,
    memory: &File,
    resume: Option<&Checkpoint>,
) -> (Agent, Worker) {
    let memory = Some(memory.try_clone().unwrap());
    let agent = Agent::with_memory(folder, &environment, resume.cloned(), Commits::Granted, memory);
    environment.agent = Some(agent.socket.clone());
    let flags = format!("{flags} --trace {}", folder.join("trace").display());
    (agent, Worker::start(&flags, &environment, None))
}

/// The step that a round began after, once it has.
fn begun(folder: &Path, round: u64) -> u64 {
    wait_for("the round to begin", || {
        let lines = trace(&folder.join("trace"));
        lines.iter().find(|line| line["event"] == "begin" && line["round"] == round)?["step"].as_u64()
    })
}

fn traced(folder: &Path) -> u64 {
    last_step(&folder.join("trace"), "step").unwrap_or(0)
}

/// Waits until training is at `step` in this round, and kills the worker.
fn kill_at(folder: &Path, round: u64, step: u64, worker: Worker) {
    wait_for("the step", || {
        trace(&folder.join("trace"))
            .iter()
            .any(|l| l["round"] == round && l["step"].as_u64() >= Some(step))
            .then_some(())
    });
    worker.signal(Signal::KILL);
    worker.end();
}

/// How many of the two snapshots in memory are cut short: a frame begins with its mark.
fn torn(memory: &File) -> usize {
    let len = memory.metadata().unwrap().len();
    let is_marked = |start: u64| {
        let mut mark = [0; 8];
        memory.read_exact_at(&mut mark, start).unwrap();
        mark != [0; 8]
    };
    [0, len / 2].into_iter().filter(|&start| !is_marked(start)).count()
}

#[test]
fn killed_at_any_moment_a_worker_leaves_a_snapshot_that_is_exactly_one_steps_state() {
    // Given a worker that copies megabytes at each step
    let folder = tempfile::tempdir().unwrap();
    let flags = "--hidden 768,768 --batch 8 --epochs 2 --snapshot-every 1";
    let memory = memory();
    let (mut round, mut cut_short) = (1, 0);
    let mut started = start(folder.path(), flags, round, &memory, None);
    // When it is killed again and again, until some copies were cut short
    while cut_short < 3 && traced(folder.path()) < 300 {
        let reached = begun(folder.path(), round) + 2;
        wait_for("some steps", || Some(()).filter(|()| traced(folder.path()) > reached));
        let mut looks = mix(round) % 5;
        wait_for("the moment", || {
            looks = looks.saturating_sub(1);
            (looks == 0).then_some(())
        });
        started.1.signal(Signal::KILL);
        started.1.end();
        let (done, torn) = (traced(folder.path()), torn(&memory));
        cut_short += torn;
        round += 1;
        started = start(folder.path(), flags, round, &memory, None);
        // Then the next goes on from the last one that is whole: of two, the other was the one before
        let step = begun(folder.path(), round);
        assert!(torn <= 1 && step + 1 >= done && step > 0, "step {done} was done, round {round} begins after {step}");
    }
    assert!(cut_short > 0, "no copy was under way at any kill");
    // And the end is the undisturbed run's.
    let (status, printed, logged) = started.1.end();
    assert!(status.success(), "{logged}");
    let undisturbed = train(flags, 1, 0);
    assert!(printed.contains(&format!("parameters crc32c:{:08x}", undisturbed.checksum())), "{printed}");
}

#[test]
fn what_is_in_memory_alone_is_saved_as_soon_as_a_successor_has_it() {
    let folder = tempfile::tempdir().unwrap();
    let checkpoints = folder.path().join("checkpoints");
    let flags =
        format!("--hidden 16 --snapshot-every 7 --checkpoint-every 1000000 --checkpoint-dir {}", checkpoints.display());
    let memory = memory();
    let (_agent, worker) = start(folder.path(), &flags, 1, &memory, None);
    kill_at(folder.path(), 1, 20, worker);
    let (agent, worker) = start(folder.path(), &flags, 2, &memory, None);
    let step = begun(folder.path(), 2);
    assert!(step >= 14 && step.is_multiple_of(7), "{step}");
    let first = agent.heard("a commit", |message| match message {
        elastic_proto::worker::FromWorker::Commit { checkpoint, .. } => Some(checkpoint.step),
        _ => None,
    });
    assert!(first == step || first == 40 * 23, "step {first} was committed, {step} was in memory");
    let (status, _, logged) = worker.end();
    assert!(status.success(), "{logged}");
    let commits: Vec<u64> = trace(&folder.path().join("trace"))
        .iter()
        .filter(|line| line["event"] == "committed")
        .map(|line| line["step"].as_u64().unwrap())
        .collect();
    assert_eq!(commits, [step, 40 * 23]);
    // When the job has committed more than what is left, then that is not taken up.
    let committed = agent.last_commit();
    let (_agent, worker) = start(folder.path(), &flags, 3, &memory, Some(&committed));
    assert_eq!(begun(folder.path(), 3), 40 * 23);
    assert!(worker.end().0.success());
}

#[test]
fn what_another_run_has_left_is_not_taken_up() {
    let folder = tempfile::tempdir().unwrap();
    let flags = "--hidden 16 --epochs 20 --snapshot-every 1";
    let memory = memory();
    let (_agent, worker) = start(folder.path(), flags, 1, &memory, None);
    kill_at(folder.path(), 1, 20, worker);

    let other_job = Environment { job: "other".to_owned(), ..environment(0, 1, 2, 0) };
    let (_agent, worker) = start_in(folder.path(), flags, other_job, &memory, None);
    let (status, _, logged) = worker.end();
    assert!(status.success() && logged.contains("its job are \"test\", here \"other\""), "{logged}");
    assert_eq!(begun(folder.path(), 2), 0);

    let other_rate = format!("{flags} --lr 0.002");
    let (_agent, worker) = start(folder.path(), &other_rate, 3, &memory, None);
    let (status, _, logged) = worker.end();
    assert!(status.success() && logged.contains("it is of another run"), "{logged}");
    assert_eq!(begun(folder.path(), 3), 0);
    // And its own is.
    let (_agent, worker) = start(folder.path(), &other_rate, 4, &memory, None);
    assert!(worker.end().0.success());
    // The last step is followed by none that it could be copied in.
    assert_eq!(begun(folder.path(), 4), 20 * 23 - 1);
}

#[test]
fn a_worker_that_gets_no_memory_says_so_once_and_trains() {
    let folder = tempfile::tempdir().unwrap();
    let mut alone = environment(0, 1, 1, 0);
    let agent = Agent::start(folder.path(), &alone, None, Commits::Granted);
    alone.agent = Some(agent.socket.clone());
    let checkpoints = folder.path().join("checkpoints");
    let flags = format!("--hidden 16 --epochs 60 --checkpoint-dir {}", checkpoints.display());
    let worker = Worker::start(&flags, &alone, None);
    agent.step_reached(20);
    agent.forming(2, std::time::Duration::from_secs(40));
    agent.quiesced(2);
    agent.say(&ToWorker::Assignment(assignment(&environment(0, 1, 2, 0), None)));
    let (status, _, logged) = worker.end();
    assert!(status.success(), "{logged}");
    assert_eq!(logged.matches("the agent keeps no snapshots: there is no memory to spare").count(), 1, "{logged}");
    assert_eq!(agent.last_commit().step, 60 * 23);
}
