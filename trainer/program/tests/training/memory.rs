//! Snapshots in memory that outlives the workers: which ones a successor continues from, and which not. The agents that
//! lend the memory are threads of the test.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

use elastic_proto::worker::{Checkpoint, FromWorker};
use elastic_trainer::Environment;
use elastic_trainer::random::mix;
use rustix::fs::{MemfdFlags, memfd_create};
use rustix::process::Signal;

use crate::agent::{Agent, Commits, ENDLESS};
use crate::worker::{Worker, checksum, environment, free_port, last_step, trace, train, wait_for};

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

/// Waits until a round has begun. Returns the step after which it began.
fn begun(folder: &Path, round: u64) -> u64 {
    wait_for("the round to begin", || {
        let lines = trace(&folder.join("trace"));
        lines.iter().find(|line| line["event"] == "begin" && line["round"] == round)?["step"].as_u64()
    })
}

fn traced(folder: &Path) -> u64 {
    last_step(&folder.join("trace"), "step").unwrap_or(0)
}

/// The steps of the snapshots in memory, cut short or not, of a run whose settings have these words.
fn snapshots(memory: &File, words: &str) -> Vec<u64> {
    let len = memory.metadata().unwrap().len();
    let step = |start: u64| {
        let mut head = [0; 2048];
        memory.read_exact_at(&mut head, start).ok()?;
        let text = String::from_utf8_lossy(&head).into_owned();
        let number = text.split_once("\"step\": ").filter(|_| text.contains(words))?.1;
        number.split_once(',')?.0.parse().ok()
    };
    [0, len / 2].into_iter().filter_map(step).collect()
}

/// Waits until both snapshots are of this run, and kills the worker.
fn kill_once_kept(memory: &File, words: &str, worker: Worker) {
    wait_for("two snapshots", || (snapshots(memory, words).len() == 2).then_some(()));
    worker.signal(Signal::KILL);
    worker.end();
}

/// How many of the two snapshots in memory are cut short: a complete one begins with its mark.
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
    let flags = "--hidden 768,768 --batch 8 --shards 1 --epochs 2 --snapshot-every 1";
    let memory = memory();
    let (mut round, mut cut_short) = (1, 0);
    let mut started = start(folder.path(), flags, round, &memory, None);
    // When it is killed again and again, until some copies were cut short
    while cut_short < 2 && traced(folder.path()) < 300 {
        let reached = begun(folder.path(), round) + 2;
        wait_for("some snapshots", || snapshots(&memory, "--lr").into_iter().find(|step| *step > reached));
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
        // Then the next worker continues from the last complete snapshot. Of the two, the other was the one before
        let step = begun(folder.path(), round);
        assert!(torn <= 1 && step + 1 >= done && step > 0, "step {done} was done, round {round} begins after {step}");
    }
    assert!(cut_short > 0, "no copy was under way at any kill");
    // And it ends with the undisturbed run's parameters.
    let (printed, _) = started.1.succeeds();
    assert_eq!(checksum(&printed), format!("{:08x}", train(flags, 1, 0).checksum()));
}

#[test]
fn what_is_in_memory_alone_is_saved_as_soon_as_a_successor_has_it() {
    let folder = tempfile::tempdir().unwrap();
    let checkpoints = folder.path().join("checkpoints");
    let flags = |epochs: u64| {
        let every = "--snapshot-every 7 --checkpoint-every 1000000";
        format!("--hidden 16 --epochs {epochs} {every} --checkpoint-dir {}", checkpoints.display())
    };
    let memory = memory();
    let (_agent, worker) = start(folder.path(), &flags(100_000), 1, &memory, None);
    kill_once_kept(&memory, "--lr 0.001", worker);
    // Given a successor that has some hundred more steps to do
    let epochs = traced(folder.path()) / 23 + 20;
    let (flags, last) = (flags(epochs), epochs * 23);
    let (agent, worker) = start(folder.path(), &flags, 2, &memory, None);
    let step = begun(folder.path(), 2);
    assert!(step >= 7 && step.is_multiple_of(7), "{step}");
    worker.succeeds();
    let commits: Vec<u64> = trace(&folder.path().join("trace"))
        .iter()
        .filter(|line| line["event"] == "committed")
        .map(|line| line["step"].as_u64().unwrap())
        .collect();
    // At once, which is when the thread that makes the slots' memory ready has done so: steps continue meanwhile. No
    // other checkpoint is due before the last step.
    assert!(commits.len() == 2 && (step..last).contains(&commits[0]) && commits[1] == last, "{step}: {commits:?}");
    // When the job has committed a later step than the snapshot's, then the snapshot is not used.
    let committed = agent.last_commit();
    let (_agent, worker) = start(folder.path(), &flags, 3, &memory, Some(&committed));
    assert_eq!(begun(folder.path(), 3), last);
    assert!(worker.end().0.success());
}

