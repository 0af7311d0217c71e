//! The pass with `--precision bf16`: whatever is an operand of a product, or the result of one, is in bf16, and is
//! rounded once, where it is made. The residual stream, its derivative, statistics, losses and the gradient are f32.
//!
//! Biases, GELU and its derivative belong to products, which cuBLASLt does before it writes them. The head has a row
//! for each token of the vocabulary and zeros up to a multiple of [`TOKENS`], as tensor cores like it. Of the scores
//! that these make nothing is used.
//!
//! For each token and block there are two streams in f32, fourteen widths in bf16, a number for each head and four
//! more; and the scores of the whole vocabulary, in bf16, for [`SCORED_ROWS`] tokens at most. GPT-2 with its context of
//! 1024 takes 365 MB for a sample, and another 610 MB for parameters and scores in bf16 and the padded derivative.

use elastic_cuda::{
    Attended, Bf16, Buffer, Chunks, CudaError, CudaSlice, CudaView, Done, Epilogue, Gpu, Labelled, Matrix, More,
    Residual, SlopeIn,
};

use super::{Here, SCORED_ROWS};
use crate::model::gpt::{Affine, Block, Gpt};

/// The vocabulary is padded to a multiple of this.
const TOKENS: usize = 128;

/// What a pass computes, and keeps from call to call.
pub(super) struct Memory {
    vocabulary: usize,
    /// All parameters, with zeros behind the last token's row.
    weights: Buffer<Bf16>,
    layers: Vec<Layer>,
    /// The residual stream behind the last block, its norm, and the norm's means and scales.
    last: Buffer<f32>,
    normed: Buffer<Bf16>,
    stats: Buffer<f32>,
    /// What a block's half adds to the stream.
    added: Buffer<Bf16>,
    slopes: Slopes,
}

/// What a block's backward pass needs.
#[derive(Default)]
struct Layer {
    /// The residual stream before the block, and between its halves.
    before: Buffer<f32>,
    between: Buffer<f32>,
    stats_1: Buffer<f32>,
    normed_1: Buffer<Bf16>,
    triples: Buffer<Bf16>,
    logs: Buffer<f32>,
    attended: Buffer<Bf16>,
    stats_2: Buffer<f32>,
    normed_2: Buffer<Bf16>,
    up: Buffer<Bf16>,
    active: Buffer<Bf16>,
}

/// Derivatives in rows of one, three and four widths, and what they are computed from.
#[derive(Default)]
struct Slopes {
    scores: Buffer<Bf16>,
    losses: Buffer<f32>,
    /// The derivative by the tokens' weights, with the rows that are none.
    tokens: Buffer<f32>,
    /// By the stream, and the same rounded.
    stream: Buffer<f32>,
    rounded: Buffer<Bf16>,
    single: Buffer<Bf16>,
    triple: Buffer<Bf16>,
    four: Buffer<Bf16>,
    /// Attention's own.
    means: Buffer<f32>,
}

/// The parameters in bf16.
struct Weights<'a> {
    all: CudaView<'a, Bf16>,
    /// How many zeros there are.
    gap: usize,
}

impl Weights<'_> {
    fn bias(&self, linear: &Affine) -> CudaView<'_, Bf16> {
        self.all.slice(linear.bias.start + self.gap..linear.bias.end + self.gap)
    }

    /// A linear layer's weight: a row for each output.
    fn of(&self, linear: &Affine) -> Matrix<'_, Bf16> {
        let outputs = linear.bias.len();
        let place = linear.weight.start + self.gap..linear.weight.end + self.gap;
        Matrix::new(self.all.slice(place), outputs, linear.weight.len() / outputs)
    }
}

impl Memory {
    pub(super) fn new(model: &Gpt) -> Memory {
        let layers = model.places.blocks.iter().map(|_| Layer::default()).collect();
        let (weights, last, normed, stats, added, slopes) = Default::default();
        Memory { vocabulary: model.size.vocabulary, weights, layers, last, normed, stats, added, slopes }
    }

