//! What is trained: the network, its gradient, and the rule that moves its parameters.
//!
//! Parameters, gradients and the optimizer's state are flat `f32` slices, so that they can be summed, sent and saved
//! without knowing the model.

#![deny(clippy::disallowed_methods, clippy::disallowed_types)]

mod adamw;
pub(crate) mod clip;
pub(crate) mod optimizer;
mod rate;
mod sgd;

pub use adamw::AdamW;
pub use optimizer::{Moved, Optimizer, Stride};
pub use rate::{Course, Rate};
pub use sgd::Sgd;

use std::ops::{Deref, DerefMut, Range};

use crate::{Result, Step};

/// What the trainer needs to know of a model.
///
/// Its parameters are a flat slice of `f32` that the trainer keeps. Everything else follows from [`tensors`]:
/// what is summed between ranks, sent to newcomers, moved by the optimizer and saved.
///
/// So that the same steps give the same bits, each method must be a function of its arguments: no clock, no randomness
/// but the seed's and the [`Step`]'s, and no state that is kept from call to call, other than memory to work in.
///
/// An error of any method ends the training of the whole job, and its text is what the user reads. A restart would
/// meet it again, so none is tried, unless the error is or has as its source an [`io::Error`](std::io::Error) of the
/// system.
///
/// [`tensors`]: Model::tensors
pub trait Model: Sync {
    /// Samples, as [`Data::read`](crate::Data::read) writes them. They are kept from step to step, so that a step needs
    /// no fresh memory.
    type Batch: Default + Send;

    /// What one computing thread works with: memory for a pass, or a framework's module.
    type Replica: Send;

    /// The tensors in the flat parameters, one after the other from 0 on. [`Tensor::sequence`] makes them.
    fn tensors(&self) -> &[Tensor];

    /// First parameters for a seed, as many as the tensors hold.
    fn init(&self, seed: u64) -> Result<Vec<f32>>;

    /// Makes what a computing thread works with. It is called once for each thread, before the first step.
    fn replica(&self) -> Result<Self::Replica>;

    /// Returns the batch's loss, summed over its samples, and overwrites `gradient` with the derivative of that sum by
    /// each parameter, or with a sum for an [average](Rule::Average). The trainer divides all of it. There is at least
    /// one sample.
    fn gradient(
        &self,
        step: &Step<'_>,
        parameters: &[f32],
        batch: &Self::Batch,
        replica: &mut Self::Replica,
        gradient: &mut Gradient<'_>,
    ) -> Result<f32>;

    /// Names of what [`evaluate`](Model::evaluate) sums besides the loss, such as `accuracy`.
    fn metrics(&self) -> &[&'static str] {
        &[]
    }

    /// How well the parameters do on a batch of held-out samples. Unless told otherwise, it computes the gradient for
    /// its loss alone; then [`Step::trains`] is false, and a model with dropout leaves it out.
    fn evaluate(
        &self,
        step: &Step<'_>,
        parameters: &[f32],
        batch: &Self::Batch,
        replica: &mut Self::Replica,
    ) -> Result<Sums> {
        let mut unused = vec![0.0; self.parameters()];
        let mut ignored = |_: &[f32]| ();
        let gradient = &mut Gradient::new(&mut unused, &mut ignored);
        Ok(Sums { loss: self.gradient(step, parameters, batch, replica, gradient)?, metrics: Vec::new() })
    }

    /// The same on a GPU, for a model that can compute there; others compute on CPUs alone. Its results differ from
    /// those of [`gradient`] only by rounding.
    ///
    /// [`gradient`]: Model::gradient
    #[cfg(feature = "cuda")]
    fn on_gpu(&self) -> std::result::Result<Box<dyn elastic_cuda::Pass<Self::Batch> + '_>, OnCpusAlone> {
        Err(OnCpusAlone("it has no pass for a GPU".to_owned()))
    }

    /// Number of parameters.
    fn parameters(&self) -> usize {
        self.tensors().last().map_or(0, |tensor| tensor.range.end)
    }

    /// About how many bytes a thread's pass over so many samples keeps, for the line at the start; unless told
    /// otherwise, that is not known.
    fn activation_bytes(&self, samples: usize) -> Option<u64> {
        let _ = samples;
        None
    }

    /// What kind of model this is, in words, best as the flags that make it. Only workers and checkpoints with the same
    /// words train together; unless told otherwise, those whose tensors have the same names and shapes.
    fn identity(&self) -> String {
        let shapes: Vec<String> =
            self.tensors().iter().map(|tensor| format!("{} {:?}", tensor.name, tensor.shape)).collect();
        format!("(model {:08x})", crc32c::crc32c(shapes.join(",").as_bytes()))
    }
}

/// A gradient that a model writes: a slice with a number for each parameter.
pub struct Gradient<'a> {
    /// The numbers.
    pub numbers: &'a mut [f32],
    /// What gets their end once that is final.
    pub done: &'a mut dyn FnMut(&[f32]),
}

impl<'a> Gradient<'a> {
    /// A gradient in these numbers, which is whole before ranks sum any of it.
    pub fn new(numbers: &'a mut [f32], done: &'a mut dyn FnMut(&[f32])) -> Gradient<'a> {
        Gradient { numbers, done }
    }

    /// Says that all numbers from `from` to the end are final. Ranks sum that part while the rest is computed. A
    /// backward pass fills a gradient from its end, where the last layer's parameters lie. A model need not say it:
    /// what is left is summed when the gradient is whole.
    ///
    /// # Panics
    /// When there are fewer numbers.
    pub fn is_final_from(&mut self, from: usize) {
        (self.done)(&self.numbers[from..]);
    }
}

