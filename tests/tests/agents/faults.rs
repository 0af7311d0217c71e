//! Agents, workers and etcd that die or freeze, in a job of three agents that continues.

use elastic_tests::prelude::*;

/// A job of three nodes, running. The first leads.
async fn three(etcd: &EtcdServer, job: &Job) -> ([Agent; 3], Round) {
    let first = job.start("a");
    assert_eq!(job.leader(etcd).await, "a");
    let agents = [first, job.start("b"), job.start("c")];
    let round = job.runs(1, 3).await;
    assert_eq!((round.number, round.restarts()), (1, 0), "{}", etcd.log_tail());
    (agents, round)
}

/// The job ends well, everywhere.
async fn ends_well(job: &Job, agents: &mut [Agent]) {
    let round = job.round().unwrap();
    round.exit(0);
    assert!(exits(agents).await.iter().all(|&code| code == 0));
    job.none_is_left(LIMIT).await;
}

#[tokio::test]
async fn a_killed_agent_comes_back() {
    let etcd = EtcdServer::start(EtcdOptions::default()).await;
    let job = Job::on(&etcd, "2:3").prompt().flag("--max-restarts=0");
    let (mut agents, first) = three(&etcd, &job).await;

    // When an agent that does not lead is killed, then the others continue at once, in their old order, free of charge
    agents[2].kill();
    let second = job.runs_within(2, 2, AT_ONCE).await;
    assert_eq!((second.restarts(), second.nodes()), (0, staying(&first, &["a", "b"])));
    assert!(!first.of("c").is_alive(), "no worker outlives its agent");

    // When it is started again, then it gets the last place
    agents[2] = job.start("c");
    let third = job.runs(3, 3).await;
    assert_eq!(third.nodes(), [staying(&first, &["a", "b"]), vec!["c"]].concat());
    ends_well(&job, &mut agents).await;
}

#[tokio::test]
async fn a_killed_leader_comes_back() {
    let etcd = EtcdServer::start(EtcdOptions::default()).await;
    let job = Job::on(&etcd, "2:3").prompt().flag("--max-restarts=0");
    let (mut agents, first) = three(&etcd, &job).await;

    agents[0].kill();
    let second = job.runs_within(2, 2, AT_ONCE).await;
    assert_eq!((second.restarts(), second.nodes()), (0, staying(&first, &["b", "c"])));

    agents[0] = job.start("a");
    let third = job.runs(3, 3).await;
    assert_eq!(third.nodes(), [staying(&first, &["b", "c"]), vec!["a"]].concat());
    ends_well(&job, &mut agents).await;
}

#[tokio::test]
async fn two_agents_killed_at_once_come_back() {
    let etcd = EtcdServer::start(EtcdOptions::default()).await;
    let job = Job::on(&etcd, "1:3").flag("--max-restarts=0");
    let (mut agents, _) = three(&etcd, &job).await;

    // When the leader and another are killed, then the third continues alone
    agents[0].kill();
    agents[1].kill();
    let second = job.runs_within(2, 1, LEASE * 2).await;
    assert_eq!((second.restarts(), second.nodes()), (0, vec!["c"]));

    agents[0] = job.start("a");
    agents[1] = job.start("b");
    let whole = job.runs(3, 3).await;
    assert_eq!(whole.nodes()[0], "c");
    ends_well(&job, &mut agents).await;
}

#[tokio::test]
async fn a_killed_worker_costs_one_restart_and_its_agent_stays() {
    let etcd = EtcdServer::start(EtcdOptions::default()).await;
    let job = Job::on(&etcd, "3").prompt().flag("--max-restarts=2");
    let (mut agents, first) = three(&etcd, &job).await;

    first.of("b").kill();
    let second = job.runs_within(2, 3, AT_ONCE).await;
    assert_eq!((second.number, second.restarts(), second.nodes()), (2, 1, first.nodes()));

    // When two workers die in one incident, then it is charged once
    second.of("a").kill();
    second.of("c").kill();
    let third = job.runs_within(3, 3, AT_ONCE).await;
    assert_eq!((third.number, third.restarts(), third.nodes()), (3, 2, first.nodes()));
    ends_well(&job, &mut agents).await;
}

