//! Nodes that get no place: since they failed again and again, or since an operator says so.

use elastic_tests::prelude::*;

async fn describes(job: &Job, told: &str) {
    eventually(&format!("describe tells of {told:?}"), LIMIT, async || {
        job.ctl_ok(&["describe", "job"]).await.contains(told).then_some(())
    })
    .await;
}

fn sorted(round: &Round) -> Vec<&str> {
    let mut nodes = round.nodes();
    nodes.sort_unstable();
    nodes
}

async fn three(flags: &[&str]) -> (Job, [Agent; 3]) {
    let job = Job::on_etcd("1:3").await.gathers().flag("--max-restarts=9");
    let job = flags.iter().fold(job, |job, flag| job.flag(flag));
    let agents = job.start_all(["a", "b", "c"]);
    job.runs(1, 3).await;
    (job, agents)
}

#[tokio::test]
async fn a_node_that_fails_again_and_again_sits_out_until_it_is_taken_back() {
    let (job, mut agents) = three(&["--exclude-after=2"]).await;

    // When b's workers fail twice, then the others continue without it, and it waits
    for number in [1, 2] {
        job.runs(number, 3).await.of("b").exit(9);
    }
    let round = job.runs(3, 2).await;
    assert_eq!((sorted(&round), round.restarts()), (vec!["a", "c"], 2));
    describes(&job, "b is excluded for 5 min").await;
    describes(&job, "it is excluded for 5 min from round 3 on, since the job failed by its workers").await;
    let events = job.ctl_ok(&["events", "job"]).await;
    assert!(events.contains("; b is excluded for 5 min, since it failed 2 times"), "{events}");
    let seen = job.ctl_ok(&["doctor", "job"]).await;
    assert!(seen.contains("elasticctl include job b"), "{seen}");

    // and when it is taken back, then it joins at no charge
    let (taken, text) = job.ctl(&["include", "job", "c"]).await;
    assert!(!taken && text.contains("excluded are b"), "{text}");
    let text = job.ctl_ok(&["include", "job", "b"]).await;
    assert!(text.contains("taken back b"), "{text}");
    let round = job.runs(4, 3).await;
    assert_eq!(round.restarts(), 2);
    describes(&job, "b was excluded once and failed not once since").await;
    job.succeeds(&mut agents).await;
}

#[tokio::test]
async fn an_operator_excludes_a_node_takes_it_back_and_evicts_another() {
    let (job, mut agents) = three(&[]).await;

    let text = job.ctl_ok(&["exclude", "job", "b"]).await;
    assert!(text.contains("excluded b"), "{text}");
    assert_eq!(sorted(&job.runs(2, 2).await), ["a", "c"]);
    describes(&job, "the operator excludes it: until it is included").await;
    // A host that is not here yet can be excluded; one that comes then waits.
    let text = job.ctl_ok(&["exclude", "job", "d"]).await;
    assert!(text.contains("no node d is here now"), "{text}");
    let mut d = job.start("d");
    eventually("d waits", LIMIT, async || {
        (job.ctl_ok(&["describe", "job"]).await.matches("the operator excludes it").count() == 2).then_some(())
    })
    .await;
    job.ctl_ok(&["include", "job", "b"]).await;
    assert_eq!(job.runs(3, 3).await.restarts(), 0);

    // Who is evicted ends at once, with its workers, and may come again.
    let (found, text) = job.ctl(&["evict", "job", "e"]).await;
    assert!(!found && text.contains("no node \"e\""), "{text}");
    job.ctl_ok(&["evict", "job", "c"]).await;
    let [a, b, mut c] = agents;
    assert_eq!(c.exit(LIMIT).await, 1);
    let output = c.output();
    assert!(output.contains("the operator evicted this node"), "{output}");
    let round = job.runs(4, 2).await;
    assert_eq!((sorted(&round), round.restarts()), (vec!["a", "b"], 0));
    let again = job.start("c");
    let round = job.runs(5, 3).await;
    round.exit(0);
    agents = [a, b, again];
    assert_eq!(exits(&mut agents).await, [0, 0, 0]);
    assert_eq!(d.exit(LIMIT).await, 0);
}
