//! Copies of the state that training makes as it continues, and how one lies in memory that outlives the
//! worker.
//!
//! ```text
//! a slot    head: mark, how the last step was done, manifest     (in memory that outlives the worker)
//!            the file that it becomes: header, flat state
//! ```
//!
//! The mark is cleared before anything else in a slot changes, and set when all of it has changed. A worker may be
//! killed between any two instructions, and the next worker must not take half a copy for a whole one.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering, fence};
use std::thread;

use super::manifest::{Entry, Extent, FORMAT, Manifest, Position, hex, name_at};
use super::pages::{Mapping, Pages};
use super::{CHUNK, DATA, disk::ALIGNMENT, tensors};
use crate::vectors::first_not_finite;

/// What a snapshot says of its state. What all snapshots of a run share is in its [`Layout`].
#[derive(Debug, Clone, Copy)]
pub struct SnapshotHeader {
    /// The round that saves.
    pub round: u64,
    /// Ranks in it.
    pub world_size: u32,
    /// Optimizer steps in the state.
    pub step: u64,
    /// How the last of them was done, if that is known.
    pub done: Option<LastStep>,
    /// The place in the data.
    pub data: Position,
}

/// How a step was done.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LastStep {
    /// In which round.
    pub round: u64,
    /// By how many ranks.
    pub world_size: u32,
    /// The mean loss of its samples.
    pub loss: f32,
}

/// Marks a slot as whole; the last byte is the version of this layout.
const WHOLE: u64 = u64::from_be_bytes(*b"elastic\x01");

/// Where things lie in a head.
const MARK: usize = 0;
const LENGTH: usize = 8;
const ROUND: usize = 16;
const WORLD_SIZE: usize = 24;
const LOSS: usize = 32;
const CHECKSUM: usize = 40;
const MANIFEST: usize = 48;

/// Copied, and then checksummed, while it is in a core's cache.
const BITE: usize = 128 << 10;

/// How much room a snapshot of a run takes.
#[derive(Debug, Clone)]
pub struct Layout {
    /// The manifest of a slot that is still empty.
    like: Manifest,
    head: usize,
    header: usize,
}

impl Layout {
    /// For states of these tensors, in a job with these settings.
    pub fn new(job: &str, settings: &str, tensors: &[Entry]) -> Layout {
        Layout::in_chunks(CHUNK, job, settings, tensors)
    }

    /// The same with so many bytes under one checksum.
    pub(super) fn in_chunks(chunk: usize, job: &str, settings: &str, tensors: &[Entry]) -> Layout {
        let header = tensors::header(tensors, None).len();
        let state_bytes = tensors.iter().map(|tensor| tensor.offset + tensor.len).max().unwrap_or(0);
        let (most, chunks) = (u64::MAX, (header as u64 + state_bytes).div_ceil(chunk as u64));
        let extent = Extent {
            file: DATA.to_owned(),
            file_len: header as u64 + state_bytes,
            file_offset: header as u64,
            offset: 0,
            len: state_bytes,
            chunk: chunk as u64,
            crc32c: vec![hex(u32::MAX); chunks as usize],
        };
        let largest = Manifest {
            format: FORMAT,
            job: job.to_owned(),
            round: most,
            world_size: u32::MAX,
            step: most,
            settings: settings.to_owned(),
            data: Position {
                epoch: most,
                cursor: most,
                samples: most,
                seed: most,
                global_batch: most,
                shards: u32::MAX,
            },
            state_bytes,
            tensors: tensors.to_vec(),
            extents: vec![extent],
            crc32c: String::new(),
        };
        let head = (MANIFEST + largest.encode().len()).next_multiple_of(ALIGNMENT);
        Layout { like: Manifest { step: 0, ..largest }, head, header }
    }

