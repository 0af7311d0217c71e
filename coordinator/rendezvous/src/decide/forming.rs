//! Whom a forming round waits for, and when it is sealed.

use std::collections::BTreeSet;

use super::refusals::refusals;
use super::{Eviction, Evictions, Form, PAUSED, Verdict, Wake, by_operator, eviction, names};
use crate::job::{Failure, FailureClass, Fate, NodeId, OnStoreLoss, Phase, RestartPolicy, RoundRecord, RoundState};
use crate::roster::{Says, SealedMember};
use crate::seats::{Candidate, Contest, in_order, seats, staying};
use crate::time::Time;
use crate::view::{Liveness, View};

/// The end of the reason where a new leader made the plan again.
const TAKEN_OVER: &str = " (taken over)";

/// The reason of a round that forms once a paused job is resumed.
const RESUMED: &str = "the operator resumed the job";

/// What the leader does, and why.
type Decided = (Verdict, String);

pub(super) fn forming(now: Time, view: &View, wake: &mut Wake) -> Decided {
    if let Some(replanned) = stale_plan(view) {
        return replanned;
    }
    if let Some(decided) = members_still_there(now, view, wake) {
        return decided;
    }
    if let Some(refusal) = refusals(view) {
        return refusal;
    }
    let (chosen, faulty) = choose(now, view);
    if let Some(decided) = not_yet(now, view, wake, &chosen) {
        return decided;
    }
    let mut reason = view.round.value.reason.clone();
    if !faulty.is_empty() {
        let faulty: Vec<&NodeId> = faulty.into_iter().collect();
        reason = format!("{reason}; {} takes part though excluded: without it there are too few", names(&faulty));
    }
    (Verdict::Seal(seats(view, &sorted(view, &chosen.out))), reason)
}

/// This round once more, with a new plan.
fn replan(view: &View, evict: Vec<Eviction>, afresh: bool) -> Verdict {
    let round = &view.round.value;
    Verdict::Form(Form { evict, afresh, paused: round.paused, ..Form::of(round.number) })
}

/// A new plan, where the present one lacks what members must read in it.
fn stale_plan(view: &View) -> Option<Decided> {
    let round = &view.round.value;
    if view.desired.paused && !round.paused {
        return Some((replan(view, Vec::new(), false), PAUSED.to_owned()));
    }
    // mutant plan_inherited: !view.planned_here => false
    if !view.planned_here {
        // A generation's first record was written by the node that began it, so its first leader always finds one.
        let suffix = if round.sealed.is_some() && !round.begins_generation { TAKEN_OVER } else { "" };
        let reason = round.reason.trim_end_matches(TAKEN_OVER);
        return Some((replan(view, Vec::new(), false), format!("{reason}{suffix}")));
    }
    if view.drained_members().iter().any(|name| !round.leaving.contains(name)) {
        // They are asked only now, since the plan tells them.
        return Some((replan(view, Vec::new(), false), round.reason.clone()));
    }
    None
}

/// What to do while members of the last round have not stopped.
fn members_still_there(now: Time, view: &View, wake: &mut Wake) -> Option<Decided> {
    let (evict, outstanding) = outstanding(now, view, wake);
    // Every node reads each plan, and none is sealed while somebody is waited for. So those that are lost meanwhile, and
    // can do nothing any more, are evicted by one plan, once no one else is waited for: not each by its own.
    let can_wait = |eviction: &Eviction| matches!(eviction.fate, Fate::Dead | Fate::Fenced);
    let gathers = !outstanding.is_empty() && evict.iter().all(can_wait);
    if let Some(first) = evict.first().filter(|_| !gathers) {
        let gone: Vec<&NodeId> = evict.iter().map(|eviction| &eviction.node).collect();
        let reason = reason_without(view, format!("lost {}: {}", names(&gone), first.reason));
        return Some((replan(view, evict, false), reason));
    }
    // mutant nobody_is_waited_for: !outstanding.is_empty() => false
    if !outstanding.is_empty() {
        return Some((Verdict::Wait, format!("waiting for {} to stop", names(&outstanding))));
    }
    None
}

/// Why a round is planned without members of the last one. The end of a former generation's members is no reason.
fn reason_without(view: &View, lost: String) -> String {
    if view.round.value.begins_generation { RoundRecord::BEGINS_AGAIN.to_owned() } else { lost }
}

