//! The GPT's pass on a GPU: the steps of `pass`, by kernels.
//!
//! With `--precision bf16`, whatever is an operand of a product, or the result of one, is in bf16, and is rounded once,
//! where it is made. The residual stream, its derivative, statistics, losses and the gradient are f32. Biases, GELU and
//! its derivative belong to products, which cuBLASLt does before it writes them. The head has a row for each token of
//! the vocabulary and zeros up to a multiple of 128, as tensor cores like it. Of the scores that these make nothing is
//! used.
//!
//! What the backward pass needs stays on the GPU, in memory that is kept from call to call; nothing is kept for pairs
//! of tokens. For each token and block there are sixteen widths (in bf16: two in f32, fourteen in bf16), a number for
//! each head and four more; for each token twelve widths, once; and the scores of the whole vocabulary for
//! [`SCORED_ROWS`] tokens at most. GPT-2 with its context of 1024 takes 640 MB for a sample, and 410 MB for the scores;
//! in bf16 365 MB, and another 610 MB for parameters and scores in bf16 and the padded derivative.

mod numbers;

use elastic_cuda::{
    Attended, Attention, Bf16, Buffer, Chunks, CudaError, CudaSlice, CudaView, Done, Epilogue, Gpu, Labelled, Labels,
    Matrix, More, Norm, Occurrences, Residual, SlopeIn,
};

use super::{Affine, Block, Gpt, Places, Tokens};
use numbers::Numbers;

/// Tokens whose scores of the whole vocabulary are in memory at once.
const SCORED_ROWS: usize = 2048;

/// A batch on the GPU, and what a pass computes from it.
pub(super) struct Pass<'a> {
    model: &'a Gpt,
    inputs: Labels,
    targets: Labels,
    /// The batch's sequences, and the tokens in each.
    sequences: usize,
    time: usize,
    occurrences: Occurrences,
    in_f32: Memory<f32>,
    in_bf16: Memory<Bf16>,
    chunks: Chunks,
}

/// What a pass computes, and keeps from call to call.
#[derive(Default)]
struct Memory<T> {
    /// All parameters in bf16, with zeros behind the last token's row.
    weights: Buffer<T>,
    layers: Vec<Layer<T>>,
    /// The residual stream behind the last block, its norm, and the norm's means and scales.
    last: Buffer<f32>,
    normed: Buffer<T>,
    stats: Buffer<f32>,
    /// What a block's half adds to the stream.
    added: Buffer<T>,
    slopes: Slopes<T>,
}

/// What a block's backward pass needs.
#[derive(Default)]
struct Layer<T> {
    /// The residual stream before the block, and between its halves.
    before: Buffer<f32>,
    between: Buffer<f32>,
    stats_1: Buffer<f32>,
    normed_1: Buffer<T>,
    triples: Buffer<T>,
    logs: Buffer<f32>,
    attended: Buffer<T>,
    stats_2: Buffer<f32>,
    normed_2: Buffer<T>,
    up: Buffer<T>,
    active: Buffer<T>,
}

/// Derivatives in rows of one, three and four widths, and what they are computed from.
#[derive(Default)]
struct Slopes<T> {
    scores: Buffer<T>,
    losses: Buffer<f32>,
    /// The derivative by the tokens' weights with the rows that are none, and by some rows' scores.
    tokens: Buffer<f32>,
    part: Buffer<f32>,
    /// By the stream, and the same rounded.
    stream: Buffer<f32>,
    rounded: Buffer<Bf16>,
    single: Buffer<T>,
    triple: Buffer<T>,
    four: Buffer<T>,
    /// Attention's own.
    means: Buffer<f32>,
}

/// What all parts of a pass share.
struct Here<'a, T> {
    gpu: &'a Gpu,
    /// In f32, for norms and embeddings.
    parameters: &'a CudaSlice<f32>,
    /// As products take them, and how many zeros there are behind the last token's row.
    weights: CudaView<'a, T>,
    gap: usize,
    places: &'a Places,
    /// Of the batch.
    rows: usize,
    width: usize,
    shape: Attention,
}

