//! A GPU with the kernels on it, its memory and the stream that computes.
#![allow(unsafe_code)]

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use cudarc::driver::sys::CUdevice_attribute_enum::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT as PROCESSORS;
use cudarc::driver::sys::{CUevent_flags, CUresult, cuStreamQuery};
use cudarc::driver::{
    CudaContext, CudaEvent, CudaSlice, CudaStream, CudaView, CudaViewMut, DevicePtr, DevicePtrMut, DeviceRepr,
    DriverError, ValidAsZeroBits,
};
use tracing::warn;

use crate::error::CudaError;
use crate::kernels::loaded::Kernels;
use crate::kernels::number::Bf16;
use crate::libraries::{self, compiler::Compiler, surroundings::Surroundings};
use crate::products::cublaslt::CublasLt;

/// Most work is done so soon that a thread which waits for it only lets others run meanwhile. Later it sleeps.
const SOON: Duration = Duration::from_millis(2);
const PAUSE: Duration = Duration::from_micros(50);
/// How long a wait may take, unless the caller says otherwise.
const PATIENCE: Duration = Duration::from_secs(600);

/// A GPU that is ready to compute.
#[derive(Debug)]
pub struct Gpu {
    number: usize,
    name: String,
    kind: String,
    versions: String,
    precision: Precision,
    /// What multiplies, if it is not the trainer's own kernel.
    pub(super) cublaslt: Option<CublasLt>,
    /// Whether it has tensor cores that take bf16: from compute capability 8.0 on.
    takes_bf16: bool,
    /// How many processors the GPU has: cuBLASLt's choice of an algorithm depends on it.
    processors: i32,
    /// Room for numbers in bf16: rounded operands of a product by cuBLASLt, or what attention has sorted by heads.
    pub(super) rounded: Mutex<[Buffer<Bf16>; 2]>,
    stream: Arc<CudaStream>,
    allocations: AtomicU64,
    capturing: AtomicBool,
    patience: Duration,
    pub(super) warned_of_pageable: AtomicBool,
    pub(super) kernels: Kernels,
}

