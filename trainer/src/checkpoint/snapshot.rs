//! Copies of the state that training leaves behind when it goes on. Not for when to take one, nor for writing it.

use super::disk::ALIGNMENT;
use super::manifest::{Entry, FORMAT, Manifest, Position};
use super::tensors;

/// What is to be saved: the flat state, its names, and where training stands.
#[derive(Debug, Clone, Copy)]
pub struct Snapshot<'a> {
    /// The job.
    pub job: &'a str,
    /// The round that saves.
    pub round: u64,
    /// Ranks in it.
    pub world_size: u32,
    /// Optimizer steps in the state.
    pub step: u64,
    /// What a step computes, in words.
    pub settings: &'a str,
    /// Where the data stands.
    pub data: Position,
    /// Names of the state's pieces.
    pub tensors: &'a [Entry],
    /// The flat state.
    pub state: &'a [f32],
}

/// Bytes that start at a multiple of 4 KiB, in pages that are in memory from the start: the first touch of a fresh page
/// costs many times what copying it does.
#[derive(Debug)]
pub(super) struct Pages {
    memory: Vec<u8>,
    start: usize,
    len: usize,
}

impl Pages {
    pub(super) fn new(len: usize) -> Pages {
        let mut memory = Vec::with_capacity(len + ALIGNMENT);
        ask_for_huge_pages(&memory);
        // Not zero: the kernel gives zeros without giving memory.
        memory.resize(len + ALIGNMENT, 0xff);
        let start = memory.as_ptr().align_offset(ALIGNMENT);
        Pages { memory, start, len }
    }

    pub(super) fn bytes(&self) -> &[u8] {
        &self.memory[self.start..self.start + self.len]
    }

    pub(super) fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.memory[self.start..self.start + self.len]
    }

    /// Makes it `len` bytes long; what was in them is lost.
    fn refit(&mut self, len: usize) {
        if self.start + len <= self.memory.len() {
            self.len = len;
        } else {
            *self = Pages::new(len);
        }
    }
}

/// Asks that room which nobody has touched yet be given in large pages, where it is large: copying to many small ones
/// takes longer, above all in a virtual machine.
fn ask_for_huge_pages(room: &Vec<u8>) {
    let skipped = room.as_ptr().align_offset(ALIGNMENT);
    let whole = room.capacity().saturating_sub(skipped) / ALIGNMENT * ALIGNMENT;
    // SAFETY: the range lies in the vector's own allocation, and how it is backed changes nothing in it. The kernel may
    // refuse, which is as good as before.
    #[allow(unsafe_code)]
    unsafe {
        libc::madvise(room.as_ptr().wrapping_add(skipped).cast_mut().cast(), whole, libc::MADV_HUGEPAGE);
    }
}

/// A copy of a snapshot, laid out as the file that it becomes.
#[derive(Debug)]
pub struct Frame {
    /// All that the manifest says but where the bytes lie.
    pub(super) about: Manifest,
    /// The header's length in `pages`; the state follows.
    pub(super) header: usize,
    pub(super) pages: Pages,
}

impl Frame {
    /// Room for a state of these tensors.
    pub fn room(tensors: &[Entry]) -> Frame {
        let header = tensors::header(tensors, None).len();
        let state = tensors.iter().map(|tensor| tensor.offset + tensor.len).max().unwrap_or(0);
        Frame { about: Manifest::default(), header, pages: Pages::new(header + state as usize) }
    }

    /// Replaces what it holds. Touches no fresh memory if the tensors are those that the room is for.
    pub fn fill(&mut self, snapshot: &Snapshot<'_>) {
        let header = tensors::header(snapshot.tensors, None);
        let state: &[u8] = bytemuck::cast_slice(snapshot.state);
        self.pages.refit(header.len() + state.len());
        let bytes = self.pages.bytes_mut();
        bytes[..header.len()].copy_from_slice(&header);
        bytes[header.len()..].copy_from_slice(state);
        self.header = header.len();
        self.about = Manifest {
            format: FORMAT,
            job: snapshot.job.to_owned(),
            round: snapshot.round,
            world_size: snapshot.world_size,
            step: snapshot.step,
            settings: snapshot.settings.to_owned(),
            data: snapshot.data,
            state_bytes: state.len() as u64,
            tensors: snapshot.tensors.to_vec(),
            extents: Vec::new(),
            crc32c: String::new(),
        };
    }

    /// Optimizer steps in it.
    pub fn step(&self) -> u64 {
        self.about.step
    }
}
