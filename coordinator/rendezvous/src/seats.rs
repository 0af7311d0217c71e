//! Places of a round: who gets which rank.

use std::collections::BTreeMap;

use super::view::View;
use crate::job::{NodeId, RankRecord};

/// A node's place in a round.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Seat {
    /// The node.
    pub node: NodeId,
    /// Its place.
    pub rank: RankRecord,
}

/// Two nodes that claim one place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Contest<'a> {
    pub(super) place: u32,
    pub(super) one: &'a NodeId,
    pub(super) other: &'a NodeId,
}

/// A node that could be in the round.
#[derive(Debug, Clone, Copy)]
pub(super) struct Candidate<'a> {
    pub(super) node: &'a NodeId,
    /// Its group rank in the last round, of a member that stays.
    pub(super) had: Option<u32>,
    /// The place that it must have, if ranks are fixed.
    pub(super) wants: Option<u32>,
}

/// The nodes that get in, in order of ranks. At most `most` get in: those that came first, in whole replicas of `size`
/// nodes.
///
/// Where two claim one place, the later one is its predecessor's next incarnation (others are turned away), and their
/// keys do not tell which is alive. Neither gets in until one of them is gone.
pub(super) fn in_order(candidates: Vec<Candidate<'_>>, size: usize, most: usize) -> Vec<&NodeId> {
    let mut claims: BTreeMap<u32, usize> = BTreeMap::new();
    for place in candidates.iter().filter_map(|candidate| candidate.wants) {
        *claims.entry(place).or_default() += 1;
    }
    let alone = |candidate: &Candidate<'_>| candidate.wants.is_none_or(|place| claims.get(&place) == Some(&1));
    let mut places = in_replicas(candidates.into_iter().filter(alone).collect(), size);
    places.truncate(most);
    places.sort_by_key(|candidate| candidate.wants.unwrap_or(u32::MAX));
    places.into_iter().map(|candidate| candidate.node).collect()
}

/// Which replica a group rank belongs to.
fn replica(group_rank: u32, size: usize) -> u32 {
    group_rank / size as u32
}

/// How many nodes stay of each replica of the last round.
pub(super) fn staying(group_ranks: impl Iterator<Item = u32>, size: usize) -> BTreeMap<u32, usize> {
    let mut staying = BTreeMap::new();
    group_ranks.for_each(|rank| *staying.entry(replica(rank, size)).or_default() += 1);
    staying
}

/// First the replicas whose nodes are all there, then new ones of the nodes that are left, all in their order. Nodes
/// that make no whole replica are left out.
fn in_replicas(candidates: Vec<Candidate<'_>>, size: usize) -> Vec<Candidate<'_>> {
    let staying = staying(candidates.iter().filter_map(|candidate| candidate.had), size);
    let is_whole = |candidate: &Candidate<'_>| {
        // mutant a_whole_replica_is_not_kept: candidate.had => candidate.had.filter(|_| !ON)
        candidate.had.is_some_and(|rank| staying.get(&replica(rank, size)) == Some(&size))
    };
    let (mut places, mut rest): (Vec<_>, Vec<_>) = candidates.into_iter().partition(is_whole);
    // mutant a_replica_lacks_a_node: rest.len() % size => 0
    rest.truncate(rest.len() - rest.len() % size);
    places.extend(rest);
    places
}

/// The round since which the workers of these nodes are one replica: the one that forms, unless they have been one
/// before, and none of them has lost a worker.
fn replica_since(view: &View, nodes: &[&NodeId]) -> u64 {
    let round = view.round.value.number;
    let before = |node: &NodeId| {
        let member = view.roster.member(node).filter(|member| member.evicted.is_none())?;
        let keeps = view.roster.node(node).is_some_and(|present| present.record.keeps_workers);
        member.rank.replica_since.filter(|_| keeps).map(|since| (since, member.rank.group_rank))
    };
    let Some((since, first)) = nodes.first().and_then(|node| before(node)) else { return round };
    let is_first = (first as usize).is_multiple_of(nodes.len());
    let same = (first..).zip(nodes).all(|(rank, node)| before(node) == Some((since, rank)));
    if is_first && same { since } else { round }
}

