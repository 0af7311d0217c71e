//! What a pulse stream must show before it counts.

use super::Leader;
use crate::job::{JobSecret, NodeId};

/// What a leader wants from a stream in the name of a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Demand<'a> {
    /// It cannot tell yet: it has not read the job, it does not know the node, or the job has ended and no one has
    /// begun it again, with another secret.
    Wait,
    /// Nothing: the job has no secret.
    Nothing,
    /// A proof that the other end knows this secret.
    Proof(&'a JobSecret),
}

impl Leader {
    /// What a stream in the name of `node` must show.
    pub fn demand(&self, node: &NodeId) -> Demand<'_> {
        let Some(view) = self.known.view() else { return Demand::Wait };
        let known = view.roster.node(node).is_some() || view.roster.member(node).is_some();
        if !known || view.round.value.state.is_final() {
            return Demand::Wait;
        }
        self.secret.as_ref().map_or(Demand::Nothing, Demand::Proof)
    }
}
