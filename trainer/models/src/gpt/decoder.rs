//! One token after the other, for generation: the keys and values of the tokens before are kept.

use std::ops::Range;

use elastic_trainer::Model;

use super::{Gpt, Size};
use crate::matmul::{Matrix, multiply};
use crate::pointwise::{gelu, layer_norm};
use elastic_trainer::vectors::add;

/// A network, and a sequence that it has read.
#[derive(Debug)]
pub struct Decoder<'a> {
    gpt: &'a Gpt,
    parameters: &'a [f32],
    length: usize,
    /// A row for each token, in each block.
    past: Vec<Past>,
    scores: Vec<f32>,
}

#[derive(Debug, Clone, Default)]
struct Past {
    keys: Vec<f32>,
    values: Vec<f32>,
}

impl<'a> Decoder<'a> {
    /// It has read nothing yet.
    ///
    /// # Panics
    /// When these are not the network's parameters.
    pub fn new(gpt: &'a Gpt, parameters: &'a [f32]) -> Decoder<'a> {
        assert_eq!(parameters.len(), gpt.parameters(), "parameters");
        let Size { vocabulary, layers, .. } = gpt.size;
        Decoder { gpt, parameters, length: 0, past: vec![Past::default(); layers], scores: vec![0.0; vocabulary] }
    }

    /// Tokens that it has read.
    pub fn length(&self) -> usize {
        self.length
    }

    /// Reads a token, and returns the logits of the next one: a number for each token of the vocabulary.
    ///
    /// # Panics
    /// When the context is full, or the token is not in the vocabulary.
    pub fn push(&mut self, token: u32) -> &[f32] {
        let Decoder { gpt, parameters, length, past, scores } = self;
        let Size { vocabulary, context, width, .. } = gpt.size;
        assert!(*length < context && (token as usize) < vocabulary, "token {token} after {length} of {context}");
        let row = |place: &Range<usize>, number: usize| &parameters[place.start + number * width..][..width];
        let mut stream = row(&gpt.places.tokens, token as usize).to_vec();
        add(&mut stream, row(&gpt.places.positions, *length));
        let [mut normed, mut attended, mut out] = [(); 3].map(|()| vec![0.0; width]);
        let (mut triple, mut stats) = (vec![0.0; 3 * width], [[0.0; 2]]);
        let [mut up, mut active] = [(); 2].map(|()| vec![0.0; 4 * width]);
        for (block, past) in gpt.places.blocks.iter().zip(past) {
            let (weight, bias) = block.norm_1.of(parameters);
            layer_norm(&stream, weight, bias, &mut normed, &mut stats);
            block.attention.forward(parameters, &normed, &mut triple, 1);
            past.keys.extend(&triple[width..2 * width]);
            past.values.extend(&triple[2 * width..]);
            past.attend(&triple[..width], gpt.size.heads, &mut attended);
            block.attention_out.forward(parameters, &attended, &mut out, 1);
            add(&mut stream, &out);

            let (weight, bias) = block.norm_2.of(parameters);
            layer_norm(&stream, weight, bias, &mut normed, &mut stats);
            block.up.forward(parameters, &normed, &mut up, 1);
            gelu(&up, &mut active);
            block.down.forward(parameters, &active, &mut out, 1);
            add(&mut stream, &out);
        }
        let (weight, bias) = gpt.places.norm.of(parameters);
        layer_norm(&stream, weight, bias, &mut normed, &mut stats);
        let tokens = Matrix::new(&parameters[gpt.places.tokens.clone()], vocabulary, width);
        multiply(scores, Matrix::new(&normed, 1, width), tokens.transposed());
        *length += 1;
        scores
    }
}

impl Past {
    /// Writes what the last token's query finds.
    fn attend(&self, query: &[f32], heads: usize, into: &mut [f32]) {
        let width = query.len();
        let scale = 1.0 / ((width / heads) as f32).sqrt();
        into.fill(0.0);
        for head in 0..heads {
            let columns = head * (width / heads)..(head + 1) * (width / heads);
            let query = &query[columns.clone()];
            let score = |key: &[f32]| key[columns.clone()].iter().zip(query).map(|(k, q)| k * q).sum::<f32>() * scale;
            let mut weights: Vec<f32> = self.keys.chunks_exact(width).map(score).collect();
            let largest = weights.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            weights.iter_mut().for_each(|weight| *weight = (*weight - largest).exp());
            let total: f32 = weights.iter().sum();
            for (weight, value) in weights.iter().zip(self.values.chunks_exact(width)) {
                let into = into[columns.clone()].iter_mut().zip(&value[columns.clone()]);
                into.for_each(|(into, value)| *into += weight / total * value);
            }
        }
    }
}
