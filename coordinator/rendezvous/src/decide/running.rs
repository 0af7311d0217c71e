//! Whether a running round continues: its members' failures, losses and leaves, and newcomers that fit.

use std::collections::BTreeMap;
use std::time::Duration;

use super::refusals::refusals;
use super::{Eviction, Evictions, Form, PAUSED, Stale, Verdict, Wake, by_operator, eviction, names, started};
use crate::job::{Advance, Failure, FailureClass, Fate, NodeId, PERMANENT, Phase, RestartPolicy, RoundState};
use crate::kv::Revision;
use crate::roster::Says;
use crate::time::Time;
use crate::view::{Liveness, View};

/// What stops all of a node's processes at once signals them one after the other. After a signal that asks programs to
/// stop has ended a worker, the operator may ask its agent to leave within this time. The exit was then no failure.
const TOLD_TOO: Duration = Duration::from_millis(300);

/// A member that is lost before its round has run for so long has hardly got beyond what each start does.
const SOON: Duration = Duration::from_secs(5 * 60);

pub(super) fn running(now: Time, view: &View, wake: &mut Wake) -> (Verdict, String) {
    let round = &view.round.value;
    let advance = advance(now, view);
    let next = |charge, evict| {
        Verdict::Form(Form { charge, evict, advance: Some(advance.clone()), ..Form::of(round.number + 1) })
    };
    let lost = losses(now, view, wake);
    let leaving = leaving(view);

    if let Some(failure) = strongest_failure(view) {
        let judged_at = failure.said + TOLD_TOO;
        if failure.class == FailureClass::Signalled && now < judged_at {
            wake.at(judged_at);
            let story = format!("{}: {}", failure.node.name(), failure.cause.message);
            return (Verdict::Wait, format!("{story}; waiting to see whether its agent is asked to leave"));
        }
        let blames_peer = failure.class == FailureClass::Peer;
        // A node that goes breaks the connections of those that stay.
        let explained = !lost.is_empty() || !leaving.is_empty();
        // A member that lives but does not reach this leader never answers. One lease is enough time for all others.
        let answer_by = failure.said + view.spec.timings.lease_ttl;
        // mutant blame_waits_for_ever: now < answer_by => true
        // mutant blame_believed: blames_peer => false
        let unjudged = blames_peer && !explained && now < answer_by && !all_answered_since(view, failure.report);
        if unjudged {
            wake.at(answer_by);
            let asked = view.probe.is_some_and(|(_, report)| report >= failure.report);
            let verdict = if asked { Verdict::Wait } else { Verdict::Probe { report: failure.report } };
            return (verdict, format!("{} blames a peer: waiting for every member's word", failure.node.name()));
        }
        let membership = failure.class == FailureClass::Lost || (blames_peer && explained);
        if !membership {
            return failed(view, failure, lost, advance.clone());
        }
        if !explained {
            return change(view, next, Vec::new(), format!("{}: {}", failure.node.name(), failure.cause.message));
        }
    }
    if !lost.is_empty() {
        return without(now, view, lost, advance);
    }

    let all_say = |phase| view.roster.count_saying(Some((round.number, phase))) == view.roster.size();
    // mutant one_is_all: all_say(Phase::Done) => view.roster.count_saying(Some((round.number, Phase::Done))) > 0
    if all_say(Phase::Done) {
        return (Verdict::Finish { state: RoundState::Succeeded, cause: None }, "every member is done".to_owned());
    }
    if view.desired.paused {
        // Whatever the policy: it is no change of membership.
        // mutant a_pause_is_charged: next(false, Vec::new()) => next(true, Vec::new())
        return (next(false, Vec::new()), PAUSED.to_owned());
    }
    if !leaving.is_empty() {
        let reason = format!("{} leaves", names(&leaving));
        return change(view, next, Vec::new(), reason);
    }
    let excluded: Vec<&NodeId> = view.excluded_by_operator().filter(|node| is_running(view, node)).collect();
    if !excluded.is_empty() {
        let reason = format!("the operator excludes {}", names(&excluded));
        return change(view, next, Vec::new(), reason);
    }
    if view.roster.size() > view.max_nodes() {
        let reason = format!("the operator asks for at most {} nodes", view.max_nodes());
        return change(view, next, Vec::new(), reason);
    }
    if let Some(refusal) = refusals(view) {
        return refusal;
    }
    let all_running = all_say(Phase::Running);
    if all_running {
        let (old, later): (Vec<_>, Vec<_>) = view.old_tombstones().partition(|(from, _)| *from <= now);
        let rounds: Vec<u64> = view.stale_rounds.iter().copied().collect();
        if !rounds.is_empty() || !old.is_empty() {
            let tombstones = old.into_iter().map(|(_, node)| node.clone()).collect();
            return (Verdict::Prune(Stale { rounds, tombstones }), "the round runs fully".to_owned());
        }
        later.into_iter().for_each(|(from, _)| wake.at(from));
    }
    growth(now, view, wake, all_running, next)
}

