//! The forward and backward pass of a GPT-2: the forward pass in training, in evaluation and for generation. What the
//! backward pass needs is kept, except two things that would be large: attention's weights are computed again, and the
//! scores of the whole vocabulary are used at once, some rows at a time.

use elastic_trainer::Model;

use super::{Block, Gpt, Size};
use crate::attention::{Attention, Scratch};
use crate::matmul::{Matrix, Target, multiply};
use crate::pointwise::{cross_entropy_slope, gelu, gelu_slope, layer_norm, layer_norm_slope};
use elastic_trainer::vectors::add;

/// Rows whose scores of the whole vocabulary are in memory at once.
const SCORED_ROWS: usize = 256;

/// A batch of sequences.
#[derive(Debug, Clone, Default)]
pub struct Tokens {
    /// Tokens of one sequence.
    pub time: usize,
    /// The sequences, one after the other.
    pub inputs: Vec<u32>,
    /// The token that follows each of them.
    pub targets: Vec<u32>,
}

/// Memory for what a pass computes from a batch, which is kept from step to step.
#[derive(Debug, Default)]
pub struct Workspace {
    layers: Vec<Layer>,
    /// The residual stream behind the last block, its norm, and the norm's means and scales.
    last: Vec<f32>,
    pub(super) normed: Vec<f32>,
    stats: Vec<[f32; 2]>,
    pub(super) scores: Vec<f32>,
    scratch: Scratch,
    slopes: Slopes,
}

/// What a block's backward pass needs.
#[derive(Debug, Default)]
pub(super) struct Layer {
    /// The residual stream before the block, and between its halves.
    before: Vec<f32>,
    between: Vec<f32>,
    stats_1: Vec<[f32; 2]>,
    normed_1: Vec<f32>,
    pub(super) triples: Vec<f32>,
    logs: Vec<f32>,
    pub(super) attended: Vec<f32>,
    stats_2: Vec<[f32; 2]>,
    normed_2: Vec<f32>,
    up: Vec<f32>,
    active: Vec<f32>,
}

/// Derivatives in rows of one, three and four widths.
#[derive(Debug, Default)]
struct Slopes {
    stream: Vec<f32>,
    single: Vec<f32>,
    triple: Vec<f32>,
    four: Vec<f32>,
}

impl Tokens {
    /// A batch of sequences of `time` tokens.
    pub fn new(time: usize, inputs: Vec<u32>, targets: Vec<u32>) -> Tokens {
        Tokens { time, inputs, targets }
    }

    /// Sequences in the batch.
    pub(super) fn sequences(&self) -> usize {
        self.inputs.len() / self.time.max(1)
    }
}

impl Workspace {
    /// For a batch with so many tokens.
    pub(super) fn make_room(&mut self, gpt: &Gpt, rows: usize) {
        let width = gpt.size.width;
        self.layers.resize_with(gpt.size.layers, Layer::default);
        for layer in &mut self.layers {
            for room in
                [&mut layer.before, &mut layer.between, &mut layer.normed_1, &mut layer.attended, &mut layer.normed_2]
            {
                room.resize(rows * width, 0.0);
            }
            layer.triples.resize(rows * 3 * width, 0.0);
            layer.logs.resize(rows * gpt.size.heads, 0.0);
            layer.stats_1.resize(rows, [0.0; 2]);
            layer.stats_2.resize(rows, [0.0; 2]);
            layer.up.resize(rows * 4 * width, 0.0);
            layer.active.resize(rows * 4 * width, 0.0);
        }
        self.last.resize(rows * width, 0.0);
        self.normed.resize(rows * width, 0.0);
        self.stats.resize(rows, [0.0; 2]);
        self.scores.resize(rows.min(SCORED_ROWS) * gpt.size.vocabulary, 0.0);
        self.slopes.stream.resize(rows * width, 0.0);
        self.slopes.single.resize(rows * width, 0.0);
        self.slopes.triple.resize(rows * 3 * width, 0.0);
        self.slopes.four.resize(rows * 4 * width, 0.0);
    }
}

/// About the bytes of a workspace for so many tokens.
pub(super) fn workspace_bytes(gpt: &Gpt, rows: usize) -> u64 {
    let Size { vocabulary, layers, heads, width, .. } = gpt.size;
    // As in `make_room`.
    let of_a_row = layers * (16 * width + heads + 4) + 11 * width + 2;
    ((rows * of_a_row + rows.min(SCORED_ROWS) * vocabulary) * size_of::<f32>()) as u64
}

