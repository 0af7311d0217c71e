//! Machines that are checked before their node joins. The GPUs are a stand-in's: see `gpus`.

use elastic_tests::prelude::*;

use crate::agents::gpus::with_library;

const UNFIT: i32 = 1;

#[tokio::test]
async fn an_unfit_machine_never_joins_and_says_all_that_is_wrong() {
    let etcd = EtcdServer::start(EtcdOptions::default()).await;
    let job = with_library(Job::on(&etcd, "1:2"), r#"{"GPU-a",0,1,0}"#);
    let mut a = job.start_with("a", &["--preflight", "--preflight-command=true"]);
    a.says("preflight: GPU 0 is healthy", LIMIT).await;
    a.says("preflight: `true` finds this machine fit", LIMIT).await;
    job.runs(1, 1).await;

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
    let nodes = job.records("nodes/").await;
    assert!(nodes.len() == 1 && nodes[0]["name"] == "a", "{nodes:?}");
    assert_eq!(job.round().map(|round| round.number), Some(1), "the others continue");
    job.succeeds([&mut a]).await;
}

#[tokio::test]
async fn a_gpu_that_is_gone_and_one_that_does_not_answer_are_unfit() {
    for (gpus, workers, finding) in [
        (r#"{"GPU-a",0,1,0}"#, "2", "2 workers need a GPU each, and there are 1"),
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

/// Starts an agent that takes this machine for another one: its boot has another id.
fn start_elsewhere(job: &Job, name: &str, flags: &[&str]) -> Agent {
    let boot = job.path("boot").display().to_string();
    std::fs::write(&boot, "6f0e9d0c-0b0a-4f3e-8f57-000000000001\n").unwrap();
    let script = r#"mount --bind "$0" /proc/sys/kernel/random/boot_id && exec "$@""#;
    job.start_through(
        &["unshare", "--mount", "sh", "-c", script, &boot],
        name,
        &[&["--local-addr=127.0.0.1"], flags].concat(),
    )
}

#[tokio::test]
async fn a_machine_behind_a_slow_link_never_joins() {
    if !Command::new("unshare").args(["--mount", "true"]).status().is_ok_and(|status| status.success()) {
        return skip("NETNS", "no mount namespace can be made");
    }
    let job = Job::on_etcd("1:2").await;
    let nobody = "preflight, unknown: bandwidth to a node of the job: no node of it is on another machine yet";

    // The first has no one to measure from.
    let mut a = job.start_with("a", &["--preflight-peer-bandwidth=1Mbit"]);
    a.says(nobody, LIMIT).await;
    job.runs(1, 1).await;

    // What no machine reaches.
    let mut b = start_elsewhere(&job, "b", &["--preflight-peer-bandwidth=9000Gbit"]);
    assert_eq!(b.exit(LIMIT).await, UNFIT);
    let said = b.output();
    for part in [
        "this machine is not fit to take part (--preflight): ",
        "bit/s from node a at 127.0.0.1:",
        ", of 9000 Gbit/s needed: look at the speed and the errors of this machine's link",
    ] {
        assert!(said.contains(part), "{part:?}: {said}");
    }
    a.says("measures its bandwidth to here", LIMIT).await;
    let nodes = job.records("nodes/").await;
    assert!(nodes.len() == 1 && nodes[0]["name"] == "a", "{nodes:?}");
    assert_eq!(job.round().map(|round| round.number), Some(1), "the others continue");

    // What the loopback interface does.
    let mut b = start_elsewhere(&job, "b", &["--preflight-peer-bandwidth=1Mbit"]);
    b.says(", of 1 Mbit/s needed", LIMIT).await;
    let round = job.runs(2, 2).await;
    round.exit(0);
    assert_eq!([a.exit(LIMIT).await, b.exit(LIMIT).await], [0, 0]);
}
