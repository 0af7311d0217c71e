//! Decides how a communicator goes from the members of one round to those of the next. Calls nothing. All ranks decide
//! from the same numbers, and so decide alike.
//!
//! To make a new communicator takes longest, and always works. To shrink or to grow one keeps the connections between
//! the members that stay. NCCL's rules: a shrink keeps the order of the members that stay, and only they take part. A
//! grow keeps every rank, and gives new members the ranks after them. A communicator whose operation was given up must
//! first be revoked by all its members that stay: that ends the operation. A communicator that has seen the end of a
//! peer's connection is none that is held here: nothing clears that error, and it fails every shrink.

#![deny(clippy::disallowed_methods, clippy::disallowed_types)]

use std::collections::BTreeMap;

use elastic_collective::list_ranks;

/// What a rank's NCCL can do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Capabilities {
    /// `ncclCommShrink`
    pub shrink: bool,
    /// `ncclCommRevoke`
    pub revoke: bool,
    /// `ncclCommGrow` and `ncclCommGetUniqueId`
    pub grow: bool,
}

/// A communicator that a rank has from before.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Held {
    /// The round that it was made in.
    pub round: u64,
    /// This rank's number in it.
    pub rank: u32,
    /// How many were in it.
    pub world_size: u32,
    /// An operation of it was given up, and it is revoked.
    pub revoked: bool,
}

/// What a rank of the new round comes with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RankState {
    /// Its communicator, if it has one that can be used.
    pub held: Option<Held>,
    /// What its library can do.
    pub can: Capabilities,
    /// That library's version, as NCCL counts: 22809 is 2.28.9.
    pub version: i32,
}

/// How the new round's communicator is made.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Way {
    /// Members have left, and none have come.
    Shrink {
        /// The old numbers of those that left.
        without: Vec<u32>,
        /// Whether the members that stay revoke it first.
        revoke: bool,
    },
    /// Members have come, and none have left.
    Grow,
    /// A new communicator, after any other change.
    Renew,
}

impl RankState {
    /// As numbers that ranks can exchange.
    pub fn to_words(self) -> [u64; 5] {
        let Capabilities { shrink, revoke, grow } = self.can;
        let Held { round, rank, world_size, revoked } = self.held.unwrap_or_default();
        let bits = [shrink, revoke, grow, revoked, self.held.is_some()];
        let flags = bits.iter().enumerate().fold(0, |flags, (place, &bit)| flags | u64::from(bit) << place);
        [flags, round, u64::from(rank), u64::from(world_size), self.version as u64]
    }

    /// From such numbers.
    pub fn from_words([flags, round, rank, world_size, version]: [u64; 5]) -> RankState {
        let bit = |place: u32| flags >> place & 1 == 1;
        let held = Held { round, rank: rank as u32, world_size: world_size as u32, revoked: bit(3) };
        let can = Capabilities { shrink: bit(0), revoke: bit(1), grow: bit(2) };
        RankState { held: bit(4).then_some(held), can, version: version as i32 }
    }
}

/// Which ranks have which version of NCCL, in words, if not all have the same. Such ranks cannot make a communicator:
/// different versions do not understand each other, and may not notice it.
pub fn unlike(ranks: &[RankState]) -> Option<String> {
    let mut by_version: BTreeMap<i32, Vec<usize>> = BTreeMap::new();
    for (rank, state) in ranks.iter().enumerate() {
        by_version.entry(state.version).or_default().push(rank);
    }
    let words = by_version.iter().map(|(version, ranks)| match &ranks[..] {
        [rank] => format!("{} on rank {rank}", version_text(*version)),
        ranks => format!("{} on ranks {}", version_text(*version), list_ranks(ranks)),
    });
    (by_version.len() > 1).then(|| words.collect::<Vec<_>>().join("; "))
}

/// A version for people.
pub(super) fn version_text(version: i32) -> String {
    format!("{}.{}.{}", version / 10_000, version / 100 % 100, version % 100)
}

