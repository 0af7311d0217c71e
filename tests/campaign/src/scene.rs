//! One job on three hosts, with etcd on three others, and the stages of its life at which faults are injected.

use anyhow::{Context, Result, bail};
use clap::ValueEnum;
use elastic_rendezvous::job::{Phase as Says, RoundState};
use elastic_tests::prelude::*;

use super::cluster::Cluster;
use super::coordinator::Coordinator;
use super::disk::Disk;
use super::fault::{Action, Fault, LEASE};
use super::held::Held;
use super::history::Observer;
use super::hosts::Host;
use super::inject::Injected;
use super::names::Names;
use super::nodes::Node;
use super::secrets::Secrets;
use super::setting::Setting;
use super::training::Run;

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, ValueEnum)]
pub(crate) enum Stage {
    /// Two of three nodes wait for a place; the third starts while the fault lasts.
    Joining,
    Sealing,
    Starting,
    Running,
    /// A third node comes, and the workers of the others come to rest.
    Quiescing,
    /// A snapshot goes to the agent's memory.
    Snapshot,
    Checkpoint,
    Finishing,
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct Course {
    last_call: &'static str,
    /// Whether its hosts have wall clocks of their own.
    wall_clock: bool,
    coordinator: bool,
    /// Restarts that it has, and each node's agent.
    restarts: u32,
    /// None: as many as the training has when nothing disturbs it.
    epochs: Option<u32>,
    /// Flags of its agents, instead of those that each job has.
    flags: &'static [&'static str],
}

impl Course {
    /// A job that has a fault at this stage, and comes to its end.
    pub(crate) fn to_its_end(fault: &Fault, stage: Stage) -> Course {
        let last_call = if stage == Stage::Joining { "3s" } else { "300ms" };
        let wall_clock = fault.actions.iter().any(|action| matches!(action, Action::Clock(..)));
        let coordinator = fault.is_a_coordinators();
        Course { last_call, wall_clock, coordinator, restarts: 5, epochs: None, flags: fault.flags }
    }

    /// A job that a coordinator leads, and that is ended by its operator.
    pub(crate) fn endless() -> Course {
        const MANY: u32 = 1_000_000;
        let flags = &["--log-attempts=4"];
        Course { last_call: "300ms", wall_clock: false, coordinator: true, restarts: MANY, epochs: Some(MANY), flags }
    }
}

/// The longest that a job may take to reach a stage.
const REACHED: Duration = Duration::from_secs(60);

/// The longest that nothing may happen when a fault has ended.
pub(crate) const STUCK: Duration = Duration::from_secs(30);

/// The longest that a job may take to end.
const OVER: Duration = Duration::from_secs(150);

/// The time between two checks of a condition.
const PERIOD: Duration = Duration::from_millis(2);

/// The fault found nothing that it could strike: the job was over, or about to be.
#[derive(Debug, thiserror::Error)]
#[error("the fault strikes nothing")]
pub(crate) struct Missed;

/// A job with all that it needs.
pub(crate) struct Scene {
    pub(crate) nodes: Vec<Node>,
    /// Its leader, where that is no node.
    pub(crate) coordinator: Option<Coordinator>,
    pub(crate) cluster: Cluster,
    /// The disk with its checkpoints, which all nodes share.
    pub(crate) checkpoints: Disk,
    pub(crate) names: Names,
    pub(crate) observer: Observer,
    pub(crate) keys: Keys,
    /// The node that counts as the leader, whichever node leads.
    pub(crate) spared: Option<usize>,
    /// The node whose agent serves the store, where the agents hold it.
    pub(super) serving: usize,
    pub(super) setting: Setting,
    pub(crate) lost: Vec<usize>,
    /// Nodes to start again as soon as they have left.
    pub(crate) again: Vec<usize>,
    /// Guards that are frozen with their workers.
    pub(crate) held: Vec<Held>,
    /// Promises that were broken while the fault lasted.
    pub(crate) wrong: Vec<String>,
    /// The next release of etcd, where there is one.
    pub(crate) newer_etcd: Option<PathBuf>,
    pub(crate) steps: u64,
    pub(crate) folder: PathBuf,
}

