//! Functions of single numbers and of rows, on the widest vectors that the processor has.

use elastic_trainer::on_vectors;

/// Number of partial sums that a row's sum is split into. It fills a vector register, and fixes the order of additions.
const LANES: usize = 16;

/// `e^x` to about 2 units in the last place, the power of -87 below it and that of 88 above it. After Cephes' `expf`
/// (Moshier, "Methods and programs for mathematical functions", 1989): a power of two times a polynomial.
#[inline(always)]
#[allow(clippy::excessive_precision)] // As published.
pub(super) fn exp(x: f32) -> f32 {
    let x = x.clamp(-87.0, 88.0);
    // Adding and subtracting 1.5 · 2^23 rounds to a whole number, in any vector instruction set.
    const ROUND: f32 = 12_582_912.0;
    let rounded = x.mul_add(std::f32::consts::LOG2_E, ROUND);
    let whole = rounded - ROUND;
    let rest = whole.mul_add(2.121_944_4e-4, whole.mul_add(-0.693_359_375, x));
    let mut sum = 1.987_569_1e-4;
    for coefficient in [1.398_199_9e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_5e-1, 5.000_000_1e-1] {
        sum = rest.mul_add(sum, coefficient);
    }
    // The last bits of `rounded` are that whole number. They become the exponent.
    let power = f32::from_bits(rounded.to_bits().wrapping_sub(ROUND.to_bits()).wrapping_add(127) << 23);
    (rest * rest).mul_add(sum, rest + 1.0) * power
}

/// Combines the lanes in pairs, a half with the other, until one is left.
#[inline(always)]
fn folded(mut lanes: [f32; LANES], combine: impl Fn(f32, f32) -> f32) -> f32 {
    let mut half = LANES / 2;
    while half > 0 {
        for lane in 0..half {
            lanes[lane] = combine(lanes[lane], lanes[lane + half]);
        }
        half /= 2;
    }
    lanes[0]
}

#[inline(always)]
fn sum_of(row: &[f32], of: impl Fn(f32) -> f32) -> f32 {
    let mut lanes = [0.0; LANES];
    let chunks = row.chunks_exact(LANES);
    let rest: f32 = chunks.remainder().iter().map(|&value| of(value)).sum();
    for chunk in chunks {
        lanes.iter_mut().zip(chunk).for_each(|(lane, &value)| *lane += of(value));
    }
    folded(lanes, |a, b| a + b) + rest
}

#[inline(always)]
fn dot(left: &[f32], right: &[f32]) -> f32 {
    let mut lanes = [0.0; LANES];
    let (left, right) = (left.chunks_exact(LANES), right.chunks_exact(LANES));
    let rest: f32 = left.remainder().iter().zip(right.remainder()).map(|(a, b)| a * b).sum();
    for (left, right) in left.zip(right) {
        lanes.iter_mut().zip(left.iter().zip(right)).for_each(|(lane, (a, b))| *lane = a.mul_add(*b, *lane));
    }
    folded(lanes, |a, b| a + b) + rest
}

#[inline(always)]
fn largest(row: &[f32]) -> f32 {
    let mut lanes = [f32::NEG_INFINITY; LANES];
    let chunks = row.chunks_exact(LANES);
    let larger = |a: f32, b: f32| if b > a { b } else { a };
    let rest = chunks.remainder().iter().copied().fold(f32::NEG_INFINITY, larger);
    for chunk in chunks {
        lanes.iter_mut().zip(chunk).for_each(|(lane, &value)| *lane = larger(*lane, value));
    }
    larger(folded(lanes, larger), rest)
}

/// Adds `bias` to each row.
pub(super) fn add_bias(rows: &mut [f32], bias: &[f32]) {
    on_vectors!({
        for row in rows.chunks_exact_mut(bias.len()) {
            row.iter_mut().zip(bias).for_each(|(value, bias)| *value += bias);
        }
    });
}

/// Writes the sum of all rows into `sum`: the derivative of a bias.
pub(super) fn sum_rows(rows: &[f32], sum: &mut [f32]) {
    sum.fill(0.0);
    let width = sum.len();
    on_vectors!({
        for row in rows.chunks_exact(width) {
            sum.iter_mut().zip(row).for_each(|(sum, value)| *sum += value);
        }
    });
}

/// Replaces negative numbers by zero.
pub(super) fn relu(values: &mut [f32]) {
    on_vectors!(values.iter_mut().for_each(|value| *value = value.max(0.0)));
}

/// Turns `slope`, the derivative by [`relu`]'s `outputs`, into the derivative by its inputs.
pub(super) fn relu_slope(outputs: &[f32], slope: &mut [f32]) {
    on_vectors!({
        slope.iter_mut().zip(outputs).for_each(|(slope, &output)| *slope = if output <= 0.0 { 0.0 } else { *slope });
    });
}

