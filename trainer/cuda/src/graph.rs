//! Launches that are captured once and replayed as CUDA graphs, since to launch a step of small kernels one by one
//! takes longer than to compute it.

use std::collections::{HashMap, HashSet};

use cudarc::driver::sys::{CUgraphInstantiate_flags as Flags, CUresult, CUstreamCaptureMode as Mode};
use cudarc::driver::{CudaGraph, CudaSlice, DriverError};
use tracing::warn;

use super::{CudaError, Done, Gpu};

/// How many graphs are kept at most: one for each shape of a batch and each buffer. When there are more, all are
/// dropped.
const MOST: usize = 64;

/// Graphs of one kind of work, one for each shape and each buffer that the result is written to.
///
/// A graph holds addresses. So all graphs are dropped when the GPU allocates memory, since a buffer may have moved.
#[derive(Default)]
pub struct Graphs {
    captured: HashMap<Key, Vec<Part>>,
    /// What has run without a graph since the last allocation, and so has all the memory that it needs.
    warm: HashSet<Key>,
    /// [`Gpu::allocations`] when the above began.
    allocations: u64,
    /// Whether the driver cannot capture.
    off: bool,
}

/// The shape of a batch, the address of the result, and whether the caller wants to know how much of it is final.
type Key = (u64, u64, bool);

/// The launches up to a call of `done`, or up to the end.
struct Part {
    graph: CudaGraph,
    /// The result is then final from here to its end. None for the last part, after which `done` is not called.
    done: Option<usize>,
}

impl Graphs {
    /// Has the GPU do the work of `launches`, which writes `result`. The first time `launches` is called. Once it needs
    /// no more memory, its launches are captured; later runs replay them without calling it. It must launch
    /// the same each time that it is called for this `shape` and result.
    ///
    /// It may tell how much of the result is final. If there is a `done`, the graph is cut there, and `done` is called
    /// between the parts; what `done` launches is not captured.
    ///
    /// If the driver cannot capture, one warning says so, and `launches` is called each time.
    pub fn run(
        &mut self,
        gpu: &Gpu,
        shape: u64,
        result: &mut CudaSlice<f32>,
        mut launches: impl FnMut(&mut CudaSlice<f32>, &mut Done<'_>) -> Result<(), CudaError>,
        done: Option<&mut Done<'_>>,
    ) -> Result<(), CudaError> {
        let cuts = done.is_some();
        let key = (shape, gpu.address(result), cuts);
        let nobody: &mut Done<'_> = &mut |_| Ok(());
        let done = done.unwrap_or(nobody);
        if self.off {
            return launches(result, done);
        }
        if self.allocations != gpu.allocations() || self.captured.len() == MOST {
            self.forget(gpu)?;
        }
        if let Some(parts) = self.captured.get(&key) {
            return replay(gpu, parts, result, done);
        }
        if self.warm.insert(key) {
            launches(result, done)?;
            return if self.allocations == gpu.allocations() { Ok(()) } else { self.forget(gpu) };
        }
        match capture(gpu, result, &mut launches, cuts) {
            Ok(parts) => replay(gpu, self.captured.entry(key).or_insert(parts), result, done),
            Err(error) => {
                warn!("{error}; kernels are launched one by one");
                self.off = true;
                launches(result, done)
            }
        }
    }

    fn forget(&mut self, gpu: &Gpu) -> Result<(), CudaError> {
        if !self.captured.is_empty() {
            // A graph may be running.
            gpu.wait()?;
        }
        self.captured.clear();
        self.warm.clear();
        self.allocations = gpu.allocations();
        Ok(())
    }
}

fn replay(gpu: &Gpu, parts: &[Part], result: &mut CudaSlice<f32>, done: &mut Done<'_>) -> Result<(), CudaError> {
    for part in parts {
        part.graph.launch().map_err(gpu.failed("replay a graph"))?;
        if let Some(from) = part.done {
            done(result.slice_mut(from..))?;
        }
    }
    Ok(())
}

fn capture(
    gpu: &Gpu,
    result: &mut CudaSlice<f32>,
    launches: &mut impl FnMut(&mut CudaSlice<f32>, &mut Done<'_>) -> Result<(), CudaError>,
    cuts: bool,
) -> Result<Vec<Part>, CudaError> {
    let (count, mut parts) = (result.len(), Vec::new());
    begin(gpu)?;
    let asked = launches(result, &mut |end| {
        if cuts {
            parts.push(Part { graph: self::end(gpu)?, done: Some(count - end.len()) });
            begin(gpu)?;
        }
        Ok(())
    });
    // The capture has to end, even after an error.
    let last = self::end(gpu);
    asked?;
    parts.push(Part { graph: last?, done: None });
    Ok(parts)
}

fn begin(gpu: &Gpu) -> Result<(), CudaError> {
    // Calls of other threads are not captured.
    let mode = Mode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
    gpu.stream().begin_capture(mode).map_err(gpu.failed("capture a graph"))?;
    gpu.captures(true);
    Ok(())
}

fn end(gpu: &Gpu) -> Result<CudaGraph, CudaError> {
    let failed = gpu.failed("capture a graph");
    gpu.captures(false);
    let graph = gpu.stream().end_capture(Flags(0)).map_err(&failed)?;
    graph.ok_or_else(|| failed(DriverError(CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED)))
}
