//! elastic-agent and torchrun by the same protocol, on one etcd with the v2 API, taking turns: recovery after a
//! worker's death, and what an idle group asks of etcd. The workers import nothing. Needs PyTorch; run by `make
//! bench-torch`.

#![allow(clippy::print_stdout)]

use std::fs;
use std::io::{Read, Write};

use anyhow::{Context, Result, bail, ensure};
use elastic_tests::prelude::*;

const TIMES: usize = 3;
const NODES: usize = 2;
const IDLE: Duration = Duration::from_secs(20);
const WITHIN: Duration = Duration::from_secs(120);

#[derive(Clone, Copy, Debug)]
enum Launcher {
    Torchrun,
    Ours,
}

fn main() -> Result<()> {
    let torch = Torch::find().context("there is no torchrun to compare with")?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let etcd = runtime.block_on(EtcdServer::start(EtcdOptions::with_v2()));
    let mut recoveries = [Vec::new(), Vec::new()];
    let mut requests = [Vec::new(), Vec::new()];
    for turn in 0..TIMES {
        for (at, launcher) in [Launcher::Torchrun, Launcher::Ours].into_iter().enumerate() {
            let job = Job::start(&torch, &etcd.address(), launcher, turn)?;
            let first = job.whole(&[])?;
            // What belongs to the start is over.
            std::thread::sleep(Duration::from_secs(2));
            let before = counted(&etcd.address())?;
            std::thread::sleep(IDLE);
            let asked = counted(&etcd.address())?.checked_sub(before).context("etcd counts on")?;
            requests[at].push(asked as f64 / IDLE.as_secs_f64() / NODES as f64);
            let begun = Instant::now();
            kill(first[0])?;
            job.whole(&first)?;
            recoveries[at].push(begun.elapsed().as_secs_f64());
        }
    }
    report("a worker killed → all workers of the next group started", "s", &mut recoveries);
    report("requests of an idle agent", "a second", &mut requests);
    Ok(())
}

fn report(what: &str, unit: &str, samples: &mut [Vec<f64>; 2]) {
    let [theirs, ours] = samples.each_mut().map(|samples| {
        samples.sort_by(f64::total_cmp);
        (samples[samples.len() / 2], samples[0], samples[samples.len() - 1])
    });
    let show = |(median, least, most): (f64, f64, f64)| format!("{median:.2} ({least:.2}–{most:.2})");
    println!("{what}, {unit}, n {TIMES}: torchrun {}   elastic-agent {}", show(theirs), show(ours));
}

/// All requests that etcd says it has carried out through its v2 API. Not reads that failed: etcd itself looks in vain
/// for its users with every request.
fn counted(address: &str) -> Result<u64> {
    let mut stream = TcpStream::connect(address)?;
    write!(stream, "GET /v2/stats/store HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n")?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    let body = answer.split_once("\r\n\r\n").context("an answer")?.1;
    let stats: serde_json::Value = serde_json::from_str(body.get(body.find('{').context("JSON")?..).context("JSON")?)?;
    let counters = stats.as_object().context("counters")?;
    let of_requests = |name: &&String| name.ends_with("Success") || name.ends_with("Fail") && *name != "getsFail";
    Ok(counters.keys().filter(of_requests).filter_map(|name| counters[name].as_u64()).sum())
}

/// Two nodes whose workers write down that they were started, and sleep.
struct Job {
    dir: tempfile::TempDir,
    agents: Vec<Child>,
}

impl Job {
    fn start(torch: &Torch, etcd: &str, launcher: Launcher, turn: usize) -> Result<Job> {
        let dir = tempfile::tempdir()?;
        let script = dir.path().join("worker.sh");
        let starts = dir.path().join("starts");
        fs::write(&script, format!("#!/bin/sh\necho $$ >> {}\nexec sleep 1000\n", starts.display()))?;
        fs::set_permissions(&script, fs::Permissions::from_mode(0o755))?;
        let agents = (0..NODES).map(|node| {
            let (mut command, backend) = match launcher {
                Launcher::Torchrun => (torch.torchrun(), "etcd"),
                Launcher::Ours => {
                    let mut command = Command::new(binary("elastic-agent"));
                    command.arg(format!("--node-name=node{node}"));
                    (command, "etcd-v2")
                }
            };
            command
                .arg(format!("--rdzv-backend={backend}"))
                .arg(format!("--rdzv-endpoint={etcd}"))
                .arg(format!("--rdzv-id={launcher:?}{turn}"))
                .args([&format!("--nnodes={NODES}"), "--max-restarts=3", "--local-addr=127.0.0.1", "--no-python"])
                .arg(&script)
                .env("XDG_RUNTIME_DIR", dir.path())
                .env("OMP_NUM_THREADS", "1");
            command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
            command.spawn()
        });
        let agents = agents.collect::<std::io::Result<_>>()?;
        Ok(Job { dir, agents })
    }

    fn living(&self) -> Vec<u32> {
        let text = fs::read_to_string(self.dir.path().join("starts")).unwrap_or_default();
        let pids = text.lines().filter_map(|line| line.parse().ok());
        pids.filter(|pid| is_worker(*pid, &self.dir.path().join("worker.sh"))).collect()
    }

    /// Waits until one worker of each node lives, none of which is in `before`.
    fn whole(&self, before: &[u32]) -> Result<Vec<u32>> {
        let begun = Instant::now();
        loop {
            let living: Vec<u32> = self.living().into_iter().filter(|pid| !before.contains(pid)).collect();
            if living.len() == NODES {
                return Ok(living);
            }
            ensure!(living.len() < NODES, "more workers than nodes");
            if begun.elapsed() > WITHIN {
                bail!("no group within {WITHIN:?}");
            }
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        for agent in &mut self.agents {
            let _ = agent.kill();
            let _ = agent.wait();
        }
        // torchrun leaves its workers behind.
        for pid in self.living() {
            let _ = kill(pid);
        }
    }
}

/// Whether the process is one of the job's workers: the shell that reads the script, or what it became.
fn is_worker(pid: u32, script: &Path) -> bool {
    let proc = PathBuf::from(format!("/proc/{pid}"));
    let line = fs::read(proc.join("cmdline")).unwrap_or_default();
    let line = String::from_utf8_lossy(&line).into_owned();
    line.contains(&*script.to_string_lossy()) || line.starts_with("sleep")
}

fn kill(pid: u32) -> Result<()> {
    kill_process(Pid::from_raw(i32::try_from(pid)?).context("a process id")?, Signal::KILL)?;
    Ok(())
}
