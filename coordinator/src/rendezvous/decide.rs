//! What the leader does next: a pure function of what it knows and of the time. Not for carrying it out.
//!
//! ```text
//!            a member failed, was lost, drains; newcomers fit
//!   running n ──────────────────────────────────────────────▶ forming n+1 ◀─┐ found by a new leader,
//!      ▲  │ all done / budget spent / closed                    │   │       │ a member lost: a new plan
//!      │  └────────────▶ succeeded, failed, closed ◀────────────┘   └───────┘
//!      └───────────── every member of n is accounted for: seal ─────┘
//! ```

use std::collections::BTreeSet;
use std::time::Duration;

use super::roster::{Present, Says, SealedMember};
use super::seats::{Contest, Seat, in_order, seats};
use super::view::{Liveness, View};
use crate::job::{Failure, FailureClass, Fate, NodeId, OnStoreLoss, Phase, RestartPolicy, RoundState};
use crate::store::Revision;
use crate::time::Time;

/// The leader's next move, with a sentence for the log and the dashboard.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Decision {
    /// The move.
    pub verdict: Verdict,
    /// Why this one.
    pub reason: String,
    /// When to decide again even if nothing happens.
    pub again: Option<Time>,
}

/// Moves of a leader.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    /// Nothing to do yet.
    Wait,
    /// Ask every member for a pulse: a failure that blames a peer is judged when all have answered.
    Probe {
        /// The report that is to be judged.
        report: Revision,
    },
    /// Write the round as forming: the next one, or this one anew with a new plan.
    Form(Form),
    /// Write the rank keys, then the round as running.
    Seal(Vec<Seat>),
    /// Write the job's result.
    Finish {
        /// A final state.
        state: RoundState,
        /// The root cause of a failure.
        cause: Option<Failure>,
    },
    /// Turn away nodes that may not take part.
    Refuse(Vec<Eviction>),
    /// Delete the keys of rounds that are over.
    Prune(Vec<u64>),
}

/// A round to be formed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Form {
    /// Its number.
    pub number: u64,
    /// Whether it costs a restart.
    pub charge: bool,
    /// Who is evicted with it.
    pub evict: Vec<Eviction>,
    /// All of the last round have left: no later leader need look for them.
    pub afresh: bool,
    /// It ends a round for growth before that is `min_round_time` old.
    pub quick: bool,
}

/// A node to be evicted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Eviction {
    /// The node.
    pub node: NodeId,
    /// What is known of its workers.
    pub fate: Fate,
    /// Whether its agent must end.
    pub refused: bool,
    /// Whether it ends as one that left as planned.
    pub drained: bool,
    /// Why, for people.
    pub reason: String,
}

/// Most evictions of one transaction: each takes two operations, and etcd allows 128 in all.
pub const MOST_EVICTIONS: usize = 50;

/// Whoever stops a node's processes all at once signals one after the other. For so long after a worker was ended by a
/// signal that asks it to stop, its agent may be told to leave too: then it was no failure.
const TOLD_TOO: Duration = Duration::from_millis(300);

/// Why the first round of a generation forms that follows another.
pub(crate) const BEGINS_ANEW: &str = "the job begins anew";

/// Ends the reason of a plan that a new leader made anew.
const TAKEN_OVER: &str = " (taken over)";

/// Collects when to look again.
#[derive(Default)]
struct Wake(Option<Time>);

impl Wake {
    fn at(&mut self, time: Time) {
        self.0 = Some(self.0.map_or(time, |old| old.min(time)));
    }
}

/// Decides the leader's next move.
///
/// It may be called at any time and as often as one likes: it changes nothing, and an early call says [`Verdict::Wait`].
pub fn decide(now: Time, view: &View) -> Decision {
    let mut wake = Wake::default();
    let (verdict, reason) = match view.round.value.state {
        state if state.is_final() => (Verdict::Wait, format!("the job has {state}")),
        _ if view.desired.closed => {
            (Verdict::Finish { state: RoundState::Closed, cause: None }, "the operator closed the job".to_owned())
        }
        _ if let Some(damage) = view.damage() => (Verdict::Wait, damage),
        RoundState::Running => running(now, view, &mut wake),
        _ => forming(now, view, &mut wake),
    };
    let again = if matches!(verdict, Verdict::Wait | Verdict::Probe { .. }) { wake.0 } else { None };
    Decision { verdict, reason, again }
}

