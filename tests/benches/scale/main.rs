//! Measures what a job of thousands of nodes costs its etcd and its leader, and how fast the job acts. It runs the real
//! drivers and the real client, in as many processes as they have descriptors for. Workers are simulated.
//! `make bench-scale` runs this; `make bench-scale SIZES="100 4000"` chooses the sizes, `ELASTIC_ETCD=3.5` the release of
//! etcd. Words among the sizes: with `crowd` only the start of nodes that come at once is measured; with `shared` the
//! nodes of a rack share a connection to etcd, where each has its own otherwise; with `busy` two other processes use the
//! processors meanwhile; with `over=20` nodes come over 20 s, not at once; with `churn=10` nodes die for ten minutes.

#![allow(clippy::print_stdout, clippy::unwrap_used)]

mod crew;
mod etcd_load;
mod fleet;
mod report;

use anyhow::{Context, Result, bail, ensure};
use elastic_rendezvous::time::Time;
use elastic_store::listener::{Serves, Share, share_descriptors};
use elastic_tests::prelude::*;
use elastic_tests::processor::process;

use self::etcd_load::{EtcdLoad, version};
use self::fleet::{Connections, Fleet, Manner, rack_of};
use self::report::{Churned, Point, Rest, Step};

const WITHIN: Duration = Duration::from_secs(180);

/// How long a job runs before its cost at rest is measured.
const SETTLE: Duration = Duration::from_secs(5);
/// After this time, the last writes and events of a step have arrived.
const AFTER: Duration = Duration::from_secs(2);
/// How long the cost at rest is measured.
const REST: Duration = Duration::from_secs(30);

/// The time in which one node of a hundred dies and comes back.
const MINUTE: Duration = Duration::from_secs(60);

/// The time between two counts of the nodes that have workers at work.
const LOOK: Duration = Duration::from_millis(100);

/// Descriptors that a node takes in its process: its port, its connection to etcd, its stream to the leader.
const DESCRIPTORS: usize = 3;
/// Those that are for other things.
const SPARE: usize = 1_000;

/// Local ports that a node takes while all are on one machine: its own, one that connects to etcd, and as many that wait
/// for their end (`TIME_WAIT`).
const PORTS: u32 = 4;

/// Local ports that the kernel gives.
fn local_ports() -> Result<u32> {
    let range = std::fs::read_to_string("/proc/sys/net/ipv4/ip_local_port_range")?;
    let ends: Vec<u32> = range.split_whitespace().filter_map(|port| port.parse().ok()).collect();
    let [first, last] = ends[..] else { bail!("{range} is no range of ports") };
    Ok(last + 1 - first)
}

/// What is measured.
#[derive(Debug, Clone, Copy)]
struct Setting {
    manner: Manner,
    /// Only the start of a crowd.
    crowd: bool,
    /// How many minutes nodes die and come back.
    churn: u32,
    /// How many descriptors a process may have.
    descriptors: usize,
}

impl Setting {
    /// How many nodes of a job of this size a process holds. Any of them may lead, and then has a stream of each.
    fn most(self, size: u32) -> Result<u32> {
        let (limit, streams) = (self.descriptors, Share::Peers.connections());
        // Some more than there are nodes: nodes also ask who is there.
        let needs = size as usize + SPARE;
        ensure!(
            needs <= streams,
            "a leader of {size} nodes needs {needs} connections, and with a limit of {limit} descriptors (`ulimit -Hn`) \
             its port takes {streams}"
        );
        let (free, needed) = (local_ports()?, size * PORTS);
        ensure!(
            needed <= free,
            "{size} nodes on one machine need {needed} local ports, and there are {free}: with fewer the kernel looks long \
             for a free one. Set net.ipv4.ip_local_port_range=\"1024 65535\", as in a network namespace of your own"
        );
        Ok(((limit - needs) / DESCRIPTORS) as u32)
    }
}

