//! What can be asked of a job that continues, and what is desired once it is granted: a pure function of the job's
//! records. Reading and writing them is [`super::Operator`]'s.
//!
//! A new wish is one more variant of [`Wish`] and its arm in [`granted`].

#![deny(clippy::disallowed_methods, clippy::disallowed_types)]

use std::fmt;

use serde::Deserialize;

use super::OperatorError;
use super::error::listing;
use crate::nodes::named;
use elastic_rendezvous::job::overview::Job;
use elastic_rendezvous::job::{Desired, JobId, NodeId, Phase, TakenBack};

/// Most bytes of a node's id, `NAME:INCARNATION`: agents take names of 200 bytes, and an incarnation is a UUID.
pub(super) const LONGEST_NODE: usize = 237;

/// What is asked of a job. The variants have named fields alone, also where there are none, since that is how JSON names
/// them. A node that is here may also be given by its host's name, if no other node is there.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub enum Wish {
    /// Nodes of this name leave and stay away.
    Drain {
        /// The node's name, or its id.
        node: String,
    },
    /// They may take part again.
    Undrain {
        /// The node's name.
        node: String,
    },
    /// Nodes of this name get no place. Their agents stay and wait.
    Exclude {
        /// The node's name, or the id of one that is here. It need not be here.
        node: String,
    },
    /// They get one again, also where they were excluded for their failures.
    Include {
        /// The node's name, or the id of one that is here.
        node: String,
    },
    /// Nodes that are here lose their place at once, whatever they say, and their agents end.
    Evict {
        /// The node's name, or its id.
        node: String,
    },
    /// Other bounds, another priority; `None` leaves one unchanged.
    Set {
        /// Fewest nodes.
        min: Option<u32>,
        /// Most nodes.
        max: Option<u32>,
        /// Which jobs get spare hosts first: those with the highest.
        priority: Option<i32>,
    },
    /// Its workers stop, and its agents wait.
    Pause {},
    /// A paused job continues.
    Resume {},
    /// The job ends.
    Close {},
}

/// As the history tells it.
impl fmt::Display for Wish {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Wish::Drain { node } => write!(f, "drain {node}"),
            Wish::Undrain { node } => write!(f, "undrain {node}"),
            Wish::Exclude { node } => write!(f, "exclude {node}"),
            Wish::Include { node } => write!(f, "include {node}"),
            Wish::Evict { node } => write!(f, "evict {node}"),
            Wish::Set { min, max, priority } => {
                f.write_str("set")?;
                min.map_or(Ok(()), |min| write!(f, " min {min}"))?;
                max.map_or(Ok(()), |max| write!(f, " max {max}"))?;
                priority.map_or(Ok(()), |priority| write!(f, " priority {priority}"))
            }
            Wish::Pause {} => f.write_str("pause"),
            Wish::Resume {} => f.write_str("resume"),
            Wish::Close {} => f.write_str("close"),
        }
    }
}

/// What is desired once a wish is added. Nothing is added under a name that no agent has: long ones would fill it.
pub(super) fn granted(id: &JobId, job: &Job, mut desired: Desired, wish: &Wish) -> Result<Desired, OperatorError> {
    if let Wish::Drain { node } | Wish::Exclude { node } | Wish::Evict { node } = wish
        // Agents take the characters of a job's id for a name too.
        && (node.len() > LONGEST_NODE || node.parse::<JobId>().is_err())
    {
        return Err(OperatorError::BadNode { node: node.chars().take(40).collect() });
    }
    match wish {
        Wish::Close {} => desired.closed = true,
        Wish::Pause {} => desired.paused = true,
        Wish::Resume {} => desired.paused = false,
        Wish::Set { min: None, max: None, priority: None } => return Err(OperatorError::NothingToSet),
        Wish::Set { min, max, priority } => {
            if min.is_some() || max.is_some() {
                let (old_min, old_max) = job.range().unwrap_or((1, 1));
                let (min, max) = (min.unwrap_or(old_min), max.unwrap_or(old_max));
                if min == 0 || min > max {
                    return Err(OperatorError::Range { job: id.clone(), min, max });
                }
                desired.min_nodes = Some(min);
                desired.max_nodes = Some(max);
            }
            desired.priority = priority.unwrap_or(desired.priority);
        }
        Wish::Drain { node } => {
            let name = &job.nodes[found(id, job, node)?[0]].value.name;
            if !desired.drain.contains(name) {
                desired.drain.push(name.clone());
            }
        }
        Wish::Undrain { node } => {
            let before = desired.drain.len();
            let name = name_of(job, node);
            desired.drain.retain(|drained| drained != node && Some(drained) != name.as_ref());
            if desired.drain.len() == before {
                let drained = desired.drain.iter().cloned();
                let there = listing(drained, "drained are", "none is drained");
                return Err(OperatorError::NoSuchNode { job: id.clone(), node: node.clone(), there });
            }
        }
        Wish::Exclude { node } => {
            let name = name_of(job, node).unwrap_or_else(|| node.clone());
            if !desired.exclude.contains(&name) {
                desired.exclude.push(name);
            }
        }
        Wish::Include { node } => {
            let name = name_of(job, node).unwrap_or_else(|| node.clone());
            include(id, job, &mut desired, name)?;
        }
        Wish::Evict { node } => {
            let named = found(id, job, node)?;
            // Those that are gone need not be evicted any more.
            desired.evict.retain(|evicted| job.nodes.contains_key(evicted));
            for node in named {
                if !desired.evict.contains(node) {
                    desired.evict.push(node.clone());
                }
            }
        }
    }
    Ok(desired)
}

