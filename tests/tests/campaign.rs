//! A few jobs of the fault campaign (`elastic_tests::campaign`). `make campaign` plays all of them.

use std::process::Command;

use elastic_tests::binaries::binary;
use elastic_tests::requirement::skip;

/// What the campaign ends with where it could not play.
const NOT_PLAYED: i32 = 2;

#[test]
fn jobs_on_hosts_of_their_own_outlive_faults() {
    let words = ["--fault", "etcd's leader is killed", "--fault", "a host is reset", "--phase", "running"];
    let output = Command::new(binary("elastic-campaign")).args(words).output().expect("run it");
    let said = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
    if output.status.code() == Some(NOT_PLAYED) {
        return skip("NETNS", format_args!("the campaign cannot be played: {said}"));
    }
    assert!(output.status.success(), "{said}");
    assert!(said.contains("2 jobs, 0 with a broken promise"), "{said}");
}

/// A sixteenth of the campaign, drawn from all faults and moments.
#[test]
#[ignore = "takes ten minutes: make chaos"]
fn a_sample_of_the_campaign_breaks_no_promise() {
    let output =
        Command::new(binary("elastic-campaign")).args(["--sample", "60", "--seed", "3"]).output().expect("run it");
    let said = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
    if output.status.code() == Some(NOT_PLAYED) {
        return skip("NETNS", format_args!("the campaign cannot be played: {said}"));
    }
    println!("{said}");
    assert!(output.status.success(), "{said}");
    assert!(said.contains("60 jobs, 0 with a broken promise, 0 that could not be played"), "{said}");
}

/// Two minutes of `make soak`: long enough to see it at work, too short for what grows slowly.
#[test]
#[ignore = "takes two minutes: make chaos"]
fn a_job_that_is_struck_again_and_again_is_whole_again_each_time() {
    let words = ["--soak", "2", "--every", "1", "--fault", "is killed", "--fault", "is reset"];
    let output = Command::new(binary("elastic-campaign")).args(words).output().expect("run it");
    let said = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
    if output.status.code() == Some(NOT_PLAYED) {
        return skip("NETNS", format_args!("it cannot be played: {said}"));
    }
    let broken = said.lines().filter(|line| line.contains("BROKEN") && !line.contains(" grows from "));
    assert_eq!(broken.collect::<Vec<_>>(), Vec::<&str>::new(), "{said}");
    assert!(said.contains("| all |"), "{said}");
}
