//! Launches that are asked for once and replayed as CUDA graphs, since a step of small kernels takes longer to ask for
//! than to compute.

use std::collections::{HashMap, HashSet};

use cudarc::driver::sys::{CUgraphInstantiate_flags as Flags, CUresult, CUstreamCaptureMode as Mode};
use cudarc::driver::{CudaGraph, CudaSlice, DriverError};
use tracing::warn;

use super::{CudaError, Done, Gpu};

/// The most results whose graphs are kept: shapes of batches times buffers. With more than that all begin anew.
const MOST: usize = 64;

/// Graphs of one kind of work, for each shape and each buffer that it writes its result to.
///
/// A graph holds addresses. So all are dropped when the GPU gives memory, since a buffer may have moved.
#[derive(Default)]
pub struct Graphs {
    captured: HashMap<Key, Vec<Part>>,
    /// Has run without a graph since memory was last given, and so has all that it needs.
    warm: HashSet<Key>,
    /// [`Gpu::allocations`] when the above began.
    allocations: u64,
    /// The driver cannot do it.
    off: bool,
}

/// The shape of a batch, where the result goes, and whether somebody is told how much of it is final.
type Key = (u64, u64, bool);

/// Launches up to where somebody is told.
struct Part {
    graph: CudaGraph,
    /// The result is final from here to its end; nobody is told behind the last part.
    done: Option<usize>,
}

impl Graphs {
    /// Has the GPU do what `launches` asks for, with a `result`. At first that is called; once it needs no more memory,
    /// what it asks for is captured, and then replayed without it. It must ask for the same each time that it is called
    /// for this `shape` and result.
    ///
    /// It may tell how much of the result is final. If somebody wants to know, the graph is cut there, and `done` is called
    /// between its parts; what that asks for is not captured.
    ///
    /// Where the driver cannot capture, that is said once, and `launches` is called each time.
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
            // One may be at work.
            gpu.stream().synchronize().map_err(gpu.failed("compute"))?;
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
    // The capture has to end, whatever was asked for.
    let last = self::end(gpu);
    asked?;
    parts.push(Part { graph: last?, done: None });
    Ok(parts)
}

fn begin(gpu: &Gpu) -> Result<(), CudaError> {
    // What other threads ask the driver for is no matter of ours.
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
