//! The optimizer's numbers sharded over the ranks: the bits of a run that has them whole, whatever happens to the ranks.

use std::fs::File;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use elastic_proto::worker::{FailureClass, ToWorker};
use elastic_trainer::engine::state::State;
use elastic_trainer::random::mix;
use elastic_trainer::{Environment, Outcome};
use rustix::fs::{MemfdFlags, memfd_create};
use rustix::process::Signal;

use crate::agent::{Agent, Commits, start_group, start_member};
use crate::worker::{Worker, checksum, last_step, places, run, trace, train, wait_for};

/// Three buckets, two of them so long that only their owners have the sums. The norm is of all.
const FLAGS: &str = "--hidden 280 --clip 0.3 --bucket-mb 0.035";
const SHARDED: &str = "--optimizer-state sharded";
/// Time to quiesce, far more than a test needs.
const AMPLE: Duration = Duration::from_secs(40);

/// Trains with a thread for each rank. Returns each one's state.
fn train_sharded(flags: &str, world_size: u32, round: u64) -> Vec<State> {
    let flags = &format!("{flags} {SHARDED}");
    let outcomes: Vec<Outcome> = thread::scope(|scope| {
        let start = |place: Environment| scope.spawn(move || run(flags, place).unwrap());
        let threads: Vec<_> = places(round, world_size).into_iter().map(start).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    outcomes.into_iter().map(|outcome| outcome.state).collect()
}

#[test]
fn every_world_has_the_bits_of_a_whole_optimizer_and_a_share_of_its_numbers() {
    let one_bucket = FLAGS.replace("--bucket-mb 0.035", "--bucket-mb 0");
    let momentum = "--epochs 1 --optimizer sgd --momentum 0.9";
    for (flags, more) in [(FLAGS, "--epochs 3"), (&one_bucket, momentum), (FLAGS, "--epochs 1 --optimizer sgd")] {
        let flags = format!("{flags} {more}");
        let whole = train(&flags, 1, 0);
        for (world_size, share) in [(1, 1.0), (2, 1.0), (3, 2.0 / 3.0), (4, 0.5), (8, 0.25)] {
            for state in train_sharded(&flags, world_size, 0) {
                assert_eq!(state.checksum(), whole.checksum(), "{flags} with {world_size} workers");
                let parameters = state.parameters().len();
                let [kept, all] = [&state, &whole].map(|state| (state.flat.len() - parameters) as f64);
                assert!((kept - share * all).abs() <= 0.08 * all, "{kept} of {all} with {world_size} workers");
            }
        }
    }
}

#[test]
fn checkpoints_are_whole_and_resume_on_any_number_of_ranks_sharded_or_not() {
    let undisturbed = train(&format!("{FLAGS} --epochs 6"), 1, 0);
    let folder = tempfile::tempdir().unwrap();
    let flags = |epochs| {
        let folder = folder.path().display();
        format!("{FLAGS} --epochs {epochs} --checkpoint-every 10 --checkpoint-dir {folder}")
    };
    train_sharded(&flags(1), 3, 0);
    train(&flags(2), 2, 1);
    train_sharded(&flags(4), 4, 2);
    train_sharded(&flags(5), 1, 3);
    assert!(train(&flags(6), 2, 4) == undisturbed, "with the optimizer's numbers");
}

fn traced(folder: &Path, epochs: u64) -> String {
    format!("{FLAGS} --epochs {epochs} {SHARDED} --trace {}", folder.join("trace").display())
}

fn reached(folder: &Path) -> u64 {
    last_step(&folder.join("trace"), "step").unwrap_or(0)
}

fn begun(folder: &Path, round: u64) -> u64 {
    wait_for("the round to begin", || {
        let lines = trace(&folder.join("trace"));
        lines.iter().find(|line| line["event"] == "begin" && line["round"] == round)?["step"].as_u64()
    })
}

/// Goes to the next round with those that live and as many newcomers as it takes. Which round begins after the furthest
/// step that any of them has.
fn change(folder: &Path, flags: &str, round: u64, survivors: Vec<(Agent, Worker)>, world: u32) -> Vec<(Agent, Worker)> {
    // The nodes that leave drain.
    survivors.iter().skip(world as usize).for_each(|(agent, _)| agent.say(&ToWorker::Draining { grace_ms: 40_000 }));
    survivors.iter().for_each(|(agent, _)| agent.forming(round, AMPLE));
    let furthest = survivors.iter().map(|(agent, _)| agent.quiesced(round)).max().unwrap();
    let mut group = survivors;
    group.truncate(world as usize);
    let places = places(round, world);
    group.iter().zip(&places).for_each(|((agent, _), place)| agent.assign(place));
    for place in places.into_iter().skip(group.len()) {
        group.push(start_member(folder, flags, place, None));
    }
    assert_eq!(begun(folder, round), furthest);
    group
}

/// Waits for all workers, which must succeed with the parameters of an undisturbed run without shards.
fn all_reach_the_undisturbed_end(group: Vec<(Agent, Worker)>, epochs: u64) {
    let mut printed = String::new();
    let (_agents, workers): (Vec<_>, Vec<_>) = group.into_iter().unzip();
    for worker in workers {
        printed += &worker.succeeds().0;
    }
    let undisturbed = train(&format!("{FLAGS} --epochs {epochs}"), 1, 0);
    assert_eq!(checksum(&printed), format!("{:08x}", undisturbed.checksum()));
}

#[test]
fn a_job_that_grows_and_shrinks_keeps_its_bits() {
    let folder = tempfile::tempdir().unwrap();
    let (folder, epochs) = (folder.path(), 40);
    let flags = traced(folder, epochs);
    let mut group = start_group(folder, &flags, 1, 1, None);
    for (round, world) in [(2, 2), (3, 4), (4, 3), (5, 1), (6, 3)] {
        let before = reached(folder);
        wait_for("some steps", || (reached(folder) > before + 3).then_some(()));
        group = change(folder, &flags, round, group, world);
    }
    all_reach_the_undisturbed_end(group, epochs);
}

/// Each part is owned by one of the two that leave, and the other. They hear late that their nodes drain.
#[test]
fn both_owners_of_a_part_may_leave_as_planned() {
    let folder = tempfile::tempdir().unwrap();
    let (folder, epochs) = (folder.path(), 40);
    let flags = traced(folder, epochs);
    let mut group = start_group(folder, &flags, 1, 3, None);
    wait_for("some steps", || (reached(folder) > 5).then_some(()));
    let (stays, leave) = group.split_first().unwrap();
    stays.0.forming(2, AMPLE);
    // It waits after a step, for those that have not heard.
    let mut last = (0, Instant::now());
    wait_for("the ranks to stop", || {
        last = if reached(folder) == last.0 { last } else { (reached(folder), Instant::now()) };
        (last.1.elapsed() > Duration::from_millis(300)).then_some(())
    });
    for (agent, _) in leave {
        agent.say(&ToWorker::Draining { grace_ms: 40_000 });
        agent.forming(2, AMPLE);
    }
    let furthest = group.iter().map(|(agent, _)| agent.quiesced(2)).max().unwrap();
    group.truncate(1);
    group[0].0.assign(&places(2, 1)[0]);
    assert_eq!((begun(folder, 2), reached(folder) >= furthest), (furthest, true));
    all_reach_the_undisturbed_end(group, epochs);
}

#[test]
fn a_death_at_any_moment_loses_no_step() {
    let folder = tempfile::tempdir().unwrap();
    let (folder, epochs) = (folder.path(), 60);
    let flags = traced(folder, epochs);
    let mut group = start_group(folder, &flags, 1, 4, None);
    for round in 2..10 {
        let before = reached(folder);
        wait_for("some steps", || (reached(folder) > before + 5).then_some(()));
        // Anywhere in a step, and in the moves of the round's begin
        let (victim, moment) = (mix(round) as usize % group.len(), mix(round + 100) % 20_000);
        thread::sleep(Duration::from_micros(moment));
        let (_agent, worker) = group.remove(victim);
        worker.signal(Signal::KILL);
        drop(worker);
        group = change(folder, &flags, round, group, [4, 3][round as usize % 2]);
    }
    all_reach_the_undisturbed_end(group, epochs);
}

fn memory() -> File {
    memfd_create("test", MemfdFlags::CLOEXEC).unwrap().into()
}

/// A worker for each memory, which is its agent's.
fn start_with(folder: &Path, flags: &str, round: u64, memories: &[File]) -> Vec<(Agent, Worker)> {
    let start = |(mut place, memory): (Environment, &File)| {
        let memory = Some(memory.try_clone().unwrap());
        let agent = Agent::with_memory(folder, &place, None, Commits::Granted, memory);
        place.agent = Some(agent.socket.clone());
        (agent, Worker::start(flags, &place, None))
    };
    places(round, memories.len() as u32).into_iter().zip(memories).map(start).collect()
}

#[test]
fn snapshots_are_whole_and_resume_sharded_or_not() {
    let folder = tempfile::tempdir().unwrap();
    let (folder, epochs) = (folder.path(), 60);
    let memories = [memory(), memory(), memory(), memory()];
    let sharded = format!("{} --snapshot-every 4", traced(folder, epochs));
    let whole = sharded.replace(SHARDED, "");
    let mut last = 0;
    for (round, flags, world) in [(1, &sharded, 4), (2, &whole, 2), (3, &sharded, 3)] {
        let group = start_with(folder, flags, round, &memories[..world]);
        assert!(begun(folder, round) >= last);
        last = reached(folder);
        wait_for("some steps", || (reached(folder) > last + 12).then_some(()));
        // Two snapshots back at most.
        last = reached(folder) - 9;
        group.iter().for_each(|(_, worker)| worker.signal(Signal::KILL));
    }
    let group = start_with(folder, &sharded, 4, &memories[..2]);
    assert!(begun(folder, 4) >= last && last > 0);
    all_reach_the_undisturbed_end(group, epochs);
}

#[test]
fn where_both_owners_of_a_part_die_all_start_again_from_a_snapshot() {
    let folder = tempfile::tempdir().unwrap();
    let (folder, epochs) = (folder.path(), 30);
    let memories = [memory(), memory(), memory(), memory()];
    let flags = format!("{} --snapshot-every 4", traced(folder, epochs));
    let mut group = start_with(folder, &flags, 1, &memories);
    wait_for("some steps", || (reached(folder) > 12).then_some(()));
    for victim in [2, 0] {
        let (_agent, worker) = group.remove(victim);
        worker.signal(Signal::KILL);
    }
    group.iter().for_each(|(agent, _)| agent.forming(2, AMPLE));
    for (agent, _) in &group {
        agent.quiesced(2);
    }
    group.iter().zip(&places(2, 2)).for_each(|((agent, _), place)| agent.assign(place));
    for (agent, worker) in group {
        let (class, message) = agent.failure();
        assert_eq!(class, FailureClass::Peer, "its own node is well");
        assert!(message.contains("both owners of a part of the optimizer's numbers are gone"), "{message}");
        assert!(!worker.end().0.success());
    }
    let group = start_with(folder, &flags, 3, &memories);
    assert!(begun(folder, 3) >= 4);
    all_reach_the_undisturbed_end(group, epochs);
}

/// Memory of each rank of a world in training, in bytes.
fn memory_of_ranks(flags: &str, world_size: u32) -> Vec<f64> {
    let folder = tempfile::tempdir().unwrap();
    let flags = format!("{flags} --trace {}", folder.path().join("trace").display());
    let workers: Vec<Worker> = places(0, world_size).iter().map(|place| Worker::start(&flags, place, None)).collect();
    wait_for("some steps", || (reached(folder.path()) > 3).then_some(()));
    let anonymous = |worker: &Worker| {
        let status = std::fs::read_to_string(format!("/proc/{}/status", worker.id())).unwrap();
        let line = status.lines().find(|line| line.starts_with("RssAnon:")).unwrap().to_owned();
        1024.0 * line.split_whitespace().nth(1).unwrap().parse::<f64>().unwrap()
    };
    workers.iter().map(anonymous).collect()
}

#[test]
fn four_ranks_keep_half_of_the_optimizers_numbers_each() {
    let flags = "--hidden 1000,1000 --epochs 1000";
    // 64 · 1000 + 1000 + 1000 · 1000 + 1000 + 1000 · 10 + 10 parameters, with 8 bytes of AdamW's each
    let kept = 8.0 * 1_076_010.0;
    for (world_size, saved) in [(2, 0.0), (4, 0.5 * kept)] {
        let whole = memory_of_ranks(flags, world_size);
        let sharded = memory_of_ranks(&format!("{flags} {SHARDED}"), world_size);
        for (whole, sharded) in whole.iter().zip(&sharded) {
            assert!((whole - sharded - saved).abs() < 0.12 * kept, "{sharded} instead of {whole} bytes");
        }
    }
}

#[test]
fn gpus_refuse_and_ranks_that_differ_refuse_each_other() {
    let place = || places(0, 1).remove(0);
    let error = run(&format!("{FLAGS} {SHARDED} --device cuda"), place()).unwrap_err().to_string();
    assert!(error.contains("GPUs keep all of the optimizer's numbers (--optimizer-state whole)"), "{error}");
    let places = places(0, 2);
    let errors: Vec<String> = thread::scope(|scope| {
        let start = |(place, more): (Environment, &str)| {
            let flags = format!("{FLAGS} --form-timeout 5s {more}");
            scope.spawn(move || run(&flags, place).unwrap_err().to_string())
        };
        let threads: Vec<_> = places.into_iter().zip([SHARDED, "--epochs 40"]).map(start).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    assert!(errors.iter().any(|error| error.contains("--optimizer-state")), "{errors:?}");
}
