//! Nodes filed under a key of any type.

use std::collections::{BTreeMap, BTreeSet};

use crate::job::NodeId;

/// Nodes by a key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Index<K> {
    pub(super) entries: BTreeMap<K, BTreeSet<NodeId>>,
    /// Keys that several nodes have.
    pub(super) shared: BTreeSet<K>,
    /// How many nodes lie in all of them.
    pub(super) count: usize,
}

impl<K> Default for Index<K> {
    fn default() -> Index<K> {
        Index { entries: BTreeMap::new(), shared: BTreeSet::new(), count: 0 }
    }
}

impl<K: Ord + Clone> Index<K> {
    /// Adds a node under a key, or takes it away from there.
    pub(super) fn file(&mut self, key: K, node: &NodeId, add: bool) {
        let nodes = self.entries.entry(key.clone()).or_default();
        let before = nodes.len();
        file(nodes, node, add);
        let after = nodes.len();
        self.count = self.count + after - before;
        match after {
            0 => drop(self.entries.remove(&key)),
            1 => drop(self.shared.remove(&key)),
            _ => drop(self.shared.insert(key)),
        }
    }

    pub(super) fn least(&self) -> Option<&K> {
        self.entries.first_key_value().map(|(key, _)| key)
    }

    pub(super) fn greatest(&self) -> Option<&K> {
        self.entries.last_key_value().map(|(key, _)| key)
    }
}

/// Adds a node to a set, or takes it away from there.
pub(super) fn file(nodes: &mut BTreeSet<NodeId>, node: &NodeId, add: bool) {
    if add {
        nodes.insert(node.clone());
    } else {
        nodes.remove(node);
    }
}
