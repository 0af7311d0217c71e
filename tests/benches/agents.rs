//! What the built agent costs and how fast it acts: launch, idle, and recovery on real etcd with two nodes of two
//! workers that import nothing. Run by `make bench`. torchrun's figures for the same cases are in
//! `docs/performance.md`.

#![allow(clippy::print_stdout, clippy::unwrap_used, clippy::expect_used)]

use std::fs;
use std::time::UNIX_EPOCH;

use anyhow::{Context, Result, ensure};
use elastic_tests::prelude::*;

const LAUNCHES: usize = 20;
const RECOVERIES: usize = 7;
const IDLE: Duration = Duration::from_secs(20);
const WITHIN: Duration = Duration::from_secs(30);

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

fn spread(name: &str, mut all: Vec<f64>, unit: &str) {
    all.sort_by(f64::total_cmp);
    println!(
        "{name}: {:.1} {unit} (min {:.1}, max {:.1}, n {})",
        all[all.len() / 2],
        all[0],
        all[all.len() - 1],
        all.len()
    );
}

fn launch() -> Result<()> {
    let mut times = Vec::new();
    for _ in 0..LAUNCHES {
        let begun = Instant::now();
        let status = Command::new(binary("elastic-agent"))
            .args(["--standalone", "--no-python", "--log-dir=/dev/null", "true"])
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .status()?;
        ensure!(status.success(), "the agent failed: {status}");
        times.push(begun.elapsed().as_secs_f64() * 1e3);
    }
    spread("launch of `--standalone --no-python true`", times, "ms");
    Ok(())
}

/// An agent with one worker that does nothing, met through etcd.
fn idle(etcd: &EtcdServer) -> Result<()> {
    let dir = tempfile::tempdir()?;
    let mut agent = start(etcd, "idle", "a", 1, 1, dir.path())?;
    wait_for(dir.path(), 1, 1, WITHIN)?;
    let pid = agent.id();
    let guard = children(pid).into_iter().find(|child| name(*child) == "elastic-guard").context("its guard")?;
    let before = cpu(pid)? + cpu(guard)?;
    std::thread::sleep(IDLE);
    let busy = (cpu(pid)? + cpu(guard)? - before) / IDLE.as_secs_f64() * 100.0;
    println!(
        "idle agent: {:.1} MiB, guard {:.1} MiB (proportional set size); peak of the agent {:.1} MiB; {busy:.2} % of a \
         core",
        pss(pid)?,
        pss(guard)?,
        status_kib(pid, "VmHWM:")? / 1024.0
    );
    end(&mut agent)
}

fn recovery(etcd: &EtcdServer, what: &str, kill: fn(&mut [Child], &[Started]) -> Result<usize>) -> Result<()> {
    let mut times = Vec::new();
    for run in 0..RECOVERIES {
        let dir = tempfile::tempdir()?;
        let job = format!("recovery-{}-{run}", what.len());
        let mut agents = vec![start(etcd, &job, "a", 2, 2, dir.path())?, start(etcd, &job, "b", 2, 2, dir.path())?];
        let first = wait_for(dir.path(), 1, 4, WITHIN)?;
        // The round is reported as running a moment after its workers have started.
        std::thread::sleep(Duration::from_secs(1));
        let begun = SystemTime::now().duration_since(UNIX_EPOCH)?.as_nanos();
        let left = kill(&mut agents, &first)?;
        let next = wait_for(dir.path(), 2, left, WITHIN)?;
        let last = next.iter().map(|started| started.at).max().context("a worker")?;
        times.push(last.saturating_sub(begun) as f64 / 1e6);
        for agent in &mut agents {
            end(agent)?;
        }
    }
    spread(what, times, "ms");
    Ok(())
}

fn kill_worker(_: &mut [Child], workers: &[Started]) -> Result<usize> {
    kill_process(pid(workers[3].pid)?, Signal::KILL)?;
    Ok(4)
}

fn kill_agent(agents: &mut [Child], _: &[Started]) -> Result<usize> {
    agents[1].kill()?;
    Ok(2)
}

/// The first to come leads, as a rule.
fn preempt_leader(agents: &mut [Child], _: &[Started]) -> Result<usize> {
    kill_process(pid(agents[0].id())?, Signal::TERM)?;
    Ok(2)
}