/// Who gets a place, and which of them are excluded for their failures: they get one where the others are too few.
fn choose(now: Time, view: &View) -> (Candidates<'_>, BTreeSet<&NodeId>) {
    let wants = |node: &&NodeId| waits(view, node) || view.comes(node);
    // Nodes that want a place and get none.
    let mut out: BTreeSet<&NodeId> = view.roster.late().filter(|node| waits(view, node)).collect();
    // mutant an_exclusion_is_not_seen: view.excluded_by_operator() => view.excluded_by_operator().filter(|_| !ON)
    out.extend(view.drained_nodes().chain(view.excluded_by_operator()).filter(wants));
    out.extend(sit_out(view, &out));
    let faulty: BTreeSet<&NodeId> = view.excluded_for_failures(now).filter(wants).collect();
    let without_faulty = candidates(view, out.union(&faulty).copied().collect());
    // mutant the_excluded_always_take_part: without_faulty.here < view.min_nodes() => true
    let needs_faulty = without_faulty.here < view.min_nodes() && !faulty.is_subset(&out);
    // mutant the_excluded_never_take_part: needs_faulty => false
    let chosen = if needs_faulty { candidates(view, out) } else { without_faulty };
    (chosen, if needs_faulty { faulty } else { BTreeSet::new() })
}

/// All that get a place, in the order of their ranks. Nodes come one by one, so they are sorted only once, for the seal.
fn sorted<'a>(view: &'a View, out: &BTreeSet<&'a NodeId>) -> Vec<&'a NodeId> {
    let roster = &view.roster;
    let waiting = Some((view.round.value.number, Phase::Waiting));
    let mut kept: Vec<_> = roster
        .saying(waiting)
        .filter(|node| !out.contains(node))
        // mutant ranks_move: roster.member(node)?.rank.group_rank => u32::MAX - roster.member(node)?.rank.group_rank
        .filter_map(|node| Some((roster.member(node)?.rank.group_rank, node)))
        .collect();
    kept.sort();
    let newcomers = roster.newcomers().filter(|node| !out.contains(node));
    let wanted = |node| roster.node(node).and_then(|present| present.record.place);
    let kept = kept.into_iter().map(|(rank, node)| (Some(rank), node));
    let nodes = kept.chain(newcomers.map(|node| (None, node)));
    let candidates: Vec<_> = nodes.map(|(had, node)| Candidate { node, had, wants: wanted(node) }).collect();
    // mutant newcomers_first: candidates => candidates.into_iter().rev().collect()
    in_order(candidates, view.replica_size(), view.max_nodes())
}

/// Why the round is not sealed yet, or that the job ends.
fn not_yet(now: Time, view: &View, wake: &mut Wake, chosen: &Candidates<'_>) -> Option<Decided> {
    let (round, roster) = (&view.round.value, &view.roster);
    let &Candidates { kept, newcomers, here, ref contest, .. } = chosen;
    let unsafe_until = unsafe_until(view, kept == 0).filter(|(until, _)| now < *until);
    let gone = |(node, member): (&NodeId, &SealedMember)| {
        member.evicted.is_some() || member.left || view.phase_for(node, round.number) == Some(Phase::Stopped)
    };
    if round.sealed.is_some() && here == 0 && unsafe_until.is_none() && roster.members().all(gone) {
        let reason = reason_without(view, "every node of the last round has left".to_owned());
        return Some((replan(view, Vec::new(), true), reason));
    }
    // mutant a_pause_is_over_at_once: view.desired.paused => false
    if view.desired.paused {
        wake.0 = wake.0.into_iter().chain(unsafe_until.map(|(until, _)| until)).min();
        return Some((Verdict::Wait, format!("paused by the operator: {} nodes wait", kept + newcomers)));
    }
    // mutant a_pause_is_over_at_once: round.paused => false
    if round.paused {
        // Only now that no one's workers are still ending: they were given longer than for another round.
        return Some((Verdict::Form(Form::of(round.number)), RESUMED.to_owned()));
    }
    if let Some(problem) = &view.unreadable_checkpoint {
        let message = format!(
            "{problem} So it is not known where training resumes: write the record again, or delete it to begin from nothing; \
             then start the agents again"
        );
        let cause = Failure::new(FailureClass::Lost, message.clone());
        return Some((Verdict::Finish { state: RoundState::Failed, cause: Some(cause) }, message));
    }
    // mutant too_few: view.min_nodes() => 1
    if here < view.min_nodes() {
        let mut reason = format!("{here} of at least {} nodes are here", view.min_nodes());
        if let Some(Contest { place, one, other }) = contest {
            reason = format!("{reason}; node rank {place} is claimed by {one} and by {other}, one of them gone");
        }
        wake.0 = wake.0.into_iter().chain(unsafe_until.map(|(until, _)| until)).min();
        let Some(deadline) = patience_ends(view) else { return Some((Verdict::Wait, reason)) };
        // mutant join_timeout_is_not_seen: now >= deadline => false
        if now >= deadline {
            let message = format!("{reason}, and join_timeout ({:?}) is over", view.spec.timings.join_timeout);
            let cause = Failure::new(FailureClass::Lost, message.clone());
            return Some((Verdict::Finish { state: RoundState::Failed, cause: Some(cause) }, message));
        }
        wake.at(deadline);
        return Some((Verdict::Wait, reason));
    }
    if let Some((until, why)) = unsafe_until {
        wake.at(until);
        return Some((Verdict::Wait, why.to_owned()));
    }
    // A first round of a generation, or one that no one of the last stays for.
    if kept == 0
        && here < view.max_nodes()
        && let Some(until) = view.last_call(now)
    {
        wake.at(until);
        return Some((Verdict::Wait, format!("{here} nodes are here, last call for more")));
    }
    None
}