fn names(nodes: &[&NodeId]) -> String {
    let mut names: Vec<&str> = nodes.iter().take(3).map(|node| node.name()).collect();
    if nodes.len() > 3 {
        names.push("…");
    }
    names.join(", ")
}

/// Members that are lost while the round runs: dead, silent, or never started.
fn losses(now: Time, view: &View, wake: &mut Wake) -> Vec<Eviction> {
    let (roster, number) = (&view.roster, view.round.value.number);
    let mut lost = Vec::new();
    for node in roster.gone() {
        if view.phase_for(node, number) == Some(Phase::Done) {
            // It did its part, and its record outlives it.
            continue;
        }
        match view.liveness(now, node) {
            Liveness::Lost(fate, reason) => lost.push(eviction(node, fate, reason)),
            Liveness::Missing(at) => wake.at(at),
            Liveness::Alive => {}
        }
    }
    let start_by = view.since + view.spec.timings.start_timeout;
    let says_started = |says: Says| says.is_some_and(|(of, phase)| of == number && started(Some(phase)));
    let mut starting = roster.saying_not(says_started);
    if now >= start_by {
        let late = "it did not start its workers in time";
        lost.extend(starting.map(|node| eviction(node, Fate::Unknown, late)));
    } else if starting.next().is_some() {
        wake.at(start_by);
    }
    lost
}

/// Whether a member has said that it started its workers.
pub(super) fn started(phase: Option<Phase>) -> bool {
    matches!(phase, Some(Phase::Running | Phase::Draining | Phase::Failed | Phase::Done))
}

fn eviction(node: &NodeId, fate: Fate, reason: &str) -> Eviction {
    Eviction { node: node.clone(), fate, refused: false, drained: false, reason: reason.to_owned() }
}

/// Turns a node away that has no place. That it has none is as the leader sees it: its tombstone proves nothing about
/// workers to a later leader that finds it to be a member.
fn refusal(node: &NodeId, reason: &str) -> Eviction {
    Eviction { refused: true, ..eviction(node, Fate::Unknown, reason) }
}

