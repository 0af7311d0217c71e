//! The kernels of `attention_bf16.cu` as functions: attention by tensor cores. Shapes are checked in `attention`, which
//! also has attention in f32.
#![allow(unsafe_code)]

use std::sync::PoisonError;

use cudarc::driver::{CudaFunction, CudaView, CudaViewMut, LaunchConfig, PushKernelArg};

use super::CudaError;
use super::attention::{Attended, Attention, DEPTHS, MOST_TILES, THREADS};
use super::gpu::{AttentionKernels, Buffer, Gpu};
use super::launch::{grid, whole};

/// The kernels, by their names.
#[derive(Debug)]
pub(super) struct Bf16Kernels {
    pub(super) round: CudaFunction,
    pub(super) means: CudaFunction,
    /// For heads up to each width of `DEPTHS`.
    pub(super) sets: [AttentionKernels; 2],
}

/// For heads up to each width of `DEPTHS`: the rows of a block of the kernels `forward` and `queries`.
const ROWS: [usize; 2] = [128, 64];
/// The rows of a block of the kernel `keys`.
const KEY_ROWS: usize = 64;

/// Kernels for a shape, and how to start them.
struct Set<'a> {
    kernels: &'a AttentionKernels,
    /// The columns of a head, with the zeros after them.
    depth: usize,
    /// A grid for `forward` and `queries`, and one for `keys`.
    own: LaunchConfig,
    keys: LaunchConfig,
    /// A block for each row of the batch.
    each_row: LaunchConfig,
}

impl Attention {
    fn set(self, gpu: &Gpu) -> Set<'_> {
        let fits = self.fits();
        let blocks = |rows: usize| {
            let tiles = self.time.div_ceil(rows);
            assert!(tiles <= MOST_TILES, "sequences of {}", self.time);
            grid((whole(self.sequences * self.heads) as u32, tiles as u32, 1), THREADS)
        };
        let each_row = grid((whole(self.sequences * self.time) as u32, 1, 1), THREADS);
        let (kernels, depth) = (&gpu.kernels.attention_bf16.sets[fits], DEPTHS[fits].0);
        Set { kernels, depth, own: blocks(ROWS[fits]), keys: blocks(KEY_ROWS), each_row }
    }
}

impl Gpu {
    /// [`Gpu::attention`], by tensor cores.
    pub(super) fn attention_in_bf16(
        &self,
        shape: Attention,
        triples: &CudaView<'_, f32>,
        outputs: &mut CudaViewMut<'_, f32>,
        logs: &mut CudaViewMut<'_, f32>,
    ) -> Result<(), CudaError> {
        let (set, [time, heads, columns]) = (shape.set(self), shape.sizes());
        let mut rooms = self.rounded.lock().unwrap_or_else(PoisonError::into_inner);
        let rounded = self.round_triples(shape, &set, triples, &mut rooms[0])?;
        let mut launch = self.stream().launch_builder(&set.kernels.forward);
        launch.arg(outputs).arg(logs).arg(&rounded).arg(&time).arg(&heads).arg(&columns);
        // SAFETY: the arguments are the kernel's, and the lengths those of the shape.
        unsafe { self.run(launch, set.own, "attend") }
    }

    /// [`Gpu::attention_slope`], by tensor cores.
    pub(super) fn attention_slope_in_bf16(
        &self,
        shape: Attention,
        attended: &Attended<'_>,
        output_slope: &CudaView<'_, f32>,
        means: &mut CudaViewMut<'_, f32>,
        slope: &mut CudaViewMut<'_, f32>,
    ) -> Result<(), CudaError> {
        let Attended { triples, outputs, logs } = attended;
        let (set, [time, heads, columns]) = (shape.set(self), shape.sizes());
        let mut rooms = self.rounded.lock().unwrap_or_else(PoisonError::into_inner);
        let [room, above] = &mut *rooms;
        let rounded = self.round_triples(shape, &set, triples, room)?;

        let (mut rounded_slope, depth) = (above.fit(self, shape.logs() * set.depth)?, whole(set.depth));
        let mut launch = self.stream().launch_builder(&self.kernels.attention_bf16.means);
        launch.arg(&mut rounded_slope).arg(&mut *means).arg(output_slope).arg(outputs);
        launch.arg(&time).arg(&heads).arg(&columns).arg(&depth);
        // SAFETY: the arguments are the kernel's, the lengths those of the shape, and there is room for `depth` numbers
        // for each row of each head.
        unsafe { self.run(launch, set.each_row, "attend") }?;

        let (above, means) = (above.view(), means.as_view());
        for (kernel, size) in [(&set.kernels.queries, set.own), (&set.kernels.keys, set.keys)] {
            let mut launch = self.stream().launch_builder(kernel);
            launch.arg(&mut *slope).arg(&rounded).arg(&above).arg(logs).arg(&means);
            launch.arg(&time).arg(&heads).arg(&columns);
            // SAFETY: both kernels take these arguments, and the lengths are those of the shape.
            unsafe { self.run(launch, size, "attend") }?;
        }
        Ok(())
    }

    /// The triples in bf16, head by head, in rows of `set.depth` numbers.
    fn round_triples<'a>(
        &self,
        shape: Attention,
        set: &Set<'_>,
        triples: &CudaView<'_, f32>,
        room: &'a mut Buffer<u16>,
    ) -> Result<CudaView<'a, u16>, CudaError> {
        let ([time, heads, columns], depth) = (shape.sizes(), whole(set.depth));
        let mut rounded = room.fit(self, 3 * shape.logs() * set.depth)?;
        let mut launch = self.stream().launch_builder(&self.kernels.attention_bf16.round);
        launch.arg(&mut rounded).arg(triples).arg(&time).arg(&heads).arg(&columns).arg(&depth);
        // SAFETY: the arguments are the kernel's, the lengths those of the shape, and there is room for `depth` numbers
        // for each query, key and value.
        unsafe { self.run(launch, set.each_row, "round to bf16") }?;
        Ok(room.view())
    }
}
