//! How a worker ends before the last step: a lost peer, a stop signal, a drain.

use std::time::{Duration, Instant};

use elastic_proto::worker::{FailureClass, ToWorker};
use serde_json::Value;

use crate::agent::{Agent, Commits, ENDLESS, start_group};
use crate::worker::{Worker, environment, free_port, last_step, wait_for};

#[test]
fn a_lost_peer_is_reported_as_a_peers_fault() {
    let folder = tempfile::tempdir().unwrap();
    let mut group = start_group(folder.path(), "--epochs 100000 --peer-timeout 1", 1, 3, None);
    group[0].0.step_reached(20);
    let (_agent, victim) = group.remove(1);
    victim.signal(rustix::process::Signal::KILL);
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
fn a_stop_signal_ends_a_worker_at_once_and_writes_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let flags = format!("--epochs 100000 --checkpoint-every 1000000 --checkpoint-dir {}", folder.path().display());
    let (agent, worker) = start_group(folder.path(), &flags, 1, 1, None).remove(0);
    agent.step_reached(20);
    let asked = Instant::now();
    worker.signal(rustix::process::Signal::TERM);
    let (status, _, logged) = worker.end();
    assert_eq!(status.code(), Some(143), "{logged}");
    assert!(asked.elapsed() < Duration::from_secs(10));
    let saved = std::fs::read_dir(folder.path())
        .unwrap()
        .filter(|entry| entry.as_ref().unwrap().file_name().to_string_lossy().starts_with("step-"));
    assert_eq!(saved.count(), 0);
}

#[test]
fn a_worker_whose_peers_never_come_still_stops_at_once() {
    let port = free_port();
    let worker = Worker::start("", &environment(0, 2, 0, port), None);
    wait_for("rank 0's port", || std::net::TcpStream::connect(("127.0.0.1", port)).ok());
    worker.signal(rustix::process::Signal::TERM);
    assert_eq!(worker.end().0.code(), Some(143));
}

#[test]
fn a_drain_commits_the_last_step_before_the_stop() {
    // Given three workers, of which rank 2's node drains.
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
        worker.signal(rustix::process::Signal::TERM);
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
