//! A whole worker program around a model: its command line, its log, signals, errors for agents, and exit codes.
//!
//! ```text
//! fn main() -> std::process::ExitCode {
//!     elastic_trainer::program::main::<Flags>()
//! }
//! ```

use std::io::{self, IsTerminal, Write};
use std::num::{ParseFloatError, ParseIntError};
use std::panic::{self, AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::process::ExitCode;
use std::sync::OnceLock;
use std::time::{SystemTime, UNIX_EPOCH};

use clap::{Args, FromArgMatches, Subcommand};
use elastic_collective::stop::Stop;
use serde_json::json;
use tracing::{error, warn};
use tracing_subscriber::EnvFilter;

use crate::agent::give_up;
use crate::checkpoint::command;
use crate::data::Data;
use crate::elastic::Elastic;
use crate::error::{Error, Result, with_causes};
use crate::model::Model;
use crate::settings::{Environment, Settings};
use crate::train::{Observer, TrainError};

pub use crate::checkpoint::command::Command as CheckpointCommand;

/// What shells add to a signal's number for the exit code.
const BY_SIGNAL: u8 = 128;
/// The exit code of a Rust program that panics.
const PANICKED: u8 = 101;

/// What a program trains: the flags of its command line, which make a model and its data. Its doc comment is what
/// `--help` says.
pub trait Task: Args {
    /// What is trained.
    type Model: Model;
    /// What it is trained on.
    type Data: Data<Batch = <Self::Model as Model>::Batch>;

    /// How to train it: flags that the task has taken into its own with `#[command(flatten)]`.
    fn settings(&self) -> &Settings;

    /// Makes the model and its data. An error ends the worker; the agent restarts it as after any failure. Its text is
    /// what the user reads: it should name the file.
    fn make(&self) -> Result<(Self::Model, Self::Data)>;

    /// What hears of rounds, steps, evaluations and commits; nothing unless told otherwise.
    fn observer(&self) -> Option<Box<dyn Observer>> {
        None
    }

    /// What rank 0 prints at the end, of the trained parameters; nothing unless told otherwise.
    fn judge(&self, model: &Self::Model, data: &Self::Data, parameters: &[f32]) -> Option<String> {
        let _ = (model, data, parameters);
        None
    }
}

/// A whole program that trains one task: its flags, and the subcommand `checkpoint`, which lists, verifies, exports and
/// prunes checkpoints, and with which an agent saves the snapshots in its memory at the job's end.
///
/// It logs to standard error, as `RUST_LOG` says. After an error it writes `TORCHELASTIC_ERROR_FILE`, and ends with
/// exit code 1; after a panic with 101; after SIGTERM or SIGINT with 128 and the signal's number.
pub fn main<T: Task>() -> ExitCode {
    let path = std::env::args_os().next().unwrap_or_default();
    let name = Path::new(&path).file_name().map_or("worker".into(), |name| name.to_string_lossy().into_owned());
    run(with_checkpoints::<T>(name), |matches, process| match matches.subcommand() {
        Some((_, matches)) => process.checkpoint(&CheckpointCommand::from_arg_matches(matches)?),
        None => process.train(&T::from_arg_matches(matches)?),
    })
}

fn with_checkpoints<T: Task>(name: String) -> clap::Command {
    let command = T::augment_args(clap::Command::new(name).max_term_width(100));
    let inner = clap::Command::new("checkpoint").about("List, verify, export or prune checkpoints");
    let inner = CheckpointCommand::augment_subcommands(inner).subcommand_required(true).arg_required_else_help(true);
    command.subcommand(inner).args_conflicts_with_subcommands(true).subcommand_negates_reqs(true)
}

/// This process, as a worker.
#[derive(Debug)]
pub struct Process {
    stop: Stop,
}

/// As [`main`], for a program with several tasks: it has the command line `command`, and does what `act` does.
pub fn run(command: clap::Command, act: impl FnOnce(&clap::ArgMatches, &Process) -> Result<()>) -> ExitCode {
    tracing_subscriber::fmt()
        .with_env_filter(log_filter())
        .with_writer(io::stderr)
        .with_ansi(io::stderr().is_terminal())
        .with_target(false)
        .init();
    let panicked = remember_panic();
    let process = Process { stop: Stop::default() };
    let result = catch_unwind(AssertUnwindSafe(|| {
        let matches = command.try_get_matches().unwrap_or_else(|error| {
            if error.use_stderr() {
                give_up(&error.to_string());
            }
            error.exit()
        });
        act(&matches, &process)
    }));
    match result {
        Ok(Ok(())) => ExitCode::SUCCESS,
        Ok(Err(error)) if matches!(error.downcast_ref(), Some(TrainError::Stopped)) => {
            ExitCode::from(BY_SIGNAL + process.stop.signal().unwrap_or_default())
        }
        Ok(Err(error)) => {
            let said = with_causes(&*error);
            error!("{said}");
            write_error_file(&said);
            if matches!(error.downcast_ref(), Some(error) if TrainError::is_stuck(error)) {
                end_now();
            }
            ExitCode::FAILURE
        }
        Err(_) => {
            write_error_file(panicked.get().map_or("it panicked", String::as_str));
            ExitCode::from(PANICKED)
        }
    }
}

impl Process {
    /// Does what the subcommand `checkpoint` says, and prints to standard output.
    pub fn checkpoint(&self, command: &CheckpointCommand) -> Result<()> {
        Ok(command::run(command, &mut io::stdout())?)
    }

    /// Trains a task in this process's place, and prints on rank 0 what the task says of the result.
    pub fn train<T: Task>(&self, task: &T) -> Result<()> {
        let (model, data) = task.make().map_err(unmade)?;
        self.stop.listen().map_err(|error| format!("cannot listen for signals: {error}"))?;
        let environment = Environment::read(|name| std::env::var(name).ok())?;
        let own = std::env::current_exe().ok().and_then(|path| path.into_os_string().into_string().ok());
        let rescue = own.into_iter().flat_map(|own| [own, "checkpoint".to_owned(), "rescue".to_owned()]);
        let mut observer = task.observer();
        let mut elastic = Elastic::new(task.settings().clone(), environment).stop(self.stop.clone()).rescue(rescue);
        if let Some(observer) = &mut observer {
            elastic = elastic.observer(observer.as_mut());
        }
        let outcome = elastic.run(&model, &data)?;
        let judged = (outcome.rank == 0).then(|| task.judge(&model, &data, outcome.state.parameters())).flatten();
        let mut out = io::stdout();
        let told = judged.map_or(Ok(()), |judged| writeln!(out, "{judged}"));
        if let Err(error) = told.and_then(|()| out.flush()) {
            // The work is done and saved: to do it again would not help.
            warn!(%error, "cannot print");
        }
        Ok(())
    }
}

/// An error as `?` makes it of a file's or a number's does not say what failed.
fn unmade(error: Error) -> Error {
    let is_bare = error.is::<io::Error>() || error.is::<ParseIntError>() || error.is::<ParseFloatError>();
    if is_bare { format!("cannot make the model and its data: {error}").into() } else { error }
}

/// What `RUST_LOG` says; what it says of `elastic_trainer` also holds for its other crates, unless
/// it names them.
fn log_filter() -> EnvFilter {
    let said = std::env::var(EnvFilter::DEFAULT_ENV).unwrap_or_else(|_| "info".to_owned());
    let levels = said.split(',').filter_map(|part| part.strip_prefix("elastic_trainer="));
    let parts = levels.map(|level| format!("elastic_collective={level},elastic_cuda={level},elastic_models={level},"));
    EnvFilter::try_new(parts.collect::<String>() + &said).unwrap_or_else(|_| EnvFilter::new("info"))
}

/// Keeps what the first panic says, and where it was, for the error file.
fn remember_panic() -> &'static OnceLock<String> {
    static FIRST: OnceLock<String> = OnceLock::new();
    let before = panic::take_hook();
    panic::set_hook(Box::new(move |panicked| {
        before(panicked);
        // Others follow from the first.
        let _ = FIRST.set(panicked.to_string());
    }));
    &FIRST
}

/// Ends this process without the ends of its libraries: those would wait for a thread that is in one of them for good.
#[allow(unsafe_code)]
fn end_now() -> ! {
    // SAFETY: nothing is open that has to be written; what was printed is out.
    unsafe { libc::_exit(1) }
}

/// Says why in the file that torchrun's agents read, in its format.
fn write_error_file(message: &str) {
    let Some(path) = std::env::var_os("TORCHELASTIC_ERROR_FILE").filter(|path| !path.is_empty()) else { return };
    let seconds = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs());
    let extra = json!({"py_callstack": message, "timestamp": seconds.to_string()});
    let file = json!({"message": {"message": message, "extraInfo": extra}});
    if let Err(error) = std::fs::write(&path, file.to_string()) {
        error!("cannot write TORCHELASTIC_ERROR_FILE {}: {error}", Path::new(&path).display());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_that_names_nothing_says_what_failed() {
        let bare = unmade(io::Error::from_raw_os_error(2).into()).to_string();
        assert!(bare.starts_with("cannot make the model and its data: No such file"), "{bare}");
        assert_eq!(unmade("cannot read a.csv".into()).to_string(), "cannot read a.csv");
    }
}
