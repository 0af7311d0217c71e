//! The fault campaign: see `elastic_tests::campaign`.

#![allow(clippy::print_stdout, clippy::print_stderr)]

use std::io::Write;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Command, ExitCode};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use elastic_tests::campaign::fault::{self, Fault};
use elastic_tests::campaign::scene::Phase;
use elastic_tests::campaign::setting::Setting;
use elastic_tests::campaign::soak::{Soak, suits};
use elastic_tests::campaign::{JOB, Outcome, Stage, report};
use tokio::signal::unix::{SignalKind, signal};

const HELP: &str = "\
Strikes jobs of the built programs with faults, each in each moment of a job's life, and judges what came of it.

Usage: elastic-campaign [OPTIONS]

  --fault TEXT     only faults whose name contains TEXT; may be given again
  --phase NAME     only this moment: joining, sealing, starting, running, quiescing, snapshot, checkpoint, finishing;
                   may be given again
  --setting NAME   what the jobs are made of: plain (elastic-trainer on the installed etcd), pytorch (workers of PyTorch),
                   secured (certificates for all, and users of etcd whose tokens last 3 s), etcd-3.5 [plain]
  --sample N       only so many of these, drawn by the seed
  --seed N         where in a moment the fault strikes, and the order [0]
  --out FILE       append each result to FILE, a line of JSON, and pass over what stands there already
  --keep FOLDER    where the logs of what went wrong are kept [a temporary folder]
  --soak MINUTES   strike one long job with one of these faults after the other, in any order, once it has recovered from
                   the last: how long that took, and whether memory, descriptors, threads, keys and files grow. Only
                   faults that spare its first node's processes. Each recovery is appended to --out in the end
  --every SECONDS  of a soak: the time from one recovery to the next fault [10]
  --report         only print the table of what stands in --out
  --list           only print the faults

Needs root, etcd, iproute2, strace, e2fsprogs and loop devices. It runs in a network namespace of its own. The exit code
is 1 if a promise was broken.
";

#[derive(Default)]
struct Options {
    faults: Vec<String>,
    phases: Vec<Phase>,
    setting: Setting,
    sample: Option<usize>,
    seed: u64,
    out: Option<PathBuf>,
    keep: Option<PathBuf>,
    soak: Option<Duration>,
    every: Option<Duration>,
    report: bool,
    list: bool,
    inside: bool,
}

fn options() -> Result<Option<Options>> {
    let mut options = Options::default();
    let mut words = std::env::args().skip(1);
    while let Some(word) = words.next() {
        let mut value = || words.next().with_context(|| format!("{word} needs a value"));
        match word.as_str() {
            "--fault" => options.faults.push(value()?),
            "--phase" => {
                let name = value()?;
                let phase = Phase::ALL.into_iter().find(|phase| phase.name() == name);
                options.phases.push(phase.with_context(|| format!("there is no phase {name}; see --help"))?);
            }
            "--setting" => {
                let name = value()?;
                let setting = Setting::ALL.into_iter().find(|setting| setting.name() == name);
                options.setting = setting.with_context(|| format!("there is no setting {name}; see --help"))?;
            }
            "--sample" => options.sample = Some(value()?.parse().context("--sample wants a number")?),
            "--seed" => options.seed = value()?.parse().context("--seed wants a number")?,
            "--out" => options.out = Some(value()?.into()),
            // Agents pass over a run-time folder whose path is relative, and two campaigns would share their locks.
            "--keep" => options.keep = Some(std::path::absolute(value()?).context("--keep wants a folder")?),
            "--soak" => options.soak = Some(60 * seconds(&word, &value()?)?),
            "--every" => options.every = Some(seconds(&word, &value()?)?),
            "--report" => options.report = true,
            "--list" => options.list = true,
            "--inside" => options.inside = true,
            "--help" | "-h" => return Ok(None),
            other => bail!("there is no option {other}; see --help"),
        }
    }
    if options.soak.is_none() && options.every.is_some() {
        bail!("--every is for --soak; see --help");
    }
    if options.phases.is_empty() {
        options.phases = Phase::ALL.to_vec();
    }
    Ok(Some(options))
}

