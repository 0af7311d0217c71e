//! Launches that are asked for once and replayed as a CUDA graph, since a step of small kernels takes longer to ask for
//! than to compute. Not for what is launched.

use std::collections::{HashMap, HashSet};

use cudarc::driver::CudaGraph;
use cudarc::driver::DriverError;
use cudarc::driver::sys::{CUgraphInstantiate_flags as Flags, CUresult, CUstreamCaptureMode as Mode};
use tracing::warn;

use super::{CudaError, Gpu};

/// The most graphs that are kept: shapes of batches times buffers for results. With more than that all begin anew.
const MOST: usize = 64;

/// Graphs of one kind of work, each for a shape and for the buffer that it writes to.
///
/// A graph holds addresses. So all are dropped when the GPU gives memory, since a buffer may have moved.
#[derive(Default)]
pub struct Graphs {
    captured: HashMap<Key, CudaGraph>,
    /// Has run without a graph since memory was last given, and so has all that it needs.
    warm: HashSet<Key>,
    /// [`Gpu::allocations`] when the above began.
    allocations: u64,
    /// The driver cannot do it.
    off: bool,
}

/// The shape of a batch, and where the result goes.
type Key = (u64, u64);

impl Graphs {
    /// Has the GPU do what `launches` asks for. At first that is called; once it needs no more memory, what it asks for
    /// is captured, and then replayed without it. It must ask for the same each time that it is called with this `key`.
    ///
    /// Where the driver cannot capture, that is said once, and `launches` is called each time.
    pub fn run(
        &mut self,
        gpu: &Gpu,
        key: Key,
        mut launches: impl FnMut() -> Result<(), CudaError>,
    ) -> Result<(), CudaError> {
        if self.off {
            return launches();
        }
        if self.allocations != gpu.allocations() || self.captured.len() == MOST {
            self.forget(gpu)?;
        }
        if let Some(graph) = self.captured.get(&key) {
            return graph.launch().map_err(gpu.failed("replay a graph"));
        }
        if self.warm.insert(key) {
            launches()?;
            return if self.allocations == gpu.allocations() { Ok(()) } else { self.forget(gpu) };
        }
        match capture(gpu, &mut launches) {
            Ok(graph) => {
                graph.launch().map_err(gpu.failed("replay a graph"))?;
                self.captured.insert(key, graph);
                Ok(())
            }
            Err(error) => {
                warn!("{error}; kernels are launched one by one");
                self.off = true;
                launches()
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

fn capture(gpu: &Gpu, launches: &mut impl FnMut() -> Result<(), CudaError>) -> Result<CudaGraph, CudaError> {
    let failed = gpu.failed("capture a graph");
    // What other threads ask the driver for is no matter of ours.
    gpu.stream().begin_capture(Mode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).map_err(&failed)?;
    gpu.captures(true);
    let asked = launches();
    gpu.captures(false);
    // The capture has to end, whatever was asked for.
    let graph = gpu.stream().end_capture(Flags(0)).map_err(&failed);
    asked?;
    graph?.ok_or_else(|| failed(DriverError(CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED)))
}
