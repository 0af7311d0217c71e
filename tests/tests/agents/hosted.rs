//! Jobs without etcd: an agent serves the store, or a single node needs none.

use elastic_tests::prelude::*;

/// The flag for an address on which nothing listens yet.
pub(crate) fn endpoint() -> String {
    format!("--rdzv-endpoint=127.0.0.1:{}", free_port())
}

#[tokio::test]
async fn the_first_agent_serves_the_others() {
    let job = Job::met_by(&["--rdzv-backend=c10d", &endpoint()], "3").flag("--max-restarts=1");
    let mut a = job.start("a");
    a.says("this agent serves the job's store", LIMIT).await;
    let [mut b, mut c] = job.start_all(["b", "c"]);
    let first = job.runs(1, 3).await;

    first.of("b").kill();
    let second = job.runs(2, 3).await;
    assert_eq!((second.nodes(), second.restarts()), (first.nodes(), 1));
    job.succeeds([&mut a, &mut b, &mut c]).await;
}

#[tokio::test]
async fn agents_started_at_once_agree_on_who_serves() {
    let job = Job::met_by(&["--rdzv-backend=c10d", &endpoint()], "3");
    let mut agents = job.start_all(["a", "b", "c"]);
    job.runs(1, 3).await;
    job.succeeds(&mut agents).await;
}

#[tokio::test]
async fn a_node_that_comes_after_the_jobs_end_hears_that_it_may_be_late() {
    let endpoint = endpoint();
    let job = || Job::met_by(&["--rdzv-backend=c10d", &endpoint], "1:2").conf("join_timeout", "15m");
    let first = job();
    let mut agents = [first.start("a")];
    first.runs(1, 1).await;
    first.succeeds(&mut agents).await;
    // On a machine that has another address.
    let late = job().conf("is_host", "0");
    late.start("b").says("If the job has ended, so has the agent that served its store", LIMIT).await;
}

#[tokio::test]
async fn a_node_that_left_after_its_part_is_not_waited_for() {
    let at = format!("127.0.0.1:{}", free_port());
    let job = Job::met_by(&["--rdzv-backend=c10d", &format!("--rdzv-endpoint={at}")], "2");
    let mut a = job.start("a");
    a.says("this agent serves the job's store", LIMIT).await;
    let mut b = job.start("b");
    let round = job.runs(1, 2).await;
    round.of("b").exit(0);
    let (store, node) = (EtcdStore::connect(EtcdConfig::new([at])).unwrap(), format!("{}b:", job.keys().nodes()));
    eventually("the store knows that b is done", LIMIT, async || {
        let (records, _) = store.range(&node).await.ok()?;
        let record: serde_json::Value = serde_json::from_slice(&records.first()?.value).ok()?;
        (record["phase"] == "done").then_some(())
    })
    .await;
    b.signal(Signal::TERM);
    b.exit(LIMIT).await;
    round.of("a").exit(0);
    assert_eq!(a.exit(LIMIT).await, 0);
    assert!(!a.output().contains("its store stays"), "{}", a.output());
}

#[tokio::test]
async fn without_its_host_a_job_ends_everywhere() {
    let job = Job::met_by(&["--rdzv-backend=c10d", &endpoint()], "1:3").flag("--max-restarts=5");
    let mut a = job.start("a");
    a.says("this agent serves the job's store", LIMIT).await;
    let mut others = job.start_all(["b", "c"]);
    job.runs(1, 3).await;

    a.kill();
    job.none_is_left(LEASE * 2).await;
    for agent in &mut others {
        assert_eq!(agent.exit(LEASE * 2).await, 1);
        assert!(agent.output().contains("elastic-agent: "), "{}", agent.output());
    }
}

#[tokio::test]
async fn a_store_that_takes_no_new_connection_for_a_while_is_not_lost() {
    let port = free_port();
    let proxy = FaultProxy::start(format!("127.0.0.1:{port}")).await;
    let job = Job::met_by(&["--master-addr=127.0.0.1"], "2");
    let through = proxy.address().replace("127.0.0.1:", "--master-port=");
    let mut host = job.start_with("host", &["--node-rank=0", &format!("--master-port={port}")]);
    let mut other = job.start_with("other", &["--node-rank=1", &through]);
    job.runs(1, 2).await;

    // Like a Kubernetes service whose pod is not ready for a while: longer than any lease.
    proxy.refuse_new();
    let mut left = tokio::time::interval(Duration::from_millis(100));
    for _ in 0..LEASE.as_millis() / 50 {
        left.tick().await;
        assert!(!other.is_gone(), "{}", other.output());
    }
    job.succeeds([&mut host, &mut other]).await;
}

#[tokio::test]
async fn one_node_needs_no_store() {
    let job = Job::met_by(&["--standalone"], "1").flag("--nproc-per-node=2").flag("--max-restarts=1");
    let mut agent = job.start("a");
    let first = job.runs(1, 2).await;
    first.workers[1].kill();
    let second = job.runs_within(2, 2, Duration::from_secs(3)).await;
    assert_eq!(second.restarts(), 1);
    job.succeeds([&mut agent]).await;
}

/// Freezes the agent of a job of one node, which no other node can replace, for longer than its lease. Freezes its
/// workers too if `workers_too`.
async fn continues_after_a_freeze(workers_too: bool) {
    let job = Job::met_by(&["--standalone"], "1").flag("--nproc-per-node=2").flag("--max-restarts=1");
    let mut agent = job.start("a");
    let round = job.runs(1, 2).await;
    let frozen = if workers_too { &round.workers[..] } else { &[] };
    frozen.iter().for_each(|worker| worker.signal(Signal::STOP));
    agent.signal(Signal::STOP);
    tokio::time::sleep(LEASE * 2).await;
    assert_eq!(job.living(), round.pids(), "workers were ended while no one could take their place");
    agent.signal(Signal::CONT);
    frozen.iter().for_each(|worker| worker.signal(Signal::CONT));

    // Then it still looks after them: a failure is answered by one restart, and no other.
    tokio::time::sleep(LEASE / 2).await;
    assert_eq!((job.living(), job.workers().len()), (round.pids(), 2));
    round.workers[1].exit(1);
    let second = job.runs(2, 2).await;
    assert_eq!((second.number, second.restarts()), (2, 1));
    agent.signal(Signal::STOP);
    agent.kill();
    job.none_is_left(LIMIT).await;
}

#[tokio::test]
async fn a_lone_agent_that_was_frozen_keeps_its_workers() {
    continues_after_a_freeze(false).await;
}

#[tokio::test]
async fn a_lone_node_that_was_frozen_keeps_its_workers() {
    continues_after_a_freeze(true).await;
}
