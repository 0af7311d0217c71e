//! Measures what a job of thousands of nodes costs its etcd and its leader, and how fast the job acts. One process runs
//! the real drivers and the real client, with a connection to etcd for each node. Workers are simulated.
//! `make bench-scale` runs this; `make bench-scale SIZES="100 4000"` chooses the sizes,
//! `ELASTIC_ETCD=3.5` the release of etcd; with the word `crowd` only the start of nodes that come at once is measured.

#![allow(clippy::print_stdout, clippy::unwrap_used)]

mod etcd_load;
mod fleet;
mod report;

use anyhow::{Context, Result, ensure};
use elastic_rendezvous::time::Time;
use elastic_store::listener::raise_descriptor_limit;
use elastic_tests::prelude::*;
use elastic_tests::processor::process;

use self::etcd_load::{EtcdLoad, version};
use self::fleet::Fleet;
use self::report::{Churned, Point, Rest, Step};

const WITHIN: Duration = Duration::from_secs(180);

/// How long a job runs before its cost at rest is measured.
const SETTLE: Duration = Duration::from_secs(5);
/// After this time, the last writes and events of a step have arrived.
const AFTER: Duration = Duration::from_secs(2);
/// How long the cost at rest is measured.
const REST: Duration = Duration::from_secs(30);

/// The time in which one node of a hundred dies and comes back.
const CHURN: Duration = Duration::from_secs(60);

/// The time between two counts of the nodes that have workers at work.
const LOOK: Duration = Duration::from_millis(100);

/// Descriptors that a node takes here: its port, its connection to etcd, both ends of its stream to the leader.
const DESCRIPTORS: usize = 4;

fn main() -> Result<()> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let crowds = words.iter().any(|word| word == "crowd");
    let sizes: Vec<u32> = words.iter().filter_map(|word| word.parse().ok()).collect();
    let sizes = if sizes.is_empty() { vec![100, 300, 1_000, 2_000, 4_000] } else { sizes };
    let limit = raise_descriptor_limit();
    for size in &sizes {
        let needs = *size as usize * DESCRIPTORS + 1_000;
        ensure!(*size >= 30, "{size} nodes are too few for this bench: 30 and more");
        ensure!(
            needs <= limit,
            "{size} nodes take {needs} descriptors here, and the limit is {limit}: raise `ulimit -Hn`"
        );
    }
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
    let (mut points, mut failed) = (Vec::new(), Vec::new());
    for size in sizes {
        let measured = runtime.block_on(async {
            crowd(size).await.context("a crowd")?;
            if crowds { Ok(None) } else { measure(size).await.map(Some) }
        });
        match measured {
            Ok(point) => points.extend(point),
            Err(error) => {
                println!("{size} nodes failed: {error:#}");
                failed.push(size);
            }
        }
    }
    report::print(&points);
    ensure!(failed.is_empty(), "jobs of {failed:?} nodes were not measured to their end: see above");
    Ok(())
}

/// Measures one thing that happens to all nodes.
struct Stopwatch<'a> {
    etcd: &'a EtcdServer,
    before: EtcdLoad,
    begun: Time,
}

