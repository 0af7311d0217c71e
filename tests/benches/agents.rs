//! What the built agent costs and how fast it acts: launch, idle, and recovery on real etcd with two nodes of two
//! workers that import nothing. Run by `make bench`. torchrun's figures for the same cases are in
//! `docs/performance.md`.

#![allow(clippy::print_stdout, clippy::unwrap_used, clippy::expect_used)]

#[allow(dead_code)] // Other benchmarks need more of it.
mod launchers;

use anyhow::{Context, Result, ensure};
use elastic_tests::prelude::*;
use elastic_tests::processor::{memory_kb, process};

use launchers::{Launcher, Sleepers, Started, now};

const LAUNCHES: usize = 20;
const RECOVERIES: usize = 7;
const IDLE: Duration = Duration::from_secs(20);

fn main() -> Result<()> {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
    runtime.block_on(async {
        launch()?;
        let etcd = EtcdServer::start(EtcdOptions::default()).await;
        idle(&etcd)?;
        recovery(&etcd, "a worker killed → all workers of the next round started", kill_worker)?;
        recovery(&etcd, "an agent killed → the survivor's workers of the next round started", kill_agent)?;
        recovery(&etcd, "SIGTERM to an agent → the other's workers of the next round started", preempt_follower)?;
        recovery(&etcd, "SIGTERM to the agent that came first, which leads as a rule → the same", preempt_leader)
    })
}

fn launch() -> Result<()> {
    let mut times = Vec::new();
    for _ in 0..LAUNCHES {
        let begun = Instant::now();
        let status =
            Launcher::Ours.command().args(["--standalone", "--no-python", "--log-dir=/dev/null", "true"]).status()?;
        ensure!(status.success(), "the agent failed: {status}");
        times.push(begun.elapsed());
    }
    println!("launch of `--standalone --no-python true`: {:.1} ms, n {LAUNCHES}", Spread::of_ms(times));
    Ok(())
}

/// An agent with one worker that does nothing, met through etcd.
fn idle(etcd: &EtcdServer) -> Result<()> {
    let job = start(etcd, "idle", 1, 1)?;
    job.whole(1)?;
    let agent = &job.launchers[0];
    let pid = agent.pid().to_string();
    let children = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children"))?;
    let guard = children.split_whitespace().next().context("its guard")?;
    let before = process(&pid)? + process(guard)?;
    std::thread::sleep(IDLE);
    let busy = (process(&pid)? + process(guard)? - before).as_secs_f64() / IDLE.as_secs_f64() * 100.0;
    let mib = |kilobytes: u64| kilobytes as f64 / 1024.0;
    println!(
        "idle agent: {:.1} MiB, guard {:.1} MiB (proportional set size); peak of the agent {:.1} MiB; {busy:.2} % of a \
         core",
        mib(memory_kb(&pid)?),
        mib(memory_kb(guard)?),
        mib(agent.kilobytes("VmHWM:"))
    );
    Ok(())
}

/// What is done to a job of two agents with two workers each. How many workers the next round has.
type Kill = fn(&mut [Process], &[Started]) -> usize;

fn recovery(etcd: &EtcdServer, what: &str, kill: Kill) -> Result<()> {
    let mut times = Vec::new();
    for run in 0..RECOVERIES {
        let mut job = start(etcd, &format!("recovery-{}-{run}", what.len()), 2, 2)?;
        let first = job.whole(4)?;
        // The round is reported as running a moment after its workers have started.
        std::thread::sleep(Duration::from_secs(1));
        let begun = now()?;
        let left = kill(&mut job.launchers, &first);
        times.push(job.started_since(begun, left)?);
    }
    println!("{what}: {:.1} ms, n {RECOVERIES}", Spread::of(&times));
    Ok(())
}

fn kill_worker(_: &mut [Process], workers: &[Started]) -> usize {
    send(workers[3].pid, Signal::KILL);
    4
}

fn kill_agent(agents: &mut [Process], _: &[Started]) -> usize {
    agents[1].kill();
    2
}

/// The first to come leads, as a rule.
fn preempt_leader(agents: &mut [Process], _: &[Started]) -> usize {
    agents[0].signal(Signal::TERM);
    2
}

fn preempt_follower(agents: &mut [Process], _: &[Started]) -> usize {
    agents[1].signal(Signal::TERM);
    2
}

fn start(etcd: &EtcdServer, id: &str, nodes: usize, workers: usize) -> Result<Sleepers> {
    let mut job = Sleepers::new()?;
    for node in ["a", "b"].into_iter().take(nodes) {
        let flags = [
            format!("--rdzv-endpoint={}", etcd.address()),
            format!("--rdzv-id={id}"),
            format!("--nnodes=1:{nodes}"),
            format!("--nproc-per-node={workers}"),
            format!("--node-name={node}"),
        ];
        let own = ["--rdzv-backend=etcd", "--max-restarts=3", "--log-dir=/dev/null"];
        job.start(Launcher::Ours, &[&own[..], &flags.each_ref().map(String::as_str)].concat());
    }
    Ok(job)
}