/// How the communicator of these ranks, in their new order, is made.
pub fn decide(ranks: &[RankState]) -> Way {
    let all_can = |what: fn(Capabilities) -> bool| ranks.iter().all(|state| what(state.can));
    let Some(newest) = ranks.iter().filter_map(|state| state.held).max_by_key(|held| held.round) else {
        return Way::Renew;
    };
    let of_it = |state: &RankState| {
        let same = |held: &Held| (held.round, held.world_size) == (newest.round, newest.world_size);
        state.held.filter(same)
    };
    let stayed: Vec<Held> = ranks.iter().map_while(of_it).collect();
    let revoke = stayed.iter().any(|held| held.revoked);
    let in_order = stayed.is_sorted_by(|a, b| a.rank < b.rank);
    let everyone_stays = stayed.len() == newest.world_size as usize;
    let nobody_comes = stayed.len() == ranks.len();
    if in_order
        && nobody_comes
        && !everyone_stays
        && all_can(|can| can.shrink)
        && (!revoke || all_can(|can| can.revoke))
    {
        let gone = |rank: &u32| stayed.iter().all(|held| held.rank != *rank);
        return Way::Shrink { without: (0..newest.world_size).filter(gone).collect(), revoke };
    }
    if in_order && everyone_stays && !nobody_comes && !revoke && all_can(|can| can.grow) {
        return Way::Grow;
    }
    Way::Renew
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: Capabilities = Capabilities { shrink: true, revoke: true, grow: true };

    /// A member of a communicator of three, made in round 7.
    fn was(rank: u32) -> RankState {
        RankState { held: Some(Held { round: 7, rank, world_size: 3, revoked: false }), ..NEW }
    }

    fn broken(rank: u32) -> RankState {
        RankState { held: Some(Held { revoked: true, ..was(rank).held.unwrap() }), ..NEW }
    }

    fn of_round(round: u64, rank: u32) -> RankState {
        RankState { held: Some(Held { round, ..was(rank).held.unwrap() }), ..NEW }
    }

    fn with(can: Capabilities, state: RankState) -> RankState {
        RankState { can, ..state }
    }

    const NEW: RankState = RankState { held: None, can: ALL, version: 22_809 };

    #[test]
    fn each_change_has_its_way() {
        let shrink = |without: &[u32], revoke| Way::Shrink { without: without.to_vec(), revoke };
        let (no_shrink, no_revoke) = (Capabilities { shrink: false, ..ALL }, Capabilities { revoke: false, ..ALL });
        let no_grow = Capabilities { grow: false, ..ALL };
        let cases: [(&str, &[RankState], Way); 18] = [
            ("a first round", &[NEW, NEW], Way::Renew),
            ("one left in good order", &[was(0), was(2)], shrink(&[1], false)),
            ("two left", &[was(1)], shrink(&[0, 2], false)),
            ("one died", &[broken(0), broken(1)], shrink(&[2], true)),
            ("one died, and not all have noticed", &[broken(0), was(1)], shrink(&[2], true)),
            ("one died, and a library cannot revoke", &[broken(0), with(no_revoke, broken(1))], Way::Renew),
            ("one left, and no library can revoke", &[with(no_revoke, was(0)), was(1)], shrink(&[2], false)),
            ("one left, and a library cannot shrink", &[was(0), with(no_shrink, was(1))], Way::Renew),
            ("those who stay changed places", &[was(2), was(0)], Way::Renew),
            ("one came", &[was(0), was(1), was(2), NEW], Way::Grow),
            ("one came, and its library cannot grow", &[was(0), was(1), was(2), with(no_grow, NEW)], Way::Renew),
            ("one came to the front", &[NEW, was(0), was(1), was(2)], Way::Renew),
            ("one came after a failure", &[was(0), was(1), broken(2), NEW], Way::Renew),
            ("one came and one left", &[was(0), was(1), NEW], Way::Renew),
            ("one came back with a communicator of long ago", &[was(0), was(1), was(2), of_round(3, 1)], Way::Grow),
            ("one of those who stay lost its own", &[was(0), NEW, was(2)], Way::Renew),
            ("no rank came or left", &[was(0), was(1), was(2)], Way::Renew),
            ("rounds are mixed", &[of_round(9, 0), was(1)], Way::Renew),
        ];
        for (what, ranks, way) in cases {
            assert_eq!(decide(ranks), way, "{what}");
        }
    }

    #[test]
    fn versions_that_differ_are_told_by_rank() {
        let of = |version| RankState { version, ..NEW };
        assert_eq!(unlike(&[]), None);
        assert_eq!(unlike(&[of(22_809), was(1), broken(2)]), None);
        let told = |versions: &[i32]| unlike(&versions.iter().map(|&version| of(version)).collect::<Vec<_>>());
        assert_eq!(told(&[22_809, 23_007]).unwrap(), "2.28.9 on rank 0; 2.30.7 on rank 1");
        // A difference in the last number is enough.
        assert_eq!(told(&[22_809, 22_807, 22_809]).unwrap(), "2.28.7 on rank 1; 2.28.9 on ranks 0, 2");
    }

    #[test]
    fn rank_states_travel() {
        let some = |can| RankState { can, ..broken(2) };
        for can in (0..8).map(|bits| Capabilities { shrink: bits & 1 > 0, revoke: bits & 2 > 0, grow: bits & 4 > 0 }) {
            for state in [some(can), with(can, NEW), with(can, was(1))] {
                assert_eq!(RankState::from_words(state.to_words()), state);
            }
        }
    }
}
