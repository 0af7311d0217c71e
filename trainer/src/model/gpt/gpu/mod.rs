//! The GPT's pass on a GPU: the steps of `pass`, by kernels. This one is in f32; [`bf16`] has the one with `--precision
//! bf16`.
//!
//! What the backward pass needs stays on the GPU, in f32, in memory that is kept from call to call: for each token and
//! block sixteen times the width, a number for each head and four more; for each token eleven times the width, once;
//! and the scores of the whole vocabulary for [`SCORED_ROWS`] tokens at most. Nothing is kept for pairs of tokens.
//! GPT-2 with its context of 1024 takes 640 MB for a sample, and 410 MB for the scores.

mod bf16;

use elastic_cuda::{
    After, Attended, Attention, Buffer, Chunks, CudaError, CudaSlice, Done, Gpu, Labelled, Labels, Matrix, More, Norm,
    Occurrences, Residual, SlopeIn,
};

use super::{Affine, Block, Gpt, Places, Tokens};

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
    kept: Kept,
    slopes: Slopes,
    in_bf16: bf16::Memory,
    chunks: Chunks,
}

/// What the backward pass needs.
#[derive(Default)]
struct Kept {
    layers: Vec<Layer>,
    /// The residual stream behind the last block, its norm, and the norm's means and scales.
    last: Buffer<f32>,
    normed: Buffer<f32>,
    stats: Buffer<f32>,
}

/// What a block's backward pass needs.
#[derive(Default)]
struct Layer {
    /// The residual stream before the block, and between its halves.
    before: Buffer<f32>,
    between: Buffer<f32>,
    stats_1: Buffer<f32>,
    normed_1: Buffer<f32>,
    triples: Buffer<f32>,
    logs: Buffer<f32>,
    attended: Buffer<f32>,
    stats_2: Buffer<f32>,
    normed_2: Buffer<f32>,
    up: Buffer<f32>,
    active: Buffer<f32>,
}

/// Derivatives in rows of one, three and four widths, and what they are computed from.
#[derive(Default)]
struct Slopes {
    scores: Buffer<f32>,
    losses: Buffer<f32>,
    /// The derivative by the tokens' weights, from a part of the scores.
    part: Buffer<f32>,
    stream: Buffer<f32>,
    single: Buffer<f32>,
    triple: Buffer<f32>,
    four: Buffer<f32>,
    /// Attention's own.
    means: Buffer<f32>,
}

/// What all parts of a pass share.
struct Here<'a> {
    gpu: &'a Gpu,
    parameters: &'a CudaSlice<f32>,
    places: &'a Places,
    /// Of the batch.
    rows: usize,
    width: usize,
    shape: Attention,
}

impl<'a> Pass<'a> {
    pub(super) fn new(model: &'a Gpt) -> Pass<'a> {
        let layers = model.places.blocks.iter().map(|_| Layer::default()).collect();
        let kept = Kept { layers, ..Kept::default() };
        let [inputs, targets] = [(); 2].map(|()| Labels::new(model.size.vocabulary));
        let (sequences, time, occurrences, slopes, chunks) = Default::default();
        let in_bf16 = bf16::Memory::new(model);
        Pass { model, inputs, targets, sequences, time, occurrences, kept, slopes, in_bf16, chunks }
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
        let Pass { occurrences, kept, slopes, in_bf16, chunks, .. } = self;
        let (size, places) = (model.size, &model.places);
        let (heads, columns) = (size.heads, size.width / size.heads);
        let shape = Attention { sequences, time, heads, columns };
        let here = Here { gpu, parameters, places, rows: sequences * time, width: size.width, shape };
        let (inputs, targets) = (inputs.all(), targets.all());

        let stream = if gpu.keeps_bf16() {
            in_bf16.gradient(&here, (&inputs, &targets), (&mut *gradient, done), chunks)?
        } else {
            kept.forward(&here, &inputs)?;
            slopes.head(&here, &kept.normed, (&targets, size.vocabulary), gradient)?;
            slopes.backward(&here, kept, (&mut *gradient, done), chunks)?;
            slopes.stream.view()
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

impl Here<'_> {
    /// A linear layer's weight: a row for each output.
    fn weight(&self, linear: &Affine) -> Matrix<'_> {
        let outputs = linear.bias.len();
        Matrix::new(self.parameters.slice(linear.weight.clone()), outputs, linear.weight.len() / outputs)
    }

    /// Rows of the batch.
    fn matrix<'b>(&self, room: &'b Buffer<f32>) -> Matrix<'b> {
        let view = room.view();
        let columns = view.len() / self.rows;
        Matrix::new(view, self.rows, columns)
    }

