//! Judges a job: where it stands, who leads, which ports of its nodes answer, why a node waits. Pure: `reach` looks.

use std::collections::BTreeMap;

use elastic_coordinator::job::overview::Job;
use elastic_coordinator::job::{Endpoint, JobId, NodeId, NodeRecord, Phase, RoundRecord, RoundState};

use super::finding::{Finding, State};
use super::reach::{Port, Seen};
use crate::operator::OperatorError;

/// All findings.
pub(super) fn judge(seen: &Seen) -> Vec<Finding> {
    let Seen { id, job, ports } = seen;
    let Some(round) = job.round.as_ref().map(|round| &round.value) else { return Vec::new() };
    let mut findings = vec![standing(id, job, round)];
    if !round.state.is_final() {
        findings.extend(leader(id, job, ports));
    }
    findings.extend(peers(job, ports));
    findings.extend(waiting(id, job, round));
    findings
}

/// A job that could not be read.
pub(super) fn unread(id: &str, error: &OperatorError) -> Finding {
    let (state, advice) = match error {
        OperatorError::Store(_) => (State::Unknown, "mend what fails above, then run it again"),
        _ => (State::Failed, "elasticctl jobs lists them; --prefix must be the agents' own"),
    };
    Finding::new(state, "round", format!("job {id}"), error.to_string()).advise(advice)
}

fn of_job(id: &JobId) -> String {
    format!("job {id}")
}

/// Where the job stands.
fn standing(id: &JobId, job: &Job, round: &RoundRecord) -> Finding {
    let (number, reason) = (round.number, &round.reason);
    let say = |state: State, seen: String| Finding::new(state, "round", of_job(id), seen);
    match round.state {
        RoundState::Failed => say(State::Failed, format!("round {number} has failed: {reason}")).advise(format!(
            "elasticctl describe {id} names the root cause; once it is mended, start the agents again: the job begins anew"
        )),
        RoundState::Succeeded | RoundState::Closed => say(State::Ok, format!("round {number} has {}", round.state)),
        RoundState::Forming | RoundState::Running if job.nodes.is_empty() => {
            say(State::Warning, format!("round {number} is {}, and no node is here", round.state))
                .advise("start its agents again with the same flags: the job goes on")
        }
        RoundState::Forming => say(State::Ok, format!("round {number} is forming: {reason}")),
        RoundState::Running => {
            let (nodes, workers) = (round.group_world_size, round.world_size);
            say(State::Ok, format!("round {number} runs, nodes: {nodes}, workers: {workers}"))
        }
    }
}

/// Who leads it.
fn leader(id: &JobId, job: &Job, ports: &BTreeMap<Endpoint, Port>) -> Option<Finding> {
    let Some(leader) = job.leader.as_ref().map(|leader| &leader.value) else {
        if job.nodes.is_empty() {
            return None;
        }
        let nobody = Finding::new(State::Warning, "leader", of_job(id), "nobody leads, so nothing can change");
        return Some(
            nobody.advise(
                "run it again: another node leads within milliseconds. If nobody does, look at the agents' logs",
            ),
        );
    };
    let what = if leader.coordinator { "the coordinator at" } else { leader.node.name() };
    let seen = format!("{what} {}", leader.peer);
    // A node's own port is judged among all nodes'.
    if leader.coordinator
        && let Some(port) = ports.get(&leader.peer).filter(|port| **port != Port::Accepts)
    {
        return Some(unreached("leader", of_job(id), &leader.peer, port, "--peer-address"));
    }
    Some(Finding::ok("leader", of_job(id), seen))
}

/// A port that does not accept. `flag` sets the address that others are told.
fn unreached(check: &'static str, of: String, peer: &Endpoint, port: &Port, flag: &str) -> Finding {
    match port {
        Port::Silent(why) => Finding::new(State::Warning, check, of, format!("{peer} is not reached from here: {why}"))
            .advise(format!(
                "run doctor on a node too: nodes must reach it. If they do not either: open the port between nodes, or \
                 give {flag} an address that leads there"
            )),
        _ => Finding::new(
            State::Failed,
            check,
            of,
            format!("{peer} refuses: nobody listens there, or a firewall rejects"),
        )
        .advise(format!(
            "if it is gone, its lease ends this by itself; if it lives, open the port or have the firewall drop, \
                 since a refusal is taken for its death; or give {flag} an address that leads there"
        )),
    }
}