fn seconds(flag: &str, text: &str) -> Result<Duration> {
    let number: f64 = text.parse().with_context(|| format!("{flag} wants a number"))?;
    Duration::try_from_secs_f64(number).with_context(|| format!("{flag} wants a number from 0 on"))
}

fn main() -> ExitCode {
    match options().and_then(|options| options.map_or_else(help, run)) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("elastic-campaign: {error:#}");
            ExitCode::from(2)
        }
    }
}

fn help() -> Result<ExitCode> {
    print!("{HELP}");
    Ok(ExitCode::SUCCESS)
}

fn run(options: Options) -> Result<ExitCode> {
    let faults: Vec<Fault> = fault::all()
        .into_iter()
        .filter(|fault| fault.strikes(options.setting))
        .filter(|fault| options.faults.is_empty() || options.faults.iter().any(|text| fault.name.contains(text)))
        .collect();
    if options.list {
        faults.iter().for_each(|fault| println!("{}", fault.name));
        return Ok(ExitCode::SUCCESS);
    }
    let mut before = options.out.as_ref().filter(|_| options.soak.is_none()).map(read).transpose()?.unwrap_or_default();
    before.retain(|outcome| outcome.setting == options.setting);
    if options.report {
        print!("{}", report::table(&before));
        return Ok(ExitCode::SUCCESS);
    }
    if !options.inside {
        // Namespaces that nothing else is in: what is made and started there goes with this process.
        const APART: [&str; 8] =
            ["--net", "--mount", "--propagation=private", "--pid", "--fork", "--kill-child", "--mount-proc", "--"];
        let trial = Command::new("unshare").args(APART).arg("true").output().context("start unshare")?;
        if !trial.status.success() {
            let said = String::from_utf8_lossy(&trial.stderr);
            bail!("namespaces cannot be made: {}; run it as root", said.trim());
        }
        let mut command = Command::new("unshare");
        command.args(APART).arg(std::env::current_exe()?).args(std::env::args_os().skip(1)).arg("--inside");
        bail!("unshare cannot be started: {}", command.exec());
    }
    let mut cells: Vec<(&Fault, Phase)> =
        faults.iter().flat_map(|fault| options.phases.iter().map(move |&phase| (fault, phase))).collect();
    cells.retain(|(fault, phase)| {
        !before.iter().any(|done| done.fault == fault.name && done.phase == phase.name() && done.seed == options.seed)
    });
    if let Some(sample) = options.sample {
        let place = |(fault, phase): &(&Fault, Phase)| draw(options.seed, fault.name, phase.name());
        cells.sort_by_key(place);
        cells.truncate(sample);
    }
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    runtime.block_on(async {
        let playing = async {
            match options.soak {
                Some(lasts) => {
                    soak(&options, lasts, faults.iter().filter(|fault| suits(fault)).cloned().collect()).await
                }
                None => play(&options, &cells).await,
            }
        };
        // The first process of a namespace has to ask for signals, or gets none.
        let mut terminated = signal(SignalKind::terminate())?;
        let stopped = async {
            tokio::select! {
                _ = tokio::signal::ctrl_c() => (),
                _ = terminated.recv() => (),
            }
        };
        tokio::select! {
            code = playing => code,
            () = stopped => match options.soak {
                Some(_) => bail!("interrupted; a soak is told when it is over, and begins anew"),
                None => bail!("interrupted; --out goes on from here"),
            },
        }
    })
}

/// A number that depends on all of these alone.
fn draw(seed: u64, fault: &str, phase: &str) -> u64 {
    u64::from(crc32c::crc32c(format!("{seed} {fault} {phase}").as_bytes()))
}

