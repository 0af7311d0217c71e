//! Whether workers stay when a round forms, whether they are warm before one, and how long they have for that. Pure.

use std::time::Duration;

use crate::workers::socket::Awareness;

/// Whether the workers are ready.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Warmth {
    /// Some are not ready yet.
    Wait,
    /// All are ready.
    Warm,
    /// They cannot be started ahead, for this reason.
    Cold(&'static str),
}

/// Decides by what each living worker can do. `slots` is how many workers there should be. Either all workers of a node
/// stay, or none.
pub(super) fn warmth(slots: usize, living: &[Awareness], overdue: bool) -> Warmth {
    if living.len() < slots {
        return Warmth::Cold("one has ended");
    }
    if living.contains(&Awareness::Unaware) {
        return Warmth::Cold("one has not registered as round-aware, so it needs its place when it starts");
    }
    match living.iter().all(|awareness| *awareness == Awareness::Quiesced) {
        true => Warmth::Warm,
        false if overdue => Warmth::Cold("one has not registered in time; --warm-up sets the limit"),
        false => Warmth::Wait,
    }
}

/// What to do with workers that were asked to quiesce.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Rest {
    /// Some have not quiesced yet.
    Wait,
    /// All living workers have quiesced.
    Kept,
    /// They must be stopped.
    Stop,
}

/// Decides by what each living worker can do. A worker that has not registered yet is waited for if another worker is
/// round-aware: it was just started, and probably runs the same program.
pub(super) fn rest(living: &[Awareness], overdue: bool) -> Rest {
    let any_aware = living.iter().any(|awareness| *awareness >= Awareness::Aware);
    let any_unaware = living.contains(&Awareness::Unaware);
    match living.iter().all(|awareness| *awareness == Awareness::Quiesced) {
        _ if !any_aware || any_unaware => Rest::Stop,
        true => Rest::Kept,
        false if overdue => Rest::Stop,
        false => Rest::Wait,
    }
}

/// Whether the node's replica, of so many nodes, begins with this round: then no worker of an earlier one can continue.
/// `since` is the round since which its nodes and their workers are the same.
pub(super) fn begins_replica(nodes: u32, since: Option<u64>, round: u64) -> bool {
    nodes > 1 && since.is_none_or(|since| since >= round)
}

/// How long workers have to quiesce: three times as long as a step if that is longer than `least`, and no longer than
/// `most`. A step may take half of it: what comes too late for one step changes the next. 0 says that all are stopped.
pub(super) fn quiesce_time(least: Duration, step: Duration, most: Duration) -> Duration {
    if least.is_zero() { least } else { least.max(step.saturating_mul(3).min(most)) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn workers_stay_only_if_all_that_live_quiesce_in_time() {
        use Awareness::{Aware, Quiesced, Unaware, Unknown};
        for (living, in_time, overdue) in [
            (&[][..], Rest::Stop, Rest::Stop),
            (&[Unknown], Rest::Stop, Rest::Stop),
            (&[Unaware], Rest::Stop, Rest::Stop),
            (&[Unaware, Quiesced], Rest::Stop, Rest::Stop),
            (&[Unknown, Aware], Rest::Wait, Rest::Stop),
            (&[Unknown, Quiesced], Rest::Wait, Rest::Stop),
            (&[Aware, Quiesced], Rest::Wait, Rest::Stop),
            (&[Quiesced, Quiesced], Rest::Kept, Rest::Kept),
        ] {
            assert_eq!((rest(living, false), rest(living, true)), (in_time, overdue), "{living:?}");
        }
    }

    #[test]
    fn workers_stay_while_their_replica_does() {
        for (nodes, since, begins) in
            [(1, None, false), (2, Some(1), false), (2, Some(2), true), (2, None, true), (1, Some(2), false)]
        {
            assert_eq!(begins_replica(nodes, since, 2), begins, "{nodes} {since:?}");
        }
    }

    #[test]
    fn workers_with_long_steps_have_longer_to_quiesce() {
        let time = |least, step, most| {
            let [least, step, most] = [least, step, most].map(Duration::from_secs);
            quiesce_time(least, step, most).as_secs()
        };
        for (least, step, most, has) in
            [(15, 0, 22, 15), (15, 5, 22, 15), (15, 7, 22, 21), (15, 40, 22, 22), (30, 40, 22, 30), (0, 10, 22, 0)]
        {
            assert_eq!(time(least, step, most), has, "{least} {step} {most}");
        }
    }

    #[test]
    fn all_workers_are_warm_or_none_is_kept() {
        use Awareness::{Aware, Quiesced, Unaware, Unknown};
        let cold = |living: &[Awareness], overdue| matches!(warmth(2, living, overdue), Warmth::Cold(_));
        for living in [&[][..], &[Quiesced], &[Unaware, Quiesced], &[Unaware, Unknown]] {
            assert!(cold(living, false) && cold(living, true), "{living:?}");
        }
        for living in [[Unknown, Unknown], [Unknown, Quiesced], [Aware, Quiesced]] {
            assert_eq!(warmth(2, &living, false), Warmth::Wait, "{living:?}");
            assert!(cold(&living, true), "{living:?}");
        }
        assert_eq!(warmth(2, &[Quiesced, Quiesced], true), Warmth::Warm);
    }
}