impl Gpt {
    /// The summed loss of the batch's tokens, and its derivative. `done` gets the part of it that is final, which is
    /// its end. Without tokens the gradient is zero.
    ///
    /// # Panics
    /// When a slice has the wrong length, sequences are longer than the context, or a token is not in the vocabulary.
    pub fn pass(
        &self,
        parameters: &[f32],
        batch: &Tokens,
        workspace: &mut Workspace,
        gradient: &mut [f32],
        done: &mut dyn FnMut(&[f32]),
    ) -> f32 {
        self.check(parameters, batch);
        if batch.inputs.is_empty() {
            gradient.fill(0.0);
            return 0.0;
        }
        // The embeddings' derivatives are added up, so they begin at zero. All others are overwritten.
        gradient[self.places.tokens.clone()].fill(0.0);
        gradient[self.places.positions.clone()].fill(0.0);
        self.forward_batch(parameters, batch, workspace);
        let loss = self.head(parameters, batch, workspace, Some(gradient));
        self.backward(parameters, batch, workspace, gradient, done);
        loss
    }

    /// The summed loss of the batch's tokens.
    ///
    /// # Panics
    /// When a slice has the wrong length, sequences are longer than the context, or a token is not in the vocabulary.
    pub fn loss(&self, parameters: &[f32], batch: &Tokens, workspace: &mut Workspace) -> f32 {
        self.check(parameters, batch);
        if batch.inputs.is_empty() {
            return 0.0;
        }
        self.forward_batch(parameters, batch, workspace);
        self.head(parameters, batch, workspace, None)
    }

    fn check(&self, parameters: &[f32], batch: &Tokens) {
        assert_eq!(parameters.len(), self.parameters(), "parameters");
        self.check_batch(batch);
    }

    pub(super) fn check_batch(&self, batch: &Tokens) {
        assert_eq!(batch.inputs.len(), batch.targets.len(), "a token follows each");
        assert!(batch.time <= self.size.context, "{} tokens in a context of {}", batch.time, self.size.context);
        assert_eq!(batch.inputs.len(), batch.sequences() * batch.time, "whole sequences");
        let known = |&token: &u32| (token as usize) < self.size.vocabulary;
        assert!(batch.inputs.iter().chain(&batch.targets).all(known), "tokens of the vocabulary");
    }

    fn attention(&self, batch: &Tokens) -> Attention {
        let (heads, width) = (self.size.heads, self.size.width);
        Attention { sequences: batch.sequences(), time: batch.time, heads, width }
    }

    fn forward_batch(&self, parameters: &[f32], batch: &Tokens, workspace: &mut Workspace) {
        workspace.make_room(self, batch.inputs.len());
        let attention = self.attention(batch);
        let attend = |_: usize, layer: &mut Layer, scratch: &mut Scratch| {
            attention.forward(&layer.triples, &mut layer.attended, &mut layer.logs, scratch);
        };
        self.forward(parameters, &batch.inputs, |row| row % batch.time, workspace, attend);
    }

    /// Writes the last norm's outputs for some tokens, each at a position of its sequence. `attend` turns a block's
    /// queries, keys and values into what the heads found.
    pub(super) fn forward(
        &self,
        parameters: &[f32],
        inputs: &[u32],
        position: impl Fn(usize) -> usize,
        workspace: &mut Workspace,
        mut attend: impl FnMut(usize, &mut Layer, &mut Scratch),
    ) {
        let width = self.size.width;
        let Workspace { layers, last, normed, stats, scratch, .. } = workspace;
        let rows = inputs.len();
        let first = layers.first_mut().map_or(&mut *last, |layer| &mut layer.before);
        let (tokens, positions) = (&parameters[self.places.tokens.clone()], &parameters[self.places.positions.clone()]);
        for (row, (into, &token)) in first.chunks_exact_mut(width).zip(inputs).enumerate() {
            into.copy_from_slice(&tokens[token as usize * width..][..width]);
            add(into, &positions[position(row) * width..][..width]);
        }
        for (number, block) in self.places.blocks.iter().enumerate() {
            let (done, next) = layers.split_at_mut(number + 1);
            let after = next.first_mut().map_or(&mut *last, |layer| &mut layer.before);
            let layer = &mut done[number];
            let (weight, bias) = block.norm_1.of(parameters);
            layer_norm(&layer.before, weight, bias, &mut layer.normed_1, &mut layer.stats_1);
            block.attention.forward(parameters, &layer.normed_1, &mut layer.triples, rows);
            attend(number, layer, scratch);
            block.attention_out.forward(parameters, &layer.attended, &mut layer.between, rows);
            add(&mut layer.between, &layer.before);

            let (weight, bias) = block.norm_2.of(parameters);
            layer_norm(&layer.between, weight, bias, &mut layer.normed_2, &mut layer.stats_2);
            block.up.forward(parameters, &layer.normed_2, &mut layer.up, rows);
            gelu(&layer.up, &mut layer.active);
            block.down.forward(parameters, &layer.active, after, rows);
            add(after, &layer.between);
        }
        let (weight, bias) = self.places.norm.of(parameters);
        layer_norm(last, weight, bias, normed, stats);
    }

