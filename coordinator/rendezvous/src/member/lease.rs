//! The lease that a node's key hangs on: asked for, renewed, lost.

use super::step::{LONGEST, Out};
use super::timers::Timer;
use super::{End, Member, MemberOutput};
use crate::kv::{LeaseId, StoreError};
use crate::time::Time;

/// ```text
///   none ──▶ asked ──▶ held ◀──▶ renewing
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
    /// It is gone, while a renewal is still to be answered: the next one is asked for after that.
    LostRenewing,
}

impl Lease {
    pub(super) fn id(self) -> Option<LeaseId> {
        match self {
            Lease::Held(id) | Lease::Renewing(id) => Some(id),
            Lease::None | Lease::Asked | Lease::LostRenewing => None,
        }
    }

    /// Whether an answer is to come.
    pub(super) fn is_awaited(self) -> bool {
        matches!(self, Lease::Asked | Lease::Renewing(_) | Lease::LostRenewing)
    }
}

impl Member {
    pub(super) fn granted(&mut self, now: Time, sent: Time, result: Result<LeaseId, StoreError>, out: &mut Out) {
        match result {
            Ok(id) => {
                self.lease = Lease::Held(id);
                (self.granted, self.renewed) = (now, sent);
                self.timers.set(Timer::Lease, sent + self.spec.timings.renewal());
            }
            Err(error) => {
                self.lease = Lease::None;
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
                self.store_answered(now);
                self.prove_lease();
                if self.own.hangs_on(lease) {
                    self.let_in(now, out);
                }
                self.timers.set(Timer::Lease, sent + self.spec.timings.renewal());
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
        if self.lease.id().is_some_and(|lease| self.own.hangs_on(lease)) {
            self.proofs.leased = self.proofs.leased.max(self.renewed);
        }
    }

    pub(super) fn lease_lost(&mut self, now: Time) {
        self.lease = match self.lease {
            Lease::Asked => Lease::Asked,
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
        match self.lease {
            Lease::Held(id) => {
                self.lease = Lease::Renewing(id);
                out.push(MemberOutput::Renew(id));
            }
            _ => {
                self.lease = Lease::Asked;
                out.push(MemberOutput::Grant(self.spec.timings.lease_ttl));
            }
        }
    }
}
