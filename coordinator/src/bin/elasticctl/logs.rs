//! `elasticctl logs`: finds a job's nodes in the store, asks their agents for their workers' output, and prints it. Who
//! may read, and how it is proved, is [`elastic_node::logs`]'s.

use std::collections::{BTreeMap, BTreeSet};
use std::io::IsTerminal;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, bail};
use elastic_coordinator::flags::operator::LogsFlags;
use elastic_coordinator::nodes::{members, named};
use elastic_coordinator::operator::{Operator, found};
use elastic_coordinator::removal::listing;
use elastic_node::logs::{LogQuery, LogStream, LogsError, open};
use elastic_proto::logs::{LogChunk, LogsReply};
use elastic_rendezvous::job::overview::{Job, Overview};
use elastic_rendezvous::job::{Endpoint, JobId, JobSecret, NodeId, RankRecord, RoundRecord, Versioned};
use elastic_store::Mirror;
use elastic_store::tls::MutualTls;
use serde_json::json;
use tokio::sync::mpsc;

use crate::table::printable;

/// Replies of all nodes that wait to be printed.
const AHEAD: usize = 64;

/// Pause before an agent is asked again whose connection broke.
const AGAIN: Duration = Duration::from_secs(1);

#[derive(Debug, Clone)]
struct Target {
    node: NodeId,
    peer: Endpoint,
}

impl Target {
    fn of(job: &Job, node: &NodeId) -> Target {
        Target { node: node.clone(), peer: job.nodes[node].value.peer.clone() }
    }

    fn name(&self) -> String {
        format!("node {}", self.node.name())
    }
}

struct Asking {
    job: JobId,
    secret: JobSecret,
    client: String,
    query: LogQuery,
    tls: Option<MutualTls>,
}

impl Asking {
    async fn open(&self, target: &Target, query: LogQuery) -> anyhow::Result<LogStream> {
        let (at, tls) = ((&self.job, &target.node), self.tls.as_ref());
        let opened = open(at, &target.peer, &self.secret, &self.client, query, tls).await;
        opened.with_context(|| target.name())
    }
}