/// What products of matrices are computed in, attention's too. Parameters, gradients, the optimizer's state, and all
/// sums are `f32` with either.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Precision {
    /// `f32`.
    #[default]
    F32,
    /// Operands are bf16; sums are `f32`. From compute capability 8.0 on a model may keep its activations in bf16.
    Bf16,
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
        let failed = |doing| move |error| CudaError::failed(number, doing, error);
        let context = CudaContext::new(number).map_err(failed("start"))?;
        let name = context.name().map_err(failed("report its name"))?;
        let (major, minor) = context.compute_capability().map_err(failed("report its properties"))?;
        let arch = format!("sm_{major}{minor}");
        // SAFETY: one stream orders all uses of a buffer, except NCCL's and copies of the state. For these
        // `nccl_stream` and `state` see to the order themselves.
        unsafe { context.disable_event_tracking() };
        let stream = context.new_stream().map_err(failed("create a stream"))?;

        let kernels = Kernels::load(&context, number, compiler.kernels(&arch)?)?;
        let (cuda, minor) = (found.version / 1000, found.version / 10 % 100);
        let (driver, nvrtc) = (found.path.display(), compiler.version());
        let versions = format!("CUDA {cuda}.{minor} ({driver}), NVRTC {nvrtc} ({})", compiler.path().display());
        let processors = context.attribute(PROCESSORS).map_err(failed("report its properties"))?;
        let cublaslt = match CublasLt::load(surroundings, &found, number, &stream) {
            Ok(library) => Some(library),
            Err(error @ CudaError::OutOfMemory { .. }) => return Err(error),
            Err(why) => {
                warn!("the trainer's own kernel computes the products, which is slower: {why}");
                None
            }
        };
        Ok(Gpu {
            number,
            name,
            kind: format!("{arch}, NVRTC {nvrtc}"),
            versions,
            precision: Precision::default(),
            cublaslt,
            takes_bf16: major >= 8,
            processors,
            rounded: Mutex::default(),
            stream,
            allocations: AtomicU64::default(),
            capturing: AtomicBool::default(),
            patience: PATIENCE,
            warned_of_pageable: AtomicBool::default(),
            kernels,
        })
    }

    /// The same GPU, with products of this precision. Without this call they are of f32.
    pub fn multiplying_in(self, precision: Precision) -> Gpu {
        Gpu { precision, ..self }
    }

    /// The same GPU, which hangs where a wait for it takes longer than this.
    pub fn patient_for(self, patience: Duration) -> Gpu {
        Gpu { patience, ..self }
    }

    /// The precision of products.
    pub fn precision(&self) -> Precision {
        self.precision
    }

    /// Whether activations are kept in bf16: that is asked for, and attention has kernels for this GPU.
    pub fn keeps_bf16(&self) -> bool {
        self.precision == Precision::Bf16 && self.takes_bf16
    }

    /// The same GPU, with the trainer's own kernel for products, even where there is cuBLASLt.
    pub fn without_library(self) -> Gpu {
        Gpu { cublaslt: None, ..self }
    }

    /// Its name, as the driver tells it.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its number among those that the driver shows.
    pub fn number(&self) -> usize {
        self.number
    }

    /// What the bits of its results depend on: the kind of GPU, the compiler of the kernels, and what computes
    /// products. GPUs of equal kinds give the same bits.
    pub fn kind(&self) -> String {
        match &self.cublaslt {
            Some(library) => {
                format!("{}, cuBLASLt {} on {} processors", self.kind, library.version(), self.processors)
            }
            None => format!("{}, own products", self.kind),
        }
    }

    /// The libraries in use, for people.
    pub fn versions(&self) -> String {
        match &self.cublaslt {
            Some(library) => {
                format!("{}, cuBLASLt {} ({})", self.versions, library.version(), library.path().display())
            }
            None => format!("{}, own products", self.versions),
        }
    }

    /// A buffer of zeros.
    pub fn zeros<T: DeviceRepr + ValidAsZeroBits>(&self, count: usize) -> Result<CudaSlice<T>, CudaError> {
        self.outside_of_a_graph("give memory")?;
        self.allocations.fetch_add(1, Relaxed);
        // The driver has no empty buffers.
        let zeros = self.stream.alloc_zeros(count.max(1));
        zeros.map_err(|error| CudaError::no_memory(self.number, count * size_of::<T>(), error))
    }

    /// Fills a buffer, or a part of one, with zeros.
    pub fn clear(&self, buffer: &mut impl DevicePtrMut<f32>) -> Result<(), CudaError> {
        self.stream.memset_zeros(buffer).map_err(self.failed("clear memory"))
    }

    /// Copies numbers to the GPU. `from` may change as soon as this returns; if it is
    /// [`HostMemory`](super::HostMemory), only once the GPU has made the copy.
    pub fn upload<T: DeviceRepr>(&self, from: &[T], to: &mut CudaViewMut<'_, T>) -> Result<(), CudaError> {
        assert_eq!(from.len(), to.len(), "what is copied and the room for it");
        self.outside_of_a_graph("copy numbers from the host")?;
        self.stream.memcpy_htod(from, to).map_err(self.failed("copy numbers from the host"))
    }

    /// Copies numbers from the GPU, once all work launched before is done.
    pub fn download<T: DeviceRepr>(&self, from: &CudaView<'_, T>, to: &mut [T]) -> Result<(), CudaError> {
        assert_eq!(from.len(), to.len(), "what is copied and the room for it");
        // The driver would wait without a limit.
        self.wait()?;
        self.stream.memcpy_dtoh(from, to).map_err(self.failed("copy numbers to the host"))?;
        self.wait()
    }

    /// The address at which a buffer begins.
    pub fn address(&self, buffer: &CudaSlice<f32>) -> u64 {
        buffer.device_ptr(&self.stream).0
    }

    pub(super) fn stream(&self) -> &Arc<CudaStream> {
        &self.stream
    }

    /// Copies numbers to another place on the GPU.
    pub fn copy(&self, from: &CudaView<'_, f32>, to: &mut CudaViewMut<'_, f32>) -> Result<(), CudaError> {
        assert_eq!(from.len(), to.len(), "what is copied and the room for it");
        self.stream.memcpy_dtod(from, to).map_err(self.failed("copy"))
    }

    /// Waits until all work launched before is done, except NCCL's, which has a stream of its own.
    pub fn wait(&self) -> Result<(), CudaError> {
        self.stream.context().bind_to_thread().map_err(self.failed("compute"))?;
        // SAFETY: the stream lives as long as this.
        self.look(|| match unsafe { cuStreamQuery(self.stream.cu_stream()) }.result() {
            Err(DriverError(CUresult::CUDA_ERROR_NOT_READY)) => Ok(false),
            result => result.map(|()| true),
        })
    }

    fn look(&self, is_done: impl Fn() -> Result<bool, DriverError>) -> Result<(), CudaError> {
        self.limit().look("compute", is_done)
    }

    /// How long others may wait for this GPU.
    pub(crate) fn limit(&self) -> Limit {
        Limit { gpu: self.number, patience: self.patience }
    }

    /// A mark that is not set yet.
    pub fn mark(&self) -> Result<Mark, CudaError> {
        self.stream.context().new_event(None).map(Mark).map_err(self.failed("create an event"))
    }

    /// Marks for the ends of pieces of work. (By their flag the driver's double tells them from other marks.)
    pub fn marks_of_ends(&self) -> Result<[Mark; 2], CudaError> {
        let flag = Some(CUevent_flags::CU_EVENT_BLOCKING_SYNC);
        let mark = || self.stream.context().new_event(flag).map(Mark).map_err(self.failed("create an event"));
        Ok([mark()?, mark()?])
    }

    /// Sets a mark behind all work launched so far.
    pub fn set(&self, mark: &Mark) -> Result<(), CudaError> {
        mark.0.record(&self.stream).map_err(self.failed("record an event"))
    }

    /// Waits until all work launched before the mark was last set is done.
    pub fn wait_for(&self, mark: &Mark) -> Result<(), CudaError> {
        self.look(|| mark.0.try_is_complete())
    }

    /// How often memory was allocated so far.
    pub(super) fn allocations(&self) -> u64 {
        self.allocations.load(Relaxed)
    }

    /// Says whether launches go into a graph from now on.
    pub(super) fn captures(&self, now: bool) {
        self.capturing.store(now, Relaxed);
    }

    /// Fails while launches go into a graph: a captured copy would read the host's memory at each replay, and a
    /// captured allocation would belong to the graph.
    pub(super) fn outside_of_a_graph(&self, doing: &'static str) -> Result<(), CudaError> {
        match self.capturing.load(Relaxed) {
            true => Err(self.failed(doing)(DriverError(CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED))),
            false => Ok(()),
        }
    }

    pub(super) fn failed(&self, doing: &'static str) -> impl Fn(DriverError) -> CudaError + use<> {
        let number = self.number;
        move |error| CudaError::failed(number, doing, error)
    }
}