/// Ends what keeps nodes of this name out: an operator's exclusion, and the one that means their failures.
fn include(id: &JobId, job: &Job, desired: &mut Desired, name: String) -> Result<(), OperatorError> {
    let faults = job.round.as_ref().map_or(&[][..], |round| &round.value.faults);
    let stands = |node: &str| {
        let faults = faults.iter().find(|faults| faults.node == node);
        faults.and_then(|faults| faults.excluded)
    };
    let by_operator = desired.exclude.contains(&name);
    if !by_operator && stands(&name).is_none() {
        let for_failures = faults.iter().filter(|faults| faults.excluded.is_some()).map(|faults| faults.node.clone());
        let there = listing(desired.exclude.iter().cloned().chain(for_failures), "excluded are", "none is excluded");
        return Err(OperatorError::NoSuchNode { job: id.clone(), node: name, there });
    }
    desired.exclude.retain(|excluded| *excluded != name);
    // What was taken back before, and is over, need not be sent any more.
    desired.include.retain(|back| stands(&back.node).is_some_and(|exclusion| exclusion.round == back.round));
    if let Some(exclusion) = stands(&name).filter(|exclusion| !desired.takes_back(&name, *exclusion)) {
        desired.include.push(TakenBack { node: name, round: exclusion.round });
    }
    Ok(())
}

/// What an operator should know about a wish just granted.
pub(super) fn advice(job: &Job, desired: &Desired, wish: &Wish) -> Option<String> {
    match wish {
        Wish::Exclude { node } if name_of(job, node).is_none() => {
            Some(format!("no node {node} is here now: one of that name will get no place"))
        }
        Wish::Drain { .. } | Wish::Exclude { .. } | Wish::Evict { .. } => too_few_advice(job, desired),
        Wish::Undrain { .. }
        | Wish::Include { .. }
        | Wish::Set { .. }
        | Wish::Pause {}
        | Wish::Resume {}
        | Wish::Close {} => None,
    }
}

/// What [`named`] finds: one node at least. [`OperatorError::NoSuchNode`] tells those that are here.
pub fn found<'a>(id: &JobId, job: &'a Job, node: &str) -> Result<Vec<&'a NodeId>, OperatorError> {
    let found = named(job, node);
    if found.is_empty() {
        let names = job.nodes.values().map(|record| record.value.name.clone());
        let there = listing(names, "there are", "none is there");
        return Err(OperatorError::NoSuchNode { job: id.clone(), node: node.to_owned(), there });
    }
    Ok(found)
}

/// The name of a node that is here, given as for [`named`].
fn name_of(job: &Job, node: &str) -> Option<String> {
    let id = *named(job, node).first()?;
    Some(job.nodes.get(id)?.value.name.clone())
}