    /// As [`Pass::gradient`](elastic_cuda::Pass::gradient), without the part of the embeddings that comes from below.
    /// That is made from the derivative by their outputs, which it returns.
    pub(super) fn gradient(
        &mut self,
        here: &Here<'_>,
        (inputs, targets): (&Labelled<'_>, &Labelled<'_>),
        (gradient, done): (&mut CudaSlice<f32>, &mut Done<'_>),
        chunks: &mut Chunks,
    ) -> Result<CudaView<'_, f32>, CudaError> {
        let &Here { gpu, parameters, places, width, .. } = here;
        // The tokens' weights come first, so the zeros lie between them and all others.
        debug_assert_eq!(places.tokens, 0..self.vocabulary * width);
        let padded = self.vocabulary.next_multiple_of(TOKENS);
        let (before, gap) = (self.vocabulary * width, (padded - self.vocabulary) * width);
        let all = parameters.slice(..places.norm.bias.end);
        let room = &mut self.weights;
        gpu.round_parameters(&all, (before, gap), &mut room.fit(gpu, all.len() + gap)?)?;
        let weights = Weights { all: room.view(), gap };

        let Memory { layers, last, normed, stats, added, slopes, .. } = self;
        forward(here, &weights, inputs, (&mut *layers, last, added))?;
        let made = layers.last().map(|layer| (&layer.between, &*added));
        norm(here, &places.norm, (last, made), normed, stats)?;
        slopes.head(here, (&weights, padded), normed, targets, gradient)?;
        slopes.norm_back(here, &places.norm, (last, stats), gradient, chunks)?;
        done(gradient.slice_mut(places.norm.weight.start..))?;
        for (block, layer) in places.blocks.iter().zip(&*layers).rev() {
            slopes.back(here, &weights, (block, layer), (&mut *gradient, &mut *done), chunks)?;
        }
        Ok(slopes.stream.view())
    }
}

/// Rows of the batch.
fn matrix<'a>(here: &Here<'_>, room: &'a Buffer<Bf16>) -> Matrix<'a, Bf16> {
    let view = room.view();
    let columns = view.len() / here.rows;
    Matrix::new(view, here.rows, columns)
}

/// The stream before, and what is added to it.
type Parts<'a> = (&'a Buffer<f32>, &'a Buffer<Bf16>);

