//! What is trained: the network, its gradient, and the rule that moves its parameters.
//!
//! Parameters, gradients and the optimizer's state are flat `f32` slices, so that they can be summed, sent and saved
//! without knowing the model.

#![deny(clippy::disallowed_methods, clippy::disallowed_types)]

mod adamw;
mod affine;
mod attention;
pub(crate) mod clip;
pub mod gpt;
mod matmul;
mod mlp;
mod pointwise;
mod rate;

pub use adamw::{AdamW, Moved};
pub use gpt::Gpt;
pub use mlp::{Mlp, Workspace};
pub use rate::{Course, Rate};

use std::ops::Range;

use affine::TensorLayout;
pub(crate) use pointwise::{add, first_not_finite};

/// What the trainer needs to know of a model.
///
/// Its parameters are a flat slice of `f32` that the trainer keeps. Everything else follows from [`tensors`]:
/// what is summed between ranks, sent to newcomers, moved by the optimizer and saved.
///
/// So that the same steps give the same bits, each method must be a function of its arguments: no clock, no randomness
/// but the seed's, and no state that is kept from call to call, other than memory to work in.
///
/// [`tensors`]: Model::tensors
pub trait Model: Sync {
    /// Samples, and memory for what a pass computes from them. Each thread keeps one from step to step, so that a step
    /// needs no fresh memory.
    type Batch: Default + Send;

    /// The tensors in the flat parameters, one after the other from 0 on. [`Tensor::sequence`] makes them.
    fn tensors(&self) -> &[Tensor];

    /// First parameters for a seed.
    fn init(&self, seed: u64) -> Vec<f32>;

    /// Returns the batch's loss, summed over its samples, and overwrites `gradient` with the derivative of that sum.
    /// The trainer divides both. There is at least one sample.
    fn gradient(&self, parameters: &[f32], batch: &mut Self::Batch, gradient: &mut [f32]) -> f32;

    /// As [`gradient`](Self::gradient), with the same bits. Meanwhile it says which part of the gradient is final, if
    /// the model knows: `done` takes the slice from some place to its end. Ranks sum that part while the rest is
    /// computed. A backward pass fills a gradient from its end, where the last layer's parameters lie. The part that
    /// `done` was not given is final at the return, and ranks sum it then.
    fn gradient_from_back(
        &self,
        parameters: &[f32],
        batch: &mut Self::Batch,
        gradient: &mut [f32],
        done: &mut dyn FnMut(&[f32]),
    ) -> f32 {
        let _ = done;
        self.gradient(parameters, batch, gradient)
    }

    /// The same on a GPU, for a model that can compute there; others compute on CPUs alone. Its results differ from
    /// those of [`gradient`] only by rounding.
    ///
    /// [`gradient`]: Model::gradient
    #[cfg(feature = "cuda")]
    fn on_gpu(&self) -> Result<Box<dyn elastic_cuda::Pass<Self::Batch> + '_>, OnCpusAlone> {
        Err(OnCpusAlone("it has no pass for a GPU".to_owned()))
    }

    /// Number of parameters.
    fn parameters(&self) -> usize {
        self.tensors().last().map_or(0, |tensor| tensor.range.end)
    }

    /// What kind of model this is, in words, best as the flags that make it. Only workers and checkpoints with the same
    /// words train together; unless told otherwise, those whose tensors have the same names and shapes.
    fn describe(&self) -> String {
        let shapes: Vec<String> =
            self.tensors().iter().map(|tensor| format!("{} {:?}", tensor.name, tensor.shape)).collect();
        format!("(model {:08x})", crc32c::crc32c(shapes.join(",").as_bytes()))
    }
}

/// Why a model cannot compute on a GPU, in words.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("this model computes on CPUs alone: {0}")]
pub struct OnCpusAlone(pub String);

/// A named piece of the flat parameters.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tensor {
    /// As PyTorch would name it.
    pub name: String,
    /// Rows and columns, or elements.
    pub shape: Vec<usize>,
    /// Where it lies in the flat parameters.
    pub range: Range<usize>,
    /// Whether weight decay applies: to matrices, not to biases.
    pub decays: bool,
}

impl Tensor {
    /// Tensors of these names and shapes, one after the other. Those of more than one dimension decay.
    pub fn sequence<'a>(pieces: impl IntoIterator<Item = (&'a str, Vec<usize>)>) -> Vec<Tensor> {
        let mut layout = TensorLayout::default();
        for (name, shape) in pieces {
            layout.push(name.to_owned(), shape);
        }
        layout.tensors()
    }
}

#[cfg(test)]
mod tests {
    use super::gpt::{Size, Tokens};
    use super::*;
    use crate::random::unit;

    fn bits(numbers: &[f32]) -> Vec<u32> {
        numbers.iter().map(|number| number.to_bits()).collect()
    }

    /// The length of each slice that was passed to `done`.
    fn told<M: Model>(model: &M, batch: &mut M::Batch) -> Vec<usize> {
        let parameters: Vec<f32> = model.init(3).iter().enumerate().map(|(i, p)| p + 0.1 * unit(i as u64)).collect();
        let (mut gradient, mut ends) = (vec![f32::NAN; parameters.len()], Vec::new());
        let loss = model.gradient_from_back(&parameters, batch, &mut gradient, &mut |end: &[f32]| ends.push(bits(end)));
        let mut plain = vec![f32::NAN; parameters.len()];
        assert_eq!(model.gradient(&parameters, batch, &mut plain).to_bits(), loss.to_bits());
        let plain = bits(&plain);
        assert_eq!(plain, bits(&gradient));
        for end in &ends {
            assert_eq!(*end, plain[plain.len() - end.len()..], "a reported part has changed");
        }
        ends.iter().map(Vec::len).collect()
    }

    #[test]
    fn what_a_pass_back_tells_of_is_final() {
        let inputs = (0..4 * 6).map(unit).collect();
        let perceptron = told(&Mlp::new(&[6, 7, 5, 3]), &mut Workspace::new(inputs, vec![0, 2, 1, 2]));
        assert_eq!(perceptron, [18, 18 + 40, 18 + 40 + 49], "a layer each time, the last one first");

        let gpt = Gpt::new(Size { vocabulary: 11, context: 4, layers: 2, heads: 2, width: 6 });
        let ends = told(&gpt, &mut Tokens::new(4, vec![1, 5, 2, 0, 7, 7, 10, 3], vec![5, 2, 0, 4, 7, 10, 3, 9]));
        assert_eq!(ends.len(), 5, "the norm, and each block's halves");
        assert_eq!(*ends.last().unwrap(), gpt.parameters() - (11 + 4) * 6, "all but the embeddings");
        assert!(ends.is_sorted());
    }
}
