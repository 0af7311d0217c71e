//! The GPT as a command: what it learns, and the promises that hold for it as for the digits.

use std::io::{BufRead, BufReader, Read};
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, Stdio};

use clap::Parser;
use elastic_models::tasks::gpt;
use elastic_trainer::program::Task;
use elastic_trainer::{Data, Elastic};
use rustix::process::{Pid, Signal, kill_process};

use crate::agent::{start_group, start_member};
use crate::worker::{checksum, environment, last_step, places, trace, train};

/// A network that takes one or two milliseconds a step.
const SMALL: &str =
    "gpt --context 16 --layers 1 --heads 2 --width 16 --vocabulary 16 --windows 200 --batch 24 --shards 6";

type Arguments = crate::worker::Words<gpt::Flags>;

#[test]
fn it_learns_what_can_be_learned() {
    let flags = "gpt --context 16 --layers 1 --heads 2 --width 32 --vocabulary 16 --windows 1500 --epochs 10 --lr 0.01";
    let learned = train(flags, 2, 0);
    let (model, corpus) = Arguments::parse_from(flags.split_whitespace()).flags.make().unwrap();
    let (loss, _) = gpt::Flags::held_out_loss(&model, &corpus, learned.parameters()).unwrap();
    let reachable = corpus.reachable_loss().unwrap();
    // A model that looks back on only one token cannot go below 1.70, as counting shows.
    assert!(loss > reachable - 0.02 && loss < reachable + 0.15, "held-out loss {loss}, {reachable} is reachable");
}

#[test]
fn a_changing_group_and_a_checkpoint_lead_to_the_same_bits_with_each_window_once() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("trace");
    let undisturbed = train(&format!("{SMALL} --epochs 100 --checkpoint-every 50"), 1, 0);
    let flags = format!(
        "{SMALL} --epochs 100 --checkpoint-every 50 --trace {} --checkpoint-dir {}",
        path.display(),
        folder.path().display()
    );

    // Given two workers; when a third comes, then it gets what they have in memory.
    let mut group = start_group(folder.path(), &flags, 1, 2, None);
    group[0].0.step_reached(60);
    for (agent, _) in &group {
        agent.forming(2, std::time::Duration::from_secs(40));
    }
    let boundary = group[0].0.quiesced(2);
    let next = places(2, 3);
    for ((agent, _), place) in group.iter().zip(&next) {
        agent.assign(place);
    }
    group.push(start_member(folder.path(), &flags, next[2].clone(), None));
    // When all are killed, then the next group resumes from what is committed.
    group[0].0.step_reached(boundary + 60);
    let committed = group[0].0.last_commit();
    for (_, worker) in &group {
        worker.signal(rustix::process::Signal::KILL);
    }
    group.clear();
    let mut printed = String::new();
    for (_agent, worker) in start_group(folder.path(), &flags, 3, 2, Some(&committed)) {
        printed += &worker.succeeds().0;
    }
    assert_eq!(checksum(&printed), format!("{:08x}", undisturbed.checksum()));
    assert!(printed.contains("held-out loss "), "{printed}");

    // And the committed steps contain each window of an epoch once.
    let lines = trace(&path);
    let begins = lines.iter().filter(|line| line["event"] == "begin");
    let begun: Vec<u64> = begins.map(|line| line["step"].as_u64().unwrap()).collect();
    assert_eq!(begun, [0, boundary, committed.step]);
    let mut next = (0, 0);
    for step in 1..=undisturbed.step {
        let line = lines.iter().rev().find(|line| line["event"] == "step" && line["step"] == step).unwrap();
        let [epoch, first, end] = ["epoch", "first", "end"].map(|field| line[field].as_u64().unwrap());
        assert_eq!((epoch, first), next, "step {step}");
        next = if end == 200 { (epoch + 1, 0) } else { (epoch, end) };
    }
    assert_eq!(next, (100, 0));
    assert_eq!(last_step(&path, "committed"), Some(undisturbed.step));
}

#[test]
fn a_network_that_cannot_be_is_refused() {
    let flags = Arguments::parse_from(["gpt", "--width", "10", "--heads", "4"]).flags;
    let error = flags.make().unwrap_err().to_string();
    assert!(error.contains("a width of 10 is not divisible by 4 heads") && error.contains("--heads"), "{error}");
    assert!(Arguments::try_parse_from(["gpt", "--vocabulary", "3"]).is_err());
    for flags in
        [["gpt", "--layers", "5000"], ["gpt", "--width", "4611686018427387904"], ["gpt", "--context", "1048577"]]
    {
        let error = Arguments::parse_from(flags).flags.make().unwrap_err().to_string();
        assert!(error.contains(&format!("{} is {}, not 1 to ", flags[1], flags[2])), "{error}");
    }
    let flags =
        Arguments::parse_from(["gpt", "--windows", "18446744073709551615", "--batch", "1", "--device", "cpu"]).flags;
    let elastic = Elastic::new(flags.settings.clone(), environment(0, 1, 0, 0));
    let (model, corpus) = flags.make().unwrap();
    let error = elastic.run(&model, &corpus).unwrap_err().to_string();
    assert!(error.contains("--epochs 4 of 18446744073709551615 samples are too many steps"), "{error}");
}

#[test]
fn a_result_that_is_not_to_be_judged_is_not() {
    let flags = Arguments::parse_from(["gpt", "--size", "gpt2", "--held-out", "0"]).flags;
    let (model, corpus) = flags.make().unwrap();
    // Without any parameters
    assert_eq!(flags.judge(&model, &corpus, &[]).unwrap(), "the result is not judged (--held-out 0)");
}

#[test]
fn a_long_judgement_is_announced_and_a_signal_ends_it() {
    let flags = "gpt --width 512 --layers 6 --windows 1 --batch 1 --shards 1 --epochs 1 --device cpu";
    let mut worker = Command::new(env!("CARGO_BIN_EXE_elastic-trainer"))
        .args(flags.split(' '))
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut logged = BufReader::new(worker.stderr.take().unwrap()).lines().map_while(Result::ok);
    assert!(logged.any(|line| line.contains("windows that were not trained on takes about")), "it is announced");
    kill_process(Pid::from_child(&worker), Signal::TERM).unwrap();
    let status = worker.wait().unwrap();
    assert_eq!(status.signal(), Some(Signal::TERM.as_raw()), "{status}");
    let mut printed = String::new();
    worker.stdout.take().unwrap().read_to_string(&mut printed).unwrap();
    assert!(printed.contains("done: 1 steps") && !printed.contains("held-out loss"), "{printed}");
}
