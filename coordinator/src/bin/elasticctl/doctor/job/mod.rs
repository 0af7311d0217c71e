//! Judges a job: its state, who leads, which ports of its nodes answer, why a node waits. Pure: `reach` looks.

use std::collections::BTreeMap;

use elastic_rendezvous::job::overview::Job;
use elastic_rendezvous::job::{Endpoint, JobId, JobState, Protocols, RoundRecord, RoundState, Waits};

use super::finding::{Finding, State};
use super::reach::{Port, Seen};
use elastic_coordinator::operator::OperatorError;

pub(super) fn judge(seen: &Seen) -> Vec<Finding> {
    let Seen { id, job, ports } = seen;
    let Some(round) = job.round.as_ref().map(|round| &round.value) else { return Vec::new() };
    let mut findings = vec![standing(id, job, round)];
    findings.extend(protocol(id, job));
    if !round.state.is_final() {
        findings.extend(leader(id, job, ports));
    }
    findings.extend(peers(job, ports));
    findings.extend(waiting(id, job));
    findings
}

pub(super) fn unread(id: &str, error: &OperatorError) -> Finding {
    let (state, advice) = match error {
        OperatorError::Store(_) => (State::Unknown, "fix what fails above, then run it again"),
        _ => (State::Failed, "elasticctl jobs lists them; --prefix must be the agents' own"),
    };
    Finding::new(state, "round", format!("job {id}"), error.to_string()).advise(advice)
}

fn of_job(id: &JobId) -> String {
    format!("job {id}")
}

fn standing(id: &JobId, job: &Job, round: &RoundRecord) -> Finding {
    let (number, reason) = (round.number, &round.reason);
    let say = |state: State, seen: String| Finding::new(state, "round", of_job(id), seen);
    match round.state {
        RoundState::Failed => say(State::Failed, format!("round {number} has failed: {reason}")).advise(format!(
            "elasticctl describe {id} names the root cause; once it is fixed, start the agents again: the job starts \
             again"
        )),
        RoundState::Succeeded | RoundState::Closed => say(State::Ok, format!("round {number} has {}", round.state)),
        RoundState::Forming | RoundState::Running if job.nodes.is_empty() => {
            say(State::Warning, format!("round {number} is {}, and no node is here", JobState::from(round)))
                .advise("start its agents again with the same flags: the job continues")
        }
        RoundState::Forming if round.paused => {
            say(State::Ok, format!("the operator paused the job before round {number}"))
                .advise(format!("elasticctl resume {id}, when its workers are to continue"))
        }
        RoundState::Forming => say(State::Ok, format!("round {number} is forming: {reason}")),
        RoundState::Running => {
            let (nodes, workers) = (round.group_world_size, round.world_size);
            say(State::Ok, format!("round {number} runs, nodes: {nodes}, workers: {workers}"))
        }
    }
}

/// Whether this release may do anything about it, and whether its programs are all of one release.
fn protocol(id: &JobId, job: &Job) -> Option<Finding> {
    if let Some(refusal) = job.refusal() {
        let foreign = Finding::failed("protocol", of_job(id), refusal);
        return Some(foreign.advise("use the elasticctl and the coordinator of a release that speaks it"));
    }
    let (version, newest) = (job.protocol.as_ref()?.version, Protocols::OURS.newest);
    let releases = job.releases();
    let mixed = releases.len() > 1;
    if mixed || version < newest {
        let seen = match releases.iter().map(|told| told.unwrap_or("not told")).collect::<Vec<_>>() {
            all if mixed => format!("version {version}; releases here: {}", all.join(", ")),
            _ => format!("version {version}, and the newest is {newest}"),
        };
        let advice = if mixed {
            format!("finish the upgrade: elasticctl describe {id} names each node's release")
        } else {
            "nothing: the job speaks the newest once it starts again".to_owned()
        };
        return Some(Finding::warning("protocol", of_job(id), seen).advise(advice));
    }
    None
}

fn leader(id: &JobId, job: &Job, ports: &BTreeMap<Endpoint, Port>) -> Option<Finding> {
    let Some(leader) = job.leader.as_ref().map(|leader| &leader.value) else {
        if job.nodes.is_empty() {
            return None;
        }
        let leaderless = Finding::warning("leader", of_job(id), "no node leads, so nothing can change");
        return Some(
            leaderless
                .advise("run it again: another node leads within milliseconds. If none does, read the agents' logs"),
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

/// A port that does not accept. `flag` sets the address that others get.
fn unreached(check: &'static str, of: String, peer: &Endpoint, port: &Port, flag: &str) -> Finding {
    match port {
        Port::Silent(why) => {
            Finding::warning(check, of, format!("{peer} is not reached from here: {why}")).advise(format!(
                "run doctor on a node too: nodes must reach it. If they do not either: open the port between nodes, or \
                 give {flag} an address that leads there"
            ))
        }
        _ => Finding::failed(check, of, format!("{peer} refuses: no agent listens there, or a firewall rejects"))
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
fn waiting(id: &JobId, job: &Job) -> Vec<Finding> {
    let mut reasons: BTreeMap<String, (Finding, Vec<&str>)> = BTreeMap::new();
    let waiting = job.waiting();
    for (node, record) in &job.nodes {
        if let Some(waits) = waiting.of(node) {
            let finding = why(id, &record.value.name, &waits);
            let names = &mut reasons.entry(finding.seen.clone()).or_insert((finding, Vec::new())).1;
            names.push(&record.value.name);
        }
    }
    let named =
        |(finding, names): (Finding, Vec<&str>)| Finding { of: format!("node {}", names.join(", ")), ..finding };
    reasons.into_values().map(named).collect()
}

fn why(id: &JobId, name: &str, waits: &Waits) -> Finding {
    let state = if matches!(waits, Waits::MoreNodes { .. }) { State::Warning } else { State::Ok };
    let finding = Finding::new(state, "waits", "", waits.to_string());
    match waits {
        Waits::Paused => finding.advise(format!("elasticctl resume {id}")),
        Waits::Drained => finding.advise(format!("elasticctl undrain {id} {name}")),
        Waits::Excluded(_) => finding.advise(format!("elasticctl include {id} {name}")),
        Waits::Spare { .. } => finding.advise(format!("elasticctl set {id} --max N, if it should take part")),
        Waits::MoreNodes { .. } => finding.advise(format!(
            "start more agents, elasticctl undrain or include {id} NODE where one is drained or excluded, or \
             elasticctl set {id} --min N"
        )),
        _ => finding,
    }
}

#[cfg(test)]
mod tests;
