//! The kernels of one GPU, loaded from their compiled files.

use std::sync::Arc;

use cudarc::driver::sys::CUresult;
use cudarc::driver::{CudaContext, CudaFunction, CudaModule, DriverError};
use cudarc::nvrtc::Ptx;

use crate::error::CudaError;
use crate::libraries::compiler::Compiled;

/// The kernels, by their names.
#[derive(Debug)]
pub(crate) struct Kernels {
    pub(crate) product: CudaFunction,
    pub(crate) product_bf16: CudaFunction,
    pub(crate) product_bf16_to_f32: CudaFunction,
    pub(crate) follow_bf16: CudaFunction,
    pub(crate) round_parameters: CudaFunction,
    pub(crate) follow: CudaFunction,
    pub(crate) round_to_bf16: CudaFunction,
    pub(crate) add: CudaFunction,
    pub(crate) sum_rows: CudaFunction,
    pub(crate) sum_all: CudaFunction,
    pub(crate) sum_squares: CudaFunction,
    pub(crate) cross_entropy: CudaFunction,
    pub(crate) cross_entropy_bf16: CudaFunction,
    pub(crate) adamw: CudaFunction,
    pub(crate) layer_norm: OfNumber,
    pub(crate) layer_norm_slope: OfNumber,
    pub(crate) layer_norm_chunks: OfNumber,
    pub(crate) sum_chunks: OfNumber,
    pub(crate) gelu: CudaFunction,
    pub(crate) gelu_slope: CudaFunction,
    pub(crate) embed: CudaFunction,
    pub(crate) embed_slope: CudaFunction,
    /// For heads up to each width of `attention::DEPTHS`, in that order.
    pub(crate) attention: [AttentionKernels; 2],
    pub(crate) attention_bf16: Bf16Kernels,
}

/// Attention for heads up to a width: forward, and the derivatives by queries and by keys and values.
#[derive(Debug)]
pub(crate) struct AttentionKernels {
    pub(crate) forward: CudaFunction,
    pub(crate) queries: CudaFunction,
    pub(crate) keys: CudaFunction,
}

/// Attention in bf16: what sorts by heads and takes means, and the kernels for heads up to each width.
#[derive(Debug)]
pub(crate) struct Bf16Kernels {
    pub(crate) by_heads: CudaFunction,
    pub(crate) means: CudaFunction,
    /// As [`Kernels::attention`].
    pub(crate) sets: [AttentionKernels; 2],
}

/// A kernel that there is for each kind of numbers.
#[derive(Debug)]
pub struct OfNumber {
    pub(crate) in_f32: CudaFunction,
    pub(crate) in_bf16: CudaFunction,
}

/// Compiled files on a GPU.
struct Modules {
    gpu: usize,
    files: Vec<(Arc<CudaModule>, &'static [&'static str])>,
}

impl Modules {
    fn function(&self, name: &str) -> Result<CudaFunction, CudaError> {
        let file = self.files.iter().find(|(_, names)| names.contains(&name));
        let file = file.ok_or(DriverError(CUresult::CUDA_ERROR_NOT_FOUND));
        let function = file.and_then(|(module, _)| module.load_function(name));
        function.map_err(|error| CudaError::failed(self.gpu, "load a kernel", error))
    }

    fn of_number(&self, name: &str) -> Result<OfNumber, CudaError> {
        Ok(OfNumber { in_f32: self.function(name)?, in_bf16: self.function(&format!("{name}_bf16"))? })
    }

    /// For heads up to each width of `attention::DEPTHS`.
    fn attention(&self, name: &str) -> Result<[AttentionKernels; 2], CudaError> {
        let set = |width: usize| {
            Ok(AttentionKernels {
                forward: self.function(&format!("{name}_{width}"))?,
                queries: self.function(&format!("{name}_queries_{width}"))?,
                keys: self.function(&format!("{name}_keys_{width}"))?,
            })
        };
        Ok([set(64)?, set(128)?])
    }
}

impl Kernels {
    /// Loads compiled files onto GPU `gpu`.
    pub(crate) fn load(context: &Arc<CudaContext>, gpu: usize, files: Vec<Compiled>) -> Result<Kernels, CudaError> {
        let load = |Compiled { source, code, .. }: Compiled| {
            let module = context.load_module(Ptx::from_binary(code));
            module.map(|module| (module, source.kernels)).map_err(|error| CudaError::failed(gpu, "load kernels", error))
        };
        let modules = Modules { gpu, files: files.into_iter().map(load).collect::<Result<_, _>>()? };
        Ok(Kernels {
            product: modules.function("product")?,
            product_bf16: modules.function("product_bf16")?,
            product_bf16_to_f32: modules.function("product_bf16_to_f32")?,
            follow_bf16: modules.function("follow_bf16")?,
            round_parameters: modules.function("round_parameters")?,
            follow: modules.function("follow")?,
            round_to_bf16: modules.function("round_to_bf16")?,
            add: modules.function("add")?,
            sum_rows: modules.function("sum_rows")?,
            sum_all: modules.function("sum_all")?,
            sum_squares: modules.function("sum_squares")?,
            cross_entropy: modules.function("cross_entropy")?,
            cross_entropy_bf16: modules.function("cross_entropy_bf16")?,
            adamw: modules.function("adamw")?,
            layer_norm: modules.of_number("layer_norm")?,
            layer_norm_slope: modules.of_number("layer_norm_slope")?,
            layer_norm_chunks: modules.of_number("layer_norm_chunks")?,
            sum_chunks: modules.of_number("sum_chunks")?,
            gelu: modules.function("gelu")?,
            gelu_slope: modules.function("gelu_slope")?,
            embed: modules.function("embed")?,
            embed_slope: modules.function("embed_slope")?,
            attention: modules.attention("attention")?,
            attention_bf16: Bf16Kernels {
                by_heads: modules.function("attention_by_heads")?,
                means: modules.function("attention_means")?,
                sets: modules.attention("attention_bf16")?,
            },
        })
    }
}
