//! The end of a stream that goes to no file, in memory, so that it can be read through the agent. No IO, and never more
//! than [`Ring::ROOM`] bytes.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The last bytes of a stream, shared between the thread that carries it and those who read.
#[derive(Debug, Clone, Default)]
pub(super) struct Ring(Arc<Mutex<Kept>>);

#[derive(Debug, Default)]
struct Kept {
    bytes: VecDeque<u8>,
    /// Where in the stream the first of them stood.
    begin: u64,
}

impl Ring {
    pub(super) const ROOM: usize = 128 * 1024;

    pub(super) fn append(&self, bytes: &[u8]) {
        let mut kept = self.lock();
        let new = &bytes[bytes.len().saturating_sub(Ring::ROOM)..];
        let over = (kept.bytes.len() + new.len()).saturating_sub(Ring::ROOM);
        kept.bytes.drain(..over);
        kept.begin += (over + bytes.len() - new.len()) as u64;
        kept.bytes.extend(new);
    }

    /// Reads from a place in the stream, or from the oldest byte that is kept. Returns where what was read begins.
    pub(super) fn read(&self, at: u64, into: &mut [u8]) -> (u64, usize) {
        let kept = self.lock();
        let at = at.max(kept.begin);
        let skipped = usize::try_from(at - kept.begin).unwrap_or(usize::MAX).min(kept.bytes.len());
        let count = into.len().min(kept.bytes.len() - skipped);
        into.iter_mut().zip(kept.bytes.range(skipped..skipped + count)).for_each(|(to, from)| *to = *from);
        (at, count)
    }

    fn lock(&self) -> MutexGuard<'_, Kept> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn the_end_of_a_stream_is_kept(sizes in proptest::collection::vec(0..Ring::ROOM * 2, 1..6), at in 0..9 * Ring::ROOM) {
            let ring = Ring::default();
            let mut all: Vec<u8> = Vec::new();
            for (n, size) in sizes.into_iter().enumerate() {
                let bytes: Vec<u8> = (0..size).map(|at| (at + n * 7) as u8).collect();
                ring.append(&bytes);
                all.extend(bytes);
                prop_assert!(ring.lock().bytes.len() <= Ring::ROOM);
            }
            prop_assert_eq!(ring.read(all.len() as u64, &mut [0]), (all.len() as u64, 0));
            let at = at.min(all.len());
            let mut read = vec![0; 1000];
            let (begin, count) = ring.read(at as u64, &mut read);
            prop_assert_eq!(begin as usize, at.max(all.len().saturating_sub(Ring::ROOM)));
            prop_assert_eq!(&read[..count], &all[begin as usize..(begin as usize + 1000).min(all.len())]);
        }
    }
}
