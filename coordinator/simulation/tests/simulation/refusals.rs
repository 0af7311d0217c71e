//! What the store refuses, for a while or for ever: a kind of request of one host, or all writes of all.

use elastic_rendezvous::Call;
use elastic_store::{Op, StoreError};

use crate::service::{Asker, Request};
use crate::world::World;

/// A kind of request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Writes of a node's own key.
    OwnKey,
    /// Leases and their renewals.
    Leases,
    /// Campaigns for the lead.
    Campaigns,
    /// Records that a leader writes. It may still let go of the lead.
    Leading,
    /// All writes of all hosts: the store has no space left.
    Writes,
}

impl Kind {
    const ALL: [Kind; 6] = [Kind::OwnKey, Kind::Leases, Kind::Campaigns, Kind::Leading, Kind::Leading, Kind::Writes];

    fn is_of(self, asker: &Asker, request: &Request) -> bool {
        let txn = match request {
            Request::Txn(txn) => Some(txn),
            _ => None,
        };
        match self {
            Kind::OwnKey => matches!(asker, Asker::Member(Call::Own)),
            Kind::Leases => matches!(request, Request::Grant(_) | Request::Renew(_)),
            Kind::Campaigns => matches!(asker, Asker::Member(Call::Campaign)),
            Kind::Leading => {
                let puts = |op: &Op| matches!(op, Op::Put { .. });
                matches!(asker, Asker::Leader(_)) && txn.is_some_and(|txn| txn.then.iter().any(puts))
            }
            Kind::Writes => matches!(request, Request::Grant(_)) || txn.is_some_and(elastic_store::Txn::is_write),
        }
    }

    fn error(self) -> StoreError {
        let endpoints = "store".to_owned();
        match self {
            Kind::Writes => StoreError::NoSpace { endpoints },
            _ => StoreError::Denied { endpoints, cause: "simulated".into() },
        }
    }
}

pub(crate) struct Refusal {
    /// Whom it meets; none: all.
    host: Option<usize>,
    kind: Kind,
    until: u64,
}

impl World {
    /// The store refuses something from now on. For ever only what another host can do as well, and only one host.
    pub(crate) fn refuse_from_now(&mut self, host: usize, while_: u64) {
        let Some(kind) = self.dice.pick(&Kind::ALL) else { return };
        let others_can = matches!(kind, Kind::Campaigns | Kind::Leading);
        let ever = self.dice.chance(0.3) && others_can && self.refusals.iter().all(|refusal| refusal.until < u64::MAX);
        let until = if ever { u64::MAX } else { self.now + while_ };
        let host = (kind != Kind::Writes).then_some(host);
        self.schedule(|| format!("the store refuses {kind:?} of host {host:?}, for ever: {ever}"));
        self.refusals.push(Refusal { host, kind, until });
    }

    /// Why the store refuses this request of a process, if it does.
    pub(crate) fn refusal(&mut self, p: usize, asker: &Asker, request: &Request) -> Option<StoreError> {
        if self.store.is_lost_to(p) {
            return Some(StoreError::Lost { cause: "simulated".into() });
        }
        let host = self.processes[p].host;
        let meets = |refusal: &&Refusal| {
            self.now < refusal.until && refusal.host.is_none_or(|it| it == host) && refusal.kind.is_of(asker, request)
        };
        self.refusals.iter().find(meets).map(|refusal| refusal.kind.error())
    }

    /// Whether the store refuses what a host would write if it led.
    pub(crate) fn refuses_a_leader(&self) -> bool {
        self.refusals.iter().any(|refusal| refusal.kind == Kind::Leading)
    }

    /// What was refused for a while is not any more.
    pub(crate) fn permit(&mut self) {
        self.refusals.retain(|refusal| refusal.until == u64::MAX);
    }
}
