//! Which nodes of the job a machine measures its bandwidth from, and what the result means. Nothing is measured here.

use std::fmt;

use elastic_rendezvous::job::{Endpoint, NodeId, NodeRecord, Phase};

use super::judge::{Finding, Reading, State, finding, unknown};

/// From so many nodes it is measured at most, so that a slow one keeps no good machine out.
pub(crate) const MEASURED: usize = 3;

/// So many are asked at most: some may be busy with others.
pub(crate) const ASKED: usize = 8;

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct BitRate(pub u64);

impl fmt::Display for BitRate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let units = [(1_000_000_000, "Gbit/s"), (1_000_000, "Mbit/s"), (1000, "kbit/s"), (1, "bit/s")];
        let (unit, name) = units.into_iter().find(|(unit, _)| self.0 >= *unit).unwrap_or((1, "bit/s"));
        // A rate just below the threshold must not look like the threshold: what is left over is cut off.
        let (whole, tenths) = (self.0 / unit, self.0 % unit * 10 / unit);
        if tenths == 0 { write!(f, "{whole} {name}") } else { write!(f, "{whole}.{tenths} {name}") }
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Peer {
    pub node: NodeId,
    pub at: Endpoint,
}

impl fmt::Display for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "node {} at {}", self.node.name(), self.at)
    }
}

/// A node that was asked: what came from it, or why nothing was measured.
pub(crate) type Tried = (Peer, Reading<BitRate>);

/// The nodes to ask, in this order. Those of this machine are left out, since nothing on the way to them is a cable. By
/// `turn`, a random number, machines that come at the same time begin with different nodes.
pub(crate) fn choose(records: &[NodeRecord], boot: &str, turn: u64) -> Vec<Peer> {
    // A done node's record outlives its agent.
    let others = records.iter().filter(|record| record.boot != boot && record.phase != Phase::Done);
    let mut peers: Vec<Peer> = others.map(|record| Peer { node: record.id(), at: record.peer.clone() }).collect();
    if let Some(by) = turn.checked_rem(peers.len() as u64) {
        peers.rotate_left(by as usize);
    }
    peers.truncate(ASKED);
    peers
}

/// Whether no other peer need be asked.
pub(crate) fn is_settled(tried: &[Tried], needed: BitRate) -> bool {
    let mut rates = tried.iter().filter_map(|(_, rate)| rate.as_ref().ok());
    rates.clone().count() >= MEASURED || rates.any(|rate| *rate >= needed)
}

/// What was found of the nodes that were asked.
pub(crate) fn verdict(tried: &Reading<Vec<Tried>>, needed: BitRate) -> Finding {
    const WHAT: &str = "bandwidth to a node of the job";
    const ADVICE: &str = "look at the speed and the errors of this machine's link (ethtool, ip -s link), its cable and \
         its switch; if the job's own traffic fills the network, lower --preflight-peer-bandwidth";
    let tried = match tried {
        Ok(tried) => tried,
        Err(why) => return unknown(WHAT, why),
    };
    let measured: Vec<_> = tried.iter().filter_map(|(peer, rate)| Some((peer, *rate.as_ref().ok()?))).collect();
    let Some(best) = measured.iter().map(|(_, rate)| *rate).max() else {
        let why = match &tried[..] {
            [] => "no node of it is on another machine yet",
            _ => "none could be measured",
        };
        return unknown(WHAT, why);
    };
    let state = if best < needed { State::Unfit } else { State::Fit };
    let each: Vec<String> = measured.iter().map(|(peer, rate)| format!("{rate} from {peer}")).collect();
    finding(state, format!("{}, of {needed} needed", each.join(", ")), ADVICE)
}

#[cfg(test)]
mod tests;
