//! How far a job's workers have come. People and dashboards read it in [`ProgressRecord`], which decides nothing;
//! leaders know by [`Advance`] whether restarts still help.

use serde::{Deserialize, Serialize};

use super::{Failure, FailureClass};

/// How far a job has come, `progress`. Written by the node with group rank 0, every ten seconds at most, while its
/// workers report steps. Times are on that node's clock.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ProgressRecord {
    /// The job's generation.
    pub generation: u64,
    /// The round in which the step was done.
    pub round: u64,
    /// Optimizer steps done.
    pub step: u64,
    /// Steps planned in all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub total_steps: Option<u64>,
    /// Epoch, counted from 0.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub epoch: Option<u64>,
    /// Training loss of the last step that came with one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub loss: Option<f64>,
    /// Steps a second since the record before, or since the round's first step; none after a round's first step.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub steps_per_second: Option<f64>,
    /// The furthest step of this generation. While steps that a failure cost are done again, it is beyond `step`.
    pub furthest_step: u64,
    /// Milliseconds since the Unix epoch at this generation's first step.
    pub since_ms: u64,
    /// Milliseconds since the Unix epoch at `step`.
    pub at_ms: u64,
    /// Milliseconds that went into steps which had not been done before in this generation.
    pub productive_ms: u64,
}

/// A step that was done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StepDone {
    /// Steps that it has done.
    pub step: u64,
    /// Milliseconds since the Unix epoch when it was done.
    pub at_ms: u64,
}

/// What a round's workers have reported.
#[derive(Debug, Clone, PartialEq)]
pub struct RoundProgress {
    /// The job's generation.
    pub generation: u64,
    /// The round.
    pub round: u64,
    /// The first step that they reported in the round. How long it took is not known.
    pub first: StepDone,
    /// The last.
    pub last: StepDone,
    /// Steps planned in all.
    pub total_steps: Option<u64>,
    /// Epoch, counted from 0.
    pub epoch: Option<u64>,
    /// Training loss.
    pub loss: Option<f64>,
}

impl ProgressRecord {
    /// The record after `before`. What another generation wrote does not count.
    pub fn after(before: Option<&ProgressRecord>, now: &RoundProgress) -> ProgressRecord {
        let before = before.filter(|before| before.generation == now.generation);
        let same_round = before.filter(|before| before.round == now.round);
        let from = same_round.map_or(now.first, |before| StepDone { step: before.step, at_ms: before.at_ms });
        let steps = now.last.step.saturating_sub(from.step);
        let took = now.last.at_ms.saturating_sub(from.at_ms);
        let furthest = before.map_or(0, |before| before.furthest_step);
        let new_steps = now.last.step.saturating_sub(furthest.max(from.step));
        // Where a part of the steps is new, so is that part of their time.
        let productive = if steps == 0 { 0.0 } else { took as f64 * new_steps as f64 / steps as f64 };
        ProgressRecord {
            generation: now.generation,
            round: now.round,
            step: now.last.step,
            total_steps: now.total_steps,
            epoch: now.epoch,
            loss: now.loss,
            steps_per_second: (steps > 0 && took > 0).then(|| steps as f64 * 1000.0 / took as f64),
            furthest_step: furthest.max(now.last.step),
            since_ms: before.map_or(now.first.at_ms, |before| before.since_ms),
            at_ms: now.last.at_ms,
            productive_ms: before.map_or(0, |before| before.productive_ms) + productive.round() as u64,
        }
    }

    /// Goodput: which part of the time since the generation's first step went into steps that had not been done before,
    /// from 0 to 1. Rendezvous, starts and steps done again are the rest. None right after the first step.
    pub fn goodput(&self) -> Option<f64> {
        let time = self.at_ms.saturating_sub(self.since_ms);
        (time > 0).then(|| (self.productive_ms as f64 / time as f64).min(1.0))
    }
}

