//! Why a node of a job waits, as its records tell.

use std::collections::{BTreeMap, BTreeSet};
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
    /// More nodes, which make a replica with it.
    Replica {
        /// How many are here that are in none.
        here: usize,
        /// How many it takes.
        size: u32,
    },
    /// The next round, for which newcomers are gathered.
    NextRound,
    /// Members of the last round, which must stop their workers first.
    Members(Late),
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
            Waits::Replica { here, size } => write!(f, "{here} of the {size} nodes of another replica are here"),
            Waits::NextRound => f.write_str("it joins with the next round: growth is gathered for some seconds"),
            Waits::Members(Late { first, more: 0 }) => write!(f, "for {}, until stopped or evicted", first.join(", ")),
            Waits::Members(Late { first, more }) => {
                write!(f, "for {} and {more} more, until stopped or evicted", first.join(", "))
            }
            Waits::MoreNodes { here, min } => write!(f, "{here} of at least {min} nodes are here"),
            Waits::LastCall { here, max } => {
                write!(f, "{here} nodes are here, at most {max}: the round forms, after a last call for more")
            }
        }
    }
}

/// What nodes of a job wait for: all that is the same for each of them, found by one look at the job.
pub struct Waiting<'a> {
    job: &'a Job,
    drains: BTreeSet<&'a str>,
    excluded: BTreeMap<&'a str, Excluded>,
    /// Members of the last round that have not answered the new one.
    late: Late,
    /// How many want a place, without those that are excluded for their failures, and how many those are.
    here: usize,
    faulty: usize,
}

/// Members that are waited for.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Late {
    /// The names of the first, and what they say of themselves.
    pub first: Vec<String>,
    /// How many there are besides.
    pub more: usize,
}

impl Late {
    /// As many are named.
    const NAMED: usize = 4;

    fn add(&mut self, name: impl FnOnce() -> String) {
        if self.first.len() < Late::NAMED {
            self.first.push(name());
        } else {
            self.more += 1;
        }
    }
}

impl Job {
    /// What its nodes wait for. It costs one look at each node; ask it for all of them.
    pub fn waiting(&self) -> Waiting<'_> {
        let desired = self.desired.as_ref().map(|desired| &desired.value);
        let drains = desired.map_or(&[][..], |desired| &desired.drain).iter().map(String::as_str).collect();
        let faults = self.round.iter().flat_map(|round| &round.value.faults).map(|faults| faults.node.as_str());
        let named = desired.map_or(&[][..], |desired| &desired.exclude).iter().map(String::as_str).chain(faults);
        let excluded = named.filter_map(|name| Some((name, self.excluded(name)?))).collect();
        let mut waiting = Waiting { job: self, drains, excluded, late: Late::default(), here: 0, faulty: 0 };
        if let Some(round) = self.round.as_ref().filter(|round| !round.value.state.is_final()) {
            waiting.look(&round.value);
        }
        waiting
    }
}

impl Waiting<'_> {
    fn look(&mut self, round: &RoundRecord) {
        let forms = round.state == RoundState::Forming;
        if forms {
            self.late = self.job.late_members(round);
        }
        // Who wants a place; those that are excluded for their failures get one where the others are too few.
        for (id, node) in &self.job.nodes {
            let node = &node.value;
            let in_it =
                node.round.map_or_else(|| forms || self.job.rank(id).is_none(), |of| forms && of == round.number);
            if node.phase == Phase::Waiting && in_it && !self.drains.contains(node.name.as_str()) {
                match self.excluded.get(node.name.as_str()) {
                    Some(Excluded::ByOperator) => {}
                    Some(Excluded::ForFailures(_)) => self.faulty += 1,
                    None => self.here += 1,
                }
            }
        }
    }

    /// Why a node waits; none if it does not.
    pub fn of(&self, id: &NodeId) -> Option<Waits> {
        let job = self.job;
        let round = &job.round.as_ref()?.value;
        let node = job.nodes.get(id).map(|node| &node.value).filter(|node| node.phase == Phase::Waiting)?;
        let (min, max) = job.range().unwrap_or((1, 1));
        let size = job.spec.as_ref().map_or(1, |spec| spec.nodes_per_replica);
        if round.state.is_final() {
            return Some(Waits::Ended(round.state));
        }
        if self.drains.contains(node.name.as_str()) {
            return Some(Waits::Drained);
        }
        let excluded = self.excluded.get(node.name.as_str()).copied();
        if excluded == Some(Excluded::ByOperator) {
            return Some(Waits::Excluded(Excluded::ByOperator));
        }
        // One that is asked for is about to come.
        if round.paused || job.desired.as_ref().is_some_and(|desired| desired.value.paused) {
            return Some(Waits::Paused);
        }
        if round.state == RoundState::Running {
            return Some(if job.rank(id).is_some() {
                Waits::Starting
            } else if let Some(excluded) = excluded {
                Waits::Excluded(excluded)
            } else if round.group_world_size >= max {
                Waits::Spare { max }
            } else if self.here < size as usize {
                Waits::Replica { here: self.here, size }
            } else {
                Waits::NextRound
            });
        }
        if !self.late.first.is_empty() {
            return Some(Waits::Members(self.late.clone()));
        }
        if let Some(excluded) = excluded.filter(|_| self.here >= min as usize) {
            return Some(Waits::Excluded(excluded));
        }
        let here = if self.here < min as usize { self.here + self.faulty } else { self.here };
        Some(if here < min as usize { Waits::MoreNodes { here, min } } else { Waits::LastCall { here, max } })
    }
}

