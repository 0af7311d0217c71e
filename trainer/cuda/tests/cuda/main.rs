//! GPUs, as far as that can be shown without one: every kernel is compiled for real GPUs, and runs on a double of the
//! driver, which runs the same kernels on the CPU. Nothing here says how a real GPU behaves, nor how fast it is: for that
//! there is `make gpu`, which runs the tests of `kernels`, `products` and `state` on one.
#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stderr)] // The harness may do what its tests may.

mod buffers;
mod compiling;
#[allow(dead_code)] // What other tests need.
mod double;
mod kernels;
mod library;
mod products;
mod state;
mod warnings;
