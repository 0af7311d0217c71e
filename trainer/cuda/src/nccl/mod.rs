//! NCCL, for sums between GPUs. It is loaded when the program runs. Each round makes a new communicator in the same
//! process. The GPU itself is behind the trait [`Device`].
//!
//! ```text
//! library        finds and loads the shared library
//! versions       which ranks have which version. Calls nothing
//! ordered        the sum in the order of the shards, as steps
//! retry          decides when NCCL is tried again after a failure. Calls nothing
//! handle         one communicator: every call of NCCL, in one thread        nccl_thread   that thread
//! stream         a second stream of the GPU, for NCCL's sums
//! communicator   the front: joins each round's group, runs operations, gives up on them
//! ```
//!
//! NCCL never gives up by itself, and its abort is safe only while no thread is inside one of its calls. So one thread
//! makes all calls, on a communicator that never blocks, and between the calls it looks at the time and at a flag. The
//! round's TCP [`Group`](elastic_collective::Group) says who is in the round, who has died, and by which id a
//! communicator begins. Its peers have proved that they belong to the job and the round, so a late
//! rank of an old round cannot join.
//!
//! Facts about NCCL come from its documentation and sources, 2.17 to 2.30. The tests use a stand-in
//! (`trainer/cuda/fake-nccl`), which moves bytes between processes on one host. The kit
//! (`scripts/gpu/nccl.py`) has run it between processes on one GPU.

mod communicator;
mod handle;
mod library;
mod nccl_thread;
mod ordered;
pub mod retry;
pub(crate) mod stream;
mod versions;

use std::ffi::c_void;

pub use communicator::{Communicator, Joined};
pub use library::{Library, LibraryError};

/// The part of a rank's GPU that a communicator needs. It is used in one thread.
pub trait Device: Send + 'static {
    /// Makes this GPU the device of the calling thread. The thread calls it before the other methods.
    fn bind(&mut self) -> Result<(), String>;

    /// The stream that operations run on, a `cudaStream_t`; the same for as long as this lives.
    fn stream(&self) -> *mut c_void;

    /// Marks the end of what is on the stream, as by recording an event.
    fn mark(&mut self) -> Result<(), String>;

    /// Adds a sum or a copy to the stream's work.
    fn add(&mut self, added: Added) -> Result<(), String>;

    /// Whether all work before the last mark is done. It must not block: an operation with a dead peer never ends.
    fn is_done(&mut self) -> Result<bool, String>;
}

/// A sum of two spans, number by number, or a copy of one. It may be written into one of the two.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Added {
    /// The first summand.
    pub left: Span,
    /// The second summand, of the same length. None for a copy.
    pub right: Option<Span>,
    /// Where the result goes, of the same length.
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
    /// The device can reach this memory. Until an operation on it has ended, the memory stays reachable, and no other
    /// code uses it. An operation that fails is under way until the communicator's method has returned.
    #[allow(unsafe_code)]
    pub unsafe fn new(address: usize, elements: usize) -> Span {
        Span { address, elements }
    }

    /// The count of the numbers.
    pub fn elements(self) -> usize {
        self.elements
    }

    /// The address of the first number.
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
