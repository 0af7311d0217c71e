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
