//! How long nodes take to agree on a round, and what that costs the store and the leader: drivers in one process on
//! real etcd, simulated workers; the node that leads has a thread of its own, as an agent has. Run by `make bench`;
//! sizes can be named: `cargo bench --bench rendezvous -- 2 64`.

#![allow(clippy::print_stdout, clippy::unwrap_used)]

use anyhow::{Context, Result};
use elastic_rendezvous::job::Timings;
use elastic_rendezvous::time::Time;
use elastic_store::OpResult;
use elastic_tests::counting_store::CountingStore;
use elastic_tests::prelude::*;
use elastic_tests::processor::process;
use elastic_tests::rack::Rack;

const WITHIN: Duration = Duration::from_secs(120);

/// From this size on, what a running job costs its leader is measured too.
const LARGE: u32 = 256;

/// Nodes that come at once before the last one does, and that share a connection to etcd. Agents have one each.
const WAVE: u32 = 250;

/// Jobs of more nodes are run on etcd 3.5: on two cores 3.4 falls behind them. See `docs/performance.md`.
const MOST_ON_ANY: u32 = 2_000;

/// How long a job runs before its cost at rest is measured, and how long that is measured for.
const SETTLE: Duration = Duration::from_secs(3);
const REST: Duration = Duration::from_secs(10);

#[derive(Clone, Copy)]
struct Used {
    leader: Duration,
    /// The other nodes.
    nodes: Duration,
    etcd: Duration,
}

impl Used {
    fn since(self, before: Used) -> Used {
        let less = |now: Duration, then: Duration| now.saturating_sub(then);
        Used {
            leader: less(self.leader, before.leader),
            nodes: less(self.nodes, before.nodes),
            etcd: less(self.etcd, before.etcd),
        }
    }
}

struct Sample {
    first: Duration,
    again: Duration,
    first_calls: BTreeMap<&'static str, u64>,
    again_calls: BTreeMap<&'static str, u64>,
    joining: Used,
    forming: Used,
    resting: Option<Used>,
}

fn used(leader: &Rack, etcd: &EtcdServer) -> Result<Used> {
    let pid = etcd.pid().context("etcd runs")?.to_string();
    let leader = leader.used()?;
    Ok(Used { leader, nodes: process("self")?.saturating_sub(leader), etcd: process(&pid)? })
}

fn main() -> Result<()> {
    let sizes: Vec<u32> = std::env::args().skip(1).filter_map(|arg| arg.parse().ok()).collect();
    let sizes = if sizes.is_empty() { vec![2, 4, 8, 16, 32, 64, 256, 1000, 2000, 4000] } else { sizes };
    let runtime = || tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    let etcd = runtime()?.block_on(EtcdServer::start(EtcdOptions::default()));
    println!("rendezvous on etcd, default timings; milliseconds: median (min–max)");
    println!(
        "{:>6} {:>24} {:>24}   store requests per node, first / again",
        "nodes", "last join → ranks", "failure → ranks"
    );
    for nodes in sizes {
        let runs = if nodes <= 64 { 5 } else { 3 };
        let newer = if nodes > MOST_ON_ANY {
            let Some(binary) = etcd_of("3.5") else { continue };
            println!("on etcd 3.5:");
            let options = EtcdOptions { binary: Some(binary), ..EtcdOptions::default() };
            Some(runtime()?.block_on(EtcdServer::start(options)))
        } else {
            None
        };
        let etcd = newer.as_ref().unwrap_or(&etcd);
        // Each in a runtime of its own, with which the nodes' ports end.
        let samples: Result<Vec<_>> = (0..runs).map(|run| runtime()?.block_on(measure(etcd, nodes, run))).collect();
        report(nodes, &samples?);
    }
    Ok(())
}

