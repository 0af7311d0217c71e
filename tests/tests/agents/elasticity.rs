//! Nodes that come and go as planned, nodes of several sizes, and spares.

use elastic_tests::prelude::*;

#[tokio::test]
async fn a_job_grows_shrinks_and_grows_again() {
    let job = Job::on_etcd("1:3").await.prompt().flag("--max-restarts=0");

    // Given one node at work, when two come, then they are taken in together, behind the first
    let mut a = job.start("a");
    assert_eq!(job.runs(1, 1).await.number, 1);
    let [mut b, mut c] = job.start_all(["b", "c"]);
    let grown = job.runs(2, 3).await;
    assert_eq!((grown.nodes()[0], grown.restarts()), ("a", 0));

    // When one is asked to leave, then it leaves with a code of its own, and the others continue at once
    b.signal(Signal::TERM);
    let fewer = job.runs_within(grown.number + 1, 2, AT_ONCE).await;
    assert_eq!((fewer.nodes(), fewer.restarts()), (vec!["a", "c"], 0));
    assert_eq!(b.exit(LIMIT).await, 3);
    assert!(b.output().contains("this node has left the job"), "{}", b.output());

    // When the leader itself is asked to leave, then a successor seals, as soon
    assert_eq!(job.leader().await, "a");
    a.signal(Signal::TERM);
    let alone = job.runs_within(fewer.number + 1, 1, AT_ONCE).await;
    assert_eq!((alone.nodes(), alone.restarts()), (vec!["c"], 0));
    assert_eq!(a.exit(LIMIT).await, 3);

    // When a node comes back, then it gets the last place
    a = job.start("a");
    let last = job.runs(alone.number + 1, 2).await;
    assert_eq!((last.nodes(), last.restarts()), (vec!["c", "a"], 0));
    job.succeeds([&mut a, &mut c]).await;
}

#[tokio::test]
async fn an_agent_that_is_killed_and_started_again_is_back_at_once() {
    const SOON: Duration = Duration::from_secs(5);
    // Given a job that grows only when its round is old, and whose minimum is met without the node that is killed
    let job = Job::on_etcd("2:3").await.prompt().gathers().conf("min_round_time", "30s").flag("--max-restarts=0");
    let mut agents = job.start_all(["a", "b", "c"]);
    let first = job.runs(1, 3).await;
    let rest: Vec<&str> = first.nodes().into_iter().filter(|node| *node != "c").collect();
    agents[2].kill();
    let without = job.runs_within(first.number + 1, 2, AT_ONCE).await;
    assert_eq!(without.nodes(), rest);

    // when it is started again, then it is back long before the round is old
    let begun = Instant::now();
    agents[2] = job.start("c");
    let with = job.runs_within(without.number + 1, 3, SOON).await;
    eprintln!("back {} ms after its agent was started", begun.elapsed().as_millis());
    assert_eq!((with.nodes(), with.restarts()), ([&rest[..], &["c"]].concat(), 0));
    job.succeeds(&mut agents).await;
}

#[tokio::test]
async fn nodes_of_one_job_may_differ_in_size() {
    let job = Job::on_etcd("3").await.prompt().flag("--max-restarts=1");
    let sizes = [("a", 2), ("b", 1), ("c", 3)];
    let mut agents = sizes.map(|(name, size)| job.start_with(name, &[&format!("--nproc-per-node={size}")]));

    let round = job.runs(1, 6).await;
    let expect_sizes = |round: &elastic_tests::agents::Round| {
        for (name, size) in sizes {
            let own: Vec<_> = round.workers.iter().filter(|worker| worker.node == name).collect();
            assert_eq!(own.len(), size, "{own:?}");
            assert!(own.iter().all(|worker| worker.local_world_size as usize == size && worker.group_world_size == 3));
        }
        assert_eq!(round.workers.iter().map(|worker| worker.rank).collect::<Vec<_>>(), [0, 1, 2, 3, 4, 5]);
    };
    expect_sizes(&round);

    // When one of a node's workers fails, then all six start again in their places
    round.workers[5].kill();
    let again = job.runs_within(2, 6, AT_ONCE).await;
    expect_sizes(&again);
    assert_eq!((again.nodes(), again.restarts()), (round.nodes(), 1));

    // When a part of a node's workers is done, then the round continues until all are
    again.workers[0].exit(0);
    eventually("the first worker ends", LIMIT, async || (!again.workers[0].is_alive()).then_some(())).await;
    again.workers[1..].iter().for_each(|worker| worker.exit(0));
    assert_eq!(exits(&mut agents).await, [0, 0, 0]);
    assert_eq!(job.workers().len(), 12);
}

#[tokio::test]
async fn a_spare_waits_takes_over_and_shares_the_result() {
    let job = Job::on_etcd("2").await.prompt().flag("--max-restarts=0");
    let mut a = job.start("a");
    assert_eq!(job.leader().await, "a");
    let mut b = job.start("b");
    let first = job.runs(1, 2).await;

    // Given a third node that finds the round full, when it waits, then no one else notices
    let mut spare = job.start("spare");
    eventually("the spare is known", LIMIT, async || {
        job.record("nodes/spare").await.filter(|node| node["phase"] == "waiting")
    })
    .await;
    assert_eq!(job.runs(1, 2).await, first);

    // When a member dies, then the spare takes its place
    b.kill();
    let second = job.runs_within(2, 2, AT_ONCE).await;
    assert_eq!((second.nodes(), second.restarts()), (vec!["a", "spare"], 0));

    // When the member comes back, then it is the spare, and leaves with the job's success
    b = job.start("b");
    eventually("the new spare is known", LIMIT, async || {
        job.record("nodes/b:").await.filter(|node| node["phase"] == "waiting")
    })
    .await;
    assert_eq!(job.runs(1, 2).await, second);
    job.succeeds([&mut a, &mut b, &mut spare]).await;
}