#[derive(Debug)]
pub(crate) struct Ended {
    /// Exit codes of the agents, by node; none: it was lost.
    pub(crate) codes: Vec<Option<i32>>,
    pub(crate) left: Vec<u32>,
    pub(crate) trouble: Option<String>,
    /// Promises that were broken while the fault lasted.
    pub(crate) wrong: Vec<String>,
    /// The longest time without a step, after the fault began.
    pub(crate) pause: Duration,
    /// The time from the fault's end to the job's.
    pub(crate) after: Duration,
}

impl Scene {
    /// Prepares a job: etcd runs, no agent does.
    pub(crate) async fn new(testbed: &super::testbed::Testbed, folder: &Path, course: Course) -> Result<Scene> {
        std::fs::create_dir_all(folder)?;
        let called = testbed.store.iter().flat_map(|host| [host.name.clone(), host.address()]);
        let secrets =
            (testbed.setting == Setting::Secured).then(|| Secrets::new(folder, called.collect())).transpose()?;
        let cluster = match testbed.setting {
            Setting::Replicated => Cluster::of_agents(&testbed.nodes, folder),
            _ => Cluster::start(&testbed.store, &folder.join("etcd"), &testbed.etcd, secrets.as_ref()).await?,
        };
        let checkpoints = Disk::new(&folder.join("checkpoints"), 160)?;
        let trace = folder.join("trace");
        let keys = Keys::new(Keys::DEFAULT_PREFIX, &"job".parse().context("a job's id")?);
        let observer = Observer::new(cluster.reach.clone(), &keys, &trace);
        let Course { last_call, wall_clock, coordinator, restarts, epochs, flags } = course;
        let lease = LEASE.as_secs();
        let mut words = vec![
            format!("--rdzv-backend={}", if testbed.setting == Setting::Replicated { "c10d" } else { "etcd" }),
            format!("--rdzv-endpoint={}", testbed.endpoints(&cluster)),
            "--rdzv-id=job".into(),
            "--nnodes=2:3".into(),
            format!("--max-restarts={restarts}"),
            // By chance one node has more faults than another.
            "--exclude-after=0".into(),
            "--shutdown-timeout=3".into(),
            // An endless training writes without an end.
            "--log-rotate=1M:2".into(),
            format!(
                "--rdzv-conf=lease_ttl={lease},last_call_timeout={last_call},min_round_time=200ms,\
                 join_timeout=60s,takeover_delay=12s{}",
                secrets.iter().map(|secrets| format!(",{}", secrets.of_an_agent())).collect::<String>()
            ),
        ];
        let name = |flag: &str| flag.split('=').next().map(str::to_owned);
        words.retain(|word| flags.iter().all(|flag| name(flag) != name(word)));
        words.extend(flags.iter().map(ToString::to_string));
        words.extend(secrets.iter().flat_map(Secrets::of_a_peer));
        words.extend(testbed.training.flags());
        words.push("--no-python".into());
        let epochs = epochs.unwrap_or(testbed.training.epochs());
        let run = Run { epochs, trace: trace.clone(), checkpoints: Some(checkpoints.path().to_owned()) };
        words.extend(testbed.training.words(&run));
        let clock = testbed.clock.as_deref().filter(|_| wall_clock);
        // An agent that starts while certificates have ended fails. systemd's tries are 10 s apart, and outlast that.
        let tries = restarts.max(if secrets.is_some() { 20 } else { 0 });
        let node = |host: &Host| Node::new(host.clone(), folder, words.clone(), tries, clock);
        let nodes: Result<Vec<Node>> = testbed.nodes.iter().map(node).collect();
        let coordinator = coordinator.then(|| {
            let secrets = secrets.iter().flat_map(|secrets| [secrets.of_a_coordinator(), secrets.of_a_peer()].concat());
            let words = [vec![format!("--etcd={}", cluster.endpoints())], secrets.collect()].concat();
            Coordinator::start(&testbed.coordinator, words, &folder.join("coordinator.log"))
        });
        Ok(Scene {
            nodes: nodes?,
            coordinator: coordinator.transpose()?,
            cluster,
            checkpoints,
            names: testbed.names.clone(),
            observer,
            keys,
            spared: None,
            serving: 0,
            setting: testbed.setting,
            lost: Vec::new(),
            again: Vec::new(),
            held: Vec::new(),
            wrong: Vec::new(),
            newer_etcd: testbed.newer_etcd.clone(),
            steps: testbed.results.keys().max().copied().unwrap_or(0),
            folder: folder.to_owned(),
        })
    }

