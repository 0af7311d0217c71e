//! Stochastic gradient descent with momentum (Sutskever et al., "On the importance of initialization and momentum in
//! deep learning", 2013), as `torch.optim.SGD` has it without dampening.

use super::{ParameterGroup, Stride};
use crate::on_vectors;

/// How parameters move along the gradient, or along a running sum of gradients: one number for each parameter.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Sgd {
    /// How much of the sum stays in a step; 0 for no sum.
    pub momentum: f32,
    /// Looks a step ahead along the sum.
    pub nesterov: bool,
    /// What times a parameter is added to its gradient.
    pub decay: f32,
}

impl Sgd {
    /// With this momentum, and PyTorch's defaults.
    pub fn new(momentum: f32) -> Sgd {
        Sgd { momentum, nesterov: false, decay: 0.0 }
    }

    pub(super) fn step(&self, stride: &Stride, group: ParameterGroup, parameters: &mut [f32], gradient: &[f32]) {
        let (rate, decay) = (stride.rate * group.rate, self.decay * group.decay);
        on_vectors!({
            for (parameter, gradient) in parameters.iter_mut().zip(gradient) {
                *parameter -= rate * (gradient * stride.scale + decay * *parameter);
            }
        });
    }

    pub(super) fn step_with_momentum(
        &self,
        stride: &Stride,
        group: ParameterGroup,
        parameters: &mut [f32],
        velocity: &mut [f32],
        gradient: &[f32],
    ) {
        let (rate, decay, momentum) = (stride.rate * group.rate, self.decay * group.decay, self.momentum);
        on_vectors!({
            for ((parameter, gradient), velocity) in parameters.iter_mut().zip(gradient).zip(velocity.iter_mut()) {
                let gradient = gradient * stride.scale + decay * *parameter;
                *velocity = momentum * *velocity + gradient;
                *parameter -= rate * if self.nesterov { gradient + momentum * *velocity } else { *velocity };
            }
        });
    }
}