/// Gives ranks to `places` in their order: contiguous over all workers, and within each role.
///
/// As torchrun does it: a node's first rank is the sum of the slots before it, its role rank the same among the nodes
/// of its role.
pub(super) fn seats(view: &View, places: &[&NodeId]) -> Vec<Seat> {
    let size = view.replica_size();
    let since = |place: usize| {
        let nodes = places.get(place - place % size..)?.get(..size)?;
        (size > 1).then(|| replica_since(view, nodes))
    };
    let records: Vec<_> = places.iter().filter_map(|node| Some((*node, &view.roster.node(node)?.record))).collect();
    let mut roles: BTreeMap<&str, u32> = BTreeMap::new();
    for (_, record) in &records {
        *roles.entry(&record.role).or_default() += record.slots;
    }
    let mut first_rank = 0;
    let mut role_bases: BTreeMap<&str, u32> = BTreeMap::new();
    let mut seats = Vec::with_capacity(records.len());
    for (group_rank, (node, record)) in records.iter().enumerate() {
        let role_base = role_bases.entry(&record.role).or_default();
        seats.push(Seat {
            node: (*node).clone(),
            rank: RankRecord {
                group_rank: group_rank as u32,
                first_rank,
                slots: record.slots,
                role_rank_base: *role_base,
                role_world_size: roles[record.role.as_str()],
                name: record.name.clone(),
                machine: record.machine.clone(),
                boot: record.boot.clone(),
                peer: record.peer.clone(),
                before: seats.last().map(|seat: &Seat| seat.node.clone()),
                replica_since: since(group_rank),
            },
        });
        *role_base += record.slots;
        first_rank += record.slots;
    }
    seats
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn nodes(count: usize) -> Vec<NodeId> {
        (0..count).map(|n| NodeId::new(&format!("n{n}"), "i")).collect()
    }

    #[test]
    fn nodes_sit_as_they_came_or_where_they_must() {
        let nodes = nodes(4);
        let order = |wanted: [Option<u32>; 4], most| {
            let candidates = nodes.iter().zip(wanted).map(|(node, wants)| Candidate { node, had: None, wants });
            let places = in_order(candidates.collect(), 1, most);
            places.iter().map(|node| node.name()).collect::<Vec<_>>().join(" ")
        };
        assert_eq!(order([None; 4], 3), "n0 n1 n2");
        assert_eq!(order([Some(3), Some(0), Some(2), Some(1)], 4), "n1 n3 n2 n0");
        assert_eq!(
            order([Some(1), Some(0), Some(2), Some(1)], 4),
            "n1 n2",
            "of two that claim one place neither gets in"
        );
    }

    #[test]
    fn a_replica_stays_whole_or_its_nodes_make_another() {
        // The group ranks of the last round, in their order, then newcomers.
        for (what, size, most, had, expected) in [
            ("a first round leaves out who completes nothing", 2, 8, &[None; 5][..], "n0 n1 n2 n3"),
            (
                "a whole replica comes before what is left of another",
                2,
                8,
                &[Some(1), Some(2), Some(3), None],
                "n1 n2 n0 n3",
            ),
            ("a spare completes it", 2, 8, &[Some(0), Some(1), Some(3), None], "n0 n1 n2 n3"),
            ("without a spare its nodes wait", 2, 8, &[Some(1), Some(2), Some(3)], "n1 n2"),
            ("what is left of two makes one", 2, 8, &[Some(1), Some(2)], "n0 n1"),
            ("a whole one stays where there is less room", 2, 2, &[Some(1), Some(2), Some(3), None], "n1 n2"),
            ("three nodes each", 3, 9, &[Some(0), Some(1), Some(3), Some(4), Some(5), None], "n2 n3 n4 n0 n1 n5"),
        ] {
            let nodes = nodes(had.len());
            let candidates = nodes.iter().zip(had).map(|(node, had)| Candidate { node, had: *had, wants: None });
            let places: Vec<_> = in_order(candidates.collect(), size, most).iter().map(|node| node.name()).collect();
            assert_eq!(places.join(" "), expected, "{what}");
        }
    }

    proptest! {
        #[test]
        fn every_round_has_whole_replicas_and_keeps_those_of_the_last(
            size in 1..5usize, stay in prop::collection::vec(any::<bool>(), 0..20), newcomers in 0..6usize, room in 1..8usize,
        ) {
            let had: Vec<u32> = (0u32..).zip(&stay).filter(|(_, stays)| **stays).map(|(rank, _)| rank).collect();
            let nodes = nodes(had.len() + newcomers);
            let had = had.into_iter().map(Some).chain(std::iter::repeat(None));
            let candidates: Vec<_> =
                nodes.iter().zip(had).map(|(node, had)| Candidate { node, had, wants: None }).collect();
            let places = in_order(candidates.clone(), size, room * size);
            prop_assert_eq!(places.len(), (nodes.len() / size).min(room) * size);
            let place = |node: &NodeId| places.iter().position(|other| *other == node);
            let members: Vec<_> = candidates.iter().filter_map(|it| Some((it.had?, it.node))).collect();
            let whole = members.chunk_by(|(one, _), (next, _)| one / size as u32 == next / size as u32);
            for replica in whole.filter(|replica| replica.len() == size).take(room) {
                let at = place(replica[0].1);
                prop_assert!(at.is_some_and(|at| at.is_multiple_of(size)), "{replica:?} in {places:?}");
                let next: Vec<_> = replica.iter().map(|(_, node)| place(node)).collect();
                let expected: Vec<_> = (at.unwrap_or_default()..).take(size).map(Some).collect();
                prop_assert_eq!(next, expected);
            }
        }
    }
}