    /// Starts what the stage needs, and waits for it. `chance` moves the time within stages that last.
    pub(crate) async fn reach(&mut self, stage: Stage, chance: u64) -> Result<()> {
        let begins = match stage {
            Stage::Joining | Stage::Quiescing => 2,
            _ => 3,
        };
        for node in &mut self.nodes[..begins] {
            node.start()?;
        }
        let state = |scene: &Scene| scene.observer.events().round().map(|round| (round.number, round.state));
        let written = |scene: &Scene| std::fs::read_dir(scene.checkpoints.path()).map_or(0, Iterator::count);
        match stage {
            Stage::Joining => {
                self.until("two nodes wait", |scene| scene.observer.events().nodes_in(Says::Waiting) == 2).await
            }
            Stage::Sealing => self.until("a round forms", |scene| state(scene).is_some()).await,
            Stage::Starting => {
                let runs = Some((1, RoundState::Running));
                self.until("a round runs", |scene| state(scene) == runs).await
            }
            Stage::Running | Stage::Snapshot => {
                let step = 20 + chance % 40;
                self.until("workers train", |scene| scene.observer.step() >= step).await
            }
            Stage::Quiescing => {
                self.until("workers train", |scene| scene.observer.step() >= 15).await?;
                self.nodes[2].start()?;
                self.until("the next round forms", |scene| state(scene).is_some_and(|(number, _)| number > 1)).await
            }
            Stage::Checkpoint => {
                self.until("workers train", |scene| scene.observer.step() >= 20).await?;
                let before = written(self);
                self.until("a checkpoint is begun", |scene| written(scene) > before).await
            }
            Stage::Finishing => {
                let steps = self.steps;
                self.until("training is done", |scene| scene.observer.step() >= steps).await
            }
        }
    }

    /// Injects the fault and undoes it after its time. Returns when it began and when it ended, since the job began.
    pub(crate) async fn suffer(&mut self, fault: &Fault) -> Result<(Duration, Duration)> {
        for (process, who) in fault.actions.iter().filter_map(Action::strikes) {
            let begun = Instant::now();
            while self.processes(process, who).await?.is_empty() {
                self.tend()?;
                if self.is_over() || begun.elapsed() > REACHED {
                    return Err(Missed).with_context(|| format!("there is no {process:?}"));
                }
                tokio::time::sleep(PERIOD).await;
            }
        }
        let mut injected = Injected::default();
        let began = self.observer.elapsed();
        let done = self.inject_all(fault, &mut injected).await;
        injected.undo(self).context("undo it")?;
        done.map(|()| (began, self.observer.elapsed()))
    }

    async fn inject_all(&mut self, fault: &Fault, injected: &mut Injected) -> Result<()> {
        for action in &fault.actions {
            self.inject(action, injected).await.with_context(|| format!("do {action:?}"))?;
        }
        self.start_missing()?;
        self.pass(fault.lasts).await
    }

    /// Nodes that were not there yet come while the fault lasts.
    pub(super) fn start_missing(&mut self) -> Result<()> {
        self.nodes.iter_mut().filter(|node| !node.has_started()).try_for_each(Node::start)
    }

    /// Does nothing to the job for a while.
    pub(super) async fn pass(&mut self, time: Duration) -> Result<()> {
        let begun = Instant::now();
        while begun.elapsed() < time {
            self.tend()?;
            self.observer.lines();
            tokio::time::sleep(PERIOD).await;
        }
        Ok(())
    }

