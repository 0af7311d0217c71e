//! How a worker ends before the last step: a lost peer, a stop signal, a drain.

use std::net::TcpStream;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use elastic_proto::worker::{FailureClass, FromWorker, ToWorker};
use rustix::process::Signal;
use serde_json::Value;

use crate::agent::{Agent, Commits, ENDLESS, start_group};
use crate::worker::{Worker, environment, free_port, last_step, wait_for};

#[test]
fn a_lost_peer_is_reported_as_a_peers_fault() {
    let folder = tempfile::tempdir().unwrap();
    let mut group = start_group(folder.path(), "--epochs 100000 --peer-timeout 1", 1, 3, None);
    group[0].0.step_reached(20);
    let (_agent, victim) = group.remove(1);
    victim.signal(Signal::KILL);
    // No new round forms, so the survivors cannot continue.
    for ((agent, worker), rank) in group.into_iter().zip([0, 2]) {
        let (status, _, logged) = worker.end();
        assert_eq!(status.code(), Some(1), "{logged}");
        let (class, message) = agent.failure();
        assert_eq!(class, FailureClass::Peer);
        assert!(message.contains("lost rank"), "{message}");
        let error: Value =
            serde_json::from_slice(&std::fs::read(folder.path().join(format!("error-1-{rank}.json"))).unwrap())
                .unwrap();
        assert_eq!(error["message"]["message"], message.as_str());
        assert!(error["message"]["extraInfo"]["timestamp"].is_string());
    }
}

#[test]
fn without_an_agent_a_stop_signal_ends_a_worker_at_once_with_the_signals_code() {
    for (signal, code) in [(Signal::TERM, 143), (Signal::INT, 130)] {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("trace");
        let flags = format!("{ENDLESS} --trace {}", path.display());
        let flags = format!("{flags} --checkpoint-dir {}", folder.path().display());
        let flags = flags.replace("--checkpoint-every 10", "--checkpoint-every 1000000");
        let worker = Worker::start(&flags, &environment(0, 1, 0, 0), None);
        wait_for("some steps", || last_step(&path, "step").filter(|step| *step > 20));
        let asked = Instant::now();
        worker.signal(signal);
        let (status, _, logged) = worker.end();
        assert_eq!(status.code(), Some(code), "{logged}");
        assert!(asked.elapsed() < Duration::from_secs(10));
        let names = std::fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().file_name());
        assert_eq!(names.filter(|name| name.to_string_lossy().starts_with("step-")).count(), 0);
    }
}

#[test]
fn a_planned_stop_loses_no_step_however_the_signal_and_the_agents_word_race() {
    // Which rank hears first, and whether it hears the signal or the word first
    for (workers, first, by_word) in [(2, 0, true), (2, 1, true), (2, 0, false), (3, 2, false), (1, 0, false)] {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("trace");
        let flags = format!("{ENDLESS} --checkpoint-dir {} --trace {}", folder.path().display(), path.display());
        let flags = flags.replace("--checkpoint-every 10", "--checkpoint-every 1000000");
        let mut group = start_group(folder.path(), &flags, 1, workers, None);
        group[0].0.step_reached(20);
        group.rotate_left(first);
        for (agent, worker) in &group {
            if by_word {
                agent.say(&ToWorker::Draining { grace_ms: 20_000 });
            }
            worker.signal(Signal::TERM);
            if !by_word {
                agent.say(&ToWorker::Draining { grace_ms: 20_000 });
            }
        }
        let mut commits = Vec::new();
        for (agent, worker) in group {
            let (status, _, logged) = worker.end();
            assert_eq!(status.code(), Some(143), "{logged}");
            commits.extend(agent.commits());
        }
        let last = last_step(&path, "step");
        let which = format!("{workers} workers, from rank {first} on, by word {by_word}");
        assert_eq!(commits.iter().map(|commit| commit.step).max(), last, "{which}");
        assert_eq!(last_step(&path, "committed"), last, "{which}");
    }
}

#[test]
fn a_rank_without_a_stop_waits_for_the_next_round_with_its_state() {
    let folder = tempfile::tempdir().unwrap();
    let mut group = start_group(folder.path(), ENDLESS, 1, 2, None);
    group[0].0.step_reached(20);
    let (_leaver, worker) = group.remove(1);
    worker.signal(Signal::TERM);
    assert_eq!(worker.end().0.code(), Some(143));
    group[0].0.forming(2, Duration::from_secs(40));
    let held = group[0].0.quiesced(2);
    group[0].0.assign(&environment(0, 1, 2, 0));
    group[0].0.step_reached(held + 20);
}