/// Which nodes' ports answer: one line for all that do, and one for each that does not.
fn peers(job: &Job, ports: &BTreeMap<Endpoint, Port>) -> Vec<Finding> {
    let tried = || job.nodes.iter().filter_map(|(id, node)| Some((id, &node.value.peer, ports.get(&node.value.peer)?)));
    let bad = tried().filter(|(.., port)| **port != Port::Accepts);
    let mut findings: Vec<_> = bad
        .map(|(id, peer, port)| unreached("peer", format!("node {}", id.name()), peer, port, "--local-addr"))
        .collect();
    let (all, bad) = (tried().count(), findings.len());
    if all > bad {
        let seen = format!("{} of {all} nodes' ports accept from here", all - bad);
        findings.insert(0, Finding::ok("peer", "the nodes", seen));
    }
    findings
}

/// Why nodes wait: a line for each reason, with all the nodes that it holds for.
fn waiting(id: &JobId, job: &Job, round: &RoundRecord) -> Vec<Finding> {
    let mut reasons: BTreeMap<String, (Finding, Vec<&str>)> = BTreeMap::new();
    for (node, record) in &job.nodes {
        if record.value.phase == Phase::Waiting {
            let why = why_waits(id, job, round, node, &record.value);
            let names = &mut reasons.entry(why.seen.clone()).or_insert((why, Vec::new())).1;
            names.push(&record.value.name);
        }
    }
    let named =
        |(finding, names): (Finding, Vec<&str>)| Finding { of: format!("node {}", names.join(", ")), ..finding };
    reasons.into_values().map(named).collect()
}

fn why_waits(id: &JobId, job: &Job, round: &RoundRecord, node: &NodeId, record: &NodeRecord) -> Finding {
    let say = |state: State, seen: String| Finding::new(state, "waits", "", seen);
    let (min, max) = job.range().unwrap_or((1, 1));
    let is_drained = |name: &str| {
        job.desired.as_ref().is_some_and(|desired| desired.value.drain.iter().any(|drained| drained == name))
    };
    if round.state.is_final() {
        return say(State::Ok, format!("the job has {}, and its last agents leave", round.state));
    }
    if is_drained(&record.name) {
        return say(State::Ok, "it is drained".to_owned()).advise(format!("elasticctl undrain {id} {}", record.name));
    }
    if round.state == RoundState::Running {
        if job.rank(node).is_some() {
            return say(State::Ok, "it has its place, and starts its workers".to_owned());
        }
        if round.group_world_size >= max {
            let spare = format!("a spare: the round has all {max} nodes that it may have");
            return say(State::Ok, spare).advise(format!("elasticctl set {id} --max N, if it should take part"));
        }
        return say(State::Ok, "it joins with the next round: growth is gathered for some seconds".to_owned());
    }
    let late = late_members(job, round);
    if !late.is_empty() {
        return say(State::Ok, format!("for {}, until stopped or evicted", late.join(", ")));
    }
    let takes_part = |node: &NodeRecord| {
        node.phase == Phase::Waiting && node.round.is_none_or(|of| of == round.number) && !is_drained(&node.name)
    };
    let here = job.nodes.values().filter(|node| takes_part(&node.value)).count();
    if here < min as usize {
        return say(State::Warning, format!("{here} of at least {min} nodes are here")).advise(format!(
            "start more agents, elasticctl undrain {id} NODE where one is drained, or elasticctl set {id} --min N"
        ));
    }
    say(State::Ok, format!("{here} nodes are here, at most {max}: the round forms, after a last call for more"))
}

/// Members of the last round that have not answered the new one, with what they say of themselves.
fn late_members(job: &Job, round: &RoundRecord) -> Vec<String> {
    let Some(sealed) = round.sealed else { return Vec::new() };
    let members = job.ranks.iter().filter(|((number, plan, _), _)| (*number, *plan) == (sealed.number, sealed.plan));
    let late = members.filter_map(|((.., id), _)| {
        let Some(node) = job.nodes.get(id).map(|node| &node.value) else {
            return (!job.evicted.contains_key(id)).then(|| format!("{} (its key is gone)", id.name()));
        };
        let answered = node.round == Some(round.number) && matches!(node.phase, Phase::Waiting | Phase::Stopped);
        (!answered).then(|| format!("{} ({})", id.name(), node.phase))
    });
    late.collect()
}

#[cfg(test)]
mod tests;
