//! elastic-agent and torchrun by the same protocol, on one etcd with the v2 API, taking turns: recovery after a
//! worker's death, and what an idle group asks of etcd. The workers import nothing. Needs PyTorch; run by `make
//! bench-torch`.

#![allow(clippy::print_stdout)]

#[allow(dead_code)] // Other benchmarks need more of it.
mod launchers;

use anyhow::{Context, Result};
use elastic_tests::http::get;
use elastic_tests::prelude::*;

use launchers::{Launcher, Sleepers, now};

const TIMES: usize = 3;
const NODES: usize = 2;
const IDLE: Duration = Duration::from_secs(20);

fn main() -> Result<()> {
    let torch = Torch::find().context("there is no torchrun to compare with")?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let etcd = runtime.block_on(EtcdServer::start(EtcdOptions::with_v2()));
    let counted = || runtime.block_on(counted(&etcd.address()));
    let mut recoveries = [Vec::new(), Vec::new()];
    let mut requests = [Vec::new(), Vec::new()];
    for turn in 0..TIMES {
        for (at, launcher) in [Launcher::Torchrun(&torch), Launcher::Ours].into_iter().enumerate() {
            let job = job(&etcd.address(), launcher, &format!("{at}-{turn}"))?;
            let first = job.whole(NODES)?;
            // What belongs to the start is over.
            std::thread::sleep(Duration::from_secs(2));
            let before = counted()?;
            std::thread::sleep(IDLE);
            let asked = counted()?.checked_sub(before).context("etcd counts on")?;
            requests[at].push(asked as f64 / IDLE.as_secs_f64() / NODES as f64);
            let begun = now()?;
            send(first[0].pid, Signal::KILL);
            recoveries[at].push(job.started_since(begun, NODES)? / 1e3);
        }
    }
    report("a worker killed → all workers of the next group started", "s", &recoveries);
    report("requests of an idle agent", "a second", &requests);
    Ok(())
}

fn report(what: &str, unit: &str, samples: &[Vec<f64>; 2]) {
    let [theirs, ours] = samples.each_ref().map(|samples| Spread::of(samples));
    println!("{what}, {unit}, n {TIMES}: torchrun {theirs}   elastic-agent {ours}");
}

/// All requests that etcd says it has carried out through its v2 API. Not reads that failed: etcd itself looks in vain
/// for its users with every request.
async fn counted(address: &str) -> Result<u64> {
    let stats: Value = serde_json::from_slice(&get(address, "/v2/stats/store").await?)?;
    let counters = stats.as_object().context("counters")?;
    let of_requests = |name: &&String| name.ends_with("Success") || name.ends_with("Fail") && *name != "getsFail";
    Ok(counters.keys().filter(of_requests).filter_map(|name| counters[name].as_u64()).sum())
}

fn job(etcd: &str, launcher: Launcher, id: &str) -> Result<Sleepers> {
    let mut job = Sleepers::new()?;
    for node in 0..NODES {
        let own = match launcher {
            Launcher::Torchrun(_) => vec!["--rdzv-backend=etcd".to_owned()],
            Launcher::Ours => vec!["--rdzv-backend=etcd-v2".to_owned(), format!("--node-name=node{node}")],
        };
        let of_all = [format!("--rdzv-endpoint={etcd}"), format!("--rdzv-id=job-{id}"), format!("--nnodes={NODES}")];
        let flags: Vec<&str> = own.iter().chain(&of_all).map(String::as_str).collect();
        job.start(launcher, &[&flags[..], &["--max-restarts=3", "--local-addr=127.0.0.1"]].concat());
    }
    Ok(job)
}