impl<'a> Stopwatch<'a> {
    async fn start(etcd: &'a EtcdServer) -> Result<Stopwatch<'a>> {
        let before = EtcdLoad::of(&etcd.address()).await?;
        Ok(Stopwatch { etcd, before, begun: elastic_store::clock::now() })
    }

    async fn stop(self, what: &'static str, nodes: u32, times: Vec<Duration>) -> Result<Step> {
        tokio::time::sleep(AFTER).await;
        let load = EtcdLoad::of(&self.etcd.address()).await? - self.before;
        let step = Step { what, nodes, times, load };
        println!("{step}");
        Ok(step)
    }
}

async fn measure(size: u32) -> Result<Point> {
    let etcd = EtcdServer::start(EtcdOptions::default()).await;
    with_log(on(&etcd, size).await, &etcd)
}

async fn on(etcd: &EtcdServer, size: u32) -> Result<Point> {
    let address = etcd.address();
    let mut fleet = Fleet::new(&address, size)?;
    let mut steps = Vec::new();

    fleet.elect(WITHIN).await?;
    let watch = Stopwatch::start(etcd).await?;
    fleet.fill(size, size.div_ceil(100)).await?;
    let times = fleet.all_run(1, watch.begun, WITHIN).await.context("start")?;
    steps.push(watch.stop("all others come at once → all run", size, times).await?);

    tokio::time::sleep(SETTLE).await;
    let sizes = fleet.sizes().await?;
    let leader = fleet.first.as_ref().context("the first node")?;
    let (watch, own, leading) = (Stopwatch::start(etcd).await?, process("self")?, leader.rack().used()?);
    tokio::time::sleep(REST).await;
    let (leading, own) = (leader.rack().used()? - leading, process("self")? - own);
    let load = EtcdLoad::of(&address).await? - watch.before;
    let rest = Rest { load, over: REST, leading, own, nodes: size };
    println!("{rest}");

    let watch = Stopwatch::start(etcd).await?;
    let round = fleet.round();
    fleet.fail_one()?;
    let times = fleet.all_run(round + 1, watch.begun, WITHIN).await.context("a worker fails")?;
    steps.push(watch.stop("a worker fails → next round runs", size, times).await?);

    let churned = churn(&mut fleet, etcd).await.context("churn")?;
    println!("{churned}");

    let before = fleet.history().await?;
    let watch = Stopwatch::start(etcd).await?;
    let round = fleet.round();
    let (lost, frozen) = fleet.freeze()?;
    let times = fleet.all_run(round + 1, watch.begun, WITHIN).await.context("a rack is lost")?;
    steps.push(watch.stop("a rack falls silent → survivors run", fleet.size(), times).await?);
    println!("    {} nodes were lost; the job's history:", lost.size());
    tell_new(&before, &fleet.history().await?);
    let names = lost.names();
    drop((frozen, lost));

    let watch = Stopwatch::start(etcd).await?;
    let rack = fleet.come(names).await?;
    fleet.racks.push(rack);
    let round = fleet.round();
    let times = fleet.all_run(round + 1, watch.begun, WITHIN).await.context("the rack comes back")?;
    steps.push(watch.stop("the rack comes back → all run", size, times).await?);

    let watch = Stopwatch::start(etcd).await?;
    let round = fleet.round();
    drop(fleet.first.take());
    let times = fleet.all_run(round + 1, watch.begun, WITHIN).await.context("the leader is killed")?;
    steps.push(watch.stop("the leader is killed → survivors run", fleet.size(), times).await?);

    steps.push(lose_coordinator(&mut fleet, etcd).await.context("the coordinator is killed")?);

    let begun = elastic_store::clock::now();
    fleet.finish(WITHIN).await.context("all end well")?;
    println!("    all end well: {:.2} s", elastic_store::clock::now().since(begun).as_secs_f64());
    Ok(Point { size, sizes, steps, rest })
}

/// All nodes come at once to an etcd that knows nothing of the job, so no node leads yet.
async fn crowd(size: u32) -> Result<()> {
    let etcd = EtcdServer::start(EtcdOptions::default()).await;
    println!("{size} nodes on etcd {}:", version(&etcd.address()).await?);
    let mut fleet = Fleet::new(&etcd.address(), size)?;
    let watch = Stopwatch::start(&etcd).await?;
    fleet.fill(size + 1, 0).await?;
    let times = with_log(fleet.all_run(1, watch.begun, WITHIN).await, &etcd)?;
    watch.stop("all come at once to an empty etcd → run", size, times).await.map(drop)
}

/// Adds etcd's last log lines to an error, since etcd itself may have failed.
fn with_log<T>(result: Result<T>, etcd: &EtcdServer) -> Result<T> {
    result.with_context(|| format!("etcd's last words:\n{}\nand here", etcd.log_tail()))
}

/// Kills one node after the other. Each comes back at once, under its name.
async fn churn(fleet: &mut Fleet, etcd: &EtcdServer) -> Result<Churned> {
    let watch = Stopwatch::start(etcd).await?;
    let before = fleet.history().await?;
    let (count, round, size) = (fleet.singles.len(), fleet.round(), fleet.size());
    let every = CHURN / count as u32;
    let (mut killed, mut at_work, mut looks) = (0, 0.0, 0.0);
    while elastic_store::clock::now().since(watch.begun) < CHURN {
        if killed < count && elastic_store::clock::now().since(watch.begun) >= every * killed as u32 {
            let gone = fleet.singles.remove(0);
            let names = gone.names();
            drop(gone);
            let back = fleet.come(names).await?;
            fleet.singles.push(back);
            killed += 1;
        }
        at_work += f64::from(fleet.at_work()) / f64::from(size);
        looks += 1.0;
        tokio::time::sleep(LOOK).await;
    }
    let ended = elastic_store::clock::now();
    fleet.all_run(round + 1, ended, WITHIN).await?;
    let settled = elastic_store::clock::now().since(ended);
    let load = EtcdLoad::of(&etcd.address()).await? - watch.before;
    tell_new(&before, &fleet.history().await?);
    Ok(Churned { killed, rounds: fleet.round() - round, at_work: at_work / looks, settled, load })
}

/// Prints what was written in the job's history meanwhile, and when.
fn tell_new(before: &[(u64, String)], now: &[(u64, String)]) {
    let new: Vec<_> = now.iter().filter(|line| !before.contains(line)).collect();
    let begun = new.first().map_or(0, |(at, _)| *at);
    for (at, line) in new {
        println!("    {:6.2} s {line}", at.saturating_sub(begun) as f64 / 1000.0);
    }
}

/// A coordinator takes the job over, and is killed. Measures how long it takes until a node leads again. No round ends.
async fn lose_coordinator(fleet: &mut Fleet, etcd: &EtcdServer) -> Result<Step> {
    let address = etcd.address();
    let args = ["--etcd", &address, "--peer-listen", "127.0.0.1:0", "--http", "127.0.0.1:0"];
    let mut coordinator = Process::start("elastic-coordinator", &args);
    fleet.until_led(WITHIN, |leader| leader.coordinator).await.context("it takes over")?;
    // By then, all nodes have their streams to the coordinator.
    tokio::time::sleep(SETTLE).await;
    let round = fleet.round();
    let watch = Stopwatch::start(etcd).await?;
    coordinator.kill();
    fleet.until_led(WITHIN, |leader| !leader.coordinator).await?;
    let led = elastic_store::clock::now().since(watch.begun);
    let step = watch.stop("the coordinator is killed → a node leads", fleet.size(), vec![led]).await?;
    tokio::time::sleep(SETTLE).await;
    ensure!(fleet.round() == round && fleet.at_work() == fleet.size(), "the round did not survive");
    let begun = elastic_store::clock::now();
    fleet.fail_one()?;
    fleet.all_run(round + 1, begun, WITHIN).await.context("the round after it")?;
    Ok(step)
}
