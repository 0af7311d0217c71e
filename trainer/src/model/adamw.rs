//! AdamW (Loshchilov and Hutter, "Decoupled weight decay regularization", 2019).

#[cfg(feature = "cuda")]
use elastic_cuda::{AdamwStep, CudaError, CudaSlice, Decays, Gpu};

use super::{ParameterGroup, Stride};
use crate::on_vectors;

/// How parameters move along the gradient. It keeps two numbers for each: the mean of its gradients, and the mean of
/// their squares.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdamW {
    /// How slowly the mean of the gradient forgets.
    pub beta1: f32,
    /// How slowly the mean of its square forgets.
    pub beta2: f32,
    /// Keeps the division finite.
    pub epsilon: f32,
    /// How strongly matrices shrink, as a share of `rate`.
    pub decay: f32,
}

impl AdamW {
    /// PyTorch's defaults, with this decay.
    pub fn new(decay: f32) -> AdamW {
        AdamW { beta1: 0.9, beta2: 0.999, epsilon: 1e-8, decay }
    }

    pub(super) fn step(
        &self,
        stride: &Stride,
        group: ParameterGroup,
        parameters: &mut [f32],
        [mean, square]: [&mut [f32]; 2],
        gradient: &[f32],
    ) {
        let rate = stride.rate * group.rate;
        let ((rate, root), keep) = (self.corrected(stride.step, rate), self.kept(rate, group.decay));
        on_vectors!({
            let moved = parameters.iter_mut().zip(gradient).zip(mean.iter_mut().zip(square.iter_mut()));
            for ((parameter, gradient), (mean, square)) in moved {
                let gradient = gradient * stride.scale;
                *mean = self.beta1 * *mean + (1.0 - self.beta1) * gradient;
                *square = self.beta2 * *square + (1.0 - self.beta2) * gradient * gradient;
                *parameter = *parameter * keep - rate * *mean / (square.sqrt() / root + self.epsilon);
            }
        });
    }

    /// A step on a GPU, of tensors that all have the same rate; some decay. `state` holds the parameters,
    /// means and squares, and the gradient may be longer than they are.
    #[cfg(feature = "cuda")]
    pub fn step_on_gpu(
        &self,
        gpu: &Gpu,
        stride: &Stride,
        decays: &Decays,
        state: &mut [CudaSlice<f32>; 3],
        gradient: &CudaSlice<f32>,
    ) -> Result<(), CudaError> {
        let &AdamW { beta1, beta2, epsilon, .. } = self;
        let ((rate, root), keep) = (self.corrected(stride.step, stride.rate), self.kept(stride.rate, 1.0));
        gpu.adamw(&AdamwStep { beta1, beta2, epsilon, rate, root, keep }, decays, state, gradient, stride.scale)
    }

    /// What the mean is multiplied by in step number `step`, and what the square's root is divided by: both begin at
    /// zero, and are corrected for that.
    fn corrected(&self, step: u64, rate: f32) -> (f32, f32) {
        let power = |beta: f32| 1.0 - f64::from(beta).powi(i32::try_from(step).unwrap_or(i32::MAX));
        ((f64::from(rate) / power(self.beta1)) as f32, power(self.beta2).sqrt() as f32)
    }

    /// The factor that weight decay, times `share`, multiplies a parameter by.
    fn kept(&self, rate: f32, share: f32) -> f32 {
        1.0 - rate * (self.decay * share)
    }
}