fn main() -> Result<()> {
    let words: Vec<String> = std::env::args().skip(1).filter(|word| word != "--bench").collect();
    // As a coordinator's process.
    let descriptors = share_descriptors(Serves { store: false, workers: false });
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
    if words.first().is_some_and(|word| word == crew::WORD) {
        return runtime.block_on(crew::serve(&words[1..]));
    }
    let has = |word: &str| words.iter().any(|it| it == word);
    let connections = if has("shared") { Connections::Shared } else { Connections::Own };
    let number = |word: &str| words.iter().find_map(|it| it.strip_prefix(word)?.strip_prefix('=')?.parse().ok());
    let manner = Manner { connections, over: Duration::from_secs(number("over").unwrap_or_default()) };
    let churn = number("churn").unwrap_or(1) as u32;
    ensure!(churn > 0, "churn=MINUTES takes at least one");
    let setting = Setting { manner, crowd: has("crowd"), churn, descriptors };
    let sizes: Vec<u32> = words.iter().filter_map(|word| word.parse().ok()).collect();
    let sizes = if sizes.is_empty() { vec![100, 300, 1_000, 2_000, 4_000] } else { sizes };
    for size in &sizes {
        ensure!(*size >= 30, "{size} nodes are too few for this bench: 30 and more");
        setting.most(*size)?;
    }
    let _busy: Vec<Busy> = if has("busy") { vec![Busy::start()?, Busy::start()?] } else { Vec::new() };
    let (mut points, mut failed) = (Vec::new(), Vec::new());
    for size in sizes {
        let measured = runtime.block_on(async {
            if setting.crowd || manner.over.is_zero() {
                crowd(size, setting).await.context("a crowd")?;
            }
            if setting.crowd { Ok(None) } else { measure(size, setting).await.map(Some) }
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

/// A process that uses a processor until this is dropped, or the bench is killed.
struct Busy(std::process::Child);

impl Busy {
    fn start() -> Result<Busy> {
        let process = Command::new("sh").args(["-c", "while kill -0 $PPID; do :; done"]).spawn().context("start sh")?;
        Ok(Busy(process))
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Measures one thing that happens to all nodes.
struct Stopwatch<'a> {
    etcd: &'a EtcdServer,
    before: EtcdLoad,
    begun: Time,
}

/// How long this process and its crews have been on a processor.
fn used(fleet: &Fleet) -> Result<Duration> {
    let crews = fleet.crews().iter().filter_map(|crew| process(&crew.pid()?.to_string()).ok());
    Ok(process("self")? + crews.sum::<Duration>())
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

/// An empty etcd. Says what is measured on it.
async fn start_etcd(size: u32, Manner { connections, over }: Manner) -> Result<EtcdServer> {
    let etcd = EtcdServer::start(EtcdOptions::default()).await;
    let how = match connections {
        Connections::Own => "each node with its own connection",
        Connections::Shared => "nodes of a rack share a connection",
    };
    let over = if over.is_zero() { "at once".to_owned() } else { format!("over {over:?}") };
    println!("{size} nodes on etcd {}, {how}, {over}:", version(&etcd.address()).await?);
    Ok(etcd)
}

async fn measure(size: u32, setting: Setting) -> Result<Point> {
    let etcd = start_etcd(size, setting.manner).await?;
    with_log(on(&etcd, size, setting).await, &etcd)
}

async fn on(etcd: &EtcdServer, size: u32, setting: Setting) -> Result<Point> {
    let address = etcd.address();
    let mut fleet = Fleet::new(&address, size, setting.manner)?;
    let mut steps = Vec::new();

    fleet.elect(WITHIN).await?;
    let watch = Stopwatch::start(etcd).await?;
    fleet.fill(size, size.div_ceil(100), setting.most(size)?, rack_of(size)).await?;
    let times = fleet.all_run(1, watch.begun, WITHIN).await.context("start")?;
    steps.push(watch.stop("all others come → all run", size, times).await?);

    tokio::time::sleep(SETTLE).await;
    let sizes = fleet.sizes().await?;
    let leader = fleet.first.as_ref().context("the first node")?;
    let (watch, own, leading) = (Stopwatch::start(etcd).await?, used(&fleet)?, leader.rack().used()?);
    tokio::time::sleep(REST).await;
    let (leading, own) = (leader.rack().used()? - leading, used(&fleet)? - own);
    let load = EtcdLoad::of(&address).await? - watch.before;
    let rest = Rest { load, over: REST, leading, own, nodes: size };
    println!("{rest}");

    let watch = Stopwatch::start(etcd).await?;
    let round = fleet.seen().await?.round;
    fleet.fail_one()?;
    let times = fleet.all_run(round + 1, watch.begun, WITHIN).await.context("a worker fails")?;
    steps.push(watch.stop("a worker fails → next round runs", size, times).await?);

    let churned = churn(&mut fleet, etcd, setting.churn).await.context("churn")?;
    println!("{churned}");

    let before = fleet.history().await?;
    let watch = Stopwatch::start(etcd).await?;
    let round = fleet.seen().await?.round;
    let (lost, frozen) = fleet.freeze()?;
    let times = fleet.all_run(round + 1, watch.begun, WITHIN).await.context("a rack is lost")?;
    steps.push(watch.stop("a rack falls silent → survivors run", fleet.size(), times).await?);
    println!("    {} nodes were lost; the job's history:", lost.size());
    tell_new(&before, &fleet.history().await?);
    let names = lost.names();
    drop((frozen, lost));

    let watch = Stopwatch::start(etcd).await?;
    let rack = fleet.come(names, Duration::ZERO).await?;
    fleet.racks.push(rack);
    let round = fleet.seen().await?.round;
    let times = fleet.all_run(round + 1, watch.begun, WITHIN).await.context("the rack comes back")?;
    steps.push(watch.stop("the rack comes back → all run", size, times).await?);

    let watch = Stopwatch::start(etcd).await?;
    let round = fleet.seen().await?.round;
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
async fn crowd(size: u32, setting: Setting) -> Result<()> {
    let etcd = start_etcd(size, setting.manner).await?;
    let mut fleet = Fleet::new(&etcd.address(), size, setting.manner)?;
    let (watch, before) = (Stopwatch::start(&etcd).await?, used(&fleet)?);
    // Each thread that wants a processor takes as much of it as etcd gets.
    let rack = match setting.manner.connections {
        Connections::Own => size.div_ceil(std::thread::available_parallelism()?.get() as u32),
        Connections::Shared => rack_of(size),
    };
    fleet.fill(size + 1, 0, setting.most(size)?, rack).await?;
    let times = with_log(fleet.all_run(1, watch.begun, WITHIN).await, &etcd)?;
    watch.stop("all come to an empty etcd → run", size, times).await?;
    let drivers = (used(&fleet)? - before).as_secs_f64();
    println!("    the nodes: {drivers:.1} s processor, in {} processes", 1 + fleet.crews().len());
    Ok(())
}

/// Adds etcd's last log lines to an error, since etcd itself may have failed.
fn with_log<T>(result: Result<T>, etcd: &EtcdServer) -> Result<T> {
    result.with_context(|| format!("etcd's last words:\n{}\nand here", etcd.log_tail()))
}

/// Kills one node after the other. Each comes back at once, under its name.
async fn churn(fleet: &mut Fleet, etcd: &EtcdServer, minutes: u32) -> Result<Churned> {
    let watch = Stopwatch::start(etcd).await?;
    let before = fleet.history().await?;
    let (count, round, size) = (fleet.singles.len(), fleet.seen().await?.round, fleet.size());
    let (every, all) = (MINUTE / count as u32, count as u32 * minutes);
    let (mut killed, mut at_work, mut looks) = (0, 0.0, 0.0);
    while elastic_store::clock::now().since(watch.begun) < MINUTE * minutes {
        if killed < all && elastic_store::clock::now().since(watch.begun) >= every * killed {
            let gone = fleet.singles.remove(0);
            let names = gone.names();
            drop(gone);
            let back = fleet.come(names, Duration::ZERO).await?;
            fleet.singles.push(back);
            killed += 1;
        }
        at_work += f64::from(fleet.seen().await?.at_work) / f64::from(size);
        looks += 1.0;
        tokio::time::sleep(LOOK).await;
    }
    let ended = elastic_store::clock::now();
    fleet.all_run(round + 1, ended, WITHIN).await?;
    let settled = elastic_store::clock::now().since(ended);
    let load = EtcdLoad::of(&etcd.address()).await? - watch.before;
    tell_new(&before, &fleet.history().await?);
    Ok(Churned { minutes, killed, rounds: fleet.seen().await?.round - round, at_work: at_work / looks, settled, load })
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
    let round = fleet.seen().await?.round;
    let watch = Stopwatch::start(etcd).await?;
    coordinator.kill();
    fleet.until_led(WITHIN, |leader| !leader.coordinator).await?;
    let led = elastic_store::clock::now().since(watch.begun);
    let step = watch.stop("the coordinator is killed → a node leads", fleet.size(), vec![led]).await?;
    tokio::time::sleep(SETTLE).await;
    let seen = fleet.seen().await?;
    ensure!(seen.round == round && seen.at_work == fleet.size(), "the round did not survive");
    let begun = elastic_store::clock::now();
    fleet.fail_one()?;
    fleet.all_run(round + 1, begun, WITHIN).await.context("the round after it")?;
    Ok(step)
}
