//! When the guard must act by itself: the deadline, as a pure value. The agent works out its fence point and sends it.

use elastic_rendezvous::time::Time;

#[derive(Debug, Default)]
pub(super) struct Deadline {
    until: Option<Time>,
}

impl Deadline {
    /// Takes a new deadline that the agent sent at `sent`. Returns whether the deadline before it had passed by then.
    /// An agent that was frozen past its deadline and now renews it must not save the workers that it should have lost.
    /// A renewal that was sent in time must save them, however late the guard reads it.
    pub(super) fn renew(&mut self, until: Option<Time>, sent: Time) -> bool {
        let lapsed = self.passed(sent);
        self.until = until;
        lapsed
    }

    /// Whether everything has to be killed at `now`.
    pub(super) fn passed(&self, now: Time) -> bool {
        self.until.is_some_and(|until| until <= now)
    }

    /// When to check the deadline again.
    pub(super) fn until(&self) -> Option<Time> {
        self.until
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(ms: u64) -> Time {
        Time::from_millis(ms)
    }

    #[test]
    fn a_renewal_sent_in_time_counts_however_late_it_is_read() {
        let mut deadline = Deadline::default();
        assert!(!deadline.renew(Some(at(100)), at(0)));
        assert!(!deadline.renew(Some(at(200)), at(99)));
        assert!(!deadline.passed(at(150)));
        assert!(deadline.passed(at(200)));
    }

    #[test]
    fn a_renewal_sent_after_the_deadline_does_not_undo_it() {
        let mut deadline = Deadline::default();
        deadline.renew(Some(at(100)), at(0));
        assert!(deadline.renew(Some(at(1000)), at(100)));
        assert!(!deadline.passed(at(500)), "yet what starts afterwards lives under the new deadline");
    }

    #[test]
    fn no_deadline_never_passes() {
        let mut deadline = Deadline::default();
        assert!(!deadline.passed(at(u64::MAX / 2)));
        deadline.renew(Some(at(100)), at(0));
        deadline.renew(None, at(50));
        assert!(!deadline.passed(at(1000)));
    }
}
