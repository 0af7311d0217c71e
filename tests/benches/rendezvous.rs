//! How long nodes take to agree on a round, and what that costs the store: drivers side by side in one process on real
//! etcd, workers as words. Run by `make bench`; sizes can be named: `cargo bench --bench rendezvous -- 2 64`.

#![allow(clippy::print_stdout, clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use elastic_coordinator::job::{FailureClass, JobId, Keys, Spec, Timings};
use elastic_coordinator::store::Store;
use elastic_coordinator::store::etcd::{EtcdConfig, EtcdStore};
use elastic_coordinator::time::Time;
use elastic_tests::counted::Counted;
use elastic_tests::etcd::{EtcdOptions, EtcdServer};
use elastic_tests::fleet::{FleetNode, quick_spec, start_node};

const WITHIN: Duration = Duration::from_secs(60);

/// What one job showed.
struct Sample {
    first: Duration,
    again: Duration,
    first_calls: BTreeMap<&'static str, u64>,
    again_calls: BTreeMap<&'static str, u64>,
}

fn main() -> Result<()> {
    let sizes: Vec<u32> = std::env::args().skip(1).filter_map(|arg| arg.parse().ok()).collect();
    let sizes = if sizes.is_empty() { vec![2, 4, 8, 16, 32, 64, 256, 1000] } else { sizes };
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    runtime.block_on(async {
        let etcd = EtcdServer::start(EtcdOptions::default()).await;
        println!("rendezvous on etcd, default timings; milliseconds: median (min–max)");
        println!(
            "{:>6} {:>22} {:>22}   store requests per node, first / again",
            "nodes", "last join → ranks", "failure → ranks"
        );
        for nodes in sizes {
            let runs = if nodes <= 64 { 5 } else { 3 };
            let mut samples = Vec::new();
            for run in 0..runs {
                samples.push(measure(&etcd.address(), nodes, run).await?);
            }
            report(nodes, &samples);
        }
        Ok(())
    })
}

async fn measure(endpoint: &str, size: u32, run: u32) -> Result<Sample> {
    let store = Arc::new(Counted::new(Arc::new(EtcdStore::connect(EtcdConfig::new([endpoint]))?)));
    let job: JobId = format!("bench-{size}-{run}").parse()?;
    let keys = Keys::new("/bench", &job);
    let spec = Spec { timings: Timings::default(), ..quick_spec(size, size) };
    let start = |index: u32| {
        let (store, keys, job, spec) = (Arc::clone(&store) as Arc<dyn Store>, keys.clone(), job.clone(), spec.clone());
        async move { start_node(store, keys, &job, spec, &format!("n{index}")).await }
    };
    let mut nodes: Vec<FleetNode> = Vec::new();
    for index in 1..size {
        nodes.push(start(index).await?);
    }
    let until = Time::now() + WITHIN;
    while store.range(&keys.nodes()).await?.0.len() + 1 < size as usize {
        anyhow::ensure!(Time::now() < until, "not all nodes came to wait");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let mut first_calls = store.take();
    first_calls.remove("keep-alive");

    let begun = Time::now();
    nodes.push(start(0).await?);
    let first = all_run(&mut nodes, 1, size).await?.since(begun);
    for (kind, count) in store.take() {
        *first_calls.entry(kind).or_default() += count;
    }

    let begun = Time::now();
    nodes.last().context("a node")?.fail(FailureClass::Own, "on purpose");
    let again = all_run(&mut nodes, 2, size).await?.since(begun);
    let again_calls = store.take();

    nodes.iter().for_each(FleetNode::finish);
    for node in nodes {
        node.parting(WITHIN).await?;
    }
    Ok(Sample { first, again, first_calls, again_calls })
}

/// When the last node's workers of a round were started.
async fn all_run(nodes: &mut [FleetNode], round: u64, size: u32) -> Result<Time> {
    let mut last = Time::ZERO;
    for node in nodes {
        node.runs(round, size, WITHIN).await?;
        let place = node.place.borrow();
        last = last.max(place.as_ref().map_or(Time::ZERO, |(_, at)| *at));
    }
    Ok(last)
}

fn report(nodes: u32, samples: &[Sample]) {
    let spread = |pick: &dyn Fn(&Sample) -> Duration| {
        let mut all: Vec<f64> = samples.iter().map(|sample| pick(sample).as_secs_f64() * 1e3).collect();
        all.sort_by(f64::total_cmp);
        format!("{:.1} ({:.1}–{:.1})", all[all.len() / 2], all[0], all[all.len() - 1])
    };
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
        "{nodes:>6} {:>22} {:>22}   {} / {}",
        spread(&|sample| sample.first),
        spread(&|sample| sample.again),
        calls(&|sample| &sample.first_calls),
        calls(&|sample| &sample.again_calls),
    );
}
