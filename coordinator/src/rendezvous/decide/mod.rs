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
//! | `running` | whether the round that runs goes on: failures, losses, leaves, growth |
//! | `forming` | who is waited for, and when the round that forms is sealed |
//! | `refusals` | nodes that may not take part |

mod forming;
mod refusals;
mod running;

use super::seats::Seat;
use super::view::View;
use crate::job::{Advance, Failure, Fate, NodeId, Phase, RoundState};
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
    /// Whether the job's restarts get it any further, where that is known anew.
    pub advance: Option<Advance>,
    /// Who is evicted with it.
    pub evict: Vec<Eviction>,
    /// All members of the last round have left, so no later leader needs to look for them.
    pub afresh: bool,
    /// It ends a round, for growth, before that round is `min_round_time` old.
    pub quick: bool,
    /// Names of members that sit it out until their new workers are warm.
    pub returning: Vec<String>,
    /// Whether the operator has paused the job: members stop their workers, and it is not sealed.
    pub paused: bool,
}

impl Form {
    /// This round, at no cost, with every node of the last.
    fn of(number: u64) -> Form {
        Form {
            number,
            charge: false,
            advance: None,
            evict: Vec::new(),
            afresh: false,
            quick: false,
            returning: Vec::new(),
            paused: false,
        }
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
    let (mut verdict, reason) = match view.round.value.state {
        state if state.is_final() => (Verdict::Wait, format!("the job has {state}")),
        _ if view.desired.closed => {
            (Verdict::Finish { state: RoundState::Closed, cause: None }, "the operator closed the job".to_owned())
        }
        _ if let Some(damage) = view.damage() => (Verdict::Wait, damage),
        RoundState::Running => running::running(now, view, &mut wake),
        _ => forming::forming(now, view, &mut wake),
    };
    if let Verdict::Form(form) = &mut verdict {
        form.paused |= view.desired.paused;
        if !form.paused {
            form.returning = view.returning(|node| form.evict.iter().any(|eviction| eviction.node == *node));
        }
    }
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

/// Whether a member has said that it started its workers.
pub(super) fn started(phase: Option<Phase>) -> bool {
    matches!(phase, Some(Phase::Running | Phase::Draining | Phase::Failed | Phase::Done))
}

fn eviction(node: &NodeId, fate: Fate, reason: &str) -> Eviction {
    Eviction { node: node.clone(), fate, refused: false, drained: false, reason: reason.to_owned() }
}
