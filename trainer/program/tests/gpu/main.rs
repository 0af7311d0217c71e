//! The trainer on a GPU, as far as this can be tested without one: everything from flags to parameters runs on a double
//! of the driver, which runs the kernels on the CPU. So these tests say nothing of a real GPU's behaviour or speed.
//! `make gpu` runs those in `models`, `graphs` and `snapshots::timed` on a real GPU.
#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stderr)] // The harness may do what its tests may.

#[allow(dead_code)] // What other tests need.
#[path = "../training/agent.rs"]
mod agent;
#[allow(dead_code)]
#[path = "../../../cuda/tests/cuda/buffers.rs"]
mod buffers;
mod checking;
#[allow(dead_code)]
#[path = "../../../cuda/tests/cuda/double/mod.rs"]
mod double;
mod graphs;
mod library;
mod models;
mod nccl;
mod overlap;
mod precision;
mod rounds;
mod snapshots;
mod training;
#[allow(dead_code)]
#[path = "../../../cuda/tests/cuda/warnings.rs"]
mod warnings;
#[allow(dead_code)]
#[path = "../training/worker.rs"]
mod worker;