#[tokio::test]
async fn a_frozen_agent_loses_its_workers_and_joins_again() {
    let etcd = EtcdServer::start(EtcdOptions::default()).await;
    let job = Job::on(&etcd, "2:3").flag("--max-restarts=0");
    let (mut agents, first) = three(&etcd, &job).await;

    // When an agent freezes, then the others continue once its lease and its workers are gone: its worker ends by itself
    agents[1].signal(Signal::STOP);
    let second = job.runs_within(2, 2, LEASE * 3).await;
    assert_eq!((second.restarts(), second.nodes()), (0, staying(&first, &["a", "c"])));
    assert!(!first.of("b").is_alive());

    // When it thaws, then it finds itself evicted and joins again
    agents[1].signal(Signal::CONT);
    let third = job.runs(3, 3).await;
    assert_eq!((third.restarts(), third.nodes()), (0, [staying(&first, &["a", "c"]), vec!["b"]].concat()));
    ends_well(&job, &mut agents).await;
}

#[tokio::test]
async fn a_frozen_leader_is_replaced_and_joins_again() {
    let etcd = EtcdServer::start(EtcdOptions::default()).await;
    let job = Job::on(&etcd, "2:3").flag("--max-restarts=0");
    let (mut agents, first) = three(&etcd, &job).await;

    agents[0].signal(Signal::STOP);
    let second = job.runs_within(2, 2, LEASE * 4).await;
    assert_eq!((second.restarts(), second.nodes()), (0, staying(&first, &["b", "c"])));

    agents[0].signal(Signal::CONT);
    let third = job.runs(3, 3).await;
    assert_eq!((third.restarts(), third.nodes()), (0, [staying(&first, &["b", "c"]), vec!["a"]].concat()));
    ends_well(&job, &mut agents).await;
}

#[tokio::test]
async fn etcd_may_be_away_for_longer_than_the_lease() {
    let mut etcd = EtcdServer::start(EtcdOptions::default()).await;
    let job = Job::on(&etcd, "3").flag("--max-restarts=0");
    let (mut agents, first) = three(&etcd, &job).await;

    etcd.kill();
    stays_for(&job, &first, LEASE * 5 / 2).await;
    etcd.restart().await;
    // By then every lease has ended that etcd forgot, or counts from its restart.
    stays_for(&job, &first, LEASE * 2).await;
    assert_eq!(job.workers().len(), 3, "no worker was started again");
    ends_well(&job, &mut agents).await;
}

#[tokio::test]
#[ignore = "make chaos: takes a minute and more"]
async fn etcd_may_be_away_for_thirty_seconds_with_default_timings() {
    let mut etcd = EtcdServer::start(EtcdOptions::default()).await;
    let job = Job::on(&etcd, "3").flag("--max-restarts=0").conf("lease_ttl", "10").conf("takeover_delay", "10m");
    let (mut agents, first) = three(&etcd, &job).await;

    etcd.kill();
    stays_for(&job, &first, Duration::from_secs(30)).await;
    etcd.restart().await;
    stays_for(&job, &first, Duration::from_secs(25)).await;
    assert_eq!(job.workers().len(), 3, "no worker was started again");
    ends_well(&job, &mut agents).await;
}

#[tokio::test]
async fn an_agent_killed_while_etcd_is_away_is_missed_on_its_return() {
    let mut etcd = EtcdServer::start(EtcdOptions::default()).await;
    let job = Job::on(&etcd, "2:3").flag("--max-restarts=0");
    let (mut agents, first) = three(&etcd, &job).await;

    etcd.kill();
    agents[2].kill();
    etcd.restart().await;
    let second = job.runs_within(2, 2, LEASE * 3).await;
    assert_eq!((second.restarts(), second.nodes()), (0, staying(&first, &["a", "b"])));
    ends_well(&job, &mut agents[..2]).await;
}

#[tokio::test]
async fn a_killed_agent_leaves_no_process_behind() {
    let etcd = EtcdServer::start(EtcdOptions::default()).await;
    let job = Job::on(&etcd, "1").prompt().flag("--nproc-per-node=2");
    let script = job.path("worker.sh");
    let job = job.program([script.to_str().unwrap(), "strays"]);
    let mut agent = job.start("a");
    job.runs(1, 2).await;
    eventually("both workers have strays", LIMIT, async || (job.strays().len() == 2).then_some(())).await;
    assert_eq!(job.living().len(), 4);

    agent.kill();
    job.none_is_left(AT_ONCE).await;
}

/// What is left of a round's nodes, in order.
fn staying<'a>(round: &'a Round, nodes: &[&str]) -> Vec<&'a str> {
    round.nodes().into_iter().filter(|node| nodes.contains(node)).collect()
}

/// For this long nothing happens to the workers.
async fn stays_for(job: &Job, round: &Round, time: Duration) {
    let begun = std::time::Instant::now();
    eventually("time passes", time + LIMIT, async || {
        assert_eq!(job.round().as_ref(), Some(round));
        assert!(round.is_whole(3), "a worker was stopped after {:?}: {round:?}", begun.elapsed());
        (begun.elapsed() >= time).then_some(())
    })
    .await;
}
