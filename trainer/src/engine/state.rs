//! All that training changes: parameters, the optimizer's two numbers for each, and the steps done.

use super::thread_pool::ThreadPool;
use crate::checkpoint::manifest::{Entry, name_at};
use crate::model::{AdamW, Moved, Tensor};

/// The flat state: parameters, then AdamW's means, then its squares.
#[derive(Debug, Clone, PartialEq)]
pub struct State {
    /// Optimizer steps done.
    pub step: u64,
    /// The numbers.
    pub flat: Vec<f32>,
}

impl State {
    /// Room for a state that is yet to come.
    pub fn room(parameters: usize) -> State {
        State { step: 0, flat: vec![0.0; 3 * parameters] }
    }

    /// The state before the first step, from first parameters.
    pub fn new(mut parameters: Vec<f32>) -> State {
        parameters.resize(3 * parameters.len(), 0.0);
        State { step: 0, flat: parameters }
    }

    /// The parameters.
    pub fn parameters(&self) -> &[f32] {
        &self.flat[..self.flat.len() / 3]
    }

    /// CRC-32C of the parameters: equal for equal bits.
    pub fn checksum(&self) -> u32 {
        crc32c::crc32c(bytemuck::cast_slice(self.parameters()))
    }

    /// Does one step along `scale * gradient`, all of the pool sharing the work.
    pub fn advance(&mut self, pool: &mut ThreadPool, rule: &AdamW, tensors: &[Tensor], gradient: &[f32], scale: f32) {
        self.step += 1;
        let count = self.flat.len() / 3;
        let (parameters, rest) = self.flat.split_at_mut(count);
        let (mean, square) = rest.split_at_mut(count);
        let piece = pool.piece(count);
        let numbers = parameters.chunks_mut(piece).zip(mean.chunks_mut(piece));
        let others = square.chunks_mut(piece).zip(gradient.chunks(piece));
        let pieces = numbers.zip(others).zip((0..).step_by(piece));
        let moved =
            |(((parameters, mean), (square, gradient)), first)| Moved { first, parameters, mean, square, gradient };
        pool.each(pieces.map(moved).collect(), |moved| rule.step(self.step, tensors, moved, scale));
    }

    /// The tensor that a number of the flat state belongs to.
    pub(crate) fn name_at(tensors: &[Tensor], number: usize) -> String {
        name_at(&State::entries(tensors), number)
    }

    /// Names for the pieces of the flat state.
    pub fn entries(tensors: &[Tensor]) -> Vec<Entry> {
        let parameters = tensors.last().map_or(0, |tensor| tensor.range.end);
        let section = |number: usize, prefix: &'static str| {
            tensors.iter().map(move |tensor| Entry {
                name: format!("{prefix}{}", tensor.name),
                dtype: "F32".to_owned(),
                shape: tensor.shape.clone(),
                offset: ((number * parameters + tensor.range.start) * size_of::<f32>()) as u64,
                len: (tensor.range.len() * size_of::<f32>()) as u64,
            })
        };
        [(0, ""), (1, "adamw.mean."), (2, "adamw.square.")]
            .into_iter()
            .flat_map(|(n, prefix)| section(n, prefix))
            .collect()
    }
}
