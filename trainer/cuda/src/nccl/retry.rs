//! Decides when NCCL is tried again after a failure. Calls nothing.
//!
//! Each rank counts the failures that it has seen, and the ranks exchange the counts when a round forms. The largest
//! numbers count, so that ranks which joined later, or for which NCCL has not failed, decide as the others do.
//!
//! ```text
//! a sum fails, the first in its round      all ranks make a new communicator, in the same round
//! a second one, or no communicator         the round continues over TCP; NCCL is tried again in the next round
//! the same in the round that tries again   NCCL is tried again after 2 rounds, then after 4, 8, … 64
//! a round goes well over NCCL              its failures are forgotten
//! ```

#![deny(clippy::disallowed_methods, clippy::disallowed_types)]

/// The longest wait, in rounds.
const LONGEST_WAIT: u64 = 64;

/// What a rank knows of NCCL's failures in its group.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Failures {
    /// All failures since the oldest of the ranks began.
    pub total: u64,
    /// Rounds in a row that continued without NCCL because it failed.
    pub in_a_row: u64,
    /// The first round that may try NCCL.
    pub not_before: u64,
    /// The round after the one in which a sum failed last; 0 for none.
    pub after_sum: u64,
}

impl Failures {
    /// As numbers that ranks can exchange.
    pub fn to_words(self) -> [u64; 4] {
        [self.total, self.in_a_row, self.not_before, self.after_sum]
    }

    /// What ranks know together.
    pub fn of_all(ranks: impl IntoIterator<Item = [u64; 4]>) -> Failures {
        let [total, in_a_row, not_before, after_sum] = ranks
            .into_iter()
            .fold([0; 4], |most: [u64; 4], words| std::array::from_fn(|place| most[place].max(words[place])));
        Failures { total, in_a_row, not_before, after_sum }
    }

    /// Whether a round may try NCCL.
    pub fn allow(self, round: u64) -> bool {
        round >= self.not_before
    }

    /// After a sum failed in this round.
    #[must_use]
    pub fn with_sum(self, round: u64) -> Failures {
        let after_sum = round.saturating_add(1);
        match self.after_sum == after_sum {
            true => self.with_round(round),
            false => Failures { total: self.total.saturating_add(1), after_sum, ..self },
        }
    }

    /// After this round had to continue without NCCL.
    #[must_use]
    pub fn with_round(self, round: u64) -> Failures {
        let (total, in_a_row) = (self.total.saturating_add(1), self.in_a_row.saturating_add(1));
        Failures { total, in_a_row, not_before: round.saturating_add(wait_after(in_a_row)), ..self }
    }

    /// After a round went well over NCCL.
    #[must_use]
    pub fn with_success(self) -> Failures {
        Failures { in_a_row: 0, not_before: 0, ..self }
    }
}

/// How many rounds after a failed one NCCL is tried again, after so many failures in a row.
fn wait_after(in_a_row: u64) -> u64 {
    let doublings = in_a_row.saturating_sub(1).min(u64::from(LONGEST_WAIT.ilog2()));
    1 << doublings
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_failure_in_a_row_doubles_the_wait_up_to_a_limit() {
        let mut failures = Failures::default();
        let mut round = 7;
        for wait in [1, 2, 4, 8, 16, 32, 64, 64, 64] {
            assert!(failures.allow(round), "{failures:?}");
            failures = failures.with_round(round);
            let refused = (round..round + wait).all(|round| !failures.allow(round));
            assert!(refused && failures.allow(round + wait), "{wait}: {failures:?}");
            round += wait;
        }
        assert_eq!((failures.total, failures.in_a_row), (9, 9));
        // A round over NCCL, and the next failure waits for one round again.
        let after = failures.with_success();
        assert_eq!((after.total, after.in_a_row), (9, 0));
        assert!(after.with_round(round).allow(round + 1));
    }

    #[test]
    fn one_failed_sum_costs_a_round_nothing_and_two_cost_the_rest_of_it() {
        for round in [0, 3] {
            let once = Failures::default().with_sum(round);
            assert!(once.allow(round) && once.in_a_row == 0 && once.total == 1, "{once:?}");
            let twice = once.with_sum(round);
            assert!(!twice.allow(round) && twice.allow(round + 1) && twice.total == 2, "{twice:?}");
            // In the next round it is the first one again.
            assert!(twice.with_sum(round + 1).allow(round + 1));
        }
    }

    #[test]
    fn ranks_decide_alike_whatever_each_has_seen() {
        let new = Failures::default();
        // One saw a sum fail in round 4, another was there when round 2 made no communicator, a third has just come.
        let (sum, refused) = (new.with_sum(4), new.with_round(2).with_round(3));
        for order in [[sum, refused, new], [new, sum, refused], [refused, new, sum]] {
            let all = Failures::of_all(order.map(Failures::to_words));
            assert_eq!(all, Failures { total: 2, in_a_row: 2, not_before: 5, after_sum: 5 });
            assert!(!all.allow(4) && all.allow(5));
        }
        // Two that saw the same failure count it once.
        assert_eq!(Failures::of_all([sum.to_words(); 2]), sum);
    }

    #[test]
    fn numbers_of_no_round_overflow_nothing() {
        let last = Failures { total: u64::MAX, in_a_row: u64::MAX, ..Failures::default() };
        assert_eq!(last.with_round(u64::MAX).with_sum(u64::MAX).with_sum(u64::MAX).not_before, u64::MAX);
    }
}
