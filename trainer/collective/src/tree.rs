//! The one order in which the gradients of logical shards are added, whichever rank computed them.
//!
//! The result of floating-point addition depends on its order. So the order is fixed for the job: a binary tree over
//! the shards. A rank owns neighbouring shards, and adds those under each tree node that it owns whole. The rest of the
//! tree is then added from the ranks' partial sums. So every world size gives the same bits. The idea of logical
//! workers that outlive physical ones is EasyScale's (Li et al., SC 2023).
//!
//! Only this module knows the order. Whatever adds, on threads, ranks, GPUs or over NCCL, does it by [`Node::sum`], or
//! adds [`Node::before_last`] to a last shard.

use std::ops::Range;

/// A node of the tree: the sum of shards `first..end`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Node {
    /// The first shard.
    pub first: u32,
    /// The shard after the last.
    pub end: u32,
}

impl Node {
    /// The sum of all shards.
    pub fn root(shards: u32) -> Node {
        Node { first: 0, end: shards }
    }

    /// The two nodes whose sum this one is, left first; none for a single shard. The left one spans a power of two, so
    /// that ranks with equal shares own few whole nodes.
    pub fn children(self) -> Option<(Node, Node)> {
        let width = self.end - self.first;
        if width < 2 {
            return None;
        }
        let middle = self.first + width.next_power_of_two() / 2;
        Some((Node { first: self.first, end: middle }, Node { first: middle, end: self.end }))
    }

    /// This node's sum, in the one order: `add` gets two neighbouring sums, the left one first. `take` gets each node
    /// below it that is `known`, and each single shard that is in none of these.
    pub fn sum<C, T, E>(
        self,
        context: &mut C,
        known: &impl Fn(Node) -> bool,
        take: &impl Fn(&mut C, Node) -> Result<T, E>,
        add: &impl Fn(&mut C, T, T) -> Result<T, E>,
    ) -> Result<T, E> {
        match self.children() {
            Some((left, right)) if !known(self) => {
                let left = left.sum(context, known, take, add)?;
                let right = right.sum(context, known, take, add)?;
                add(context, left, right)
            }
            _ => take(context, self),
        }
    }

    /// The nodes whose sums, and the last shard's, make this node's sum: that shard's is added to the last of them, the
    /// result to the one before, and so on.
    pub fn before_last(self) -> Vec<Node> {
        let (mut before, mut node) = (Vec::new(), self);
        while let Some((left, right)) = node.children() {
            before.push(left);
            node = right;
        }
        before
    }
}

/// The shards of `rank`. Shares differ by at most one, and are empty for some ranks when there are more ranks than
/// shards.
pub fn shards_of(rank: u32, world_size: u32, shards: u32) -> Range<u32> {
    let at = |rank: u32| (u64::from(shards) * u64::from(rank) / u64::from(world_size)) as u32;
    at(rank)..at(rank + 1)
}

/// The widest nodes that lie whole within the shards of `rank`, left to right: the sums that it can compute alone.
pub fn nodes_of(rank: u32, world_size: u32, shards: u32) -> Vec<Node> {
    cover(shards, &shards_of(rank, world_size, shards))
}

/// The chunks of owners end at multiples of so many numbers, counted from the sum's end. So the pieces that an owner
/// adds up of its chunk can be the same for every number of ranks.
pub const GRAIN: usize = 256;

/// How ranks share the work of a sum: each completes a chunk of it, from the partial sums of all ranks.
#[derive(Debug, Clone, Copy)]
pub struct SumPlan {
    /// The ranks.
    pub world_size: u32,
    /// The logical shards, whose order is that of the sum.
    pub shards: u32,
    /// The length of the sum.
    pub elements: usize,
}

impl SumPlan {
    /// The part of the sum that `rank` completes.
    pub fn chunk(&self, rank: u32) -> Range<usize> {
        self.at(rank)..self.at(rank + 1)
    }