/// `sqrt(2 / π)` and the cube's weight, of GELU's approximation by the hyperbolic tangent, which GPT-2 uses (Hendrycks
/// and Gimpel, "Gaussian error linear units", 2016). `(1 + tanh(u)) / 2` is the logistic function of `2u`.
const GELU: f32 = 0.797_884_6;
const CUBE: f32 = 0.044_715;

#[inline(always)]
fn gate(x: f32) -> f32 {
    1.0 / (1.0 + exp(-2.0 * GELU * x * CUBE.mul_add(x * x, 1.0)))
}

/// Writes GELU of each of `inputs` into `outputs`.
pub(super) fn gelu(inputs: &[f32], outputs: &mut [f32]) {
    on_vectors!(outputs.iter_mut().zip(inputs).for_each(|(output, &x)| *output = x * gate(x)));
}

/// Turns `slope`, the derivative by GELU's outputs, into the derivative by its `inputs`.
pub(super) fn gelu_slope(inputs: &[f32], slope: &mut [f32]) {
    on_vectors!({
        for (slope, &x) in slope.iter_mut().zip(inputs) {
            let gate = gate(x);
            let inner = 2.0 * GELU * x * (3.0 * CUBE).mul_add(x * x, 1.0);
            *slope *= gate * (1.0 - gate).mul_add(inner, 1.0);
        }
    });
}

/// Keeps a variance from being zero, as GPT-2 does.
const EPSILON: f32 = 1e-5;

/// Normalises each row of `inputs` to mean 0 and variance 1, then scales it by `weight` and adds `bias` (Ba, Kiros and
/// Hinton, "Layer normalization", 2016). `stats` keeps mean and 1 / deviation of each row.
pub(super) fn layer_norm(inputs: &[f32], weight: &[f32], bias: &[f32], outputs: &mut [f32], stats: &mut [[f32; 2]]) {
    let width = weight.len();
    on_vectors!({
        let rows = inputs.chunks_exact(width).zip(outputs.chunks_exact_mut(width));
        for ((input, output), stats) in rows.zip(stats.iter_mut()) {
            let mean = sum_of(input, |value| value) / width as f32;
            let variance = sum_of(input, |value| (value - mean) * (value - mean)) / width as f32;
            let scale = 1.0 / (variance + EPSILON).sqrt();
            *stats = [mean, scale];
            for (((output, &value), weight), bias) in output.iter_mut().zip(input).zip(weight).zip(bias) {
                *output = ((value - mean) * scale).mul_add(*weight, *bias);
            }
        }
    });
}

/// The derivatives of [`layer_norm`]: *adds* that by its inputs to `slope_in`, and writes those by `weight` and `bias`.
pub(super) fn layer_norm_slope(
    inputs: &[f32],
    weight: &[f32],
    stats: &[[f32; 2]],
    slope_out: &[f32],
    slope_in: &mut [f32],
    (weight_slope, bias_slope): (&mut [f32], &mut [f32]),
) {
    let width = weight.len();
    // Slices of one length need no check for each number.
    let (weight_slope, bias_slope) = (&mut weight_slope[..width], &mut bias_slope[..width]);
    weight_slope.fill(0.0);
    bias_slope.fill(0.0);
    let (mut scaled, mut normal) = (vec![0.0; width], vec![0.0; width]);
    let (scaled, normal) = (&mut scaled[..width], &mut normal[..width]);
    on_vectors!({
        let rows = inputs.chunks_exact(width).zip(slope_out.chunks_exact(width));
        for ((input, out), (into, &[mean, scale])) in rows.zip(slope_in.chunks_exact_mut(width).zip(stats)) {
            for i in 0..width {
                normal[i] = (input[i] - mean) * scale;
                scaled[i] = out[i] * weight[i];
                weight_slope[i] = out[i].mul_add(normal[i], weight_slope[i]);
                bias_slope[i] += out[i];
            }
            let level = sum_of(scaled, |value| value) / width as f32;
            let along = dot(scaled, normal) / width as f32;
            for i in 0..width {
                into[i] = normal[i].mul_add(-along, scaled[i] - level).mul_add(scale, into[i]);
            }
        }
    });
}

/// Turns each row of scores into the derivative of its cross-entropy loss, and returns the summed loss.
pub(super) fn cross_entropy_slope<C: Copy + Into<u32>>(scores: &mut [f32], classes: &[C]) -> f32 {
    let width = scores.len() / classes.len().max(1);
    let mut loss = 0.0;
    on_vectors!({
        for (row, &class) in scores.chunks_exact_mut(width).zip(classes) {
            let class = class.into() as usize;
            let top = largest(row);
            let right = row[class] - top;
            row.iter_mut().for_each(|value| *value = exp(*value - top));
            let sum = sum_of(row, |value| value);
            loss += sum.ln() - right;
            let scale = 1.0 / sum;
            row.iter_mut().for_each(|value| *value *= scale);
            row[class] -= 1.0;
        }
    });
    loss
}

