//! The trainer on a GPU, as far as that can be shown without one: every kernel is compiled for real GPUs, and the whole
//! way from flags to parameters runs on a double of the driver, which runs the same kernels on the CPU. Nothing here
//! says how a real GPU behaves, nor how fast it is: for that there is `make gpu`, which runs the tests of `kernels`,
//! `graphs`, `precision::products`, `snapshots::state` and `snapshots::timed` on one.
#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stderr)] // The harness may do what its tests may.

#[allow(dead_code)] // What other tests need.
#[path = "../training/agent.rs"]
mod agent;
mod compiling;
mod double;
mod graphs;
mod kernels;
mod library;
mod nccl;
mod overlap;
mod precision;
mod rounds;
mod snapshots;
mod training;
mod warnings;
#[allow(dead_code)] // What other tests need.
#[path = "../training/worker.rs"]
mod worker;