/// Whether the job can continue without the nodes that are drained, excluded or evicted.
fn too_few_advice(job: &Job, desired: &Desired) -> Option<String> {
    let staying = job.nodes.iter().filter(|(id, node)| {
        let (name, phase) = (&node.value.name, node.value.phase);
        let goes = desired.drain.contains(name) || desired.exclude.contains(name) || desired.evict.contains(id);
        !goes && !matches!(phase, Phase::Draining | Phase::Stopped)
    });
    let (staying, (min, _)) = (staying.count(), job.range()?);
    let join_timeout = job.spec.as_ref()?.timings.join_timeout;
    (staying < min as usize).then(|| {
        format!(
            "{staying} nodes stay and the job needs {min}: it waits for others, and fails after {join_timeout:?} \
             without them"
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use elastic_rendezvous::job::samples::overview;

    /// A job whose round says this, with a node `a` that is here.
    fn job(round: &str) -> (JobId, Job) {
        let id: JobId = "J".parse().unwrap();
        let a = r#"{"name":"a","incarnation":"1","machine":"m","boot":"b","host":"h","peer":{"host":"h","port":1},
            "slots":1,"role":"r","phase":"running"}"#;
        let job = overview(&[("J/round", round), ("J/nodes/a:1", a)]).jobs.remove(&id).unwrap();
        (id, job)
    }

    #[test]
    fn what_is_over_is_asked_for_no_longer() {
        let (id, job) = job(r#"{"number":7,"generation":1,"state":"running","reason":"r","faults":[
            {"node":"b","exclusions":2,"excluded":{"round":6,"lasts_ms":1}},
            {"node":"c","exclusions":1,"excluded":{"round":7,"lasts_ms":1}}]}"#);
        let back = |node: &str, round| TakenBack { node: node.into(), round };
        let gone = NodeId::new("gone", "1");
        let before = Desired {
            exclude: vec!["a".into(), "c".into()],
            // An earlier exclusion of b's, and one of a node that nothing is held against now.
            include: vec![back("b", 5), back("d", 6)],
            evict: vec![gone],
            ..Desired::default()
        };
        let asked = |wish: &Wish| granted(&id, &job, before.clone(), wish);
        let node = |name: &str| name.to_owned();
        // By the operator and for its failures: both end.
        let c = asked(&Wish::Include { node: node("c") }).unwrap();
        assert_eq!((&c.exclude[..], &c.include[..]), (&[node("a")][..], &[back("c", 7)][..]));
        let b = asked(&Wish::Include { node: node("b") }).unwrap();
        assert_eq!(b.include, [back("b", 6)]);
        assert_eq!(granted(&id, &job, b.clone(), &Wish::Include { node: node("b") }).unwrap(), b, "asked for twice");
        let a = asked(&Wish::Include { node: node("a:1") }).unwrap();
        assert_eq!((a.exclude, a.include), (vec![node("c")], vec![]));
        assert!(asked(&Wish::Include { node: node("d") }).is_err());
        let evicted = asked(&Wish::Evict { node: node("a") }).unwrap();
        assert_eq!(evicted.evict, [NodeId::new("a", "1")]);
    }

    #[test]
    fn a_node_may_be_given_by_its_host_if_only_that_one_is_there() {
        let id: JobId = "J".parse().unwrap();
        let node = |name: &str, host: &str| {
            format!(
                r#"{{"name":"{name}","incarnation":"1","machine":"m","boot":"b","host":"{host}",
                "peer":{{"host":"h","port":1}},"slots":1,"role":"r","phase":"running"}}"#
            )
        };
        let nodes = [node("gpu1-0a1b2c", "gpu1"), node("x", "gpu2"), node("y", "gpu2"), node("gpu2", "gpu3")];
        let round = r#"{"number":1,"generation":1,"state":"running","reason":"r"}"#;
        let drained = |nodes: &[String], host: &str| {
            let mut records = vec![("J/round".to_owned(), round)];
            records.extend(nodes.iter().enumerate().map(|(at, node)| (format!("J/nodes/{at}:1"), node.as_str())));
            let records: Vec<_> = records.iter().map(|(key, value)| (key.as_str(), *value)).collect();
            let job = overview(&records).jobs.remove(&id).unwrap();
            granted(&id, &job, Desired::default(), &Wish::Drain { node: host.to_owned() }).map(|desired| desired.drain)
        };
        assert_eq!(drained(&nodes, "gpu1").unwrap(), ["gpu1-0a1b2c"]);
        assert_eq!(drained(&nodes, "gpu2").unwrap(), ["gpu2"], "a name comes before a host");
        let error = drained(&nodes[..3], "gpu2").unwrap_err().to_string();
        assert_eq!(error, r#"job J has no node "gpu2": there are gpu1-0a1b2c, x, y"#);
    }

    #[test]
    fn a_pause_and_its_resume_leave_all_else_that_is_desired() {
        let id: JobId = "J".parse().unwrap();
        let round = r#"{"number":1,"generation":1,"state":"running","reason":"r"}"#;
        let job = overview(&[("J/round", round)]).jobs.remove(&id).unwrap();
        let drained = Desired { drain: vec!["a".to_owned()], ..Desired::default() };
        let paused = granted(&id, &job, drained.clone(), &Wish::Pause {}).unwrap();
        assert_eq!(paused, Desired { paused: true, ..drained.clone() });
        assert_eq!(granted(&id, &job, paused, &Wish::Resume {}).unwrap(), drained);
    }
}
