//! What is held against a node: failures of its workers, and that it is excluded for them. Which node is excluded and for
//! how long is decided in `rendezvous`.

use std::fmt;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::overview::Job;
use super::{Desired, millis};

/// An entry of the round's `faults`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Faults {
    /// The node's name.
    pub node: String,
    /// Failures that were charged to the job since it was excluded last.
    #[serde(default)]
    pub failures: u32,
    /// How often it was excluded.
    #[serde(default)]
    pub exclusions: u32,
    /// That it is excluded.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub excluded: Option<Exclusion>,
}

/// That a node gets no place for a time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Exclusion {
    /// The round that was formed without it. Tells one exclusion of a node from the next.
    pub round: u64,
    /// How long, from when a leader first sees it on its own clock: a new leader begins again.
    #[serde(rename = "lasts_ms", with = "millis")]
    pub lasts: Duration,
}

/// As logs and histories tell it.
impl fmt::Display for Faults {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Faults { node, failures, exclusions, excluded } = self;
        match excluded {
            Some(Exclusion { lasts, .. }) => write!(f, "{node} is excluded for {} min", lasts.as_secs() / 60),
            None if *exclusions == 0 => write!(f, "{node} failed {}", times(*failures)),
            None => write!(f, "{node} was excluded {} and failed {} since", times(*exclusions), times(*failures)),
        }
    }
}

/// How often, in words.
fn times(count: u32) -> String {
    match count {
        0 => "not once".to_owned(),
        1 => "once".to_owned(),
        more => format!("{more} times"),
    }
}

/// That an operator takes a node back before its exclusion is over.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TakenBack {
    /// The node's name.
    pub node: String,
    /// The [`Exclusion::round`] of the exclusion that ends. One that follows is not meant.
    pub round: u64,
}

/// Why a node gets no place though it is here.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Excluded {
    /// An operator excludes it.
    ByOperator,
    /// For its failures.
    ForFailures(Exclusion),
}

/// As people read it of a node.
impl fmt::Display for Excluded {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Excluded::ByOperator => f.write_str("the operator excludes it: until it is included"),
            Excluded::ForFailures(Exclusion { round, lasts }) => write!(
                f,
                "it is excluded for {} min from round {round} on, since the job failed by its workers again and again",
                lasts.as_secs() / 60
            ),
        }
    }
}

impl Desired {
    /// Whether an operator takes a node back before this exclusion is over.
    pub fn takes_back(&self, node: &str, exclusion: Exclusion) -> bool {
        self.include.iter().any(|back| back.node == node && back.round == exclusion.round)
    }
}

impl Job {
    /// How a node of this name is excluded, if it is. One that is excluded for its failures takes part all the same where
    /// too few are there without it.
    pub fn excluded(&self, node: &str) -> Option<Excluded> {
        let usual = Desired::default();
        let desired = self.desired.as_ref().map_or(&usual, |desired| &desired.value);
        if desired.exclude.iter().any(|excluded| excluded == node) {
            return Some(Excluded::ByOperator);
        }
        let faults = self.round.as_ref()?.value.faults.iter().find(|faults| faults.node == node)?;
        faults.excluded.filter(|exclusion| !desired.takes_back(node, *exclusion)).map(Excluded::ForFailures)
    }
}
