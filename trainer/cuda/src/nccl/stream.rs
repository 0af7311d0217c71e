//! A stream of a GPU that only NCCL uses, and sums over ranks of buffers on that GPU.
//!
//! The GPU does not order this stream and the one for all other work, and need not: work on a buffer goes to one stream
//! only after the host has seen that the other stream has finished with the buffer. So no thread waits without a
//! deadline for a stream on which an operation with a dead peer may never end.
#![allow(unsafe_code)]

use std::ffi::c_void;
use std::sync::Arc;

use cudarc::driver::{
    CudaEvent, CudaFunction, CudaSlice, CudaStream, CudaView, CudaViewMut, DevicePtr, DriverError, PushKernelArg,
    result,
};
use elastic_collective::{CollectiveError, Group};

use super::{Added, Communicator, Device, Span};
use crate::CudaError;
use crate::gpu::Gpu;
use crate::kernels::launch::for_each;

/// The stream, and what NCCL's thread needs to use it.
#[derive(Debug)]
pub struct NcclStream {
    gpu: usize,
    stream: Arc<CudaStream>,
    /// Recorded after all work on the stream.
    mark: CudaEvent,
    add: CudaFunction,
}

impl NcclStream {
    /// A new stream on this GPU.
    pub fn new(gpu: &Gpu) -> Result<NcclStream, CudaError> {
        let (context, failed) = (gpu.stream().context(), gpu.failed("create a stream"));
        let stream = context.new_stream().map_err(&failed)?;
        let mark = context.new_event(None).map_err(&failed)?;
        Ok(NcclStream { gpu: gpu.number(), stream, mark, add: gpu.kernels.get("add").clone() })
    }

    fn failed(&self, doing: &'static str) -> impl Fn(DriverError) -> String + use<> {
        let number = self.gpu;
        move |error| CudaError::failed(number, doing, error).to_string()
    }

    fn add_to(&self, sum: Span, more: Span) -> Result<(), String> {
        let (sum_at, more_at, count) = (sum.address() as u64, more.address() as u64, sum.elements() as i64);
        let mut launch = self.stream.launch_builder(&self.add);
        launch.arg(&sum_at).arg(&more_at).arg(&count);
        // SAFETY: the arguments are the kernel's, and the maker of the spans vouches for as many numbers.
        unsafe { launch.launch(for_each(sum.elements())) }.map_err(self.failed("add"))?;
        Ok(())
    }
}

impl Device for NcclStream {
    fn bind(&mut self) -> Result<(), String> {
        self.stream.context().bind_to_thread().map_err(self.failed("bind to NCCL's thread"))
    }

    fn stream(&self) -> *mut c_void {
        self.stream.cu_stream().cast()
    }

    fn mark(&mut self) -> Result<(), String> {
        self.mark.record(&self.stream).map_err(self.failed("record the end of NCCL's work"))
    }

    fn add(&mut self, Added { left, right, into }: Added) -> Result<(), String> {
        match right {
            // The sum of two numbers has the same bits in either order.
            Some(right) if into == right => self.add_to(into, left),
            Some(right) if into == left => self.add_to(into, right),
            right => {
                let (to, from) = (into.address() as u64, left.address() as u64);
                let bytes = into.elements() * size_of::<f32>();
                // SAFETY: the maker of the spans vouches for them, and both have the same length.
                unsafe { result::memcpy_dtod_async(to, from, bytes, self.stream.cu_stream()) }
                    .map_err(self.failed("copy"))?;
                right.map_or(Ok(()), |right| self.add_to(into, right))
            }
        }
    }

    fn is_done(&mut self) -> Result<bool, String> {
        self.mark.try_is_complete().map_err(self.failed("compute"))
    }
}

/// As [`Communicator::ordered_sum`], for parts of buffers on this GPU. The GPU must have done all earlier work on these
/// parts: see [`Gpu::wait_for`]. `staging` is at least as long as [`Communicator::staging_elements`] says.
///
/// When this returns [`CollectiveError::Stuck`], NCCL may still use the buffers: they must stay until the process ends.
pub fn ordered_sum(
    gpu: &Gpu,
    communicator: &mut Communicator,
    group: &mut Group,
    shards: u32,
    partials: &[CudaView<'_, f32>],
    sum: &mut CudaViewMut<'_, f32>,
    staging: &mut CudaSlice<f32>,
) -> Result<(), CollectiveError> {
    let own: Vec<Span> = partials.iter().map(|partial| span(gpu, partial)).collect();
    let (into, room) = (span(gpu, sum), span(gpu, staging));
    communicator.ordered_sum(group, shards, &own, into, room)
}

fn span(gpu: &Gpu, numbers: &impl DevicePtr<f32>) -> Span {
    let (address, _) = numbers.device_ptr(gpu.stream());
    // SAFETY: until this module's functions return, their borrows keep the numbers alive, and keep everyone else from
    // using them. If an operation is not over by then, the caller gets `CollectiveError::Stuck`.
    unsafe { Span::new(address as usize, numbers.len()) }
}
