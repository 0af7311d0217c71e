//! The `elastic-trainer` program: flags, signals, exit codes.

use std::io::{self, IsTerminal, Write};
use std::process::ExitCode;
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::Context;
use clap::Parser;
use elastic_trainer::checkpoint::command as checkpoint;
use elastic_trainer::command::{Arguments, Command};
use elastic_trainer::tasks::{digits, gpt};
use elastic_trainer::{Elastic, Environment, Outcome, Settings, Stop, TrainError, give_up};
use serde_json::json;
use tracing::{error, warn};
use tracing_subscriber::EnvFilter;

mod bench;

/// What shells add to a signal's number for the exit code.
const BY_SIGNAL: u8 = 128;

fn main() -> ExitCode {
    tracing_subscriber::fmt()
        .with_env_filter(log_filter())
        .with_writer(io::stderr)
        .with_ansi(io::stderr().is_terminal())
        .with_target(false)
        .init();
    let stop = Stop::default();
    let arguments = Arguments::try_parse().unwrap_or_else(|error| {
        if error.use_stderr() {
            give_up(&error.to_string());
        }
        error.exit()
    });
    let result = match arguments.command {
        Command::Digits(flags) => train_digits(&flags, &stop),
        Command::Gpt(flags) => train_gpt(&flags, &stop),
        Command::Checkpoint(command) => checkpoint::run(&command, &mut io::stdout()).map_err(Into::into),
        #[cfg(feature = "cuda")]
        Command::CheckGpus => check_gpus(),
        Command::BenchAllreduce => bench::run(),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) if matches!(error.downcast_ref(), Some(TrainError::Stopped)) => {
            ExitCode::from(BY_SIGNAL + stop.signal().unwrap_or_default())
        }
        Err(error) => {
            error!("{error:#}");
            if let Err(error) = write_error_file(&format!("{error:#}")) {
                error!("{error:#}");
            }
            if matches!(error.downcast_ref(), Some(error) if TrainError::is_stuck(error)) {
                end_now();
            }
            ExitCode::FAILURE
        }
    }
}

/// What `RUST_LOG` says; what it says of `elastic_trainer` also holds for the crates for collectives and GPUs, unless
/// it names them.
fn log_filter() -> EnvFilter {
    let said = std::env::var(EnvFilter::DEFAULT_ENV).unwrap_or_else(|_| "info".to_owned());
    let levels = said.split(',').filter_map(|part| part.strip_prefix("elastic_trainer="));
    let parts = levels.map(|level| format!("elastic_collective={level},elastic_cuda={level},"));
    EnvFilter::try_new(parts.collect::<String>() + &said).unwrap_or_else(|_| EnvFilter::new("info"))
}

fn train_digits(flags: &digits::Flags, stop: &Stop) -> anyhow::Result<()> {
    let task = digits::Task::new(flags)?;
    listen(stop)?;
    let outcome = task.train(elastic(&flags.settings, stop)?)?;
    tell(&outcome, stop, || task.judge(outcome.state.parameters()))
}

fn train_gpt(flags: &gpt::Flags, stop: &Stop) -> anyhow::Result<()> {
    let task = gpt::Task::new(flags)?;
    listen(stop)?;
    let outcome = task.train(elastic(&flags.settings, stop)?)?;
    tell(&outcome, stop, || task.judge(outcome.state.parameters()))
}

#[cfg(feature = "cuda")]
fn check_gpus() -> anyhow::Result<()> {
    let surroundings = elastic_trainer::cuda::Surroundings::read(|name| std::env::var(name).ok());
    Ok(elastic_trainer::check::run(&surroundings, &mut io::stdout())?)
}

fn listen(stop: &Stop) -> anyhow::Result<()> {
    stop.listen().context("cannot listen for signals")
}

/// Training in this process's place.
fn elastic(settings: &Settings, stop: &Stop) -> anyhow::Result<Elastic<'static>> {
    let environment = Environment::read(|name| std::env::var(name).ok())?;
    let own = std::env::current_exe().ok().and_then(|path| path.into_os_string().into_string().ok());
    let rescue = own.into_iter().flat_map(|own| [own, "checkpoint".to_owned(), "rescue".to_owned()]);
    Ok(Elastic::new(settings.clone(), environment).stop(stop.clone()).rescue(rescue))
}

/// Prints what rank 0 has to say of a trained model. That may take long, and there is nothing more to save.
fn tell(outcome: &Outcome, stop: &Stop, judge: impl FnOnce() -> String) -> anyhow::Result<()> {
    stop.release_signals();
    let told = if outcome.rank == 0 { writeln!(io::stdout(), "{}", judge()) } else { Ok(()) };
    if let Err(error) = told.and_then(|()| io::stdout().flush()) {
        // The work is done and saved: to do it again would not help.
        warn!(%error, "cannot print");
    }
    Ok(())
}

/// Ends this process without the ends of its libraries: those would wait for a thread that is in one of them for good.
#[allow(unsafe_code)]
fn end_now() -> ! {
    // SAFETY: nothing is open that has to be written; what was printed is out.
    unsafe { libc::_exit(1) }
}

/// Says why in the file that torchrun's agents read, in its format.
fn write_error_file(message: &str) -> anyhow::Result<()> {
    let Some(path) = std::env::var_os("TORCHELASTIC_ERROR_FILE").filter(|path| !path.is_empty()) else {
        return Ok(());
    };
    let seconds = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs());
    let extra = json!({"py_callstack": message, "timestamp": seconds.to_string()});
    let error = json!({"message": {"message": message, "extraInfo": extra}});
    std::fs::write(&path, error.to_string())
        .with_context(|| format!("cannot write TORCHELASTIC_ERROR_FILE {}", path.display()))
}
