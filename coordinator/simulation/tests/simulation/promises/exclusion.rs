//! Who is excluded gets no place: by the operator in no case, and for its failures where enough others are there. A node
//! is excluded for its failures after as many as were agreed on, each charged to the job, and if enough others are left.

use std::collections::BTreeMap;
use std::time::Duration;

use elastic_rendezvous::job::{Desired, Faults, NodeId, RoundRecord, RoundState};

use crate::dice::SECOND;
use crate::scenario::Scenario;

/// What an operator asked for so long ago is known to the leader, where nothing delays its watch.
const SEEN: u64 = 3 * SECOND;

pub(super) struct Exclusion {
    /// After how many failures.
    limit: u32,
    /// Fewest nodes.
    min: usize,
    pub(super) last: Option<RoundRecord>,
    desired: Desired,
    /// Since when the operator excludes a name.
    by_operator: BTreeMap<String, u64>,
    /// Since when a record says that a name is excluded for its failures, and for which round.
    for_failures: BTreeMap<(String, u64), u64>,
}

impl Exclusion {
    pub(super) fn new(scenario: &Scenario) -> Exclusion {
        Exclusion {
            limit: scenario.spec.exclude_after,
            min: scenario.spec.min_nodes as usize,
            last: None,
            desired: Desired::default(),
            by_operator: BTreeMap::new(),
            for_failures: BTreeMap::new(),
        }
    }

    pub(super) fn desired_written(&mut self, now: u64, desired: Desired) {
        self.by_operator.retain(|name, _| desired.exclude.contains(name));
        for name in &desired.exclude {
            self.by_operator.entry(name.clone()).or_insert(now);
        }
        self.desired = desired;
    }

    pub(super) fn round_written(
        &mut self,
        now: u64,
        round: &RoundRecord,
        members: &[NodeId],
        prompt: bool,
    ) -> Result<(), String> {
        let old = self.last.replace(round.clone());
        self.counted(old.as_ref(), round)?;
        for faults in &round.faults {
            if let Some(exclusion) = faults.excluded {
                self.for_failures.entry((faults.node.clone(), exclusion.round)).or_insert(now);
            }
        }
        if round.state != RoundState::Running {
            return Ok(());
        }
        let barred = |node: &&NodeId| self.by_operator.get(node.name()).is_some_and(|since| now > since + SEEN);
        if let Some(node) = members.iter().find(barred).filter(|_| prompt) {
            return Err(format!("{node} has a place in round {}, and the operator excludes it", round.number));
        }
        let (out, others): (Vec<&NodeId>, Vec<&NodeId>) =
            members.iter().partition(|node| self.is_out(now, round, node.name()));
        match out.first() {
            Some(node) if others.len() >= self.min => Err(format!(
                "{node} has a place in round {}, though it is excluded and {} others are there: {:?}",
                round.number,
                others.len(),
                round.faults
            )),
            _ => Ok(()),
        }
    }

    /// Whether a name is excluded for its failures, and that is not about to be over.
    fn is_out(&self, now: u64, round: &RoundRecord, name: &str) -> bool {
        let faults = round.faults.iter().find(|faults| faults.node == name);
        let Some(exclusion) = faults.and_then(|faults| faults.excluded) else { return false };
        let since = self.for_failures.get(&(name.to_owned(), exclusion.round));
        let lasted = Duration::from_nanos(since.map_or(0, |since| now - since));
        // Clocks differ.
        lasted < exclusion.lasts * 9 / 10 && !self.desired.takes_back(name, exclusion)
    }

    /// Each failure is charged to the job, and so many of them exclude a node.
    fn counted(&self, old: Option<&RoundRecord>, new: &RoundRecord) -> Result<(), String> {
        let Some(old) = old.filter(|old| old.generation == new.generation) else { return Ok(()) };
        let before = |node: &str| old.faults.iter().find(|faults| faults.node == node);
        let failures = |faults: Option<&Faults>| faults.map_or(0, |faults| faults.failures);
        let mut more = 0;
        for faults in &new.faults {
            let known = before(&faults.node);
            let newly = faults.exclusions > known.map_or(0, |known| known.exclusions);
            more += u32::from(newly || faults.failures > failures(known));
            if newly && (self.limit == 0 || failures(known) + 1 < self.limit) {
                return Err(format!("{} is excluded after {} failures: {faults:?}", faults.node, failures(known) + 1));
            }
            if !newly && faults.excluded.is_some() && known.is_none_or(|known| known.excluded != faults.excluded) {
                return Err(format!("{} is excluded, and was not before: {faults:?}", faults.node));
            }
        }
        if more > new.restarts - old.restarts {
            return Err(format!(
                "{more} failures are held against nodes, and {} charged: {new:?}",
                new.restarts - old.restarts
            ));
        }
        Ok(())
    }
}
