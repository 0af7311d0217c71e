//! What a node is doing, one state after the other:
//!
//! ```text
//!   waiting ──▶ forming ──▶ starting ──▶ running ──▶ forming …
//! ```
//!
//! [`Stages`] follows the states, purely: it is shown the round and the workers whenever one of both changes, and says
//! how long a rendezvous and a recovery took.

use std::time::Duration;

use elastic_node::Status;
use elastic_rendezvous::job::{RoundRecord, RoundState};
use elastic_rendezvous::time::Time;

use crate::workers::group::GroupState;

/// What a node is doing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Stage {
    /// It has no place in a round: it joins, or is a spare.
    Waiting,
    /// A round is forming.
    Forming,
    /// Its round runs, and its workers are being started.
    Starting,
    /// Its workers run.
    Running,
}

impl Stage {
    pub(super) const ALL: [Stage; 4] = [Stage::Waiting, Stage::Forming, Stage::Starting, Stage::Running];

    pub(super) fn name(self) -> &'static str {
        match self {
            Stage::Waiting => "waiting",
            Stage::Forming => "forming",
            Stage::Starting => "starting",
            Stage::Running => "running",
        }
    }

    fn of(seen: &Seen) -> Stage {
        match seen.round.map(|round| round.state) {
            Some(RoundState::Forming) => Stage::Forming,
            None | Some(RoundState::Running) if seen.workers_run => Stage::Running,
            Some(RoundState::Running) if seen.is_member => Stage::Starting,
            _ => Stage::Waiting,
        }
    }
}

/// The part of a round's record that tells one change of the group from another.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct RoundSeen {
    number: u64,
    state: RoundState,
    nodes: u32,
    restarts: u32,
}

impl From<&RoundRecord> for RoundSeen {
    fn from(round: &RoundRecord) -> RoundSeen {
        let RoundRecord { number, state, group_world_size: nodes, restarts, .. } = *round;
        RoundSeen { number, state, nodes, restarts }
    }
}

/// What is seen at one time.
#[derive(Debug, Clone, Copy)]
pub(super) struct Seen {
    round: Option<RoundSeen>,
    /// This node has a place in the round.
    is_member: bool,
    /// A worker of the round runs here.
    workers_run: bool,
}

impl Seen {
    pub(super) fn of(status: &Status, group: &GroupState) -> Seen {
        let round = status.round.as_ref().map(|round| RoundSeen::from(&round.value));
        Seen {
            round,
            is_member: status.credentials.is_some() || status.membership.is_some(),
            // TorchElastic's protocol shows no records of rounds.
            workers_run: group.running() > 0 && round.is_none_or(|round| round.number == group.round),
        }
    }
}

/// How a round differs from the one in which this node's workers ran before, as its metrics' label.
fn change(before: Option<RoundSeen>, after: RoundSeen) -> &'static str {
    match before {
        None => "first",
        // A worker failed: the job was charged for it.
        Some(before) if after.restarts > before.restarts => "restart",
        Some(before) if after.nodes > before.nodes => "growth",
        Some(before) if after.nodes < before.nodes => "shrinkage",
        // One node took another's place, or the operator asked for a round.
        Some(_) => "other",
    }
}

/// What has just ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Ended {
    /// A round formed in this time.
    Forming(Duration),
    /// Workers run again, after this time without training; the first time, since the agent began.
    Recovery(&'static str, Duration),
}

/// The states of a node, one after the other.
#[derive(Debug)]
pub(super) struct Stages {
    stage: Stage,
    since: Time,
    /// Time spent in each stage before the present one.
    spent: [Duration; 4],
    /// When the present round began to form.
    forming: Option<(u64, Time)>,
    /// The newest round in which workers ran here.
    ran: Option<RoundSeen>,
    /// Since when no workers run, or not in the newest round; `None` while they do.
    idle: Option<Time>,
}

impl Stages {
    pub(super) fn new(now: Time) -> Stages {
        Stages {
            stage: Stage::Waiting,
            since: now,
            spent: [Duration::ZERO; 4],
            forming: None,
            ran: None,
            idle: Some(now),
        }
    }