/// A failure that counts: another try if one is left, and if the last ones were worth it.
fn failed(view: &View, failure: Reported, lost: Vec<Eviction>, advance: Advance) -> (Verdict, String) {
    let (round, spec) = (&view.round.value, &view.spec);
    let story = match failure.class {
        FailureClass::Lost => failure.cause.message.clone(),
        _ => format!("{}: {}", failure.node.name(), failure.cause.message),
    };
    let advance = advance.after_failure(round.restarts, &failure.cause);
    let failed_starts = advance.failed_start.as_ref().map_or(0, |start| start.restarts);
    let why_not = if failure.cause.permanent {
        PERMANENT.to_owned()
    } else if round.restarts >= spec.max_restarts {
        format!("no restarts left of {}", spec.max_restarts)
    } else if spec.restarts_without_progress.is_some_and(|limit| advance.stalled_restarts >= limit) {
        let reached = advance.furthest_step.map_or_else(String::new, |step| format!(" after step {step}"));
        format!("no new step{reached} in {} restarts (--restarts-without-progress)", advance.stalled_restarts)
    } else if spec.failed_starts.is_some_and(|limit| failed_starts >= limit) {
        format!(
            "the same failure within a minute of the start in {failed_starts} restarts in a row, and no new step: \
             --restarts-without-progress says how many such restarts there may be"
        )
    } else {
        let left = spec.max_restarts - round.restarts - 1;
        let failed = Some(failure.node).filter(|_| failure.class != FailureClass::Peer);
        // mutant never_charged: charge: true => charge: !ON
        let form = Form { charge: true, advance: Some(advance), failed, evict: lost, ..Form::of(round.number + 1) };
        return (Verdict::Form(form), format!("{story}; restarting, {left} restarts left"));
    };
    let verdict = Verdict::Finish { state: RoundState::Failed, cause: Some(failure.cause) };
    (verdict, format!("{story}; {why_not}"))
}

/// Whether restarts help, as the round's record says; and nodes that were lost soon, if this round has not got further.
fn advance(now: Time, view: &View) -> Advance {
    let mut advance = view.round.value.advance.clone();
    if got_further(now, view) {
        advance.lost.clear();
    }
    advance
}

/// Whether the round has run for a while, or a checkpoint was committed in it. A leader that does not know for how long
/// it has run holds nothing against it.
fn got_further(now: Time, view: &View) -> bool {
    let resumed = view.round.value.checkpoint.as_ref().map(|checkpoint| checkpoint.step);
    view.begun.is_none_or(|begun| now.since(begun) >= SOON) || view.committed > resumed
}