/// Turns a row of attention scores into weights: the softmax of the first `open` of `row`, each times `scale`; the
/// other weights are zero. Returns the logarithm of the sum of the exponentials.
#[inline(always)]
fn softmax(row: &mut [f32], open: usize, scale: f32) -> f32 {
    let (seen, hidden) = row.split_at_mut(open);
    hidden.fill(0.0);
    let top = largest(seen) * scale;
    seen.iter_mut().for_each(|value| *value = exp(*value * scale - top));
    let sum = sum_of(seen, |value| value);
    let share = 1.0 / sum;
    seen.iter_mut().for_each(|value| *value *= share);
    top + sum.ln()
}

/// [`softmax`] of each row. The first row sees `open` places, and each later row sees one more than the row before it.
/// `logs` keeps the logarithms.
pub(super) fn causal_softmax(rows: &mut [f32], width: usize, open: usize, scale: f32, logs: &mut [f32]) {
    on_vectors!({
        for (number, (row, log)) in rows.chunks_exact_mut(width).zip(logs.iter_mut()).enumerate() {
            *log = softmax(row, open + number, scale);
        }
    });
}

/// Computes the same weights again, from the scores and the kept logarithms.
pub(super) fn causal_softmax_again(rows: &mut [f32], width: usize, open: usize, scale: f32, logs: &[f32]) {
    on_vectors!({
        for (number, (row, &log)) in rows.chunks_exact_mut(width).zip(logs).enumerate() {
            let (seen, hidden) = row.split_at_mut(open + number);
            hidden.fill(0.0);
            seen.iter_mut().for_each(|value| *value = exp(*value * scale - log));
        }
    });
}

/// Turns `slope`, the derivative by the softmax's `weights`, into the derivative by its scores. `output` are the rows
/// that were computed with the weights, and `output_slope` is the derivative by them; rows begin `stride` numbers
/// apart. The product of both is the weights' mean of `slope` (Dao et al., "FlashAttention", 2022).
pub(super) fn softmax_slope(
    weights: &[f32],
    slope: &mut [f32],
    width: usize,
    scale: f32,
    (output, output_slope): (&[f32], &[f32]),
    (columns, stride): (usize, usize),
) {
    on_vectors!({
        let rows = weights.chunks_exact(width).zip(slope.chunks_exact_mut(width));
        for (number, (weights, slope)) in rows.enumerate() {
            let here = number * stride..number * stride + columns;
            let mean = dot(&output[here.clone()], &output_slope[here]);
            slope.iter_mut().zip(weights).for_each(|(slope, weight)| *slope = (*slope - mean) * weight * scale);
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use elastic_trainer::random::unit;

    #[test]
    fn the_exponential_is_exact_to_some_units_in_the_last_place() {
        for step in -8700..8800 {
            let x = step as f32 / 100.0;
            let expected = f64::from(x).exp();
            let error = (f64::from(exp(x)) - expected).abs() / expected;
            assert!(error < 4e-7, "e^{x}: {} for {expected}", exp(x));
        }
        assert!(exp(-1000.0) < 1e-37 && exp(f32::NEG_INFINITY) < 1e-37 && exp(1000.0).is_finite());
        assert!(exp(f32::NAN).is_nan(), "a number that is none stays visible");
    }

    #[test]
    fn gelus_slope_is_its_derivative() {
        let exact =
            |x: f64| 0.5 * x * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (x + 0.044_715 * x.powi(3))).tanh());
        for step in -60..=60 {
            let x = step as f32 / 10.0;
            let mut value = [0.0];
            gelu(&[x], &mut value);
            assert!((f64::from(value[0]) - exact(f64::from(x))).abs() < 2e-6, "{x}");
            let mut slope = [1.0];
            gelu_slope(&[x], &mut slope);
            let expected = (exact(f64::from(x) + 1e-6) - exact(f64::from(x) - 1e-6)) / 2e-6;
            assert!((f64::from(slope[0]) - expected).abs() < 1e-5, "{x}: {} for {expected}", slope[0]);
        }
    }

    #[test]
    fn rows_of_any_width_are_summed_whole() {
        for width in [1, 3, 15, 16, 17, 31, 32, 40] {
            let row: Vec<f32> = (0..width).map(|i| unit(i as u64) - 0.5).collect();
            let exact: f64 = row.iter().map(|&value| f64::from(value)).sum();
            assert!((f64::from(sum_of(&row, |value| value)) - exact).abs() < 1e-5);
            let exact: f64 = row.iter().map(|&value| f64::from(value).powi(2)).sum();
            assert!((f64::from(dot(&row, &row)) - exact).abs() < 1e-5);
            assert_eq!(largest(&row), row.iter().copied().fold(f32::NEG_INFINITY, f32::max));
        }
    }
}
