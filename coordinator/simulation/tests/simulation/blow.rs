//! The last failure of a seed, while all else works again: it is acted on within a time that follows from the job's spec.

use elastic_rendezvous::job::{FailureClass, RoundRecord, RoundState};

use crate::dice::SECOND;
use crate::faults::Fault;
use crate::world::{Happening, World};

/// What fails.
#[derive(Clone, Copy, Debug)]
enum Victim {
    /// A worker, by itself: its agent reports it.
    Worker,
    /// An agent; its guard ends its workers, and its port is closed then.
    Agent,
    /// A host, which says nothing any more.
    Host,
}

/// Longest that calls, news and campaigns take one after the other, with the longest pause after a failed call.
const ANSWERS: u64 = 5 * SECOND;

/// Longest until a call is sent to a store that was away, and is back: one that was sent before takes five seconds to
/// fail, and a pause of two seconds follows it.
const BACK: u64 = 7 * SECOND;

/// Longest that a node leads whose writes the store refuses: it tries three times, and pauses for two seconds after each.
const REFUSED: u64 = 8 * SECOND;

/// A failure that no one has acted on yet.
pub(crate) struct Blow {
    victim: Victim,
    p: usize,
    /// In this round of this generation.
    round: (u64, u64),
    /// Until when somebody must have acted on it.
    by: u64,
    within: u64,
}

impl World {
    /// Something fails in a round that runs fully. The store may be away then: the time counts from its return.
    pub(crate) fn last_blow(&mut self, round: &RoundRecord) {
        let at_work = |p: &usize| self.processes[*p].alive && self.processes[*p].at_work() == Some(round.number);
        let members: Vec<usize> = (0..self.processes.len()).filter(at_work).collect();
        let Some(p) = self.dice.pick(&members) else { return };
        let victim = self.dice.pick(&[Victim::Worker, Victim::Agent, Victim::Host]).unwrap_or(Victim::Worker);
        let away = if self.dice.chance(0.4) { self.dice.between(SECOND, 20 * SECOND) } else { 0 };
        if away > 0 {
            self.schedule(|| "the store is away".into());
            self.store.go_down(self.now);
            self.at(away, Happening::Fault(Fault::StoreBack { leases_lost: false }));
        }
        let within = self.acted_on_within(victim) + if away > 0 { BACK } else { 0 };
        let by = self.now + away + within;
        self.schedule(|| format!("the last failure: {victim:?} of p{p} in round {}", round.number));
        self.blows -= 1;
        self.blow = Some(Blow { victim, p, round: (round.generation, round.number), by, within });
        let host = self.processes[p].host;
        match victim {
            Victim::Worker => {
                let tree = self.processes[p].tree.as_ref().map_or(0, |tree| tree.id);
                self.tree_fails(p, tree, FailureClass::Own);
            }
            Victim::Agent => self.die(p),
            Victim::Host => {
                self.crash_host(host);
                self.queue(by, Happening::Fault(Fault::Boot(host)));
            }
        }
    }

    /// How long it may take until the round ends, once the store answers.
    fn acted_on_within(&self, victim: Victim) -> u64 {
        let timings = &self.scenario.spec.timings;
        let spec = match victim {
            Victim::Worker => std::time::Duration::ZERO,
            // Its workers are killed within the margin.
            Victim::Agent => timings.margin,
            // Its key ends with its lease. If it led, so does the leader's, and its successor waits for one lease more.
            Victim::Host => timings.lease_ttl * 2 + timings.margin,
        };
        // Whom the store refuses may lead first, and the next leader waits for a lease again.
        let refused = if self.refuses_a_leader() { REFUSED + timings.lease_ttl.as_nanos() as u64 } else { 0 };
        spec.as_nanos() as u64 + ANSWERS + refused
    }

    /// Whether somebody has acted on the last failure, or has not in time.
    pub(crate) fn check_blow(&mut self, round: Option<&RoundRecord>) {
        let Some(blow) = &self.blow else { return };
        let same =
            |round: &RoundRecord| (round.generation, round.number) == blow.round && round.state == RoundState::Running;
        if !round.is_some_and(same) {
            self.blow = None;
        } else if self.now > blow.by {
            let Blow { victim, p, within, .. } = *blow;
            let standing = self.standing();
            let within = crate::dice::seconds(within);
            let what = format!("{victim:?} of p{p} failed, and no one has acted on it within {within}: {standing}");
            self.promises.breach("failures are acted on in time", what);
        }
    }
}
