//! Promise 5: a generation of a job has one result and one root cause, and every agent exits with it.

use std::collections::BTreeSet;

use elastic_rendezvous::End;
use elastic_rendezvous::job::{Keys, NodeId, NodeRecord, Phase, RoundRecord, RoundState, Versioned};
use elastic_store::Event;

use crate::process::Process;

pub(super) struct OneResult {
    finals: Vec<RoundRecord>,
    /// The same of a history that was lost.
    lost: Vec<RoundRecord>,
    /// Who ever said that it is done, and with which round.
    done: BTreeSet<(NodeId, u64)>,
    /// Two hosts were given one node name.
    clash: bool,
}

impl OneResult {
    pub(super) fn new(clash: bool) -> OneResult {
        OneResult { finals: Vec::new(), lost: Vec::new(), done: BTreeSet::new(), clash }
    }

    pub(super) fn nodes_written(&mut self, keys: &Keys, events: &[Event]) {
        for event in events {
            if let Event::Put(kv) = event
                && let Some(node) = Keys::node_of(&keys.nodes(), &kv.key)
                && let Ok(record) = Versioned::<NodeRecord>::parse(kv)
                && record.value.phase == Phase::Done
            {
                self.done.extend(record.value.round.map(|round| (node, round)));
            }
        }
    }

    /// As if nothing had been written so far. Agents may still end with the results.
    pub(super) fn forget(&mut self) {
        self.lost.append(&mut self.finals);
    }

    pub(super) fn round_written(&mut self, round: &RoundRecord, members: &[NodeId]) -> Result<(), String> {
        let undone = members.iter().find(|node| !self.done.contains(&((*node).clone(), round.number)));
        if round.state == RoundState::Succeeded
            && let Some(node) = undone
        {
            return Err(format!("the job succeeded, and {node} never said that it is done"));
        }
        if round.state.is_final() {
            if let Some(first) = self.finals.iter().find(|first| first.generation == round.generation) {
                return Err(format!("two results: {first:?} and {round:?}"));
            }
            self.finals.push(round.clone());
        }
        Ok(())
    }

    pub(super) fn ended(&self, process: &Process, end: &End, healed: bool) -> Result<(), String> {
        // Its own knowledge may already be of the next generation: what counts is that there was such a result.
        let had = |state| self.finals.iter().chain(&self.lost).any(|result| result.state == state);
        let fits = match end {
            End::Succeeded => had(RoundState::Succeeded),
            End::Closed => had(RoundState::Closed),
            End::Failed(cause, reason) => {
                let same = |result: &&RoundRecord| result.cause == *cause && result.reason == *reason;
                self.finals.iter().chain(&self.lost).filter(same).any(|result| result.state == RoundState::Failed)
            }
            End::Drained => process.drained || process.sent_away,
            // Who cannot join in time has no part in the job, and a newcomer that waits has no workers.
            End::StoreLost(_) => {
                process.before || !healed && (process.member.round().is_none() || process.tree.is_none())
            }
            End::Refused(_) => self.clash || process.evicted_by_operator,
        };
        if fits {
            Ok(())
        } else {
            Err(format!("{} ends with {end:?}, the results are {:?}", process.id(), self.finals))
        }
    }
}
