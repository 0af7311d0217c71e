//! Communicators between processes, on the stand-in for NCCL (`trainer/cuda/fake-nccl`): right sums, clear errors when
//! ranks die or hang, and a working communicator in the next round. What passes here says nothing of NCCL itself.
#![allow(unsafe_code)]
#![allow(clippy::unwrap_used, clippy::panic)] // The harness may panic as its tests may.

mod changes;
mod failures;
mod libraries;
mod process;
mod rank;
