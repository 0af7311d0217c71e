//! The lease that a node's key hangs on: asked for, renewed, lost.

use std::time::Duration;

use super::step::{LONGEST, Out};
use super::timers::Timer;
use super::{Call, End, Member, MemberOutput, Mode, Workers};
use crate::kv::{LeaseId, StoreError};
use crate::time::Time;

/// A store is slow that takes this part of `lease_ttl` for an answer.
const SLOW: u32 = 10;

/// How many times `lease_ttl` a newcomer's lease lasts that was asked of a slow store.
const LONGER: u32 = 3;

/// ```text
///   none ──▶ asked ──▶ held ◀──▶ renewing, or exchanging
///    ▲  ◀── failed ─────┘ lost       │ lost
///    └────── answered ── lost, renewing
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Lease {
    /// There is none.
    None,
    /// One was asked for.
    Asked,
    /// It has this one.
    Held(LeaseId),
    /// The same, while a renewal is under way.
    Renewing(LeaseId),
    /// The same, while another is asked for, which takes its place.
    Exchanging(LeaseId),
    /// It is gone, while a renewal is still to be answered: the next one is asked for after that.
    LostRenewing,
}

impl Lease {
    pub(super) fn id(self) -> Option<LeaseId> {
        match self {
            Lease::Held(id) | Lease::Renewing(id) | Lease::Exchanging(id) => Some(id),
            Lease::None | Lease::Asked | Lease::LostRenewing => None,
        }
    }

    /// Whether an answer is to come.
    pub(super) fn is_awaited(self) -> bool {
        matches!(self, Lease::Asked | Lease::Renewing(_) | Lease::Exchanging(_) | Lease::LostRenewing)
    }
}

impl Member {
    pub(super) fn granted(&mut self, now: Time, sent: Time, result: Result<LeaseId, StoreError>, out: &mut Out) {
        match result {
            Ok(id) => {
                self.lease = Lease::Held(id);
                (self.granted, self.renewed) = (now, sent);
                self.lasts = self.asked_for;
                self.timers.set(Timer::Lease, sent + self.pace());
            }
            Err(error) => {
                self.lease = match self.lease {
                    Lease::Exchanging(id) => Lease::Held(id),
                    _ => Lease::None,
                };
                let pause = self.trouble(&error, out);
                self.timers.set(Timer::Lease, now + pause);
            }
        }
    }

    pub(super) fn renewed(
        &mut self,
        now: Time,
        sent: Time,
        lease: LeaseId,
        result: Result<bool, StoreError>,
        out: &mut Out,
    ) {
        match self.lease {
            Lease::Renewing(id) if id == lease => self.lease = Lease::Held(id),
            Lease::LostRenewing => {
                self.lease = Lease::None;
                return;
            }
            _ => return,
        }
        match result {
            Ok(true) => {
                // mutant proven_by_the_answer: self.renewed.max(sent) => self.renewed.max(now)
                self.renewed = self.renewed.max(sent);
                self.store_answered(now, sent);
                self.prove_lease();
                if self.own.hangs_on(lease) {
                    self.let_in(now, out);
                }
                self.timers.set(Timer::Lease, sent + self.pace());
                self.told = None;
            }
            Ok(false) => self.lease_lost(now),
            Err(StoreError::Lost { cause }) => {
                self.timers.set(Timer::Lease, now + LONGEST);
                self.end(End::StoreLost(format!("store lost: {cause}")), out);
            }
            Err(error) => {
                let pause = self.trouble(&error, out);
                self.timers.set(Timer::Lease, now + pause);
            }
        }
    }

    /// A lease proves something once the own key hangs on it: then anyone who finds the key gone knows that the lease
    /// is over.
    pub(super) fn prove_lease(&mut self) {
        // mutant a_lease_counts_without_its_key: self.own.hangs_on(lease) => true
        if self.lease.id().is_some_and(|lease| self.own.hangs_on(lease)) {
            self.proofs.leased = self.proofs.leased.max(self.renewed);
        }
    }

    pub(super) fn lease_lost(&mut self, now: Time) {
        self.lease = match self.lease {
            Lease::Asked | Lease::Exchanging(_) => Lease::Asked,
            Lease::Renewing(_) | Lease::LostRenewing => Lease::LostRenewing,
            Lease::None | Lease::Held(_) => Lease::None,
        };
        self.timers.set(Timer::Lease, now);
        self.own.lease_lost();
    }

    pub(super) fn keep_lease(&mut self, now: Time, out: &mut Out) {
        if !self.is_due(Timer::Lease, now) {
            return;
        }
        self.lease = match self.lease {
            Lease::Held(id) if !self.exchanges_its_lease(now) => {
                out.push(MemberOutput::Renew(id));
                Lease::Renewing(id)
            }
            held => {
                self.asked_for = self.lease_time();
                out.push(MemberOutput::Grant(self.asked_for));
                held.id().map_or(Lease::Asked, Lease::Exchanging)
            }
        };
    }

    pub(super) fn store_is_slow(&self) -> bool {
        self.answered_in * SLOW >= self.spec.timings.lease_ttl
    }

    /// Whether it waits for its first place: nothing can be at work here, and no one waits for this node.
    fn is_newcomer(&self) -> bool {
        self.workers == Workers::None && matches!(self.mode, Mode::Joining | Mode::Waiting(None))
    }

    /// How long a lease is to last. A store that thousands of newcomers ask at once answers late, and renews late too:
    /// etcd up to 3.6 renews none while what it has committed waits for more than a second. A lease that ends then makes
    /// more work than it had: etcd deletes the key, and the node asks for another lease and writes its key again.
    fn lease_time(&self) -> Duration {
        let longer = self.is_newcomer() && self.store_is_slow();
        self.spec.timings.lease_ttl * if longer { LONGER } else { 1 }
    }

    /// Between two renewals. A longer lease needs fewer, until workers live by it.
    fn pace(&self) -> Duration {
        let times = if self.is_newcomer() && self.lasts > self.spec.timings.lease_ttl { LONGER } else { 1 };
        self.spec.timings.renewal() * times
    }

    /// Whether a longer lease has served its time: the node runs, and the store answers quickly. The key of the lead
    /// hangs on a leader's lease, and its revision is the term: so a leader keeps what it has.
    fn exchanges_its_lease(&self, now: Time) -> bool {
        let leads = self.leadership.own_term.is_some() || self.calls.contains(&Call::Campaign);
        let old = self.lasts > self.spec.timings.lease_ttl && now.since(self.granted) >= self.lasts;
        old && matches!(self.mode, Mode::Running(_)) && !leads && !self.store_is_slow()
    }
}
