//! `elasticctl`: shows the jobs, and passes on what an operator asks of them. Agents start jobs.

mod certs;
mod delete;
mod doctor;
mod logs;
mod requester;
mod show;
mod silence;
mod table;
mod token;
mod top;

use std::process::ExitCode;
use std::sync::Arc;

use anyhow::Context;
use clap::Parser;
use elastic_coordinator::flags::operator::{Command, Flags as Cli, Output};
use elastic_coordinator::flags::{block_on, completion};
use elastic_coordinator::operator::{Granted, Operator, Wish};
use elastic_rendezvous::job::overview::Overview;
use elastic_rendezvous::job::{Requester, json};
use elastic_store::Mirror;
use elastic_store::etcd::EtcdStore;

#[allow(clippy::print_stderr)]
fn main() -> ExitCode {
    match block_on(run(Cli::parse())) {
        Ok(code) => code,
        // Anyone who reads our output has seen enough.
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

async fn run(cli: Cli) -> anyhow::Result<ExitCode> {
    let json = cli.output == Output::Json;
    let by = || requester::of(cli.by.clone());
    let reach = async || -> anyhow::Result<EtcdStore> {
        let etcd = cli.store.connect()?;
        // A plain call fails as fast, but a probe says what is wrong.
        etcd.probe().await.context("no jobs can be seen")?;
        Ok(etcd)
    };
    let connect = async || -> anyhow::Result<Operator> {
        let store = Arc::new(reach().await?);
        let tls = cli.peers.tls().map_err(anyhow::Error::msg)?;
        Ok(Operator::new(store, &cli.store.prefix).over(tls))
    };
    match cli.command {
        Command::Doctor { job } => {
            let findings = doctor::examine(&cli.store, &cli.peers, job.as_deref()).await;
            if json {
                print_json(&doctor::finding::json(&findings))?;
            } else {
                print(&doctor::finding::text(&findings))?;
            }
            return Ok(if doctor::finding::any_failed(&findings) { ExitCode::FAILURE } else { ExitCode::SUCCESS });
        }
        Command::Jobs => {
            let (overview, _) = connect().await?.jobs().await?;
            if json { print_json(&json::jobs(&overview)) } else { print(&show::jobs(&overview)) }
        }
        Command::Describe { job } => describe(&reach().await?, &cli.store.prefix, &job, json).await,
        Command::Completion { shell } => print(&completion::<Cli>(shell)),
        Command::Certs(flags) => certs::make(flags.what, json),
        Command::Token { name, role, job, expires } => token::make(name, role, job, expires, json),
        Command::Top { job } => {
            let place = format!("{} {}", cli.store.etcd.join(","), cli.store.prefix);
            top::run(&reach().await?, &cli.store.prefix, &place, job.as_deref()).await
        }
        Command::Events { job, follow } => events(&connect().await?, &job, follow, json).await,
        Command::Logs(flags) => return logs::run(&connect().await?, &flags, json).await,
        Command::Drain { job, node } => ask(&connect().await?, &job, Wish::Drain { node }, &by(), json).await,
        Command::Undrain { job, node } => ask(&connect().await?, &job, Wish::Undrain { node }, &by(), json).await,
        Command::Exclude { job, node } => ask(&connect().await?, &job, Wish::Exclude { node }, &by(), json).await,
        Command::Include { job, node } => ask(&connect().await?, &job, Wish::Include { node }, &by(), json).await,
        Command::Evict { job, node } => ask(&connect().await?, &job, Wish::Evict { node }, &by(), json).await,
        Command::Set { job, min, max, priority } => {
            ask(&connect().await?, &job, Wish::Set { min, max, priority }, &by(), json).await
        }
        Command::Close { job } => ask(&connect().await?, &job, Wish::Close {}, &by(), json).await,
        Command::Pause { job } => ask(&connect().await?, &job, Wish::Pause {}, &by(), json).await,
        Command::Resume { job } => ask(&connect().await?, &job, Wish::Resume {}, &by(), json).await,
        Command::Delete { job: Some(job), dry_run, .. } => delete::one(&connect().await?, &job, dry_run, json).await,
        Command::Delete { older_than, dry_run, .. } => {
            delete::finished(&connect().await?, older_than.unwrap_or_default(), dry_run, json).await
        }
        Command::DropCheckpoint { job } => {
            let dropped = connect().await?.drop_checkpoint(&job, &by()).await?;
            if json {
                return print_json(&serde_json::to_value(dropped)?).map(|()| ExitCode::SUCCESS);
            }
            print(&match dropped {
                Some(was) => format!("dropped step {}, whose files stay at {}\n", was.step, was.path),
                None => "there was none\n".to_owned(),
            })
        }
    }?;
    Ok(ExitCode::SUCCESS)
}

async fn describe(etcd: &EtcdStore, prefix: &str, job: &str, json: bool) -> anyhow::Result<()> {
    let (id, job, _) = Operator::new(Arc::new(etcd.clone()), prefix).job(job).await?;
    let silent = silence::look(etcd, &job.keys).await?;
    if json {
        return print_json(&silence::tell(json::job(&id, &job), &silent));
    }
    print(&show::describe(&id, &job, &silent))
}

async fn ask(operator: &Operator, job: &str, wish: Wish, by: &Requester, json: bool) -> anyhow::Result<()> {
    let Granted { desired, advice } = operator.ask(job, &wish, by).await?;
    advise(advice);
    print_desired(&desired, json)
}

/// Prints a job's history, and with `follow` what is added to it until the user stops.
async fn events(operator: &Operator, job: &str, follow: bool, json: bool) -> anyhow::Result<()> {
    let (id, job, _) = operator.job(job).await?;
    let mut mirror = Mirror::open(&*operator.store, &job.keys.events()).await?;
    let mut overview = Overview::new(&operator.prefix);
    if !json {
        print(&format!("{}\n", show::events_header()))?;
    }
    let mut last = None;
    loop {
        tokio::select! {
            news = mirror.next() => overview.take(news?),
            _ = tokio::signal::ctrl_c() => return Ok(()),
        }
        let newest = overview.jobs.get(&id).and_then(|job| job.events.keys().next_back().copied());
        // A history that is shorter than before has begun again: its job was deleted.
        last = last.filter(|last| newest >= Some(*last));
        let events = overview.jobs.get(&id).into_iter().flat_map(|job| &job.events);
        for (number, event) in events.filter(|(number, _)| last.is_none_or(|last| **number > last)) {
            let line = if json { json::event(*number, event).to_string() } else { show::event_line(event) };
            print(&format!("{line}\n"))?;
        }
        last = newest;
        if !follow {
            return Ok(());
        }
    }
}

fn print_desired(desired: &elastic_rendezvous::job::Desired, json: bool) -> anyhow::Result<()> {
    if json {
        return print_json(&serde_json::to_value(desired)?);
    }
    let number = |bound: Option<u32>| bound.map_or_else(|| "as started".to_owned(), |bound| bound.to_string());
    let drained = if desired.drain.is_empty() { "none".to_owned() } else { desired.drain.join(", ") };
    let mut named = String::new();
    let evicted = desired.evict.iter().map(|node| node.name().to_owned()).collect();
    let taken_back = desired.include.iter().map(|back| back.node.clone()).collect();
    for (names, what) in [(desired.exclude.clone(), "excluded"), (taken_back, "taken back"), (evicted, "evicted")] {
        if !names.is_empty() {
            named.push_str(&format!(", {what} {}", names.join(", ")));
        }
    }
    let closed = if desired.closed { "; to be closed" } else { "" };
    let paused = if desired.paused { "; paused" } else { "" };
    let priority = if desired.priority == 0 { String::new() } else { format!(", priority {}", desired.priority) };
    let (min, max) = (number(desired.min_nodes), number(desired.max_nodes));
    print(&format!("asked of the job now: min {min}, max {max}{priority}, drained {drained}{named}{paused}{closed}\n"))
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
