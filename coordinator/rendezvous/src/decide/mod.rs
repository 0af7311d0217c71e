//! What the leader does next: a pure function of what it knows and of the time.
//!
//! ```text
//!            a member failed, was lost, drains; newcomers fit;
//!            the job is paused
//!   running n ──────────────────────────────────────────────▶ forming n+1 ◀─┐ found by a new leader,
//!      ▲  │ all done / budget spent / closed                    │   │       │ a member lost, the job is paused
//!      │  └────────────▶ succeeded, failed, closed ◀────────────┘   └───────┘ or resumed: a new plan
//!      └───── every member of n is accounted for, not paused: seal ─┘
//! ```
//!
//! | module | what it is |
//! |---|---|
//! | `running` | whether the round that runs continues: failures, losses, leaves, growth |
//! | `forming` | who is waited for, and when the round that forms is sealed |
//! | `refusals` | nodes that may not take part |

mod forming;
mod refusals;
mod running;

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};

use super::exclusion;
use super::roster::SealedMember;
use super::seats::Seat;
use super::view::View;
use crate::job::{Advance, Failure, Fate, Faults, NodeId, Phase, RoundState};
use crate::kv::Revision;
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
    /// Write the round as forming: the next one, or this one again with a new plan.
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
    /// Delete keys that no one needs any more.
    Prune(Stale),
}

/// Keys that no one needs any more.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Stale {
    /// Rounds that are over.
    pub rounds: Vec<u64>,
    /// Nodes that were evicted long ago.
    pub tombstones: Vec<NodeId>,
}

/// A round to be formed.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Form {
    /// Its number.
    pub number: u64,
    /// Whether it costs a restart.
    pub charge: bool,
    /// Whether the job's restarts get it any further, where that is known again.
    pub advance: Option<Advance>,
    /// The node by whose workers the last round failed, where that counts.
    pub failed: Option<NodeId>,
    /// What is held against nodes from now on.
    pub faults: Vec<Faults>,
    /// Who is evicted with it.
    pub evict: Vec<Eviction>,
    /// All members of the last round have left, so no later leader needs to look for them.
    pub afresh: bool,
    /// It ends a round, for growth, before that round is `min_round_time` old.
    pub quick: bool,
    /// Whether the operator has paused the job: members stop their workers, and it is not sealed.
    pub paused: bool,
}

impl Form {
    /// This round, at no cost, with every node of the last.
    fn of(number: u64) -> Form {
        Form { number, ..Form::default() }
    }
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

/// The reason of a round that forms as the operator pauses the job.
const PAUSED: &str = "the operator paused the job";

/// Most evictions of one transaction: each takes two operations, and etcd allows 128 in all.
pub const MOST_EVICTIONS: usize = 50;

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
    let (mut verdict, mut reason) = match view.round.value.state {
        state if state.is_final() => (Verdict::Wait, format!("the job has {state}")),
        _ if view.desired.closed => {
            (Verdict::Finish { state: RoundState::Closed, cause: None }, "the operator closed the job".to_owned())
        }
        _ if let Some(damage) = view.damage() => (Verdict::Wait, damage),
        RoundState::Running => running::running(now, view, &mut wake),
        _ => forming::forming(now, view, &mut wake),
    };
    if let Verdict::Form(form) = &mut verdict {
        form.faults = view.faults.to_write(now, &view.desired);
        if let Some(excluded) = blame(now, view, form) {
            reason = format!("{reason}; {excluded}");
        }
        // mutant a_resume_is_not_seen: view.desired.paused => view.desired.paused || view.round.value.paused
        form.paused |= view.desired.paused;
    }
    let again = if matches!(verdict, Verdict::Wait | Verdict::Probe { .. }) { wake.0 } else { None };
    Decision { verdict, reason, again }
}

/// Counts the failure that a round is formed for against its node; the sentence that tells of an exclusion.
fn blame(now: Time, view: &View, form: &mut Form) -> Option<String> {
    let failed = form.failed.clone()?;
    let limit = view.spec.exclude_after;
    let evicted = |node: &NodeId| form.evict.iter().any(|eviction| eviction.node == *node);
    let due = exclusion::is_due(&form.faults, failed.name(), limit)
        && enough(now, view, |node| node.name() == failed.name() || evicted(node));
    exclusion::count(&mut form.faults, failed.name(), form.number, due);
    let faults = form.faults.iter().find(|faults| due && faults.node == failed.name())?;
    let times = if limit == 1 { String::new() } else { format!(" {limit} times") };
    Some(format!("{faults}, since it failed{times}"))
}

/// Whether enough nodes are there without some of them.
fn enough(now: Time, view: &View, without: impl Fn(&NodeId) -> bool) -> bool {
    let out: BTreeSet<&NodeId> =
        view.drained_nodes().chain(view.excluded_by_operator()).chain(view.excluded_for_failures(now)).collect();
    let stays = |(node, member): &(&NodeId, &SealedMember)| {
        member.evicted.is_none() && member.absent.is_none() && !member.left && !view.confirmed_dead(node)
    };
    let members = view.roster.members().filter(stays).map(|(node, _)| node);
    let here = members.chain(view.roster.newcomers()).filter(|node| !out.contains(node) && !without(node));
    here.take(view.min_nodes()).count() == view.min_nodes()
}

fn names(nodes: &[&NodeId]) -> String {
    let mut names: Vec<&str> = nodes.iter().take(3).map(|node| node.name()).collect();
    if nodes.len() > 3 {
        names.push("…");
    }
    names.join(", ")
}

/// Whether a member has said that it started its workers.
pub(super) fn started(phase: Option<Phase>) -> bool {
    matches!(phase, Some(Phase::Running | Phase::Draining | Phase::Failed | Phase::Done))
}

/// A node that the operator evicts: its agent must end, and nothing is known of its workers.
fn by_operator(node: &NodeId) -> Eviction {
    let reason = "the operator evicted this node: start its agent again if it may take part";
    Eviction { refused: true, ..eviction(node, Fate::Unknown, reason) }
}

/// Evictions by node. etcd takes no transaction that writes one key twice, and a node can be out for several reasons.
#[derive(Default)]
struct Evictions(BTreeMap<NodeId, Eviction>);

impl Evictions {
    /// The first reason stays. What is known best of the workers counts, and whether the agent must end.
    fn add(&mut self, new: Eviction) {
        match self.0.entry(new.node.clone()) {
            Entry::Vacant(free) => drop(free.insert(new)),
            Entry::Occupied(mut known) => {
                let known = known.get_mut();
                known.fate = known.fate.max(new.fate);
                known.refused |= new.refused;
            }
        }
    }

    fn list(self) -> Vec<Eviction> {
        self.0.into_values().collect()
    }
}

fn eviction(node: &NodeId, fate: Fate, reason: &str) -> Eviction {
    Eviction { node: node.clone(), fate, refused: false, drained: false, reason: reason.to_owned() }
}
