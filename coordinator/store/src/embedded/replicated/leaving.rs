//! Who may leave the others, and when.
//!
//! Two of the three are needed to serve, so the last two could not leave one after the other without a word: the one
//! that is left could read nothing more. So each first says that it needs the store no more, and leaves once all that
//! are there have said so. That is in the letters, not in the store: to read it takes no majority.
//!
//! One that is silent without that word may be cut off, or is being started again. How long the others wait for it is
//! up to those who know what it would come back for.

use std::time::Duration;

use elastic_rendezvous::time::Time;

use super::replica::{ELECTION, Heard, Output, Replica};

/// How long one that was silent has to answer. One that follows another has no letters for this one until it is asked.
const ANSWER: Duration = ELECTION;

/// That a process needs the store no more.
#[derive(Debug, Clone, Copy)]
pub(super) struct Leave {
    since: Time,
    /// One that was not heard for this long is gone.
    gone: Duration,
}

/// Whether a seat that was last heard so keeps one here that leaves.
fn is_needed_by(heard: Option<Heard>, Leave { since, gone }: Leave, now: Time) -> bool {
    heard.is_some_and(|heard| !heard.leaves && (now.since(heard.at) < gone || now.since(since) < ANSWER))
}

impl Replica {
    /// Its process needs the store no more, and tells the others. It takes one for gone that is silent for so long.
    pub fn leave(&mut self, now: Time, gone: Duration) -> Vec<Output> {
        self.leaves.get_or_insert(Leave { since: now, gone });
        self.greet(now);
        std::mem::take(&mut self.out)
    }

    /// The seats for which it stays, if it leaves.
    pub fn needed_by(&self, now: Time) -> Vec<usize> {
        let needs = |leave, seat: &usize| is_needed_by(self.heard[*seat], leave, now);
        self.leaves.map_or_else(Vec::new, |leave| self.others().filter(|seat| needs(leave, seat)).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_is_needed_by_those_that_are_there_and_have_not_said_otherwise() {
        let at = Time::from_millis;
        let heard = |at, leaves| Some(Heard { life: 7, cluster: 4, at: Time::from_millis(at), leaves });
        for (last, since, now, needed) in [
            // Never there.
            (None, 10_000, 10_000, false),
            // There, and it needs the store.
            (heard(9_950, false), 10_000, 10_000, true),
            (heard(12_900, false), 10_000, 15_000, true),
            // It has said that it does not, and may have left since.
            (heard(9_950, true), 10_000, 10_000, false),
            (heard(9_950, true), 10_000, 30_000, false),
            // Silent as one that follows another is.
            (heard(1_000, false), 10_000, 10_000, true),
            (heard(1_000, false), 10_000, 10_999, true),
            (heard(1_000, false), 10_000, 11_000, false),
            // Gone while this one waited for it.
            (heard(10_500, false), 10_000, 13_499, true),
            (heard(10_500, false), 10_000, 13_500, false),
        ] {
            let leave = |gone| Leave { since: at(since), gone: Duration::from_secs(gone) };
            assert_eq!(is_needed_by(last, leave(3), at(now)), needed, "{last:?}, leaves since {since}, now {now}");
            // Whom one waits for longer is needed for longer, and no one else.
            let longer = last.is_some_and(|heard| !heard.leaves);
            assert_eq!(is_needed_by(last, leave(20), at(now)), longer, "{last:?}, leaves since {since}, now {now}");
        }
    }
}
