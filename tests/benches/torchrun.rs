//! torchrun and elastic-agent side by side in one run, taking turns: launch, idle, and on `c10d` the failure of a
//! worker and the death of an agent, one of two. The workers import nothing. Run by `make bench-torch`; needs PyTorch.
//! `-- 10 1000`: failures and deaths alone, ten of torchrun's and a hundred of ours after each.

#![allow(clippy::print_stdout, clippy::print_stderr, clippy::unwrap_used, clippy::expect_used)]

mod launchers;

use anyhow::{Context, Result, bail, ensure};
use elastic_tests::prelude::*;
use elastic_tests::processor::process;

use launchers::Launcher::{Ours, Torchrun};
use launchers::{Launcher, Sleepers, Started, now, wait};

const LAUNCHES: usize = 5;
const RECOVERIES: usize = 3;
const IDLE: Duration = Duration::from_secs(20);

type Measure = fn(Launcher) -> Result<f64>;

fn main() -> Result<()> {
    let torch = Torch::find().context("there is no torchrun to compare with")?;
    let numbers: Vec<usize> = std::env::args().skip(1).filter_map(|arg| arg.parse().ok()).collect();
    let counts = match numbers[..] {
        [] => {
            report("launch of `--standalone --no-python true`", "ms", &turns("", [LAUNCHES; 2], &torch, launch)?);
            let [theirs, ours] = [idle(Torchrun(&torch))?, idle(Ours)?];
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
        samples[0].push(measure(Torchrun(torch))?);
        while samples[1].len() < ours * turn / theirs {
            samples[1].push(measure(Ours)?);
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
        let last = if all.len() >= 100 { format!(", 99 % {:.1}", percentile(all, 99.0)) } else { String::new() };
        format!("{:.1}{last}, n {}", Spread::of(all), all.len())
    };
    let [theirs, ours] = samples;
    println!(
        "{what}, {unit}: torchrun {}   elastic-agent {}   ratio {:.0}",
        show(theirs),
        show(ours),
        percentile(theirs, 50.0) / percentile(ours, 50.0)
    );
}

fn launch(launcher: Launcher) -> Result<f64> {
    let begun = Instant::now();
    let status = launcher.command().args(["--standalone", "--no-python", "true"]).status()?;
    ensure!(status.success(), "the launch failed: {status}");
    Ok(begun.elapsed().as_secs_f64() * 1e3)
}

/// Peak memory in MiB, and processor time in milliseconds a minute.
fn idle(launcher: Launcher) -> Result<(f64, f64)> {
    let mut job = Sleepers::new()?;
    job.start(launcher, &["--standalone"]);
    job.whole(1)?;
    // What belongs to the start is over.
    std::thread::sleep(Duration::from_secs(2));
    let agent = &job.launchers[0];
    let before = process(&agent.pid().to_string())?;
    std::thread::sleep(IDLE);
    let busy = (process(&agent.pid().to_string())? - before).as_secs_f64() * 1e3 * 60.0 / IDLE.as_secs_f64();
    Ok((agent.kilobytes("VmHWM:") as f64 / 1024.0, busy))
}

fn recovery(launcher: Launcher) -> Result<f64> {
    let (job, workers) = two_nodes(launcher)?;
    let begun = now()?;
    send(workers[0].pid, Signal::KILL);
    job.started_since(begun, 2)
}

/// The agent that does not serve the store is killed. torchrun's survivor never notices that by itself: it is shown
/// what it would see if its workers talked to those that are gone, their failure at once.
fn loss(launcher: Launcher) -> Result<f64> {
    let (mut job, workers) = two_nodes(launcher)?;
    let begun = now()?;
    job.launchers[1].kill();
    if let Torchrun(_) = launcher {
        workers.into_iter().for_each(|worker| send(worker.pid, Signal::KILL));
    }
    job.started_since(begun, 1)
}

/// Two nodes at work, the host of their store first.
fn two_nodes(launcher: Launcher) -> Result<(Sleepers, Vec<Started>)> {
    let mut job = Sleepers::new()?;
    let port = free_port();
    let endpoint = format!("--rdzv-endpoint=127.0.0.1:{port}");
    let by = ["--rdzv-backend=c10d", &endpoint, "--rdzv-id=recovery", "--nnodes=1:2", "--max-restarts=3"];
    let flags = [&by[..], &["--local-addr=127.0.0.1"]].concat();
    job.start(launcher, &flags);
    wait("the store is served", || TcpStream::connect(("127.0.0.1", port)).ok())?;
    job.start(launcher, &flags);
    let workers = job.whole(2)?;
    // The round has run for a moment. How long differs, so that failures do not all meet a launcher at the same beat.
    std::thread::sleep(Duration::from_millis(300) + Duration::from_nanos(now()? as u64 % 300_000_000));
    Ok((job, workers))
}