/// Members that this round goes without: they could start new workers ahead, and so many others stay as members that
/// those need not wait for that. None where each change of membership costs a restart, since there will be one more when
/// they return.
fn sit_out<'a>(view: &'a View, out: &BTreeSet<&NodeId>) -> Vec<&'a NodeId> {
    let lacking: Vec<_> = view.roster.lacking().filter(|node| waits(view, node) && !out.contains(node)).collect();
    if lacking.is_empty() || view.spec.restart_policy == RestartPolicy::All {
        return Vec::new();
    }
    let without: BTreeSet<&NodeId> = out.iter().chain(&lacking).copied().collect();
    let others = match view.replica_size() {
        1 => candidates(view, without).kept,
        size => in_whole_replicas(view, size, &without),
    };
    if others >= view.min_nodes() { lacking } else { Vec::new() }
}

/// How many members there are without some, in replicas that lose no node.
fn in_whole_replicas(view: &View, size: usize, without: &BTreeSet<&NodeId>) -> usize {
    let roster = &view.roster;
    let stay = roster.saying(Some((view.round.value.number, Phase::Waiting))).filter(|node| !without.contains(node));
    let replicas = staying(stay.filter_map(|node| Some(roster.member(node)?.rank.group_rank)), size);
    replicas.into_values().filter(|nodes| *nodes == size).sum()
}

/// Who could be in the round that forms.
struct Candidates<'a> {
    /// Nodes that want a place and get none.
    out: BTreeSet<&'a NodeId>,
    /// How many members of the last round there are besides.
    kept: usize,
    /// How many nodes without a place.
    newcomers: usize,
    /// How many of them all get in.
    here: usize,
    /// Two that claim one place, so that neither gets in.
    contest: Option<Contest<'a>>,
}

/// Counts them. All that are `out` want a place.
fn candidates<'a>(view: &'a View, out: BTreeSet<&'a NodeId>) -> Candidates<'a> {
    let (roster, number) = (&view.roster, view.round.value.number);
    let newcomers_out = out.iter().filter(|node| view.comes(node)).count();
    let kept = roster.count_saying(Some((number, Phase::Waiting))) - (out.len() - newcomers_out);
    let newcomers = roster.count_newcomers() - newcomers_out;
    let (contested, contest) = contest(view, |node| !out.contains(node) && (waits(view, node) || view.comes(node)));
    let here = (kept + newcomers - contested).min(view.max_nodes());
    Candidates { out, kept, newcomers, here, contest }
}

/// Whether a member has stopped its workers, and wants a place in the round that forms.
fn waits(view: &View, node: &NodeId) -> bool {
    view.roster.member(node).is_some() && view.phase_for(node, view.round.value.number) == Some(Phase::Waiting)
}

