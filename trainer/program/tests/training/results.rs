//! The same bits for every history of workers, and each sample once.

use std::collections::BTreeMap;
use std::fs::DirEntry;
use std::process::{Command, Stdio};
use std::thread::available_parallelism;

use clap::Parser;
use elastic_models::{Digits, tasks::digits};
use elastic_trainer::data::Order;
use elastic_trainer::program::Task;
use elastic_trainer::{Data, TrainError};
use serde_json::Value;

use crate::worker::{Worker, checksum, environment, free_port, last_step, run, trace, train, wait_for};

type Arguments = crate::worker::Words<digits::Flags>;

#[test]
fn the_digits_are_learned() {
    let learned = train("--epochs 30", 2, 0);
    let (model, digits) = Arguments::parse_from(["test"]).flags.make().unwrap();
    let (right, all) = digits::count_correct(&model, &digits, learned.parameters());
    assert!(right as f64 >= 0.96 * all as f64, "{right} of {all}");
}

#[test]
fn layers_wider_than_any_machine_holds_are_refused() {
    for (width, fits) in [("65536", true), ("65537", false), ("18446744073709551616", false), ("0", false)] {
        assert_eq!(Arguments::try_parse_from(["test", "--hidden", width]).is_ok(), fits, "{width}");
    }
}

#[test]
fn every_world_size_gives_the_same_bits() {
    let flags = "--epochs 3 --hidden 32,16 --shards 8";
    let alone = train(flags, 1, 0);
    for world_size in [2, 3, 5, 9] {
        assert!(train(flags, world_size, 0) == alone, "{world_size} workers");
    }
    for threads in ["3", "auto"] {
        assert!(train(&format!("{flags} --threads {threads}"), 2, 0) == alone, "{threads} threads");
    }
    assert_ne!(train(&format!("{flags} --seed 1"), 1, 0).parameters(), alone.parameters());
}

#[test]
fn a_changing_world_resumes_to_the_same_bits() {
    let undisturbed = train("--epochs 6 --hidden 32", 1, 0);
    let folder = tempfile::tempdir().unwrap();
    let flags = format!("--hidden 32 --checkpoint-every 10 --checkpoint-dir {}", folder.path().display());
    let mut last = None;
    for (round, (epochs, world_size)) in [(1, 2), (2, 5), (4, 3), (6, 1)].into_iter().enumerate() {
        last = Some(train(&format!("{flags} --epochs {epochs}"), world_size, round as u64));
    }
    assert!(last == Some(undisturbed));
}

#[test]
fn a_rate_that_changes_and_clipped_gradients_in_pieces_are_as_repeatable() {
    let flags = "--epochs 3 --hidden 16 --schedule cosine --warmup-steps 9 --lr-min 0.0001 --clip 0.2 --micro-batch 3";
    let alone = train(flags, 1, 0);
    assert!(train(flags, 3, 0) == alone);
    assert!(train(&format!("{flags} --threads 2"), 2, 0) == alone);
    // Each of these flags changes what is learned.
    for without in ["--schedule cosine", "--warmup-steps 9", "--clip 0.2", "--micro-batch 3"] {
        let other = train(&flags.replace(without, ""), 1, 0);
        assert_ne!(other.checksum(), alone.checksum(), "{without}");
    }
    // A cosine over another number of steps is another schedule.
    let folder = tempfile::tempdir().unwrap();
    let flags = format!("{flags} --checkpoint-dir {}", folder.path().display());
    train(&flags, 1, 0);
    let error = run(&flags.replace("--epochs 3", "--epochs 4"), environment(0, 1, 1, 0)).unwrap_err().to_string();
    assert!(error.contains("(over 69 steps)") && error.contains("(over 92 steps)"), "{error}");
}

#[test]
fn other_flags_do_not_continue_a_checkpoint() {
    let folder = tempfile::tempdir().unwrap();
    let flags = format!("--epochs 1 --checkpoint-dir {}", folder.path().display());
    train(&flags, 1, 0);
    let error = run(&format!("{flags} --batch 32"), environment(0, 1, 1, 0)).unwrap_err();
    assert!(matches!(error, TrainError::OtherSettings { .. }));
    let error = error.to_string();
    assert!(error.contains("--batch 64") && error.contains("--batch 32"), "{error}");
}

#[test]
fn a_plot_that_cannot_be_written_is_known_before_the_first_step() {
    let error = run("--epochs 100000 --plot /nowhere/loss.svg", environment(0, 1, 0, 0)).unwrap_err().to_string();
    assert!(error.contains("/nowhere/loss.svg") && error.contains("another --plot"), "{error}");
}

