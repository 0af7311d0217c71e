//! A GPU with the kernels on it, its memory and the stream that computes.
#![allow(unsafe_code)]

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};

use cudarc::driver::sys::CUresult;
use cudarc::driver::{
    CudaContext, CudaEvent, CudaFunction, CudaSlice, CudaStream, CudaView, CudaViewMut, DevicePtr, DevicePtrMut,
    DeviceRepr, DriverError, ValidAsZeroBits,
};
use cudarc::nvrtc::Ptx;

use super::product::Products;
use super::{Compiled, Compiler, CudaError, Surroundings, libraries};
use crate::product::Precision;

/// A GPU that is ready to compute.
#[derive(Debug)]
pub struct Gpu {
    number: usize,
    name: String,
    kind: String,
    versions: String,
    pub(super) products: Products,
    stream: Arc<CudaStream>,
    allocations: AtomicU64,
    capturing: AtomicBool,
    pub(super) warned_of_pageable: AtomicBool,
    pub(super) functions: Functions,
}

/// The kernels.
#[derive(Debug)]
pub(super) struct Functions {
    pub(super) product: CudaFunction,
    pub(super) follow: CudaFunction,
    pub(super) round_to_bf16: CudaFunction,
    pub(super) add: CudaFunction,
    pub(super) sum_rows: CudaFunction,
    pub(super) sum_all: CudaFunction,
    pub(super) sum_squares: CudaFunction,
    pub(super) cross_entropy: CudaFunction,
    pub(super) adamw: CudaFunction,
    pub(super) layer_norm: CudaFunction,
    pub(super) layer_norm_slope: CudaFunction,
    pub(super) layer_norm_chunks: CudaFunction,
    pub(super) sum_chunks: CudaFunction,
    pub(super) gelu: CudaFunction,
    pub(super) gelu_slope: CudaFunction,
    pub(super) embed: CudaFunction,
    pub(super) embed_slope: CudaFunction,
    /// By what the widest head may have, in the order of `attention::DEPTHS`.
    pub(super) attention: [Heads; 2],
}

/// Attention of heads up to a width: forward, and the derivatives by queries and by keys and values.
#[derive(Debug)]
pub(super) struct Heads {
    pub(super) forward: CudaFunction,
    pub(super) queries: CudaFunction,
    pub(super) keys: CudaFunction,
}

impl Gpu {
    /// How many GPUs there are; why none, if there are none.
    pub fn count(surroundings: &Surroundings) -> Result<usize, CudaError> {
        Ok(libraries::driver(surroundings)?.gpus)
    }

    /// GPU `number`, counted from 0 among those that the driver shows, with all kernels on it.
    pub fn open(surroundings: &Surroundings, number: usize) -> Result<Gpu, CudaError> {
        let found = libraries::driver(surroundings)?;
        if number >= found.gpus {
            return Err(CudaError::NoSuchGpu { wanted: number, count: found.gpus });
        }
        let compiler = Compiler::load(surroundings, Some(&found))?;
        let failed = |doing| move |error| failed(number, doing, error);
        let context = CudaContext::new(number).map_err(failed("start"))?;
        let name = context.name().map_err(failed("tell its name"))?;
        let (major, minor) = context.compute_capability().map_err(failed("tell its kind"))?;
        let arch = format!("sm_{major}{minor}");
        // SAFETY: one stream orders all uses of a buffer, but for NCCL's and for copies of the state. For these
        // `nccl_stream` and `state` see to the order themselves.
        unsafe { context.disable_event_tracking() };
        let stream = context.new_stream().map_err(failed("make a stream"))?;

        let mut modules = Vec::new();
        for Compiled { source, code, .. } in compiler.kernels(&arch)? {
            modules
                .push((context.load_module(Ptx::from_binary(code)).map_err(failed("load kernels"))?, source.kernels));
        }
        let function = |name: &str| {
            let module = modules.iter().find(|(_, names)| names.contains(&name));
            let module = module.ok_or(DriverError(CUresult::CUDA_ERROR_NOT_FOUND));
            module.and_then(|(module, _)| module.load_function(name)).map_err(failed("load a kernel"))
        };
        let functions = Functions {
            product: function("product")?,
            follow: function("follow")?,
            round_to_bf16: function("round_to_bf16")?,
            add: function("add")?,
            sum_rows: function("sum_rows")?,
            sum_all: function("sum_all")?,
            sum_squares: function("sum_squares")?,
            cross_entropy: function("cross_entropy")?,
            adamw: function("adamw")?,
            layer_norm: function("layer_norm")?,
            layer_norm_slope: function("layer_norm_slope")?,
            layer_norm_chunks: function("layer_norm_chunks")?,
            sum_chunks: function("sum_chunks")?,
            gelu: function("gelu")?,
            gelu_slope: function("gelu_slope")?,
            embed: function("embed")?,
            embed_slope: function("embed_slope")?,
            attention: [
                Heads {
                    forward: function("attention_64")?,
                    queries: function("attention_queries_64")?,
                    keys: function("attention_keys_64")?,
                },
                Heads {
                    forward: function("attention_128")?,
                    queries: function("attention_queries_128")?,
                    keys: function("attention_keys_128")?,
                },
            ],
        };
        let (cuda, minor) = (found.version / 1000, found.version / 10 % 100);
        let (driver, nvrtc) = (found.path.display(), compiler.version());
        let versions = format!("CUDA {cuda}.{minor} ({driver}), NVRTC {nvrtc} ({})", compiler.path().display());
        let (allocations, capturing, warned_of_pageable) = Default::default();
        let mut gpu = Gpu {
            number,
            name,
            kind: format!("{arch}, NVRTC {nvrtc}"),
            versions,
            products: Products::default(),
            stream,
            allocations,
            capturing,
            warned_of_pageable,
            functions,
        };
        gpu.products = Products::find(surroundings, &found, &gpu)?;
        Ok(gpu)
    }

