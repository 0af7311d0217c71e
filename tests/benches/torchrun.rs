//! torchrun and elastic-agent side by side in one run, taking turns: launch, idle, and on `c10d` the failure of a
//! worker and the death of an agent, one of two. The workers import nothing. Run by `make bench-torch`; needs PyTorch.
//! `-- 10 1000`: failures and deaths alone, ten of torchrun's and a hundred of ours after each.

#![allow(clippy::print_stdout, clippy::print_stderr, clippy::unwrap_used, clippy::expect_used)]

use std::fs;
use std::time::UNIX_EPOCH;

use anyhow::{Context, Result, bail, ensure};
use elastic_tests::prelude::*;

const LAUNCHES: usize = 5;
const RECOVERIES: usize = 3;
const IDLE: Duration = Duration::from_secs(20);
const WITHIN: Duration = Duration::from_secs(120);

#[derive(Clone, Copy)]
enum Launcher {
    Torchrun,
    Ours,
}

use Launcher::{Ours, Torchrun};

/// What is measured once, of one launcher.
type Measure = fn(&Torch, Launcher) -> Result<f64>;

fn main() -> Result<()> {
    let torch = Torch::find().context("there is no torchrun to compare with")?;
    let numbers: Vec<usize> = std::env::args().skip(1).filter_map(|arg| arg.parse().ok()).collect();
    let counts = match numbers[..] {
        [] => {
            report("launch of `--standalone --no-python true`", "ms", &turns("", [LAUNCHES; 2], &torch, launch)?);
            let [theirs, ours] = [idle(&torch, Torchrun)?, idle(&torch, Ours)?];
            report("an idle agent: peak memory", "MiB", &[vec![theirs.0], vec![ours.0]]);
            report("an idle agent: processor time", "ms a minute", &[vec![theirs.1], vec![ours.1]]);
            [RECOVERIES; 2]
        }
        [theirs, ours] if theirs > 0 => [theirs, ours],
        _ => bail!("of recoveries: how many of torchrun's, at least one, and how many of ours, as in `-- 10 1000`"),
    };
    let recoveries: [(&str, Measure); 2] = [
        ("a worker killed → all workers started again", recovery),
        ("an agent killed → the survivor's workers started again", loss),
    ];
    for (what, measure) in recoveries {
        report(what, "ms", &turns(what, counts, &torch, measure)?);
    }
    Ok(())
}

/// Measures both so often: after each of torchrun's turns ours, as many as leave all turns alike.
fn turns(what: &str, [theirs, ours]: [usize; 2], torch: &Torch, measure: Measure) -> Result<[Vec<f64>; 2]> {
    let mut samples = [Vec::new(), Vec::new()];
    for turn in 1..=theirs {
        samples[0].push(measure(torch, Torchrun)?);
        while samples[1].len() < ours * turn / theirs {
            samples[1].push(measure(torch, Ours)?);
        }
        if ours > theirs {
            eprintln!("{what}: turn {turn} of {theirs}");
        }
    }
    Ok(samples)
}

/// Median, least and most; where there are many, also the 99th percentile.
fn report(what: &str, unit: &str, samples: &[Vec<f64>; 2]) {
    let show = |all: &Vec<f64>| {
        let [least, median, most] = [0.0, 50.0, 100.0].map(|percent| percentile(all, percent));
        let last = if all.len() >= 100 { format!(", 99 % {:.1}", percentile(all, 99.0)) } else { String::new() };
        format!("{median:.1} ({least:.1}–{most:.1}{last}), n {}", all.len())
    };
    let [theirs, ours] = samples;
    println!(
        "{what}, {unit}: torchrun {}   elastic-agent {}   ratio {:.0}",
        show(theirs),
        show(ours),
        percentile(theirs, 50.0) / percentile(ours, 50.0)
    );
}

fn command(torch: &Torch, launcher: Launcher) -> Command {
    let mut command = match launcher {
        Torchrun => torch.torchrun(),
        Ours => Command::new(binary("elastic-agent")),
    };
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).env("OMP_NUM_THREADS", "1");
    command
}

fn launch(torch: &Torch, launcher: Launcher) -> Result<f64> {
    let begun = Instant::now();
    let status = command(torch, launcher).args(["--standalone", "--no-python", "true"]).status()?;
    ensure!(status.success(), "the launch failed: {status}");
    Ok(begun.elapsed().as_secs_f64() * 1e3)
}

/// Peak memory in MiB, and processor time in milliseconds a minute.
fn idle(torch: &Torch, launcher: Launcher) -> Result<(f64, f64)> {
    let job = Job::new()?;
    let agent = RunningAgent(command(torch, launcher).args(["--standalone", "--no-python"]).arg(job.script()).spawn()?);
    job.started_since(0, 1)?;
    // What belongs to the start is over.
    std::thread::sleep(Duration::from_secs(2));
    let before = cpu(agent.0.id())?;
    std::thread::sleep(IDLE);
    let busy = (cpu(agent.0.id())? - before) * 1e3 * 60.0 / IDLE.as_secs_f64();
    let status = fs::read_to_string(format!("/proc/{}/status", agent.0.id()))?;
    let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).context("no VmHWM")?;
    let kib: f64 = peak.split_whitespace().next().context("a number")?.parse()?;
    job.end([agent])?;
    Ok((kib / 1024.0, busy))
}

fn recovery(torch: &Torch, launcher: Launcher) -> Result<f64> {
    let (job, nodes, workers) = two_nodes(torch, launcher)?;
    let begun = now()?;
    kill(workers[0])?;
    let taken = job.started_since(begun, 2)?;
    job.end(nodes)?;
    Ok(taken)
}