#[test]
fn what_another_run_has_left_is_not_taken_up() {
    let folder = tempfile::tempdir().unwrap();
    let flags = "--hidden 16 --epochs 20 --snapshot-every 1";
    let memory = memory();
    let (_agent, worker) = start(folder.path(), "--hidden 16 --epochs 100000 --snapshot-every 1", 1, &memory, None);
    kill_once_kept(&memory, "--lr 0.001", worker);

    let other_job = Environment { job: "other".to_owned(), ..environment(0, 1, 2, 0) };
    let (_agent, worker) = start_in(folder.path(), flags, other_job, &memory, None);
    let (status, _, logged) = worker.end();
    assert!(status.success() && logged.contains("its job are \"test\", here \"other\""), "{logged}");
    assert_eq!(begun(folder.path(), 2), 0);

    let other_rate = format!("{flags} --lr 0.002");
    let (_agent, worker) = start(folder.path(), &other_rate, 3, &memory, None);
    let (status, _, logged) = worker.end();
    assert!(status.success() && logged.contains("it belongs to another run"), "{logged}");
    assert_eq!(begun(folder.path(), 3), 0);
    // And the snapshot of its own run is used.
    let (_agent, worker) = start(folder.path(), &other_rate.replace("20", "100000"), 4, &memory, None);
    kill_once_kept(&memory, "--lr 0.002", worker);
    let (_agent, worker) = start(folder.path(), &other_rate.replace("20", "100000"), 5, &memory, None);
    assert!(begun(folder.path(), 5) > 0);
    drop(worker);
}

#[test]
fn a_worker_that_gets_no_memory_says_so_once_and_trains() {
    let folder = tempfile::tempdir().unwrap();
    let mut alone = environment(0, 1, 1, 0);
    let agent = Agent::start(folder.path(), &alone, None, Commits::Granted);
    alone.agent = Some(agent.socket.clone());
    let checkpoints = folder.path().join("checkpoints");
    let flags = format!("{ENDLESS} --checkpoint-dir {}", checkpoints.display());
    let worker = Worker::start(&flags, &alone, None);
    agent.step_reached(20);
    agent.forming(2, std::time::Duration::from_secs(40));
    let step = agent.quiesced(2);
    agent.assign(&environment(0, 1, 2, 0));
    agent.step_reached(step + 20);
    assert!(agent.last_commit().step >= 10);
    worker.signal(Signal::TERM);
    let (status, _, logged) = worker.end();
    assert_eq!(status.code(), Some(143), "{logged}");
    assert_eq!(logged.matches("the agent keeps no snapshots: there is no memory to spare").count(), 1, "{logged}");
}

#[test]
fn the_first_nodes_keep_snapshots_and_when_the_round_changes_so_does_who_they_are() {
    let folder = tempfile::tempdir().unwrap();
    let flags = format!(
        "{ENDLESS} --snapshot-every 1 --checkpoint-replicas 1 --trace {}",
        folder.path().join("trace").display()
    );
    let places = |round: u64| {
        let port = free_port();
        [0, 1].map(|rank| Environment { local_rank: 0, ..environment(rank, 2, round, port) })
    };
    let memories = [memory(), memory()];
    let start = |place: Environment, memory: &File| {
        let agent =
            Agent::with_memory(folder.path(), &place, None, Commits::Granted, Some(memory.try_clone().unwrap()));
        let place = Environment { agent: Some(agent.socket.clone()), ..place };
        let worker = Worker::start(&flags, &place, None);
        (agent, worker)
    };
    let [first, second] = places(1);
    let group = [start(first, &memories[0]), start(second, &memories[1])];
    let asked = |agent: &Agent| {
        let heard = agent.heard.lock().unwrap();
        let words = heard.iter().filter_map(|word| match word {
            FromWorker::Memory { .. } => Some("memory"),
            FromWorker::Forget => Some("forget"),
            _ => None,
        });
        words.collect::<Vec<_>>()
    };
    // Given a round whose first node keeps snapshots. The second has only searched for old ones
    wait_for("two snapshots", || (snapshots(&memories[0], "--lr").len() == 2).then_some(()));
    group[0].0.step_reached(10);
    assert_eq!((asked(&group[0].0), asked(&group[1].0)), (vec!["memory"], vec!["memory", "forget"]));
    assert!(snapshots(&memories[1], "--lr").is_empty());
    // When the nodes change places, then the other one keeps them, and the first gives its memory back
    for (agent, _) in &group {
        agent.forming(2, std::time::Duration::from_secs(40));
    }
    let step = group.iter().map(|(agent, _)| agent.quiesced(2)).max().unwrap();
    let [first, second] = places(2);
    for ((agent, _), place) in group.iter().zip([second, first]) {
        agent.assign(&place);
    }
    let later = |memory: &File| snapshots(memory, "--lr").into_iter().all(|kept| kept > step);
    wait_for("two snapshots", || (snapshots(&memories[1], "--lr").len() == 2 && later(&memories[1])).then_some(()));
    group[0].0.step_reached(step + 10);
    assert_eq!(
        (asked(&group[0].0), asked(&group[1].0)),
        (vec!["memory", "forget"], vec!["memory", "forget", "memory"])
    );
    assert!(!later(&memories[0]));
    // And a snapshot is found even by a worker that keeps none itself.
    let held = snapshots(&memories[1], "--lr").into_iter().max().unwrap();
    for (_, worker) in group {
        worker.signal(Signal::KILL);
        worker.end();
    }
    let [first, second] = places(3);
    let group = [start(first, &memory()), start(second, &memories[1])];
    assert!(begun(folder.path(), 3) >= held);
    drop(group);
}
