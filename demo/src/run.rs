//! One training run: its agents, what the store and the trace tell of it, and waiting for something to happen in it.

use std::io;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use elastic_rendezvous::job::{JobId, Keys};
use elastic_store::{Op, Scope, Store, Watcher};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::time::sleep;

use crate::agents::{AgentOptions, Agents, Programs, RUNTIME, printed};
use crate::job_view::{JobView, Seal};
use crate::screen::{Line, Screen, Style, bar};
use crate::store::DemoStore;
use crate::trace::{GroupRun, History, Tail};
use crate::training::{CHECKPOINTS, TRACE, Training};

pub(crate) const NODES: [&str; 3] = ["a", "b", "c"];
/// The names of both runs: of their folders, and the ends of their jobs' ids.
pub(crate) const RUNS: [&str; 2] = ["undisturbed", "disturbed"];
/// The pause between two looks at files and processes.
const TICK: Duration = Duration::from_millis(50);
const BAR: usize = 40;

/// The user has asked for the end of the program.
#[derive(Debug, thiserror::Error)]
#[error("interrupted")]
pub(crate) struct Interrupted;

/// The signals by which a user ends a program.
pub(crate) struct Interrupt([Signal; 3]);

impl Interrupt {
    pub(crate) fn new() -> io::Result<Interrupt> {
        let [int, term, hangup] = [SignalKind::interrupt(), SignalKind::terminate(), SignalKind::hangup()].map(signal);
        Ok(Interrupt([int?, term?, hangup?]))
    }

    pub(crate) async fn caught(&mut self) {
        let [int, term, hangup] = &mut self.0;
        tokio::select! {
            _ = int.recv() => {}
            _ = term.recv() => {}
            _ = hangup.recv() => {}
        }
    }
}

pub(crate) struct Stage {
    pub(crate) programs: Programs,
    pub(crate) store: DemoStore,
    pub(crate) training: Training,
    pub(crate) folder: PathBuf,
    /// Tells this demo from others on the machine and in the store.
    pub(crate) id: String,
    pub(crate) screen: Screen,
    pub(crate) interrupt: Interrupt,
}

pub(crate) struct Run<'a> {
    stage: &'a mut Stage,
    title: &'static str,
    folder: PathBuf,
    pub(crate) agents: Agents,
    pub(crate) job_view: JobView,
    watcher: Watcher,
    tail: Tail,
    started: Instant,
}

/// The kill, and how the killed agent's processes ended.
#[derive(Debug)]
pub(crate) struct Kill {
    pub(crate) node: String,
    /// Marks the agent's descendants.
    pub(crate) mark: String,
    /// The agent, its guard and its workers.
    pub(crate) processes: Vec<u32>,
    pub(crate) gone_after: Duration,
    /// No round began while one of these processes lived, except for the guard.
    pub(crate) round_waited: bool,
    /// Those of them that were still there at the end.
    pub(crate) left: Vec<u32>,
    /// The other agents, their guards and workers, before the kill.
    pub(crate) others: Vec<u32>,
    /// The same, once all three agents trained again.
    pub(crate) others_later: Vec<u32>,
}

pub(crate) struct Ended {
    pub(crate) history: History,
    pub(crate) seals: Vec<Seal>,
    /// The checksum that the trainer printed.
    pub(crate) parameters: String,
    /// Test images named correctly, and their number.
    pub(crate) correct: (u64, u64),
    pub(crate) took: Duration,
}