/// Makes the stream of its parts, if it is not there yet, and normalises it.
fn norm(
    here: &Here<'_>,
    norm: &Affine,
    (stream, made): (&mut Buffer<f32>, Option<Parts<'_>>),
    out: &mut Buffer<Bf16>,
    stats: &mut Buffer<f32>,
) -> Result<(), CudaError> {
    let &Here { gpu, rows, width, .. } = here;
    let more = made.map(|(to, numbers)| More { numbers: numbers.view(), to: Some(to.view()) });
    let stream = Residual { rows: stream.fit(gpu, rows * width)?, more };
    gpu.layer_norm(&here.norms(norm), stream, &mut out.fit(gpu, rows * width)?, &mut stats.fit(gpu, 2 * rows)?)
}

fn linear(
    here: &Here<'_>,
    weights: &Weights<'_>,
    linear: &Affine,
    inputs: &Buffer<Bf16>,
    out: &mut Buffer<Bf16>,
) -> Result<(), CudaError> {
    let mut out = out.fit(here.gpu, here.rows * linear.bias.len())?;
    let (inputs, weight) = (matrix(here, inputs), weights.of(linear).transposed());
    here.gpu.product_bf16(&mut out, &inputs, &weight, Epilogue::Bias(weights.bias(linear)))
}

fn forward(
    here: &Here<'_>,
    weights: &Weights<'_>,
    inputs: &Labelled<'_>,
    (layers, last, added): (&mut [Layer], &mut Buffer<f32>, &mut Buffer<Bf16>),
) -> Result<(), CudaError> {
    let &Here { gpu, parameters, places, rows, width, shape } = here;
    let first = layers.first_mut().map_or(last, |layer| &mut layer.before);
    let (tokens, positions) = (parameters.slice(places.tokens.clone()), parameters.slice(places.positions.clone()));
    gpu.embed((&tokens, &positions), inputs, shape.time, &mut first.fit(gpu, rows * width)?)?;
    for (number, block) in places.blocks.iter().enumerate() {
        let (past, layer) = layers.split_at_mut(number);
        let Layer { before, between, stats_1, normed_1, triples, logs, attended, stats_2, normed_2, up, active } =
            &mut layer[0];
        let made = past.last().map(|layer| (&layer.between, &*added));
        norm(here, &block.norm_1, (before, made), normed_1, stats_1)?;
        linear(here, weights, &block.attention, normed_1, triples)?;
        let (mut seen, mut logs) = (attended.fit(gpu, shape.outputs())?, logs.fit(gpu, shape.logs())?);
        gpu.attention_bf16(shape, &triples.view(), &mut seen, &mut logs)?;
        linear(here, weights, &block.attention_out, attended, added)?;

        norm(here, &block.norm_2, (between, Some((before, added))), normed_2, stats_2)?;
        let count = rows * block.up.bias.len();
        let (bias, inputs) = (weights.bias(&block.up), up.fit(gpu, count)?);
        let (rows, weight) = (matrix(here, normed_2), weights.of(&block.up).transposed());
        gpu.product_bf16(&mut active.fit(gpu, count)?, &rows, &weight, Epilogue::Gelu { bias, inputs })?;
        // The next norm adds it to the stream.
        linear(here, weights, &block.down, active, added)?;
    }
    Ok(())
}

impl Slopes {
    /// Writes the summed loss after the gradient, and the derivatives by the last norm's outputs and by the tokens'
    /// weights. Of the latter it is the part that comes from the scores.
    fn head(
        &mut self,
        here: &Here<'_>,
        (weights, padded): (&Weights<'_>, usize),
        normed: &Buffer<Bf16>,
        targets: &Labelled<'_>,
        gradient: &mut CudaSlice<f32>,
    ) -> Result<(), CudaError> {
        let &Here { gpu, places, rows, width, .. } = here;
        let Slopes { scores, losses, tokens, single, .. } = self;
        let weight = || Matrix::new(weights.all.slice(..padded * width), padded, width);
        let (mut slope, mut losses) = (single.fit(gpu, rows * width)?, losses.fit(gpu, rows)?);
        let mut tokens = tokens.fit(gpu, padded * width)?;
        for first in (0..rows).step_by(SCORED_ROWS) {
            let some = first..(first + SCORED_ROWS).min(rows);
            let numbers = some.start * width..some.end * width;
            let inputs = || Matrix::new(normed.view().slice(numbers.clone()), some.len(), width);
            let mut made = scores.fit(gpu, some.len() * padded)?;
            gpu.product_bf16(&mut made, &inputs(), &weight().transposed(), Epilogue::Plain)?;
            gpu.cross_entropy_bf16(&mut made, &targets.part(some.clone()), &mut losses.slice_mut(some.clone()))?;

            let scores = || Matrix::new(scores.view(), some.len(), padded);
            gpu.product_bf16(&mut slope.slice_mut(numbers.clone()), &scores(), &weight(), Epilogue::Plain)?;
            gpu.product_bf16_to_f32(&mut tokens, &scores().transposed(), &inputs(), first > 0)?;
        }
        gpu.copy(&tokens.slice(places.tokens.clone()), &mut gradient.slice_mut(places.tokens.clone()))?;
        let count = gradient.len();
        gpu.sum_all(&mut gradient.slice_mut(count - 1..), &losses.as_view())
    }

    /// A block's backward pass, from `stream` to `stream`.
    fn back(
        &mut self,
        here: &Here<'_>,
        weights: &Weights<'_>,
        (block, layer): (&Block, &Layer),
        (gradient, done): (&mut CudaSlice<f32>, &mut Done<'_>),
        chunks: &mut Chunks,
    ) -> Result<(), CudaError> {
        let &Here { gpu, rows, shape, .. } = here;
        let Block { norm_1, attention, attention_out, norm_2, up, down } = block;
        derive(here, down, (&layer.active, &self.rounded), gradient, chunks)?;
        let mut four = self.four.fit(gpu, rows * up.bias.len())?;
        let gelu = Epilogue::GeluSlope(layer.up.view());
        gpu.product_bf16(&mut four, &matrix(here, &self.rounded), &weights.of(down), gelu)?;
        derive(here, up, (&layer.normed_2, &self.four), gradient, chunks)?;
        go_back(gpu, &matrix(here, &self.four), &weights.of(up), &mut self.single)?;
        self.norm_back(here, norm_2, (&layer.between, &layer.stats_2), gradient, chunks)?;
        done(gradient.slice_mut(norm_2.weight.start..))?;

        derive(here, attention_out, (&layer.attended, &self.rounded), gradient, chunks)?;
        go_back(gpu, &matrix(here, &self.rounded), &weights.of(attention_out), &mut self.single)?;
        let attended =
            Attended { triples: layer.triples.view(), outputs: layer.attended.view(), logs: layer.logs.view() };
        let (mut means, mut triple) = (self.means.fit(gpu, shape.logs())?, self.triple.fit(gpu, 3 * shape.outputs())?);
        gpu.attention_slope_bf16(shape, &attended, &self.single.view(), &mut means, &mut triple)?;
        derive(here, attention, (&layer.normed_1, &self.triple), gradient, chunks)?;
        go_back(gpu, &matrix(here, &self.triple), &weights.of(attention), &mut self.single)?;
        self.norm_back(here, norm_1, (&layer.before, &layer.stats_1), gradient, chunks)?;
        done(gradient.slice_mut(norm_1.weight.start..))
    }

    /// The backward pass of a norm, from `single` into `stream`. The last norm's replaces what is there, the others'
    /// are added to it.
    fn norm_back(
        &mut self,
        here: &Here<'_>,
        norm: &Affine,
        (stream, stats): (&Buffer<f32>, &Buffer<f32>),
        gradient: &mut CudaSlice<f32>,
        chunks: &mut Chunks,
    ) -> Result<(), CudaError> {
        let &Here { gpu, parameters, places, rows, width, .. } = here;
        let (weight, made) = (parameters.slice(norm.weight.clone()), (&stream.view(), &stats.view()));
        let slope_in = SlopeIn { rows: self.stream.fit(gpu, rows * width)?, adds: *norm != places.norm };
        let mut rounded = self.rounded.fit(gpu, rows * width)?;
        gpu.layer_norm_slope_bf16(&weight, made, &self.single.view(), slope_in, &mut rounded)?;
        let mut pair = gradient.slice_mut(norm.weight.start..norm.bias.end);
        let (mut weight, mut bias) = pair.split_at_mut(norm.weight.len());
        gpu.layer_norm_parameters(made, &self.single.view(), (&mut weight, &mut bias), chunks)
    }
}

/// The derivatives by a linear layer's weight and bias.
fn derive(
    here: &Here<'_>,
    linear: &Affine,
    (inputs, slope): (&Buffer<Bf16>, &Buffer<Bf16>),
    gradient: &mut CudaSlice<f32>,
    chunks: &mut Chunks,
) -> Result<(), CudaError> {
    let mut weight = gradient.slice_mut(linear.weight.clone());
    let (inputs, by_output) = (matrix(here, inputs), matrix(here, slope).transposed());
    here.gpu.product_bf16_to_f32(&mut weight, &by_output, &inputs, false)?;
    here.gpu.sum_many_rows(&mut gradient.slice_mut(linear.bias.clone()), &slope.view(), chunks)
}

/// The derivative by a linear layer's inputs.
fn go_back(
    gpu: &Gpu,
    slope: &Matrix<'_, Bf16>,
    weight: &Matrix<'_, Bf16>,
    slope_in: &mut Buffer<Bf16>,
) -> Result<(), CudaError> {
    let count = slope.rows() * weight.columns();
    gpu.product_bf16(&mut slope_in.fit(gpu, count)?, slope, weight, Epilogue::Plain)
}
