//! Communicators between processes, on the stand-in for NCCL (`trainer/cuda/fake-nccl`): right sums, clear errors when ranks
//! die or hang, and a working communicator in the next round. What passes here is no result of NCCL's.
#![allow(unsafe_code)]
#![allow(clippy::unwrap_used, clippy::panic)] // The harness may panic as its tests may.

mod changes;
mod failures;
mod libraries;
mod process;
mod rank;