impl Job {
    /// Members of the last round that have not answered the new one, with what they say of themselves.
    fn late_members(&self, round: &RoundRecord) -> Late {
        let mut late = Late::default();
        let Some(sealed) = round.sealed else { return late };
        let first = (sealed.number, sealed.plan, NodeId::from_text(""));
        let members = self.ranks.range(first..).map(|((number, plan, id), _)| (*number, *plan, id));
        for (.., id) in members.take_while(|(number, plan, _)| (*number, *plan) == (sealed.number, sealed.plan)) {
            match self.nodes.get(id).map(|node| &node.value) {
                None if self.evicted.contains_key(id) => {}
                None => late.add(|| format!("{} (its key is gone)", id.name())),
                Some(node) => {
                    let answers = matches!(node.phase, Phase::Waiting | Phase::Stopped);
                    if node.round != Some(round.number) || !answers {
                        late.add(|| format!("{} ({})", id.name(), node.phase));
                    }
                }
            }
        }
        late
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::samples::{self, overview};
    use super::super::{RoundRecord, RoundState, Spec};

    /// A job of so many nodes. Only the first has stopped for the round that forms.
    fn forming(nodes: usize) -> super::Job {
        let name = |index: usize| format!("n{index:04}");
        let mut records = vec![(
            "J/round".to_owned(),
            json!({
                "number": 2, "generation": 1, "state": "forming", "reason": "r",
                "sealed": { "number": 1, "plan": 1, "nodes": nodes },
            }),
        )];
        let peer = json!({ "host": "h", "port": 1 });
        for node in (0..nodes).map(name) {
            let (phase, round) = if node == "n0000" { ("waiting", 2) } else { ("running", 1) };
            records.push((format!("J/nodes/{node}:1"), json!({
                "name": node, "incarnation": "1", "machine": "m", "boot": "b", "host": "h", "peer": peer, "slots": 1,
                "role": "r", "phase": phase, "round": round,
            })));
            records.push((format!("J/rounds/1/1/{node}:1"), json!({
                "group_rank": 0, "first_rank": 0, "slots": 1, "role_rank_base": 0, "role_world_size": 1, "name": node,
                "machine": "m", "boot": "b", "peer": peer,
            })));
        }
        let records: Vec<_> = records.iter().map(|(key, value)| (key.as_str(), value.clone())).collect();
        overview(&records).jobs.into_values().next().unwrap()
    }

    #[test]
    fn a_wait_for_many_names_a_few_and_their_number() {
        let job = forming(40);
        let waits = job.waiting().of(&super::NodeId::from_text("n0000:1")).map(|waits| waits.to_string());
        let told = "for n0001 (running), n0002 (running), n0003 (running), n0004 (running) and 35 more, until stopped or \
                    evicted";
        assert_eq!(waits.as_deref(), Some(told));
        assert_eq!(job.waiting().of(&super::NodeId::from_text("n0001:1")), None);
    }

    #[test]
    fn a_node_waits_for_those_that_make_a_replica_with_it() {
        let spec = Spec { nodes_per_replica: 2, ..samples::spec(2, 4) };
        let round = RoundRecord { sealed: None, ..samples::round(2, RoundState::Running) };
        let waits = |spares: &[&str]| {
            let mut records = vec![
                ("J/spec".to_owned(), serde_json::to_value(&spec).unwrap()),
                ("J/round".to_owned(), serde_json::to_value(&round).unwrap()),
            ];
            for name in spares {
                records.push((format!("J/nodes/{name}:1"), serde_json::to_value(samples::node(name)).unwrap()));
            }
            let records: Vec<_> = records.iter().map(|(key, value)| (key.as_str(), value.clone())).collect();
            let job = samples::overview(&records).jobs.into_values().next().unwrap();
            job.waiting().of(&super::NodeId::from_text("c:1")).map(|waits| waits.to_string()).unwrap()
        };
        assert_eq!(waits(&["c"]), "1 of the 2 nodes of another replica are here");
        assert_eq!(waits(&["c", "d"]), "it joins with the next round: growth is gathered for some seconds");
    }

    /// The text for 4,000 nodes that wait was 100 MB when each named all late members.
    #[test]
    fn a_large_job_that_forms_costs_a_few_megabytes_of_messages() {
        let mut job = forming(4_000);
        for node in job.nodes.values_mut().skip(2_000) {
            (node.value.phase, node.value.round) = (super::Phase::Waiting, Some(2));
        }
        let told = super::super::json::job(&"J".parse().unwrap(), &job).to_string();
        assert!(told.len() < 4_000_000, "{} bytes", told.len());
    }
}
