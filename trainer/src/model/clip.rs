//! A bound for the gradient's norm.

use std::ops::Range;

use elastic_collective::tree::GRAIN;

use super::{Rule, Tensor};
use crate::on_vectors;

/// Numbers that are added side by side: a fixed order, so that equal gradients have equal norms on every rank.
const LANES: usize = 8;

/// The factor for a gradient: `scale`, or less if its Euclidean norm would then be above `most`. It is that of
/// `torch.nn.utils.clip_grad_norm_` (Pascanu et al., "On the difficulty of training recurrent neural networks", 2013).
///
/// It needs the gradient's [squares].
pub(crate) fn clipped(squares: &[f64], scale: f32, most: f32) -> f32 {
    bounded(squares.iter().sum::<f64>().sqrt(), scale, most)
}

/// The squares of the numbers at `range` of a gradient, in blocks: each rank that adds up a block comes to the same
/// bits. The range begins and ends [between blocks](block_at).
pub(crate) fn squares(gradient: &[f32], range: Range<usize>, tensors: &[Tensor]) -> Vec<f64> {
    let stretches = stretches(tensors);
    let mut first = stretches.partition_point(|stretch| stretch.end <= range.start);
    let blocks = block_at(gradient.len(), range.start)..block_at(gradient.len(), range.end);
    let left = block_at(gradient.len(), gradient.len());
    on_vectors!({
        let sum = |block: usize| {
            let end = gradient.len() - (left - 1 - block) * GRAIN;
            let block = end.saturating_sub(GRAIN)..end;
            while stretches.get(first).is_some_and(|stretch| stretch.end <= block.start) {
                first += 1;
            }
            let within = stretches[first..].iter().take_while(|stretch| stretch.start < block.end);
            within.map(|stretch| square(&gradient[stretch.start.max(block.start)..stretch.end.min(block.end)])).sum()
        };
        blocks.map(sum).collect()
    })
}

/// The number of the block that begins at a place among so many numbers. Blocks end at multiples of [`GRAIN`], counted
/// from the last number, and the first one may be shorter.
pub(crate) fn block_at(numbers: usize, place: usize) -> usize {
    numbers.div_ceil(GRAIN) - (numbers - place).div_ceil(GRAIN)
}

/// The same for a gradient with this norm.
pub(crate) fn bounded(norm: f64, scale: f32, most: f32) -> f32 {
    let norm = norm * f64::from(scale);
    (f64::from(scale) * (f64::from(most) / (norm + 1e-6)).min(1.0)) as f32
}

/// The stretches of the flat parameters that the optimizer moves: all but averages.
fn stretches(tensors: &[Tensor]) -> Vec<Range<usize>> {
    let mut stretches: Vec<Range<usize>> = Vec::new();
    for Tensor { range, .. } in tensors.iter().filter(|tensor| matches!(tensor.rule, Rule::Optimize { .. })) {
        match stretches.last_mut() {
            Some(last) if last.end == range.start => last.end = range.end,
            _ => stretches.push(range.clone()),
        }
    }
    stretches
}

/// The sum of the squares. In `f64` the square of an `f32` neither overflows nor vanishes.
#[inline(always)]
fn square(gradient: &[f32]) -> f64 {
    let (whole, rest) = gradient.as_chunks::<LANES>();
    let mut sums = [0.0f64; LANES];
    for chunk in whole {
        sums.iter_mut().zip(chunk).for_each(|(sum, &value)| *sum += f64::from(value) * f64::from(value));
    }
    let rest: f64 = rest.iter().map(|&value| f64::from(value) * f64::from(value)).sum();
    sums.iter().sum::<f64>() + rest
}

#[cfg(test)]
mod tests {
    use super::*;

    fn clipped(gradient: &[f32], tensors: &[Tensor], scale: f32, most: f32) -> f32 {
        super::clipped(&squares(gradient, 0..gradient.len(), tensors), scale, most)
    }

    #[test]
    fn parts_of_a_gradient_have_the_squares_of_the_whole() {
        let numbers: Vec<f32> = (0..2000).map(|number| (number as f32).sin()).collect();
        let mut tensors = Tensor::sequence([("a", vec![300]), ("running", vec![700]), ("b", vec![1000])]);
        tensors[1].rule = Rule::Average { momentum: 0.1 };
        let whole = squares(&numbers, 0..2000, &tensors);
        let (a, b) = (2000 - 7 * GRAIN, 2000 - 3 * GRAIN);
        let parts = [0..a, a..b, b..2000].map(|range| squares(&numbers, range, &tensors));
        assert_eq!(parts.concat(), whole);
        assert_eq!((block_at(2000, 0), block_at(2000, a), block_at(2000, b), block_at(2000, 2000)), (0, 1, 5, 8));
        let exact: f64 =
            [0..300, 1000..2000].into_iter().flat_map(|range| &numbers[range]).map(|n| f64::from(*n).powi(2)).sum();
        assert!((whole.iter().sum::<f64>() - exact).abs() < 1e-9);
    }

    #[test]
    fn long_gradients_are_cut_to_the_bound_and_short_ones_stay() {
        // The norm of (3, 4) is 5; halved it is 2.5.
        for (scale, most, wanted) in
            [(1.0, 1.0, 0.2), (0.5, 1.0, 0.2), (1.0, 10.0, 1.0), (0.5, 2.6, 0.5), (2.0, 5.0, 1.0)]
        {
            let found = clipped(&[3.0, 4.0], &Tensor::sequence([("w", vec![2])]), scale, most);
            assert!((found - wanted).abs() < 1e-6, "{scale} {most}: {found}, not {wanted}");
        }
        let two = Tensor::sequence([("w", vec![4, 4]), ("b", vec![4])]);
        assert_eq!(clipped(&[0.0; 20], &two, 1.0, 1.0), 1.0);
        // A gradient within its bound keeps its bits.
        assert_eq!(clipped(&[0.1; 20], &two, 1.0 / 3.0, 1.0).to_bits(), (1.0f32 / 3.0).to_bits());
    }

    #[test]
    fn averages_are_no_part_of_the_norm() {
        let mut tensors = Tensor::sequence([("a", vec![1]), ("running", vec![2]), ("b", vec![1]), ("c", vec![1])]);
        tensors[1].rule = Rule::Average { momentum: 0.1 };
        assert_eq!(stretches(&tensors), [0..1, 3..5]);
        let found = clipped(&[3.0, 1e9, 1e9, 4.0, 0.0], &tensors, 1.0, 1.0);
        assert!((found - 0.2).abs() < 1e-6, "{found}");
    }

    #[test]
    fn the_norm_counts_every_number_and_none_is_too_large() {
        for count in [0, 1, 7, 8, 9, 35] {
            let numbers: Vec<f32> = (1..=count).map(|number| number as f32).collect();
            // 1² + … + n² = n (n + 1) (2 n + 1) / 6
            let wanted = f64::from(count * (count + 1) * (2 * count + 1) / 6).sqrt();
            assert!((square(&numbers).sqrt() - wanted).abs() < 1e-9, "{count}");
        }
        assert!((square(&[3e38, f32::MAX]).sqrt() / 1e38 - 4.536).abs() < 0.01);
    }
}
