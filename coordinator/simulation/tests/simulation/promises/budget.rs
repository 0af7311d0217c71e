//! Promise 6: exactly `max_restarts` failures are forgiven, each charged once.

use std::collections::{BTreeMap, BTreeSet};

use elastic_rendezvous::job::{
    FailureClass, Keys, NodeId, NodeRecord, Phase, RestartPolicy, RoundRecord, RoundState, Spec, Versioned,
};
use elastic_store::Event;

use crate::dice::SECOND;

/// A failure reported this long ago is known to the leader, where nothing delays its watch.
const SEEN: u64 = 3 * SECOND;

/// Whether the round ended since a node was lost soon after its start, and not for the first time: that is charged.
pub(super) fn lost_again(old: &RoundRecord, new: &RoundRecord) -> bool {
    let before = |name: &str| old.advance.lost.iter().find(|lost| lost.node == name).map_or(0, |lost| lost.rounds);
    new.advance.lost.iter().any(|lost| lost.rounds > before(&lost.node).max(1))
}

pub(super) struct Budget {
    spec: Spec,
    pub(super) last: Option<RoundRecord>,
    /// Rounds in which a worker failed by itself.
    failed: BTreeSet<u64>,
    /// Reports in the store of a worker's own failure: the round, and when it was written.
    reported: BTreeMap<NodeId, (u64, u64)>,
    pub(super) prompt: bool,
}

impl Budget {
    pub(super) fn new(spec: Spec) -> Budget {
        Budget { spec, last: None, failed: BTreeSet::new(), reported: BTreeMap::new(), prompt: false }
    }

    pub(super) fn failed(&mut self, round: u64, class: FailureClass) {
        if class != FailureClass::Lost {
            self.failed.insert(round);
        }
    }

    pub(super) fn nodes_written(&mut self, now: u64, keys: &Keys, events: &[Event]) {
        for event in events {
            let Some(node) = Keys::node_of(&keys.nodes(), event.key()) else { continue };
            let record = match event {
                Event::Put(kv) => Versioned::<NodeRecord>::parse(kv).ok(),
                Event::Delete { .. } => None,
            };
            let own = record.filter(|record| {
                let class = record.value.failure.as_ref().map(|failure| failure.class);
                record.value.phase == Phase::Failed && class == Some(FailureClass::Own)
            });
            match own.and_then(|own| own.value.round) {
                Some(round) if self.reported.get(&node).is_none_or(|(old, _)| *old != round) => {
                    self.reported.insert(node, (round, now));
                }
                Some(_) => {}
                None => {
                    self.reported.remove(&node);
                }
            }
        }
    }

    pub(super) fn round_written(&mut self, now: u64, new: &RoundRecord) -> Result<(), String> {
        let Some(old) = self.last.replace(new.clone()) else { return Ok(()) };
        if new.generation != old.generation {
            return if new.restarts == 0 { Ok(()) } else { Err(format!("a generation begins with {new:?}")) };
        }
        if new.restarts > self.spec.max_restarts {
            return Err(format!("{} restarts of {} at most", new.restarts, self.spec.max_restarts));
        }
        let next = (old.state, new.state) == (RoundState::Running, RoundState::Forming);
        let charged = match new.restarts.checked_sub(old.restarts) {
            Some(0) => false,
            Some(1) if next => true,
            _ => return Err(format!("restarts went from {} to {} with {new:?}", old.restarts, new.restarts)),
        };
        let all = self.spec.restart_policy == RestartPolicy::All;
        if charged && !all && !self.failed.contains(&old.number) && !lost_again(&old, new) {
            return Err(format!("round {} was charged, and no worker failed in it: {}", old.number, new.reason));
        }
        if next && !charged && self.prompt {
            let missed =
                self.reported.iter().find(|(_, (round, at))| *round == old.number && now.saturating_sub(*at) > SEEN);
            if let Some((node, _)) = missed {
                return Err(format!("the failure of {node} in round {} was not charged: {}", old.number, new.reason));
            }
        }
        let cause = new.cause.as_ref().filter(|_| new.state == RoundState::Failed).map(|cause| cause.class);
        if cause.is_some_and(|class| class != FailureClass::Lost) && new.restarts != self.spec.max_restarts {
            return Err(format!("the job failed with {} restarts left", self.spec.max_restarts - new.restarts));
        }
        if self.prompt && cause.is_some_and(|class| class < FailureClass::Own) {
            let known = |(round, at): &(u64, u64)| *round == new.number && now.saturating_sub(*at) > SEEN;
            if let Some((node, _)) = self.reported.iter().find(|(_, reported)| known(reported)) {
                return Err(format!("the failure of {node} is the root cause, the result says {:?}", new.cause));
            }
        }
        Ok(())
    }
}