fn preempt_follower(agents: &mut [Child], _: &[Started]) -> Result<usize> {
    kill_process(pid(agents[1].id())?, Signal::TERM)?;
    Ok(2)
}

/// A worker's own word that it was exec'd.
struct Started {
    pid: u32,
    at: u128,
}

/// `nodes` and `workers` of each; every worker writes `pid nanoseconds` to a file of its round and rank.
fn start(etcd: &EtcdServer, job: &str, node: &str, nodes: u32, workers: u32, dir: &Path) -> Result<Child> {
    // The agent makes one dollar of two, as torchrun does.
    let script = format!(
        "echo $$$$ $(date +%s%N) > {0}/tmp-$ELASTIC_ROUND-$RANK; mv {0}/tmp-$ELASTIC_ROUND-$RANK \
         {0}/$ELASTIC_ROUND-$RANK; exec sleep 1000",
        dir.display()
    );
    let child = Command::new(binary("elastic-agent"))
        .args(["--rdzv-backend=etcd", &format!("--rdzv-endpoint={}", etcd.address()), &format!("--rdzv-id={job}")])
        .args([&format!("--nnodes=1:{nodes}"), &format!("--nproc-per-node={workers}"), &format!("--node-name={node}")])
        .args(["--max-restarts=3", "--log-dir=/dev/null", "--no-python", "sh", "-c", &script])
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()?;
    Ok(child)
}

fn wait_for(dir: &Path, round: u32, workers: usize, within: Duration) -> Result<Vec<Started>> {
    let begun = Instant::now();
    loop {
        let read = |rank: usize| {
            let text = fs::read_to_string(dir.join(format!("{round}-{rank}"))).ok()?;
            let (pid, at) = text.trim().split_once(' ')?;
            Some(Started { pid: pid.parse().ok()?, at: at.parse().ok()? })
        };
        let all: Vec<Started> = (0..workers).filter_map(read).collect();
        if all.len() == workers {
            return Ok(all);
        }
        ensure!(begun.elapsed() < within, "round {round} has {} of {workers} workers after {within:?}", all.len());
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Ends an agent for good: once asks, the second time insists.
fn end(agent: &mut Child) -> Result<()> {
    let begun = Instant::now();
    let own = pid(agent.id())?;
    while agent.try_wait()?.is_none() {
        // It may have gone between the two calls.
        let _ = kill_process(own, if begun.elapsed() > WITHIN { Signal::KILL } else { Signal::TERM });
        std::thread::sleep(Duration::from_millis(100));
    }
    Ok(())
}

fn pid(number: u32) -> Result<Pid> {
    Pid::from_raw(i32::try_from(number)?).context("a process id")
}

fn name(pid: u32) -> String {
    fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default().trim().to_owned()
}

fn children(parent: u32) -> Vec<u32> {
    let of = |pid: &u32| status_kib(*pid, "PPid:").is_ok_and(|own| own as u32 == parent);
    let all = fs::read_dir("/proc").into_iter().flatten().flatten();
    all.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).filter(of).collect()
}

/// A number out of `/proc/<pid>/status`.
fn status_kib(pid: u32, field: &str) -> Result<f64> {
    number(&fs::read_to_string(format!("/proc/{pid}/status"))?, field)
}

fn pss(pid: u32) -> Result<f64> {
    Ok(number(&fs::read_to_string(format!("/proc/{pid}/smaps_rollup"))?, "Pss:")? / 1024.0)
}

fn number(text: &str, field: &str) -> Result<f64> {
    let line = text.lines().find_map(|line| line.strip_prefix(field)).with_context(|| format!("no {field}"))?;
    Ok(line.split_whitespace().next().context("a number")?.parse()?)
}

/// CPU time used, in seconds.
fn cpu(pid: u32) -> Result<f64> {
    let text = fs::read_to_string(format!("/proc/{pid}/stat"))?;
    let fields: Vec<&str> = text.rsplit_once(')').context("a stat line")?.1.split_whitespace().collect();
    let ticks: f64 = fields[11].parse::<f64>()? + fields[12].parse::<f64>()?;
    Ok(ticks / rustix::param::clock_ticks_per_second() as f64)
}