impl<'a> Run<'a> {
    /// Watches the job `name` and starts its three agents.
    pub(crate) async fn start(stage: &'a mut Stage, name: &str, title: &'static str) -> anyhow::Result<Run<'a>> {
        let folder = stage.folder.join(name);
        std::fs::create_dir(&folder).with_context(|| format!("create {}", folder.display()))?;
        let job = stage.job(name)?;
        let keys = Keys::new(Keys::DEFAULT_PREFIX, &job);
        let client = &stage.store.client;
        let (_, revision) = client.range(keys.root()).await?;
        let watcher = client.watch(Scope::Prefix(keys.root().to_owned()), revision.next()).await?;
        let options = AgentOptions {
            programs: stage.programs.clone(),
            endpoint: stage.store.endpoint.clone(),
            job: job.to_string(),
            folder: folder.clone(),
            runtime: stage.folder.clone(),
            training: stage.training.arguments(&folder),
        };
        let tail = Tail::new(&folder.join(TRACE));
        let (agents, job_view, started) = (Agents::new(options), JobView::new(job), Instant::now());
        let mut run = Run { stage, title, folder, agents, job_view, watcher, tail, started };
        for node in NODES {
            run.agents.start(node)?;
        }
        Ok(run)
    }

    /// Says something, with the time since the start.
    pub(crate) fn say(&mut self, style: Style, text: &str) -> anyhow::Result<()> {
        let since = self.started.elapsed().as_secs_f64();
        Ok(self.stage.screen.say(style, &format!("{:>7}  {text}", format!("+{since:.1}s")))?)
    }

    pub(crate) fn history(&self) -> &History {
        &self.tail.history
    }

    pub(crate) fn total(&self) -> u64 {
        self.stage.training.schedule.total_steps()
    }

    pub(crate) fn steps_in(&self, round: u64) -> u64 {
        self.tail
            .history
            .group_runs
            .iter()
            .filter(|group_run| group_run.round == round)
            .map(|group_run| group_run.steps.len() as u64)
            .sum()
    }

    /// Waits until `found` returns something. It is called whenever something may have changed.
    pub(crate) async fn until<T>(
        &mut self,
        what: &str,
        limit: Duration,
        mut found: impl FnMut(&mut Run<'a>) -> Option<T>,
    ) -> anyhow::Result<T> {
        let deadline = Instant::now() + limit;
        loop {
            // In this order: once agents have ended, their trace is complete.
            self.agents.look()?;
            self.tail.catch_up()?;
            if let Some(found) = found(self) {
                return Ok(found);
            }
            if self.agents.all_ended() {
                bail!("training was over before {what}: this machine is fast, so train longer with --epochs");
            }
            if Instant::now() >= deadline {
                bail!("waited {} s in vain until {what}; the logs are in {}", limit.as_secs(), self.folder.display());
            }
            self.draw()?;
            tokio::select! {
                update = self.watcher.recv() => {
                    let update = update.context("the store's watch ended")?;
                    for news in self.job_view.apply(self.started.elapsed(), update)? {
                        self.say(Style::Plain, &news)?;
                    }
                }
                () = sleep(TICK) => {}
                () = self.stage.interrupt.caught() => return Err(Interrupted.into()),
            }
        }
    }

    pub(crate) async fn ended(&mut self, limit: Duration) -> anyhow::Result<Ended> {
        self.until("it has ended", limit, |run| run.agents.all_ended().then_some(())).await?;
        let took = self.started.elapsed();
        self.stage.screen.clear()?;
        let printed = printed(&self.folder, &NODES);
        let after = |prefix: &str| {
            let found = printed.iter().rev().find_map(|line| line.strip_prefix(prefix));
            found.with_context(|| {
                format!("no worker has printed \"{prefix}…\"; the logs are in {}", self.folder.display())
            })
        };
        let parameters = after("parameters ")?.to_owned();
        let accuracy = after("test accuracy ")?;
        let correct = counts(accuracy).with_context(|| format!("cannot read the accuracy {accuracy:?}"))?;
        let (history, seals) = (self.tail.history.clone(), self.job_view.seals.clone());
        Ok(Ended { history, seals, parameters, correct, took })
    }

    /// Ends what is left of the run and deletes its checkpoints. Returns the processes that do not end.
    pub(crate) async fn close(mut self) -> Vec<u32> {
        let interrupt = &mut self.stage.interrupt;
        let left = self.agents.end(interrupt.caught()).await;
        // Folders that cannot be deleted only take up space.
        let _ = std::fs::remove_dir_all(self.folder.join(CHECKPOINTS));
        let _ = std::fs::remove_dir_all(self.stage.folder.join(RUNTIME));
        left
    }

    fn draw(&mut self) -> io::Result<()> {
        let Run { stage, title, agents, job_view, tail, started, .. } = self;
        let Stage { training, screen, store, .. } = &mut **stage;
        let total = training.schedule.total_steps();
        let history = &tail.history;
        let (step, loss, epoch) = history.last().map_or((0, 0.0, 0), |last| (last.step, last.loss, last.epoch + 1));
        let since = started.elapsed().as_secs_f64();
        let percent = step * 100 / total;
        let round = job_view.round();
        let line = || {
            let round = round.map_or("no round".to_owned(), |round| format!("round {} {}", round.number, round.state));
            let epochs = training.schedule.epochs();
            let place = format!("step {step}/{total} ({percent} %), epoch {epoch}/{epochs}, loss {loss:.4}");
            format!("{:>7}  · {round}, {place}, committed {}", format!("+{since:.1}s"), history.committed)
        };
        let panel = || -> Vec<Line> {
            let mut lines = vec![
                (Style::Dim, "─".repeat(79)),
                (Style::Bold, format!(" {title}   {since:.1} s")),
                (Style::Dim, format!(" {}", store.name)),
            ];
            lines.push(match round {
                None => (Style::Plain, " no round yet".to_owned()),
                Some(round) => {
                    let world = match round.world_size {
                        0 => String::new(),
                        size => format!(", world size {size}"),
                    };
                    (Style::Plain, format!(" round {} {}{world}: {}", round.number, round.state, round.reason))
                }
            });
            for node in NODES {
                lines.push(node_line(node, agents, job_view));
            }
            lines.push((Style::Good, format!(" {} {percent:>3} %  step {step}/{total}", bar(step, total, BAR))));
            let epochs = training.schedule.epochs();
            let rate = history.group_runs.last().map_or(0.0, rate);
            let committed = history.committed;
            let place = format!("epoch {epoch}/{epochs}   loss {loss:.4}");
            lines.push((Style::Plain, format!(" {place}   committed step {committed}   {rate:.0} steps/s")));
            lines
        };
        screen.progress(panel, line)
    }
}