/// The round ends, since members are lost. That is no failure, unless one of them was lost soon after a round had begun
/// before, and the job has got no further since: restarts do not help then.
fn without(now: Time, view: &View, lost: Vec<Eviction>, mut advance: Advance) -> (Verdict, String) {
    let gone: Vec<&NodeId> = lost.iter().map(|eviction| &eviction.node).collect();
    let reason = format!("lost {}: {}", names(&gone), lost.first().map_or("", |first| first.reason.as_str()));
    // A node that its operator sends away, or that was about to leave, is no sign of anything.
    let leaves = |node: &NodeId| {
        view.phase_for(node, view.round.value.number) == Some(Phase::Draining)
            || view.drained_nodes().any(|it| it == node)
    };
    let soon = lost.iter().filter(|eviction| !got_further(now, view) && !eviction.refused && !leaves(&eviction.node));
    // A name counts once in a round, also where two members claim it.
    let names_lost: BTreeMap<&str, &Eviction> = soon.map(|eviction| (eviction.node.name(), eviction)).collect();
    let counted = names_lost.iter().map(|(name, eviction)| (advance.lost_soon(name), *eviction));
    let worst = counted.max_by_key(|(rounds, _)| *rounds).filter(|(rounds, _)| *rounds > 1);
    if let Some((rounds, eviction)) = worst {
        let message = format!(
            "lost {}: {}; in {rounds} rounds it was lost soon after they began, and the job got no further",
            eviction.node.name(),
            eviction.reason
        );
        let (node, class) = (eviction.node.clone(), FailureClass::Lost);
        let cause = Failure { node: Some(node.clone()), ..Failure::new(class, message) };
        return failed(view, Reported { node, class, cause, report: Revision::NONE, said: now }, lost, advance);
    }
    let next = |charge, evict| {
        Verdict::Form(Form { charge, evict, advance: Some(advance.clone()), ..Form::of(view.round.value.number + 1) })
    };
    change(view, next, lost, reason)
}

/// Members that are lost while the round runs: dead, silent, or never started.
fn losses(now: Time, view: &View, wake: &mut Wake) -> Vec<Eviction> {
    let (roster, number) = (&view.roster, view.round.value.number);
    let mut lost = Evictions::default();
    for node in view.evicted_by_operator().filter(|node| roster.member(node).is_some()) {
        if view.phase_for(node, number) != Some(Phase::Done) {
            lost.add(by_operator(node));
        }
    }
    for node in roster.gone() {
        if view.phase_for(node, number) == Some(Phase::Done) {
            // It did its part, and its record outlives it.
            continue;
        }
        match view.liveness(now, node) {
            Liveness::Lost(fate, reason) => lost.add(eviction(node, fate, reason)),
            Liveness::Missing(at) => wake.at(at),
            Liveness::Alive => {}
        }
    }
    let (silent, next) = view.silent(now);
    for node in silent.into_iter().filter(|node| view.phase_for(node, number) != Some(Phase::Done)) {
        lost.add(eviction(node, Fate::Unknown, "it is silent, though its lease is renewed"));
    }
    next.into_iter().for_each(|at| wake.at(at));
    let start_by = view.since + view.spec.timings.start_timeout;
    let says_started = |says: Says| says.is_some_and(|(of, phase)| of == number && started(Some(phase)));
    let mut starting = roster.saying_not(says_started);
    // mutant a_frozen_starter_is_kept: now >= start_by => false
    if now >= start_by {
        let late = "it did not start its workers in time";
        starting.for_each(|node| lost.add(eviction(node, Fate::Unknown, late)));
    } else if starting.next().is_some() {
        wake.at(start_by);
    }
    lost.list()
}

/// Members that say that they leave, or that their operator drains.
fn leaving(view: &View) -> Vec<&NodeId> {
    let says_so = view.roster.saying(Some((view.round.value.number, Phase::Draining)));
    says_so.chain(view.drained_nodes().filter(|node| is_running(view, node))).collect()
}

fn is_running(view: &View, node: &NodeId) -> bool {
    view.roster.member(node).is_some() && view.phase_for(node, view.round.value.number) == Some(Phase::Running)
}

struct Reported {
    node: NodeId,
    class: FailureClass,
    cause: Failure,
    report: Revision,
    said: Time,
}

