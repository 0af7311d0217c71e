//! The fault campaign: jobs of the built programs on hosts of their own. Each job has one fault injected at one stage of
//! its life, and is judged by what an observer saw.
//!
//! | module | what it is |
//! |---|---|
//! | `fault` | the faults, as data |
//! | `setting`, `training`, `secrets` | what jobs are made of: their workers, certificates, users |
//! | `testbed` | what all jobs share; one job with one fault |
//! | `scene` | a job, and the stages of its life |
//! | `inject` | injecting a fault, and undoing it |
//! | `held` | guards that are frozen with their workers |
//! | `hosts`, `names`, `disk`, `memory` | network namespaces, a name server, disks, memory that runs out |
//! | `cluster`, `coordinator`, `nodes` | members of etcd, a coordinator, and agents, restarted as by systemd |
//! | `soak`, `usage` | one long job with many faults, and what its processes use |
//! | `history` | what the observer sees |
//! | `checker` | the promises, decided from that alone |
//! | `record` | the file of results |

// A failed campaign panics, as tests do.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stdout, clippy::print_stderr)]

mod checker;
mod cluster;
mod coordinator;
mod disk;
mod fault;
mod held;
mod history;
mod hosts;
mod inject;
mod limit;
mod memory;
mod names;
mod nodes;
#[cfg(test)]
mod opener;
mod record;
mod scene;
mod secrets;
mod setting;
mod soak;
mod testbed;
mod tracer;
mod training;
mod usage;

use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use clap::{Parser, ValueEnum};
use tokio::signal::unix::{SignalKind, signal};

use self::fault::Fault;
use self::record::Record;
use self::scene::Stage;
use self::setting::{Setting, name};
use self::soak::{Soak, suits};
use self::testbed::{JOB, Testbed};

/// Injects faults into jobs of the built programs, each fault at each stage of a job's life, and checks every promise.
///
/// Needs root, etcd, iproute2, strace, e2fsprogs and loop devices. It runs in a network namespace of its own. The exit
/// code is 1 if a promise was broken, and 2 if the jobs cannot be run on this machine.
#[derive(Parser)]
#[command(name = "elastic-campaign", max_term_width = 110)]
struct Options {
    /// Only faults whose name contains TEXT; can be repeated
    #[arg(long = "fault", value_name = "TEXT")]
    faults: Vec<String>,
    /// Only this stage of a job: joining, sealing, starting, running, quiescing, snapshot, checkpoint or finishing;
    /// can be repeated
    #[arg(long = "stage", value_name = "NAME", value_enum, hide_possible_values = true)]
    stages: Vec<Stage>,
    /// What the jobs are made of: plain (elastic-trainer on the installed etcd), pytorch (workers of PyTorch), secured
    /// (certificates for all, and users of etcd whose tokens last 3 s), etcd-3.5, etcd-3.6 or etcd-3.7, or replicated
    /// (the agents hold the store; faults that spare two of them)
    #[arg(long, value_name = "NAME", value_enum, hide_possible_values = true, default_value = "plain")]
    setting: Setting,
    /// Run only N of these jobs, drawn by the seed
    #[arg(long, value_name = "N")]
    sample: Option<usize>,
    /// Draws the sample, and the time within a stage at which the fault is injected
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
    /// The file of results of all settings. Each result replaces the one that is there
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
    /// Skip jobs whose result is in --out already, after an interruption
    #[arg(long, requires = "out")]
    resume: bool,
    /// Keep the logs of jobs that broke a promise in FOLDER, instead of in a temporary folder
    #[arg(long, value_name = "FOLDER")]
    keep: Option<PathBuf>,
    /// Inject these faults into one long job, each one after the job has recovered from the last: how long each recovery
    /// takes, and whether memory, descriptors, threads, keys and files grow. Only faults that spare the processes of the
    /// job's first node
    #[arg(long, value_name = "MINUTES", value_parser = minutes, conflicts_with = "out")]
    soak: Option<Duration>,
    /// The time from one recovery of a soak to the next fault
    #[arg(long, value_name = "SECONDS", value_parser = seconds, requires = "soak", default_value = "10")]
    every: Duration,
    /// Only print a summary of the results in --out
    #[arg(long, requires = "out")]
    report: bool,
    /// Only print the faults
    #[arg(long)]
    list: bool,
    /// The campaign has started itself in namespaces of its own
    #[arg(long, hide = true)]
    inside: bool,
}

