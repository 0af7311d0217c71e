//! Jobs whose store three of the agents hold: `c10d` with three endpoints. Any one of them may be lost.

use elastic_tests::prelude::*;

use super::peer_tls::Pki;

const SERVES: &str = "this process serves the store now";
const NO_MORE: &str = "this process does not serve the store any more";

/// Three hosts of this machine, each with an address of its own.
fn endpoints() -> [String; 3] {
    let port = free_port();
    [2, 3, 4].map(|host| format!("127.0.0.{host}:{port}"))
}

fn job_at(endpoints: &[String], nnodes: &str) -> Job {
    Job::met_by(&["--rdzv-backend=c10d", &format!("--rdzv-endpoint={}", endpoints.join(","))], nnodes)
}

fn job(nnodes: &str) -> Job {
    job_at(&endpoints(), nnodes)
}

/// Takes out the agent that serves the store.
async fn serving(agents: &mut Vec<Agent>) -> Agent {
    let serves = |agent: &Agent| {
        let output = agent.output();
        output.matches(SERVES).count() > output.matches(NO_MORE).count()
    };
    let at = eventually("an agent serves the store", LIMIT, async || agents.iter().position(serves)).await;
    agents.remove(at)
}

#[tokio::test]
async fn a_job_continues_without_the_host_that_serves_its_store() {
    let job = job("2:3").flag("--max-restarts=0");
    let mut agents = Vec::from(job.start_all(["a", "b", "c"]));
    job.runs(1, 3).await;

    // When the agent that serves ends with its workers, then the others continue, at no cost
    let mut lost = serving(&mut agents).await;
    lost.kill();
    let second = job.runs(2, 2).await;
    assert_eq!(second.restarts(), 0);

    // When it comes back, then it holds the store again: another one may be lost
    agents.push(job.start(&lost.name));
    let third = job.runs(second.number + 1, 3).await;
    let mut lost = serving(&mut agents).await;
    lost.kill();
    job.runs(third.number + 1, 2).await.exit(0);

    // When it comes back after the job's end, then the others have kept the result for it
    for agent in &agents {
        agent.says("its store stays for 127.0.0.", LIMIT).await;
    }
    agents.push(job.start(&lost.name));
    job.ended(&mut agents, 0).await;
    assert!(agents[2].output().contains("no worker ran here"), "{}", agents[2].output());
}

#[tokio::test]
async fn a_member_that_hears_late_of_the_end_hears_of_it() {
    let endpoints = endpoints();
    let job = job_at(&endpoints, "4");
    let mut agents = Vec::from(job.start_all(["a", "b", "c"]));
    eventually("one of three serves", LIMIT, async || {
        agents.iter().any(|agent| agent.output().contains(SERVES)).then_some(())
    })
    .await;
    // It holds no store. It is stopped between its own part's end and the job's
    let d = job.start("d");
    let round = job.runs(1, 4).await;
    round.of("d").exit(0);
    let (store, node) = (EtcdStore::connect(EtcdConfig::new(endpoints)).unwrap(), format!("{}d:", job.keys().nodes()));
    eventually("the store knows that d is done", LIMIT, async || {
        let (records, _) = store.range(&node).await.ok()?;
        let record: Value = serde_json::from_slice(&records.first()?.value).ok()?;
        (record["phase"] == "done").then_some(())
    })
    .await;
    d.signal(Signal::STOP);
    for node in ["a", "b", "c"] {
        round.of(node).exit(0);
    }
    for agent in &agents {
        agent.says("its store stays for d", LIMIT).await;
    }
    d.signal(Signal::CONT);
    agents.push(d);
    job.ended(&mut agents, 0).await;
}