fn running(now: Time, view: &View, wake: &mut Wake) -> (Verdict, String) {
    let round = &view.round.value;
    let next =
        |charge, evict| Verdict::Form(Form { number: round.number + 1, charge, evict, afresh: false, quick: false });
    let budget_left = round.restarts < view.spec.max_restarts;
    let lost = losses(now, view, wake);
    let leaving = leaving(view);

    if let Some(failure) = strongest_failure(view) {
        let judged_at = failure.said + TOLD_TOO;
        if failure.class == FailureClass::Signalled && now < judged_at {
            wake.at(judged_at);
            let story = format!("{}: {}", failure.node.name(), failure.cause.message);
            return (Verdict::Wait, format!("{story}; waiting for whether its agent is told to leave"));
        }
        let blames_peer = failure.class == FailureClass::Peer;
        // What takes a node away breaks the connections of those that stay.
        let explained = !lost.is_empty() || !leaving.is_empty();
        // Who lives, but does not reach this leader, never answers: one lease is time enough for everybody else.
        let answer_by = failure.said + view.spec.timings.lease_ttl;
        let unjudged = blames_peer && !explained && now < answer_by && !all_answered_since(view, failure.report);
        if unjudged {
            wake.at(answer_by);
            let asked = view.probe.is_some_and(|(_, report)| report >= failure.report);
            let verdict = if asked { Verdict::Wait } else { Verdict::Probe { report: failure.report } };
            return (verdict, format!("{} blames a peer: waiting for every member's word", failure.node.name()));
        }
        let membership = failure.class == FailureClass::Lost || (blames_peer && explained);
        if !membership {
            let story = format!("{}: {}", failure.node.name(), failure.cause.message);
            return if budget_left {
                let left = view.spec.max_restarts - round.restarts - 1;
                (next(true, lost), format!("{story}; restarting, {left} restarts left"))
            } else {
                let verdict = Verdict::Finish { state: RoundState::Failed, cause: Some(failure.cause) };
                (verdict, format!("{story}; no restarts left of {}", view.spec.max_restarts))
            };
        }
        if !explained {
            return change(view, next, Vec::new(), format!("{}: {}", failure.node.name(), failure.cause.message));
        }
    }
    if let Some(first) = lost.first() {
        let gone: Vec<&NodeId> = lost.iter().map(|eviction| &eviction.node).collect();
        let reason = format!("lost {}: {}", names(&gone), first.reason);
        return change(view, next, lost, reason);
    }

    let all_say = |phase| view.roster.count_saying(Some((round.number, phase))) == view.roster.size();
    if all_say(Phase::Done) {
        return (Verdict::Finish { state: RoundState::Succeeded, cause: None }, "every member is done".to_owned());
    }
    if !leaving.is_empty() {
        let reason = format!("{} leaves", names(&leaving));
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
    if all_running && !view.stale_rounds.is_empty() {
        return (Verdict::Prune(view.stale_rounds.iter().copied().collect()), "the round runs fully".to_owned());
    }
    growth(now, view, wake, all_running, next)
}

/// Members that say that they leave, or that their operator drains.
fn leaving(view: &View) -> Vec<&NodeId> {
    let (roster, number) = (&view.roster, view.round.value.number);
    let runs = |node: &&NodeId| roster.member(node).is_some() && view.phase_for(node, number) == Some(Phase::Running);
    roster.saying(Some((number, Phase::Draining))).chain(view.drained_nodes().filter(runs)).collect()
}

/// A change of membership: free of charge unless the policy counts it.
fn change(
    view: &View,
    next: impl Fn(bool, Vec<Eviction>) -> Verdict,
    evict: Vec<Eviction>,
    reason: String,
) -> (Verdict, String) {
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
    let newcomers = view.roster.count_newcomers();
    let room = view.max_nodes().saturating_sub(view.roster.size());
    if newcomers == 0 {
        return (Verdict::Wait, "all is well".to_owned());
    }
    if room == 0 {
        return (Verdict::Wait, format!("the round is full: {newcomers} waiting as spare"));
    }
    if !all_running {
        return (Verdict::Wait, "newcomers wait until the round runs fully".to_owned());
    }
    let settled = view.since + view.spec.timings.min_round_time;
    let called = if newcomers >= room { None } else { view.last_call(now) };
    let grows = settled.min(view.quick.ready());
    if let Some(until) = called.into_iter().chain((now < grows).then_some(grows)).max() {
        wake.at(until);
        return (Verdict::Wait, format!("{newcomers} newcomers are being gathered"));
    }
    let joining: Vec<&NodeId> = view.roster.newcomers().take(room.min(4)).collect();
    let (mut verdict, reason) = change(view, next, Vec::new(), format!("{} joins", names(&joining)));
    if let Verdict::Form(form) = &mut verdict {
        form.quick = now < settled;
    }
    (verdict, reason)
}

/// Nodes that may not take part.
fn refusals(view: &View) -> Option<(Verdict, String)> {
    dismissals(view).or_else(|| clashes(view)).or_else(|| contested_places(view))
}

/// Nodes that the operator drains end once they have no place: none to keep, and none to get.
fn dismissals(view: &View) -> Option<(Verdict, String)> {
    let drained: Vec<&NodeId> = view.drained_newcomers().take(MOST_EVICTIONS).collect();
    if drained.is_empty() {
        return None;
    }
    let reason = "the operator drains this node: `elasticctl undrain` lets it take part again";
    let evictions = drained.iter().map(|node| Eviction { drained: true, ..refusal(node, reason) });
    Some((Verdict::Refuse(evictions.collect()), format!("{} has left: drained by the operator", names(&drained))))
}

/// Nodes that claim a node rank which another node has.
fn contested_places(view: &View) -> Option<(Verdict, String)> {
    let roster = &view.roster;
    let claimants = roster.contested().iter().flat_map(|place| roster.claiming(*place));
    let (node, holder, place) = latecomers(view, claimants).into_iter().find_map(|(node, present)| {
        let record = &present.record;
        let place = record.place?;
        let holds = |other: &&NodeId| {
            roster.node(other).is_some_and(|holder| {
                let same = holder.record.name == record.name && holder.record.machine == record.machine;
                holder.created < present.created && !same && !view.confirmed_dead(other)
            })
        };
        let holder = roster.claiming(place).filter(|other| *other != node).find(holds)?;
        Some((node, &roster.node(holder)?.record, place))
    })?;
    let reason = format!(
        "node rank {place} is claimed by {} on {} and by {}: give each node its own --node-rank",
        holder.name,
        holder.host,
        node.name()
    );
    Some((Verdict::Refuse(vec![refusal(node, &reason)]), reason))
}

/// Nodes that bear another machine's node name: two machines would pass for one.
fn clashes(view: &View) -> Option<(Verdict, String)> {
    let roster = &view.roster;
    let bearers = roster.shared_names().iter().flat_map(|name| roster.named(name));
    let (node, holder) = latecomers(view, bearers).into_iter().find_map(|(node, present)| {
        let record = &present.record;
        let bears = |other: &&NodeId| {
            roster.node(other).is_some_and(|holder| {
                let other_machine = holder.record.name == record.name && holder.record.machine != record.machine;
                holder.created < present.created && other_machine && !view.confirmed_dead(other)
            })
        };
        let holder = roster.named(&record.name).filter(|other| *other != node).find(bears)?;
        Some((node, &roster.node(holder)?.record))
    })?;
    let reason =
        format!("the node name {} is taken by {}: give each node its own --node-name", holder.name, holder.host);
    Some((Verdict::Refuse(vec![refusal(node, &reason)]), reason))
}

/// Those of `nodes` that are newcomers, in the order in which they came.
fn latecomers<'a>(view: &'a View, nodes: impl Iterator<Item = &'a NodeId>) -> Vec<(&'a NodeId, &'a Present)> {
    let newcomers = nodes.filter(|node| view.roster.is_placeless(node) && !view.confirmed_dead(node));
    let mut newcomers: Vec<_> = newcomers.filter_map(|node| Some((node, view.roster.node(node)?))).collect();
    newcomers.sort_by_key(|(node, present)| (present.created, *node));
    newcomers
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
    view.roster
        .saying(Some((number, Phase::Failed)))
        .filter_map(|node| {
            let present = view.roster.node(node)?;
            let mut cause = present.record.failure.clone()?;
            cause.node = Some(node.clone());
            let (class, report, said) = (cause.class, present.modified, present.said);
            Some(Reported { node: node.clone(), class, cause, report, said })
        })
        .max_by_key(|reported| (reported.class, std::cmp::Reverse(reported.report)))
}