    /// The layout of a slot, from the slot's own manifest, for a process that does not know the run.
    pub(super) fn found(slot: &[u8]) -> Result<Layout, Unfit> {
        if slot.get(MARK..MARK + 8) != Some(&WHOLE.to_ne_bytes()) {
            return Err(Unfit::Torn);
        }
        let (about, _, length) = said(slot)?;
        let [extent] = &about.extents[..] else { return Err(Unfit::Flawed("it consists of several files".to_owned())) };
        let (file, header) = (extent.file_len as usize, extent.file_offset as usize);
        let head = slot.len().saturating_sub(file.next_multiple_of(ALIGNMENT));
        if head < MANIFEST + length || header + about.state_bytes as usize != file {
            return Err(Unfit::Flawed("its lengths do not match".to_owned()));
        }
        Ok(Layout { like: about, head, header })
    }

    /// Optimizer steps in the slot that it was [found](Self::found) in.
    pub(super) fn step(&self) -> u64 {
        self.like.step
    }

    /// The tensor that a number of the flat state belongs to.
    pub(crate) fn name_at(&self, number: usize) -> String {
        name_at(&self.like.tensors, number)
    }

    fn file(&self) -> usize {
        self.header + self.like.state_bytes as usize
    }

    /// Pieces under one checksum each that its file has.
    pub fn chunks(&self) -> usize {
        self.file().div_ceil(chunk_of(&self.like))
    }

    /// Bytes of a slot.
    pub(super) fn slot_bytes(&self) -> usize {
        (self.head + self.file()).next_multiple_of(ALIGNMENT)
    }
}

/// A copy of a snapshot, laid out as the file that it becomes.
#[derive(Debug)]
pub struct Slot {
    /// What the checkpoint's manifest says.
    pub(super) about: Manifest,
    /// What a later process needs: the mark, how the last step was done, the manifest.
    head: Pages,
    /// The state's place in the file.
    header: usize,
    pub(super) file: Pages,
    /// The first number of its state that is not finite. Training could not continue from it.
    flaw: Option<usize>,
}

/// Why a slot in memory holds no snapshot of this run.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Unfit {
    /// Nothing was ever put there, or it was cut short.
    Torn,
    /// What is wrong with it.
    Flawed(String),
}

impl Slot {
    /// Fails where a number of the state is not finite.
    pub(super) fn check_finite(&self) -> io::Result<()> {
        let flawed = |_| Err(io::Error::other("a number in the state is not finite; lower --lr"));
        self.flaw.map_or(Ok(()), flawed)
    }

    /// The first number of its state that is not finite, if one is.
    pub(crate) fn flaw(&self) -> Option<usize> {
        self.flaw
    }

    /// The slot of this number in memory for several.
    pub(super) fn at(mapping: &Arc<Mapping>, layout: &Layout, number: usize) -> Slot {
        let start = number * layout.slot_bytes();
        let (head, file) = (mapping.part(start, layout.head), mapping.part(start + layout.head, layout.file()));
        Slot { about: layout.like.clone(), head, header: layout.header, file, flaw: None }
    }

    /// A slot in memory of its own.
    #[cfg(test)]
    pub(super) fn alone(layout: &Layout) -> Slot {
        Slot::at(&Arc::new(Mapping::own(layout.slot_bytes()).unwrap()), layout, 0)
    }

    /// Replaces what it holds with this state. Touches no fresh memory once it was populated. A state with a number
    /// that is not finite is never marked as whole.
    ///
    /// # Panics
    /// When the state's length is not the layout's.
    pub fn fill(&mut self, header: &SnapshotHeader, state: &[f32]) {
        assert_eq!(self.open().len(), state.len(), "room for the state");
        let (checksums, flaw) = copied(self.file.bytes_mut(), self.header, state, chunk_of(&self.about));
        self.close(header, &checksums, flaw);
    }

    /// Room for a state that is written there, piece by piece, before it is [sealed](Self::seal). The slot holds
    /// nothing meanwhile.
    pub(crate) fn open(&mut self) -> &mut [f32] {
        self.mark().store(0, Ordering::Relaxed);
        // No write below may become visible before the mark is cleared.
        fence(Ordering::SeqCst);
        self.about.step = 0;
        let file_header = tensors::header(&self.about.tensors, None);
        assert_eq!(file_header.len(), self.header, "room for the file's header");
        let (before, state) = self.file.bytes_mut().split_at_mut(self.header);
        before.copy_from_slice(&file_header);
        bytemuck::cast_slice_mut(state)
    }

