//! What is trained: the network, its gradient, and the rule that moves its parameters. Not for data or peers.
//!
//! Parameters, gradients and the optimizer's state are flat `f32` slices, so that they can be summed, sent and saved
//! without knowing the model.

#![deny(clippy::disallowed_methods, clippy::disallowed_types)]

pub mod adamw;
mod affine;
mod attention;
pub mod clip;
pub mod gpt;
pub mod matmul;
pub mod mlp;
mod pointwise;
pub mod rate;

pub use adamw::{AdamW, Moved};
pub use gpt::Gpt;
pub use mlp::{Mlp, Workspace};
pub use rate::{Course, Rate};

use std::ops::Range;

use affine::Layout;
pub(crate) use pointwise::add;

use crate::cuda;

/// What the trainer needs to know of a model.
///
/// Its parameters are a flat slice of `f32` that the trainer keeps. Everything else follows from [`tensors`]:
/// what is summed between ranks, sent to newcomers, moved by the optimizer and saved.
///
/// For the promise that the same steps give the same bits, each method must be a function of its arguments: no clock,
/// no chance but the seed's, and no state that is kept from call to call but for room.
///
/// [`tensors`]: Model::tensors
pub trait Model: Sync {
    /// Samples, and room for what a pass makes of them. Each thread keeps one from step to step, so that a step needs
    /// no fresh memory.
    type Batch: Default + Send;

    /// The pieces of the flat parameters, one after the other from 0 on. [`Tensor::sequence`] makes them.
    fn tensors(&self) -> &[Tensor];

    /// First parameters for a seed.
    fn init(&self, seed: u64) -> Vec<f32>;

    /// Writes into `gradient`, whatever it holds, the derivative of the batch's loss, summed over its samples, and
    /// returns that sum. The trainer divides both. There is at least one sample.
    fn gradient(&self, parameters: &[f32], batch: &mut Self::Batch, gradient: &mut [f32]) -> f32;

    /// The same on a GPU, for a model that can compute there; others compute on CPUs alone. It gives what [`gradient`]
    /// does, but for rounding.
    ///
    /// [`gradient`]: Model::gradient
    fn on_gpu(&self) -> Option<Box<dyn cuda::Pass<Self::Batch> + '_>> {
        None
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

/// A named piece of the flat parameters.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tensor {
    /// As PyTorch would name it.
    pub name: String,
    /// Rows and columns, or elements.
    pub shape: Vec<usize>,
    /// Its place in the flat parameters.
    pub range: Range<usize>,
    /// Whether weight decay applies: to matrices, not to biases.
    pub decays: bool,
}

impl Tensor {
    /// Tensors of these names and shapes, one after the other. Those of more than one dimension decay.
    pub fn sequence<'a>(pieces: impl IntoIterator<Item = (&'a str, Vec<usize>)>) -> Vec<Tensor> {
        let mut layout = Layout::default();
        for (name, shape) in pieces {
            layout.push(name.to_owned(), shape);
        }
        layout.tensors()
    }
}
