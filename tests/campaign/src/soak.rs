//! One long job with one fault after the other, and whole again each time: whether it keeps its promises, how long each
//! recovery takes, and whether anything grows.
//!
//! A coordinator leads it. The coordinator, and the agent of the first node, live from the start to the end: what leaks
//! with each round or fault shows in them. So faults that end processes are injected into the other nodes.

use std::fmt::Write;

use anyhow::{Context, Result, bail, ensure};
use elastic_rendezvous::job::RoundState;
use elastic_rendezvous::job::history::KEPT;
use elastic_tests::prelude::*;
use etcd_client::GetOptions;

use super::checker::{self, Broken};
use super::coordinator::Coordinator;
use super::fault::{self, Action, Fault, Keeps, Who};
use super::nodes::{Node, Process};
use super::scene::{Course, Scene, pause};
use super::testbed::Testbed;
use super::usage::{Sample, Trend, trends};

/// The longest until the job is whole after a fault's end.
const WHOLE: Duration = Duration::from_secs(90);

/// A job is whole once it has trained in one round with all nodes for this long.
const SETTLED: Duration = Duration::from_secs(1);

/// The longest without a step, in addition to the fault's own time.
const STUCK: Duration = Duration::from_secs(30);

/// Faults between two compactions of etcd, which its operators have it do by itself.
const COMPACTED: usize = 10;

/// Rounds after which an agent holds as many ports as it ever does: those of its last 64.
const AGED: u64 = 70;

pub(crate) struct Soak {
    pub(crate) lasts: Duration,
    /// From one recovery to the next fault.
    pub(crate) every: Duration,
    pub(crate) faults: Vec<Fault>,
    pub(crate) seed: u64,
}

/// One fault, and how the job came back.
#[derive(Debug, Clone)]
pub(crate) struct Recovery {
    pub(crate) fault: String,
    /// Seconds without a step, at most, after the fault began.
    pub(crate) pause_s: f64,
    /// Seconds from the fault's end to the first step with all nodes.
    pub(crate) whole_s: f64,
}

#[derive(Debug, Default)]
pub(crate) struct Soaked {
    pub(crate) recoveries: Vec<Recovery>,
    /// What was in use, each time that the job was whole.
    pub(crate) samples: Vec<Sample>,
    pub(crate) broken: Vec<String>,
    pub(crate) steps: u64,
    pub(crate) rounds: u64,
}

/// Whether this can be injected into an endless job many times, and its first node's processes stay.
pub(crate) fn suits(fault: &Fault) -> bool {
    let lasting = |action: &Action| match action {
        Action::Kill(Process::Member, _) => true,
        Action::Kill(_, who)
        | Action::Reset(who)
        | Action::Drain(who, _)
        | Action::Exhaust(_, who, _)
        | Action::OutOfMemory(_, who) => *who == Who::Follower,
        Action::Lose(_) | Action::Upgrade | Action::Clock(..) | Action::ResetEachRound(..) => false,
        Action::Delete(_) | Action::Overwrite(..) => false,
        _ => true,
    };
    fault.ends == [0] && fault.keeps != Keeps::Nothing && fault.actions.iter().all(lasting)
}

impl Testbed {
    /// Has a job suffer. `tell` is given a line for each fault.
    pub(crate) async fn soak(&self, soak: &Soak, mut tell: impl FnMut(&str)) -> Result<Soaked> {
        let folder = self.folder.join("job");
        let _ = std::fs::remove_dir_all(&folder);
        let mut scene = Scene::new(self, &folder, Course::endless()).await?;
        scene.spared = Some(0);
        let named = |scene: &mut Scene| scene.observer.events().leader().is_some();
        for node in &mut scene.nodes {
            node.start()?;
        }
        scene.until("a node leads", named).await?;
        let mut soaked = Soaked::default();
        scene.whole(Duration::ZERO).await?;
        tell("the job comes of age: rounds until all that it keeps of its past is full");
        scene.age().await?;
        let begun = scene.observer.elapsed();
        while scene.observer.elapsed() - begun < soak.lasts && soaked.broken.is_empty() {
            soaked.samples.push(sample(&scene).await?);
            let at = soaked.recoveries.len();
            let chance = draw(soak.seed, at);
            if chance & 1 == 1 {
                // Of the nodes that a fault may be injected into, the first one gets it.
                scene.nodes.swap(1, 2);
            }
            let fault = &soak.faults[(chance / 2) as usize % soak.faults.len()];
            match scene.recover(fault).await {
                Ok(recovery) => {
                    tell(&format!(
                        "{:.0} s: {}: {:.1} s without a step, whole after {:.1} s",
                        (scene.observer.elapsed() - begun).as_secs_f64(),
                        recovery.fault,
                        recovery.pause_s,
                        recovery.whole_s
                    ));
                    if recovery.pause_s > (fault.lasts + STUCK).as_secs_f64() {
                        soaked.broken.push(format!("{}: {:.1} s without a step", fault.name, recovery.pause_s));
                    }
                    soaked.recoveries.push(recovery);
                }
                Err(error) => soaked.broken.push(format!("{}: {error:#}", fault.name)),
            }
            if at % COMPACTED == COMPACTED - 1 {
                scene.cluster.compact().await?;
            }
            scene.nodes.iter().try_for_each(Node::tidy)?;
            if scene.coordinator.as_mut().is_some_and(|coordinator| coordinator.revive().is_ok_and(|started| started)) {
                soaked.broken.push(format!("{}: the coordinator has ended", fault.name));
            }
            scene.pass(soak.every).await?;
        }
        if soaked.broken.is_empty() {
            soaked.broken.extend(scene.close().await.err().map(|error| format!("{error:#}")));
        }
        soaked.judge(self, &mut scene);
        if !soaked.broken.is_empty() {
            self.keep(&mut scene, "a soak")?;
        }
        Ok(soaked)
    }
}

