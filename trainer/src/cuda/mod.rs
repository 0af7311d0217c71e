//! NVIDIA GPUs: their libraries, found when the program runs; the kernels of `trainer/kernels`, compiled for the GPU at
//! hand; memory and launches. Not for what is trained, nor for other ranks.
//!
//! ```text
//! libraries   the driver, NVRTC and cuBLASLt: where they lie, and whether they will do
//! compiler    kernels to code for one kind of GPU, by NVRTC          cache   that code on disk
//! gpu         a GPU with the kernels on it                           launch  each kernel, with its bounds checked;
//!                                                                    rows, attention  the same for those of a GPT
//! graph       launches, captured once and replayed                   product  products of matrices
//! cublaslt    products by NVIDIA's library                           nccl_stream  a second stream, for sums over ranks by NCCL
//! state       what training changes, and copies of it beside it      host_memory  what copies go to and from
//! ```
//!
//! Nothing of CUDA is needed to build. All that is computed goes to one stream, in the order in which it is asked for;
//! whoever reads a result waits for it. No kernel adds in an order that chance could change, so equal work gives equal
//! bits on GPUs of one kind.

mod attention;
mod cache;
mod compiler;
mod cublaslt;
mod gpu;
mod graph;
mod host_memory;
mod launch;
mod libraries;
mod nccl_stream;
mod product;
mod rows;
mod state;

use std::path::PathBuf;

pub use attention::{Attended, Attention};
pub use compiler::{Compiled, Compiler};
pub use cudarc::driver::{CudaSlice, CudaView, CudaViewMut};
pub(crate) use gpu::Mark;
pub use gpu::{Gpu, Room};
pub use graph::Graphs;
pub use host_memory::HostMemory;
pub use launch::{Labelled, Labels};
pub use libraries::Surroundings;
pub(crate) use nccl_stream::{NcclStream, all_reduce, ordered_sum};
pub use product::{After, Matrix};
pub use rows::{Chunks, Norm, Occurrences, Stream};
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
pub const SOURCES: [Source; 6] = [
    Source {
        file: "product.cu",
        text: include_str!("../../kernels/product.cu"),
        kernels: &["product", "follow", "round_to_bf16"],
    },
    Source {
        file: "sums.cu",
        text: include_str!("../../kernels/sums.cu"),
        kernels: &["add", "sum_rows", "sum_all", "sum_squares"],
    },
    Source { file: "loss.cu", text: include_str!("../../kernels/loss.cu"), kernels: &["cross_entropy"] },
    Source { file: "adamw.cu", text: include_str!("../../kernels/adamw.cu"), kernels: &["adamw"] },
    Source {
        file: "rows.cu",
        text: include_str!("../../kernels/rows.cu"),
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
        text: include_str!("../../kernels/attention.cu"),
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
    /// depends on the batch's numbers. Memory comes from [`Room`]s, which stay where they are while shapes do not grow.
    ///
    /// It may tell on the way how much of the gradient is final, as [`Model::gradient_from_back`] does: `done` takes it
    /// from some place on to its end, more each time, and never all of it. The launches so far write that part, and those
    /// to come leave it alone.
    ///
    /// [`Model::gradient_from_back`]: crate::model::Model::gradient_from_back
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

/// Why a GPU cannot be used, or no longer.
#[derive(Debug, thiserror::Error)]
pub enum CudaError {
    /// There is no library of this name.
    #[error("{name} is not to be found; {remedy}, or name the folder that has it in {}", libraries::FOLDERS)]
    Missing {
        /// Its name.
        name: &'static str,
        /// What brings it.
        remedy: &'static str,
    },
    /// A library is there, but cannot be loaded.
    #[error("{} cannot be loaded: {cause}", path.display())]
    Unloadable {
        /// Where it lies.
        path: PathBuf,
        /// Why.
        cause: String,
    },
    /// A library is older than its users.
    #[error("{} has no {symbol}: it is too old, or is not what its name says; {remedy}", path.display())]
    Lacks {
        /// Where it lies.
        path: PathBuf,
        /// What it lacks.
        symbol: &'static str,
        /// What to do.
        remedy: &'static str,
    },
    /// Two drivers are on the loader's path.
    #[error("{} is not the library that the loader finds as libcuda.so; is a folder of CUDA stubs in LD_LIBRARY_PATH?",
        path.display())]
    Shadowed {
        /// The one that was chosen.
        path: PathBuf,
    },
    /// The driver is too old.
    #[error("the NVIDIA driver knows CUDA {}.{} and 12.0 is needed; update the driver", version / 1000, version / 10 % 100)]
    OldDriver {
        /// As the driver tells it.
        version: i32,
    },
    /// A library makes what the driver cannot load.
    #[error(
        "{} is of a later CUDA than the NVIDIA driver's {driver}; update the driver, or: pip install {package}{driver}",
        path.display()
    )]
    NewLibrary {
        /// Where it lies.
        path: PathBuf,
        /// The driver's CUDA: its first number.
        driver: i32,
        /// The Python package that has it, but for that number.
        package: &'static str,
    },
    /// There is no GPU.
    #[error("the NVIDIA driver shows no GPU: {cause}; nvidia-smi lists them, CUDA_VISIBLE_DEVICES hides them")]
    NoGpu {
        /// What it says.
        cause: String,
    },
    /// There are fewer GPUs.
    #[error(
        "there is no GPU {wanted}, but {count}, counted from 0; give this worker another with --device cuda:N, or start \
        fewer workers on this node"
    )]
    NoSuchGpu {
        /// Its number.
        wanted: usize,
        /// How many there are.
        count: usize,
    },
    /// A kernel is not accepted.
    #[error("NVRTC cannot compile {source_file} for {arch}: {log}")]
    Compile {
        /// The kernel's file.
        source_file: &'static str,
        /// The kind of GPU.
        arch: String,
        /// What the compiler says.
        log: String,
    },
    /// There is no room for a buffer.
    #[error(
        "GPU {gpu} has no room for {bytes} bytes more; lower --micro-batch, or end what else is on it (nvidia-smi lists it)"
    )]
    OutOfMemory {
        /// Its number.
        gpu: usize,
        /// What was asked for.
        bytes: usize,
    },
    /// The driver says no.
    #[error("GPU {gpu} failed to {doing}: {cause}")]
    Failed {
        /// Its number.
        gpu: usize,
        /// What it was to do; that an earlier kernel went wrong is told later.
        doing: &'static str,
        /// What the driver says.
        cause: String,
    },
}

impl CudaError {
    /// Whether there is a GPU, which then lies idle: not where there is simply none.
    pub(crate) fn is_of_a_gpu(&self) -> bool {
        !matches!(self, CudaError::NoGpu { .. } | CudaError::Missing { name: libraries::DRIVER, .. })
    }
}