/// Whether every member has given a sign after `report`: its own failure, its result, or an answer to a later probe.
fn all_answered_since(view: &View, report: Revision) -> bool {
    let number = view.round.value.number;
    let Some((probe, after)) = view.probe else { return false };
    let reported = |node| matches!(view.phase_for(node, number), Some(Phase::Failed | Phase::Done));
    after >= report && view.roster.unanswered(probe).all(reported)
}

fn forming(now: Time, view: &View, wake: &mut Wake) -> (Verdict, String) {
    let round = &view.round.value;
    let anew = |evict, afresh| Verdict::Form(Form { number: round.number, charge: false, evict, afresh, quick: false });
    // Whom it waits for then are the members of a generation that is over: their loss is no reason of this one.
    let fresh = round.reason == BEGINS_ANEW;
    if !view.planned_here {
        // Every first leader finds a generation's first record, written by whoever began it.
        let suffix = if round.sealed.is_some() && !fresh { TAKEN_OVER } else { "" };
        let reason = round.reason.trim_end_matches(TAKEN_OVER);
        return (anew(Vec::new(), false), format!("{reason}{suffix}"));
    }
    if view.drained_members().iter().any(|name| !round.leaving.contains(name)) {
        // Asked only now: the plan tells them.
        return (anew(Vec::new(), false), round.reason.clone());
    }
    let (evict, outstanding) = outstanding(now, view, wake);
    if let Some(first) = evict.first() {
        let gone: Vec<&NodeId> = evict.iter().map(|eviction| &eviction.node).collect();
        let lost = || format!("lost {}: {}", names(&gone), first.reason);
        let reason = if fresh { BEGINS_ANEW.to_owned() } else { lost() };
        return (anew(evict, false), reason);
    }
    if !outstanding.is_empty() {
        return (Verdict::Wait, format!("waiting for {} to stop", names(&outstanding)));
    }
    if let Some(refusal) = refusals(view) {
        return refusal;
    }

    let roster = &view.roster;
    let waiting = Some((round.number, Phase::Waiting));
    let waits =
        |node: &&NodeId| roster.member(node).is_some() && view.phase_for(node, round.number) == Some(Phase::Waiting);
    // Who waits for the round, but is not to have a place in it.
    let unkept: BTreeSet<&NodeId> = roster.late().chain(view.drained_nodes()).filter(waits).collect();
    let kept = roster.count_saying(waiting) - unkept.len();
    let newcomers = roster.count_newcomers();
    let comes = |node: &NodeId| roster.is_placeless(node) && !view.confirmed_dead(node);
    let stays = |node: &NodeId| waits(&node) && !unkept.contains(node);
    let (excluded, contest) = contest(view, |node| comes(node) || stays(node));
    let here = (kept + newcomers - excluded).min(view.max_nodes());
    // In order only when they are needed: nodes come one by one.
    let in_order = || {
        let mut kept: Vec<_> = roster
            .saying(waiting)
            .filter(|node| !unkept.contains(node))
            .filter_map(|node| Some((roster.member(node)?.rank.group_rank, node)))
            .collect();
        kept.sort();
        let candidates = kept.into_iter().map(|(_, node)| node).chain(roster.newcomers());
        let wanted = |node| roster.node(node).and_then(|present| present.record.place);
        in_order(candidates.map(|node| (node, wanted(node))).collect(), view.max_nodes())
    };

    let unsafe_until = unsafe_until(view, kept == 0).filter(|(until, _)| now < *until);
    let gone = |(node, member): (&NodeId, &SealedMember)| {
        member.evicted.is_some() || member.left || view.phase_for(node, round.number) == Some(Phase::Stopped)
    };
    if round.sealed.is_some() && here == 0 && unsafe_until.is_none() && roster.members().all(gone) {
        return (anew(Vec::new(), true), "every node of the last round has left".to_owned());
    }
    if here < view.min_nodes() {
        let mut reason = format!("{here} of at least {} nodes are here", view.min_nodes());
        if let Some(Contest { place, one, other }) = contest {
            reason = format!("{reason}; node rank {place} is claimed by {one} and by {other}, one of them gone");
        }
        wake.0 = wake.0.into_iter().chain(unsafe_until.map(|(until, _)| until)).min();
        let Some(deadline) = patience_ends(view) else { return (Verdict::Wait, reason) };
        if now >= deadline {
            let message = format!("{reason}, and join_timeout ({:?}) is over", view.spec.timings.join_timeout);
            let cause = Failure::new(FailureClass::Lost, message.clone());
            return (Verdict::Finish { state: RoundState::Failed, cause: Some(cause) }, message);
        }
        wake.at(deadline);
        return (Verdict::Wait, reason);
    }
    if let Some((until, why)) = unsafe_until {
        wake.at(until);
        return (Verdict::Wait, why.to_owned());
    }
    // A first round of a generation, or one that nobody of the last stays for.
    if kept == 0
        && here < view.max_nodes()
        && let Some(until) = view.last_call(now)
    {
        wake.at(until);
        return (Verdict::Wait, format!("{here} nodes are here, last call for more"));
    }
    (Verdict::Seal(seats(view, &in_order())), round.reason.clone())
}

