//! What a pulse stream must show before it counts.

use super::Leader;
use crate::job::{JobSecret, NodeId};

/// What a leader wants from a stream in the name of a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Demand<'a> {
    /// It cannot tell yet: it has not read the job, it does not know the node, or the job has ended and nobody has begun
    /// it anew, with another secret.
    Wait,
    /// Nothing: the job has no secret, or the node's agent is of a release that cannot prove that it knows it.
    Nothing,
    /// A proof that the other end knows this secret.
    Proof(&'a JobSecret),
}

impl Leader {
    /// What a stream in the name of `node` must show.
    ///
    /// A stream's own word does not count: only the node's record in the store says that its agent proves nothing. A
    /// member whose record is gone is not taken for such a one, or whoever knows its id could keep it in the round.
    pub fn demand(&self, node: &NodeId) -> Demand<'_> {
        let Some(view) = &self.view else { return Demand::Wait };
        let present = view.roster.node(node);
        let known = present.is_some() || view.roster.member(node).is_some();
        if !known || view.round.value.state.is_final() {
            return Demand::Wait;
        }
        match &self.secret {
            Some(secret) if present.is_none_or(|present| present.record.authenticates) => Demand::Proof(secret),
            _ => Demand::Nothing,
        }
    }
}