/// The agent that does not serve the store is killed. torchrun's survivor never notices that by itself: it is shown
/// what it would see if its workers talked to those that are gone, their failure at once.
fn loss(torch: &Torch, launcher: Launcher) -> Result<f64> {
    let (job, [host, mut lost], workers) = two_nodes(torch, launcher)?;
    let begun = now()?;
    lost.0.kill()?;
    if let Torchrun = launcher {
        workers.into_iter().try_for_each(kill)?;
    }
    let taken = job.started_since(begun, 1)?;
    job.end([host, lost])?;
    Ok(taken)
}

/// Two nodes at work, the host of their store first.
fn two_nodes(torch: &Torch, launcher: Launcher) -> Result<(Job, [RunningAgent; 2], Vec<u32>)> {
    let job = Job::new()?;
    let port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
    let start = || -> Result<RunningAgent> {
        let mut command = command(torch, launcher);
        command
            .args(["--rdzv-backend=c10d", &format!("--rdzv-endpoint=127.0.0.1:{port}"), "--rdzv-id=recovery"])
            .args(["--nnodes=1:2", "--max-restarts=3", "--local-addr=127.0.0.1", "--no-python"])
            .arg(job.script());
        Ok(RunningAgent(command.spawn()?))
    };
    let host = start()?;
    wait("the store is served", || TcpStream::connect(("127.0.0.1", port)).ok())?;
    let nodes = [host, start()?];
    let workers = job.whole()?;
    // The round has run for a moment. How long differs, so that failures do not all meet a launcher at the same beat.
    std::thread::sleep(Duration::from_millis(300) + Duration::from_nanos(now()? as u64 % 300_000_000));
    Ok((job, nodes, workers))
}

/// Workers that write down when they were started, and sleep.
struct Job(tempfile::TempDir);

impl Job {
    fn new() -> Result<Job> {
        let dir = tempfile::tempdir()?;
        let script = format!(
            "#!/bin/sh\necho $$ $(date +%s%N) $WORLD_SIZE >> {}/starts\nexec sleep 1000\n",
            dir.path().display()
        );
        fs::write(dir.path().join("worker.sh"), script)?;
        fs::set_permissions(dir.path().join("worker.sh"), fs::Permissions::from_mode(0o755))?;
        Ok(Job(dir))
    }

    fn script(&self) -> std::path::PathBuf {
        self.0.path().join("worker.sh")
    }

    /// Process, nanoseconds and world size of every worker that has started.
    fn starts(&self) -> Vec<(u32, u128, u32)> {
        let text = fs::read_to_string(self.0.path().join("starts")).unwrap_or_default();
        let parse = |line: &str| -> Option<_> {
            let fields: Vec<&str> = line.split(' ').collect();
            Some((fields.first()?.parse().ok()?, fields.get(1)?.parse().ok()?, fields.get(2)?.parse().ok()?))
        };
        text.lines().filter_map(parse).collect()
    }

    /// Waits for a world of two: their processes.
    fn whole(&self) -> Result<Vec<u32>> {
        wait("both nodes work together", || {
            let pids: Vec<u32> = self
                .starts()
                .into_iter()
                .filter(|start| start.2 == 2 && is_alive(start.0))
                .map(|start| start.0)
                .collect();
            (pids.len() == 2).then_some(pids)
        })
    }

    /// Milliseconds from `begun` until the last of `count` workers was started.
    fn started_since(&self, begun: u128, count: usize) -> Result<f64> {
        wait("the workers are started", || {
            let later: Vec<u128> = self
                .starts()
                .into_iter()
                .filter(|start| start.1 > begun && is_alive(start.0))
                .map(|start| start.1)
                .collect();
            (later.len() >= count).then(|| later.iter().max().copied().unwrap_or_default())
        })
        .map(|at| (at - begun) as f64 / 1e6)
    }

    fn end<const N: usize>(&self, agents: [RunningAgent; N]) -> Result<()> {
        drop(agents);
        for (pid, ..) in self.starts().into_iter().filter(|start| is_alive(start.0)) {
            // A guard may have been quicker.
            let _ = kill(pid);
        }
        Ok(())
    }
}

/// Killed when dropped.
struct RunningAgent(Child);

impl Drop for RunningAgent {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn wait<T>(what: &str, condition: impl Fn() -> Option<T>) -> Result<T> {
    let begun = Instant::now();
    loop {
        if let Some(value) = condition() {
            return Ok(value);
        }
        if begun.elapsed() > WITHIN {
            bail!("not within {WITHIN:?}: {what}");
        }
        std::thread::sleep(Duration::from_millis(2));
    }
}

fn now() -> Result<u128> {
    Ok(SystemTime::now().duration_since(UNIX_EPOCH)?.as_nanos())
}

fn kill(pid: u32) -> Result<()> {
    kill_process(Pid::from_raw(i32::try_from(pid)?).context("a process id")?, Signal::KILL)?;
    Ok(())
}

fn is_alive(pid: u32) -> bool {
    Path::new(&format!("/proc/{pid}/exe")).read_link().is_ok()
}

/// CPU time used, in seconds.
fn cpu(pid: u32) -> Result<f64> {
    let text = fs::read_to_string(format!("/proc/{pid}/stat"))?;
    let fields: Vec<&str> = text.rsplit_once(')').context("a stat line")?.1.split_whitespace().collect();
    let ticks: f64 = fields[11].parse::<f64>()? + fields[12].parse::<f64>()?;
    Ok(ticks / rustix::param::clock_ticks_per_second() as f64)
}
