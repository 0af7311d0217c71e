//! `elasticctl`: shows the jobs, and passes on what an operator asks of them. Agents start jobs.

mod operator;
mod show;
mod table;

use std::process::ExitCode;
use std::sync::Arc;

use anyhow::Context;
use clap::{Parser, Subcommand, ValueEnum};
use elastic_coordinator::flags::StoreFlags;
use elastic_coordinator::job::overview::{Change, Overview};
use elastic_coordinator::store::{Store, WatchUpdate};

use operator::{Operator, Wish};

/// See elastic's jobs and ask things of them.
///
/// Everything is read from the store that the agents meet through, and asked for there: elasticctl talks to no agent,
/// and needs no coordinator. What is asked for is carried out by whoever leads the job.
#[derive(Debug, Parser)]
#[command(
    name = "elasticctl",
    version,
    after_help = "\
Examples:
  elasticctl jobs                          all jobs, their rounds and why those came to be
  elasticctl describe train                one job: nodes, ranks, leader, checkpoint, evictions
  elasticctl events train -f               its history, and what happens from now on
  elasticctl drain train gpu7              gpu7 leaves at a round's end, and stays away until undrain
  elasticctl set train --max 8             grow or shrink a running job
  elasticctl jobs -o json | jq '.[] | select(.state == \"running\") | .job'

Exit status: 0 if done, 1 if it could not be done, 2 for flags that make no sense."
)]
struct Cli {
    #[command(subcommand)]
    command: Command,

    #[command(flatten)]
    store: StoreFlags,

