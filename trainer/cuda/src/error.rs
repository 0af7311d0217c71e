//! Why a GPU cannot be used, in words for the user who asked for it.

use std::time::Duration;

use cudarc::driver::DriverError;
use cudarc::driver::sys::CUresult;

use crate::libraries::error::LoadError;

/// Why a GPU cannot be used, or no longer.
#[derive(Debug, thiserror::Error)]
pub enum CudaError {
    /// A library, or the driver, is missing or does not fit.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// There is no GPU of this number.
    #[error(
        "there is no GPU {wanted}: this node has {count}, counted from 0; choose another with --device cuda:N, \
        or start fewer workers on this node"
    )]
    NoSuchGpu {
        /// Its number.
        wanted: usize,
        /// How many there are.
        count: usize,
    },
    /// There is not enough memory for a buffer.
    #[error(
        "GPU {gpu} has no memory for {bytes} more bytes; lower --micro-batch, or end its other programs (nvidia-smi)"
    )]
    OutOfMemory {
        /// Its number.
        gpu: usize,
        /// What was asked for.
        bytes: usize,
    },
    /// It does not end its work.
    #[error(
        "GPU {gpu} has not ended its work for {:.1} s: search for Xids (dmesg, nvidia-smi -q) and reset it; if it is only \
        slow, lower --micro-batch, or raise --peer-timeout", waited.as_secs_f64()
    )]
    Hangs {
        /// Its number.
        gpu: usize,
        /// How long it was waited for.
        waited: Duration,
    },
    /// The driver, or cuBLASLt, reports an error.
    #[error("GPU {gpu} failed to {doing}: {cause}")]
    Failed {
        /// Its number.
        gpu: usize,
        /// What the GPU was to do. The error may be that of a kernel launched before.
        doing: &'static str,
        /// What the driver says.
        cause: String,
    },
}

impl CudaError {
    /// What the driver says of GPU `gpu`, which was `doing` this.
    pub(crate) fn failed(gpu: usize, doing: &'static str, error: DriverError) -> CudaError {
        let cause = match error.error_string() {
            Ok(text) => format!("{} ({:?})", text.to_string_lossy(), error.0),
            Err(_) => format!("{:?}", error.0),
        };
        CudaError::Failed { gpu, doing, cause }
    }

    /// What the driver says of GPU `gpu`, which was to give so many bytes.
    pub(crate) fn no_memory(gpu: usize, bytes: usize, error: DriverError) -> CudaError {
        match error {
            DriverError(CUresult::CUDA_ERROR_OUT_OF_MEMORY) => CudaError::OutOfMemory { gpu, bytes },
            error => CudaError::failed(gpu, "give memory", error),
        }
    }

    /// Whether a library, or the driver, is missing or does not fit, which says nothing of a GPU.
    pub fn is_of_software(&self) -> bool {
        matches!(self, CudaError::Load(error) if !matches!(error, LoadError::NoGpu { .. }))
    }

    /// Whether the machine seems to have a GPU, which cannot be used and stays idle.
    pub fn is_of_a_gpu(&self) -> bool {
        if let CudaError::Load(error) = self { error.is_of_a_gpu() } else { true }
    }
}