/// How many candidates claim a place that another one claims too, so that neither gets in, and two of them.
fn contest(view: &View, is_candidate: impl Fn(&NodeId) -> bool) -> (usize, Option<Contest<'_>>) {
    let mut excluded = 0;
    let mut first = None;
    for place in view.roster.contested() {
        let claimants: Vec<&NodeId> = view.roster.claiming(place).filter(|node| is_candidate(node)).collect();
        if let [one, other, ..] = claimants[..] {
            excluded += claimants.len();
            first = first.or(Some(Contest { place, one, other }));
        }
    }
    (excluded, first)
}

/// When a job below its minimum has failed: `join_timeout` after it fell below. Where every node has left, or none was
/// ever there, no one waits, and the time counts from the first that comes.
fn patience_ends(view: &View) -> Option<Time> {
    let timings = &view.spec.timings;
    let since = view.begun.unwrap_or(view.since);
    let since = match view.round.value.sealed {
        Some(_) => since,
        None => view.roster.arrivals()?.0.max(since),
    };
    // A new leader does not begin the wait again, but hears first who is there.
    Some((since + timings.join_timeout).max(view.since + timings.join_timeout.min(timings.lease_ttl * 3)))
}

/// Members of the last round that have not said they stopped: those to evict now, and those to wait for.
fn outstanding<'a>(now: Time, view: &'a View, wake: &mut Wake) -> (Vec<Eviction>, Vec<&'a NodeId>) {
    let (roster, number) = (&view.roster, view.round.value.number);
    let mut evict = Evictions::default();
    for node in view.evicted_by_operator().filter(|node| roster.member(node).is_some()) {
        evict.add(by_operator(node));
    }
    let mut outstanding = Vec::new();
    let too_late = "it did not stop in time";
    let answer_by = |node| {
        let grace = roster.member(node).map(|member| view.grace(node, member)).unwrap_or_default();
        view.since + grace + view.spec.timings.margin
    };
    for node in roster.missing() {
        match view.liveness(now, node) {
            Liveness::Lost(fate, reason) => evict.add(eviction(node, fate, reason)),
            Liveness::Missing(at) if now < answer_by(node) => {
                wake.at(at.min(answer_by(node)));
                outstanding.push(node);
            }
            Liveness::Missing(_) => evict.add(eviction(node, Fate::Unknown, too_late)),
            Liveness::Alive => {}
        }
    }
    let stopped = |says: Says| matches!(says, Some((of, Phase::Waiting | Phase::Stopped)) if of == number);
    let mut silent = roster.saying_not(stopped).peekable();
    let timings = &view.spec.timings;
    let soonest = view.since + timings.stop_grace.min(timings.drain_grace) + timings.margin;
    if now < soonest {
        // No one's time is over yet. It is enough to name a few.
        if silent.peek().is_some() {
            wake.at(soonest);
        }
        outstanding.extend(silent.take(4));
    } else {
        for node in silent {
            if now < answer_by(node) {
                wake.at(answer_by(node));
                outstanding.push(node);
            } else {
                evict.add(eviction(node, Fate::Unknown, too_late));
            }
        }
    }
    (evict.list(), outstanding)
}

/// Until when a running round would be unsafe: an evicted member may still be at work, or, where no one stays, a whole
/// group cut off from the store may be.
fn unsafe_until(view: &View, keeps_nobody: bool) -> Option<(Time, &'static str)> {
    let timings = &view.spec.timings;
    let unsettled = view.roster.last_unsettled().map(|evicted| {
        let until = view.counting_or_bound().max(evicted) + timings.lease_ttl;
        (until, "waiting until an evicted node is past its fence point")
    });
    let number = view.round.value.number;
    let stopped = |says: Says| matches!(says, Some((of, Phase::Waiting | Phase::Stopped)) if of == number);
    // mutant takeover_at_once: keeps_nobody => false
    let takes_over = keeps_nobody && view.spec.on_store_loss == OnStoreLoss::Wait;
    let takeover = takes_over.then(|| view.roster.last_doubtful(stopped)).flatten().map(|evicted| {
        let until = evicted.unwrap_or(view.elected) + timings.takeover_delay;
        (until, "waiting out takeover_delay: no member of the last round stays")
    });
    unsettled.into_iter().chain(takeover).max_by_key(|(at, _)| *at)
}
