//! Jobs whose store three of the agents hold: `c10d` with three endpoints. Any one of them may be lost.

use elastic_tests::prelude::*;

use super::peer_tls::Pki;

const SERVES: &str = "this agent serves the job's store now";
const NO_MORE: &str = "this agent does not serve the job's store any more";

/// Three hosts of this machine, each with an address of its own.
fn endpoints() -> String {
    let port = free_port();
    format!("--rdzv-endpoint=127.0.0.2:{port},127.0.0.3:{port},127.0.0.4:{port}")
}

fn job(nnodes: &str) -> Job {
    Job::met_by(&["--rdzv-backend=c10d", &endpoints()], nnodes)
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
    job.runs(third.number + 1, 2).await;
    job.succeeds(&mut agents).await;
}

#[tokio::test]
async fn the_store_serves_once_two_of_three_are_there() {
    let job = job("1:4");
    let mut a = job.start("a");
    a.says("two of the agents at 127.0.0.2:", LIMIT).await;
    assert_eq!(a.output().matches("waiting for").count(), 1, "{}", a.output());
    let mut b = job.start("b");
    job.runs(1, 2).await;
    // The last that has a seat, and a node that has none.
    let [mut c, mut d] = job.start_all(["c", "d"]);
    job.runs(2, 4).await;
    job.succeeds([&mut a, &mut b, &mut c, &mut d]).await;
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
    serving(&mut agents).await.kill();
    job.runs(2, 2).await;
    job.succeeds(&mut agents).await;
}