/// The stream before, and what is added to it.
type Parts<'a, T> = (&'a Buffer<f32>, &'a Buffer<T>);

impl<'a> Pass<'a> {
    pub(super) fn new(model: &'a Gpt) -> Pass<'a> {
        let [inputs, targets] = [(); 2].map(|()| Labels::new(model.size.vocabulary));
        let (sequences, time, occurrences, in_f32, in_bf16, chunks) = Default::default();
        Pass { model, inputs, targets, sequences, time, occurrences, in_f32, in_bf16, chunks }
    }
}

impl elastic_cuda::Pass<Tokens> for Pass<'_> {
    fn prepare(&mut self, batch: &Tokens) {
        self.occurrences.sort(&batch.inputs);
    }

    fn load(&mut self, gpu: &Gpu, batch: &Tokens) -> Result<u64, CudaError> {
        self.model.check_batch(batch);
        (self.sequences, self.time) = (batch.sequences(), batch.time);
        self.inputs.upload(gpu, &batch.inputs)?;
        self.targets.upload(gpu, &batch.targets)?;
        self.occurrences.upload(gpu, &batch.inputs)?;
        Ok((self.sequences as u64) << 32 | self.time as u64)
    }

    fn gradient(
        &mut self,
        gpu: &Gpu,
        parameters: &CudaSlice<f32>,
        gradient: &mut CudaSlice<f32>,
        done: &mut Done<'_>,
    ) -> Result<(), CudaError> {
        let &mut Pass { model, ref inputs, ref targets, sequences, time, .. } = self;
        let Pass { occurrences, in_f32, in_bf16, chunks, .. } = self;
        let (size, places) = (model.size, &model.places);
        let shape = Attention { sequences, time, heads: size.heads, columns: size.width / size.heads };
        let (inputs, targets) = (inputs.all(), targets.all());
        let (on, labels, into) = ((gpu, parameters), (&inputs, &targets), (&mut *gradient, done));
        let stream = match gpu.keeps_bf16() {
            true => in_bf16.gradient(model, on, shape, labels, into, chunks)?,
            false => in_f32.gradient(model, on, shape, labels, into, chunks)?,
        };
        let mut tokens = gradient.slice_mut(places.tokens.clone());
        gpu.embed_slope(&inputs, occurrences, &stream, &mut tokens)?;
        // A position's rows are as far apart as the rows of sequences taken as one row each.
        let (used, all) = (places.positions.start + time * size.width, places.positions.end);
        gpu.sum_rows(&mut gradient.slice_mut(places.positions.start..used), &stream)?;
        if used < all {
            gpu.clear(&mut gradient.slice_mut(used..all))?;
        }
        Ok(())
    }
}

impl<T: Numbers> Memory<T> {
    /// As [`Pass::gradient`](elastic_cuda::Pass::gradient), without the part of the embeddings that comes from below.
    /// That is made from the derivative by their outputs, which it returns.
    fn gradient(
        &mut self,
        model: &Gpt,
        (gpu, parameters): (&Gpu, &CudaSlice<f32>),
        shape: Attention,
        (inputs, targets): (&Labelled<'_>, &Labelled<'_>),
        (gradient, done): (&mut CudaSlice<f32>, &mut Done<'_>),
        chunks: &mut Chunks,
    ) -> Result<CudaView<'_, f32>, CudaError> {
        let Memory { weights, layers, last, normed, stats, added, slopes } = self;
        let (places, width, vocabulary) = (&model.places, model.size.width, model.size.vocabulary);
        // The tokens' weights come first, so the zeros lie between them and all others.
        debug_assert_eq!(places.tokens, 0..vocabulary * width);
        let gap = (vocabulary.next_multiple_of(T::TOKENS) - vocabulary) * width;
        let all = parameters.slice(..places.norm.bias.end);
        let weights = T::weights(gpu, all, (places.tokens.end, gap), weights)?;
        let here = Here { gpu, parameters, weights, gap, places, rows: shape.sequences * shape.time, width, shape };

        layers.resize_with(places.blocks.len(), Layer::default);
        here.forward(inputs, (&mut *layers, last, added))?;
        let made = layers.last().map(|layer| (&layer.between, &*added));
        here.norm(&places.norm, (last, made), normed, stats)?;
        slopes.head(&here, normed, targets, gradient)?;
        slopes.norm_back(&here, &places.norm, (last, stats), gradient, chunks)?;
        done(gradient.slice_mut(places.norm.weight.start..))?;
        for (block, layer) in places.blocks.iter().zip(&*layers).rev() {
            slopes.back(&here, (block, layer), (&mut *gradient, &mut *done), chunks)?;
        }
        Ok(slopes.stream.view())
    }
}