#[expect(clippy::too_many_lines, reason = "one scenario, step after step")]
async fn measure(etcd: &EtcdServer, size: u32, run: u32) -> Result<Sample> {
    let connect = || anyhow::Ok(EtcdStore::connect(EtcdConfig::new([etcd.address()]))?);
    let leader = Rack::start()?;
    let watcher = connect()?;
    let connections = (0..=size / WAVE).map(|_| Ok(Arc::new(CountingStore::new(Arc::new(connect()?)))));
    let stores = connections.collect::<Result<Vec<_>>>()?;
    let store = |index: u32| Arc::clone(&stores[(index / WAVE) as usize]);
    let leaders_store = {
        let _entered = leader.handle().enter();
        Arc::new(CountingStore::new(Arc::new(connect()?)))
    };
    let calls = || {
        let mut calls = BTreeMap::new();
        for store in stores.iter().chain([&leaders_store]) {
            store.take().into_iter().for_each(|(kind, count)| *calls.entry(kind).or_default() += count);
        }
        calls.remove("keep-alive");
        calls
    };
    let job: JobId = format!("bench-{size}-{run}").parse()?;
    let keys = Keys::new("/bench", &job);
    let spec = Spec { timings: Timings::default(), ..quick_spec(size, size) };
    let start = |index: u32, store: Arc<CountingStore>| {
        let (keys, job, spec) = (keys.clone(), job.clone(), spec.clone());
        async move { start_node(store, keys, &job, spec, &format!("n{index}")).await }
    };
    let come = async |count: u32| -> Result<()> {
        let until = elastic_store::clock::now() + WITHIN;
        loop {
            // Where thousands come, etcd may be late with an answer.
            if let Ok(read) = watcher.txn(Txn::of([Op::count(keys.nodes()), Op::get(keys.leader())])).await
                && let [OpResult::Count(here), leader] = &read.results[..]
                && *here >= i64::from(count)
                && (count == 0 || leader.value().is_some())
            {
                return Ok(());
            }
            anyhow::ensure!(elastic_store::clock::now() < until, "not all nodes came to wait");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    let mut nodes: Vec<InProcessNode> = Vec::new();
    if size > 1 {
        nodes.push(leader.handle().spawn(start(1, Arc::clone(&leaders_store))).await??);
        come(1).await?;
    }
    for index in 2..size {
        nodes.push(start(index, store(index)).await?);
        // All share a process here: thousands at once would wait for that, and not for each other.
        if index % WAVE == 0 {
            come(index).await?;
        }
    }
    come(size - 1).await?;
    let mut first_calls = calls();

    let (begun, before) = (elastic_store::clock::now(), used(&leader, etcd)?);
    nodes.push(start(0, store(0)).await?);
    let first = all_run(&mut nodes, 1, size).await?.since(begun);
    let joining = used(&leader, etcd)?.since(before);
    anyhow::ensure!(size == 1 || nodes[0].status.borrow().leading, "another node leads");
    for (kind, count) in calls() {
        *first_calls.entry(kind).or_default() += count;
    }

    let mut resting = None;
    if size >= LARGE {
        tokio::time::sleep(SETTLE).await;
        let before = used(&leader, etcd)?;
        tokio::time::sleep(REST).await;
        resting = Some(used(&leader, etcd)?.since(before));
        calls();
    }

    let (begun, before) = (elastic_store::clock::now(), used(&leader, etcd)?);
    nodes.last().context("a node")?.fail(FailureClass::Own, "on purpose");
    let again = all_run(&mut nodes, 2, size).await?.since(begun);
    let forming = used(&leader, etcd)?.since(before);
    let again_calls = calls();

    nodes.iter().for_each(InProcessNode::finish);
    for node in nodes {
        node.parting(WITHIN).await?;
    }
    Ok(Sample { first, again, first_calls, again_calls, joining, forming, resting })
}

/// When the last node's workers of a round were started.
async fn all_run(nodes: &mut [InProcessNode], round: u64, size: u32) -> Result<Time> {
    let mut last = Time::ZERO;
    for node in nodes {
        node.runs(round, size, WITHIN).await?;
        let place = node.place.borrow();
        last = last.max(place.as_ref().map_or(Time::ZERO, |(_, at)| *at));
    }
    Ok(last)
}

fn report(nodes: u32, samples: &[Sample]) {
    let spread = |pick: &dyn Fn(&Sample) -> Duration| format!("{:.1}", Spread::of_ms(samples.iter().map(pick)));
    let calls = |pick: &dyn Fn(&Sample) -> &BTreeMap<&'static str, u64>| {
        let mut sums: BTreeMap<&str, u64> = BTreeMap::new();
        for sample in samples {
            pick(sample).iter().for_each(|(kind, count)| *sums.entry(kind).or_default() += count);
        }
        let each = |count: u64| count as f64 / samples.len() as f64 / f64::from(nodes);
        let all: Vec<String> = sums.iter().map(|(kind, count)| format!("{kind} {:.2}", each(*count))).collect();
        all.join(", ")
    };
    println!(
        "{nodes:>6} {:>24} {:>24}   {} / {}",
        spread(&|sample| sample.first),
        spread(&|sample| sample.again),
        calls(&|sample| &sample.first_calls),
        calls(&|sample| &sample.again_calls),
    );
    if nodes < LARGE {
        return;
    }
    let of = |pick: &dyn Fn(&Sample) -> Option<Used>| {
        let part =
            |of: fn(&Used) -> Duration| Spread::of_ms(samples.iter().filter_map(pick).map(|used| of(&used))).median;
        (part(|used| used.leader), part(|used| used.nodes), part(|used| used.etcd))
    };
    let line = |(leader, nodes, etcd): (f64, f64, f64)| format!("leader {leader:.0}, nodes {nodes:.0}, etcd {etcd:.0}");
    println!("       processor time in ms, first: {}", line(of(&|sample| Some(sample.joining))));
    println!("       the same, again: {}", line(of(&|sample| Some(sample.forming))));
    let (leader, ..) = of(&|sample| sample.resting);
    println!("       the leader while they run: {:.1} % of a core", leader / 10.0 / REST.as_secs_f64());
}
