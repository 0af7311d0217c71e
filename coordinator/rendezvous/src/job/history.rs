//! The lines of a job's history: their numbers, and how many are kept. What they say is up to those who write them: the
//! leader, and operators for what they ask.

use super::{EventRecord, Keys, to_json};
use crate::kv::{Guard, Op};

/// Lines that are kept.
pub const KEPT: u64 = 256;

/// Writes a line, and deletes the one that is then too old.
pub fn write(keys: &Keys, number: u64, event: &EventRecord) -> Vec<Op> {
    let old = number.checked_sub(KEPT).map(|old| Op::delete(keys.event(old)));
    [Op::put(keys.event(number), to_json(event))].into_iter().chain(old).collect()
}

/// Holds while no one else has written that line: leader and operators write side by side.
pub fn unwritten(keys: &Keys, number: u64) -> Guard {
    Guard::absent(keys.event(number))
}

/// The number of a line by its key; `None` for a key that [`Keys::event`] does not make, or after which none follows.
pub fn number(keys: &Keys, key: &str) -> Option<u64> {
    const LAST: u64 = 999_999_999_999;
    let number: u64 = key.strip_prefix(&keys.events())?.parse().ok()?;
    (number < LAST && keys.event(number) == key).then_some(number)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_keys_that_lie_in_order_have_numbers() {
        let keys = Keys::new("/elastic", &"J".parse().unwrap());
        assert_eq!(number(&keys, &keys.event(7)), Some(7));
        for key in ["events/7", "events/999999999999", "events/0000000000070", "events/x", "round"] {
            assert_eq!(number(&keys, &format!("{}{key}", keys.root())), None, "{key}");
        }
    }
}
