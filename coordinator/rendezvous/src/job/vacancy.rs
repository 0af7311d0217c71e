//! How many more nodes a job could use, as its records tell. For spare hosts that go where they are needed; the job's
//! own rounds are decided by its leader.

use std::collections::BTreeSet;

use super::overview::Job;
use super::{Desired, Phase};

/// A job's room for more nodes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Vacancy {
    /// The operator's [`Desired::priority`].
    pub priority: i32,
    /// Nodes without which it cannot run.
    pub min: u32,
    /// Nodes that it may have.
    pub max: u32,
    /// Nodes that have a place or want one.
    pub here: u32,
    /// Spare hosts on their way that are not among these yet, by name. Who claimed first comes first.
    pub coming: Vec<String>,
}

impl Vacancy {
    /// How many nodes it lacks, below the number that it may have.
    pub fn places(&self) -> usize {
        self.max.saturating_sub(self.here) as usize
    }

    /// How many nodes it lacks to run at all.
    pub fn short(&self) -> usize {
        self.min.saturating_sub(self.here) as usize
    }
}

impl Job {
    /// The job's room for a host of this name, which does not count itself. `None` where the host has nothing to do:
    /// there is no such job, it has ended or is about to, or its operator has paused it or keeps
    /// the name out of it, or it is excluded.
    pub fn vacancy(&self, host: &str) -> Option<Vacancy> {
        let round = &self.round.as_ref()?.value;
        let (min, max) = self.range()?;
        let usual = Desired::default();
        let desired = self.desired.as_ref().map_or(&usual, |desired| &desired.value);
        let kept_out =
            |name: &str| desired.drain.iter().any(|drained| drained == name) || self.excluded(name).is_some();
        let ends = self.nodes.values().any(|node| node.value.phase == Phase::Done);
        if round.state.is_final() || desired.closed || desired.paused || ends || kept_out(host) {
            return None;
        }
        let stays = |phase| matches!(phase, Phase::Waiting | Phase::Running | Phase::Failed);
        let nodes = self.nodes.values().map(|node| &node.value).filter(|node| stays(node.phase));
        let names: BTreeSet<&str> = nodes.map(|node| node.name.as_str()).filter(|name| !kept_out(name)).collect();
        let here = names.iter().filter(|name| **name != host).count();
        let mut coming: Vec<_> = self.coming.iter().filter(|(spare, _)| !names.contains(spare.as_str())).collect();
        coming.sort_by_key(|(_, since)| **since);
        Some(Vacancy {
            priority: desired.priority,
            min,
            max,
            here: u32::try_from(here).unwrap_or(u32::MAX),
            coming: coming.into_iter().map(|(spare, _)| spare.clone()).collect(),
        })
    }
}