/// How many candidates claim a place that another one claims too, so that neither gets in, and two of them.
fn contest(view: &View, is_candidate: impl Fn(&NodeId) -> bool) -> (usize, Option<Contest<'_>>) {
    let mut excluded = 0;
    let mut first = None;
    for place in view.roster.contested() {
        let claimants: Vec<&NodeId> = view.roster.claiming(*place).filter(|node| is_candidate(node)).collect();
        if let [one, other, ..] = claimants[..] {
            excluded += claimants.len();
            first = first.or(Some(Contest { place: *place, one, other }));
        }
    }
    (excluded, first)
}

/// When a job below its minimum has failed: `join_timeout` after it came to that. Where every node has left, or none was
/// ever there, nobody waits, and the time counts from the first that comes.
fn patience_ends(view: &View) -> Option<Time> {
    let since = match view.round.value.sealed {
        Some(_) => view.since,
        None => view.roster.arrivals()?.0.max(view.since),
    };
    Some(since + view.spec.timings.join_timeout)
}

/// Members of the last round that have not said they stopped: those to evict now, and those to wait for.
fn outstanding<'a>(now: Time, view: &'a View, wake: &mut Wake) -> (Vec<Eviction>, Vec<&'a NodeId>) {
    let (roster, number) = (&view.roster, view.round.value.number);
    let mut evict = Vec::new();
    let mut outstanding = Vec::new();
    let too_late = "it did not stop in time";
    let answer_by = |node| {
        let grace = roster.member(node).map(|member| view.grace(node, member)).unwrap_or_default();
        view.since + grace + view.spec.timings.margin
    };
    for node in roster.missing() {
        match view.liveness(now, node) {
            Liveness::Lost(fate, reason) => evict.push(eviction(node, fate, reason)),
            Liveness::Missing(at) if now < answer_by(node) => {
                wake.at(at.min(answer_by(node)));
                outstanding.push(node);
            }
            Liveness::Missing(_) => evict.push(eviction(node, Fate::Unknown, too_late)),
            Liveness::Alive => {}
        }
    }
    let stopped = |says: Says| matches!(says, Some((of, Phase::Waiting | Phase::Stopped)) if of == number);
    let mut silent = roster.saying_not(stopped).peekable();
    let timings = &view.spec.timings;
    let soonest = view.since + timings.stop_grace.min(timings.drain_grace) + timings.margin;
    if now < soonest {
        // Nobody's time is over yet: a few are enough to name.
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
                evict.push(eviction(node, Fate::Unknown, too_late));
            }
        }
    }
    (evict, outstanding)
}

/// Until when a running round would be unsafe: an evicted member may still be at work, or, where nobody stays, a whole
/// group cut off from the store may be.
fn unsafe_until(view: &View, keeps_nobody: bool) -> Option<(Time, &'static str)> {
    let timings = &view.spec.timings;
    let unsettled = view.roster.last_unsettled().map(|evicted| {
        let until = view.counting_or_bound().max(evicted) + timings.lease_ttl;
        (until, "waiting until an evicted node is past its fence point")
    });
    let number = view.round.value.number;
    let stopped = |says: Says| matches!(says, Some((of, Phase::Waiting | Phase::Stopped)) if of == number);
    let takes_over = keeps_nobody && view.spec.on_store_loss == OnStoreLoss::Wait;
    let takeover = takes_over.then(|| view.roster.last_doubtful(stopped)).flatten().map(|evicted| {
        let until = evicted.unwrap_or(view.elected) + timings.takeover_delay;
        (until, "waiting out takeover_delay: no member of the last round stays")
    });
    unsettled.into_iter().chain(takeover).max_by_key(|(at, _)| *at)
}