fn read(path: &PathBuf) -> Result<Vec<Outcome>> {
    match std::fs::read_to_string(path) {
        Ok(text) => text.lines().map(|line| serde_json::from_str(line).context("read --out")).collect(),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(Vec::new()),
        Err(error) => Err(error).with_context(|| format!("read {}", path.display())),
    }
}

async fn soak(options: &Options, lasts: Duration, faults: Vec<Fault>) -> Result<ExitCode> {
    if faults.is_empty() {
        bail!("none of these faults suits a soak");
    }
    let temporary = tempfile::Builder::new().prefix("elastic-campaign-").tempdir()?;
    let folder = options.keep.clone().unwrap_or_else(|| temporary.path().to_owned());
    std::fs::create_dir_all(&folder)?;
    let stage = Stage::new(&folder, options.setting).await?;
    let soak = Soak { lasts, every: options.every.unwrap_or(Duration::from_secs(10)), faults, seed: options.seed };
    let soaked = stage.soak(&soak, |line| println!("{line}")).await?;
    if let Some(path) = &options.out {
        let mut out = std::fs::File::options().create(true).append(true).open(path)?;
        for recovery in &soaked.recoveries {
            writeln!(out, "{}", serde_json::to_string(recovery)?)?;
        }
    }
    println!("\n{}", soaked.tables());
    println!("{} faults, {} rounds, {} steps", soaked.recoveries.len(), soaked.rounds, soaked.steps);
    soaked.broken.iter().for_each(|text| println!("    BROKEN {text}"));
    if soaked.broken.is_empty() {
        return Ok(ExitCode::SUCCESS);
    }
    let folder = options.keep.clone().unwrap_or_else(|| temporary.keep());
    println!("what it wrote is in {}", folder.join("wrong").display());
    Ok(ExitCode::FAILURE)
}

async fn play(options: &Options, cells: &[(&Fault, Phase)]) -> Result<ExitCode> {
    let temporary = tempfile::Builder::new().prefix("elastic-campaign-").tempdir()?;
    let folder = options.keep.clone().unwrap_or_else(|| temporary.path().to_owned());
    std::fs::create_dir_all(&folder)?;
    let stage = Stage::new(&folder, options.setting).await?;
    let mut out = match &options.out {
        Some(path) => Some(std::fs::File::options().create(true).append(true).open(path)?),
        None => None,
    };
    let (mut wrong, mut failed) = (0, 0);
    for (at, (fault, phase)) in cells.iter().enumerate() {
        let place = format!("{}/{} {} · {}", at + 1, cells.len(), fault.name, phase.name());
        let chance = draw(options.seed, fault.name, phase.name());
        let outcome = tokio::time::timeout(JOB, stage.run(fault, *phase, chance)).await;
        let mut outcome = match outcome {
            Ok(Ok(outcome)) => outcome,
            Ok(Err(error)) => {
                failed += 1;
                println!("{place}: could not be played: {error:#}");
                continue;
            }
            Err(_) => bail!("{place} took longer than {JOB:?}"),
        };
        outcome.seed = options.seed;
        println!(
            "{place}: {}, {:.1} s without a step, over after {:.1} s, {} rounds, {} restarts",
            outcome.result, outcome.pause_s, outcome.after_s, outcome.rounds, outcome.restarts
        );
        outcome.broken.iter().for_each(|text| println!("    BROKEN {text}"));
        wrong += usize::from(!outcome.broken.is_empty());
        if let Some(out) = &mut out {
            writeln!(out, "{}", serde_json::to_string(&outcome)?)?;
        }
    }
    println!("{} jobs, {wrong} with a broken promise, {failed} that could not be played", cells.len());
    if wrong > 0 {
        // Kept for whoever looks.
        let folder = options.keep.clone().unwrap_or_else(|| temporary.keep());
        println!("what they wrote is in {}", folder.join("wrong").display());
    }
    Ok(if wrong + failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