impl Stage {
    fn job(&self, name: &str) -> anyhow::Result<JobId> {
        Ok(format!("{}-{name}", self.id).parse()?)
    }

    pub(crate) async fn forget(&self) {
        for name in RUNS {
            let Ok(job) = self.job(name) else { continue };
            let delete = Op::delete_prefix(Keys::new(Keys::DEFAULT_PREFIX, &job).root());
            // If the store cannot be reached, a few small keys remain, of a job that no one will join.
            let _ = self.store.client.put(Vec::new(), delete).await;
        }
    }
}

fn node_line(node: &str, agents: &Agents, job_view: &JobView) -> Line {
    let agent = agents.by_node.get(node);
    let killed = agent.is_some_and(|agent| agent.killed);
    let (style, state) = match job_view.node(node) {
        _ if killed => (Style::Bad, "killed".to_owned()),
        None if agent.is_some_and(|agent| agent.exit.is_some()) => (Style::Good, "succeeded".to_owned()),
        None => (Style::Dim, "starting".to_owned()),
        Some((record, rank)) => {
            let rank = rank.map_or(String::new(), |rank| format!("rank {rank}"));
            (Style::Plain, format!("{:<9} {rank:<8}", record.phase.to_string()))
        }
    };
    let pid = agent.map_or(String::new(), |agent| format!("agent {}", agent.pid));
    (style, format!("   {node}   {state:<20} {pid}"))
}

/// Steps per second since the group's first step.
fn rate(group_run: &GroupRun) -> f64 {
    match (group_run.steps.first(), group_run.steps.last()) {
        (Some(first), Some(last)) if last.time_ms > first.time_ms => {
            (group_run.steps.len() - 1) as f64 * 1e3 / (last.time_ms - first.time_ms) as f64
        }
        _ => 0.0,
    }
}

/// `350` and `360` of `0.9722 (350 of 360)`.
fn counts(accuracy: &str) -> Option<(u64, u64)> {
    let (_, counts) = accuracy.strip_suffix(')')?.split_once('(')?;
    let (right, all) = counts.split_once(" of ")?;
    Some((right.parse().ok()?, all.parse().ok()?))
}

pub(crate) fn folder() -> anyhow::Result<PathBuf> {
    let base = std::env::temp_dir();
    let folder = tempfile::Builder::new().prefix("elastic-demo-").tempdir_in(&base);
    Ok(folder.with_context(|| format!("make a folder in {}", base.display()))?.keep())
}
