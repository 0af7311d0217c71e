//! A host that is short of what it takes to start workers: this costs no restart, and a node that stays short leaves.

use elastic_tests::prelude::*;
use rustix::process::{Resource, Rlimit, getrlimit, prlimit};

use crate::agents::hosted::endpoint;

/// Sets the soft limit of an agent's descriptors; `None`: as high as may be.
fn descriptors(agent: &Agent, limit: Option<u64>) {
    let pid = Pid::from_raw(agent.pid() as i32);
    let Rlimit { maximum, .. } = getrlimit(Resource::Nofile);
    prlimit(pid, Resource::Nofile, Rlimit { current: limit.or(maximum), maximum }).unwrap();
}

/// Open files stay open, and nothing more can be opened.
const NONE_LEFT: Option<u64> = Some(3);

#[tokio::test]
async fn a_start_that_lacks_descriptors_is_charged_to_no_node() {
    let job = Job::met_by(&["--rdzv-backend=c10d", &endpoint()], "2").flag("--max-restarts=1");
    let host = job.start("a");
    let short = job.start("b");
    let first = job.runs(1, 2).await;
    descriptors(&short, NONE_LEFT);
    // This uses up the only restart.
    first.of("a").kill();
    for pause in ["250ms", "500ms", "1s"] {
        short.says(&format!("trying again in {pause}"), LIMIT).await;
    }
    descriptors(&short, None);
    let again = job.runs(first.number + 1, 2).await;
    assert_eq!(again.restarts(), 1);
    job.succeeds(&mut [host, short]).await;
}

#[tokio::test]
async fn a_node_that_stays_short_leaves_and_says_so() {
    let job = Job::met_by(&["--standalone"], "1").flag("--max-restarts=1").conf("start_timeout", "4s");
    let mut agent = job.start("a");
    let first = job.runs(1, 1).await;
    descriptors(&agent, NONE_LEFT);
    first.workers[0].kill();
    assert_eq!(agent.exit(LIMIT).await, 1, "{}", agent.output());
    let said = agent.output();
    assert!(said.contains("this node leaves the job: make room"), "{said}");
}
