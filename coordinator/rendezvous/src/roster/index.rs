//! Nodes filed under a key of any type.

use std::collections::{BTreeMap, BTreeSet};

use crate::job::NodeId;

/// Nodes by a key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Index<K> {
    pub(super) entries: BTreeMap<K, BTreeSet<NodeId>>,
    /// How many nodes lie in all of them.
    pub(super) count: usize,
}

impl<K> Default for Index<K> {
    fn default() -> Index<K> {
        Index { entries: BTreeMap::new(), count: 0 }
    }
}

impl<K: Ord> Index<K> {
    pub(super) fn add(&mut self, key: K, node: &NodeId) {
        self.count += usize::from(self.entries.entry(key).or_default().insert(node.clone()));
    }

    pub(super) fn take(&mut self, key: &K, node: &NodeId) {
        if let Some(nodes) = self.entries.get_mut(key) {
            self.count -= usize::from(nodes.remove(node));
            if nodes.is_empty() {
                self.entries.remove(key);
            }
        }
    }

    pub(super) fn least(&self) -> Option<&K> {
        self.entries.first_key_value().map(|(key, _)| key)
    }

    pub(super) fn greatest(&self) -> Option<&K> {
        self.entries.last_key_value().map(|(key, _)| key)
    }
}
