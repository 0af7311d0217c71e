//! GPUs, as far as they can be tested without one: every kernel is compiled for real GPUs, and runs on a double of the
//! driver, which runs the same kernels on the CPU. So these tests say nothing of a real GPU's behaviour or speed. `make
//! gpu` runs those in `bf16`, `kernels`, `products` and `state` on a real GPU.
#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stderr)] // The harness may do what its tests may.

mod bf16;
mod buffers;
mod compiling;
mod cubin;
#[allow(dead_code)] // What other tests need.
mod double;
mod kernels;
mod library;
mod products;
mod state;
mod warnings;
