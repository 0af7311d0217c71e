//! Nodes by what is asked about them.

use std::collections::{BTreeMap, BTreeSet};

use super::Says;
use crate::job::NodeId;
use crate::kv::Revision;
use crate::time::Time;

/// What a node is filed under. A question about a range of marks goes from one kind to the next, in this order.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Mark {
    /// Nodes and members, by name.
    Name(String),
    /// Nodes by the place that each must have.
    Place(u32),
    /// Nodes whose workers cannot start ahead.
    Cold,
    /// Members by what they say.
    Says(Says),
    /// Those of them that are neither gone nor out.
    There(Says),
    /// Members that are dead or without a key.
    Gone,
    /// Those of them that are not out: that were neither evicted nor left.
    Missing,
    /// Members that are out, and have a key: it is older than that, and its deletion under way.
    Late,
    /// Members that wait without some of their workers, and could start new ones ahead.
    Lacking,
    /// Members that were evicted and may be at work until their fence point, by when they were.
    Settling(Time),
    /// Members that are neither dead nor left, by when they were evicted, if they were, and what they say.
    Doubtful(Option<Time>, Says),
    /// Members by the newest probe that they answered.
    Answered(u64),
    /// Members that live and stay, by when they opened their stream.
    Opened(Option<Time>),
    /// Members that were not evicted, except the own node, by the newest word that they have seen.
    Echoed(Option<Time>),
    /// Nodes that could take a place in any round.
    Comes,
    /// The same, by when their keys came into being.
    Came(Revision),
    /// The same, by when the leader saw them first.
    Arrived(Time),
    /// Behind all others.
    End,
}

impl Mark {
    pub(super) fn time(&self) -> Option<Time> {
        match self {
            Mark::Settling(at) | Mark::Arrived(at) => Some(*at),
            Mark::Doubtful(at, _) | Mark::Opened(at) | Mark::Echoed(at) => *at,
            _ => None,
        }
    }
}

/// Nodes by their marks.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Index {
    entries: BTreeMap<Mark, BTreeSet<NodeId>>,
    /// Names and places that several nodes have.
    shared: BTreeSet<Mark>,
}

impl Index {
    /// Files a node under a mark, or takes it away from there.
    pub(super) fn file(&mut self, mark: Mark, node: &NodeId, add: bool) {
        let nodes = self.entries.entry(mark.clone()).or_default();
        if add {
            nodes.insert(node.clone());
        } else {
            nodes.remove(node);
        }
        let count = nodes.len();
        if count == 0 {
            self.entries.remove(&mark);
        }
        if matches!(mark, Mark::Name(_) | Mark::Place(_)) {
            if count > 1 {
                self.shared.insert(mark);
            } else {
                self.shared.remove(&mark);
            }
        }
    }

    /// The nodes under a mark.
    pub(super) fn under<'a>(&'a self, mark: &Mark) -> impl Iterator<Item = &'a NodeId> + use<'a> {
        self.entries.get(mark).into_iter().flatten()
    }

    /// How many nodes lie under a mark.
    pub(super) fn count(&self, mark: &Mark) -> usize {
        self.entries.get(mark).map_or(0, BTreeSet::len)
    }

    /// The marks from one on, before another, that nodes have.
    pub(super) fn between(&self, from: Mark, to: Mark) -> impl DoubleEndedIterator<Item = (&Mark, &BTreeSet<NodeId>)> {
        self.entries.range(from..to)
    }

    /// Names and places that several nodes have.
    pub(super) fn shared(&self) -> impl Iterator<Item = &Mark> {
        self.shared.iter()
    }
}
