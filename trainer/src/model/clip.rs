//! A bound for the gradient's norm.

use pulp::Arch;

/// Numbers that are added side by side: a fixed order, so that equal gradients have equal norms on every rank.
const LANES: usize = 8;

/// The factor for a gradient: `scale`, or less if its Euclidean norm would then be above `most`. It is that of
/// `torch.nn.utils.clip_grad_norm_` (Pascanu et al., "On the difficulty of training recurrent neural networks", 2013).
pub(crate) fn clipped(gradient: &[f32], scale: f32, most: f32) -> f32 {
    bounded(norm(gradient), scale, most)
}

/// The same for a gradient with this norm.
pub(crate) fn bounded(norm: f64, scale: f32, most: f32) -> f32 {
    let norm = norm * f64::from(scale);
    (f64::from(scale) * (f64::from(most) / (norm + 1e-6)).min(1.0)) as f32
}

/// The Euclidean norm. In `f64` the square of an `f32` neither overflows nor vanishes.
fn norm(gradient: &[f32]) -> f64 {
    let (whole, rest) = gradient.as_chunks::<LANES>();
    let mut sums = [0.0f64; LANES];
    Arch::new().dispatch(|| {
        for chunk in whole {
            sums.iter_mut().zip(chunk).for_each(|(sum, &value)| *sum += f64::from(value) * f64::from(value));
        }
    });
    let rest: f64 = rest.iter().map(|&value| f64::from(value) * f64::from(value)).sum();
    (sums.iter().sum::<f64>() + rest).sqrt()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_gradients_are_cut_to_the_bound_and_short_ones_stay() {
        // The norm of (3, 4) is 5; halved it is 2.5.
        for (scale, most, wanted) in
            [(1.0, 1.0, 0.2), (0.5, 1.0, 0.2), (1.0, 10.0, 1.0), (0.5, 2.6, 0.5), (2.0, 5.0, 1.0)]
        {
            let found = clipped(&[3.0, 4.0], scale, most);
            assert!((found - wanted).abs() < 1e-6, "{scale} {most}: {found}, not {wanted}");
        }
        assert_eq!(clipped(&[0.0; 20], 1.0, 1.0), 1.0);
        // A gradient within its bound keeps its bits.
        assert_eq!(clipped(&[0.1; 20], 1.0 / 3.0, 1.0).to_bits(), (1.0f32 / 3.0).to_bits());
    }

    #[test]
    fn the_norm_counts_every_number_and_none_is_too_large() {
        for count in [0, 1, 7, 8, 9, 35] {
            let numbers: Vec<f32> = (1..=count).map(|number| number as f32).collect();
            // 1² + … + n² = n (n + 1) (2 n + 1) / 6
            let wanted = f64::from(count * (count + 1) * (2 * count + 1) / 6).sqrt();
            assert!((norm(&numbers) - wanted).abs() < 1e-9, "{count}");
        }
        assert!((norm(&[3e38, f32::MAX]) / 1e38 - 4.536).abs() < 0.01);
    }
}
