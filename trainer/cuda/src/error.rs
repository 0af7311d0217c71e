//! Why a GPU cannot be used, in words for the user who asked for it.

use std::path::PathBuf;

use cudarc::driver::DriverError;
use cudarc::driver::sys::CUresult;

use crate::libraries::DRIVER;
use crate::libraries::surroundings::FOLDERS;

/// Why a GPU cannot be used, or no longer.
#[derive(Debug, thiserror::Error)]
pub enum CudaError {
    /// There is no library of this name.
    #[error("cannot find {name}; {remedy}, or name its folder in {}", FOLDERS)]
    Missing {
        /// Its name.
        name: &'static str,
        /// What installs it.
        remedy: &'static str,
    },
    /// A library is there, but cannot be loaded.
    #[error("cannot load {}: {cause}", path.display())]
    Unloadable {
        /// Where it lies.
        path: PathBuf,
        /// Why.
        cause: String,
    },
    /// A library is too old: it has not all functions that are called.
    #[error("{} has no {symbol}: it is too old, or another library has its name; {remedy}", path.display())]
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
    #[error("the NVIDIA driver supports CUDA {}.{}, not 12.0; update the driver", version / 1000, version / 10 % 100)]
    OldDriver {
        /// As the driver tells it.
        version: i32,
    },
    /// A library is of a newer CUDA than the driver.
    #[error(
        "{} needs a later CUDA than the NVIDIA driver's {driver}; update the driver, or: pip install {package}{driver}",
        path.display()
    )]
    NewLibrary {
        /// Where it lies.
        path: PathBuf,
        /// The driver's CUDA: its first number.
        driver: i32,
        /// The Python package that has the right one, without the number at its end.
        package: &'static str,
    },
    /// There is no GPU.
    #[error("the NVIDIA driver shows no GPU: {cause}; nvidia-smi lists them, CUDA_VISIBLE_DEVICES hides them")]
    NoGpu {
        /// What the driver says.
        cause: String,
    },
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
    /// A kernel does not compile.
    #[error("NVRTC cannot compile {source_file} for {arch}: {log}")]
    Compile {
        /// The kernel's file.
        source_file: &'static str,
        /// The kind of GPU.
        arch: String,
        /// What the compiler says.
        log: String,
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
        match self {
            CudaError::Missing { .. }
            | CudaError::Unloadable { .. }
            | CudaError::Lacks { .. }
            | CudaError::Shadowed { .. }
            | CudaError::OldDriver { .. }
            | CudaError::NewLibrary { .. }
            | CudaError::Compile { .. } => true,
            CudaError::NoGpu { .. }
            | CudaError::NoSuchGpu { .. }
            | CudaError::OutOfMemory { .. }
            | CudaError::Failed { .. } => false,
        }
    }

    /// Whether the machine seems to have a GPU, which cannot be used and stays idle.
    pub fn is_of_a_gpu(&self) -> bool {
        !matches!(self, CudaError::NoGpu { .. } | CudaError::Missing { name: DRIVER, .. })
    }
}
