//! A few jobs of the fault campaign. `make campaign` runs all of them.

// Helpers of tests fail as tests do.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stdout)]

use std::process::Command;

use elastic_tests::requirement::skip;

/// The exit code of a campaign that cannot be run on this machine.
const CANNOT_RUN: i32 = 2;

/// What the campaign printed, and whether it succeeded. None where it cannot be run.
fn campaign(args: &[&str]) -> Option<(String, bool)> {
    let output = Command::new(env!("CARGO_BIN_EXE_elastic-campaign")).args(args).output().expect("run it");
    let said = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
    if output.status.code() == Some(CANNOT_RUN) {
        skip("NETNS", format_args!("the campaign cannot be run: {said}"));
        return None;
    }
    Some((said, output.status.success()))
}

/// So many jobs keep every promise.
fn all_hold(jobs: usize, args: &[&str]) {
    let Some((said, well)) = campaign(args) else { return };
    println!("{said}");
    assert!(well, "{said}");
    let last = format!("{jobs} jobs, 0 with a broken promise, 0 that could not be run");
    assert!(said.contains(&last), "{said}");
}

#[test]
fn jobs_on_hosts_of_their_own_survive_faults() {
    // Once, and in each round.
    let resets = "a host is reset";
    all_hold(3, &["--fault", "etcd's leader is killed", "--fault", resets, "--stage", "running"]);
}

#[test]
fn a_job_of_certificates_and_users_survives_their_expiry() {
    all_hold(1, &["--setting", "secured", "--fault", "an agent is killed while the nodes'", "--stage", "running"]);
}

/// A sixteenth of the campaign, drawn from all faults and stages.
#[test]
#[ignore = "takes ten minutes: make chaos"]
fn a_sample_of_the_campaign_breaks_no_promise() {
    all_hold(60, &["--sample", "60", "--seed", "3"]);
}

#[test]
#[ignore = "takes ten minutes: make chaos"]
fn a_sample_with_workers_of_pytorch_breaks_no_promise() {
    all_hold(30, &["--setting", "pytorch", "--sample", "30", "--seed", "3"]);
}

#[test]
#[ignore = "takes five minutes: make chaos"]
fn a_sample_of_certificates_and_users_breaks_no_promise() {
    all_hold(30, &["--setting", "secured", "--sample", "30", "--seed", "3"]);
}

/// Two minutes of `make soak`, after the job is old enough: long enough to see it run, too short for what grows slowly.
#[test]
#[ignore = "takes four minutes: make chaos"]
fn a_job_with_fault_after_fault_is_whole_again_each_time() {
    let words = ["--soak", "2", "--every", "1", "--fault", "is killed", "--fault", "is reset"];
    let Some((said, _)) = campaign(&words) else { return };
    let broken = said.lines().filter(|line| line.contains("BROKEN") && !line.contains(" grows from "));
    assert_eq!(broken.collect::<Vec<_>>(), Vec::<&str>::new(), "{said}");
    assert!(said.contains("| all |"), "{said}");
}
