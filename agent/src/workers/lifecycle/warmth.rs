//! Whether workers that were started without places are ready for them.

use std::time::Duration;

use tokio::time::Instant;

use crate::workers::socket::Awareness;

/// Workers that were started ahead of their round.
pub(crate) struct WarmingUp {
    /// The time in which to stop them if they cannot warm up.
    pub(super) grace: Duration,
    /// When they must be warm.
    pub(super) until: Instant,
}

impl WarmingUp {
    /// Whether they are warm: `slots` workers that are to be ready, of which those that live can do this.
    pub(super) fn warmth(&self, slots: u32, living: &[Awareness], now: Instant) -> Warmth {
        warmth(slots as usize, living, now >= self.until)
    }
}

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
fn warmth(slots: usize, living: &[Awareness], overdue: bool) -> Warmth {
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

#[cfg(test)]
mod tests {
    use super::*;

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
