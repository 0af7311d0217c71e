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

/// The nodes that get in, in order of ranks: candidates with the place that each must have, if ranks are fixed. At most
/// `most` get in: those that came first.
///
/// Where two claim one place, the later one is its predecessor's next incarnation (others are turned away), and their
/// keys do not tell which is alive. Neither gets in until one of them is gone.
pub(super) fn in_order(candidates: Vec<(&NodeId, Option<u32>)>, most: usize) -> Vec<&NodeId> {
    let mut claims: BTreeMap<u32, usize> = BTreeMap::new();
    for place in candidates.iter().filter_map(|(_, place)| *place) {
        *claims.entry(place).or_default() += 1;
    }
    let alone = |place: &Option<u32>| place.is_none_or(|place| claims.get(&place) == Some(&1));
    let mut places: Vec<_> = candidates.into_iter().filter(|(_, place)| alone(place)).take(most).collect();
    places.sort_by_key(|(_, place)| place.unwrap_or(u32::MAX));
    places.into_iter().map(|(node, _)| node).collect()
}

/// Gives ranks to `places` in their order: contiguous over all workers, and within each role.
///
/// As torchrun does it: a node's first rank is the sum of the slots before it, its role rank the same among the nodes
/// of its role.
pub(super) fn seats(view: &View, places: &[&NodeId]) -> Vec<Seat> {
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
            },
        });
        *role_base += record.slots;
        first_rank += record.slots;
    }
    seats
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nodes_sit_as_they_came_or_where_they_must() {
        let nodes: Vec<NodeId> = (0..4).map(|n| NodeId::new(&format!("n{n}"), "i")).collect();
        let order = |wanted: [Option<u32>; 4], most| {
            let places = in_order(nodes.iter().zip(wanted).collect(), most);
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
}
