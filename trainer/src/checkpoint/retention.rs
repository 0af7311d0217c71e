//! Which checkpoints stay.

use std::collections::BTreeSet;
use std::fmt;
use std::num::{NonZeroU64, NonZeroUsize};

/// What a checkpoint's folder is called: its step, and the round that wrote it. Newer ones are greater.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Name {
    /// Optimizer steps in the state.
    pub step: u64,
    /// The round that wrote it, so that a member that was left behind by its round cannot overwrite what a later one
    /// committed.
    pub round: u64,
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "step-{:08}-r{}", self.step, self.round)
    }
}

impl Name {
    /// The name that a folder's is, if it is one.
    pub fn parse(folder: &str) -> Option<Name> {
        let (step, round) = folder.strip_prefix("step-")?.split_once("-r")?;
        let name = Name { step: step.parse().ok()?, round: round.parse().ok()? };
        (name.to_string() == folder).then_some(name)
    }
}

/// How many stay.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Retention {
    /// The last so many.
    pub keep: NonZeroUsize,
    /// And the first in each of so many steps, but not of those before the first such number: with 1000, step 1000 and
    /// step 2000, or what was saved next after them.
    pub every: Option<NonZeroU64>,
}

impl Retention {
    /// Those of `complete` that may go.
    pub fn superfluous(&self, complete: &BTreeSet<Name>) -> BTreeSet<Name> {
        let mut rest = complete.clone();
        for last in complete.iter().rev().take(self.keep.get()) {
            rest.remove(last);
        }
        if let Some(every) = self.every {
            let mut before = 0;
            for name in complete {
                let span = name.step / every;
                if span > before {
                    rest.remove(name);
                }
                before = span;
            }
        }
        rest
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn names(steps: impl IntoIterator<Item = u64>) -> BTreeSet<Name> {
        steps.into_iter().map(|step| Name { step, round: step % 3 }).collect()
    }

    fn retention(keep: usize, every: u64) -> Retention {
        Retention { keep: NonZeroUsize::new(keep).unwrap(), every: NonZeroU64::new(every) }
    }

    #[test]
    fn the_last_few_stay_and_the_first_of_each_span() {
        for (keep, every, goes) in [
            (1, 0, &[90, 100, 110, 190, 230, 300][..]),
            (3, 0, &[90, 100, 110, 190]),
            (9, 0, &[]),
            // 190 is of the same hundred as 100; 230 is the first after 200.
            (1, 100, &[90, 110, 190]),
            (2, 1000, &[90, 100, 110, 190, 230]),
            (1, 1, &[]),
        ] {
            let complete = names([90, 100, 110, 190, 230, 300, 310]);
            assert_eq!(retention(keep, every).superfluous(&complete), names(goes.iter().copied()), "{keep} {every}");
        }
    }

    #[test]
    fn a_folders_name_is_read_back_and_others_are_not() {
        let name = Name { step: 123_456_789, round: 4 };
        assert_eq!(Name::parse(&name.to_string()), Some(name));
        for other in ["step-1-r1", "step-00000001", "step-00000001-r01", "step-0000000x-r1", ".writable", ""] {
            assert_eq!(Name::parse(other), None, "{other}");
        }
    }

    proptest! {
        /// Whether one prunes after each save or once at the end: the same ones are there.
        #[test]
        fn pruning_again_and_again_keeps_the_same(
            steps in prop::collection::btree_set(0..2000u64, 1..40), keep in 1..5usize, every in 0..300u64,
        ) {
            let retention = retention(keep, every);
            let mut kept = BTreeSet::new();
            for &step in &steps {
                kept.extend(names([step]));
                let gone = retention.superfluous(&kept);
                kept.retain(|name| !gone.contains(name));
            }
            let all = names(steps.iter().copied());
            let gone = retention.superfluous(&all);
            prop_assert_eq!(&kept, &all.difference(&gone).copied().collect());
            prop_assert!(kept.contains(all.last().unwrap()));
        }
    }
}
