//! The job as the store's keys tell it, and the sentences for what changes.

use std::collections::BTreeMap;
use std::time::Duration;

use elastic_rendezvous::job::{Checkpoint, Keys, NodeId, NodeRecord, RankRecord, RoundRecord, RoundState, Versioned};
use elastic_store::{Event, KeyValue, Revision, WatchUpdate};

/// A round that was sealed.
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

/// What is known of a job.
#[derive(Debug)]
pub(crate) struct JobView {
    keys: Keys,
    pub(crate) nodes: BTreeMap<NodeId, NodeRecord>,
    pub(crate) round: Option<RoundRecord>,
    ranks: BTreeMap<(Revision, NodeId), RankRecord>,
    pub(crate) checkpoint: Option<Checkpoint>,
    pub(crate) seals: Vec<Seal>,
}

impl JobView {
    pub(crate) fn new(keys: Keys) -> JobView {
        let (nodes, ranks, seals) = Default::default();
        JobView { keys, nodes, round: None, ranks, checkpoint: None, seals }
    }

    /// Takes in an update. Returns the sentences about what is worth telling.
    pub(crate) fn apply(&mut self, at: Duration, update: WatchUpdate) -> anyhow::Result<Vec<String>> {
        match update {
            WatchUpdate::Events(events) => {
                let mut news = Vec::new();
                for event in events {
                    match event {
                        Event::Put(kv) => news.extend(self.put(at, &kv)?),
                        Event::Delete { key, .. } => self.delete(&key),
                    }
                }
                Ok(news)
            }
            WatchUpdate::Snapshot { .. } => anyhow::bail!("the store compacted history away while it was watched"),
            WatchUpdate::Broken(error) => Err(error.into()),
        }
    }

    /// The node that goes by a name now, and its rank in the sealed round.
    pub(crate) fn node(&self, name: &str) -> Option<(&NodeRecord, Option<u32>)> {
        let (id, record) = self.nodes.iter().find(|(_, record)| record.name == name)?;
        let plan = self.round.as_ref().and_then(|round| round.sealed).map(|sealed| sealed.plan);
        let rank = plan.and_then(|plan| self.ranks.get(&(plan, id.clone()))).map(|rank| rank.first_rank);
        Some((record, rank))
    }

    /// The number of a running round with this many nodes.
    pub(crate) fn running_with(&self, nodes: u32) -> Option<u64> {
        let round = self.round.as_ref()?;
        (round.state == RoundState::Running && round.group_world_size == nodes).then_some(round.number)
    }

    fn put(&mut self, at: Duration, kv: &KeyValue) -> anyhow::Result<Option<String>> {
        let bad = anyhow::Error::msg::<String>;
        if kv.key == self.keys.round() {
            let round = Versioned::<RoundRecord>::parse(kv).map_err(bad)?.value;
            // A leader that took over writes the record of the one before again.
            let same =
                |old: &RoundRecord| (old.number, old.state, &old.reason) == (round.number, round.state, &round.reason);
            let known = self.round.as_ref().is_some_and(same);
            let news = self.turn(at, &round);
            self.round = Some(round);
            return Ok((!known).then_some(news));
        }
        if kv.key == self.keys.checkpoint() {
            self.checkpoint = Some(Versioned::parse(kv).map_err(bad)?.value);
        } else if let Some((_, plan, node)) = self.keys.rank_of(&kv.key) {
            self.ranks.insert((plan, node), Versioned::parse(kv).map_err(bad)?.value);
        } else if let Some(node) = Keys::node_of(&self.keys.nodes(), &kv.key) {
            let record = Versioned::<NodeRecord>::parse(kv).map_err(bad)?.value;
            let is_new = self.nodes.insert(node, record.clone()).is_none();
            return Ok(is_new.then(|| format!("{} is here and waits for a place", record.name)));
        }
        Ok(None)
    }

    fn turn(&mut self, at: Duration, round: &RoundRecord) -> String {
        let number = round.number;
        let step = |checkpoint: &Option<Checkpoint>| checkpoint.as_ref().map_or(0, |checkpoint| checkpoint.step);
        match round.state {
            RoundState::Forming => format!("{} → forming round {number}", round.reason),
            RoundState::Running => {
                let (nodes, resume) = (round.group_world_size, step(&round.checkpoint));
                let committed = step(&self.checkpoint);
                let reason = round.reason.clone();
                self.seals.push(Seal { round: number, nodes, reason, at, resume, committed });
                format!("round {number} with {nodes} nodes, step {committed} is committed")
            }
            state => format!("round {number}: the job has {state}"),
        }
    }

    fn delete(&mut self, key: &str) {
        if let Some(node) = Keys::node_of(&self.keys.nodes(), key) {
            self.nodes.remove(&node);
        } else if let Some((_, plan, node)) = self.keys.rank_of(key) {
            self.ranks.remove(&(plan, node));
        }
    }
}
