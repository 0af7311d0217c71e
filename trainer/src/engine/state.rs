//! All that training changes: parameters, the numbers that the optimizer keeps for each, and the steps done.

use super::thread_pool::ThreadPool;
use crate::checkpoint::manifest::{Entry, name_at};
use crate::model::{Moved, Optimizer, Stride, Tensor};

/// The flat state: parameters, then what the optimizer keeps, one kind after the other.
#[derive(Debug, Clone, PartialEq)]
pub struct State {
    /// Optimizer steps done.
    pub step: u64,
    /// The numbers.
    pub flat: Vec<f32>,
    /// What the optimizer [keeps](Optimizer::kept).
    kept: &'static [&'static str],
}

impl State {
    /// Room for a state that is yet to come.
    pub fn room(parameters: usize, optimizer: &Optimizer) -> State {
        State::new(vec![0.0; parameters], optimizer)
    }

    /// The state before the first step, from first parameters.
    pub fn new(mut parameters: Vec<f32>, optimizer: &Optimizer) -> State {
        let kept = optimizer.kept();
        parameters.resize((1 + kept.len()) * parameters.len(), 0.0);
        State { step: 0, flat: parameters, kept }
    }

    /// The parameters.
    pub fn parameters(&self) -> &[f32] {
        &self.flat[..self.flat.len() / (1 + self.kept.len())]
    }

    /// CRC-32C of the parameters: equal for equal bits.
    pub fn checksum(&self) -> u32 {
        crc32c::crc32c(bytemuck::cast_slice(self.parameters()))
    }

    /// Does one step along the gradient, all of the pool sharing the work.
    ///
    /// # Panics
    /// When another optimizer made the state.
    pub fn advance(
        &mut self,
        pool: &mut ThreadPool,
        optimizer: &Optimizer,
        stride: &Stride,
        tensors: &[Tensor],
        gradient: &[f32],
    ) {
        self.step += 1;
        let count = self.parameters().len();
        let piece = pool.piece(count);
        let mut sections: Vec<_> = self.flat.chunks_mut(count).map(|section| section.chunks_mut(piece)).collect();
        let moved = gradient.chunks(piece).zip((0..).step_by(piece)).map(|(gradient, first)| {
            let mut sections = sections.iter_mut().filter_map(Iterator::next);
            let parameters = sections.next().unwrap_or_default();
            Moved { first, parameters, kept: sections.collect(), gradient }
        });
        pool.each(moved.collect(), |moved| optimizer.step(stride, tensors, moved));
    }

    /// The tensor that a number of the flat state belongs to.
    pub(crate) fn name_at(&self, tensors: &[Tensor], number: usize) -> String {
        name_at(&entries(tensors, self.kept), number)
    }

    /// Names for the pieces of the flat state.
    pub fn entries(tensors: &[Tensor], optimizer: &Optimizer) -> Vec<Entry> {
        entries(tensors, optimizer.kept())
    }
}

fn entries(tensors: &[Tensor], kept: &'static [&'static str]) -> Vec<Entry> {
    let parameters = tensors.last().map_or(0, |tensor| tensor.range.end);
    let section = |(number, prefix): (usize, &'static str)| {
        tensors.iter().map(move |tensor| Entry {
            name: format!("{prefix}{}", tensor.name),
            dtype: "F32".to_owned(),
            shape: tensor.shape.clone(),
            offset: ((number * parameters + tensor.range.start) * size_of::<f32>()) as u64,
            len: (tensor.range.len() * size_of::<f32>()) as u64,
        })
    };
    [""].iter().chain(kept).copied().enumerate().flat_map(section).collect()
}