/// How long a wait for a GPU may take.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Limit {
    gpu: usize,
    patience: Duration,
}

impl Limit {
    /// Looks again and again whether what the GPU is `doing` is done.
    pub(crate) fn look(
        &self,
        doing: &'static str,
        is_done: impl Fn() -> Result<bool, DriverError>,
    ) -> Result<(), CudaError> {
        let begun = Instant::now();
        while !is_done().map_err(|error| CudaError::failed(self.gpu, doing, error))? {
            if begun.elapsed() >= self.patience {
                return Err(CudaError::Hangs { gpu: self.gpu, waited: begun.elapsed() });
            }
            pause(begun);
        }
        Ok(())
    }
}

/// Between two looks at work that was begun then.
pub(crate) fn pause(begun: Instant) {
    if begun.elapsed() < SOON { std::thread::yield_now() } else { std::thread::sleep(PAUSE) }
}

/// An event in a GPU's stream: a wait for it does not include the work launched after it.
#[derive(Debug)]
pub struct Mark(CudaEvent);

/// A buffer that is kept from call to call, so that a step allocates no memory.
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
    /// Makes room for so many numbers. Their values are undefined.
    pub fn fit(&mut self, gpu: &Gpu, count: usize) -> Result<CudaViewMut<'_, T>, CudaError> {
        let buffer = match self.buffer.take() {
            Some(buffer) if buffer.len() >= count => buffer,
            short => {
                gpu.outside_of_a_graph("give memory")?;
                // The old one goes first, so that there is never memory for both.
                drop(short);
                gpu.zeros(count)?
            }
        };
        self.count = count;
        Ok(self.buffer.insert(buffer).slice_mut(..count))
    }

    /// The numbers that the last [`fit`](Self::fit) made room for.
    #[allow(clippy::expect_used)] // A fault in the caller.
    pub fn view(&self) -> CudaView<'_, T> {
        self.buffer.as_ref().expect(NO_ROOM).slice(..self.count)
    }

    /// As [`view`](Self::view), to change them.
    #[allow(clippy::expect_used)] // As above.
    pub fn view_mut(&mut self) -> CudaViewMut<'_, T> {
        self.buffer.as_mut().expect(NO_ROOM).slice_mut(..self.count)
    }
}

const NO_ROOM: &str = "room was made before";
