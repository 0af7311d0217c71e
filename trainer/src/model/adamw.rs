//! AdamW (Loshchilov and Hutter, "Decoupled weight decay regularization", 2019).

#[cfg(feature = "cuda")]
use elastic_cuda::{AdamwStep, CudaError, CudaSlice, Decays, Gpu};
use pulp::Arch;

use super::Tensor;

/// How parameters move along the gradient. Its state is two numbers for each parameter, kept by the caller.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdamW {
    /// Size of a step.
    pub rate: f32,
    /// How slowly the mean of the gradient forgets.
    pub beta1: f32,
    /// How slowly the mean of its square forgets.
    pub beta2: f32,
    /// Keeps the division finite.
    pub epsilon: f32,
    /// How strongly matrices shrink, as a share of `rate`.
    pub decay: f32,
}

/// The part of the flat numbers that a step moves: slices of the same length, which begin at the same place.
#[derive(Debug)]
pub struct Moved<'a> {
    /// The place of the first in the flat parameters.
    pub first: usize,
    /// The parameters.
    pub parameters: &'a mut [f32],
    /// The mean of their gradients, zero before the first step.
    pub mean: &'a mut [f32],
    /// The mean of the gradients' squares, zero before the first step.
    pub square: &'a mut [f32],
    /// The gradient.
    pub gradient: &'a [f32],
}

impl AdamW {
    /// PyTorch's defaults, with this rate and decay.
    pub fn new(rate: f32, decay: f32) -> AdamW {
        AdamW { rate, beta1: 0.9, beta2: 0.999, epsilon: 1e-8, decay }
    }

    /// Moves parameters by `scale` times their gradient, as step number `step`, counted from 1. Each number moves
    /// independently of the others, so a step may be cut into pieces anywhere.
    ///
    /// # Panics
    /// When the slices do not all have the same length.
    pub fn step(&self, step: u64, tensors: &[Tensor], moved: Moved<'_>, scale: f32) {
        let Moved { first, parameters, mean, square, gradient } = moved;
        let (rate, root) = self.corrected(step);
        let end = first + parameters.len();
        for tensor in tensors {
            let (start, end) = (tensor.range.start.max(first), tensor.range.end.min(end));
            if start >= end {
                continue;
            }
            let (range, keep) = (start - first..end - first, self.kept(tensor.decays));
            let (mean, square) = (&mut mean[range.clone()], &mut square[range.clone()]);
            let moved = parameters[range.clone()].iter_mut().zip(&gradient[range]).zip(mean.iter_mut().zip(square));
            Arch::new().dispatch(|| {
                for ((parameter, gradient), (mean, square)) in moved {
                    let gradient = gradient * scale;
                    *mean = self.beta1 * *mean + (1.0 - self.beta1) * gradient;
                    *square = self.beta2 * *square + (1.0 - self.beta2) * gradient * gradient;
                    *parameter = *parameter * keep - rate * *mean / (square.sqrt() / root + self.epsilon);
                }
            });
        }
    }

    /// As [`step`](Self::step), on a GPU. `state` holds its parameters, means and squares, and the gradient may be
    /// longer than they are.
    #[cfg(feature = "cuda")]
    pub fn step_on_gpu(
        &self,
        gpu: &Gpu,
        step: u64,
        decays: &Decays,
        state: &mut [CudaSlice<f32>; 3],
        gradient: &CudaSlice<f32>,
        scale: f32,
    ) -> Result<(), CudaError> {
        let &AdamW { beta1, beta2, epsilon, .. } = self;
        let ((rate, root), keep) = (self.corrected(step), self.kept(true));
        gpu.adamw(&AdamwStep { beta1, beta2, epsilon, rate, root, keep }, decays, state, gradient, scale)
    }

    /// What the mean is multiplied by in step number `step`, and what the square's root is divided by: both begin at
    /// zero, and are corrected for that.
    fn corrected(&self, step: u64) -> (f32, f32) {
        let power = |beta: f32| 1.0 - f64::from(beta).powi(i32::try_from(step).unwrap_or(i32::MAX));
        ((f64::from(self.rate) / power(self.beta1)) as f32, power(self.beta2).sqrt() as f32)
    }

    /// The factor that weight decay multiplies a tensor by, if it decays.
    fn kept(&self, decays: bool) -> f32 {
        if decays { 1.0 - self.rate * self.decay } else { 1.0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_follow_the_paper() {
        // Given two parameters (one decays) and three gradients; when the rule is followed in f64 by the
        // paper's algorithm 2, then f32 agrees.
        let tensors = [
            Tensor { name: "w".into(), shape: vec![1], range: 0..1, decays: true },
            Tensor { name: "b".into(), shape: vec![1], range: 1..2, decays: false },
        ];
        let rule = AdamW::new(0.01, 0.1);
        let (mut parameters, mut mean, mut square) = ([1.0f32, -2.0], [0.0; 2], [0.0; 2]);
        let (mut expected, mut m, mut v) = ([1.0f64, -2.0], [0.0f64; 2], [0.0f64; 2]);
        for (number, gradient) in [[4.0f32, -2.0], [1.0, 8.0], [-6.0, 0.5]].into_iter().enumerate() {
            let step = number as i32 + 1;
            let (parameters, mean, square) = (&mut parameters[..], &mut mean[..], &mut square[..]);
            rule.step(step as u64, &tensors, Moved { first: 0, parameters, mean, square, gradient: &gradient }, 0.5);
            for i in 0..2 {
                let g = f64::from(gradient[i]) * 0.5;
                m[i] = 0.9 * m[i] + 0.1 * g;
                v[i] = 0.999 * v[i] + 0.001 * g * g;
                let (m_hat, v_hat) = (m[i] / (1.0 - 0.9f64.powi(step)), v[i] / (1.0 - 0.999f64.powi(step)));
                let decay = if i == 0 { 0.1 } else { 0.0 };
                expected[i] -= 0.01 * (m_hat / (v_hat.sqrt() + 1e-8) + decay * expected[i]);
            }
        }
        for i in 0..2 {
            assert!((f64::from(parameters[i]) - expected[i]).abs() < 1e-5, "{parameters:?} {expected:?}");
        }
    }
}