    /// Says that the state is all there. As [`fill`](Self::fill) otherwise.
    fn seal(&mut self, header: &SnapshotHeader) {
        let chunks = self.file.bytes().chunks(self.chunk());
        let checksums: Vec<String> = chunks.map(|chunk| hex(crc32c::crc32c(chunk))).collect();
        self.close(header, &checksums, first_not_finite(self.state()));
    }

    fn close(&mut self, header: &SnapshotHeader, checksums: &[String], flaw: Option<usize>) {
        self.flaw = flaw;
        let &SnapshotHeader { round, world_size, step, done, data } = header;
        let about = &mut self.about;
        (about.round, about.world_size, about.step, about.data) = (round, world_size, step, data);
        about.crc32c.clear();
        about.extents.iter_mut().for_each(|extent| extent.crc32c = checksums.to_vec());
        let manifest = about.encode();
        let head = self.head.bytes_mut();
        let done = done.unwrap_or(LastStep { round: 0, world_size: 0, loss: 0.0 });
        put(head, LENGTH, manifest.len() as u64);
        put(head, ROUND, done.round);
        put(head, WORLD_SIZE, u64::from(done.world_size));
        put(head, LOSS, u64::from(done.loss.to_bits()));
        put(head, CHECKSUM, u64::from(crc32c::crc32c(&head[LENGTH..CHECKSUM])));
        head[MANIFEST..MANIFEST + manifest.len()].copy_from_slice(&manifest);
        if flaw.is_none() {
            self.mark().store(WHOLE, Ordering::Release);
        }
    }

    /// Fills it while `work` is done, which does not change the state. When this returns both have ended: a slot never
    /// has the states of two steps in it. If no thread can be started, it is filled when `work` is done.
    pub fn fill_during<T>(&mut self, header: &SnapshotHeader, state: &[f32], work: impl FnOnce() -> T) -> T {
        self.during(work, |slot| slot.fill(header, state))
    }

    /// The same for a state that is there and only has to be sealed.
    pub(crate) fn seal_during<T>(&mut self, header: &SnapshotHeader, work: impl FnOnce() -> T) -> T {
        self.during(work, |slot| slot.seal(header))
    }

    fn during<T>(&mut self, work: impl FnOnce() -> T, write: impl Fn(&mut Slot) + Sync) -> T {
        let (done, begun) = thread::scope(|scope| {
            let copier = thread::Builder::new().name("snapshot".into());
            let begun = copier.spawn_scoped(scope, || write(self)).is_ok();
            (work(), begun)
        });
        if !begun {
            write(self);
        }
        done
    }

    /// Takes up what an earlier process left here, if that is whole and of the run that the layout is for. Reads all of
    /// it. How its last step was done.
    pub(super) fn take_up(&mut self) -> Result<Option<LastStep>, Unfit> {
        if self.mark().load(Ordering::Acquire) != WHOLE {
            return Err(Unfit::Torn);
        }
        let (about, done, _) = said(self.head.bytes())?;
        let own = &self.about;
        for (what, theirs, ours) in [("job", &about.job, &own.job), ("settings", &about.settings, &own.settings)] {
            if theirs != ours {
                return Err(Unfit::Flawed(format!(
                    "it belongs to another run: its {what} are \"{theirs}\", here \"{ours}\""
                )));
            }
        }
        let place = |manifest: &Manifest| {
            let of = |extent: &Extent| (extent.file_len, extent.file_offset, extent.len, extent.chunk);
            (manifest.tensors.clone(), manifest.extents.iter().map(of).collect::<Vec<_>>())
        };
        if place(&about) != place(own) {
            return Err(Unfit::Flawed("its tensors differ".to_owned()));
        }
        let expected = about.extents.iter().flat_map(|extent| &extent.crc32c);
        if !self.file.bytes().chunks(chunk_of(own)).map(|chunk| hex(crc32c::crc32c(chunk))).eq(expected.cloned()) {
            return Err(Unfit::Flawed("its bytes do not match its checksums".to_owned()));
        }
        if first_not_finite(self.state()).is_some() {
            return Err(Unfit::Flawed("a number in its state is not finite".to_owned()));
        }
        self.about = about;
        Ok(done)
    }

