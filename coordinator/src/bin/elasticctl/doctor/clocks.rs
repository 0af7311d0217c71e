//! Judges how far a server's clock is from this machine's. Pure: `greet` reads them.
//!
//! A server's answer over HTTP has its time in whole seconds, so the difference is known up to a second and the time that
//! the answer took. Only what lies beyond that is held against a clock.

use super::finding::Finding;

/// The difference that clocks which are set by NTP never have.
const APART_MS: i64 = 2000;

/// What a server's clock showed, and between which two times of ours; all in milliseconds since 1970.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Reading {
    pub(super) asked_ms: u64,
    pub(super) answered_ms: u64,
    /// In whole seconds, rounded down.
    pub(super) date_ms: u64,
}

impl Reading {
    /// The least and the most that it can be ahead of ours, in milliseconds.
    fn ahead(self) -> (i64, i64) {
        let less = |a: u64, b: u64| i64::try_from(i128::from(a) - i128::from(b)).unwrap_or(i64::MAX);
        (less(self.date_ms, self.answered_ms), less(self.date_ms.saturating_add(1000), self.asked_ms))
    }
}

pub(super) fn judge(of: &str, read: &Result<Reading, String>) -> Finding {
    let (least, most) = match read {
        Ok(reading) => reading.ahead(),
        Err(why) => return Finding::not_told("clock", of, why),
    };
    let seconds = |ms: i64| ms as f64 / 1e3;
    let apart = |by: i64, direction: &str| {
        let seen = format!("at least {:.1} s {direction} this machine's", seconds(by));
        Finding::warning("clock", of, seen).advise(
            "set both by NTP (timedatectl tells whether one is). Nothing about a running job is decided by clocks; \
             certificates, tokens, dates in logs, and deletions of what has ended are",
        )
    };
    if least > APART_MS {
        apart(least, "ahead of")
    } else if -most > APART_MS {
        apart(-most, "behind")
    } else {
        Finding::ok("clock", of, format!("within {:.1} s of this machine's", seconds(most.max(-least))))
    }
}

#[cfg(test)]
mod tests {
    use super::super::finding::State;
    use super::*;

    const NOON: u64 = 1_764_072_000_000;

    fn judged(asked: u64, took: u64, date: u64) -> Finding {
        judge(
            "etcd0:2379",
            &Ok(Reading { asked_ms: NOON + asked, answered_ms: NOON + asked + took, date_ms: NOON + date }),
        )
    }

    #[test]
    fn what_a_date_in_whole_seconds_can_be_is_not_held_against_it() {
        for (asked, took, date, seen) in [
            // The same second, at its begin and at its end
            (0, 1, 0, "within 1.0 s"),
            (999, 1, 0, "within 1.0 s"),
            // An answer that took long may be from its begin or its end.
            (0, 3000, 0, "within 3.0 s"),
            (0, 3000, 3000, "within 4.0 s"),
            // Just not two seconds for certain
            (0, 0, 2000, "within 3.0 s"),
            (3000, 0, 0, "within 3.0 s"),
        ] {
            let found = judged(asked, took, date);
            assert_eq!(found.state, State::Ok, "{asked} {took} {date}: {found:?}");
            assert!(found.seen.starts_with(seen), "{asked} {took} {date}: {found:?}");
        }
    }

    #[test]
    fn what_is_apart_for_certain_is_a_warning_with_its_direction() {
        for (asked, took, date, seen) in [
            (0, 0, 3000, "at least 3.0 s ahead of"),
            (0, 500, 3000, "at least 2.5 s ahead of"),
            (3001, 9000, 0, "at least 2.0 s behind"),
            (3_601_000, 10, 0, "at least 3600.0 s behind"),
        ] {
            let found = judged(asked, took, date);
            assert_eq!((found.state, found.check, found.of.as_str()), (State::Warning, "clock", "etcd0:2379"));
            assert!(found.seen.starts_with(seen) && found.advice.is_some(), "{found:?}");
        }
    }

    #[test]
    fn no_date_is_unknown_and_an_absurd_one_does_no_harm() {
        assert_eq!(judge("m", &Err("no date".to_owned())).state, State::Unknown);
        let absurd = Reading { asked_ms: 0, answered_ms: u64::MAX, date_ms: u64::MAX };
        assert_eq!(judge("m", &Ok(absurd)).state, State::Ok);
        let absurd = Reading { asked_ms: 0, answered_ms: 0, date_ms: u64::MAX };
        assert_eq!(judge("m", &Ok(absurd)).state, State::Warning);
    }
}