    /// Writes the logits of some of the last norm's outputs: a row for each.
    pub(super) fn logits(&self, parameters: &[f32], normed: &[f32], logits: &mut [f32]) {
        let (vocabulary, width) = (self.size.vocabulary, self.size.width);
        let tokens = Matrix::new(&parameters[self.places.tokens.clone()], vocabulary, width);
        multiply(logits, Matrix::new(normed, normed.len() / width, width), tokens.transposed());
    }

    /// The summed loss. With a gradient, also its derivatives by the last norm's outputs, and by the tokens' weights,
    /// which are added to what is there.
    fn head(
        &self,
        parameters: &[f32],
        batch: &Tokens,
        workspace: &mut Workspace,
        mut gradient: Option<&mut [f32]>,
    ) -> f32 {
        let (vocabulary, width) = (self.size.vocabulary, self.size.width);
        let tokens = Matrix::new(&parameters[self.places.tokens.clone()], vocabulary, width);
        let Workspace { normed, scores, slopes, .. } = workspace;
        let pieces = normed.chunks(SCORED_ROWS * width).zip(slopes.single.chunks_mut(SCORED_ROWS * width));
        let mut loss = 0.0;
        for ((normed, slope), targets) in pieces.zip(batch.targets.chunks(SCORED_ROWS)) {
            let rows = targets.len();
            let scores = &mut scores[..rows * vocabulary];
            self.logits(parameters, normed, scores);
            loss += cross_entropy_slope(scores, targets);
            if let Some(gradient) = gradient.as_deref_mut() {
                let (inputs, scores) = (Matrix::new(normed, rows, width), Matrix::new(scores, rows, vocabulary));
                multiply(slope, scores, tokens);
                Target::spaced(&mut gradient[self.places.tokens.clone()], vocabulary, width, width)
                    .add(scores.transposed(), inputs);
            }
        }
        loss
    }

    fn backward(
        &self,
        parameters: &[f32],
        batch: &Tokens,
        workspace: &mut Workspace,
        gradient: &mut [f32],
        done: &mut dyn FnMut(&[f32]),
    ) {
        let (attention, width) = (self.attention(batch), self.size.width);
        let Tokens { time, inputs, .. } = batch;
        let Workspace { layers, last, stats, scratch, slopes, .. } = workspace;
        let rows = inputs.len();
        let Slopes { stream, single, triple, four } = slopes;
        stream.fill(0.0);
        let norm = &self.places.norm;
        layer_norm_slope(last, norm.of(parameters).0, stats, single, stream, norm.of_mut(gradient));
        done(&gradient[norm.weight.start..]);
        for (block, layer) in self.places.blocks.iter().zip(layers).rev() {
            let Block { norm_1, attention: attention_in, attention_out, norm_2, up, down } = block;
            down.gradient(&layer.active, stream, gradient, rows);
            down.back(parameters, stream, four, rows);
            gelu_slope(&layer.up, four);
            up.gradient(&layer.normed_2, four, gradient, rows);
            up.back(parameters, four, single, rows);
            let into = norm_2.of_mut(gradient);
            layer_norm_slope(&layer.between, norm_2.of(parameters).0, &layer.stats_2, single, stream, into);
            done(&gradient[norm_2.weight.start..]);

            attention_out.gradient(&layer.attended, stream, gradient, rows);
            attention_out.back(parameters, stream, single, rows);
            attention.backward(&layer.triples, (&layer.attended, single), &layer.logs, triple, scratch);
            attention_in.gradient(&layer.normed_1, triple, gradient, rows);
            attention_in.back(parameters, triple, single, rows);
            let into = norm_1.of_mut(gradient);
            layer_norm_slope(&layer.before, norm_1.of(parameters).0, &layer.stats_1, single, stream, into);
            done(&gradient[norm_1.weight.start..]);
        }
        for (row, (slope, &token)) in stream.chunks_exact(width).zip(inputs).enumerate() {
            add(&mut gradient[self.places.tokens.start + token as usize * width..][..width], slope);
            add(&mut gradient[self.places.positions.start + row % *time * width..][..width], slope);
        }
    }
}
