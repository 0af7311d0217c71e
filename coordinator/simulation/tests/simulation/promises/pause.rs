//! A paused job has no workers once all had their time to end, and continues only when it is resumed.

use elastic_rendezvous::job::{RoundRecord, RoundState, Timings};

use crate::dice::SECOND;
use crate::process::Process;

/// Longest that news take, where nothing delays them, and what ends a worker.
const SEEN: u64 = 5 * SECOND;

pub(super) struct Pause {
    /// Since when the job is paused.
    since: Option<u64>,
    /// Longest that workers may live on.
    grace: u64,
}

impl Pause {
    pub(super) fn new(timings: &Timings) -> Pause {
        let grace = (timings.drain_grace + timings.margin * 2).as_nanos() as u64 + SEEN;
        Pause { since: None, grace }
    }

    pub(super) fn round_written(&mut self, now: u64, round: &RoundRecord) -> Result<(), String> {
        match (round.state, round.paused) {
            (RoundState::Forming, true) => drop(self.since.get_or_insert(now)),
            (RoundState::Running, _) if self.since.is_some() => {
                return Err(format!("round {} runs, and no one has resumed the job: {}", round.number, round.reason));
            }
            _ => self.since = None,
        }
        Ok(())
    }

    /// No workers are left, not even such as are at rest.
    pub(super) fn check(&self, now: u64, processes: &[Process]) -> Result<(), String> {
        if self.since.is_none_or(|since| now < since + self.grace) {
            return Ok(());
        }
        let has_workers = |process: &&Process| process.alive && process.tree.as_ref().is_some_and(|tree| !tree.quiet);
        match processes.iter().find(has_workers) {
            Some(process) => Err(format!("{} still has workers, {} s into a pause", process.id(), self.grace / SECOND)),
            None => Ok(()),
        }
    }
}
