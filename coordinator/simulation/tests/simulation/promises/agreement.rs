//! Promise 2: all members of a round have the same number, world size, master and resume point, and disjoint contiguous
//! ranks; numbers never repeat or fall.

use std::collections::BTreeMap;
use std::ops::RangeInclusive;

use elastic_rendezvous::Start;
use elastic_rendezvous::job::{Checkpoint, Keys, NodeId, RankRecord, RoundRecord, RoundState, Versioned};
use elastic_store::embedded::mvcc::Mvcc;
use elastic_store::{Revision, Scope};

#[derive(Default)]
pub(super) struct Agreement {
    /// What the members of each round were started with.
    started: BTreeMap<u64, (RoundRecord, BTreeMap<NodeId, RankRecord>)>,
    last: Option<RoundRecord>,
    last_revision: Revision,
    /// Ranks are fixed: hosts of higher numbers come first.
    fixed: bool,
    /// Fewest and most nodes of a round, where no operator changes them.
    nodes: Option<RangeInclusive<u32>>,
    /// The members of the last sealed round, in the order of their ranks.
    members: Vec<NodeId>,
    /// Their rank records.
    ranks: Vec<RankRecord>,
    /// Nodes of a replica.
    replica: u32,
}

impl Agreement {
    pub(super) fn new(fixed: bool, nodes: Option<RangeInclusive<u32>>, replica: u32) -> Agreement {
        Agreement { fixed, nodes, replica, ..Agreement::default() }
    }

    /// As if nothing had been written so far.
    pub(super) fn forget(&mut self) {
        *self = Agreement::new(self.fixed, self.nodes.take(), self.replica);
    }

    /// The members of the last sealed round.
    pub(super) fn members(&self) -> &[NodeId] {
        &self.members
    }

    /// Their places, in the same order.
    pub(super) fn ranks(&self) -> &[RankRecord] {
        &self.ranks
    }

    pub(super) fn started(&mut self, node: &NodeId, start: &Start) -> Result<(), String> {
        let (round, rank) = (&start.round, &start.rank);
        let (first, ranks) = self.started.entry(round.number).or_insert_with(|| (round.clone(), BTreeMap::new()));
        if first != round {
            return Err(format!("{node} starts round {} as {round:?}, another node as {first:?}", round.number));
        }
        if rank.group_rank >= round.group_world_size || rank.first_rank + rank.slots > round.world_size {
            return Err(format!("{node} starts at {rank:?}, outside of {round:?}"));
        }
        for (other, its) in ranks.iter().filter(|(other, _)| *other != node) {
            let apart = rank.first_rank + rank.slots <= its.first_rank || its.first_rank + its.slots <= rank.first_rank;
            if !apart || rank.group_rank == its.group_rank {
                return Err(format!("{node} starts at {rank:?} and {other} at {its:?}"));
            }
        }
        match ranks.insert(node.clone(), rank.clone()) {
            Some(_) => Err(format!("{node} starts round {} twice", round.number)),
            None => Ok(()),
        }
    }

    pub(super) fn round_written(
        &mut self,
        keys: &Keys,
        round: &Versioned<RoundRecord>,
        mvcc: &Mvcc,
    ) -> Result<(), String> {
        let new = &round.value;
        let plan = std::mem::replace(&mut self.last_revision, round.modified);
        let old = self.last.replace(new.clone());
        let Some(old) = old else { return Ok(()) };
        let wrong = || Err(format!("after {} {} comes {} {}", old.state, old.number, new.state, new.number));
        let follows = match (old.state, new.state) {
            // After a final state only a new generation may follow, and the numbers continue.
            (_, RoundState::Forming) if new.generation == old.generation + 1 => new.number == old.number + 1,
            _ if new.generation != old.generation => false,
            (RoundState::Forming, RoundState::Forming) => new.number == old.number,
            (RoundState::Forming, RoundState::Running) => new.number == old.number,
            (RoundState::Running, RoundState::Forming) => new.number == old.number + 1,
            (RoundState::Running, RoundState::Running) => false,
            (state, _) if state.is_final() => false,
            _ => new.number == old.number,
        };
        if !follows {
            return wrong();
        }
        if new.state != RoundState::Running {
            return Ok(());
        }
        if new.sealed.is_none_or(|sealed| (sealed.number, sealed.plan) != (new.number, plan)) {
            return Err(format!("round {} was sealed from plan {plan} as {:?}", new.number, new.sealed));
        }
        let pointer = mvcc.snapshot(&Scope::Key(keys.checkpoint())).pop();
        let newest = pointer.map(|kv| Versioned::<Checkpoint>::parse(&kv)).transpose()?.map(|pointer| pointer.value);
        if new.checkpoint != newest {
            return Err(format!("round {} resumes from {:?}, committed is {newest:?}", new.number, new.checkpoint));
        }
        if self.nodes.as_ref().is_some_and(|nodes| !nodes.contains(&new.group_world_size)) {
            return Err(format!(
                "round {} has {} nodes, allowed are {:?}",
                new.number, new.group_world_size, self.nodes
            ));
        }
        let prefix = keys.ranks(new.number, plan);
        let ranks = mvcc.snapshot(&Scope::Prefix(prefix.clone()));
        let parsed = ranks.iter().map(Versioned::<RankRecord>::parse).collect::<Result<Vec<_>, _>>()?;
        whole(new, self.fixed, &parsed)?;
        self.ranks = parsed.iter().map(|rank| rank.value.clone()).collect();
        self.ranks.sort_by_key(|rank| rank.group_rank);
        let mut members: Vec<(u32, NodeId)> = Vec::new();
        for (kv, rank) in ranks.iter().zip(&parsed) {
            members.extend(Keys::node_of(&prefix, &kv.key).map(|node| (rank.value.group_rank, node)));
        }
        members.sort();
        let before = std::mem::replace(&mut self.members, members.into_iter().map(|(_, node)| node).collect());
        // Whole replicas come before what is left of others.
        if !self.fixed && self.replica == 1 && old.sealed.is_some() { stable(&before, &self.members) } else { Ok(()) }
    }
}

/// Members of the last round come first, in the order that they had.
fn stable(before: &[NodeId], now: &[NodeId]) -> Result<(), String> {
    let had = |node: &NodeId| before.iter().position(|old| old == node).unwrap_or(usize::MAX);
    if now.is_sorted_by_key(had) { Ok(()) } else { Err(format!("ranks moved from {before:?} to {now:?}")) }
}

/// The rank keys of a sealed round are its whole membership, without gaps.
fn whole(round: &RoundRecord, fixed: bool, ranks: &[Versioned<RankRecord>]) -> Result<(), String> {
    let mut ranks: Vec<&RankRecord> = ranks.iter().map(|rank| &rank.value).collect();
    ranks.sort_by_key(|rank| rank.group_rank);
    let host = |rank: &RankRecord| rank.name.trim_start_matches('n').parse::<usize>().unwrap_or_default();
    if fixed && !ranks.is_sorted_by(|one, next| host(one) > host(next)) {
        return Err(format!("the ranks of round {} are not those that were asked for: {ranks:?}", round.number));
    }
    let mut next = 0;
    for (at, rank) in ranks.iter().enumerate() {
        if rank.group_rank as usize != at || rank.first_rank != next {
            return Err(format!("the ranks of round {} have a gap or overlap at {rank:?}", round.number));
        }
        next += rank.slots;
    }
    if ranks.len() != round.group_world_size as usize || next != round.world_size {
        return Err(format!(
            "round {} has {} members with {next} slots, its record says {round:?}",
            round.number,
            ranks.len()
        ));
    }
    Ok(())
}
