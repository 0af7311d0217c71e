//! Plans the sum in the fixed order of [`tree`](elastic_collective::tree) as steps for NCCL and the device. Calls
//! nothing.
//!
//! As over TCP, each rank owns a chunk of the sum. All other ranks send it their partial sums of that chunk; it
//! completes the tree, and sends the finished chunk to all. NCCL only moves bytes here, so the bits of the sum depend
//! neither on its algorithms nor on the number of ranks.

#![deny(clippy::disallowed_methods, clippy::disallowed_types)]

use elastic_collective::tree::{Node, SumPlan};

use super::{Added, Span};

/// One rank's steps of a sum: it exchanges partial sums, adds, and exchanges finished chunks.
#[derive(Debug, Clone)]
pub(super) struct Steps {
    pub(super) partials: Moves,
    pub(super) adds: Vec<Added>,
    pub(super) finished: Moves,
}

/// What a rank sends to which peer, and what it receives from which peer.
#[derive(Debug, Clone, Default)]
pub(super) struct Moves {
    pub(super) sends: Vec<(u32, Span)>,
    pub(super) receives: Vec<(u32, Span)>,
}

/// How many numbers of other ranks `rank` holds during a sum.
pub(super) fn staging_elements(plan: SumPlan, rank: u32) -> usize {
    let peers = (0..plan.world_size).filter(|&peer| peer != rank);
    plan.chunk(rank).len() * peers.map(|peer| plan.nodes(peer).len()).sum::<usize>()
}

pub(super) fn steps(plan: SumPlan, rank: u32, own: &[Span], sum: Span, staging: Span) -> Steps {
    let my_nodes = plan.nodes(rank);
    assert_eq!(own.len(), my_nodes.len(), "one partial sum for each of the rank's nodes");
    assert!(own.iter().all(|partial| partial.elements == sum.elements), "partial sums as long as the sum");
    let mine = plan.chunk(rank);
    let needed = staging_elements(plan, rank);
    assert!(staging.elements >= needed, "room for {needed} numbers of the other ranks");

    let (mut partials, mut finished) = (Moves::default(), Moves::default());
    // Every node that lies whole in one rank's shards, where its part of this rank's chunk is, and whether that place
    // may be overwritten.
    let mut known: Vec<(Node, Span, bool)> = Vec::new();
    known.extend(my_nodes.iter().zip(own).map(|(&node, partial)| (node, partial.part(mine.clone()), false)));
    let result = sum.part(mine.clone());
    let mut free = 0;
    for peer in (0..plan.world_size).filter(|&peer| peer != rank) {
        let theirs = plan.chunk(peer);
        partials.sends.extend(own.iter().map(|partial| (peer, partial.part(theirs.clone()))));
        for node in plan.nodes(peer) {
            let place = staging.part(free..free + mine.len());
            free += mine.len();
            partials.receives.push((peer, place));
            known.push((node, place, true));
        }
        finished.sends.push((peer, result));
        finished.receives.push((peer, sum.part(theirs)));
    }
    for moves in [&mut partials, &mut finished] {
        moves.sends.retain(|(_, data)| data.elements > 0);
        moves.receives.retain(|(_, data)| data.elements > 0);
    }
    let adds = if mine.is_empty() { Vec::new() } else { adds(plan, result, &known) };
    Steps { partials, adds, finished }
}

/// The additions that make the sum, in its order. The two children of a node are never both this rank's own partial
/// sums, since its partial sum would then be of the parent. So of two summands, at least one is in a place that may be
/// overwritten.
fn adds(plan: SumPlan, result: Span, known: &[(Node, Span, bool)]) -> Vec<Added> {
    let find = |node: Node| known.iter().find(|(other, ..)| *other == node);
    let take = |_: &mut Vec<Added>, node: Node| find(node).map(|&(_, place, free)| (place, free)).ok_or(node);
    let add = |adds: &mut Vec<Added>, (left, left_free): (Span, bool), (right, _): (Span, bool)| {
        let into = if left_free { left } else { right };
        adds.push(Added { left, right: Some(right), into });
        Ok((into, true))
    };
    let mut adds = Vec::new();
    match Node::root(plan.shards).sum(&mut adds, &|node| find(node).is_some(), &take, &add) {
        Ok((place, _)) => match adds.last_mut() {
            Some(last) => last.into = result,
            None => adds.push(Added { left: place, right: None, into: result }),
        },
        Err(node) => unreachable!("the ranks' nodes hold every shard, also {node:?}"),
    }
    adds
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Memory by address, a number to each.
    fn at(address: usize, elements: usize) -> Span {
        Span { address: 4 * address, elements }
    }

    #[test]
    fn what_is_added_is_the_tree_and_nothing_of_the_ranks_own_is_lost() {
        for shards in 1..=13 {
            for ranks in 1..=6 {
                for rank in 0..ranks {
                    // Each number represents the node that it is the sum of.
                    let elements = ranks as usize;
                    let plan = SumPlan { world_size: ranks, shards, elements };
                    let own_nodes = plan.nodes(rank);
                    let own: Vec<Span> = (0..own_nodes.len()).map(|i| at(100 * (i + 1), elements)).collect();
                    let (sum, staging) = (at(0, elements), at(10_000, 1000));
                    let Steps { partials, adds, finished } = steps(plan, rank, &own, sum, staging);
                    let mut memory: std::collections::BTreeMap<usize, Node> = own
                        .iter()
                        .zip(&own_nodes)
                        .map(|(span, &node)| (span.address + 4 * rank as usize, node))
                        .collect();
                    for peer in (0..ranks).filter(|&peer| peer != rank) {
                        let from_it = partials.receives.iter().filter(|(from, _)| *from == peer);
                        let theirs = plan.nodes(peer);
                        assert_eq!(from_it.clone().count(), theirs.len());
                        memory.extend(from_it.zip(theirs).map(|((_, span), node)| (span.address, node)));
                        let to_it = partials.sends.iter().filter(|(to, _)| *to == peer);
                        assert_eq!(to_it.count(), own.len());
                    }
                    for Added { left, right, into } in adds {
                        let left = memory[&left.address];
                        let node = right.map_or(left, |right| {
                            let right = memory[&right.address];
                            let parent = Node { first: left.first, end: right.end };
                            assert_eq!(parent.children(), Some((left, right)), "neighbours in the tree");
                            parent
                        });
                        memory.insert(into.address, node);
                    }
                    assert_eq!(memory[&(4 * rank as usize)], Node::root(shards));
                    assert_eq!(finished.sends.len(), ranks as usize - 1);
                    assert!(finished.sends.iter().all(|(_, span)| span.address == 4 * rank as usize));
                    for (span, node) in own.iter().zip(own_nodes) {
                        assert_eq!(memory[&(span.address + 4 * rank as usize)], node);
                    }
                }
            }
        }
    }
}
