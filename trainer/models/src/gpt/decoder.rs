//! One token after the other, for generation: the keys and values of the tokens before are kept.

use elastic_trainer::Model;

use super::{Gpt, Size, Workspace};

/// A network, and a sequence that it has read.
#[derive(Debug)]
pub struct Decoder<'a> {
    gpt: &'a Gpt,
    parameters: &'a [f32],
    length: usize,
    /// A row for each token, in each block.
    past: Vec<Past>,
    /// For one token.
    room: Workspace,
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
        let mut room = Workspace::default();
        room.make_room(gpt, 1);
        Decoder { gpt, parameters, length: 0, past: vec![Past::default(); gpt.size.layers], room }
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
        let Decoder { gpt, parameters, length, past, room } = self;
        let Size { vocabulary, context, heads, .. } = gpt.size;
        assert!(*length < context && (token as usize) < vocabulary, "token {token} after {length} of {context}");
        gpt.forward(
            parameters,
            &[token],
            |_| *length,
            room,
            |block, layer, _| {
                past[block].attend(&layer.triples, heads, &mut layer.attended);
            },
        );
        gpt.logits(parameters, &room.normed, &mut room.scores);
        *length += 1;
        &room.scores
    }
}

impl Past {
    /// Takes in the last token's key and value, and writes what its query finds.
    fn attend(&mut self, triple: &[f32], heads: usize, into: &mut [f32]) {
        let width = into.len();
        let (query, [key, value]) = (&triple[..width], [1, 2].map(|part| &triple[part * width..][..width]));
        self.keys.extend(key);
        self.values.extend(value);
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
