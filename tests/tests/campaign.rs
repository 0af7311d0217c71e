//! A few jobs of the fault campaign (`elastic_tests::campaign`). `make campaign` plays all of them.

use std::process::Command;

use elastic_tests::binaries::binary;
use elastic_tests::requirement::skip;

/// What the campaign ends with where it could not play.
const NOT_PLAYED: i32 = 2;

/// What the campaign says, if it can be played here, and whether it ended well.
fn play(words: &[&str]) -> Option<(String, bool)> {
    let output = Command::new(binary("elastic-campaign")).args(words).output().expect("run it");
    let said = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
    if output.status.code() == Some(NOT_PLAYED) {
        skip("NETNS", format_args!("the campaign cannot be played: {said}"));
        return None;
    }
    Some((said, output.status.success()))
}

/// So many jobs keep every promise.
fn all_hold(jobs: usize, words: &[&str]) {
    let Some((said, well)) = play(words) else { return };
    println!("{said}");
    assert!(well, "{said}");
    let last = format!("{jobs} jobs, 0 with a broken promise, 0 that could not be played");
    assert!(said.contains(&last), "{said}");
}

#[test]
fn jobs_on_hosts_of_their_own_outlive_faults() {
    all_hold(2, &["--fault", "etcd's leader is killed", "--fault", "a host is reset", "--phase", "running"]);
}

#[test]
fn a_job_of_certificates_and_users_outlives_their_end() {
    all_hold(1, &["--setting", "secured", "--fault", "an agent is killed while the nodes'", "--phase", "running"]);
}

/// A sixteenth of the campaign, drawn from all faults and moments.
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

/// Two minutes of `make soak`, after the job has come of age: long enough to see it at work, too short for what grows slowly.
#[test]
#[ignore = "takes four minutes: make chaos"]
fn a_job_that_is_struck_again_and_again_is_whole_again_each_time() {
    let words = ["--soak", "2", "--every", "1", "--fault", "is killed", "--fault", "is reset"];
    let Some((said, _)) = play(&words) else { return };
    let broken = said.lines().filter(|line| line.contains("BROKEN") && !line.contains(" grows from "));
    assert_eq!(broken.collect::<Vec<_>>(), Vec::<&str>::new(), "{said}");
    assert!(said.contains("| all |"), "{said}");
}