impl<T: Numbers> Here<'_, T> {
    fn bias(&self, linear: &Affine) -> CudaView<'_, T> {
        self.weights.slice(linear.bias.start + self.gap..linear.bias.end + self.gap)
    }

    /// A linear layer's weight: a row for each output.
    fn weight(&self, linear: &Affine) -> Matrix<'_, T> {
        let (outputs, place) = (linear.bias.len(), linear.weight.start + self.gap..linear.weight.end + self.gap);
        Matrix::new(self.weights.slice(place), outputs, linear.weight.len() / outputs)
    }

    /// Rows of the batch.
    fn matrix<'b>(&self, room: &'b Buffer<T>) -> Matrix<'b, T> {
        let view = room.view();
        let columns = view.len() / self.rows;
        Matrix::new(view, self.rows, columns)
    }

    fn linear(&self, linear: &Affine, inputs: &Buffer<T>, out: &mut Buffer<T>) -> Result<(), CudaError> {
        let mut out = out.fit(self.gpu, self.rows * linear.bias.len())?;
        let (inputs, weight) = (self.matrix(inputs), self.weight(linear).transposed());
        T::product(self.gpu, &mut out, &inputs, &weight, Epilogue::Bias(self.bias(linear)))
    }

    /// The derivative by a linear layer's inputs.
    fn back(&self, linear: &Affine, slope: &Buffer<T>, slope_in: &mut Buffer<T>) -> Result<(), CudaError> {
        let weight = self.weight(linear);
        let mut out = slope_in.fit(self.gpu, self.rows * weight.columns())?;
        T::product(self.gpu, &mut out, &self.matrix(slope), &weight, Epilogue::Plain)
    }

    /// The derivatives by a linear layer's weight and bias.
    fn derive(
        &self,
        linear: &Affine,
        (inputs, slope): (&Buffer<T>, &Buffer<T>),
        gradient: &mut CudaSlice<f32>,
        chunks: &mut Chunks,
    ) -> Result<(), CudaError> {
        let mut weight = gradient.slice_mut(linear.weight.clone());
        let (inputs, by_output) = (self.matrix(inputs), self.matrix(slope).transposed());
        T::product_to_f32(self.gpu, &mut weight, &by_output, &inputs, None)?;
        self.gpu.sum_many_rows(&mut gradient.slice_mut(linear.bias.clone()), &slope.view(), chunks)
    }

    /// Makes the stream of its parts, if it is not there yet, and normalises it.
    fn norm(
        &self,
        norm: &Affine,
        (stream, made): (&mut Buffer<f32>, Option<Parts<'_, T>>),
        out: &mut Buffer<T>,
        stats: &mut Buffer<f32>,
    ) -> Result<(), CudaError> {
        let &Here { gpu, parameters, rows, width, .. } = self;
        let [weight, bias] = [&norm.weight, &norm.bias].map(|place| parameters.slice(place.clone()));
        let more = made.map(|(to, numbers)| More { numbers: numbers.view(), to: Some(to.view()) });
        let stream = Residual { rows: stream.fit(gpu, rows * width)?, more };
        gpu.layer_norm(&Norm { weight, bias }, stream, &mut out.fit(gpu, rows * width)?, &mut stats.fit(gpu, 2 * rows)?)
    }

    fn forward(
        &self,
        inputs: &Labelled<'_>,
        (layers, last, added): (&mut [Layer<T>], &mut Buffer<f32>, &mut Buffer<T>),
    ) -> Result<(), CudaError> {
        let &Here { gpu, parameters, places, rows, width, shape, .. } = self;
        let first = layers.first_mut().map_or(last, |layer| &mut layer.before);
        let (tokens, positions) = (parameters.slice(places.tokens.clone()), parameters.slice(places.positions.clone()));
        gpu.embed((&tokens, &positions), inputs, shape.time, &mut first.fit(gpu, rows * width)?)?;
        for (number, block) in places.blocks.iter().enumerate() {
            let (past, layer) = layers.split_at_mut(number);
            let Layer { before, between, stats_1, normed_1, triples, logs, attended, stats_2, normed_2, up, active } =
                &mut layer[0];
            let made = past.last().map(|layer| (&layer.between, &*added));
            self.norm(&block.norm_1, (before, made), normed_1, stats_1)?;
            self.linear(&block.attention, normed_1, triples)?;
            let (mut seen, mut logs) = (attended.fit(gpu, shape.outputs())?, logs.fit(gpu, shape.logs())?);
            T::attention(gpu, shape, &triples.view(), &mut seen, &mut logs)?;
            self.linear(&block.attention_out, attended, added)?;

            self.norm(&block.norm_2, (between, Some((before, added))), normed_2, stats_2)?;
            let count = rows * block.up.bias.len();
            let gelu = Epilogue::Gelu { bias: self.bias(&block.up), inputs: up.fit(gpu, count)? };
            let (rows, weight) = (self.matrix(normed_2), self.weight(&block.up).transposed());
            T::product(gpu, &mut active.fit(gpu, count)?, &rows, &weight, gelu)?;
            // The next norm adds it to the stream.
            self.linear(&block.down, active, added)?;
        }
        Ok(())
    }
}

