//! The kernels of one GPU, loaded from their compiled files.

use std::collections::HashMap;
use std::sync::Arc;

use cudarc::driver::{CudaContext, CudaFunction, LaunchArgs};
use cudarc::nvrtc::Ptx;

use super::number::Number;
use crate::error::CudaError;
use crate::gpu::Gpu;
use crate::libraries::compiler::Compiled;

/// The kernels, by their names.
#[derive(Debug)]
pub(crate) struct Kernels(HashMap<&'static str, CudaFunction>);

impl Kernels {
    /// Loads compiled files onto GPU `gpu`.
    pub(crate) fn load(context: &Arc<CudaContext>, gpu: usize, files: Vec<Compiled>) -> Result<Kernels, CudaError> {
        let mut all = HashMap::new();
        for Compiled { source, code, .. } in files {
            let module = context.load_module(Ptx::from_binary(code));
            let module = module.map_err(|error| CudaError::failed(gpu, "load kernels", error))?;
            for name in source.kernels {
                let kernel = module.load_function(name);
                all.insert(*name, kernel.map_err(|error| CudaError::failed(gpu, "load a kernel", error))?);
            }
        }
        Ok(Kernels(all))
    }

    /// The kernel of this name, which is one of [`SOURCES`](super::sources::SOURCES).
    pub(crate) fn get(&self, name: &str) -> &CudaFunction {
        let Some(kernel) = self.0.get(name) else { unreachable!("there is a kernel {name}") };
        kernel
    }
}

impl Gpu {
    /// The beginning of a launch of the kernel of this name.
    pub(crate) fn launch(&self, kernel: &str) -> LaunchArgs<'_> {
        self.stream().launch_builder(self.kernels.get(kernel))
    }

    /// The same of the kernel for such numbers.
    pub(crate) fn launch_of<T: Number>(&self, kernel: &str) -> LaunchArgs<'_> {
        if T::ROUNDS { self.launch(&format!("{kernel}_bf16")) } else { self.launch(kernel) }
    }
}
