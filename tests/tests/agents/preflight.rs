//! Machines that are looked at before their node joins. The GPUs are a stand-in's: see `gpus`.

use std::time::{Duration, Instant};

use elastic_tests::agents::{Job, LIMIT};
use elastic_tests::etcd::{EtcdOptions, EtcdServer};

use crate::agents::gpus::with_library;

/// An agent that could not take part.
const UNFIT: i32 = 1;

#[tokio::test]
async fn an_unfit_machine_never_joins_and_says_all_that_is_wrong() {
    let etcd = EtcdServer::start(EtcdOptions::default()).await;
    let job = with_library(Job::on(&etcd, "1:2"), r#"{"GPU-a",0,1,0}"#);
    let mut a = job.start_with("a", &["--preflight", "--preflight-command=true"]);
    a.says("preflight: GPU 0 is well", LIMIT).await;
    a.says("preflight: `true` finds this machine fit", LIMIT).await;
    let round = job.runs(1, 1).await;

    // Another machine of the job, whose GPU has had memory errors.
    let other = with_library(Job::on(&etcd, "1:2"), r#"{"GPU-b",0,2,0,{0},3,1}"#);
    let mut b = other.start_with("b", &["--preflight", "--preflight-command=echo no link; exit 3"]);
    assert_eq!(b.exit(LIMIT).await, UNFIT);
    let said = b.output();
    for finding in [
        "this machine is not fit to take part (--preflight): ",
        "GPU 0 has had 3 uncorrected memory errors since the driver started: reset it",
        "GPU 0 has rows of its memory to remap",
        "`echo no link; exit 3` ended with exit code 3: no link",
    ] {
        assert!(said.contains(finding), "{finding:?}: {said}");
    }
    let nodes = job.records(&etcd, "nodes/").await;
    assert!(nodes.len() == 1 && nodes[0]["name"] == "a", "{nodes:?}");
    assert_eq!(job.round().map(|round| round.number), Some(1), "the others go on");
    round.exit(0);
    assert_eq!(a.exit(LIMIT).await, 0);
}

#[tokio::test]
async fn a_gpu_that_is_gone_and_one_that_does_not_answer_are_unfit() {
    for (gpus, workers, finding) in [
        (r#"{"GPU-a",0,1,0}"#, "2", "1 GPUs are there for 2 workers"),
        (r#"{"GPU-a",0,1,0},{"GPU-b",0,2,0,{0},0,0,1}"#, "2", "GPU 1 does not answer: "),
    ] {
        let job = with_library(Job::met_by(&["--standalone"], "1"), gpus);
        let mut agent = job.start_with("a", &["--preflight", &format!("--nproc-per-node={workers}")]);
        assert_eq!(agent.exit(LIMIT).await, UNFIT);
        assert!(agent.output().contains(finding), "{}", agent.output());
        assert!(job.workers().is_empty());
    }
}

#[tokio::test]
async fn a_command_that_takes_too_long_is_ended_with_its_children() {
    let job = Job::met_by(&["--standalone"], "1");
    let begun = Instant::now();
    let command = "--preflight-command=sleep 1000 & echo $! > child; wait";
    let mut agent = job.start_with("a", &[command, "--preflight-timeout=500ms"]);
    assert_eq!(agent.exit(LIMIT).await, UNFIT);
    assert!(agent.output().contains("took longer than --preflight-timeout (500ms)"), "{}", agent.output());
    assert!(begun.elapsed() < Duration::from_secs(20));
    let child = std::fs::read_to_string(job.path("child")).unwrap();
    let state = std::fs::read_to_string(format!("/proc/{}/stat", child.trim())).unwrap_or_default();
    assert!(state.is_empty() || state.contains(") Z "), "it is still there: {state}");
}