#[tokio::test]
async fn a_signal_ends_the_wait_for_those_who_may_not_know_the_result() {
    let job = job("2:3");
    let mut agents = Vec::from(job.start_all(["a", "b", "c"]));
    job.runs(1, 3).await;
    serving(&mut agents).await.kill();
    job.runs(2, 2).await.exit(0);
    for agent in &agents {
        agent.says("its store stays for 127.0.0.", LIMIT).await;
        agent.signal(Signal::INT);
    }
    for agent in &mut agents {
        // Before the time is up
        assert_eq!(agent.exit(Duration::from_secs(12)).await, 0, "{}", agent.output());
    }
}

#[tokio::test]
async fn the_store_serves_once_two_of_three_are_there() {
    let job = job("1:4");
    let mut a = job.start("a");
    a.says("two of the processes at 127.0.0.2:", LIMIT).await;
    assert_eq!(a.output().matches("waiting for").count(), 1, "{}", a.output());
    let mut b = job.start("b");
    job.runs(1, 2).await;
    // The last that has a seat, and a node that has none.
    let [mut c, mut d] = job.start_all(["c", "d"]);
    job.runs(2, 4).await;
    job.succeeds([&mut a, &mut b, &mut c, &mut d]).await;
}

#[tokio::test]
async fn one_alone_says_for_how_long_it_has_waited() {
    let job = job("1:3").conf("join_timeout", "7s");
    let mut a = job.start("a");
    assert_eq!(a.exit(LIMIT).await, 1);
    assert!(a.output().contains("gave up after join_timeout (7s)"), "{}", a.output());
    assert_eq!(a.output().matches("join_timeout").count(), a.output().matches("join_timeout (7s)").count());
}

#[tokio::test]
async fn one_of_three_serves_nothing() {
    let job = job("1:3").flag("--max-restarts=5");
    let [mut a, mut b, mut c] = job.start_all(["a", "b", "c"]);
    job.runs(1, 3).await;
    b.kill();
    c.kill();
    // Its workers end in time, as those of a node that has lost its store, and so does the agent.
    job.none_is_left(LEASE * 3).await;
    assert_eq!(a.exit(LEASE * 4).await, 1, "{}", a.output());
}

#[tokio::test]
async fn the_three_speak_mutual_tls() {
    let pki = Pki::of(&["node,127.0.0.1,127.0.0.2,127.0.0.3,127.0.0.4"]).await;
    let job = pki.flags("node").iter().fold(job("2:3"), |job, flag| job.flag(flag)).flag("--require-peer-tls");
    let mut agents = Vec::from(job.start_all(["a", "b", "c"]));
    job.runs(1, 3).await;
    let mut lost = serving(&mut agents).await;
    lost.kill();
    let second = job.runs(2, 2).await;
    agents.push(job.start(&lost.name));
    job.runs(second.number + 1, 3).await;
    job.succeeds(&mut agents).await;
}

#[tokio::test]
async fn three_coordinators_hold_a_store_of_which_one_may_be_lost() {
    let members = endpoints().join(",");
    let flags = ["--embedded", "--members", &members, "--peer-listen", "127.0.0.1:0"];
    let mut coordinators: Vec<Process> = (0..3).map(|_| Process::start("elastic-coordinator", &flags)).collect();
    let endpoint = format!("--rdzv-endpoint={members}");
    let job = Job::met_by(&["--rdzv-backend=etcd", &endpoint], "2").flag("--max-restarts=1");
    let mut agents = job.start_all(["a", "b"]);
    let first = job.runs(1, 2).await;

    let serves = |process: &Process| process.output().contains(SERVES);
    let at = eventually("one of them serves", LIMIT, async || coordinators.iter().position(serves)).await;
    coordinators.remove(at).kill();
    first.of("a").kill();
    let second = job.runs(2, 2).await;
    assert_eq!(second.restarts(), 1);
    eventually("another serves", LIMIT, async || coordinators.iter().any(serves).then_some(())).await;
    let jobs = output("elasticctl", &["jobs", "--etcd", &members], LIMIT).await;
    assert!(printed(&jobs).contains("running"), "{}", printed(&jobs));
    job.succeeds(&mut agents).await;
}