fn seconds(text: &str) -> Result<Duration> {
    Ok(Duration::try_from_secs_f64(text.parse()?)?)
}

fn minutes(text: &str) -> Result<Duration> {
    Ok(60 * seconds(text)?)
}

fn main() -> ExitCode {
    match run(Options::parse()) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("elastic-campaign: {error:#}");
            ExitCode::from(2)
        }
    }
}

fn run(mut options: Options) -> Result<ExitCode> {
    let faults: Vec<Fault> = fault::all()
        .into_iter()
        .filter(|fault| fault.applies_to(options.setting))
        .filter(|fault| options.faults.is_empty() || options.faults.iter().any(|text| fault.name.contains(text)))
        .collect();
    if options.list {
        faults.iter().for_each(|fault| println!("{}", fault.name));
        return Ok(ExitCode::SUCCESS);
    }
    if options.report {
        return report(options.out.as_deref());
    }
    if !options.inside {
        return Err(start_inside());
    }
    // Agents skip a runtime folder whose path is relative, and two campaigns would share their locks.
    options.keep = options.keep.map(std::path::absolute).transpose()?;
    let jobs = jobs(&options, &faults)?;
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    runtime.block_on(async {
        let running = async {
            match options.soak {
                Some(lasts) => {
                    soak(&options, lasts, faults.iter().filter(|fault| suits(fault)).cloned().collect()).await
                }
                None => run_all(&options, &jobs).await,
            }
        };
        // The first process of a namespace gets only signals that it has asked for.
        let mut terminated = signal(SignalKind::terminate())?;
        let stopped = async {
            tokio::select! {
                _ = tokio::signal::ctrl_c() => (),
                _ = terminated.recv() => (),
            }
        };
        tokio::select! {
            code = running => code,
            () = stopped => match options.soak {
                Some(_) => bail!("interrupted; a soak reports only at its end, and cannot be resumed"),
                None => bail!("interrupted; the same command with --resume runs the jobs that are left"),
            },
        }
    })
}

/// Starts this program again in namespaces that contain nothing else. What it starts there ends with it.
fn start_inside() -> anyhow::Error {
    const APART: [&str; 8] =
        ["--net", "--mount", "--propagation=private", "--pid", "--fork", "--kill-child", "--mount-proc", "--"];
    let trial = match Command::new("unshare").args(APART).arg("true").output().context("start unshare") {
        Ok(trial) => trial,
        Err(error) => return error,
    };
    if !trial.status.success() {
        let said = String::from_utf8_lossy(&trial.stderr);
        return anyhow::anyhow!("namespaces cannot be made: {}; run it as root", said.trim());
    }
    let Ok(own) = std::env::current_exe() else { return anyhow::anyhow!("find this program") };
    let mut command = Command::new("unshare");
    command.args(APART).arg(own).args(std::env::args_os().skip(1)).arg("--inside");
    anyhow::Error::new(command.exec()).context("start unshare")
}

fn report(out: Option<&Path>) -> Result<ExitCode> {
    print!("{}", Record::read(out.context("--out")?)?.summary());
    Ok(ExitCode::SUCCESS)
}

