//! NVIDIA GPUs: their libraries, which are found when the program runs; the kernels of `trainer/cuda/kernels`, which
//! are then compiled for the GPU; memory and launches.
//!
//! ```text
//! libraries     finds and loads NVIDIA's libraries (surroundings: where they may lie), and compiles kernels for one
//!               kind of GPU by NVRTC (compiler, with a cache on disk)
//! gpu           a GPU with the kernels on it, and its memory         host_memory  pinned memory of the host
//! kernels       launches of kernels, with checked shapes             products     products of matrices, by cuBLASLt too
//! graph         launches, captured once and replayed                 state        the training state, and copies of it
//! nccl          NCCL between the ranks of a round, and its recovery  error        why a GPU cannot be used
//! ```
//!
//! Nothing of CUDA is needed to build. All computation goes to one stream, in the order of the calls; a call that reads
//! a result waits for it. Every kernel adds in a fixed order, so equal work gives equal bits on GPUs of one kind.
//!
//! A kernel checks nothing. So the functions that launch kernels or copy numbers check lengths and shapes, and panic
//! when those do not fit.

mod error;
mod gpu;
mod graph;
mod host_memory;
mod kernels;
mod libraries;
pub mod nccl;
mod products;
mod state;

pub use cudarc::driver::{CudaSlice, CudaView, CudaViewMut};
pub use error::CudaError;
pub use gpu::{Buffer, Gpu, Mark, Precision};
pub use graph::Graphs;
pub use host_memory::HostMemory;
pub use kernels::adamw::{AdamwStep, Decays};
pub use kernels::attention::{Attended, Attends, Attention};
pub use kernels::launch::{Labelled, Labels};
pub use kernels::number::{Bf16, Number};
pub use kernels::rows::{Chunks, More, Norm, Occurrences, Residual, SlopeIn};
pub use kernels::sources::{SOURCES, Source};
pub use libraries::compiler::{Compiled, Compiler};
pub use libraries::error::LoadError;
pub use libraries::surroundings::Surroundings;
pub use nccl::stream::{NcclStream, ordered_sum};
pub use products::bf16::Epilogue;
pub use products::{After, Matrix};
pub use state::{GpuState, HostCopy};

/// A model's pass on a GPU, in two parts: the copies from the host, and the launches. So the launches can be captured
/// once and replayed.
pub trait Pass<B> {
    /// Does what it can for the next batch to load, on the host alone. It is called while the GPU computes the one
    /// before, or not at all.
    fn prepare(&mut self, batch: &B) {
        let _ = batch;
    }

    /// Copies the batch to where [`gradient`](Pass::gradient) reads it, and returns its shape as one number: batches
    /// with equal numbers need the same launches. There is at least one sample.
    fn load(&mut self, gpu: &Gpu, batch: &B) -> Result<u64, CudaError>;

    /// Has the GPU write into `gradient` the derivative of the loaded batch's loss, summed over its samples. `gradient`
    /// has one number more than there are parameters: that sum of losses.
    ///
    /// It only launches kernels: it copies nothing from or to the host, does not wait, and no launch depends on the
    /// batch's numbers. Memory comes from [`Buffer`]s, which stay where they are while shapes do not grow.
    ///
    /// It may say meanwhile how much of the gradient is final: `done` takes the gradient from some place to its end,
    /// more each time, and never all of it. The launches so far write that part, and later launches leave it alone.
    fn gradient(
        &mut self,
        gpu: &Gpu,
        parameters: &CudaSlice<f32>,
        gradient: &mut CudaSlice<f32>,
        done: &mut Done<'_>,
    ) -> Result<(), CudaError>;
}

/// Takes the part at the end of a gradient that is final once the launches so far are done.
pub type Done<'a> = dyn FnMut(CudaViewMut<'_, f32>) -> Result<(), CudaError> + 'a;
