//! The kernels of `rows.cu` as functions, which check shapes.
#![allow(unsafe_code)]

use cudarc::driver::{CudaView, CudaViewMut, LaunchConfig, PushKernelArg};

use super::launch::{Labelled, grid, whole};
use crate::gpu::{Buffer, Gpu};
use crate::{Bf16, CudaError, Number};

/// Threads of a block, and its rows if each warp has one, as in `rows.cu`.
const THREADS: usize = 128;
const WARPS: usize = 4;
/// Of a block that sums over rows: its threads across, of four columns each, all its threads, and the rows that it
/// sums, as in `rows.cu`.
const ACROSS: usize = 32;
const SUM_THREADS: usize = 256;
const CHUNK: usize = 256;
/// The most that a grid may have in its second dimension.
const MOST_CHUNKS: usize = 65_535;

/// The parameters of a layer norm: a number for each column.
#[derive(Debug)]
pub struct Norm<'a> {
    /// The factors.
    pub weight: CudaView<'a, f32>,
    /// The summands.
    pub bias: CudaView<'a, f32>,
}

/// A residual stream.
#[derive(Debug)]
pub struct Residual<'a, T = f32> {
    /// Its rows.
    pub rows: CudaViewMut<'a, f32>,
    /// What is added to them first, of the same length.
    pub more: Option<More<'a, T>>,
}

/// What is added to a residual stream.
#[derive(Debug)]
pub struct More<'a, T = f32> {
    /// The numbers to add.
    pub numbers: CudaView<'a, T>,
    /// The stream before that; if none, it is where the sum will be.
    pub to: Option<CudaView<'a, f32>>,
}

/// A derivative that passes back through a norm.
#[derive(Debug)]
pub struct SlopeIn<'a> {
    /// Where it is written, or added.
    pub rows: CudaViewMut<'a, f32>,
    /// Whether it is added to what is there.
    pub adds: bool,
}

/// Room for sums over chunks of rows.
#[derive(Debug, Default)]
pub struct Chunks {
    weights: Buffer<f32>,
    biases: Buffer<f32>,
}

/// The places of each token in a batch.
#[derive(Debug, Default)]
pub struct Occurrences {
    sorted: Sorted,
    on_gpu: [Buffer<u32>; 2],
}

/// The rows of a batch sorted by token, those of one token in their order; and where each token's end.
#[derive(Debug, Default)]
struct Sorted {
    tokens: Vec<u32>,
    order: Vec<u32>,
    ends: Vec<u32>,
}

impl Occurrences {
    /// Sorts `tokens`, which are to be uploaded next.
    pub fn sort(&mut self, tokens: &[u32]) {
        let Sorted { tokens: sorted, order, ends } = &mut self.sorted;
        tokens.clone_into(sorted);
        order.clear();
        order.extend(0..whole(tokens.len()) as u32);
        order.sort_by_key(|&row| tokens[row as usize]);
        ends.clear();
        for same in order.chunk_by(|&one, &next| tokens[one as usize] == tokens[next as usize]) {
            ends.push((ends.len() + same.len()) as u32);
            ends.extend(same.iter().skip(1).map(|_| 0));
        }
    }

    /// The places of `tokens`, in the order in which their rows are added.
    pub fn upload(&mut self, gpu: &Gpu, tokens: &[u32]) -> Result<(), CudaError> {
        if self.sorted.tokens != tokens {
            self.sort(tokens);
        }
        let Occurrences { sorted: Sorted { order, ends, .. }, on_gpu: [order_room, ends_room] } = self;
        gpu.upload(order, &mut order_room.fit(gpu, order.len())?)?;
        gpu.upload(ends, &mut ends_room.fit(gpu, ends.len())?)
    }
}

impl Gpu {
    /// Normalises each row of the stream, which is as long as the norm's weight, and writes the result into `out`.
    /// `stats` keeps two numbers of each row: its mean, and 1 / its deviation.
    pub fn layer_norm<T: Number>(
        &self,
        norm: &Norm<'_>,
        stream: Residual<'_, T>,
        out: &mut CudaViewMut<'_, T>,
        stats: &mut CudaViewMut<'_, f32>,
    ) -> Result<(), CudaError> {
        let Residual { rows: inputs, more } = stream;
        let (rows, width) = shape(inputs.len(), norm.weight.len());
        assert_eq!((norm.bias.len(), out.len(), stats.len()), (norm.weight.len(), inputs.len(), 2 * rows as usize));
        let (adds, count) = (i32::from(more.is_some()), inputs.len());
        let mut launch = self.launch_of::<T>("layer_norm");
        // The kernel writes to `inputs` where something is added. Where nothing is, it does not read what would be.
        let here = inputs.as_view();
        launch.arg(out).arg(stats).arg(&here);
        match &more {
            Some(More { numbers, to }) => {
                assert_eq!(numbers.len(), count, "what is added has the stream's length");
                let to = to.as_ref().unwrap_or(&here);
                assert_eq!(to.len(), count, "and so has the stream that it is added to");
                launch.arg(to).arg(numbers)
            }
            None => launch.arg(&here).arg(&norm.weight),
        };
        launch.arg(&norm.weight).arg(&norm.bias).arg(&rows).arg(&width).arg(&adds);
        // SAFETY: the arguments are the kernel's, and the lengths fit so many rows of this width.
        unsafe { self.run(launch, warps(rows), "norm") }
    }