#[test]
fn killed_workers_lose_nothing_that_is_committed() {
    // Given a run that nothing disturbs.
    let folder = tempfile::tempdir().unwrap();
    let common = "--epochs 8 --hidden 64 --batch 50 --seed 5";
    let undisturbed_trace = folder.path().join("undisturbed");
    let undisturbed = train(&format!("{common} --trace {}", undisturbed_trace.display()), 1, 0);

    // When workers of changing number are killed again and again, each time well past the last checkpoint.
    let path = folder.path().join("trace");
    let checkpoints = folder.path().join("checkpoints");
    let flags =
        format!("{common} --checkpoint-every 60 --checkpoint-dir {} --trace {}", checkpoints.display(), path.display());
    let start = |round: u64, world_size| {
        let port = free_port();
        let rank = |rank| Worker::start(&flags, &environment(rank, world_size, round, port), None);
        (0..world_size).map(rank).collect::<Vec<Worker>>()
    };
    for (round, (world_size, victim, until)) in [(3, 1, 20), (2, 0, 80), (4, 3, 150)].into_iter().enumerate() {
        let mut workers = start(round as u64, world_size);
        // Of this round: the lines of those before it are still there.
        let reached = |line: &Value| line["round"] == round && line["step"].as_u64() >= Some(until);
        wait_for("some steps", || trace(&path).iter().any(reached).then_some(()));
        let killed = workers.remove(victim);
        killed.signal(rustix::process::Signal::KILL);
        for survivor in workers {
            let (status, _, logged) = survivor.end();
            assert_eq!(status.code(), Some(1), "{logged}");
            assert!(logged.contains("lost rank"), "{logged}");
        }
    }
    let mut printed = String::new();
    for worker in start(3, 3) {
        printed += &worker.succeeds().0;
    }

    // Then the parameters at the end are the same, bit for bit.
    assert_eq!(checksum(&printed), format!("{:08x}", undisturbed.checksum()));
    // And each sample of each epoch is in exactly one of the committed steps, whose losses are those of the undisturbed
    // run.
    let counting = |lines: &[Value]| -> BTreeMap<u64, Value> {
        let steps = lines.iter().filter(|line| line["event"] == "step");
        steps.map(|line| (line["step"].as_u64().unwrap(), line.clone())).collect()
    };
    let (steps, expected) = (counting(&trace(&path)), counting(&trace(&undisturbed_trace)));
    assert!(steps.keys().copied().eq(1..=undisturbed.step), "no step is missing");
    let samples = Digits::load(None, false).unwrap().train.samples();
    let order = Order::new(5, samples);
    let mut times = BTreeMap::<(u64, u64), u32>::new();
    for (step, line) in &steps {
        assert_eq!(line["loss"], expected[step]["loss"], "step {step}");
        let epoch = line["epoch"].as_u64().unwrap();
        for place in line["first"].as_u64().unwrap()..line["end"].as_u64().unwrap() {
            *times.entry((epoch, order.sample(epoch, place))).or_default() += 1;
        }
    }
    assert_eq!(times.len() as u64, 8 * samples);
    assert!(times.values().all(|&times| times == 1));
    // And steps were really lost and done again.
    assert!(trace(&path).iter().filter(|line| line["event"] == "step").count() > steps.len());
}

/// The threads besides the first that compute, of a worker that shares its node with so many.
fn threads_beside(workers: usize) -> usize {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("trace");
    let mut worker = Command::new(env!("CARGO_BIN_EXE_elastic-trainer"));
    worker.args(["digits", "--device=cpu", "--threads=auto", "--epochs=1000000", "--trace"]).arg(&path);
    let mut worker = worker.env("LOCAL_WORLD_SIZE", workers.to_string()).stdout(Stdio::null()).spawn().unwrap();
    let named = |task: DirEntry| std::fs::read_to_string(task.path().join("comm")).unwrap_or_default();
    let count = wait_for("a step", || {
        last_step(&path, "step")?;
        let tasks = std::fs::read_dir(format!("/proc/{}/task", worker.id())).unwrap().flatten();
        Some(tasks.map(named).filter(|name| name.starts_with("compute-")).count())
    });
    worker.kill().unwrap();
    worker.wait().unwrap();
    count
}

#[test]
fn threads_are_as_many_as_processors_and_shared_by_a_nodes_workers() {
    let processors = available_parallelism().unwrap().get();
    assert_eq!(threads_beside(1), processors - 1);
    assert_eq!(threads_beside(processors), 0);
}
