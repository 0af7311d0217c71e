//! `elastic-demo`: three agents train on this machine, one is killed and comes back, and nothing is lost. It shows the
//! main job to a person, and checks what it shows.
//!
//! | module | what it is |
//! |---|---|
//! | `scenario` | the order of events |
//! | `training` | what is trained |
//! | `store` | the store through which the agents find each other |
//! | `run` | one training run: waiting for something to happen in it |
//! | `agents` | the agents as processes, and all their descendants |
//! | `job_view` | the job as the store's keys tell it |
//! | `trace` | the steps as the trainer's trace tells them |
//! | `checks` | what must hold at the end |
//! | `screen`, `summary` | what the person sees |

mod agents;
mod checks;
mod job_view;
mod run;
mod scenario;
mod screen;
mod store;
mod summary;
mod trace;
mod training;

use std::process::ExitCode;

use clap::Parser;

use agents::Programs;
use run::{Interrupt, Interrupted, Stage};
use screen::{Screen, Style};
use training::Training;

/// Exit code after Ctrl-C: 128 and SIGINT's number, as shells count.
const INTERRUPTED: u8 = 130;

/// Trains on this machine with three agents, kills one, starts it again, and checks that nothing was lost
///
/// The same training runs twice: first undisturbed, then disturbed. The disturbed run must reach the same parameters,
/// bit for bit. Exit codes: 0 all checks hold, 1 one does not or a run failed, 130 after Ctrl-C.
#[derive(Debug, Parser)]
#[command(version, max_term_width = 100)]
struct Arguments {
    /// Meet through this etcd [default: a store that this program serves]
    #[arg(long, value_name = "HOST:PORT")]
    etcd: Option<String>,
    /// Train a small network for a few seconds
    #[arg(long)]
    quick: bool,
    /// Train longer, or shorter
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u64).range(1..))]
    epochs: Option<u64>,
}

#[allow(clippy::print_stderr)]
fn main() -> ExitCode {
    let arguments = Arguments::parse();
    // On this thread alone: agents end with the thread that started them.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let outcome = runtime.map_err(anyhow::Error::from).and_then(|runtime| runtime.block_on(demonstrate(&arguments)));
    match outcome {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) if error.is::<Interrupted>() => ExitCode::from(INTERRUPTED),
        Err(error) => {
            eprintln!("elastic-demo: {error:#}");
            ExitCode::FAILURE
        }
    }
}

async fn demonstrate(arguments: &Arguments) -> anyhow::Result<bool> {
    let programs = Programs::find()?;
    let training = Training::new(arguments.quick, arguments.epochs)?;
    let interrupt = Interrupt::new()?;
    let store = store::open(arguments.etcd.as_deref()).await?;
    let folder = run::folder()?;
    let id = format!("demo-{}", &uuid::Uuid::new_v4().simple().to_string()[..8]);
    let mut stage = Stage { programs, store, training, folder, id, screen: Screen::new(), interrupt };
    let outcome = scenario::play(&mut stage).await;
    stage.screen.clear()?;
    if arguments.etcd.is_some() {
        stage.forget().await;
    }
    if outcome.as_ref().is_err_and(|error| error.is::<Interrupted>()) {
        std::fs::remove_dir_all(&stage.folder)?;
        stage.screen.say(Style::Plain, "interrupted: all agents have ended, and their files are removed")?;
    }
    outcome
}
