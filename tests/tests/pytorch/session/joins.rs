//! A node joins over a slow link while others train.

use elastic_tests::prelude::*;

use crate::agents::networks::Hosts;
use crate::pytorch::trace::{ended, lines, works};

/// Bytes of the script's state, and what the link carries in a second.
const STATE: f64 = 160e6;
const RATE: f64 = 25e6;

#[tokio::test]
async fn a_newcomer_gets_a_large_state_while_the_others_train() {
    let Some(torch) = Torch::find() else { return };
    let Some(hosts) = Hosts::new("joins") else { return };
    hosts.slow_down(&format!("{}bit", RATE * 8.0));
    let job = Job::met_by(&["--rdzv-backend=c10d", "--rdzv-endpoint=10.77.1.1:29400"], "1:2").flag("--warm-up=120");
    let job = job.script(&torch, "trains_a_large_state.py", &[]);
    let mut agents = vec![hosts.start(&job, 0, &[])];
    let first = works(&job, "applied", 1, 1).await;

    // When a node joins whose way is slow
    agents.push(hosts.start(&job, 1, &[]));
    job.write("sum", "");
    let both = works(&job, "applied", first + 1, 2).await;
    job.write("end", "");
    ended(&mut agents, 0).await;

    // Then the other has never waited as long as the state takes, and both have the same
    let told = lines(&job);
    let of_a: Vec<f64> = told.iter().filter(|line| line.text("node") == "a").map(|line| line.real("at")).collect();
    let longest = of_a.windows(2).map(|two| two[1] - two[0]).fold(0.0, f64::max);
    let takes = STATE / RATE;
    assert!(longest < takes / 2.0, "it waited {longest:.1} s, and the state takes {takes:.1} s");
    let joined: Vec<_> = told.iter().filter(|line| line.number("round") == both).collect();
    for line in &joined {
        let other =
            joined.iter().find(|other| other.number("step") == line.number("step") && other.text("node") == "a");
        assert_eq!(other.map(|other| other.real("sum")), Some(line.real("sum")), "{line:?}");
    }
    assert!(joined.iter().any(|line| line.text("node") == "b") && joined.iter().all(|line| line.real("sum") != 0.0));
}
