//! The kernels of `attention_bf16.cu` as functions: attention of numbers in bf16, by tensor cores.
#![allow(unsafe_code)]

use std::sync::PoisonError;

use cudarc::driver::{CudaView, CudaViewMut, LaunchConfig, PushKernelArg};

use super::attention::{Attended, Attends, Attention, DEPTHS, THREADS};
use super::launch::{grid, whole};
use crate::gpu::{Buffer, Gpu};
use crate::{Bf16, CudaError};

/// For heads up to each width of `DEPTHS`: the rows of a block of the kernels `forward` and `queries`.
const ROWS: [usize; 2] = [128, 64];
/// The rows of a block of the kernel `keys`.
const KEY_ROWS: usize = 64;

/// The widest heads that are read where they lie, as in the kernels.
const IN_PLACE: usize = 64;

/// How to start the kernels for a shape.
struct Set {
    /// The columns of a head, with the zeros after them.
    depth: usize,
    /// A grid for `forward` and `queries`, and one for `keys`.
    own: LaunchConfig,
    keys: LaunchConfig,
    /// A block for each row of the batch.
    each_row: LaunchConfig,
}

impl Attention {
    fn set(self) -> Set {
        let fits = self.fits();
        let each_row = grid((whole(self.sequences * self.time) as u32, 1, 1), THREADS);
        Set { depth: DEPTHS[fits].0, own: self.blocks(ROWS[fits]), keys: self.blocks(KEY_ROWS), each_row }
    }
}

impl Set {
    /// Whether rows must first be sorted by heads, and made wider. Else they are read where they lie, 16 bytes at a time:
    /// heads that are as wide as the kernels begin at such multiples.
    fn sorts(&self, shape: Attention) -> bool {
        shape.columns != self.depth || self.depth > IN_PLACE
    }
}

/// The softmax's weights and the derivative by the scores are rounded to bf16; all sums are `f32`. Only for a GPU that
/// [`keeps_bf16`](Gpu::keeps_bf16), and for triples that are whole buffers.
impl Attends for Bf16 {
    fn attention(
        gpu: &Gpu,
        shape: Attention,
        triples: &CudaView<'_, Bf16>,
        outputs: &mut CudaViewMut<'_, Bf16>,
        logs: &mut CudaViewMut<'_, f32>,
    ) -> Result<(), CudaError> {
        assert_eq!((triples.len(), outputs.len(), logs.len()), (3 * shape.outputs(), shape.outputs(), shape.logs()));
        let (set, [time, heads, columns]) = (shape.set(), shape.sizes());
        let (sorts, mut rooms) = (set.sorts(shape), gpu.rounded.lock().unwrap_or_else(PoisonError::into_inner));
        let ready = if sorts { gpu.by_heads(shape, &set, triples, &mut rooms[0])? } else { triples.slice(..) };
        let (sorted, mut launch) = (i32::from(sorts), gpu.launch(&format!("attention_bf16_{}", set.depth)));
        launch.arg(outputs).arg(logs).arg(&ready).arg(&time).arg(&heads).arg(&columns).arg(&sorted);
        // SAFETY: the arguments are the kernel's, and the lengths those of the shape.
        unsafe { gpu.run(launch, set.own, "attend") }
    }

    fn attention_slope(
        gpu: &Gpu,
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
        let (set, [time, heads, columns]) = (shape.set(), shape.sizes());
        let mut rooms = gpu.rounded.lock().unwrap_or_else(PoisonError::into_inner);
        let [room, above] = &mut *rooms;
        let sorts = set.sorts(shape);
        let ready = if sorts { gpu.by_heads(shape, &set, triples, room)? } else { triples.slice(..) };

        let depth = if sorts { set.depth } else { 0 };
        // There is room for one number at least.
        let (mut sorted_slope, depth) = (above.fit(gpu, (shape.logs() * depth).max(1))?, whole(depth));
        let mut launch = gpu.launch("attention_means");
        launch.arg(&mut sorted_slope).arg(&mut *means).arg(output_slope).arg(outputs);
        launch.arg(&time).arg(&heads).arg(&columns).arg(&depth);
        // SAFETY: the arguments are the kernel's, the lengths those of the shape, and there is room for `depth` numbers
        // for each row of each head.
        unsafe { gpu.run(launch, set.each_row, "attend") }?;

        let above = if sorts { above.view() } else { output_slope.slice(..) };
        let (means, sorted) = (means.as_view(), i32::from(sorts));
        for (what, size) in [("queries", set.own), ("keys", set.keys)] {
            let mut launch = gpu.launch(&format!("attention_bf16_{what}_{}", set.depth));
            launch.arg(&mut *slope).arg(&ready).arg(&above).arg(logs).arg(&means);
            launch.arg(&time).arg(&heads).arg(&columns).arg(&sorted);
            // SAFETY: both kernels take these arguments, and the lengths are those of the shape.
            unsafe { gpu.run(launch, size, "attend") }?;
        }
        Ok(())
    }
}

impl Gpu {
    /// The triples head by head, in rows of `set.depth` numbers.
    fn by_heads<'a>(
        &self,
        shape: Attention,
        set: &Set,
        triples: &CudaView<'_, Bf16>,
        room: &'a mut Buffer<Bf16>,
    ) -> Result<CudaView<'a, Bf16>, CudaError> {
        let ([time, heads, columns], depth) = (shape.sizes(), whole(set.depth));
        let mut sorted = room.fit(self, 3 * shape.logs() * set.depth)?;
        let mut launch = self.launch("attention_by_heads");
        launch.arg(&mut sorted).arg(triples).arg(&time).arg(&heads).arg(&columns).arg(&depth);
        // SAFETY: the arguments are the kernel's, the lengths those of the shape, and there is room for `depth` numbers
        // for each query, key and value.
        unsafe { self.run(launch, set.each_row, "sort by heads") }?;
        Ok(room.view())
    }
}
