//! NVIDIA GPUs: their libraries, found when the program runs; the kernels of `trainer/cuda/kernels`, compiled for the
//! GPU at hand; memory and launches.
//!
//! ```text
//! libraries   the driver, NVRTC and cuBLASLt: loaded, if they will do   surroundings  where they, and NCCL, may lie
//! compiler    kernels to code for one kind of GPU, by NVRTC          cache   that code on disk
//! gpu         a GPU with the kernels on it                           launch  each kernel, with its bounds checked;
//!                                                                    rows, attention  the same for those of a GPT
//! graph       launches, captured once and replayed                   product  products of matrices
//! cublaslt    products by NVIDIA's library                           nccl_stream  a second stream, for sums over ranks by NCCL
//! state       what training changes, and copies of it beside it      host_memory  what copies go to and from
//! nccl        NCCL between the ranks of a round, and its recovery    error   why a GPU cannot be used
//! ```
//!
//! Nothing of CUDA is needed to build. All that is computed goes to one stream, in the order in which it is asked for;
//! whoever reads a result waits for it. No kernel adds in an order that chance could change, so equal work gives equal
//! bits on GPUs of one kind.

mod attention;
mod cache;
mod compiler;
mod cublaslt;
mod error;
mod gpu;
mod graph;
mod host_memory;
mod launch;
mod libraries;
pub mod nccl;
mod nccl_stream;
mod product;
mod rows;
mod site_packages;
mod state;
mod surroundings;

pub use attention::{Attended, Attention};
pub use compiler::{Compiled, Compiler};
pub use cudarc::driver::{CudaSlice, CudaView, CudaViewMut};
pub use error::CudaError;
pub use gpu::{Buffer, Gpu, Mark, Precision};
pub use graph::Graphs;
pub use host_memory::HostMemory;
pub use launch::{AdamwStep, Labelled, Labels};
pub use nccl_stream::{NcclStream, all_reduce, ordered_sum};
pub use product::{After, Matrix};
pub use rows::{Chunks, Norm, Occurrences, Residual};
pub use state::{GpuState, HostCopy};
pub use surroundings::Surroundings;

/// A file of kernels.
#[derive(Debug, PartialEq, Eq)]
pub struct Source {
    /// Its name.
    pub file: &'static str,
    /// CUDA C++, which includes nothing.
    pub text: &'static str,
    /// The kernels in it.
    pub kernels: &'static [&'static str],
}

/// All kernels.
pub const SOURCES: [Source; 6] = [
    Source {
        file: "product.cu",
        text: include_str!("../kernels/product.cu"),
        kernels: &["product", "follow", "round_to_bf16"],
    },
    Source {
        file: "sums.cu",
        text: include_str!("../kernels/sums.cu"),
        kernels: &["add", "sum_rows", "sum_all", "sum_squares"],
    },
    Source { file: "loss.cu", text: include_str!("../kernels/loss.cu"), kernels: &["cross_entropy"] },
    Source { file: "adamw.cu", text: include_str!("../kernels/adamw.cu"), kernels: &["adamw"] },
    Source {
        file: "rows.cu",
        text: include_str!("../kernels/rows.cu"),
        kernels: &[
            "layer_norm",
            "layer_norm_slope",
            "layer_norm_chunks",
            "sum_chunks",
            "gelu",
            "gelu_slope",
            "embed",
            "embed_slope",
        ],
    },
    Source {
        file: "attention.cu",
        text: include_str!("../kernels/attention.cu"),
        kernels: &[
            "attention_64",
            "attention_queries_64",
            "attention_keys_64",
            "attention_128",
            "attention_queries_128",
            "attention_keys_128",
        ],
    },
];

/// A model's pass on a GPU, in two parts: what crosses from the host, and kernels alone. So the second can be captured
/// once and replayed.
pub trait Pass<B> {
    /// Copies the batch to where [`gradient`](Pass::gradient) reads it, and returns its shape as one number: batches
    /// with equal numbers need the same launches. There is at least one sample.
    fn load(&mut self, gpu: &Gpu, batch: &B) -> Result<u64, CudaError>;

    /// Has the GPU write into `gradient` the derivative of the loaded batch's loss, summed over its samples, and that sum
    /// into the one more number at its end.
    ///
    /// It launches kernels and nothing else: no copies from or to the host, no waiting, and nothing in the launches that
    /// depends on the batch's numbers. Memory comes from [`Buffer`]s, which stay where they are while shapes do not grow.
    ///
    /// It may tell on the way how much of the gradient is final: `done` takes it from some place on to its end, more each
    /// time, and never all of it. The launches so far write that part, and those to come leave it alone.
    fn gradient(
        &mut self,
        gpu: &Gpu,
        parameters: &CudaSlice<f32>,
        gradient: &mut CudaSlice<f32>,
        done: &mut Done<'_>,
    ) -> Result<(), CudaError>;
}

/// Takes the end of a gradient that is final once the launches so far are done.
pub type Done<'a> = dyn FnMut(CudaViewMut<'_, f32>) -> Result<(), CudaError> + 'a;
