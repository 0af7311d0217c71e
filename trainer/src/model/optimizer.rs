//! The rules that move parameters: which there are, what they keep of earlier gradients, and how a step uses them.

use super::{AdamW, ParameterGroup, Rule, Sgd, Tensor};

/// How parameters move along their gradient.
///
/// Each number moves independently of all others, so a step may be cut into pieces anywhere: between threads, and
/// between ranks.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Optimizer {
    /// AdamW.
    AdamW(AdamW),
    /// Gradient descent, with momentum or without.
    Sgd(Sgd),
}

/// How the names begin of what any optimizer keeps.
pub(crate) const PREFIXES: [&str; 2] = ["adamw.", "sgd."];

/// One step of an optimizer.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Stride {
    /// The step's number, counted from 1.
    pub step: u64,
    /// The learning rate.
    pub rate: f32,
    /// What makes the mean of a summed gradient.
    pub mean: f32,
    /// What a summed gradient is multiplied by: `mean`, or less where its norm is bounded.
    pub scale: f32,
}

/// The part of the flat numbers that a step moves: slices of the same length, which begin at the same place.
#[derive(Debug)]
pub struct Moved<'a> {
    /// The place of the first in the flat parameters.
    pub first: usize,
    /// The parameters.
    pub parameters: &'a mut [f32],
    /// What the optimizer [keeps](Optimizer::kept), in its order.
    pub kept: Vec<&'a mut [f32]>,
    /// The summed gradient.
    pub gradient: &'a [f32],
}

impl Optimizer {
    /// What it keeps for each parameter, all zero before the first step: how the names of these tensors begin in a
    /// checkpoint.
    pub fn kept(&self) -> &'static [&'static str] {
        match self {
            Optimizer::AdamW(_) => &["adamw.mean.", "adamw.square."],
            Optimizer::Sgd(Sgd { momentum: 0.0, .. }) => &[],
            Optimizer::Sgd(_) => &["sgd.momentum."],
        }
    }

    /// Does a step: moves each tensor as its [`Rule`] says.
    ///
    /// # Panics
    /// When the slices do not all have the same length, or are not as many as the optimizer keeps.
    pub fn step(&self, stride: &Stride, tensors: &[Tensor], moved: Moved<'_>) {
        let Moved { first, parameters, mut kept, gradient } = moved;
        let end = first + parameters.len();
        for tensor in tensors {
            let (start, end) = (tensor.range.start.max(first), tensor.range.end.min(end));
            if start >= end {
                continue;
            }
            let range = start - first..end - first;
            let (parameters, gradient) = (&mut parameters[range.clone()], &gradient[range.clone()]);
            let kept = kept.iter_mut().map(|kept| &mut kept[range.clone()]).collect::<Vec<_>>();
            match tensor.rule {
                Rule::Average { momentum } => average(parameters, gradient, momentum, stride.mean),
                Rule::Optimize { group } => self.move_along(stride, group, parameters, kept, gradient),
            }
        }
    }

    fn move_along(
        &self,
        stride: &Stride,
        group: ParameterGroup,
        parameters: &mut [f32],
        mut kept: Vec<&mut [f32]>,
        gradient: &[f32],
    ) {
        match (self, &mut kept[..]) {
            (Optimizer::AdamW(rule), [mean, square]) => rule.step(stride, group, parameters, [mean, square], gradient),
            (Optimizer::Sgd(rule), [velocity]) => {
                rule.step_with_momentum(stride, group, parameters, velocity, gradient)
            }
            (Optimizer::Sgd(rule), []) => rule.step(stride, group, parameters, gradient),
            (rule, kept) => unreachable!("{rule:?} does not keep {} numbers for a parameter", kept.len()),
        }
    }
}

/// Moves an average towards the mean of what was summed.
fn average(averages: &mut [f32], sums: &[f32], momentum: f32, mean: f32) {
    for (average, sum) in averages.iter_mut().zip(sums) {
        *average = (1.0 - momentum) * *average + momentum * (sum * mean);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Numbers that show their last bits.
    fn rough(count: usize, salt: u64) -> Vec<f32> {
        (0..count as u64).map(|place| crate::random::unit(salt << 32 | place) - 0.5).collect()
    }

    fn tensors() -> Vec<Tensor> {
        let mut tensors = Tensor::sequence([("w", vec![3, 5]), ("running", vec![4]), ("b", vec![6])]);
        tensors[1].rule = Rule::Average { momentum: 0.25 };
        tensors[2].rule = Rule::Optimize { group: ParameterGroup { rate: 0.5, decay: 2.0 } };
        tensors
    }

    /// Parameters and what is kept after some steps, each cut at these places.
    fn stepped(rule: &Optimizer, cuts: &[usize]) -> Vec<Vec<u32>> {
        let tensors = tensors();
        let mut all = vec![rough(25, 1)];
        all.resize(1 + rule.kept().len(), vec![0.0; 25]);
        for step in 1..=3 {
            let gradient = rough(25, 10 + step);
            for (&first, &end) in [0].iter().chain(cuts).zip(cuts.iter().chain(&[25])) {
                let mut parts = all.iter_mut().map(|numbers| &mut numbers[first..end]);
                let parameters = parts.next().unwrap();
                let moved = Moved { first, parameters, kept: parts.collect(), gradient: &gradient[first..end] };
                rule.step(&Stride { step, rate: 0.1, mean: 0.5, scale: 0.25 }, &tensors, moved);
            }
        }
        all.iter().map(|numbers| numbers.iter().map(|number| number.to_bits()).collect()).collect()
    }

    #[test]
    fn a_step_may_be_cut_anywhere() {
        let sgd = |momentum, nesterov| Optimizer::Sgd(Sgd { momentum, nesterov, decay: 0.1 });
        for rule in [Optimizer::AdamW(AdamW::new(0.1)), sgd(0.0, false), sgd(0.9, false), sgd(0.9, true)] {
            let whole = stepped(&rule, &[]);
            assert_eq!(whole.len(), 1 + rule.kept().len());
            for cuts in [vec![1], vec![15], vec![7, 16, 17, 24]] {
                assert_eq!(stepped(&rule, &cuts), whole, "{rule:?} cut at {cuts:?}");
            }
        }
    }

    #[test]
    fn an_average_moves_to_the_mean_whatever_the_optimizer_the_rate_and_the_bound() {
        let tensors = tensors();
        for (rule, rate) in [(Optimizer::AdamW(AdamW::new(0.1)), 0.1), (Optimizer::Sgd(Sgd::new(0.9)), 7.0)] {
            let (mut parameters, sums) = (vec![2.0; 25], vec![8.0; 25]);
            let mut kept = vec![vec![0.0; 25]; rule.kept().len()];
            let kept = kept.iter_mut().map(|kept| &mut kept[..]).collect();
            let moved = Moved { first: 0, parameters: &mut parameters, kept, gradient: &sums };
            rule.step(&Stride { step: 1, rate, mean: 0.5, scale: 0.125 }, &tensors, moved);
            // 0.75 · 2 + 0.25 · 8 · 0.5
            assert_eq!(parameters[15..19], [2.5; 4], "{rule:?}");
            assert!(parameters[..15].iter().chain(&parameters[19..]).all(|number| *number != 2.5), "{rule:?}");
        }
    }
}