    /// The same GPU, whose products are of such numbers: f32, if this is never called.
    pub fn multiplying_in(self, precision: Precision) -> Gpu {
        Gpu { products: self.products.of(precision), ..self }
    }

    /// What products are of.
    pub fn precision(&self) -> Precision {
        self.products.precision
    }

    /// The same GPU, with the trainer's own kernel for products, whatever libraries there are.
    pub fn without_library(self) -> Gpu {
        Gpu { products: self.products.without_library(), ..self }
    }

    /// What it is called.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its number among those that the driver shows.
    pub fn number(&self) -> usize {
        self.number
    }

    /// What its results depend on: GPUs of one kind, with kernels from one compiler and products by the same means, give
    /// the same bits.
    pub fn kind(&self) -> String {
        format!("{}, {}", self.kind, self.products.kind())
    }

    /// The libraries in use, for people.
    pub fn versions(&self) -> String {
        format!("{}, {}", self.versions, self.products)
    }

    /// A buffer of zeros.
    pub fn zeros<T: DeviceRepr + ValidAsZeroBits>(&self, count: usize) -> Result<CudaSlice<T>, CudaError> {
        self.outside_of_a_graph("give memory")?;
        self.allocations.fetch_add(1, Relaxed);
        // The driver has no empty buffers.
        self.stream.alloc_zeros(count.max(1)).map_err(|error| match error {
            DriverError(CUresult::CUDA_ERROR_OUT_OF_MEMORY) => {
                CudaError::OutOfMemory { gpu: self.number, bytes: count * size_of::<T>() }
            }
            error => self.failed("give memory")(error),
        })
    }

    /// Makes all of a buffer, or of a part of one, zero.
    pub fn clear(&self, buffer: &mut impl DevicePtrMut<f32>) -> Result<(), CudaError> {
        self.stream.memset_zeros(buffer).map_err(self.failed("clear memory"))
    }

    /// Copies numbers onto the GPU. The host's may change as soon as this returns, or, in [`HostMemory`](super::HostMemory),
    /// once the GPU has done it.
    ///
    /// # Panics
    /// When the lengths differ.
    pub fn upload<T: DeviceRepr>(&self, from: &[T], to: &mut CudaViewMut<'_, T>) -> Result<(), CudaError> {
        assert_eq!(from.len(), to.len(), "what is copied and the room for it");
        self.outside_of_a_graph("take numbers")?;
        self.stream.memcpy_htod(from, to).map_err(self.failed("take numbers"))
    }

    /// Copies numbers from the GPU, once all work that was asked for is done.
    ///
    /// # Panics
    /// When the lengths differ.
    pub fn download<T: DeviceRepr>(&self, from: &CudaView<'_, T>, to: &mut [T]) -> Result<(), CudaError> {
        assert_eq!(from.len(), to.len(), "what is copied and the room for it");
        self.stream.memcpy_dtoh(from, to).map_err(self.failed("give numbers"))?;
        self.stream.synchronize().map_err(self.failed("compute"))
    }

