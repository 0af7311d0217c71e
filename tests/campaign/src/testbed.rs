//! What all jobs of a campaign share, and one job with one fault.

use anyhow::{Context, Result};
use elastic_tests::prelude::*;

use super::checker::{self, Broken, Results};
use super::cluster::{Cluster, STORE_PORT};
use super::disk;
use super::fault::Fault;
use super::hosts::{self, Host};
use super::names::Names;
use super::scene::{Course, Missed, Scene, Stage};
use super::setting::{Setting, name};
use super::training::Training;

/// What all jobs of a campaign share: hosts, names, and what the undisturbed training shows.
pub(crate) struct Testbed {
    pub(super) nodes: Vec<Host>,
    pub(super) store: Vec<Host>,
    pub(super) coordinator: Host,
    pub(super) names: Names,
    pub(super) clock: Option<PathBuf>,
    pub(super) newer_etcd: Option<PathBuf>,
    pub(super) setting: Setting,
    pub(super) etcd: PathBuf,
    pub(super) training: Training,
    pub(super) results: Results,
    pub(super) folder: PathBuf,
}

/// The result of one fault at one stage.
#[derive(Debug, Clone)]
pub(crate) struct Outcome {
    pub(crate) broken: Vec<String>,
    /// Seconds without a step, at most, after the fault began.
    pub(crate) pause_s: f64,
    /// Seconds from the fault's end to the job's.
    pub(crate) after_s: f64,
    pub(crate) restarts: u32,
    pub(crate) rounds: u64,
    pub(crate) ended: String,
}

impl Outcome {
    /// In a few words, as `record` keeps it.
    pub(crate) fn result(&self) -> String {
        let mut text = format!("{:.1}", self.pause_s);
        if self.ended != "succeeded" {
            text.extend([" ", &self.ended]);
        }
        if !self.broken.is_empty() {
            text.push_str(" broken");
        }
        text
    }
}

impl Testbed {
    /// Prepares the hosts, in this process's own network namespace, and trains once undisturbed.
    pub(crate) async fn new(folder: &Path, setting: Setting) -> Result<Testbed> {
        hosts::become_router()?;
        // Each job needs disks: where none can be made, no job is begun.
        drop(disk::Disk::new(&folder.join("trial"), 8)?);
        let host = |name: &str, number: u8| Host::new(name, number, &folder.join("hosts"));
        let nodes: Result<Vec<Host>> = (0..3).map(|at| host(&format!("node{at}"), 1 + at)).collect();
        let store: Result<Vec<Host>> = (0..3).map(|at| host(&format!("etcd{at}"), 11 + at)).collect();
        let (nodes, store) = (nodes?, store?);
        let coordinator = host("coordinator", 21)?;
        let mut known = BTreeMap::new();
        for host in nodes.iter().chain(&store).chain([&coordinator]) {
            known.insert(host.name.clone(), host.address().parse().context("an address")?);
        }
        let training = setting.training()?;
        Ok(Testbed {
            nodes,
            store,
            coordinator,
            names: Names::serve(known)?,
            clock: clock(folder)?,
            newer_etcd: etcd_of("3.5"),
            etcd: setting.etcd()?,
            setting,
            results: training.undisturbed(folder).await?,
            training,
            folder: folder.to_owned(),
        })
    }

    /// Where agents find the store: by names, which the campaign's name server knows.
    pub(super) fn endpoints(&self, cluster: &Cluster) -> String {
        if self.setting != Setting::Replicated {
            return cluster.endpoints();
        }
        let agents: Vec<String> = self.nodes.iter().map(|host| format!("{}:{STORE_PORT}", host.name)).collect();
        agents.join(",")
    }

    /// Runs a job, and injects this fault at this stage: again, where the fault came too late to strike anything.
    pub(crate) async fn run(&self, fault: &Fault, stage: Stage, seed: u64) -> Result<Outcome> {
        const TRIES: usize = 3;
        for _ in 1..TRIES {
            match self.run_once(fault, stage, seed).await {
                Err(error) if error.is::<Missed>() => {}
                outcome => return outcome,
            }
        }
        self.run_once(fault, stage, seed).await
    }

    async fn run_once(&self, fault: &Fault, stage: Stage, seed: u64) -> Result<Outcome> {
        let folder = self.folder.join("job");
        let _ = std::fs::remove_dir_all(&folder);
        let mut scene = Scene::new(self, &folder, Course::to_its_end(fault, stage)).await?;
        let outcome = self.inject_and_judge(&mut scene, fault, stage, seed).await;
        let keep = outcome.as_ref().map_or(true, |outcome| !outcome.broken.is_empty());
        if keep {
            self.keep(&mut scene, &format!("{} while {}", fault.name, name(&stage)))?;
        }
        hosts::heal_all()?;
        for at in &scene.lost {
            scene.nodes[*at].host.link(true)?;
        }
        outcome
    }

    async fn inject_and_judge(&self, scene: &mut Scene, fault: &Fault, stage: Stage, seed: u64) -> Result<Outcome> {
        scene.reach(stage, seed).await?;
        let (began, ended) = scene.suffer(fault).await?;
        let ended = scene.end(began, ended).await;
        let lines = scene.observer.lines().to_vec();
        let events = scene.observer.events().clone();
        let mut wrong = checker::judge(fault, &events, &lines, &ended, &self.results);
        wrong.extend(self.training.spoilt(scene.checkpoints.path(), &events));
        let round = events.round();
        Ok(Outcome {
            broken: wrong.into_iter().map(|Broken(text)| text).collect(),
            pause_s: ended.pause.as_secs_f64(),
            after_s: ended.after.as_secs_f64(),
            restarts: round.as_ref().map_or(0, |round| round.restarts),
            rounds: round.as_ref().map_or(0, |round| round.number),
            ended: round.map_or("none".into(), |round| format!("{:?}", round.state).to_lowercase()),
        })
    }

    /// Keeps what a job that went wrong has written.
    pub(super) fn keep(&self, scene: &mut Scene, what: &str) -> Result<()> {
        let to = self.folder.join("wrong").join(what);
        std::fs::create_dir_all(&to)?;
        for node in &scene.nodes {
            std::fs::write(to.join(format!("agent-{}.log", node.host.name)), node.log())?;
        }
        let _ = std::fs::copy(scene.folder.join("trace"), to.join("trace"));
        let _ = std::fs::copy(scene.folder.join("coordinator.log"), to.join("coordinator.log"));
        let _ = std::fs::copy(scene.folder.join("etcd/log"), to.join("etcd.log"));
        let events = scene.observer.events();
        let lines: Vec<String> = events.changes.iter().map(|change| format!("{change:?}")).collect();
        std::fs::write(to.join("changes"), lines.join("\n"))?;
        Ok(())
    }
}

/// Builds the library that sets wall clocks, where there is a C compiler.
fn clock(folder: &Path) -> Result<Option<PathBuf>> {
    let (source, library) = (folder.join("clock.c"), folder.join("clock.so"));
    std::fs::write(&source, include_str!("clock.c"))?;
    let mut compiler = Command::new("cc");
    let built = compiler.args(["-shared", "-fPIC", "-O1", "-o"]).arg(&library).arg(&source).arg("-ldl").output();
    Ok(built.is_ok_and(|output| output.status.success()).then_some(library))
}

/// The longest that one job may take, whatever happens.
pub(crate) const JOB: Duration = Duration::from_secs(240);
