//! The flight recorder's file after the loss of a worker.

use rustix::process::Signal;
use serde_json::Value;

use crate::worker::{Worker, environment, free_port, last_step, wait_for};

/// Sends `signal` to one of two workers while they train. Returns what the other one logs, and its record.
fn survivor_of(signal: Signal) -> (String, Value) {
    let folder = tempfile::tempdir().unwrap();
    let (port, trace) = (free_port(), folder.path().join("trace"));
    let flags = format!("--hidden 512,512 --epochs 4000 --peer-timeout 2 --trace {}", trace.display());
    let start = |rank: u32| {
        let own = folder.path().join(rank.to_string());
        std::fs::create_dir(&own).unwrap();
        Worker::start(&flags, &environment(rank, 2, 5, port), Some(&own.join("error.json")))
    };
    let (survivor, lost) = (start(0), start(1));
    wait_for("some steps", || last_step(&trace, "step").filter(|&step| step > 3));
    lost.signal(signal);
    let (status, _, logged) = survivor.end();
    assert!(!status.success());
    let path = folder.path().join("0/collectives-round-5-rank-0.json");
    assert!(logged.contains(path.to_str().unwrap()), "the error names the file: {logged}");
    (logged, serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap())
}

#[test]
fn a_lost_workers_survivor_leaves_a_record() {
    for (signal, said) in [(Signal::KILL, "lost rank 1"), (Signal::STOP, "rank 1 sent nothing for 2.0 s")] {
        let (logged, record) = survivor_of(signal);
        assert!(logged.contains(said), "{logged}");
        assert_eq!((&record["round"], &record["rank"], &record["world_size"]), (&5.into(), &0.into(), &2.into()));
        assert!(record["error"].as_str().unwrap().contains(said), "{record}");
        let operations = record["operations"].as_array().unwrap();
        let (last, before) = operations.split_last().unwrap();
        assert!(before.iter().all(|operation| operation["state"] == "done"), "{record}");
        assert_eq!((&last["state"], &last["operation"]), (&"given up".into(), &"ordered sum".into()));
        assert_eq!((&last["peers"][0]["rank"], &last["peers"][0]["owes"]), (&1.into(), &true.into()), "{last}");
    }
}