impl<T: Numbers> Slopes<T> {
    /// Writes the summed loss after the gradient, and the derivatives by the last norm's outputs and by the tokens'
    /// weights. Of the latter it is the part that comes from the scores.
    fn head(
        &mut self,
        here: &Here<'_, T>,
        normed: &Buffer<T>,
        targets: &Labelled<'_>,
        gradient: &mut CudaSlice<f32>,
    ) -> Result<(), CudaError> {
        let &Here { gpu, places, rows, width, gap, .. } = here;
        let Slopes { scores, losses, tokens: padded_tokens, part, single, .. } = self;
        let padded = (places.tokens.len() + gap) / width;
        let weight = || Matrix::new(here.weights.slice(..padded * width), padded, width);
        let (mut slope, mut losses) = (single.fit(gpu, rows * width)?, losses.fit(gpu, rows)?);
        let mut tokens = match gap {
            0 => gradient.slice_mut(places.tokens.clone()),
            _ => padded_tokens.fit(gpu, padded * width)?,
        };
        for first in (0..rows).step_by(SCORED_ROWS) {
            let some = first..(first + SCORED_ROWS).min(rows);
            let numbers = some.start * width..some.end * width;
            let inputs = || Matrix::new(normed.view().slice(numbers.clone()), some.len(), width);
            let mut made = scores.fit(gpu, some.len() * padded)?;
            T::product(gpu, &mut made, &inputs(), &weight().transposed(), Epilogue::Plain)?;
            gpu.cross_entropy(&mut made, &targets.part(some.clone()), &mut losses.slice_mut(some.clone()))?;

            let scores = || Matrix::new(scores.view(), some.len(), padded);
            T::product(gpu, &mut slope.slice_mut(numbers.clone()), &scores(), &weight(), Epilogue::Plain)?;
            let room = (first > 0).then_some(&mut *part);
            T::product_to_f32(gpu, &mut tokens, &scores().transposed(), &inputs(), room)?;
        }
        if gap > 0 {
            let tokens = padded_tokens.view();
            gpu.copy(&tokens.slice(places.tokens.clone()), &mut gradient.slice_mut(places.tokens.clone()))?;
        }
        let count = gradient.len();
        gpu.sum_all(&mut gradient.slice_mut(count - 1..), &losses.as_view())
    }

