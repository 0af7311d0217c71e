//! Where a replica has several nodes, each round has whole ones. A replica whose nodes all have places keeps them
//! together, in their order. One whose nodes or workers have changed begins in that round.

use elastic_rendezvous::job::{NodeId, RankRecord, RoundRecord, RoundState};

pub(super) struct Replicas {
    /// Nodes of a replica.
    size: usize,
    /// The last sealed round: its generation, and its replicas in the order of ranks.
    last: (u64, Vec<Replica>),
}

/// Its nodes, and since when it is the same.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Replica {
    nodes: Vec<NodeId>,
    since: Vec<Option<u64>>,
}

impl Replicas {
    pub(super) fn new(size: u32) -> Replicas {
        Replicas { size: size as usize, last: (0, Vec::new()) }
    }

    /// As if nothing had been written so far.
    pub(super) fn forget(&mut self) {
        self.last = (0, Vec::new());
    }

    /// `members` and their `ranks` are those of the last sealed round, in their order.
    pub(super) fn round_written(
        &mut self,
        round: &RoundRecord,
        members: &[NodeId],
        ranks: &[RankRecord],
    ) -> Result<(), String> {
        if round.state != RoundState::Running || self.size < 2 {
            return Ok(());
        }
        let number = round.number;
        let both = members.chunks(self.size).zip(ranks.chunks(self.size));
        let now: Vec<Replica> = both
            .map(|(nodes, ranks)| Replica {
                nodes: nodes.to_vec(),
                since: ranks.iter().map(|rank| rank.replica_since).collect(),
            })
            .collect();
        let (generation, before) = std::mem::replace(&mut self.last, (round.generation, now.clone()));
        if !members.len().is_multiple_of(self.size) {
            return Err(format!("round {number} has {} nodes, and {} make a replica", members.len(), self.size));
        }
        let before = if generation == round.generation { before } else { Vec::new() };
        for replica in &now {
            let since = replica.since[0];
            if since.is_none_or(|since| since > number) || replica.since.iter().any(|other| *other != since) {
                return Err(format!("round {number} does not say since when this is one replica: {replica:?}"));
            }
            if since != Some(number) && !before.contains(replica) {
                return Err(format!("round {number} says that this is an earlier replica: {replica:?}"));
            }
        }
        for old in &before {
            let there = old.nodes.iter().all(|node| members.contains(node));
            if there && !now.iter().any(|replica| replica.nodes == old.nodes) {
                return Err(format!("round {number} parts this replica: {old:?}, {members:?}"));
            }
        }
        Ok(())
    }
}