    /// Writes into `slope_in`, or adds to it, the derivative of [`Gpu::layer_norm`] by its stream. `slope_out` is the
    /// derivative by its outputs, and `inputs` the stream that was normalised. In bf16, the result is written a second
    /// time, `rounded`.
    pub fn layer_norm_slope<T: Number>(
        &self,
        weight: &CudaView<'_, f32>,
        (inputs, stats): (&CudaView<'_, f32>, &CudaView<'_, f32>),
        slope_out: &CudaView<'_, T>,
        SlopeIn { rows: mut slope_in, adds }: SlopeIn<'_>,
        rounded: Option<&mut CudaViewMut<'_, Bf16>>,
    ) -> Result<(), CudaError> {
        let (rows, width) = shape(inputs.len(), weight.len());
        assert_eq!((slope_out.len(), slope_in.len(), stats.len()), (inputs.len(), inputs.len(), 2 * rows as usize));
        let adds = i32::from(adds);
        let mut launch = self.launch_of::<T>("layer_norm_slope");
        launch.arg(&mut slope_in);
        assert_eq!(rounded.is_some(), T::ROUNDS, "what is rounded, in bf16");
        if let Some(rounded) = rounded {
            assert_eq!(rounded.len(), inputs.len(), "room for what is rounded");
            launch.arg(rounded);
        }
        launch.arg(inputs).arg(weight).arg(stats).arg(slope_out).arg(&rows).arg(&width).arg(&adds);
        // SAFETY: the arguments are the kernel's, which has one for what is rounded if it is for bf16; and the lengths
        // fit so many rows of this width.
        unsafe { self.run(launch, warps(rows), "go back through a norm") }
    }

    /// Writes the derivatives of [`Gpu::layer_norm`] by its weight and by its bias.
    pub fn layer_norm_parameters<T: Number>(
        &self,
        (inputs, stats): (&CudaView<'_, f32>, &CudaView<'_, f32>),
        slope_out: &CudaView<'_, T>,
        (weight, bias): (&mut CudaViewMut<'_, f32>, &mut CudaViewMut<'_, f32>),
        room: &mut Chunks,
    ) -> Result<(), CudaError> {
        let ((rows, columns), size, chunks) = chunks(inputs.len(), weight.len());
        assert_eq!((slope_out.len(), stats.len(), bias.len()), (inputs.len(), 2 * rows as usize, weight.len()));
        let mut weights = room.weights.fit(self, chunks * weight.len())?;
        let mut biases = room.biases.fit(self, chunks * weight.len())?;
        let mut launch = self.launch_of::<T>("layer_norm_chunks");
        launch.arg(&mut weights).arg(&mut biases).arg(inputs).arg(stats).arg(slope_out).arg(&rows).arg(&columns);
        // SAFETY: the arguments are the kernel's; there is a row of sums for each chunk of so many rows and columns.
        unsafe { self.run(launch, size, "go back through a norm") }?;
        self.sum_rows(weight, &weights.as_view())?;
        self.sum_rows(bias, &biases.as_view())
    }

    /// Writes the sum of all rows of `numbers`, which are as long as `sum`. It differs from [`Gpu::sum_rows`] in the
    /// order of the sum, which keeps a GPU busy when there are many rows.
    pub fn sum_many_rows<T: Number>(
        &self,
        sum: &mut CudaViewMut<'_, f32>,
        numbers: &CudaView<'_, T>,
        room: &mut Chunks,
    ) -> Result<(), CudaError> {
        let ((rows, columns), size, chunks) = chunks(numbers.len(), sum.len());
        let mut sums = room.weights.fit(self, chunks * sum.len())?;
        let mut launch = self.launch_of::<T>("sum_chunks");
        launch.arg(&mut sums).arg(numbers).arg(&rows).arg(&columns);
        // SAFETY: the arguments are the kernel's; there is a row of sums for each chunk of so many rows and columns.
        unsafe { self.run(launch, size, "sum rows") }?;
        self.sum_rows(sum, &sums.as_view())
    }