    /// Waits for the end of the job, and of all agents.
    pub(crate) async fn end(&mut self, began: Duration, ended: Duration) -> Ended {
        let trouble = self.over(ended).await.err().map(|error| format!("{error:#}"));
        let end = self.observer.elapsed();
        let here = |at: &usize| !self.lost.contains(at);
        let codes = (0..self.nodes.len()).map(|at| Some(at).filter(here).and_then(|at| self.nodes[at].end())).collect();
        // Who watches over the workers may take a moment longer than the agent, and the observer may hear of the end
        // later than the agents.
        let left_over = |scene: &Scene| -> Vec<u32> {
            let hosts = scene.nodes.iter().enumerate().filter(|(at, _)| !scene.lost.contains(at));
            hosts.flat_map(|(_, node)| node.host.processes()).collect()
        };
        let begun = Instant::now();
        let settled = |scene: &Scene| left_over(scene).is_empty() && scene.observer.events().is_over();
        while trouble.is_none() && begun.elapsed() < Duration::from_secs(10) && !settled(self) {
            tokio::time::sleep(PERIOD).await;
        }
        let steps: Vec<Duration> =
            self.observer.lines().iter().filter(|line| line.is_step()).map(|line| line.at).collect();
        let wrong = std::mem::take(&mut self.wrong);
        Ended {
            codes,
            left: left_over(self),
            trouble,
            wrong,
            pause: pause(&steps, began),
            after: end.saturating_sub(ended),
        }
    }

    async fn over(&mut self, ended: Duration) -> Result<()> {
        let mut newest = (0, 0);
        let mut since = ended;
        let all_over = |scene: &Scene| {
            (0..scene.nodes.len()).all(|at| scene.lost.contains(&at) || scene.nodes[at].end().is_some())
        };
        while !all_over(self) || !self.again.is_empty() {
            self.tend()?;
            let now = self.observer.elapsed();
            let seen = (self.observer.lines().len(), self.observer.events().changes.len());
            if seen != newest {
                (newest, since) = (seen, now);
            }
            if now - since > STUCK {
                bail!("nothing has happened for {STUCK:?}");
            }
            if now - ended > OVER {
                bail!("the job does not end within {OVER:?}");
            }
            tokio::time::sleep(PERIOD).await;
        }
        Ok(())
    }

    pub(super) fn coordinator(&mut self) -> &mut Coordinator {
        self.coordinator.as_mut().expect("the fault is a coordinator's")
    }

    pub(super) fn is_over(&self) -> bool {
        self.observer.events().is_over()
    }

    /// Does what operators and service managers do while a job runs.
    pub(super) fn tend(&mut self) -> Result<()> {
        for node in &mut self.nodes {
            node.tend()?;
        }
        let over = self.is_over();
        let (nodes, wrong) = (&mut self.nodes, &mut self.wrong);
        wrong.extend(self.held.iter_mut().filter_map(|held| held.look(&self.observer)));
        let mut failed = None;
        self.again.retain(|&at| {
            // A job that is over needs no more agents.
            if nodes[at].is_up() || over {
                return nodes[at].is_up();
            }
            if nodes[at].end() != Some(LEFT) {
                let name = &nodes[at].host.name;
                wrong.push(format!("{name} was asked to leave, and ended with {:?}", nodes[at].end()));
            }
            failed = nodes[at].start().err();
            false
        });
        failed.map_or(Ok(()), Err)
    }

    pub(super) async fn until(&mut self, what: &str, mut holds: impl FnMut(&mut Scene) -> bool) -> Result<()> {
        let begun = Instant::now();
        while !holds(self) {
            self.tend()?;
            if begun.elapsed() > REACHED {
                bail!("not within {REACHED:?}: {what}; etcd's log ends with\n{}", self.cluster.log_tail());
            }
            tokio::time::sleep(PERIOD).await;
        }
        Ok(())
    }
}

/// The longest time between two steps, from the one before the fault on.
pub(super) fn pause(steps: &[Duration], began: Duration) -> Duration {
    let after = steps.iter().copied().filter(|&at| at > began);
    let mut before = began;
    let mut longest = Duration::ZERO;
    for at in after {
        longest = longest.max(at - before);
        before = at;
    }
    longest
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pause_begins_with_the_fault() {
        let at = |times: &[u64]| times.iter().map(|&ms| Duration::from_millis(ms)).collect::<Vec<_>>();
        let began = Duration::from_millis(100);
        assert_eq!(pause(&at(&[10, 90, 140, 150, 400, 410]), began), Duration::from_millis(250));
        assert_eq!(pause(&at(&[10, 90, 600]), began), Duration::from_millis(500));
        assert_eq!(pause(&at(&[10, 20]), began), Duration::ZERO);
    }
}
