//! The process `elastic-agent`: reads the command line, starts the guard, sets up the log and the runtime, and runs.

use std::io::IsTerminal;
use std::process::ExitCode;

use anyhow::Context;
use elastic_store::listener::{self, Serves};
use tracing_subscriber::EnvFilter;

use crate::cli::{self, AgentLog, Stop, Task};
use crate::output::logs::Console;
use crate::workers_store::rank0_port::StoreHost;
use crate::{guard, run, spare};

/// The program. Call it first in the process: see [`guard::serve`].
#[allow(clippy::print_stdout, clippy::print_stderr)]
pub fn main() -> ExitCode {
    if let Some(code) = guard::serve() {
        return code;
    }
    let task = match cli::from_process() {
        Ok(task) => task,
        Err((stop, dialect)) => {
            match &stop {
                Stop::Show(text) => print!("{text}"),
                Stop::Usage(error) => eprintln!("elastic-agent: {error}"),
            }
            return ExitCode::from(stop.exit_code(dialect));
        }
    };
    match begin(task) {
        Ok(code) => ExitCode::from(code),
        Err(error) => {
            eprintln!("elastic-agent: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn begin(task: Task) -> anyhow::Result<u8> {
    let options = match task {
        Task::Agent(options) => *options,
        Task::Spare(options) => {
            let console = Console::standard().context("open the console")?;
            set_up_log(&options.log, console);
            return carry_out(spare::run(options));
        }
    };
    let guard = guard::start()?;
    // This comes after the guard's start: workers are its children, and keep the limit that they were given.
    listener::share_descriptors(Serves {
        store: options.store.choice.may_be_served_here(),
        workers: matches!(options.workers.store_host, StoreHost::Agent(_)),
    });
    let console = Console::standard().context("open the console")?;
    set_up_log(&options.log, console.clone());
    carry_out(async { Ok(run::run_to_end(options, guard, console).await) })
}

fn carry_out(task: impl Future<Output = anyhow::Result<u8>>) -> anyhow::Result<u8> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let code = runtime.block_on(task);
    // A resolver that hangs must not keep the process alive.
    runtime.shutdown_background();
    code
}

fn set_up_log(own: &AgentLog, console: Console) {
    let libraries = "h2=warn,hyper=warn,hyper_util=warn,tonic=warn,tower=warn";
    let filter = EnvFilter::builder().parse_lossy(format!("{},{libraries}", own.level));
    let log = tracing_subscriber::fmt()
        .with_env_filter(filter)
        // The log does not write to stderr itself: a reader of stderr that does not read must not hold up the agent.
        .with_writer(move || console.log())
        .with_ansi(std::io::stderr().is_terminal())
        .with_target(false);
    if own.json {
        log.json().init()
    } else {
        log.init()
    }
    for warning in &own.warnings {
        tracing::warn!("{warning}");
    }
}
