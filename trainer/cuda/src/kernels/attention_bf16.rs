//! The kernels of `attention_bf16.cu` as functions: attention of numbers in bf16, by tensor cores.
#![allow(unsafe_code)]

use std::sync::PoisonError;

use cudarc::driver::{CudaView, CudaViewMut, LaunchConfig, PushKernelArg};

use super::attention::{Attended, Attention, DEPTHS, MOST_TILES, THREADS};
use super::launch::{grid, whole};
use super::loaded::AttentionKernels;
use crate::gpu::{Buffer, Gpu};
use crate::{Bf16, CudaError};

/// For heads up to each width of `DEPTHS`: the rows of a block of the kernels `forward` and `queries`.
const ROWS: [usize; 2] = [128, 64];
/// The rows of a block of the kernel `keys`.
const KEY_ROWS: usize = 64;

/// The widest heads that are read where they lie, as in the kernels.
const IN_PLACE: usize = 64;

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

impl Set<'_> {
    /// Whether rows must first be sorted by heads, and made wider. Else they are read where they lie, 16 bytes at a time:
    /// heads that are as wide as the kernels begin at such multiples.
    fn sorts(&self, shape: Attention) -> bool {
        shape.columns != self.depth || self.depth > IN_PLACE
    }
}

impl Gpu {
    /// [`Gpu::attention`], by tensor cores. The softmax's weights are rounded to bf16; all sums are `f32`. Only for a GPU
    /// that [`keeps_bf16`](Gpu::keeps_bf16), and for triples that are whole buffers.
    ///
    /// # Panics
    /// As there.
    pub fn attention_bf16(
        &self,
        shape: Attention,
        triples: &CudaView<'_, Bf16>,
        outputs: &mut CudaViewMut<'_, Bf16>,
        logs: &mut CudaViewMut<'_, f32>,
    ) -> Result<(), CudaError> {
        assert_eq!((triples.len(), outputs.len(), logs.len()), (3 * shape.outputs(), shape.outputs(), shape.logs()));
        let (set, [time, heads, columns]) = (shape.set(self), shape.sizes());
        let (sorts, mut rooms) = (set.sorts(shape), self.rounded.lock().unwrap_or_else(PoisonError::into_inner));
        let ready = if sorts { self.by_heads(shape, &set, triples, &mut rooms[0])? } else { triples.slice(..) };
        let (sorted, mut launch) = (i32::from(sorts), self.stream().launch_builder(&set.kernels.forward));
        launch.arg(outputs).arg(logs).arg(&ready).arg(&time).arg(&heads).arg(&columns).arg(&sorted);
        // SAFETY: the arguments are the kernel's, and the lengths those of the shape.
        unsafe { self.run(launch, set.own, "attend") }
    }

    /// [`Gpu::attention_slope`], by tensor cores. It rounds as [`attention_bf16`](Self::attention_bf16) does, and the
    /// derivative by the scores too.
    ///
    /// # Panics
    /// As there.
    pub fn attention_slope_bf16(
        &self,
        shape: Attention,
        attended: &Attended<'_, Bf16>,
        output_slope: &CudaView<'_, Bf16>,
        means: &mut CudaViewMut<'_, f32>,
        slope: &mut CudaViewMut<'_, Bf16>,
    ) -> Result<(), CudaError> {
        let Attended { triples, outputs, logs } = attended;
        let count = shape.outputs();
        assert_eq!((triples.len(), outputs.len(), logs.len()), (3 * count, count, shape.logs()));
        assert_eq!((output_slope.len(), means.len(), slope.len()), (count, shape.logs(), 3 * count));
        let (set, [time, heads, columns]) = (shape.set(self), shape.sizes());
        let mut rooms = self.rounded.lock().unwrap_or_else(PoisonError::into_inner);
        let [room, above] = &mut *rooms;
        let sorts = set.sorts(shape);
        let ready = if sorts { self.by_heads(shape, &set, triples, room)? } else { triples.slice(..) };

        let depth = if sorts { set.depth } else { 0 };
        // There is room for one number at least.
        let (mut sorted_slope, depth) = (above.fit(self, (shape.logs() * depth).max(1))?, whole(depth));
        let mut launch = self.stream().launch_builder(&self.kernels.attention_bf16.means);
        launch.arg(&mut sorted_slope).arg(&mut *means).arg(output_slope).arg(outputs);
        launch.arg(&time).arg(&heads).arg(&columns).arg(&depth);
        // SAFETY: the arguments are the kernel's, the lengths those of the shape, and there is room for `depth` numbers
        // for each row of each head.
        unsafe { self.run(launch, set.each_row, "attend") }?;

        let above = if sorts { above.view() } else { output_slope.slice(..) };
        let (means, sorted) = (means.as_view(), i32::from(sorts));
        for (kernel, size) in [(&set.kernels.queries, set.own), (&set.kernels.keys, set.keys)] {
            let mut launch = self.stream().launch_builder(kernel);
            launch.arg(&mut *slope).arg(&ready).arg(&above).arg(logs).arg(&means);
            launch.arg(&time).arg(&heads).arg(&columns).arg(&sorted);
            // SAFETY: both kernels take these arguments, and the lengths are those of the shape.
            unsafe { self.run(launch, size, "attend") }?;
        }
        Ok(())
    }

    /// The triples head by head, in rows of `set.depth` numbers.
    fn by_heads<'a>(
        &self,
        shape: Attention,
        set: &Set<'_>,
        triples: &CudaView<'_, Bf16>,
        room: &'a mut Buffer<Bf16>,
    ) -> Result<CudaView<'a, Bf16>, CudaError> {
        let ([time, heads, columns], depth) = (shape.sizes(), whole(set.depth));
        let mut sorted = room.fit(self, 3 * shape.logs() * set.depth)?;
        let mut launch = self.stream().launch_builder(&self.kernels.attention_bf16.by_heads);
        launch.arg(&mut sorted).arg(triples).arg(&time).arg(&heads).arg(&columns).arg(&depth);
        // SAFETY: the arguments are the kernel's, the lengths those of the shape, and there is room for `depth` numbers
        // for each query, key and value.
        unsafe { self.run(launch, set.each_row, "sort by heads") }?;
        Ok(room.view())
    }
}
