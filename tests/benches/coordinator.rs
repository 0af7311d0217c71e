//! What a coordinator costs with many jobs, and how soon it answers: 50 jobs of 20 nodes each, drivers in one process on
//! real etcd, simulated workers; the built `elastic-coordinator` and `elasticctl`. Run by `make bench`; another number of
//! jobs and of nodes in each can be given: `cargo bench --bench coordinator -- 10 100`.

#![allow(clippy::print_stdout, clippy::unwrap_used)]

use anyhow::{Context, Result};
use elastic_rendezvous::job::Timings;
use elastic_tests::http::get;
use elastic_tests::prelude::*;
use elastic_tests::processor::{memory_kb, process};

const WITHIN: Duration = Duration::from_secs(120);

/// Nodes that share a connection to etcd. Agents have one each.
const SHARED: usize = 250;

/// How long what the jobs cost at rest is measured for.
const REST: Duration = Duration::from_secs(20);

/// Clients that wait for the events of one job. The coordinator answers 64 connections at once.
const WAITING: usize = 50;

/// Kilobytes that a process has in memory, and how long its threads have been on a processor.
fn cost(pid: u32) -> Result<(u64, Duration)> {
    let pid = pid.to_string();
    Ok((memory_kb(&pid)?, process(&pid)?))
}

async fn timed<T>(runs: usize, mut run: impl AsyncFnMut() -> Result<T>) -> Result<(Spread, T)> {
    let mut times = Vec::new();
    loop {
        let begun = Instant::now();
        let result = run().await?;
        times.push(begun.elapsed());
        if times.len() >= runs {
            return Ok((Spread::of_ms(times), result));
        }
    }
}

#[expect(clippy::too_many_lines, reason = "one scenario, step after step")]
#[tokio::main(flavor = "multi_thread", worker_threads = 2)]
async fn main() -> Result<()> {
    let sizes: Vec<usize> = std::env::args().skip(1).filter_map(|arg| arg.parse().ok()).collect();
    let (jobs, size) = match sizes[..] {
        [jobs, size, ..] => (jobs, size),
        _ => (50, 20),
    };
    let etcd = EtcdServer::start(EtcdOptions::default()).await;
    let address = etcd.address();
    let args = ["--etcd", &address, "--peer-listen", "127.0.0.1:0", "--http", "127.0.0.1:0", "--http-jobs"];
    let coordinator = Process::start("elastic-coordinator", &args);
    let page = coordinator.says("http://", WITHIN).await;
    let (idle, _) = cost(coordinator.pid())?;

    let connect = || anyhow::Ok(Arc::new(EtcdStore::connect(EtcdConfig::new([address.clone()]))?));
    let mut stores: Vec<Arc<dyn Store>> = Vec::new();
    let mut groups: Vec<(Keys, Vec<InProcessNode>)> = Vec::new();
    let begun = Instant::now();
    for number in 0..jobs {
        let job: JobId = format!("job-{number:03}").parse()?;
        let keys = Keys::new(Keys::DEFAULT_PREFIX, &job);
        let spec = Spec { timings: Timings::default(), ..quick_spec(size as u32, size as u32) };
        let mut nodes = Vec::new();
        for node in 0..size {
            if (number * size + node) % SHARED == 0 {
                stores.push(connect()?);
            }
            let store = Arc::clone(stores.last().context("a connection")?);
            nodes.push(start_node(store, keys.clone(), &job, spec.clone(), &format!("node-{node:03}")).await?);
        }
        groups.push((keys, nodes));
    }
    for (keys, nodes) in &mut groups {
        for node in nodes {
            node.runs(1, size as u32, WITHIN).await?;
        }
        // The coordinator takes each job over once it runs.
        let until = Instant::now() + WITHIN;
        while !stores[0]
            .get(&keys.leader())
            .await?
            .is_some_and(|kv| Versioned::<LeaderRecord>::parse(&kv).is_ok_and(|leader| leader.value.coordinator))
        {
            anyhow::ensure!(Instant::now() < until, "the coordinator does not lead {}", keys.root());
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
    println!("one coordinator, {jobs} jobs of {size} nodes, default timings; median (min–max)");
    println!("all jobs run and are led by it after    {:8.1} s", begun.elapsed().as_secs_f64());

    let (_, before) = cost(coordinator.pid())?;
    tokio::time::sleep(REST).await;
    let (memory, after) = cost(coordinator.pid())?;
    let busy = (after - before).as_secs_f64() / REST.as_secs_f64() * 100.0;
    println!(
        "its memory, without and with the jobs   {:8.1} and {:.1} MiB",
        idle as f64 / 1024.0,
        memory as f64 / 1024.0
    );
    println!("its processor time at rest              {busy:8.2} % of one");

    for (what, path) in
        [("GET /v1/jobs", "/v1/jobs"), ("GET /v1/jobs/JOB", "/v1/jobs/job-000"), ("GET /metrics", "/metrics")]
    {
        let (took, body) = timed(20, async || get(&page, path).await).await?;
        println!("{what:<39} {took:.1} ms, {:.1} kB", body.len() as f64 / 1000.0);
    }
    let mut files = 0;
    for path in ["/", "/page.css", "/page.js"] {
        files += get(&page, path).await?.len();
    }
    println!("the page's three files                  {:8.1} kB", files as f64 / 1000.0);
    for args in [&["jobs"][..], &["describe", "job-000"]] {
        let (took, _) = timed(5, async || {
            let args = [&["--etcd", &address], args].concat();
            let output = output("elasticctl", &args, WITHIN).await;
            anyhow::ensure!(output.status.success(), "elasticctl {args:?}");
            Ok(())
        })
        .await?;
        println!("{:<39} {took:.1} ms", format!("elasticctl {}", args.join(" ")));
    }

    // Each client asks for what follows the newest event; then a worker fails.
    let newest: serde_json::Value = serde_json::from_slice(&get(&page, "/v1/jobs/job-000/events").await?)?;
    let path = format!("/v1/jobs/job-000/events?after={}&wait=8", newest["next"]);
    let waiting: Vec<_> = (0..WAITING)
        .map(|_| {
            let (page, path) = (page.clone(), path.clone());
            tokio::spawn(async move { get(&page, &path).await.map(|_| Instant::now()) })
        })
        .collect();
    // Until all wait.
    tokio::time::sleep(Duration::from_secs(1)).await;
    let failed = Instant::now();
    groups[0].1[0].fail(FailureClass::Own, "on purpose");
    let mut heard = Vec::new();
    for client in waiting {
        heard.push(client.await??.duration_since(failed));
    }
    println!("a failure → {WAITING} clients have heard of it   {:.1} ms", Spread::of_ms(heard));
    Ok(())
}
