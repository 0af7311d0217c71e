//! A job's state, as people and programs see it: its round's state, and whether it is paused. What a leader
//! decides by is the round's record alone.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::overview::Job;
use super::{RoundRecord, RoundState};

/// A job's state.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum JobState {
    /// A round is being formed.
    Forming,
    /// An operator has paused it: no workers run once all have ended, and no round is formed.
    Paused,
    /// A round runs.
    Running,
    /// All workers were done.
    Succeeded,
    /// It failed.
    Failed,
    /// An operator ended it.
    Closed,
}

impl JobState {
    /// All of them.
    pub const ALL: [JobState; 6] = [
        JobState::Running,
        JobState::Forming,
        JobState::Paused,
        JobState::Succeeded,
        JobState::Failed,
        JobState::Closed,
    ];
}

impl From<&RoundRecord> for JobState {
    fn from(round: &RoundRecord) -> JobState {
        match round.state {
            RoundState::Forming if round.paused => JobState::Paused,
            RoundState::Forming => JobState::Forming,
            RoundState::Running => JobState::Running,
            RoundState::Succeeded => JobState::Succeeded,
            RoundState::Failed => JobState::Failed,
            RoundState::Closed => JobState::Closed,
        }
    }
}

impl fmt::Display for JobState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.serialize(f)
    }
}

impl Job {
    /// Its state; none where no round was written yet.
    pub fn state(&self) -> Option<JobState> {
        self.round.as_ref().map(|round| JobState::from(&round.value))
    }
}
