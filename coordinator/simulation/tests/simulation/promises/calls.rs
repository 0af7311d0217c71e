//! A machine asks the store seldom while nothing happens there, whatever the store answers.

use std::collections::BTreeMap;

use crate::dice::SECOND;

/// Most calls of one process in a second in which no record changes: its own, and its leader's.
const MOST: u32 = 40;

#[derive(Default)]
pub(super) struct Calls {
    /// When a record last changed.
    changed: u64,
    /// Since when each process's calls are counted, and how many there were.
    counted: BTreeMap<usize, (u64, u32)>,
}

impl Calls {
    pub(super) fn changed(&mut self, now: u64) {
        self.changed = now;
    }

    pub(super) fn called(&mut self, now: u64, p: usize) -> Result<(), String> {
        let (since, count) = self.counted.entry(p).or_default();
        if *since < self.changed || now - *since >= SECOND {
            (*since, *count) = (now, 0);
        }
        *count += 1;
        if *count <= MOST {
            return Ok(());
        }
        Err(format!("p{p} calls the store more than {MOST} times in a second in which no record changes"))
    }
}
