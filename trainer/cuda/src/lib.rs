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
pub use kernels::attention::{Attended, Attention};
pub use kernels::launch::{Labelled, Labels};
pub use kernels::number::{Bf16, Number};
pub use kernels::rows::{Chunks, More, Norm, Occurrences, Residual, SlopeIn};
pub use libraries::compiler::{Compiled, Compiler};
pub use libraries::surroundings::Surroundings;
pub use nccl::stream::{NcclStream, all_reduce, ordered_sum};
pub use products::bf16::Epilogue;
pub use products::{After, Matrix};
pub use state::{GpuState, HostCopy};

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
pub const SOURCES: [Source; 7] = [
    Source {
        file: "product.cu",
        text: concat!(
            include_str!("../kernels/fours.cu"),
            include_str!("../kernels/bf16.cu"),
            "#line 1\n",
            include_str!("../kernels/product.cu")
        ),
        kernels: &["product", "product_bf16", "product_bf16_to_f32", "follow", "round_to_bf16"],
    },
    Source {
        file: "sums.cu",
        text: include_str!("../kernels/sums.cu"),
        kernels: &["add", "sum_rows", "sum_all", "sum_squares"],
    },
    Source {
        file: "loss.cu",
        text: concat!(
            include_str!("../kernels/fours.cu"),
            include_str!("../kernels/bf16.cu"),
            "#line 1\n",
            include_str!("../kernels/loss.cu")
        ),
        kernels: &["cross_entropy", "cross_entropy_bf16"],
    },
    Source {
        file: "adamw.cu",
        text: concat!(include_str!("../kernels/fours.cu"), "#line 1\n", include_str!("../kernels/adamw.cu")),
        kernels: &["adamw"],
    },
    Source {
        file: "rows.cu",
        text: concat!(
            include_str!("../kernels/fours.cu"),
            include_str!("../kernels/bf16.cu"),
            "#line 1\n",
            include_str!("../kernels/rows.cu")
        ),
        kernels: &[
            "layer_norm",
            "layer_norm_bf16",
            "layer_norm_slope",
            "layer_norm_slope_bf16",
            "layer_norm_chunks",
            "layer_norm_chunks_bf16",
            "sum_chunks",
            "sum_chunks_bf16",
            "gelu",
            "gelu_slope",
            "follow_bf16",
            "round_parameters",
            "embed",
            "embed_slope",
        ],
    },
    Source {
        file: "attention.cu",
        text: concat!(
            include_str!("../kernels/fours.cu"),
            include_str!("../kernels/heads.cu"),
            "#line 1\n",
            include_str!("../kernels/attention.cu")
        ),
        kernels: &[
            "attention_64",
            "attention_queries_64",
            "attention_keys_64",
            "attention_128",
            "attention_queries_128",
            "attention_keys_128",
        ],
    },
    Source {
        file: "attention_bf16.cu",
        text: concat!(
            include_str!("../kernels/fours.cu"),
            include_str!("../kernels/heads.cu"),
            include_str!("../kernels/bf16.cu"),
            include_str!("../kernels/tensor_cores.cu"),
            include_str!("../kernels/attention_tiles.cu"),
            "#line 1\n",
            include_str!("../kernels/attention_bf16.cu")
        ),
        kernels: &[
            "attention_by_heads",
            "attention_means",
            "attention_bf16_64",
            "attention_bf16_queries_64",
            "attention_bf16_keys_64",
            "attention_bf16_128",
            "attention_bf16_queries_128",
            "attention_bf16_keys_128",
        ],
    },
];

/// A model's pass on a GPU, in two parts: the copies from the host, and the launches. So the launches can be captured
/// once and replayed.
pub trait Pass<B> {
    /// Does what it can for the next batch to load, on the host alone. It is called while the GPU computes the one before,
    /// or not at all.
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