/// Whether a job's restarts get it any further: part of its round's record, carried from one to the next.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Advance {
    /// The furthest step that a failed worker's node had reported in this generation.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub furthest_step: Option<u64>,
    /// How many restarts in a row, up to the last one, have not got the job beyond that step.
    #[serde(default)]
    pub stalled_restarts: u32,
    /// The failure to start of the last try, if it was one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failed_start: Option<FailedStart>,
    /// Nodes that were lost soon after a round had begun, since the job got any further last.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub lost: Vec<LostSoon>,
}

/// A node that was lost soon after a round had begun.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LostSoon {
    /// Its name.
    pub node: String,
    /// In how many rounds.
    pub rounds: u32,
}

/// Programs that end by themselves right after they began, with no step beyond the job's furthest.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FailedStart {
    /// The message of the failure.
    pub message: String,
    /// How many restarts in a row have ended with this same message.
    pub restarts: u32,
}

impl FailedStart {
    /// What this failure is, after those before it.
    fn after(before: Option<FailedStart>, failure: &Failure) -> Option<FailedStart> {
        // What a signal ended did not fail by itself.
        let failed = failure.class == FailureClass::Own && failure.exit_code.is_some_and(|code| code > 0);
        let again = before.filter(|before| before.message == failure.message);
        let restarts = again.map_or(0, |before| before.restarts.saturating_add(1));
        (failed && failure.at_start).then(|| FailedStart { message: failure.message.clone(), restarts })
    }
}

impl Advance {
    /// For a record: whether there is nothing to say.
    pub fn is_none(&self) -> bool {
        *self == Advance::default()
    }

    /// What is known after this failure, the job having been restarted so often. Workers that report no steps make no
    /// progress that can be seen.
    #[must_use]
    pub fn after_failure(self, restarts: u32, failure: &Failure) -> Advance {
        // Any step is more than none.
        let is_further = failure.step > self.furthest_step;
        Advance {
            furthest_step: failure.step.max(self.furthest_step),
            stalled_restarts: if is_further || restarts == 0 { 0 } else { self.stalled_restarts.saturating_add(1) },
            failed_start: if is_further { None } else { FailedStart::after(self.failed_start, failure) },
            lost: if is_further { Vec::new() } else { self.lost },
        }
    }