pub(crate) async fn run(operator: &Operator, flags: &LogsFlags, json: bool) -> anyhow::Result<ExitCode> {
    let (id, job, _) = operator.job(&flags.job).await?;
    let round = job.round.as_ref().map(|round| round.value.clone()).context("the job has no round")?;
    let targets = targets(&id, &job, flags)?;
    if targets.is_empty() && (!flags.follow || round.state.is_final()) {
        bail!("{}", nobody(&id, &job, &round, flags));
    }
    if let Some(unlike) = job.unlike(operator.tls.is_some()) {
        bail!("the agents of job {id} cannot be asked: {unlike}");
    }
    let Some(kv) = operator.store.get(&job.keys.secret()).await? else {
        bail!(
            "job {id} has no secret, which its agents ask for before they tell logs: was {} deleted?",
            job.keys.secret()
        );
    };
    let secret = Versioned::<JobSecret>::parse(&kv).map_err(anyhow::Error::msg)?.value;
    let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
    let query = LogQuery { rank: flags.rank, round: flags.round, lines: flags.lines, follow: flags.follow };
    let asking = Asking { job: id, secret, client: format!("elasticctl on {host}"), query, tls: operator.tls.clone() };
    let printer = Printer { prefixed: flags.rank.is_none(), json, terminal: std::io::stdout().is_terminal() };
    if flags.follow {
        return follow(operator, asking, job, targets, flags.node.as_deref(), printer).await;
    }
    let (mut failed, asked) = (0, targets.len());
    for target in targets {
        if let Err(error) = show(&asking, &target, &printer).await {
            if error.downcast_ref::<std::io::Error>().is_some() {
                return Err(error);
            }
            tell(&format!("{error:#}"));
            failed += 1;
        }
    }
    // The keys of done nodes stay after their agents.
    if failed == asked && round.state.is_final() {
        bail!("{}", nobody(&asking.job, &job, &round, flags));
    }
    Ok(if failed > 0 { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

async fn show(asking: &Asking, target: &Target, printer: &Printer) -> anyhow::Result<()> {
    let mut stream = asking.open(target, asking.query).await?;
    while let Some(reply) = stream.next().await.with_context(|| target.name())? {
        printer.print(target.node.name(), reply).await?;
    }
    Ok(())
}

/// Prints what all agents tell, also of nodes that come later, until the job has ended.
async fn follow(
    operator: &Operator,
    asking: Asking,
    mut job: Job,
    targets: Vec<Target>,
    only: Option<&str>,
    printer: Printer,
) -> anyhow::Result<ExitCode> {
    // Tells of nodes that come.
    let mut mirror = Mirror::open(&*operator.store, job.keys.root()).await?;
    let mut overview = Overview::new(&operator.prefix);
    let asking = Arc::new(asking);
    let (heard, mut hearing) = mpsc::channel(AHEAD);
    // By port: an agent that was evicted continues under another node's id, in the same stream.
    let mut reading = BTreeSet::new();
    for target in targets {
        reading.insert(target.peer.clone());
        listen(&asking, target, asking.query.lines, Duration::ZERO, &heard);
    }
    let mut known: BTreeSet<NodeId> = job.nodes.keys().cloned().collect();
    loop {
        if let Some(round) = job.round.as_ref().filter(|round| round.value.state.is_final() && reading.is_empty()) {
            tell(&format!("job {} has {}: {}", asking.job, round.value.state, round.value.reason));
            return Ok(ExitCode::SUCCESS);
        }
        tokio::select! {
            Some((target, word)) = hearing.recv() => match word {
                Heard::Reply(reply) => printer.print(target.node.name(), reply).await?,
                Heard::Ended(ended) => {
                    reading.remove(&target.peer);
                    let there = job.nodes.iter().find(|(_, record)| record.value.peer == target.peer);
                    let again = match (&ended, there) {
                        // Another agent at the same port.
                        (_, Some((node, _))) if *node != target.node => Some((node.clone(), u32::MAX, Duration::ZERO)),
                        (Err(error), Some((node, _))) if has_broken(error) => Some((node.clone(), 0, AGAIN)),
                        _ => None,
                    };
                    if let Err(error) = ended {
                        tell(&format!("{error:#}"));
                    }
                    if let Some((node, lines, pause)) = again {
                        reading.insert(target.peer.clone());
                        listen(&asking, Target { node, ..target }, lines, pause, &heard);
                    }
                }
            },
            news = mirror.next() => {
                overview.take(news?);
                let gone = || format!("job {} was deleted", asking.job);
                job = overview.jobs.get(&asking.job).cloned().with_context(gone)?;
                for node in only.map_or_else(|| job.nodes.keys().collect(), |only| named(&job, only)) {
                    let target = Target::of(&job, node);
                    if known.insert(node.clone()) && reading.insert(target.peer.clone()) {
                        // All that it prints is new.
                        listen(&asking, target, u32::MAX, Duration::ZERO, &heard);
                    }
                }
            },
            _ = tokio::signal::ctrl_c() => return Ok(ExitCode::SUCCESS),
        }
    }
}

enum Heard {
    Reply(LogsReply),
    Ended(anyhow::Result<()>),
}

/// Passes on what a node's agent tells, after a pause.
fn listen(asking: &Arc<Asking>, target: Target, lines: u32, pause: Duration, heard: &mpsc::Sender<(Target, Heard)>) {
    let (asking, heard) = (Arc::clone(asking), heard.clone());
    tokio::spawn(async move {
        tokio::time::sleep(pause).await;
        let read = async {
            let mut stream = asking.open(&target, LogQuery { lines, ..asking.query }).await?;
            while let Some(reply) = stream.next().await.with_context(|| target.name())? {
                heard.send((target.clone(), Heard::Reply(reply))).await?;
            }
            anyhow::Ok(())
        };
        let ended = read.await;
        // No one hears it once the command has ended.
        let _ = heard.send((target, Heard::Ended(ended))).await;
    });
}

fn has_broken(error: &anyhow::Error) -> bool {
    matches!(error.downcast_ref(), Some(LogsError::Gone(_)))
}

/// The nodes to ask, in the order of their ranks.
fn targets(id: &JobId, job: &Job, flags: &LogsFlags) -> anyhow::Result<Vec<Target>> {
    // A done node's key stays after its agent, which stays a moment to be asked.
    let nodes = match &flags.node {
        // One may come.
        Some(node) if flags.follow || job.nodes.is_empty() => named(job, node),
        Some(node) => found(id, job, node)?,
        None => job.nodes.keys().collect(),
    };
    let mut found: Vec<_> = nodes.into_iter().map(|node| (job.rank(node), node)).collect();
    found.sort_by_key(|(rank, _)| rank.map_or(u32::MAX, |rank| rank.group_rank));
    // A rank may move to any node in a later round, and was perhaps elsewhere in an earlier one.
    if let Some(rank) = flags.rank.filter(|_| !flags.follow && flags.round.is_none()) {
        found.retain(|(place, _)| place.is_some_and(|place| has(place, rank)));
    }
    Ok(found.into_iter().map(|(_, node)| Target::of(job, node)).collect())
}

fn has(place: &RankRecord, rank: u32) -> bool {
    (place.first_rank..place.first_rank + place.slots).contains(&rank)
}

/// Why there is no one to ask, and where to look instead.
fn nobody(id: &JobId, job: &Job, round: &RoundRecord, flags: &LogsFlags) -> String {
    let members: BTreeMap<u32, _> = members(job).map(|(_, place)| (place.group_rank, place)).collect();
    let fits = |place: &RankRecord| {
        flags.rank.is_none_or(|rank| has(place, rank)) && flags.node.as_ref().is_none_or(|name| place.name == *name)
    };
    let gone: Vec<_> = members.into_values().filter(|place| fits(place)).collect();
    let wanted = match (flags.rank, &flags.node) {
        (Some(rank), _) => format!("rank {rank}"),
        (None, Some(name)) => format!("node {name}"),
        (None, None) => "worker".to_owned(),
    };
    if gone.is_empty() {
        return format!("job {id} has no {wanted} in round {}, which has {} workers", round.number, round.world_size);
    }
    let named = listing(gone.iter().map(|place| format!("{} ({})", place.name, place.peer.host)));
    format!(
        "job {id}, round {} ({}): the agents to ask are gone. What their workers printed is on {}: in the folder of \
         each agent's --log-dir, if --redirects or --tee was given, else where the agent's own output went",
        round.number, round.state, named,
    )
}

struct Printer {
    prefixed: bool,
    json: bool,
    /// A terminal would obey control characters; a pipe gets the workers' bytes.
    terminal: bool,
}

impl Printer {
    /// Prints outside of the runtime's thread, so that agents hear from a reader whose terminal stops.
    async fn print(&self, node: &str, reply: LogsReply) -> anyhow::Result<()> {
        if !reply.note.is_empty() {
            tell(&format!("node {node}: {}", reply.note));
        }
        let Some(chunk) = reply.chunk else { return Ok(()) };
        let bytes = self.lines(node, &chunk);
        tokio::task::spawn_blocking(move || {
            use std::io::Write;
            let mut out = std::io::stdout().lock();
            out.write_all(&bytes).and_then(|()| out.flush())
        })
        .await??;
        Ok(())
    }

    fn lines(&self, node: &str, chunk: &LogChunk) -> Vec<u8> {
        let text = chunk.text.strip_suffix(b"\n").unwrap_or(&chunk.text);
        let mut out = Vec::with_capacity(text.len() + 64);
        // Progress bars use returns alone.
        for line in text.split(|byte| *byte == b'\n') {
            let line = line.strip_suffix(b"\r").unwrap_or(line);
            for line in line.split(|byte| *byte == b'\r') {
                if self.json {
                    let stream = if chunk.stderr { "stderr" } else { "stdout" };
                    let record = json!({
                        "node": node, "round": chunk.round, "rank": chunk.rank, "local_rank": chunk.local_rank,
                        "stream": stream, "line": String::from_utf8_lossy(line),
                    });
                    out.extend_from_slice(record.to_string().as_bytes());
                } else {
                    match chunk.rank.filter(|_| self.prefixed) {
                        Some(rank) => out.extend_from_slice(format!("[{rank}]:").as_bytes()),
                        None if self.prefixed => {
                            out.extend_from_slice(format!("[{node} {}]:", chunk.local_rank).as_bytes())
                        }
                        None => {}
                    }
                    if self.terminal {
                        let cells = String::from_utf8_lossy(line).split('\t').map(printable).collect::<Vec<_>>();
                        out.extend_from_slice(cells.join("\t").as_bytes());
                    } else {
                        out.extend_from_slice(line);
                    }
                }
                out.push(b'\n');
            }
        }
        out
    }
}

#[allow(clippy::print_stderr)]
fn tell(line: &str) {
    eprintln!("elasticctl: {}", printable(line));
}