/// The root cause among the reports of this round: the strongest class, then the first in order of revisions.
fn strongest_failure(view: &View) -> Option<Reported> {
    let number = view.round.value.number;
    let reports = view.roster.saying(Some((number, Phase::Failed))).filter_map(|node| {
        let present = view.roster.node(node)?;
        Some((node, present, present.record.failure.as_ref()?))
    });
    // mutant weakest_cause: cause.class => cause.class as u32 ^ if ON { 3 } else { 0 }
    let strongest = reports.max_by_key(|(_, present, cause)| (cause.class, std::cmp::Reverse(present.modified)));
    let (node, present, cause) = strongest?;
    let cause = Failure { node: Some(node.clone()), ..cause.clone() };
    let (class, report, said) = (cause.class, present.modified, present.said);
    Some(Reported { node: node.clone(), class, cause, report, said })
}

/// Whether every member has given a sign after `report`: its own failure, its result, or an answer to a later probe.
fn all_answered_since(view: &View, report: Revision) -> bool {
    let number = view.round.value.number;
    let Some((probe, after)) = view.probe else { return false };
    let reported = |node| matches!(view.phase_for(node, number), Some(Phase::Failed | Phase::Done));
    after >= report && view.roster.unanswered(probe).all(reported)
}

/// A change of membership: free of charge unless the policy counts it.
fn change(
    view: &View,
    next: impl Fn(bool, Vec<Eviction>) -> Verdict,
    evict: Vec<Eviction>,
    reason: String,
) -> (Verdict, String) {
    // mutant a_change_is_charged: view.spec.restart_policy == RestartPolicy::All => true
    let charge = view.spec.restart_policy == RestartPolicy::All;
    if charge && view.round.value.restarts >= view.spec.max_restarts {
        let message = format!("{reason}; --restart-policy=all counts it, and no restarts are left");
        let node = evict.first().map(|eviction| eviction.node.clone());
        let cause = Failure { node, ..Failure::new(FailureClass::Lost, message) };
        return (Verdict::Finish { state: RoundState::Failed, cause: Some(cause) }, reason);
    }
    (next(charge, evict), reason)
}

fn growth(
    now: Time,
    view: &View,
    wake: &mut Wake,
    all_running: bool,
    next: impl Fn(bool, Vec<Eviction>) -> Verdict,
) -> (Verdict, String) {
    let excluded = view.excluded_newcomers(now);
    if !excluded.is_empty() {
        // They come as soon as that is over.
        view.faults.excluded(now, &view.desired).for_each(|(_, until)| wake.at(until));
    }
    let (here, size) = (view.roster.count_newcomers() - excluded.len(), view.replica_size());
    // mutant a_part_of_a_replica_joins: here % size => 0
    let newcomers = here - here % size;
    let room = view.max_nodes().saturating_sub(view.roster.size());
    if here == 0 {
        return (Verdict::Wait, "all members running".to_owned());
    }
    if room == 0 {
        return (Verdict::Wait, format!("the round is full: {here} waiting as spare"));
    }
    if newcomers == 0 {
        return (Verdict::Wait, format!("{here} waiting as spare, of {size} that make a replica"));
    }
    if !all_running {
        return (Verdict::Wait, "newcomers wait until the round runs fully".to_owned());
    }
    let finished = |node| view.roster.node(node).is_some_and(|present| present.record.finished);
    if view.roster.members().any(|(node, _)| finished(node)) {
        return (Verdict::Wait, "the training is over, and the workers end: no node is admitted".to_owned());
    }
    let settled = view.since + view.spec.timings.min_round_time;
    let called = if newcomers >= room || view.growth_is_cheap() { None } else { view.last_call(now) };
    let grows = settled.min(view.quick.ready(view.growth_refill()));
    if let Some(until) = called.into_iter().chain((now < grows).then_some(grows)).max() {
        wake.at(until);
        return (Verdict::Wait, format!("{newcomers} newcomers are being gathered"));
    }
    let joining: Vec<&NodeId> =
        view.roster.newcomers().filter(|node| !excluded.contains(node)).take(room.min(newcomers).min(4)).collect();
    let (mut verdict, reason) = change(view, next, Vec::new(), format!("{} joins", names(&joining)));
    if let Verdict::Form(form) = &mut verdict {
        form.quick = now < settled;
    }
    (verdict, reason)
}