    /// The same where a sum goes to its owners alone.
    pub fn owned_chunk(&self, rank: u32) -> Range<usize> {
        let at =
            |rank: u32| if rank == 0 { 0 } else { self.elements - (self.elements - self.at(rank)) / GRAIN * GRAIN };
        at(rank)..at(rank + 1)
    }

    fn at(&self, rank: u32) -> usize {
        // In 128 bits, since the product may not fit into 64.
        (self.elements as u128 * u128::from(rank) / u128::from(self.world_size)) as usize
    }

    /// The other owner of the chunk that `rank` completes: half of the ranks further, so that it is on another node if
    /// nodes are alike. Alone, it is the rank itself.
    pub fn second(&self, rank: u32) -> u32 {
        (rank + self.world_size / 2) % self.world_size
    }

    /// The nodes whose partial sums `rank` has.
    pub fn nodes(&self, rank: u32) -> Vec<Node> {
        nodes_of(rank, self.world_size, self.shards)
    }
}

fn cover(shards: u32, range: &Range<u32>) -> Vec<Node> {
    fn collect(node: Node, range: &Range<u32>, found: &mut Vec<Node>) {
        if node.end <= range.start || range.end <= node.first {
            return;
        }
        match node.children() {
            Some((left, right)) if node.first < range.start || range.end < node.end => {
                collect(left, range, found);
                collect(right, range, found);
            }
            _ => found.push(node),
        }
    }
    let mut found = Vec::new();
    if !range.is_empty() {
        collect(Node::root(shards), range, &mut found);
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn ranks_tile_the_shards_and_their_nodes_tile_the_ranks(world_size in 1u32..40, shards in 1u32..70) {
            let nodes: Vec<Node> = (0..world_size).flat_map(|rank| nodes_of(rank, world_size, shards)).collect();
            let mut next = 0;
            for node in &nodes {
                prop_assert_eq!(node.first, next);
                next = node.end;
            }
            prop_assert_eq!(next, shards);
            let widest = 2 * (shards.ilog2() as usize + 1);
            for rank in 0..world_size {
                prop_assert!(nodes_of(rank, world_size, shards).len() <= widest);
            }
        }
    }

    /// The sum of numbers whose order of additions shows in the text.
    fn naive(node: Node) -> String {
        let Some((left, right)) = node.children() else { return node.first.to_string() };
        format!("({}+{})", naive(left), naive(right))
    }

    proptest! {
        #[test]
        fn a_sum_and_what_comes_before_the_last_shard_are_the_trees(world_size in 1u32..12, shards in 1u32..70) {
            let (root, known) = (Node::root(shards), |node: Node| {
                (0..world_size).any(|rank| nodes_of(rank, world_size, shards).contains(&node))
            });
            let take = |taken: &mut Vec<Node>, node: Node| {
                taken.push(node);
                Ok::<_, ()>(naive(node))
            };
            let add = |_: &mut Vec<Node>, left: String, right: String| Ok(format!("({left}+{right})"));
            let mut taken = Vec::new();
            prop_assert_eq!(root.sum(&mut taken, &known, &take, &add), Ok(naive(root)));
            prop_assert!(taken.into_iter().all(known), "sums that a rank has");
            let last = (shards - 1).to_string();
            let from_the_last = |sum, node: Node| format!("({}+{sum})", naive(node));
            prop_assert_eq!(root.before_last().into_iter().rfold(last, from_the_last), naive(root));
        }
    }

    #[test]
    fn the_left_child_spans_a_power_of_two() {
        assert_eq!(naive(Node::root(7)), "(((0+1)+(2+3))+((4+5)+6))");
    }

    #[test]
    fn even_shares_are_one_node_each() {
        for world_size in [1, 2, 4, 8] {
            for rank in 0..world_size {
                assert_eq!(nodes_of(rank, world_size, 8).len(), 1);
            }
        }
    }
}
