//! Snapshots of a training on a GPU: which step's numbers they hold, what waits for them, and who continues from them.
//! The double makes the copies as late as it may. So work that should wait for a copy, and does not, changes its
//! numbers.

mod timed;

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use elastic_cuda::Surroundings;
use elastic_trainer::Environment;
use rustix::fs::{MemfdFlags, memfd_create};
use rustix::process::Signal;

use crate::agent::{Agent, Commits};
use crate::double::{cache, cublaslt, driver, prefix};
use crate::training::{SHORT, checksum, printed, run};
use crate::worker::{Worker, environment, free_port, wait_for};

/// Flags for a checkpoint at each step, if the disk is fast enough. All are kept.
fn saving(folder: &Path) -> String {
    let flags = format!("{SHORT} --device cuda --checkpoint-every 1 --keep 100 --checkpoint-dir {}", folder.display());
    flags.replace("--epochs 1", "--epochs 4")
}

fn undisturbed() -> String {
    printed(&format!("{SHORT} --device cuda").replace("--epochs 1", "--epochs 4"), "")
}

/// Copies the first checkpoints of a folder, each into a folder of its own.
fn each_alone(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let mut checkpoints: Vec<PathBuf> = entries.filter(|path| path.is_dir()).collect();
    checkpoints.sort();
    let mut alone = Vec::new();
    for checkpoint in checkpoints.into_iter().take(3) {
        let name = checkpoint.file_name().unwrap().to_str().unwrap();
        let home = folder.with_extension(name);
        fs::create_dir_all(home.join(name)).unwrap();
        for file in fs::read_dir(&checkpoint).unwrap().map(Result::unwrap) {
            fs::copy(file.path(), home.join(name).join(file.file_name())).unwrap();
        }
        alone.push(home);
    }
    alone
}

/// The final parameters of one training for each checkpoint of a folder, which continues from that checkpoint.
fn ends(folder: &Path) -> Vec<String> {
    let ends = each_alone(folder).into_iter().map(|home| {
        let (well, printed, logged) = run(&saving(&home), "");
        assert!(well && logged.contains("resumed from a checkpoint"), "{logged}");
        checksum(&printed).to_owned()
    });
    ends.collect()
}

#[test]
fn a_snapshot_is_exactly_its_steps_state_since_the_optimizer_waits_for_the_copy() {
    let folder = tempfile::tempdir().unwrap();
    let undisturbed = undisturbed();
    let saved = folder.path().join("saved");
    assert_eq!(checksum(&printed(&saving(&saved), "")), checksum(&undisturbed));
    let found = ends(&saved);
    assert!(found.len() > 1 && found.iter().all(|end| end == checksum(&undisturbed)), "{found:?}");
    // If the optimizer did not wait, this test would see it.
    let spoiled = folder.path().join("spoiled");
    assert_eq!(checksum(&printed(&saving(&spoiled), "deaf=1")), checksum(&undisturbed));
    let found = ends(&spoiled);
    assert!(found.iter().any(|end| end != checksum(&undisturbed)), "{found:?}");
}

#[test]
fn the_next_gradient_is_computed_while_a_snapshot_is_copied() {
    let folder = tempfile::tempdir().unwrap();
    let (well, _, logged) = run(&saving(folder.path()), "tell=1");
    assert!(well, "{logged}");
    let copies: Vec<(u64, &str)> = logged
        .lines()
        .filter_map(|line| {
            line.strip_prefix("double: ")?.split_once(" bytes were copied after ")?.1.split_once(" launches, since ")
        })
        .map(|(launches, since)| (launches.parse().unwrap(), since))
        .collect();
    assert!(copies.len() >= 3, "{logged}");
    // Six shards in ten pieces each. If the machine is busy with other work for long, the double may find its callers
    // idle.
    let beside = copies.iter().filter(|(launches, since)| *launches > 60 && *since == "another stream waits").count();
    assert!(2 * beside > copies.len(), "{copies:?}");
}

#[test]
fn without_pinned_memory_copies_are_as_right_and_one_line_says_so() {
    let folder = tempfile::tempdir().unwrap();
    let undisturbed = undisturbed();
    let (well, printed, logged) = run(&saving(folder.path()), "pinned=0");
    assert!(well && checksum(&printed) == checksum(&undisturbed), "{logged}");
    assert_eq!(
        logged.matches("WARN GPU 0 failed to allocate pinned host memory: out of memory").count(),
        1,
        "{logged}"
    );
    let found = ends(folder.path());
    assert!(found.iter().all(|end| end == checksum(&undisturbed)), "{found:?}");
}

/// Whether a frame in an agent's memory is whole: it begins with its mark.
fn holds_a_snapshot(memory: &File) -> bool {
    let len = memory.metadata().unwrap().len();
    let is_marked = |start: u64| {
        let mut mark = [0; 8];
        memory.read_exact_at(&mut mark, start).is_ok() && mark != [0; 8]
    };
    len > 0 && [0, len / 2].into_iter().any(is_marked)
}

#[test]
fn workers_that_are_all_killed_leave_what_the_next_ones_come_to_the_same_end_from() {
    let folder = tempfile::tempdir().unwrap();
    let flags = "digits --epochs 12 --hidden 16 --batch 60 --shards 2 --device cuda:0 --snapshot-every 1";
    let cuda = Surroundings { folders: vec![driver(), cublaslt()], prefixes: vec![prefix()], cache: Some(cache()) };
    // Each worker runs on a node of its own.
    let places = |round| {
        let port = free_port();
        [0, 1].map(|rank| Environment { cuda: cuda.clone(), local_rank: 0, ..environment(rank, 2, round, port) })
    };
    let memories = [0, 1].map(|_| File::from(memfd_create("test", MemfdFlags::CLOEXEC).unwrap()));
    let start = |round| {
        let places = places(round).into_iter().zip(&memories);
        let started = places.map(|(mut place, memory)| {
            let memory = Some(memory.try_clone().unwrap());
            let agent = Agent::with_memory(folder.path(), &place, None, Commits::Granted, memory);
            place.agent = Some(agent.socket.clone());
            let worker = Worker::start(flags, &place, None);
            (agent, worker)
        });
        started.collect::<Vec<_>>()
    };
    // Given workers that keep snapshots, in a second round too
    let group = start(1);
    wait_for("snapshots", || memories.iter().all(holds_a_snapshot).then_some(()));
    for (agent, _) in &group {
        agent.forming(2, Duration::from_secs(40));
    }
    let steps = group.iter().map(|(agent, _)| agent.quiesced(2)).collect::<Vec<_>>();
    for ((agent, _), place) in group.iter().zip(places(2)) {
        agent.assign(&place);
    }
    let reached = group.iter().zip(steps).map(|((agent, _), step)| agent.step_reached(step + 5)).min().unwrap();
    // When all are killed, then others continue from there
    for (_, worker) in group {
        worker.signal(Signal::KILL);
        worker.end();
    }
    let ended: Vec<_> = start(3).into_iter().map(|(_agent, worker)| worker.end()).collect();
    for (status, _, logged) in &ended {
        assert!(status.success() && logged.contains("found a snapshot in the agent's memory"), "{reached} {logged}");
    }
    // And they end with the undisturbed run's parameters.
    assert_eq!(checksum(&ended[0].1), checksum(&printed(flags, "")));
}
