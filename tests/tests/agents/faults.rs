//! Agents, workers and etcd that die or freeze, in a job of three agents that continues.

use elastic_tests::prelude::*;

/// A job of three nodes, running. The first leads.
async fn three(job: &Job) -> ([Agent; 3], Round) {
    let first = job.start("a");
    assert_eq!(job.leader().await, "a");
    let agents = [first, job.start("b"), job.start("c")];
    let round = job.runs(1, 3).await;
    assert_eq!((round.number, round.restarts()), (1, 0), "{}", job.etcd().log_tail());
    (agents, round)
}

async fn ends_well(job: &Job, agents: &mut [Agent]) {
    job.succeeds(agents).await;
    job.none_is_left(LIMIT).await;
}

/// The agent of a node is killed or frozen. The others continue in their old order, free of charge, and no worker
/// outlives its agent. When the agent starts again or thaws, the node gets the last place.
async fn is_missed_and_comes_back(job: Job, at: usize, freezes: bool, within: Duration) {
    let job = job.gathers().flag("--max-restarts=0");
    let (mut agents, first) = three(&job).await;
    let node = agents[at].name.clone();
    if freezes {
        agents[at].signal(Signal::STOP)
    } else {
        agents[at].kill()
    }
    let second = job.runs_within(2, 2, within).await;
    let others: Vec<&str> = first.nodes().into_iter().filter(|name| *name != node).collect();
    assert_eq!((second.restarts(), second.nodes()), (0, others.clone()));
    assert!(!first.of(&node).is_alive(), "no worker outlives its agent");

    if freezes {
        agents[at].signal(Signal::CONT)
    } else {
        agents[at] = job.start(&node)
    }
    let third = job.runs(3, 3).await;
    assert_eq!((third.restarts(), third.nodes()), (0, [others, vec![&node]].concat()));
    ends_well(&job, &mut agents).await;
}

#[tokio::test]
async fn a_killed_agent_comes_back() {
    is_missed_and_comes_back(Job::on_etcd("2:3").await.prompt(), 2, false, AT_ONCE).await;
}

#[tokio::test]
async fn a_killed_leader_comes_back() {
    is_missed_and_comes_back(Job::on_etcd("2:3").await.prompt(), 0, false, AT_ONCE).await;
}

#[tokio::test]
async fn a_frozen_agent_loses_its_workers_and_joins_again() {
    is_missed_and_comes_back(Job::on_etcd("2:3").await, 1, true, LEASE * 3).await;
}

#[tokio::test]
async fn a_frozen_leader_is_replaced_and_joins_again() {
    is_missed_and_comes_back(Job::on_etcd("2:3").await, 0, true, LEASE * 4).await;
}