    /// Where a buffer begins.
    pub fn address(&self, buffer: &CudaSlice<f32>) -> u64 {
        buffer.device_ptr(&self.stream).0
    }

    pub(super) fn stream(&self) -> &Arc<CudaStream> {
        &self.stream
    }

    /// Copies numbers to another place on the GPU.
    ///
    /// # Panics
    /// When the lengths differ.
    pub fn copy(&self, from: &CudaView<'_, f32>, to: &mut CudaViewMut<'_, f32>) -> Result<(), CudaError> {
        assert_eq!(from.len(), to.len(), "what is copied and the room for it");
        self.stream.memcpy_dtod(from, to).map_err(self.failed("copy"))
    }

    /// Waits until all that was asked for is done. What NCCL does is not part of it.
    pub fn wait(&self) -> Result<(), CudaError> {
        self.stream.synchronize().map_err(self.failed("compute"))
    }

    /// A mark that is not set yet.
    pub fn mark(&self) -> Result<Mark, CudaError> {
        self.stream.context().new_event(None).map(Mark).map_err(self.failed("make a mark"))
    }

    /// Sets a mark behind all that was asked for.
    pub fn set(&self, mark: &Mark) -> Result<(), CudaError> {
        mark.0.record(&self.stream).map_err(self.failed("set a mark"))
    }

    /// Waits until all that was asked for before a mark was last set is done.
    pub fn wait_for(&self, mark: &Mark) -> Result<(), CudaError> {
        mark.0.synchronize().map_err(self.failed("compute"))
    }

    /// How often memory was given so far.
    pub(super) fn allocations(&self) -> u64 {
        self.allocations.load(Relaxed)
    }

    /// Whether what is asked for goes into a graph, from now on.
    pub(super) fn captures(&self, now: bool) {
        self.capturing.store(now, Relaxed);
    }

    /// A graph would read the host's memory when it is replayed, and its memory is its own.
    pub(super) fn outside_of_a_graph(&self, doing: &'static str) -> Result<(), CudaError> {
        match self.capturing.load(Relaxed) {
            true => Err(self.failed(doing)(DriverError(CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED))),
            false => Ok(()),
        }
    }

    pub(super) fn failed(&self, doing: &'static str) -> impl Fn(DriverError) -> CudaError + use<> {
        let number = self.number;
        move |error| failed(number, doing, error)
    }
}

pub(super) fn failed(gpu: usize, doing: &'static str, error: DriverError) -> CudaError {
    let cause = match error.error_string() {
        Ok(text) => format!("{} ({:?})", text.to_string_lossy(), error.0),
        Err(_) => format!("{:?}", error.0),
    };
    CudaError::Failed { gpu, doing, cause }
}

/// A place in what a GPU is asked for: whoever waits until the GPU is there does not wait for what is behind it.
#[derive(Debug)]
pub struct Mark(CudaEvent);

/// A buffer that is kept from call to call, so that a step needs no fresh memory.
#[derive(Debug)]
pub struct Buffer<T> {
    buffer: Option<CudaSlice<T>>,
    count: usize,
}

impl<T> Default for Buffer<T> {
    fn default() -> Buffer<T> {
        Buffer { buffer: None, count: 0 }
    }
}

impl<T: DeviceRepr + ValidAsZeroBits> Buffer<T> {
    /// Makes room for so many numbers, which then are anything.
    pub fn fit(&mut self, gpu: &Gpu, count: usize) -> Result<CudaViewMut<'_, T>, CudaError> {
        let buffer = match self.buffer.take() {
            Some(buffer) if buffer.len() >= count => buffer,
            short => {
                gpu.outside_of_a_graph("give memory")?;
                // Not both at once.
                drop(short);
                gpu.zeros(count)?
            }
        };
        self.count = count;
        Ok(self.buffer.insert(buffer).slice_mut(..count))
    }

    /// The numbers that there was room made for.
    ///
    /// # Panics
    /// Before the first time.
    #[allow(clippy::expect_used)] // A fault in the caller.
    pub fn view(&self) -> CudaView<'_, T> {
        self.buffer.as_ref().expect(NO_ROOM).slice(..self.count)
    }

    /// The same, to change them.
    ///
    /// # Panics
    /// Before the first time.
    #[allow(clippy::expect_used)] // As above.
    pub fn view_mut(&mut self) -> CudaViewMut<'_, T> {
        self.buffer.as_mut().expect(NO_ROOM).slice_mut(..self.count)
    }
}

const NO_ROOM: &str = "room was made before";
