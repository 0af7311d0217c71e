//! The job as the store's keys tell it, and the sentences for what changes.

use std::time::Duration;

use anyhow::bail;
use elastic_rendezvous::job::overview::{Change, Job, Overview};
use elastic_rendezvous::job::{JobId, Keys, NodeRecord, RoundRecord, RoundState, Versioned};
use elastic_store::WatchUpdate;

#[derive(Debug, Clone)]
pub(crate) struct Seal {
    pub(crate) round: u64,
    pub(crate) nodes: u32,
    pub(crate) reason: String,
    /// Since the run's start.
    pub(crate) at: Duration,
    /// The step its members resume from, as the round's record says.
    pub(crate) resume: u64,
    /// The step of the checkpoint that was committed last before it.
    pub(crate) committed: u64,
}

#[derive(Debug)]
pub(crate) struct JobView {
    job: JobId,
    overview: Overview,
    pub(crate) seals: Vec<Seal>,
}

impl JobView {
    pub(crate) fn new(job: JobId) -> JobView {
        JobView { job, overview: Overview::new(Keys::DEFAULT_PREFIX), seals: Vec::new() }
    }

    /// Takes in an update. Returns the sentences about what is worth telling.
    pub(crate) fn apply(&mut self, at: Duration, update: WatchUpdate) -> anyhow::Result<Vec<String>> {
        let events = match update {
            WatchUpdate::Events(events) => events,
            WatchUpdate::Snapshot { .. } => bail!("the store compacted history away while it was watched"),
            WatchUpdate::Broken(error) => return Err(error.into()),
        };
        let mut news = Vec::new();
        for event in &events {
            let (before, nodes) = (self.round().cloned(), self.nodes().count());
            let change = self.overview.apply(event).and_then(|(_, change)| change);
            if let Some(problem) = self.overview.problems.pop() {
                bail!(problem);
            }
            if let Some(Change::Round(round)) = change {
                // A leader that took over writes the record of the one before again.
                let same = |old: RoundRecord| {
                    (old.number, old.state, old.reason) == (round.number, round.state, round.reason.clone())
                };
                let told = self.turn(at, &round);
                news.extend((!before.is_some_and(same)).then_some(told));
            } else if self.nodes().count() > nodes
                && let Some(node) = self.nodes().find(|node| node.modified == event.revision())
            {
                news.push(format!("{} is here and waits for a place", node.value.name));
            }
        }
        Ok(news)
    }

    fn job(&self) -> Option<&Job> {
        self.overview.jobs.get(&self.job)
    }

    fn nodes(&self) -> impl Iterator<Item = &Versioned<NodeRecord>> {
        self.job().into_iter().flat_map(|job| job.nodes.values())
    }

    pub(crate) fn round(&self) -> Option<&RoundRecord> {
        self.job()?.round.as_ref().map(|round| &round.value)
    }

    /// The node that goes by a name now, and its rank in the sealed round.
    pub(crate) fn node(&self, name: &str) -> Option<(&NodeRecord, Option<u32>)> {
        let job = self.job()?;
        let (id, node) = job.nodes.iter().find(|(_, node)| node.value.name == name)?;
        Some((&node.value, job.rank(id).map(|rank| rank.first_rank)))
    }

    /// The number of a running round with this many nodes.
    pub(crate) fn running_with(&self, nodes: u32) -> Option<u64> {
        let round = self.round()?;
        (round.state == RoundState::Running && round.group_world_size == nodes).then_some(round.number)
    }

    fn turn(&mut self, at: Duration, round: &RoundRecord) -> String {
        let number = round.number;
        match round.state {
            RoundState::Forming => format!("{} → forming round {number}", round.reason),
            RoundState::Running => {
                let (nodes, reason) = (round.group_world_size, round.reason.clone());
                let resume = round.checkpoint.as_ref().map_or(0, |checkpoint| checkpoint.step);
                let committed = self.job().and_then(|job| job.checkpoint.as_ref());
                let committed = committed.map_or(0, |checkpoint| checkpoint.value.step);
                self.seals.push(Seal { round: number, nodes, reason, at, resume, committed });
                format!("round {number} with {nodes} nodes, step {committed} is committed")
            }
            state => format!("round {number}: the job has {state}"),
        }
    }
}