#[tokio::test]
async fn two_agents_killed_at_once_come_back() {
    let job = Job::on_etcd("1:3").await.gathers().flag("--max-restarts=0");
    let (mut agents, _) = three(&job).await;

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
    let job = Job::on_etcd("3").await.prompt().flag("--max-restarts=2");
    let (mut agents, first) = three(&job).await;

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

/// All workers stay while etcd is away for this long, and for a while after that.
async fn etcd_may_be_away(mut job: Job, away: Duration, after: Duration) {
    let (mut agents, first) = three(&job).await;
    job.etcd_mut().kill();
    stays_for(&job, &first, away).await;
    job.etcd_mut().restart().await;
    stays_for(&job, &first, after).await;
    assert_eq!(job.workers().len(), 3, "no worker was started again");
    ends_well(&job, &mut agents).await;
}

#[tokio::test]
async fn etcd_may_be_away_for_longer_than_the_lease() {
    // Then every lease has ended that etcd forgot, or counts from its restart.
    etcd_may_be_away(Job::on_etcd("3").await.flag("--max-restarts=0"), LEASE * 5 / 2, LEASE * 2).await;
}

#[tokio::test]
#[ignore = "make chaos: takes a minute and more"]
async fn etcd_may_be_away_for_thirty_seconds_with_default_timings() {
    let job = Job::on_etcd("3").await.flag("--max-restarts=0").conf("lease_ttl", "10").conf("takeover_delay", "10m");
    etcd_may_be_away(job, Duration::from_secs(30), Duration::from_secs(25)).await;
}

#[tokio::test]
async fn an_agent_killed_while_etcd_is_away_is_missed_on_its_return() {
    let mut job = Job::on_etcd("2:3").await.gathers().flag("--max-restarts=0");
    let (mut agents, first) = three(&job).await;

    job.etcd_mut().kill();
    agents[2].kill();
    job.etcd_mut().restart().await;
    let second = job.runs_within(2, 2, LEASE * 3).await;
    let others: Vec<&str> = first.nodes().into_iter().filter(|name| *name != "c").collect();
    assert_eq!((second.restarts(), second.nodes()), (0, others));
    ends_well(&job, &mut agents[..2]).await;
}

#[tokio::test]
async fn a_killed_agent_leaves_no_process_behind() {
    let job = Job::on_etcd("1").await.prompt().flag("--nproc-per-node=2");
    let script = job.path("worker.sh");
    let job = job.program([script.to_str().unwrap(), "strays"]);
    let mut agent = job.start("a");
    job.runs(1, 2).await;
    eventually("both workers have strays", LIMIT, async || (job.strays().len() == 2).then_some(())).await;
    assert_eq!(job.living().len(), 4);

    agent.kill();
    job.none_is_left(AT_ONCE).await;
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

/// The guard of this agent.
fn guard_of(agent: &Agent) -> u32 {
    let children = std::fs::read_to_string(format!("/proc/{0}/task/{0}/children", agent.pid())).unwrap();
    let is_guard = |pid: &&str| {
        let name = std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
        name == "elastic-guard\n"
    };
    children.split_whitespace().find(is_guard).expect("its guard").parse().unwrap()
}

/// No leader is left that could say so.
#[tokio::test]
async fn describe_tells_of_killed_agents_that_they_are_silent_and_then_gone() {
    let job = Job::on_etcd("2").await.conf("lease_ttl", "12");
    let agents = job.start_all(["a", "b"]);
    job.runs(1, 2).await;
    let described = async |says: &str| {
        let has = async || Some(job.ctl_ok(&["describe", "job"]).await).filter(|text| text.contains(says));
        eventually(says, LIMIT, has).await
    };
    described("2 here, 2 to 2 wanted").await;
    let all: Vec<u32> = agents.iter().flat_map(|agent| [guard_of(agent), agent.pid()]).collect();
    all.into_iter().for_each(|pid| send(pid, Signal::KILL));
    let text = described("running, but no node is here").await;
    assert!(text.matches("silent for ").count() == 2 && text.contains("0 here, 2 to 2 wanted"), "{text}");
    let told: Value = serde_json::from_str(&job.ctl_ok(&["describe", "job", "-o", "json"]).await).unwrap();
    assert!(told["nodes"].as_array().unwrap().iter().all(|node| node["silent_s"].as_u64() > Some(0)), "{told}");
    described("a, b: no sign of life for longer than a lease").await;
    assert!(job.ctl_ok(&["jobs"]).await.contains(" 0 of 2 "));
}

#[tokio::test]
async fn no_round_begins_beside_workers_whose_guard_is_frozen() {
    // Nothing within this lease is the lease's end.
    let job = Job::on_etcd("1:2").await.prompt().flag("--max-restarts=1");
    let (mut a, mut b) = (job.start("a"), job.start("b"));
    let first = job.runs(1, 2).await;
    // When a guard is frozen, and a worker of the other node fails
    send(guard_of(&a), Signal::STOP);
    first.of("b").exit(1);
    // then the next round begins once the frozen guard's worker is ended. (The job checks that no rounds overlap.)
    let second = job.runs(2, 1).await;
    assert_eq!(second.nodes(), ["b"]);
    assert!(!first.of("a").is_alive());
    assert_ne!(a.exit(LIMIT).await, 0);
    let said = a.output();
    assert!(said.contains("did not confirm for a second"), "{said}");
    second.exit(0);
    assert_eq!(b.exit(LIMIT).await, 0, "{}", b.output());
}
