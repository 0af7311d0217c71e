//! NCCL, for sums between GPUs: loaded when the program runs, and recovered in the same process when the group
//! changes. Not for what is summed, nor for the GPU itself: that is behind [`Device`].
//!
//! ```text
//! library        the shared library: found, loaded, asked which functions it has
//! ordered        the sum in the order of the shards, as steps
//! recovery       from the old members to the new ones: shrink, grow, or anew. Decides, calls nothing
//! retry          when it is tried again after a failure. Decides, calls nothing
//! handle         one communicator: every call of NCCL, in one thread        nccl_thread   that thread
//! communicator   the front: joins each round's group, runs operations, gives up on them
//! ```
//!
//! NCCL never gives up by itself, and its abort is safe only while no thread is inside one of its calls. So one thread
//! makes all calls, on a communicator that never blocks, and looks between them at the time and at a flag. Who is in the
//! round, who has died, and the bytes by which a communicator begins, all come from the round's TCP
//! [`Group`](elastic_collective::Group), whose peers have shown job and round: a late rank of an old round has no way in.
//!
//! Facts about NCCL are of its documentation and sources, 2.17 to 2.30. What is tested here is tested on a stand-in
//! (`trainer/cuda/fake-nccl`), which moves bytes between processes on one host: nothing in this module has been run on a GPU.

mod communicator;
mod handle;
mod library;
mod nccl_thread;
mod ordered;
pub mod recovery;
pub mod retry;

use std::ffi::c_void;

pub use communicator::{Communicator, Joined};
pub use library::{Library, LibraryError};

/// The device of a rank, as far as a communicator needs it. It is used in one thread.
pub trait Device: Send + 'static {
    /// Makes it the device of the calling thread. Called first.
    fn bind(&mut self) -> Result<(), String>;

    /// The stream that operations run on, a `cudaStream_t`; the same for as long as this lives.
    fn stream(&self) -> *mut c_void;

    /// Marks the end of what is on the stream, as by recording an event.
    fn mark(&mut self) -> Result<(), String>;

    /// Has the stream do this.
    fn add(&mut self, added: Added) -> Result<(), String>;

    /// Whether all before the last mark is done. Must not block: a stream with a dead peer's operation never ends.
    fn is_done(&mut self) -> Result<bool, String>;
}

/// A sum of two, number by number, or a copy where there is but one. What it is written into may be one of the two.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Added {
    /// The one that comes first in the order.
    pub left: Span,
    /// The other, as long.
    pub right: Option<Span>,
    /// Where the result goes, as long.
    pub into: Span,
}

/// Numbers in the memory of the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Span {
    address: usize,
    elements: usize,
}

impl Span {
    /// `elements` 32-bit floats at `address`.
    ///
    /// # Safety
    /// They are memory that the device can reach, and stay so, with nobody else at them, while an operation on them is
    /// under way. An operation that fails is under way until the communicator's method has returned.
    #[allow(unsafe_code)]
    pub unsafe fn new(address: usize, elements: usize) -> Span {
        Span { address, elements }
    }

    /// How many numbers.
    pub fn elements(self) -> usize {
        self.elements
    }

    /// Where they begin.
    pub fn address(self) -> usize {
        self.address
    }

    fn part(self, range: std::ops::Range<usize>) -> Span {
        assert!(range.start <= range.end && range.end <= self.elements, "a part of it");
        Span { address: self.address + range.start * size_of::<f32>(), elements: range.len() }
    }

    fn bytes(self) -> u64 {
        (self.elements * size_of::<f32>()) as u64
    }

    fn pointer(self) -> *mut c_void {
        self.address as *mut c_void
    }
}
