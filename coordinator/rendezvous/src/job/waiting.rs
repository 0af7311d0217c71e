//! Why a node of a job waits, as its records tell.

use std::fmt;

use super::overview::Job;
use super::{Excluded, NodeId, Phase, RoundRecord, RoundState};

/// What a node waits for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Waits {
    /// The job has ended like this, and its last agents leave.
    Ended(RoundState),
    /// An operator drains it.
    Drained,
    /// It is excluded.
    Excluded(Excluded),
    /// An operator has paused the job.
    Paused,
    /// It has a place, and starts its workers.
    Starting,
    /// The round has as many nodes as it may have.
    Spare {
        /// How many.
        max: u32,
    },
    /// The next round, for which newcomers are gathered.
    NextRound,
    /// Members of the last round, which must stop their workers first: their names, and what they say of themselves.
    Members(Vec<String>),
    /// More nodes.
    MoreNodes {
        /// How many are here.
        here: usize,
        /// How many it takes.
        min: u32,
    },
    /// The round that forms, and the last call for more nodes.
    LastCall {
        /// How many are here.
        here: usize,
        /// How many it may have.
        max: u32,
    },
}

impl fmt::Display for Waits {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Waits::Ended(state) => write!(f, "the job has {state}, and its last agents leave"),
            Waits::Drained => f.write_str("it is drained"),
            Waits::Excluded(excluded) => excluded.fmt(f),
            Waits::Paused => f.write_str("the operator paused the job: until it is resumed"),
            Waits::Starting => f.write_str("it has its place, and starts its workers"),
            Waits::Spare { max } => write!(f, "a spare: the round has all {max} nodes that it may have"),
            Waits::NextRound => f.write_str("it joins with the next round: growth is gathered for some seconds"),
            Waits::Members(late) => write!(f, "for {}, until stopped or evicted", late.join(", ")),
            Waits::MoreNodes { here, min } => write!(f, "{here} of at least {min} nodes are here"),
            Waits::LastCall { here, max } => {
                write!(f, "{here} nodes are here, at most {max}: the round forms, after a last call for more")
            }
        }
    }
}

impl Job {
    /// Why a node waits; none if it does not.
    pub fn why_waits(&self, id: &NodeId) -> Option<Waits> {
        let round = &self.round.as_ref()?.value;
        let node = self.nodes.get(id).map(|node| &node.value).filter(|node| node.phase == Phase::Waiting)?;
        let (min, max) = self.range().unwrap_or((1, 1));
        let drains = self.desired.as_ref().map_or(&[][..], |desired| &desired.value.drain);
        if round.state.is_final() {
            return Some(Waits::Ended(round.state));
        }
        if drains.contains(&node.name) {
            return Some(Waits::Drained);
        }
        let excluded = self.excluded(&node.name);
        if excluded == Some(Excluded::ByOperator) {
            return Some(Waits::Excluded(Excluded::ByOperator));
        }
        // One that is asked for is about to come.
        if round.paused || self.desired.as_ref().is_some_and(|desired| desired.value.paused) {
            return Some(Waits::Paused);
        }
        if round.state == RoundState::Running {
            return Some(if self.rank(id).is_some() {
                Waits::Starting
            } else if let Some(excluded) = excluded {
                Waits::Excluded(excluded)
            } else if round.group_world_size >= max {
                Waits::Spare { max }
            } else {
                Waits::NextRound
            });
        }
        let late = self.late_members(round);
        if !late.is_empty() {
            return Some(Waits::Members(late));
        }
        // Who wants a place; those that are excluded for their failures get one where the others are too few.
        let (mut here, mut faulty) = (0, 0);
        for node in self.nodes.values().map(|node| &node.value) {
            let in_it = node.round.is_none_or(|of| of == round.number);
            if node.phase == Phase::Waiting && in_it && !drains.contains(&node.name) {
                match self.excluded(&node.name) {
                    Some(Excluded::ByOperator) => {}
                    Some(Excluded::ForFailures(_)) => faulty += 1,
                    None => here += 1,
                }
            }
        }
        if let Some(excluded) = excluded.filter(|_| here >= min as usize) {
            return Some(Waits::Excluded(excluded));
        }
        if here < min as usize {
            here += faulty;
        }
        Some(if here < min as usize { Waits::MoreNodes { here, min } } else { Waits::LastCall { here, max } })
    }

    /// Members of the last round that have not answered the new one, with what they say of themselves.
    fn late_members(&self, round: &RoundRecord) -> Vec<String> {
        let Some(sealed) = round.sealed else { return Vec::new() };
        let members =
            self.ranks.iter().filter(|((number, plan, _), _)| (*number, *plan) == (sealed.number, sealed.plan));
        let late = members.filter_map(|((.., id), _)| {
            let Some(node) = self.nodes.get(id).map(|node| &node.value) else {
                return (!self.evicted.contains_key(id)).then(|| format!("{} (its key is gone)", id.name()));
            };
            let answered = node.round == Some(round.number) && matches!(node.phase, Phase::Waiting | Phase::Stopped);
            (!answered).then(|| format!("{} ({})", id.name(), node.phase))
        });
        late.collect()
    }
}
