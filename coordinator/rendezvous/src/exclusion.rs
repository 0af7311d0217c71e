//! Nodes that get no place for a time, because the job failed by their workers again and again.
//!
//! A node is excluded once as many failures as [`Spec::exclude_after`] were charged to the job by it, if there are enough
//! nodes without it. Each time it lasts longer. A node that was quiet for an hour is as good as new. How often it failed
//! is in the round's record; the times are a leader's own, so a new leader counts from when it began to lead.
//!
//! [`Spec::exclude_after`]: crate::job::Spec::exclude_after

use std::collections::BTreeMap;
use std::time::Duration;

use crate::job::{Desired, Exclusion, Faults};
use crate::time::Time;

/// How long a node is excluded the first time. Each time that follows is twice as long.
const FIRST: Duration = Duration::from_secs(5 * 60);
/// How long at most.
const LONGEST: Duration = Duration::from_secs(80 * 60);
/// How long a node must be quiet, from its last failure or from the end of its exclusion on, until nothing is held
/// against it.
const FORGIVEN: Duration = Duration::from_secs(60 * 60);

/// The round's `faults` as a leader knows them: by the node's name, each with when it was seen first as it now is.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct KnownFaults(BTreeMap<String, (Faults, Time)>);

impl KnownFaults {
    /// What a record says, seen now; what was known of it before keeps its time.
    #[must_use]
    pub(super) fn read(&self, now: Time, record: &[Faults]) -> KnownFaults {
        let seen = |faults: &Faults| match self.0.get(&faults.node) {
            Some((known, at)) if known == faults => *at,
            _ => now,
        };
        KnownFaults(record.iter().map(|faults| (faults.node.clone(), (faults.clone(), seen(faults)))).collect())
    }

    /// The nodes that are excluded, and until when.
    pub(super) fn excluded(&self, now: Time, desired: &Desired) -> impl Iterator<Item = (&str, Time)> {
        let ends = |(faults, seen): &(Faults, Time)| {
            let exclusion = faults.excluded.filter(|exclusion| !desired.takes_back(&faults.node, *exclusion))?;
            Some(*seen + exclusion.lasts)
        };
        let all = self.0.iter().filter_map(move |(node, known)| Some((node.as_str(), ends(known)?)));
        all.filter(move |(_, until)| now < *until)
    }

    /// What the record of a round that forms says: without what is over.
    pub(super) fn to_write(&self, now: Time, desired: &Desired) -> Vec<Faults> {
        let excluded: BTreeMap<&str, Time> = self.excluded(now, desired).collect();
        let mut faults = Vec::new();
        for (node, (known, seen)) in &self.0 {
            let rests = known.excluded.map_or(Duration::ZERO, |exclusion| exclusion.lasts);
            if now < *seen + rests + FORGIVEN {
                let exclusion = known.excluded.filter(|_| excluded.contains_key(node.as_str()));
                faults.push(Faults { excluded: exclusion, ..known.clone() });
            }
        }
        faults
    }
}

/// Whether this failure excludes its node, if enough others are there.
pub(super) fn is_due(faults: &[Faults], node: &str, limit: u32) -> bool {
    let before = faults.iter().find(|faults| faults.node == node).map_or(0, |faults| faults.failures);
    // mutant excluded_one_failure_too_soon: before.saturating_add(1) >= limit => before.saturating_add(2) >= limit
    limit > 0 && before.saturating_add(1) >= limit
}

/// Counts a failure of a node's workers, for which round `round` is formed, and excludes the node if that is `due`.
pub(super) fn count(faults: &mut Vec<Faults>, node: &str, round: u64, due: bool) {
    let at = faults.iter().position(|faults| faults.node == node).unwrap_or_else(|| {
        faults.push(Faults { node: node.to_owned(), failures: 0, exclusions: 0, excluded: None });
        faults.len() - 1
    });
    let entry = &mut faults[at];
    if due {
        let lasts = FIRST.saturating_mul(1 << entry.exclusions.min(16)).min(LONGEST);
        entry.excluded = Some(Exclusion { round, lasts });
        entry.exclusions = entry.exclusions.saturating_add(1);
        entry.failures = 0;
    } else {
        entry.failures = entry.failures.saturating_add(1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::job::TakenBack;

    const MINUTE: Duration = Duration::from_secs(60);

    /// The faults after failures of one node, some minutes after each other, each counted as a leader counts them.
    fn after(minutes: &[u32]) -> (Vec<Faults>, KnownFaults, Time) {
        let (mut known, mut now, mut record) = (KnownFaults::default(), Time::ZERO, Vec::new());
        for (round, wait) in (2..).zip(minutes) {
            now = now + MINUTE * *wait;
            record = known.to_write(now, &Desired::default());
            let due = is_due(&record, "a", 3);
            count(&mut record, "a", round, due);
            known = known.read(now, &record);
        }
        (record, known, now)
    }

    fn minutes(record: &[Faults]) -> Option<u64> {
        record[0].excluded.map(|exclusion| exclusion.lasts.as_secs() / 60)
    }

    #[test]
    fn the_third_failure_excludes_for_longer_each_time() {
        let first = [0, 1, 1];
        assert_eq!(minutes(&after(&first[..2]).0), None);
        let mut all = first.to_vec();
        for lasts in [5, 10, 20, 40, 80, 80] {
            let (record, known, now) = after(&all);
            assert_eq!((minutes(&record), record[0].failures), (Some(lasts), 0), "{all:?}");
            let ends = |now| known.excluded(now, &Desired::default()).next().map(|(_, until)| until);
            assert_eq!(ends(now), Some(now + MINUTE * lasts as u32));
            assert_eq!(ends(now + MINUTE * lasts as u32), None, "it is over");
            // It comes back, and fails thrice again.
            all.extend([lasts as u32, 1, 1]);
        }
    }

    #[test]
    fn a_quiet_hour_makes_a_node_as_good_as_new() {
        assert_eq!(minutes(&after(&[0, 1, 60]).0), None);
        assert_eq!(minutes(&after(&[0, 1, 59]).0), Some(5));
        // The time that it was excluded is no quiet one.
        assert_eq!(minutes(&after(&[0, 1, 1, 5 + 59, 1, 1]).0), Some(10));
        assert_eq!(minutes(&after(&[0, 1, 1, 5 + 60, 1, 1]).0), Some(5));
    }

    #[test]
    fn what_an_operator_takes_back_is_that_exclusion_alone() {
        let (record, known, now) = after(&[0, 1, 1]);
        let round = record[0].excluded.unwrap().round;
        let back = |round| Desired { include: vec![TakenBack { node: "a".into(), round }], ..Desired::default() };
        assert_eq!(known.excluded(now, &back(round)).count(), 0);
        assert_eq!(known.excluded(now, &back(round - 1)).count(), 1);
        assert_eq!(known.to_write(now, &back(round))[0].excluded, None);
    }

    #[test]
    fn a_new_leader_counts_from_zero() {
        let (record, _, now) = after(&[0, 1, 1]);
        let known = KnownFaults::default().read(now + MINUTE * 4, &record);
        let until = known.excluded(now + MINUTE * 4, &Desired::default()).next().unwrap().1;
        assert_eq!(until, now + MINUTE * 9);
    }
}
