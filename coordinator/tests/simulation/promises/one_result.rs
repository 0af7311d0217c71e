//! Promise 5: a generation of a job has one result and one root cause, and every agent exits with it.

use elastic_coordinator::job::{RoundRecord, RoundState};
use elastic_coordinator::rendezvous::End;

use crate::process::Process;

pub(super) struct OneResult {
    finals: Vec<RoundRecord>,
    /// Two hosts were given one node name.
    clash: bool,
}

impl OneResult {
    pub(super) fn new(clash: bool) -> OneResult {
        OneResult { finals: Vec::new(), clash }
    }

    pub(super) fn round_written(&mut self, round: &RoundRecord) -> Result<(), String> {
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
        let had = |state| self.finals.iter().any(|result| result.state == state);
        let fits = match end {
            End::Succeeded => had(RoundState::Succeeded),
            End::Closed => had(RoundState::Closed),
            End::Failed(cause, reason) => {
                let same = |result: &&RoundRecord| result.cause == *cause && result.reason == *reason;
                self.finals.iter().filter(same).any(|result| result.state == RoundState::Failed)
            }
            End::Drained => process.drained || process.sent_away,
            // Who cannot join in time has no part in the job.
            End::StoreLost(_) => !healed && process.member.round().is_none(),
            End::Refused(_) => self.clash,
        };
        if fits {
            Ok(())
        } else {
            Err(format!("{} ends with {end:?}, the results are {:?}", process.id(), self.finals))
        }
    }
}
