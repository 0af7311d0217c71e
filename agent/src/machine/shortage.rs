//! A host that is, for now, short of the resources for starting workers: descriptors, processes, memory.
//!
//! The workers are not to blame, and the host may have room again in a moment. So a start that failed for this reason
//! costs the job nothing. The node tells the others only after a pause, which grows. Without the pause, rounds would
//! form and fail as fast as they can. A node that stays short leaves the job to the others.

use std::time::Duration;

use elastic_rendezvous::time::Time;

/// The first pause. Each further pause is twice as long.
const PAUSE: Duration = Duration::from_millis(250);

/// The longest pause.
const LONGEST: Duration = Duration::from_secs(5);

/// Whether this error of the kernel means that the host, or a limit of the user, is short of something.
pub(crate) fn is_shortage(errno: Option<i32>) -> bool {
    matches!(errno, Some(libc::EMFILE | libc::ENFILE | libc::ENOMEM | libc::EAGAIN | libc::ENOBUFS))
}

/// What follows a start that failed because of a shortage.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Next {
    /// After this pause the node tells the others that its start failed, and tries again in the round that then forms.
    Again(Duration),
    /// The node leaves the job.
    Leave,
}

/// How long a node has been short, and how many of its starts have failed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Shortage {
    since: Option<Time>,
    starts: u32,
}

impl Shortage {
    /// Records a start that failed because of a shortage. The node leaves if the shortage has lasted for `patience`.
    pub(crate) fn met(&mut self, now: Time, patience: Duration) -> Next {
        let since = *self.since.get_or_insert(now);
        if now.since(since) >= patience {
            return Next::Leave;
        }
        let pause = PAUSE.saturating_mul(2_u32.saturating_pow(self.starts)).min(LONGEST);
        self.starts = self.starts.saturating_add(1);
        Next::Again(pause)
    }

    /// Records that all workers were started.
    pub(crate) fn is_over(&mut self) {
        *self = Shortage::default();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_pause_grows_until_the_node_leaves_and_a_start_forgets_it() {
        let patience = Duration::from_secs(10);
        let mut shortage = Shortage::default();
        for (at_ms, next) in [
            (1_000, Next::Again(Duration::from_millis(250))),
            (1_300, Next::Again(Duration::from_millis(500))),
            (1_900, Next::Again(Duration::from_secs(1))),
            (3_000, Next::Again(Duration::from_secs(2))),
            (5_100, Next::Again(Duration::from_secs(4))),
            (9_200, Next::Again(LONGEST)),
            (11_000, Next::Leave),
            (11_001, Next::Leave),
        ] {
            assert_eq!(shortage.met(Time::from_millis(at_ms), patience), next, "{at_ms}");
        }
        shortage.is_over();
        assert_eq!(shortage.met(Time::from_millis(12_000), patience), Next::Again(PAUSE));
        assert_eq!(Shortage::default().met(Time::ZERO, Duration::ZERO), Next::Leave);
    }

    #[test]
    fn what_is_missing_for_good_is_no_shortage() {
        for (errno, shortage) in [
            (Some(libc::EMFILE), true),
            (Some(libc::ENFILE), true),
            (Some(libc::ENOMEM), true),
            (Some(libc::EAGAIN), true),
            (Some(libc::ENOBUFS), true),
            (Some(libc::ENOENT), false),
            (Some(libc::EACCES), false),
            (Some(libc::ENOSPC), false),
            (None, false),
        ] {
            assert_eq!(is_shortage(errno), shortage, "{errno:?}");
        }
    }
}