    fn linear(&self, linear: &Affine, inputs: &Buffer<f32>, out: &mut Buffer<f32>) -> Result<(), CudaError> {
        let bias = After::Bias(self.parameters.slice(linear.bias.clone()));
        let mut out = out.fit(self.gpu, self.rows * linear.bias.len())?;
        self.gpu.product(&mut out, &self.matrix(inputs), &self.weight(linear).transposed(), &bias)
    }

    /// The derivative by a linear layer's inputs.
    fn back(&self, linear: &Affine, slope: &Buffer<f32>, slope_in: &mut Buffer<f32>) -> Result<(), CudaError> {
        let inputs = linear.weight.len() / linear.bias.len();
        let mut out = slope_in.fit(self.gpu, self.rows * inputs)?;
        self.gpu.product(&mut out, &self.matrix(slope), &self.weight(linear), &After::Plain)
    }

    /// The derivatives by a linear layer's weight and bias.
    fn parameters(
        &self,
        linear: &Affine,
        (inputs, slope): (&Buffer<f32>, &Buffer<f32>),
        gradient: &mut CudaSlice<f32>,
        chunks: &mut Chunks,
    ) -> Result<(), CudaError> {
        let mut weight = gradient.slice_mut(linear.weight.clone());
        self.gpu.product(&mut weight, &self.matrix(slope).transposed(), &self.matrix(inputs), &After::Plain)?;
        self.gpu.sum_many_rows(&mut gradient.slice_mut(linear.bias.clone()), &slope.view(), chunks)
    }

    /// A norm's parameters.
    fn norms(&self, norm: &Affine) -> Norm<'_> {
        let [weight, bias] = [&norm.weight, &norm.bias].map(|place| self.parameters.slice(place.clone()));
        Norm { weight, bias }
    }

    /// Adds `more` to the stream, and normalises the sum.
    fn norm(
        &self,
        norm: &Affine,
        (stream, more): (&mut Buffer<f32>, Option<&Buffer<f32>>),
        out: &mut Buffer<f32>,
        stats: &mut Buffer<f32>,
    ) -> Result<(), CudaError> {
        let more = more.map(|more| More { numbers: more.view(), to: None });
        let stream = Residual { rows: stream.view_mut(), more };
        let mut stats = stats.fit(self.gpu, 2 * self.rows)?;
        self.gpu.layer_norm(&self.norms(norm), stream, &mut out.fit(self.gpu, self.rows * self.width)?, &mut stats)
    }

    /// The backward pass of a norm, from `slopes.single` into `slopes.stream`. The last norm's replaces what is there,
    /// the others' are added to it.
    fn norm_back(
        &self,
        norm: &Affine,
        (stream, stats): (&Buffer<f32>, &Buffer<f32>),
        slopes: &mut Slopes,
        gradient: &mut CudaSlice<f32>,
        chunks: &mut Chunks,
    ) -> Result<(), CudaError> {
        let Slopes { stream: slope_in, single: slope_out, .. } = slopes;
        let (weight, made) = (self.parameters.slice(norm.weight.clone()), (&stream.view(), &stats.view()));
        let last = *norm == self.places.norm;
        let rows = slope_in.fit(self.gpu, self.rows * self.width)?;
        self.gpu.layer_norm_slope(&weight, made, &slope_out.view(), SlopeIn { rows, adds: !last })?;
        let mut pair = gradient.slice_mut(norm.weight.start..norm.bias.end);
        let (mut weight, mut bias) = pair.split_at_mut(norm.weight.len());
        self.gpu.layer_norm_parameters(made, &slope_out.view(), (&mut weight, &mut bias), chunks)
    }
}

impl Kept {
    fn forward(&mut self, here: &Here<'_>, inputs: &Labelled<'_>) -> Result<(), CudaError> {
        let &Here { gpu, parameters, places, rows, width, shape } = here;
        let Kept { layers, last, normed, stats } = self;
        let first = layers.first_mut().map_or(&mut *last, |layer| &mut layer.before);
        let (tokens, positions) = (parameters.slice(places.tokens.clone()), parameters.slice(places.positions.clone()));
        gpu.embed((&tokens, &positions), inputs, shape.time, &mut first.fit(gpu, rows * width)?)?;
        for (number, block) in places.blocks.iter().enumerate() {
            let (done, next) = layers.split_at_mut(number + 1);
            let after = next.first_mut().map_or(&mut *last, |layer| &mut layer.before);
            let (past, layer) = done.split_at_mut(number);
            let Layer { before, between, stats_1, normed_1, triples, logs, attended, stats_2, normed_2, up, active } =
                &mut layer[0];
            let more = past.last().map(|layer| &layer.between);
            here.norm(&block.norm_1, (before, more), normed_1, stats_1)?;
            here.linear(&block.attention, normed_1, triples)?;
            let (mut seen, mut logs) = (attended.fit(gpu, shape.outputs())?, logs.fit(gpu, shape.logs())?);
            gpu.attention(shape, &triples.view(), &mut seen, &mut logs)?;
            here.linear(&block.attention_out, attended, between)?;

            here.norm(&block.norm_2, (between, Some(before)), normed_2, stats_2)?;
            here.linear(&block.up, normed_2, up)?;
            gpu.gelu(&up.view(), &mut active.fit(gpu, up.view().len())?)?;
            // The next norm adds the stream's other part.
            here.linear(&block.down, active, after)?;
        }
        let more = layers.last().map(|layer| &layer.between);
        here.norm(&places.norm, (last, more), normed, stats)
    }
}

