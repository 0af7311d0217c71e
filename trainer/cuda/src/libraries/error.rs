//! Why NVIDIA's libraries cannot be used, in words for the user.

use std::path::PathBuf;

use super::DRIVER;
use super::surroundings::FOLDERS;

/// Why NVIDIA's libraries cannot be used, or why the driver shows no GPU.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
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
}

impl LoadError {
    /// Whether the machine seems to have a GPU.
    pub(crate) fn is_of_a_gpu(&self) -> bool {
        !matches!(self, LoadError::NoGpu { .. } | LoadError::Missing { name: DRIVER, .. })
    }
}
