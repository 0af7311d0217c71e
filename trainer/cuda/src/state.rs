//! The state of training on a GPU, and copies of it to the host, which are made while the next step is computed.
//!
//! ```text
//! the GPU's stream    … step n ──┬── gradient of step n + 1 ───────────┬── step n + 1 …
//! a second stream                └── copy to pinned memory ──┬─────────┘
//! a thread of the host                                       └── reads it, however long that takes
//! ```
//!
//! Events order the two streams. The GPU waits for them; the only thread of the host that waits is the one that reads
//! the copy.
#![allow(unsafe_code)]

use std::sync::Arc;

use cudarc::driver::sys::CUevent_flags;
use cudarc::driver::{CudaEvent, CudaSlice, CudaStream, DevicePtr, result};

use super::{CudaError, Gpu, HostMemory};
use crate::gpu::Limit;

/// Parameters, means and squares, each in a buffer.
///
/// They are changed through [`parts_mut`](Self::parts_mut), after which the GPU's stream waits for a copy that is under
/// way.
#[derive(Debug)]
pub struct GpuState {
    parts: [CudaSlice<f32>; 3],
    /// Created for the first copy.
    copier: Option<Copier>,
}

/// What makes copies.
#[derive(Debug)]
struct Copier {
    stream: Arc<CudaStream>,
    /// Recorded on the GPU's stream when the numbers are those to copy.
    reached: CudaEvent,
    copy: Arc<Copy>,
    /// Whether the GPU's stream still has to wait for the copy.
    unawaited: bool,
    /// Whether the numbers are still those that were copied last.
    current: bool,
}

#[derive(Debug)]
struct Copy {
    limit: Limit,
    memory: HostMemory,
    /// Recorded after the copy.
    made: CudaEvent,
}

/// A copy in the host's memory, which may still be under way. No other copy is made while this one is kept.
#[derive(Debug)]
pub struct HostCopy(Arc<Copy>);

impl HostCopy {
    /// Waits for the copy, no longer than for other work of the GPU, and returns its numbers: parameters, means, squares.
    pub fn numbers(&self) -> Result<&[f32], CudaError> {
        let Copy { limit, memory, made } = &*self.0;
        limit.look("copy the state", || {
            made.context().bind_to_thread()?;
            made.try_is_complete()
        })?;
        Ok(memory)
    }
}

impl GpuState {
    /// A state of zeros for so many parameters.
    pub fn new(gpu: &Gpu, count: usize) -> Result<GpuState, CudaError> {
        Ok(GpuState { parts: [gpu.zeros(count)?, gpu.zeros(count)?, gpu.zeros(count)?], copier: None })
    }

    /// Parameters, means and squares.
    pub fn parts(&self) -> &[CudaSlice<f32>; 3] {
        &self.parts
    }

    /// As [`parts`](Self::parts), to change them on the GPU's stream.
    pub fn parts_mut(&mut self, gpu: &Gpu) -> Result<&mut [CudaSlice<f32>; 3], CudaError> {
        if let Some(copier) = &mut self.copier {
            copier.current = false;
            if copier.unawaited {
                gpu.stream().wait(&copier.copy.made).map_err(gpu.failed("wait for a copy of the state"))?;
                copier.unawaited = false;
            }
        }
        Ok(&mut self.parts)
    }

    /// Replaces all numbers.
    pub fn upload(&mut self, gpu: &Gpu, numbers: &[f32]) -> Result<(), CudaError> {
        assert_eq!(numbers.len(), self.len(), "numbers of a state");
        let mut rest = numbers;
        for part in self.parts_mut(gpu)? {
            let (from, more) = rest.split_at(part.len());
            gpu.upload(from, &mut part.as_view_mut())?;
            rest = more;
        }
        Ok(())
    }

    /// Copies all numbers to the host, and waits for the copy.
    pub fn download(&self, gpu: &Gpu, into: &mut [f32]) -> Result<(), CudaError> {
        assert_eq!(into.len(), self.len(), "room for a state");
        if let Some(copier) = self.copier.as_ref().filter(|copier| copier.current) {
            into.copy_from_slice(HostCopy(Arc::clone(&copier.copy)).numbers()?);
            return Ok(());
        }
        let mut rest = into;
        for part in &self.parts {
            let (room, more) = rest.split_at_mut(part.len());
            gpu.download(&part.as_view(), room)?;
            rest = more;
        }
        Ok(())
    }

    /// Begins a copy of the numbers that all work launched so far leaves. Work launched later runs
    /// meanwhile. None while an earlier copy is kept.
    pub fn snapshot(&mut self, gpu: &Gpu) -> Result<Option<HostCopy>, CudaError> {
        gpu.outside_of_a_graph("copy the state")?;
        let len = self.len();
        let copier = match &mut self.copier {
            Some(copier) => copier,
            none => none.insert(Copier::new(gpu, len)?),
        };
        copier.begin(gpu, &self.parts)
    }

    fn len(&self) -> usize {
        self.parts.iter().map(CudaSlice::len).sum()
    }
}

impl Drop for GpuState {
    fn drop(&mut self) {
        if let Some(copier) = &self.copier {
            // The buffers are freed next, so the copy has to be over. If the wait fails, nothing on this GPU reads
            // them.
            let _ = copier.stream.synchronize();
        }
    }
}

impl Copier {
    fn new(gpu: &Gpu, len: usize) -> Result<Copier, CudaError> {
        let (context, failed) = (gpu.stream().context(), gpu.failed("create a stream"));
        let stream = context.new_stream().map_err(&failed)?;
        let reached = context.new_event(None).map_err(&failed)?;
        // (By its flag the driver's double tells it from marks that NCCL's work follows.)
        let made = context.new_event(Some(CUevent_flags::CU_EVENT_BLOCKING_SYNC)).map_err(&failed)?;
        let copy = Arc::new(Copy { limit: gpu.limit(), memory: gpu.host_memory(len), made });
        Ok(Copier { stream, reached, copy, unawaited: false, current: false })
    }

    fn begin(&mut self, gpu: &Gpu, parts: &[CudaSlice<f32>; 3]) -> Result<Option<HostCopy>, CudaError> {
        let failed = gpu.failed("copy the state");
        let Some(Copy { memory, made, .. }) = Arc::get_mut(&mut self.copy) else { return Ok(None) };
        self.current = false;
        self.reached.record(gpu.stream()).map_err(&failed)?;
        self.stream.wait(&self.reached).map_err(&failed)?;
        let mut rest = &mut memory[..];
        for part in parts {
            let (room, more) = rest.split_at_mut(part.len());
            // SAFETY: the room is as long as the part. No code reads it before `made`: the only `HostCopy` is the one
            // below, and the next copy is not begun before that one is dropped. The buffer stays until the stream has
            // made the copy (`drop`), and is not changed before (`parts_mut`).
            unsafe { result::memcpy_dtoh_async(room, part.device_ptr(&self.stream).0, self.stream.cu_stream()) }
                .map_err(&failed)?;
            rest = more;
        }
        made.record(&self.stream).map_err(&failed)?;
        (self.unawaited, self.current) = (true, true);
        Ok(Some(HostCopy(Arc::clone(&self.copy))))
    }
}