    /// A block's backward pass, from `stream` to `stream`.
    fn back(
        &mut self,
        here: &Here<'_, T>,
        (block, layer): (&Block, &Layer<T>),
        (gradient, done): (&mut CudaSlice<f32>, &mut Done<'_>),
        chunks: &mut Chunks,
    ) -> Result<(), CudaError> {
        let &Here { gpu, rows, shape, .. } = here;
        let Block { norm_1, attention, attention_out, norm_2, up, down } = block;
        let stream = T::of_stream(&self.stream, &self.rounded);
        here.derive(down, (&layer.active, stream), gradient, chunks)?;
        let mut four = self.four.fit(gpu, rows * up.bias.len())?;
        T::product(gpu, &mut four, &here.matrix(stream), &here.weight(down), Epilogue::GeluSlope(layer.up.view()))?;
        here.derive(up, (&layer.normed_2, &self.four), gradient, chunks)?;
        here.back(up, &self.four, &mut self.single)?;
        self.norm_back(here, norm_2, (&layer.between, &layer.stats_2), gradient, chunks)?;
        done(gradient.slice_mut(norm_2.weight.start..))?;

        let stream = T::of_stream(&self.stream, &self.rounded);
        here.derive(attention_out, (&layer.attended, stream), gradient, chunks)?;
        here.back(attention_out, stream, &mut self.single)?;
        let attended =
            Attended { triples: layer.triples.view(), outputs: layer.attended.view(), logs: layer.logs.view() };
        let (mut means, mut triple) = (self.means.fit(gpu, shape.logs())?, self.triple.fit(gpu, 3 * shape.outputs())?);
        T::attention_slope(gpu, shape, &attended, &self.single.view(), &mut means, &mut triple)?;
        here.derive(attention, (&layer.normed_1, &self.triple), gradient, chunks)?;
        here.back(attention, &self.triple, &mut self.single)?;
        self.norm_back(here, norm_1, (&layer.before, &layer.stats_1), gradient, chunks)?;
        done(gradient.slice_mut(norm_1.weight.start..))
    }

    /// The backward pass of a norm, from `single` into `stream`. The last norm's replaces what is there, the others'
    /// are added to it.
    fn norm_back(
        &mut self,
        here: &Here<'_, T>,
        norm: &Affine,
        (stream, stats): (&Buffer<f32>, &Buffer<f32>),
        gradient: &mut CudaSlice<f32>,
        chunks: &mut Chunks,
    ) -> Result<(), CudaError> {
        let &Here { gpu, parameters, places, rows, width, .. } = here;
        let (weight, made) = (parameters.slice(norm.weight.clone()), (&stream.view(), &stats.view()));
        let slope_in = SlopeIn { rows: self.stream.fit(gpu, rows * width)?, adds: *norm != places.norm };
        let mut rounded = T::ROUNDS.then(|| self.rounded.fit(gpu, rows * width)).transpose()?;
        gpu.layer_norm_slope(&weight, made, &self.single.view(), slope_in, rounded.as_mut())?;
        let mut pair = gradient.slice_mut(norm.weight.start..norm.bias.end);
        let (mut weight, mut bias) = pair.split_at_mut(norm.weight.len());
        gpu.layer_norm_parameters(made, &self.single.view(), (&mut weight, &mut bias), chunks)
    }
}
