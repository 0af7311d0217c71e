//! Whether ranks that hold a step hold the same numbers, and which of them are right where they do not.
//!
//! All replicas of a step are equal bit by bit, since each does the same with the same sum. Where they are not, a
//! machine, its memory or a build is faulty. What most of them hold is then taken to be right.

use std::collections::BTreeMap;

use elastic_collective::list_ranks;

/// Most checksums that an error names.
const NAMED: usize = 16;

/// What comes of a comparison.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Verdict {
    /// They are equal.
    Same,
    /// They differ. For each rank: whether it holds the numbers that are taken to be right.
    Most(Vec<bool>),
    /// They differ, and no majority shows which are right.
    Split,
}

/// Compares the checksums of those ranks that hold a step, by rank.
pub(super) fn judge(sums: &[Option<u64>]) -> Verdict {
    let mut counts = BTreeMap::new();
    for sum in sums.iter().flatten() {
        *counts.entry(*sum).or_insert(0_usize) += 1;
    }
    let holders: usize = counts.values().sum();
    match counts.iter().find(|(_, count)| **count * 2 > holders).map(|(sum, _)| *sum) {
        _ if counts.len() < 2 => Verdict::Same,
        Some(right) => Verdict::Most(sums.iter().map(|sum| *sum == Some(right)).collect()),
        None => Verdict::Split,
    }
}

/// The checksums, for a reader.
pub(super) fn named(sums: &[Option<u64>]) -> String {
    let all = sums.iter().enumerate().filter_map(|(rank, sum)| sum.map(|sum| format!("rank {rank}: {sum:08x}")));
    let more = if sums.iter().flatten().count() > NAMED { ", …" } else { "" };
    all.take(NAMED).collect::<Vec<_>>().join(", ") + more
}

/// What is said of ranks that hold something else than most.
pub(super) fn warning(step: u64, wrong: &[usize], sums: &[Option<u64>]) -> String {
    format!(
        "these ranks differ from most after step {step}, and take the majority's state: {} ({}). A machine, its memory or \
         a build there is faulty",
        list_ranks(wrong),
        named(sums)
    )
}

/// The ranks that held something else than what counts.
pub(super) fn wrong(sums: &[Option<u64>], right: &[bool]) -> Vec<usize> {
    (0..sums.len()).filter(|&rank| sums[rank].is_some() && !right[rank]).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_most_holders_have_counts() {
        use Verdict::{Most, Same, Split};
        let (a, b, c, none) = (Some(1), Some(2), Some(3), None);
        for (sums, verdict) in [
            (vec![a], Same),
            (vec![none, none], Same),
            (vec![a, none, a], Same),
            (vec![a, a, b], Most(vec![true, true, false])),
            (vec![b, a, none, a], Most(vec![false, true, false, true])),
            // Half is no majority, and neither is the largest part.
            (vec![a, b], Split),
            (vec![none, a, a, b, b], Split),
            (vec![a, a, b, c], Split),
        ] {
            assert_eq!(judge(&sums), verdict, "{sums:?}");
        }
    }

    #[test]
    fn readers_learn_which_holder_has_what() {
        let sums = [Some(0xab), None, Some(1)];
        assert_eq!(named(&sums), "rank 0: 000000ab, rank 2: 00000001");
        assert_eq!(wrong(&sums, &[true, false, false]), [2]);
        assert!(named(&[Some(1); 17]).ends_with("rank 15: 00000001, …"));
    }
}