impl Scene {
    /// Kills an agent again and again, until the job has as many events and its first agent as many ports as they ever
    /// have.
    async fn age(&mut self) -> Result<()> {
        const KILLS: u64 = 2 * AGED;
        let killed = fault::all().into_iter().find(|fault| fault.name == "an agent is killed");
        let killed = killed.context("an agent is killed")?;
        for _ in 0..KILLS {
            let round = self.observer.events().round().map_or(0, |round| round.number);
            if round >= AGED && count(self, &self.keys.events()).await? >= KEPT {
                return Ok(());
            }
            self.recover(&killed).await?;
        }
        bail!("a job has no {AGED} rounds and {KEPT} events after {KILLS} kills")
    }

    /// Injects the fault, and waits until the job is whole again.
    async fn recover(&mut self, fault: &Fault) -> Result<Recovery> {
        let (began, ended) = self.suffer(fault).await?;
        let whole = self.whole(ended).await?;
        let steps: Vec<Duration> =
            self.observer.lines().iter().filter(|line| line.is_step()).map(|line| line.at).collect();
        Ok(Recovery {
            fault: fault.name.into(),
            pause_s: pause(&steps, began).as_secs_f64(),
            whole_s: (whole - ended).as_secs_f64(),
        })
    }

    /// Waits until all nodes train in one round, and have done so for a while. Returns when they began to, after `since`.
    async fn whole(&mut self, since: Duration) -> Result<Duration> {
        let begun = self.observer.elapsed();
        loop {
            self.tend()?;
            let round = self.observer.events().round();
            let whole = round.filter(|round| round.state == RoundState::Running && round.group_world_size == 3);
            let now = self.observer.elapsed();
            if let Some(round) = whole {
                let of_round = |line: &&super::history::Line| line.is_step() && line.event["round"] == round.number;
                let late = self.observer.lines().iter().rev().take_while(|line| line.at > since).filter(of_round);
                let (newest, first) =
                    late.fold((None, None), |(newest, _), line| (newest.or(Some(line.at)), Some(line.at)));
                if let (Some(newest), Some(first)) = (newest, first)
                    && now.saturating_sub(first) > SETTLED
                    && now.saturating_sub(newest) < SETTLED
                    && self.again.is_empty()
                {
                    return Ok(first);
                }
            }
            if now.saturating_sub(begun) > WHOLE {
                bail!("the job is not whole within {WHOLE:?}: {:?}", self.observer.events().round());
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    /// Ends the job as its operator: all agents end with that, and nothing of them is left.
    async fn close(&mut self) -> Result<()> {
        const CLOSED: i32 = 4;
        self.cluster.put(&self.keys.desired(), r#"{"closed":true}"#).await?;
        self.until("all agents end", |scene| scene.nodes.iter().all(|node| node.end().is_some())).await?;
        let codes: Vec<Option<i32>> = self.nodes.iter().map(Node::end).collect();
        ensure!(codes.iter().all(|&code| code == Some(CLOSED)), "a job was closed, and its agents end with {codes:?}");
        self.until("no process is left", |scene| scene.nodes.iter().all(|node| node.host.processes().is_empty())).await
    }
}

impl Soaked {
    fn judge(&mut self, testbed: &Testbed, scene: &mut Scene) {
        let lines = scene.observer.lines().to_vec();
        let events = scene.observer.events().clone();
        let mut wrong = checker::history(&events);
        wrong.extend(checker::endless(&lines, &testbed.results));
        wrong.extend(testbed.training.spoilt(scene.checkpoints.path(), &events));
        self.broken.extend(wrong.into_iter().map(|Broken(text)| text).chain(scene.wrong.drain(..)));
        self.steps = lines.iter().filter(|line| line.is_step()).count() as u64;
        self.rounds = events.round().map_or(0, |round| round.number);
        let grown = trends(&self.samples).into_iter().filter(Trend::grows);
        self.broken
            .extend(grown.map(|Trend { name, before, after, .. }| format!("{name} grows from {before} to {after}")));
    }

    /// Two tables: of recoveries by fault, and of what was in use.
    pub(crate) fn tables(&self) -> String {
        let mut text = String::from(
            "| fault | times | without a step: median, 99 %, most | whole after: median, 99 %, most |\n\
             |---|---|---|---|\n",
        );
        let mut names: Vec<&str> = self.recoveries.iter().map(|one| one.fault.as_str()).collect();
        names.sort_unstable();
        names.dedup();
        for name in names.iter().map(|name| Some(*name)).chain([None]) {
            let of: Vec<&Recovery> =
                self.recoveries.iter().filter(|one| name.is_none_or(|name| one.fault == name)).collect();
            let spread = |seconds: fn(&Recovery) -> f64| {
                let all: Vec<f64> = of.iter().map(|one| seconds(one)).collect();
                [50.0, 99.0, 100.0].map(|percent| format!("{:.2}", percentile(&all, percent))).join(", ")
            };
            let (pauses, wholes) = (spread(|one| one.pause_s), spread(|one| one.whole_s));
            let _ = writeln!(text, "| {} | {} | {pauses} s | {wholes} s |", name.unwrap_or("all"), of.len());
        }
        text.push_str("\n| in use | second quarter | last quarter | most |\n|---|---|---|---|\n");
        for Trend { name, before, after, most, .. } in trends(&self.samples) {
            let _ = writeln!(text, "| {name} | {before:.0} | {after:.0} | {most:.0} |");
        }
        text
    }
}

async fn sample(scene: &Scene) -> Result<Sample> {
    let mut sample = Sample::default();
    for node in &scene.nodes {
        for (kind, which) in [("agent", Process::Agent), ("guard", Process::Guard), ("worker", Process::Worker)] {
            node.processes(which).into_iter().for_each(|pid| sample.process(kind, pid));
        }
        sample.folder("logs", &node.disk.path().join("logs"));
        sample.folder("runtime", &node.disk.path().join("run"));
        sample.folder("temporary", &node.disk.path().join("tmp"));
    }
    let coordinator = scene.coordinator.as_ref().and_then(Coordinator::pid);
    coordinator.into_iter().for_each(|pid| sample.process("coordinator", pid));
    (0..scene.cluster.members.len()).filter_map(|at| scene.cluster.pid(at)).for_each(|pid| sample.process("etcd", pid));
    sample.folder("checkpoint", scene.checkpoints.path());
    sample.at_most("keys", count(scene, "/elastic").await? as f64);
    Ok(sample)
}

/// How many keys the store has that begin so.
async fn count(scene: &Scene, prefix: &str) -> Result<u64> {
    let mut client = scene.cluster.client().await?;
    let all = GetOptions::new().with_prefix().with_count_only();
    Ok(client.get(prefix, Some(all)).await?.count().try_into()?)
}

fn draw(seed: u64, at: usize) -> u64 {
    u64::from(crc32c::crc32c(format!("soak {seed} {at}").as_bytes()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_soak_spares_the_first_node_s_processes_and_whatever_ends_a_job() {
        let suit: Vec<&str> = fault::all().iter().filter(|fault| suits(fault)).map(|fault| fault.name).collect();
        assert!(suit.len() >= 60, "{}", suit.len());
        for name in ["a worker is killed", "a host is reset", "etcd is down for 20 s", "the leader is isolated for 7 s"]
        {
            assert!(suit.contains(&name), "{name}");
        }
        for name in [
            "all agents are killed",
            "a host is lost permanently",
            "an operator closes the job",
            "the leading host is reset",
        ] {
            assert!(!suit.contains(&name), "{name}");
        }
    }

    #[test]
    fn recoveries_are_reported_by_fault_and_together() {
        let recovery = |fault: &str, pause_s| Recovery { fault: fault.into(), pause_s, whole_s: 2.0 * pause_s };
        let recoveries = vec![recovery("b", 1.0), recovery("a", 0.25), recovery("b", 3.0)];
        let text = Soaked { recoveries, ..Soaked::default() }.tables();
        assert!(
            text.contains("| a | 1 | 0.25, 0.25, 0.25 s | 0.50, 0.50, 0.50 s |\n| b | 2 | 1.00, 3.00, 3.00 s |"),
            "{text}"
        );
        assert!(text.contains("| all | 3 | 1.00, 3.00, 3.00 s |"), "{text}");
    }
}
