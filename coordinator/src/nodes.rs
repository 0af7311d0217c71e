//! A job's nodes: those that people name, and the members of its round.

#![deny(clippy::disallowed_methods, clippy::disallowed_types)]

use elastic_rendezvous::job::overview::Job;
use elastic_rendezvous::job::{NodeId, RankRecord, RoundState};

/// The nodes that are here, given by name, by id, or by their host's name. A host of several names fits none: only one
/// may be meant. (One name has several ids while an agent takes the place of its predecessor.)
pub fn named<'a>(job: &'a Job, node: &str) -> Vec<&'a NodeId> {
    let all = || job.nodes.iter().map(|(id, record)| (id, &record.value));
    let exact: Vec<_> = all().filter(|(id, record)| record.name == node || id.as_str() == node).collect();
    let on_host = || all().filter(|(_, record)| record.host == node).collect();
    let fits = if exact.is_empty() { on_host() } else { exact };
    let one_name = fits.iter().all(|(_, record)| record.name == fits[0].1.name);
    fits.into_iter().filter(|_| one_name).map(|(id, _)| id).collect()
}

/// The members of the round that was sealed last, and their places.
pub fn members(job: &Job) -> impl Iterator<Item = (&NodeId, &RankRecord)> {
    let sealed = job.round.as_ref().and_then(|round| round.value.sealed);
    let sealed = move |number, plan| sealed.is_some_and(|sealed| (sealed.number, sealed.plan) == (number, plan));
    job.ranks.iter().filter(move |((number, plan, _), _)| sealed(*number, *plan)).map(|((.., node), rank)| (node, rank))
}

/// Members of the round that runs whose keys are gone: they were lost, and no leader has said so yet.
pub fn gone(job: &Job) -> impl Iterator<Item = (&NodeId, &RankRecord)> {
    let runs = job.round.as_ref().is_some_and(|round| round.value.state == RoundState::Running);
    members(job).filter(move |(node, _)| runs && !job.nodes.contains_key(*node) && !job.evicted.contains_key(*node))
}