    /// Takes note of what is seen now, and returns what has just ended.
    pub(super) fn step(&mut self, now: Time, seen: &Seen) -> Vec<Ended> {
        let stage = Stage::of(seen);
        let mut ended = Vec::new();
        if let Some(round) = seen.round {
            match round.state {
                RoundState::Forming if self.forming.is_none_or(|(number, _)| number != round.number) => {
                    self.forming = Some((round.number, now));
                }
                RoundState::Running => {
                    if let Some((_, began)) = self.forming.take().filter(|(number, _)| *number == round.number) {
                        ended.push(Ended::Forming(now.since(began)));
                    }
                }
                _ => {}
            }
            if stage == Stage::Running {
                // A round that came and went between two looks counts as well: its number is new.
                let is_next = self.ran.is_none_or(|ran| ran.number != round.number);
                if is_next {
                    let idle = self.idle.unwrap_or(now);
                    ended.push(Ended::Recovery(change(self.ran, round), now.since(idle)));
                }
                (self.ran, self.idle) = (Some(round), None);
            }
        }
        if stage != Stage::Running {
            self.idle.get_or_insert(now);
        }
        if stage != self.stage {
            self.spent[self.stage as usize] += now.since(self.since);
            (self.stage, self.since) = (stage, now);
        }
        ended
    }

    /// Time spent in a stage until now.
    pub(super) fn spent(&self, stage: Stage, now: Time) -> Duration {
        let current = if stage == self.stage { now.since(self.since) } else { Duration::ZERO };
        self.spent[stage as usize] + current
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn round(number: u64, state: RoundState, nodes: u32, restarts: u32) -> Option<RoundSeen> {
        Some(RoundSeen { number, state, nodes, restarts })
    }

    fn seconds(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    /// At these seconds this is seen: the round, whether this node is a member, whether its workers run. Then these
    /// things have just ended.
    type Look = (u64, Option<RoundSeen>, bool, bool, Vec<Ended>);

    #[test]
    fn rendezvous_and_recoveries_are_timed_separately() {
        use Ended::{Forming, Recovery};
        use RoundState::{Forming as F, Running as R};
        let looks: Vec<Look> = vec![
            (0, None, false, false, vec![]),
            (1, round(1, F, 0, 0), false, false, vec![]),
            (2, round(1, F, 0, 0), false, false, vec![]),
            (4, round(1, R, 2, 0), true, false, vec![Forming(seconds(3))]),
            (5, round(1, R, 2, 0), true, true, vec![Recovery("first", seconds(5))]),
            (9, round(1, R, 2, 0), true, true, vec![]),
            // A worker fails.
            (10, round(1, R, 2, 0), true, false, vec![]),
            (11, round(2, F, 2, 0), true, false, vec![]),
            (12, round(2, R, 2, 1), true, false, vec![Forming(seconds(1))]),
            (13, round(2, R, 2, 1), true, true, vec![Recovery("restart", seconds(3))]),
            // A node joins, and the workers keep their processes.
            (20, round(3, F, 2, 1), true, true, vec![]),
            (21, round(3, R, 3, 1), true, false, vec![Forming(seconds(1))]),
            (22, round(3, R, 3, 1), true, true, vec![Recovery("growth", seconds(2))]),
            // A node is lost, and no scrape comes while the next round forms.
            (30, round(4, R, 2, 1), true, true, vec![Recovery("shrinkage", seconds(0))]),
            // This node loses its place and gets one again.
            (40, round(5, R, 2, 1), false, false, vec![]),
            (45, round(6, R, 2, 1), true, true, vec![Recovery("other", seconds(5))]),
        ];
        let mut stages = Stages::new(Time::ZERO);
        for (at, round, is_member, workers_run, ended) in looks {
            let seen = Seen { round, is_member, workers_run };
            assert_eq!(stages.step(Time::ZERO + seconds(at), &seen), ended, "at {at} s: {seen:?}");
        }
        let spent = Stage::ALL.map(|stage| stages.spent(stage, Time::ZERO + seconds(50)).as_secs());
        assert_eq!(spent, [1 + 5, 3 + 1 + 1, 1 + 1 + 1 + 1, 5 + 7 + 18 + 5], "waiting, forming, starting, running");
    }
}