impl Deref for Gradient<'_> {
    type Target = [f32];

    fn deref(&self) -> &[f32] {
        self.numbers
    }
}

impl DerefMut for Gradient<'_> {
    fn deref_mut(&mut self) -> &mut [f32] {
        self.numbers
    }
}

/// What an evaluation sums over the samples of a batch.
#[derive(Debug, Clone, PartialEq)]
pub struct Sums {
    /// The loss.
    pub loss: f32,
    /// One number for each of the model's [`metrics`](Model::metrics). As the loss, it is divided by the number of
    /// [units](crate::data::Unit) in the samples.
    pub metrics: Vec<f32>,
}

/// Why a model cannot compute on a GPU, in words.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("this model computes on CPUs alone: {0}")]
pub struct OnCpusAlone(pub String);

/// A named piece of the flat parameters.
#[derive(Debug, Clone, PartialEq)]
pub struct Tensor {
    /// As PyTorch would name it.
    pub name: String,
    /// Rows and columns, or elements.
    pub shape: Vec<usize>,
    /// Where it lies in the flat parameters.
    pub range: Range<usize>,
    /// How a step changes it.
    pub rule: Rule,
}

/// How a step changes a tensor.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Rule {
    /// The optimizer moves it along its gradient.
    Optimize {
        /// How fast.
        group: ParameterGroup,
    },
    /// It follows an average over the samples, such as batch norm's statistics. Where its gradient would lie,
    /// [`Model::gradient`] writes a sum over the batch's samples (times the [units](crate::data::Unit) of a sample).
    /// Over all ranks that becomes the step's mean, and the tensor `(1 − momentum) · tensor + momentum · mean`, as in
    /// PyTorch's `BatchNorm`. It has no part in the gradient's norm.
    Average {
        /// How much of a step's mean it takes.
        momentum: f32,
    },
}

/// Tensors that the optimizer moves alike: factors of `--lr` and `--weight-decay`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ParameterGroup {
    /// Factor of the learning rate.
    pub rate: f32,
    /// Factor of the weight decay.
    pub decay: f32,
}

impl ParameterGroup {
    /// Matrices: the flags' rate and decay.
    pub const DECAYED: ParameterGroup = ParameterGroup { rate: 1.0, decay: 1.0 };
    /// Biases and norms: the flag's rate, without decay.
    pub const PLAIN: ParameterGroup = ParameterGroup { rate: 1.0, decay: 0.0 };
}

/// The rules that do not follow from their tensors' shapes, in words for the run's identity.
pub(crate) fn rules_of(tensors: &[Tensor]) -> String {
    let own = tensors.iter().filter(|tensor| tensor.rule != Rule::of_shape(&tensor.shape));
    let own: Vec<String> = own.map(|tensor| format!("{} {:?}", tensor.name, tensor.rule)).collect();
    if own.is_empty() { String::new() } else { format!("(rules {:08x})", crc32c::crc32c(own.join(",").as_bytes())) }
}

impl Rule {
    /// That of a tensor of this shape, unless its model says otherwise: tensors of more than one dimension decay.
    pub fn of_shape(shape: &[usize]) -> Rule {
        Rule::Optimize { group: if shape.len() > 1 { ParameterGroup::DECAYED } else { ParameterGroup::PLAIN } }
    }
}

impl Tensor {
    /// Tensors of these names and shapes, one after the other. Their rules follow from their [shapes](Rule::of_shape).
    pub fn sequence<'a>(pieces: impl IntoIterator<Item = (&'a str, Vec<usize>)>) -> Vec<Tensor> {
        let mut end = 0;
        let tensor = |(name, shape): (&str, Vec<usize>)| {
            let start = end;
            end += shape.iter().product::<usize>();
            Tensor { name: name.to_owned(), rule: Rule::of_shape(&shape), shape, range: start..end }
        };
        pieces.into_iter().map(tensor).collect()
    }

    /// The name of the tensor that a number of the flat parameters belongs to.
    pub(crate) fn name_at(tensors: &[Tensor], number: usize) -> String {
        tensors.iter().find(|tensor| tensor.range.contains(&number)).map_or(String::new(), |tensor| tensor.name.clone())
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// A model with tensors, and the bytes that a pass keeps for a sample, for what asks no more of it.
    pub(crate) struct Plain(pub(crate) Vec<Tensor>, pub(crate) Option<u64>);

    impl Model for Plain {
        type Batch = ();
        type Replica = ();

        fn tensors(&self) -> &[Tensor] {
            &self.0
        }

        fn init(&self, _seed: u64) -> Result<Vec<f32>> {
            Ok(vec![0.0; self.parameters()])
        }

        fn replica(&self) -> Result<()> {
            Ok(())
        }

        fn gradient(&self, _: &Step<'_>, _: &[f32], (): &(), (): &mut (), _: &mut Gradient<'_>) -> Result<f32> {
            Ok(0.0)
        }

        fn activation_bytes(&self, samples: usize) -> Option<u64> {
            self.1.map(|bytes| bytes * samples as u64)
        }
    }
}