    /// How to print
    #[arg(short, long, value_enum, default_value_t = Output::Table, global = true)]
    output: Output,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Output {
    /// For people
    Table,
    /// For programs: the records as they are stored; events as one object a line
    Json,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// List all jobs
    Jobs,
    /// Show one job: its round, nodes, ranks, leader, checkpoint, evictions
    Describe {
        /// The job, as the agents' --rdzv-id says
        job: String,
    },
    /// Show a job's history: joins, losses, failures, rounds with their reasons (the last 256)
    Events {
        /// The job
        job: String,
        /// Go on until interrupted
        #[arg(short, long)]
        follow: bool,
    },
    /// Have a node leave as planned: the others form a round without it, and its agent ends
    ///
    /// Nodes of this name get no place in the job until `elasticctl undrain`: an agent that is started there meanwhile
    /// ends at once, saying so. With fewer nodes left than the job's minimum it waits for others.
    Drain {
        /// The job
        job: String,
        /// The node's name, as `elasticctl describe` shows it
        node: String,
    },
    /// Let a drained node take part again, once its agent is started
    Undrain {
        /// The job
        job: String,
        /// The node's name
        node: String,
    },
    /// Change how many nodes a job may have, while it runs
    ///
    /// It overrides what its agents were started with until the job begins anew. A lower maximum takes effect at once:
    /// the nodes that came last become spares.
    Set {
        /// The job
        job: String,
        /// Fewest nodes
        #[arg(long, required_unless_present = "max", value_name = "NODES")]
        min: Option<u32>,
        /// Most nodes
        #[arg(long, value_name = "NODES")]
        max: Option<u32>,
    },
    /// End a job: its workers are stopped and its agents leave
    Close {
        /// The job
        job: String,
    },
    /// Have a job that has failed begin from its first step when it is started again, as when its files are lost
    ///
    /// Only the job's resume point is dropped; checkpoint files are left alone. A trainer that looks for files by itself
    /// may still find them.
    DropCheckpoint {
        /// The job
        job: String,
    },
}

#[allow(clippy::print_stderr)]
fn main() -> ExitCode {
    let cli = Cli::parse();
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => {
            eprintln!("elasticctl: cannot start: {error}");
            return ExitCode::FAILURE;
        }
    };
    let done = runtime.block_on(run(cli));
    runtime.shutdown_background();
    match done {
        Ok(()) => ExitCode::SUCCESS,
        // Whoever reads our output has seen enough.
        Err(error) if error.downcast_ref::<std::io::Error>().is_some_and(is_closed_pipe) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("elasticctl: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn is_closed_pipe(error: &std::io::Error) -> bool {
    error.kind() == std::io::ErrorKind::BrokenPipe
}

async fn run(cli: Cli) -> anyhow::Result<()> {
    let etcd = cli.store.connect()?;
    // A plain call fails as fast, but a probe says what is wrong.
    etcd.probe().await.context("no jobs can be seen")?;
    let store: Arc<dyn Store> = Arc::new(etcd);
    let operator = Operator::new(store, &cli.store.prefix);
    let json = cli.output == Output::Json;
    match cli.command {
        Command::Jobs => {
            let (overview, _) = operator.jobs().await?;
            if json { print_json(&show::jobs_json(&overview)) } else { print(&show::jobs(&overview)) }
        }
        Command::Describe { job } => {
            let (id, job, _) = operator.job(&job).await?;
            if json { print_json(&show::describe_json(&id, &job)) } else { print(&show::describe(&id, &job)) }
        }
        Command::Events { job, follow } => events(&operator, &cli.store.prefix, &job, follow, json).await,
        Command::Drain { job, node } => {
            let (was, desired) = operator.ask(&job, &Wish::Drain(node)).await?;
            advise(operator::drain_advice(&was, &desired));
            print_desired(&desired, json)
        }
        Command::Undrain { job, node } => {
            let (_, desired) = operator.ask(&job, &Wish::Undrain(node)).await?;
            print_desired(&desired, json)
        }
        Command::Set { job, min, max } => {
            let (_, desired) = operator.ask(&job, &Wish::Nodes { min, max }).await?;
            print_desired(&desired, json)
        }
        Command::Close { job } => {
            let (_, desired) = operator.ask(&job, &Wish::Close).await?;
            print_desired(&desired, json)
        }
        Command::DropCheckpoint { job } => {
            let dropped = operator.drop_checkpoint(&job).await?;
            if json {
                return print_json(&serde_json::to_value(dropped)?);
            }
            print(&match dropped {
                Some(was) => format!("dropped step {}, whose files stay at {}\n", was.step, was.path),
                None => "there was none\n".to_owned(),
            })
        }
    }
}

async fn events(operator: &Operator, prefix: &str, job: &str, follow: bool, json: bool) -> anyhow::Result<()> {
    let (id, job, revision) = operator.job(job).await?;
    let show = |number: u64, event: &_| {
        let line = if json { show::event_json(number, event).to_string() } else { show::event_line(event) };
        print(&format!("{line}\n"))
    };
    if !json {
        print(&format!("{}\n", show::events_header()))?;
    }
    for (number, event) in &job.events {
        show(*number, event)?;
    }
    if !follow {
        return Ok(());
    }
    let mut last = job.events.keys().next_back().copied();
    let mut watcher = operator.follow(&job, revision.next()).await?;
    loop {
        let update = tokio::select! {
            update = watcher.recv() => update.context("the watch has ended")?,
            _ = tokio::signal::ctrl_c() => return Ok(()),
        };
        match update {
            WatchUpdate::Events(changes) => {
                let mut seen = Overview::new(prefix);
                for change in &changes {
                    if let Some((_, Some(Change::Event(_)))) = seen.apply(change) {
                        let new = seen.jobs.get(&id).into_iter().flat_map(|job| &job.events);
                        for (number, event) in new.filter(|(number, _)| last.is_none_or(|last| **number > last)) {
                            show(*number, event)?;
                        }
                        last = last.max(seen.jobs.get(&id).and_then(|job| job.events.keys().next_back().copied()));
                    }
                }
            }
            WatchUpdate::Snapshot { values, .. } => {
                let seen = Overview::of(prefix, &values);
                for (number, event) in seen.jobs.get(&id).into_iter().flat_map(|job| &job.events) {
                    if last.is_none_or(|last| *number > last) {
                        show(*number, event)?;
                        last = Some(*number);
                    }
                }
            }
            WatchUpdate::Broken(error) => return Err(error.into()),
        }
    }
}

fn print_desired(desired: &elastic_coordinator::job::Desired, json: bool) -> anyhow::Result<()> {
    if json {
        return print_json(&serde_json::to_value(desired)?);
    }
    let number = |bound: Option<u32>| bound.map_or_else(|| "as started".to_owned(), |bound| bound.to_string());
    let drained = if desired.drain.is_empty() { "none".to_owned() } else { desired.drain.join(", ") };
    let closed = if desired.closed { "; to be closed" } else { "" };
    let (min, max) = (number(desired.min_nodes), number(desired.max_nodes));
    print(&format!("asked of the job now: min {min}, max {max}, drained {drained}{closed}\n"))
}

#[allow(clippy::print_stderr)]
fn advise(advice: Option<String>) {
    if let Some(advice) = advice {
        eprintln!("elasticctl: note: {advice}");
    }
}

fn print_json(value: &serde_json::Value) -> anyhow::Result<()> {
    print(&format!("{}\n", serde_json::to_string_pretty(value)?))
}

fn print(text: &str) -> anyhow::Result<()> {
    use std::io::Write;
    let mut out = std::io::stdout().lock();
    out.write_all(text.as_bytes())?;
    Ok(out.flush()?)
}