    /// Writes GELU, by the tanh approximation, of each of `inputs`.
    pub fn gelu(&self, inputs: &CudaView<'_, f32>, out: &mut CudaViewMut<'_, f32>) -> Result<(), CudaError> {
        assert_eq!(inputs.len(), out.len(), "as many outputs as inputs");
        let count = inputs.len() as i64;
        let mut launch = self.launch("gelu");
        launch.arg(out).arg(inputs).arg(&count);
        // SAFETY: the arguments are the kernel's, and both have `count` numbers.
        unsafe { self.run(launch, fours(count as usize), "activate") }
    }

    /// Turns `slope`, the derivative by GELU's outputs, into the derivative by its `inputs`.
    pub fn gelu_slope(&self, inputs: &CudaView<'_, f32>, slope: &mut CudaViewMut<'_, f32>) -> Result<(), CudaError> {
        assert_eq!(inputs.len(), slope.len(), "a derivative for each input");
        let count = inputs.len() as i64;
        let mut launch = self.launch("gelu_slope");
        launch.arg(slope).arg(inputs).arg(&count);
        // SAFETY: the arguments are the kernel's, and both have `count` numbers.
        unsafe { self.run(launch, fours(count as usize), "go back through an activation") }
    }

    /// Writes a row for each of `numbers`: the sum of that row of `tokens` and the row of `positions` for its place in
    /// its sequence, which has `time` places.
    pub fn embed(
        &self,
        (tokens, positions): (&CudaView<'_, f32>, &CudaView<'_, f32>),
        numbers: &Labelled<'_>,
        time: usize,
        out: &mut CudaViewMut<'_, f32>,
    ) -> Result<(), CudaError> {
        let rows = numbers.numbers.len();
        assert!(rows > 0 && out.len().is_multiple_of(rows), "a row for each number");
        let width = out.len() / rows;
        assert_eq!(tokens.len(), numbers.classes * width, "a row for each token");
        assert!(time > 0 && positions.len() >= time * width, "a row for each position");
        let (time, columns) = (whole(time), whole(width));
        let mut launch = self.launch("embed");
        launch.arg(out).arg(tokens).arg(positions).arg(&numbers.numbers).arg(&time).arg(&columns);
        // SAFETY: the arguments are the kernel's, and `Labels` are below the number of rows.
        unsafe { self.run(launch, each(rows), "embed") }
    }

    /// Adds to each token's row of `gradient` the rows of `slopes` at the token's places. `numbers` are the tokens,
    /// and `occurrences` their uploaded places.
    pub fn embed_slope(
        &self,
        numbers: &Labelled<'_>,
        occurrences: &Occurrences,
        slopes: &CudaView<'_, f32>,
        gradient: &mut CudaViewMut<'_, f32>,
    ) -> Result<(), CudaError> {
        let rows = numbers.numbers.len();
        assert!(rows > 0 && slopes.len().is_multiple_of(rows), "a row for each token");
        assert_eq!(gradient.len(), numbers.classes * (slopes.len() / rows), "a row for each of the vocabulary");
        let width = whole(slopes.len() / rows);
        let [order, ends] = occurrences.on_gpu.each_ref().map(Buffer::view);
        assert_eq!((order.len(), ends.len()), (rows, rows), "a place for each token");
        let mut launch = self.launch("embed_slope");
        launch.arg(gradient).arg(slopes).arg(&numbers.numbers).arg(&order).arg(&ends).arg(&width);
        // SAFETY: the arguments are the kernel's; places are those of rows, and `Labels` are below the number of rows.
        unsafe { self.run(launch, each(rows), "go back through an embedding") }
    }
}

/// Rows and columns of so many numbers.
fn shape(count: usize, width: usize) -> (i32, i32) {
    assert!(width > 0 && count > 0 && count.is_multiple_of(width), "{count} numbers in whole rows of {width}");
    (whole(count / width), whole(width))
}

/// Rows and columns of so many numbers, a grid with a block for each chunk of rows and four times [`ACROSS`]
/// columns, and the number of chunks.
fn chunks(count: usize, width: usize) -> ((i32, i32), LaunchConfig, usize) {
    let (rows, columns) = shape(count, width);
    let chunks = (rows as usize).div_ceil(CHUNK);
    assert!(chunks <= MOST_CHUNKS, "{rows} rows to sum");
    let grid_dim = (width.div_ceil(4 * ACROSS) as u32, chunks as u32, 1);
    let size = grid(grid_dim, SUM_THREADS);
    ((rows, columns), size, chunks)
}

/// A warp for each row.
fn warps(rows: i32) -> LaunchConfig {
    each((rows as usize).div_ceil(WARPS))
}

/// A thread for every four of `count`.
pub(crate) fn fours(count: usize) -> LaunchConfig {
    each(count.div_ceil(4 * THREADS).max(1))
}

/// A block for each of `count`.
pub(crate) fn each(count: usize) -> LaunchConfig {
    grid((whole(count) as u32, 1, 1), THREADS)
}
