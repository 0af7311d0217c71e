//! The ranks' versions of NCCL. Calls nothing.

use std::collections::BTreeMap;

use elastic_collective::list_ranks;

/// Which ranks have which version, in words, if not all have the same. `versions` has a rank's at its place. Such ranks
/// cannot make a communicator: different versions do not understand each other, and may not notice it.
pub(super) fn unlike(versions: &[i32]) -> Option<String> {
    let mut by_version: BTreeMap<i32, Vec<usize>> = BTreeMap::new();
    for (rank, version) in versions.iter().enumerate() {
        by_version.entry(*version).or_default().push(rank);
    }
    let words = by_version.iter().map(|(version, ranks)| match &ranks[..] {
        [rank] => format!("{} on rank {rank}", version_text(*version)),
        ranks => format!("{} on ranks {}", version_text(*version), list_ranks(ranks)),
    });
    (by_version.len() > 1).then(|| words.collect::<Vec<_>>().join("; "))
}

/// A version for people. As NCCL counts, 22809 is 2.28.9.
pub(super) fn version_text(version: i32) -> String {
    format!("{}.{}.{}", version / 10_000, version / 100 % 100, version % 100)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_that_differ_are_listed_by_rank() {
        assert_eq!(unlike(&[]), None);
        assert_eq!(unlike(&[22_809, 22_809, 22_809]), None);
        assert_eq!(unlike(&[22_809, 23_007]).unwrap(), "2.28.9 on rank 0; 2.30.7 on rank 1");
        // A difference in the last number is enough.
        assert_eq!(unlike(&[22_809, 22_807, 22_809]).unwrap(), "2.28.7 on rank 1; 2.28.9 on ranks 0, 2");
    }
}
