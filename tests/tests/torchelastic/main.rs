//! Jobs that meet by TorchElastic's own rendezvous on etcd's v2 API: of our agents alone, and mixed with real torchrun.
//! Those with torchrun are skipped, with a line that says so, where there is no PyTorch.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stderr, missing_docs)]

mod found;
mod migration;
mod mixed;
mod ours;
mod scene;
mod training;
