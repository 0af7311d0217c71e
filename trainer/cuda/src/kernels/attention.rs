//! Attention in f32 as functions, which check shapes, and the shapes, which attention in bf16 shares.
#![allow(unsafe_code)]

use cudarc::driver::{CudaView, CudaViewMut, LaunchConfig, PushKernelArg};

use super::launch::{grid, whole};
use crate::gpu::Gpu;
use crate::{CudaError, Number};

/// For each set of kernels of `attention.cu`: the widest heads that it takes, and the rows of a block. A narrower head
/// uses the first set that it fits in, and takes as much time as the widest.
pub(crate) const DEPTHS: [(usize, usize); 2] = [(64, 64), (128, 32)];
/// Threads of a block, as in the kernels of both files.
pub(crate) const THREADS: usize = 128;
/// The most that a grid may have in its second dimension.
const MOST_TILES: usize = 65_535;

/// How sequences and heads lie in the rows of a batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Attention {
    /// Sequences.
    pub sequences: usize,
    /// Rows of a sequence.
    pub time: usize,
    /// Heads.
    pub heads: usize,
    /// Columns of a head.
    pub columns: usize,
}

/// The inputs and results of attention, which the backward pass needs.
#[derive(Debug)]
pub struct Attended<'a, T = f32> {
    /// The inputs: in each row the queries of all heads, then their keys, then their values.
    pub triples: CudaView<'a, T>,
    /// The outputs: in each row those of all heads.
    pub outputs: CudaView<'a, T>,
    /// A number for each head and row: the logarithm to base 2 of what the softmax divides by.
    pub logs: CudaView<'a, f32>,
}

impl Attention {
    /// Why there are no kernels for heads of so many columns.
    pub fn refusal(columns: usize) -> Option<String> {
        let widest = DEPTHS[DEPTHS.len() - 1].0;
        (columns > widest).then(|| {
            format!("its heads have {columns} columns, and the GPU kernels support at most {widest}; raise --heads")
        })
    }

    /// How many outputs there are. The triples are three times as many numbers.
    pub fn outputs(self) -> usize {
        self.sequences * self.time * self.heads * self.columns
    }

    /// How many logarithms there are.
    pub fn logs(self) -> usize {
        self.sequences * self.heads * self.time
    }

    /// Which of the [`DEPTHS`] its heads fit in.
    #[allow(clippy::expect_used)] // A fault in the caller.
    pub(crate) fn fits(self) -> usize {
        assert!(self.outputs() > 0, "no attention of nothing: {self:?}");
        // A kernel counts the numbers of a row, and the rows of a sequence, in 32 bits.
        whole(3 * self.heads * self.columns);
        let fits = DEPTHS.iter().position(|&(depth, _)| self.columns <= depth);
        fits.expect("there are kernels for these heads: `Attention::refusal` has no reason")
    }

    /// A grid with a block for each head and so many rows.
    pub(crate) fn blocks(self, rows: usize) -> LaunchConfig {
        let tiles = self.time.div_ceil(rows);
        assert!(tiles <= MOST_TILES, "sequences of {}", self.time);
        grid((whole(self.sequences * self.heads) as u32, tiles as u32, 1), THREADS)
    }

    pub(crate) fn sizes(self) -> [i32; 3] {
        [self.time, self.heads, self.columns].map(whole)
    }
}

/// Numbers that attention takes: `f32`, and, by tensor cores, [`Bf16`](crate::Bf16).
pub trait Attends: Number {
    /// Writes the outputs for `triples`, and the logarithms that the backward pass needs: both as in [`Attended`]. A
    /// row's bits depend only on that row and the rows before it.
    fn attention(
        gpu: &Gpu,
        shape: Attention,
        triples: &CudaView<'_, Self>,
        outputs: &mut CudaViewMut<'_, Self>,
        logs: &mut CudaViewMut<'_, f32>,
    ) -> Result<(), CudaError>;

    /// Writes the derivative by the triples into `slope`, from `output_slope`, the derivative by the outputs. `means`
    /// is room for as many numbers as there are logarithms.
    fn attention_slope(
        gpu: &Gpu,
        shape: Attention,
        attended: &Attended<'_, Self>,
        output_slope: &CudaView<'_, Self>,
        means: &mut CudaViewMut<'_, f32>,
        slope: &mut CudaViewMut<'_, Self>,
    ) -> Result<(), CudaError>;
}

impl Attends for f32 {
    fn attention(
        gpu: &Gpu,
        shape: Attention,
        triples: &CudaView<'_, f32>,
        outputs: &mut CudaViewMut<'_, f32>,
        logs: &mut CudaViewMut<'_, f32>,
    ) -> Result<(), CudaError> {
        assert_eq!((triples.len(), outputs.len(), logs.len()), (3 * shape.outputs(), shape.outputs(), shape.logs()));
        let ((depth, rows), [time, heads, columns]) = (DEPTHS[shape.fits()], shape.sizes());
        let mut launch = gpu.launch(&format!("attention_{depth}"));
        launch.arg(outputs).arg(logs).arg(triples).arg(&time).arg(&heads).arg(&columns);
        // SAFETY: the arguments are the kernel's, and the lengths those of the shape.
        unsafe { gpu.run(launch, shape.blocks(rows), "attend") }
    }

    fn attention_slope(
        gpu: &Gpu,
        shape: Attention,
        attended: &Attended<'_>,
        output_slope: &CudaView<'_, f32>,
        means: &mut CudaViewMut<'_, f32>,
        slope: &mut CudaViewMut<'_, f32>,
    ) -> Result<(), CudaError> {
        let Attended { triples, outputs, logs } = attended;
        let count = shape.outputs();
        assert_eq!((triples.len(), outputs.len(), logs.len()), (3 * count, count, shape.logs()));
        assert_eq!((output_slope.len(), means.len(), slope.len()), (count, shape.logs(), 3 * count));
        let ((depth, rows), [time, heads, columns]) = (DEPTHS[shape.fits()], shape.sizes());
        let mut launch = gpu.launch(&format!("attention_queries_{depth}"));
        launch.arg(&mut *slope).arg(&mut *means).arg(triples).arg(outputs).arg(output_slope).arg(logs);
        launch.arg(&time).arg(&heads).arg(&columns);
        // SAFETY: the arguments are the kernel's, and the lengths those of the shape.
        unsafe { gpu.run(launch, shape.blocks(rows), "attend") }?;
        let mut launch = gpu.launch(&format!("attention_keys_{depth}"));
        launch.arg(slope).arg(triples).arg(output_slope).arg(logs).arg(means);
        launch.arg(&time).arg(&heads).arg(&columns);
        // SAFETY: as above; the kernel before has written all means.
        unsafe { gpu.run(launch, shape.blocks(rows), "attend") }
    }
}