    /// A node of this name was lost soon after a round had begun. In how many rounds that is, since the job got any
    /// further.
    pub fn lost_soon(&mut self, node: &str) -> u32 {
        let at = self.lost.iter().position(|lost| lost.node == node).unwrap_or_else(|| {
            self.lost.push(LostSoon { node: node.to_owned(), rounds: 0 });
            self.lost.len() - 1
        });
        self.lost[at].rounds = self.lost[at].rounds.saturating_add(1);
        self.lost[at].rounds
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seen(round: u64, first: (u64, u64), last: (u64, u64)) -> RoundProgress {
        let done = |(step, seconds): (u64, u64)| StepDone { step, at_ms: seconds * 1000 };
        let (first, last) = (done(first), done(last));
        RoundProgress { generation: 1, round, first, last, total_steps: None, epoch: None, loss: None }
    }

    #[test]
    fn only_new_steps_are_productive() {
        // What was seen, then: step, furthest, steps a second, productive seconds, goodput in percent.
        let looks = [
            // A round begins at step 1 after 100 s, and is seen twice.
            (seen(1, (1, 100), (1, 100)), 1, 1, None, 0, None),
            (seen(1, (1, 100), (11, 110)), 11, 11, Some(1.0), 10, Some(100)),
            (seen(1, (1, 100), (31, 120)), 31, 31, Some(2.0), 20, Some(100)),
            // A failure costs steps 22 to 31 and 20 s. The first ten are done again,
            (seen(2, (22, 140), (27, 145)), 27, 31, Some(1.0), 20, Some(44)),
            // then four of them and six new ones,
            (seen(2, (22, 140), (37, 155)), 37, 37, Some(1.0), 26, Some(47)),
            // and then nothing happens for a while.
            (seen(2, (22, 140), (37, 155)), 37, 37, None, 26, Some(47)),
            // The first look at this round comes late.
            (seen(3, (38, 160), (58, 170)), 58, 58, Some(2.0), 36, Some(51)),
        ];
        let mut record = None;
        for (seen, step, furthest, rate, productive, goodput) in looks {
            let now = ProgressRecord::after(record.as_ref(), &seen);
            let percent = now.goodput().map(|goodput| (goodput * 100.0).round() as u64);
            let shown = (now.step, now.furthest_step, now.steps_per_second, now.productive_ms / 1000, percent);
            assert_eq!(shown, (step, furthest, rate, productive, goodput), "{seen:?}");
            record = Some(now);
        }
        let anew = RoundProgress { generation: 2, ..seen(4, (5, 900), (6, 901)) };
        let anew = ProgressRecord::after(record.as_ref(), &anew);
        assert_eq!((anew.furthest_step, anew.since_ms, anew.productive_ms), (6, 900_000, 1000));
    }

    #[test]
    fn restarts_that_reach_no_new_step_are_counted() {
        // The steps at which the job fails, one after the other; then the furthest, and the restarts that brought
        // nothing.
        for (failures, furthest, stalled) in [
            (&[None][..], None, 0),
            (&[None, None, None], None, 2),
            (&[Some(5)], Some(5), 0),
            (&[Some(5), Some(5), Some(3), Some(5)], Some(5), 3),
            (&[Some(5), Some(5), Some(6)], Some(6), 0),
            (&[Some(5), None, Some(6), Some(6)], Some(6), 1),
            (&[None, None, Some(0), None], Some(0), 1),
        ] {
            let counted = (0..).zip(failures).fold(Advance::default(), |advance, (restarts, step)| {
                advance.after_failure(restarts, &Failure { step: *step, ..Failure::new(FailureClass::Own, "m") })
            });
            let expected = Advance { furthest_step: furthest, stalled_restarts: stalled, ..Advance::default() };
            assert_eq!(counted, expected, "{failures:?}");
        }
    }

    #[test]
    fn the_same_failure_right_after_each_start_is_counted() {
        let failure = |message: &str, at_start: bool, code: i32| Failure {
            at_start,
            exit_code: Some(code),
            ..Failure::new(FailureClass::Own, message)
        };
        let of_step = |step| Failure { step: Some(step), ..failure("a", true, 1) };
        let (a, b) = (failure("a", true, 1), failure("b", true, 1));
        let late = failure("a", false, 1);
        let killed = failure("a", true, -9);
        let by_a_peer = Failure { class: FailureClass::Peer, ..a.clone() };
        for (failures, restarts) in [
            (&[&a][..], Some(0)),
            (&[&a, &a, &a, &a], Some(3)),
            // Another failure is another try, and so is one that did something else for a while.
            (&[&a, &a, &b], Some(0)),
            (&[&a, &a, &b, &a], Some(0)),
            (&[&a, &a, &late], None),
            (&[&a, &a, &late, &a], Some(0)),
            // Killed from outside, torn along by a peer.
            (&[&a, &killed, &a], Some(0)),
            (&[&a, &by_a_peer], None),
            // Each time a step further, and then not.
            (&[&of_step(1), &of_step(2), &of_step(3)], None),
            (&[&of_step(3), &of_step(3), &of_step(3)], Some(1)),
        ] {
            let counted = (0..)
                .zip(failures)
                .fold(Advance::default(), |advance, (restarts, failure)| advance.after_failure(restarts, failure));
            assert_eq!(counted.failed_start.map(|start| start.restarts), restarts, "{failures:?}");
        }
    }

    #[test]
    fn a_clock_that_goes_back_breaks_nothing() {
        let record = ProgressRecord::after(None, &seen(1, (1, 100), (11, 110)));
        let back = ProgressRecord::after(Some(&record), &seen(1, (1, 100), (21, 50)));
        assert_eq!((back.step, back.steps_per_second, back.productive_ms, back.goodput()), (21, None, 10_000, None));
        let lower = ProgressRecord::after(Some(&record), &seen(1, (3, 120), (4, 121)));
        assert_eq!((lower.step, lower.furthest_step, lower.productive_ms), (4, 11, 10_000));
    }
}