#[test]
fn the_last_save_has_what_is_left_of_the_grace() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("trace");
    let flags = format!("{ENDLESS} --checkpoint-dir {} --trace {}", folder.path().display(), path.display());
    let flags = flags.replace("--checkpoint-every 10", "--checkpoint-every 1000000");
    let mut environment = environment(0, 1, 1, 0);
    let agent = Agent::start(folder.path(), &environment, None, Commits::Unanswered);
    environment.agent = Some(agent.socket.clone());
    let worker = Worker::start(&flags, &environment, None);
    agent.step_reached(20);
    agent.say(&ToWorker::Draining { grace_ms: 30_000 });
    worker.signal(Signal::TERM);
    let commits = || {
        let heard = agent.heard.lock().unwrap();
        let ids = heard.iter().filter_map(|word| match word {
            FromWorker::Commit { id, checkpoint } => Some((*id, checkpoint.step)),
            _ => None,
        });
        ids.collect::<Vec<_>>()
    };
    // Given a store that is slow to answer, or a disk that takes as long
    wait_for("the last commit", || {
        let last = last_step(&path, "step");
        commits().iter().any(|(_, step)| Some(*step) == last).then_some(())
    });
    let asked = Instant::now();
    wait_for("more than the three seconds that a save once had", || {
        (asked.elapsed() > Duration::from_secs(4)).then_some(())
    });
    commits().into_iter().for_each(|(id, step)| agent.say(&ToWorker::Committed { id, step }));
    let (status, _, logged) = worker.end();
    assert_eq!(status.code(), Some(143), "{logged}");
    assert_eq!(last_step(&path, "committed"), last_step(&path, "step"), "{logged}");
}

#[test]
fn a_worker_whose_peers_never_come_still_stops_at_once() {
    let port = free_port();
    let worker = Worker::start("", &environment(0, 2, 0, port), None);
    wait_for("rank 0's port", || TcpStream::connect(("127.0.0.1", port)).ok());
    worker.signal(Signal::TERM);
    assert_eq!(worker.end().0.code(), Some(143));
}

#[test]
fn a_drain_commits_the_last_step_before_the_stop() {
    // Given three workers, and rank 2's node drains.
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("trace");
    let flags = format!("{ENDLESS} --checkpoint-dir {} --trace {}", folder.path().display(), path.display());
    let flags = flags.replace("--checkpoint-every 10", "--checkpoint-every 1000000");
    let group = start_group(folder.path(), &flags, 1, 3, None);
    group[0].0.step_reached(20);
    group[2].0.say(&ToWorker::Draining { grace_ms: 5000 });
    // When the drain is known, then rank 0 commits at once, though no checkpoint was due.
    let early = group[0].0.last_commit();
    // When all are stopped, then the last step that rank 0 has done is committed.
    for (_, worker) in &group {
        worker.signal(Signal::TERM);
    }
    let mut agents = Vec::new();
    for (agent, worker) in group {
        worker.end();
        agents.push(agent);
    }
    let last = agents[0].last_commit();
    assert!(last.step >= early.step);
    assert_eq!(Some(last.step), last_step(&path, "step"));
    assert_eq!(Some(last.step), last_step(&path, "committed"));
}

#[test]
fn a_worker_of_another_round_than_its_agents_refuses_to_start() {
    let folder = tempfile::tempdir().unwrap();
    let agent = Agent::start(folder.path(), &environment(0, 1, 7, 0), None, Commits::Granted);
    let mut old = environment(0, 1, 6, 0);
    old.agent = Some(agent.socket.clone());
    let (status, _, logged) = Worker::start("", &old, None).end();
    assert_eq!(status.code(), Some(1));
    assert!(logged.contains("started for another round"), "{logged}");
}

#[test]
fn too_few_descriptors_are_named_at_once() {
    // Given a rank 0 that may open ten files, hard limit and all
    let port = free_port();
    let worker = Command::new("sh")
        .args(["-c", "ulimit -n 10; exec \"$0\" digits --device cpu", env!("CARGO_BIN_EXE_elastic-trainer")])
        .envs([("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "127.0.0.1")])
        .env("MASTER_PORT", port.to_string())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let connect = || TcpStream::connect(("127.0.0.1", port)).ok();
    let first = wait_for("rank 0's port", connect);
    // When more connections wait than it can take
    let more: Vec<Option<TcpStream>> = (0..12).map(|_| connect()).collect();
    let asked = Instant::now();
    let output = worker.wait_with_output().unwrap();
    let logged = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.code() == Some(1) && logged.contains("raise it where this worker is started"), "{logged}");
    assert!(asked.elapsed() < Duration::from_secs(10), "{logged}");
    drop((first, more));
}