/// The jobs to run: a fault and a stage each. Results that will come again are removed from --out.
fn jobs<'a>(options: &Options, faults: &'a [Fault]) -> Result<Vec<(&'a Fault, Stage)>> {
    let stages = if options.stages.is_empty() { Stage::value_variants().to_vec() } else { options.stages.clone() };
    let mut jobs: Vec<(&Fault, Stage)> =
        faults.iter().flat_map(|fault| stages.iter().map(move |&stage| (fault, stage))).collect();
    jobs.retain(|(fault, stage)| fault.applies_at(options.setting, *stage));
    if let Some(sample) = options.sample {
        jobs.sort_by_key(|(fault, stage)| draw(options.seed, fault.name, *stage));
        jobs.truncate(sample);
    }
    if let Some(out) = &options.out {
        let setting = &name(&options.setting);
        if options.resume {
            let record = Record::read(out)?;
            jobs.retain(|(fault, stage)| !record.has(setting, fault.name, *stage));
        } else {
            Record::change(out, |record| {
                jobs.iter().for_each(|(fault, stage)| record.forget(setting, fault.name, *stage));
            })?;
        }
    }
    Ok(jobs)
}

/// A number that depends only on these.
fn draw(seed: u64, fault: &str, stage: Stage) -> u64 {
    u64::from(crc32c::crc32c(format!("{seed} {fault} {}", name(&stage)).as_bytes()))
}

fn today() -> Result<String> {
    let output = Command::new("date").arg("+%F").output().context("run date")?;
    Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

async fn testbed(options: &Options) -> Result<(tempfile::TempDir, Testbed)> {
    let temporary = tempfile::Builder::new().prefix("elastic-campaign-").tempdir()?;
    let folder = options.keep.as_deref().unwrap_or(temporary.path());
    std::fs::create_dir_all(folder)?;
    let testbed = Testbed::new(folder, options.setting).await?;
    Ok((temporary, testbed))
}

fn tell_where(options: &Options, temporary: tempfile::TempDir) {
    let folder = options.keep.clone().unwrap_or_else(|| temporary.keep());
    println!("the logs are in {}", folder.join("wrong").display());
}

async fn soak(options: &Options, lasts: Duration, faults: Vec<Fault>) -> Result<ExitCode> {
    if faults.is_empty() {
        bail!("none of these faults suits a soak");
    }
    let (temporary, testbed) = testbed(options).await?;
    let soak = Soak { lasts, every: options.every, faults, seed: options.seed };
    let soaked = testbed.soak(&soak, |line| println!("{line}")).await?;
    println!("\n{}", soaked.tables());
    println!("{} faults, {} rounds, {} steps", soaked.recoveries.len(), soaked.rounds, soaked.steps);
    soaked.broken.iter().for_each(|text| println!("    BROKEN {text}"));
    if soaked.broken.is_empty() {
        return Ok(ExitCode::SUCCESS);
    }
    tell_where(options, temporary);
    Ok(ExitCode::FAILURE)
}

async fn run_all(options: &Options, jobs: &[(&Fault, Stage)]) -> Result<ExitCode> {
    let (temporary, testbed) = testbed(options).await?;
    let (mut wrong, mut failed) = (0, 0);
    for (at, (fault, stage)) in jobs.iter().enumerate() {
        let place = format!("{}/{} {} · {}", at + 1, jobs.len(), fault.name, name(stage));
        let chance = draw(options.seed, fault.name, *stage);
        let outcome = match tokio::time::timeout(JOB, testbed.run(fault, *stage, chance)).await {
            Ok(Ok(outcome)) => outcome,
            Ok(Err(error)) => {
                failed += 1;
                println!("{place}: could not be run: {error:#}");
                continue;
            }
            Err(_) => bail!("{place} took longer than {JOB:?}"),
        };
        println!(
            "{place}: {}, {:.1} s without a step, over after {:.1} s, {} rounds, {} restarts",
            outcome.ended, outcome.pause_s, outcome.after_s, outcome.rounds, outcome.restarts
        );
        outcome.broken.iter().for_each(|text| println!("    BROKEN {text}"));
        wrong += usize::from(!outcome.broken.is_empty());
        if let Some(out) = &options.out {
            let date = today()?;
            Record::change(out, |record| record.add(&name(&options.setting), fault.name, *stage, &date, &outcome))?;
        }
    }
    println!("{} jobs, {wrong} with a broken promise, {failed} that could not be run", jobs.len());
    if wrong > 0 {
        tell_where(options, temporary);
    }
    Ok(if wrong + failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