    /// Makes the kernel provide all of its memory.
    pub(super) fn populate(&mut self) {
        self.head.populate();
        self.file.populate();
    }

    /// Bytes under one checksum.
    pub(super) fn chunk(&self) -> usize {
        chunk_of(&self.about)
    }

    /// Optimizer steps in it; 0 where it holds nothing.
    pub fn step(&self) -> u64 {
        self.about.step
    }

    /// The flat state in it.
    pub(super) fn state(&self) -> &[f32] {
        bytemuck::cast_slice(&self.file.bytes()[self.header..])
    }

    fn mark(&self) -> &AtomicU64 {
        let mark = self.head.bytes()[MARK..].as_ptr().cast::<u64>().cast_mut();
        // SAFETY: a head begins at a multiple of 4 KiB, so the number is aligned, and it is reached by no other way.
        #[allow(unsafe_code)]
        unsafe {
            AtomicU64::from_ptr(mark)
        }
    }
}

/// Bytes under one checksum in what a slot holds.
fn chunk_of(about: &Manifest) -> usize {
    about.extents.first().map_or(CHUNK, |extent| extent.chunk as usize)
}

/// What a slot's head says: the manifest, how the last step was done, and the manifest's length.
fn said(head: &[u8]) -> Result<(Manifest, Option<LastStep>, usize), Unfit> {
    let flawed = || Unfit::Flawed("its head's checksum does not match".to_owned());
    let before = head.get(..MANIFEST).ok_or_else(flawed)?;
    let number =
        |place: usize| before[place..place + 8].iter().rev().fold(0, |number, byte| number << 8 | u64::from(*byte));
    if number(CHECKSUM) != u64::from(crc32c::crc32c(&before[LENGTH..CHECKSUM])) {
        return Err(flawed());
    }
    let length = number(LENGTH) as usize;
    let manifest = MANIFEST.checked_add(length).and_then(|end| head.get(MANIFEST..end)).ok_or_else(flawed)?;
    let about = Manifest::decode(manifest).map_err(Unfit::Flawed)?;
    let (world_size, loss) = (number(WORLD_SIZE) as u32, f32::from_bits(number(LOSS) as u32));
    let done = LastStep { round: number(ROUND), world_size, loss };
    Ok((about, Some(done).filter(|done| done.world_size > 0), length))
}

fn put(head: &mut [u8], place: usize, number: u64) {
    head[place..place + 8].copy_from_slice(&number.to_le_bytes());
}

/// Copies the state behind a file's header, and returns the checksums of the file's chunks, and the first number that
/// is not finite.
fn copied(file: &mut [u8], header: usize, state: &[f32], chunk: usize) -> (Vec<String>, Option<usize>) {
    let (mut rest, mut flaw): (&[u8], _) = (bytemuck::cast_slice(state), None);
    let chunks = file.chunks_mut(chunk).enumerate().map(|(number, piece)| {
        let head = header.saturating_sub(number * chunk).min(piece.len());
        let (before, into) = piece.split_at_mut(head);
        let mut checksum = crc32c::crc32c(before);
        for bite in into.chunks_mut(BITE) {
            let (from, more) = rest.split_at(bite.len());
            bite.copy_from_slice(from);
            checksum = crc32c::crc32c_append(checksum, bite);
            // A bite may end within a number.
            let first = state.len() - rest.len().div_ceil(size_of::<f32>());
            let numbers = &state[first..state.len() - more.len() / size_of::<f32>()];
            flaw = flaw.or_else(|| first_not_finite(numbers).map(|place| first + place));
            rest = more;
        }
        hex(checksum)
    });
    (chunks.collect(), flaw)
}