impl Slopes {
    /// Writes the summed loss after the gradient, and the derivatives by the last norm's outputs and by the tokens'
    /// weights. Of the latter it is the part that comes from the scores.
    fn head(
        &mut self,
        here: &Here<'_>,
        normed: &Buffer<f32>,
        (targets, vocabulary): (&Labelled<'_>, usize),
        gradient: &mut CudaSlice<f32>,
    ) -> Result<(), CudaError> {
        let &Here { gpu, parameters, places, rows, width, .. } = here;
        let Slopes { scores, losses, part, single, .. } = self;
        let weight = || Matrix::new(parameters.slice(places.tokens.clone()), vocabulary, width);
        let (mut slope, mut losses) = (single.fit(gpu, rows * width)?, losses.fit(gpu, rows)?);
        for first in (0..rows).step_by(SCORED_ROWS) {
            let some = first..(first + SCORED_ROWS).min(rows);
            let numbers = some.start * width..some.end * width;
            let inputs = || Matrix::new(normed.view().slice(numbers.clone()), some.len(), width);
            let mut made = scores.fit(gpu, some.len() * vocabulary)?;
            gpu.product(&mut made, &inputs(), &weight().transposed(), &After::Plain)?;
            gpu.cross_entropy(&mut made, &targets.part(some.clone()), &mut losses.slice_mut(some.clone()))?;

            let scores = || Matrix::new(scores.view(), some.len(), vocabulary);
            gpu.product(&mut slope.slice_mut(numbers.clone()), &scores(), &weight(), &After::Plain)?;
            let mut tokens = gradient.slice_mut(places.tokens.clone());
            if first == 0 {
                gpu.product(&mut tokens, &scores().transposed(), &inputs(), &After::Plain)?;
            } else {
                let mut part = part.fit(gpu, vocabulary * width)?;
                gpu.product(&mut part, &scores().transposed(), &inputs(), &After::Plain)?;
                gpu.add_part(&mut tokens, &part.as_view())?;
            }
        }
        let count = gradient.len();
        gpu.sum_all(&mut gradient.slice_mut(count - 1..), &losses.as_view())
    }

    /// Writes the derivatives by all parameters but the embeddings, and the derivative by the embeddings' outputs into
    /// `stream`.
    fn backward(
        &mut self,
        here: &Here<'_>,
        kept: &Kept,
        (gradient, done): (&mut CudaSlice<f32>, &mut Done<'_>),
        chunks: &mut Chunks,
    ) -> Result<(), CudaError> {
        let &Here { gpu, places, shape, .. } = here;
        here.norm_back(&places.norm, (&kept.last, &kept.stats), self, gradient, chunks)?;
        done(gradient.slice_mut(places.norm.weight.start..))?;
        for (block, layer) in places.blocks.iter().zip(&kept.layers).rev() {
            let Block { norm_1, attention, attention_out, norm_2, up, down } = block;
            here.parameters(down, (&layer.active, &self.stream), gradient, chunks)?;
            here.back(down, &self.stream, &mut self.four)?;
            gpu.gelu_slope(&layer.up.view(), &mut self.four.view_mut())?;
            here.parameters(up, (&layer.normed_2, &self.four), gradient, chunks)?;
            here.back(up, &self.four, &mut self.single)?;
            here.norm_back(norm_2, (&layer.between, &layer.stats_2), self, gradient, chunks)?;
            done(gradient.slice_mut(norm_2.weight.start..))?;

            here.parameters(attention_out, (&layer.attended, &self.stream), gradient, chunks)?;
            here.back(attention_out, &self.stream, &mut self.single)?;
            let attended =
                Attended { triples: layer.triples.view(), outputs: layer.attended.view(), logs: layer.logs.view() };
            let (mut means, mut triple) =
                (self.means.fit(gpu, shape.logs())?, self.triple.fit(gpu, 3 * shape.outputs())?);
            gpu.attention_slope(shape, &attended, &self.single.view(), &mut means, &mut triple)?;
            here.parameters(attention, (&layer.normed_1, &self.triple), gradient, chunks)?;
            here.back(attention, &self.triple, &mut self.single)?;
            here.norm_back(norm_1, (&layer.before, &layer.stats_1), self, gradient, chunks)?;
            done(gradient.slice_mut(norm_1.weight.start..))?;
        }
        Ok(())
    }
}
