//! Attention, compared with its definition in f64.

#[path = "bf16.rs"]
mod in_bf16;

use elastic_cuda::{Attended, Attends, Attention, Bf16, Buffer, Gpu, Precision};

use crate::bf16::{self, nearest};
use crate::buffers::{assert_near, back, gpu, numbers, on};
use crate::double::and_on_a_gpu;

fn attention(sequences: usize, time: usize, heads: usize, columns: usize) -> Attention {
    Attention { sequences, time, heads, columns }
}

/// Shapes that fill tiles and heads, shapes that do not, and a single row.
fn shapes() -> Vec<Attention> {
    let small = [
        (2, 1, 1, 8),
        (1, 67, 2, 16),
        (1, 130, 1, 64),
        (2, 64, 1, 20),
        (1, 33, 3, 5),
        (1, 70, 1, 128),
        (1, 35, 2, 100),
    ];
    let shapes = and_on_a_gpu(small, [(2, 1024, 12, 64)]).into_iter();
    shapes.map(|(sequences, time, heads, columns)| attention(sequences, time, heads, columns)).collect()
}

/// The outputs and logarithms that the GPU computes from these triples, in bf16 if it keeps activations so.
fn seen(gpu: &Gpu, shape: Attention, triples: &[f32]) -> [Vec<f32>; 2] {
    let mut logs = Buffer::default();
    let mut kept = logs.fit(gpu, shape.logs()).unwrap();
    let outputs = if gpu.keeps_bf16() {
        let (triples, mut outputs) = (bf16::on(gpu, triples), Buffer::default());
        let mut seen = outputs.fit(gpu, shape.outputs()).unwrap();
        Bf16::attention(gpu, shape, &triples.view(), &mut seen, &mut kept).unwrap();
        bf16::back(gpu, &outputs)
    } else {
        let (triples, mut outputs) = (on(gpu, triples), Buffer::default());
        let mut seen = outputs.fit(gpu, shape.outputs()).unwrap();
        f32::attention(gpu, shape, &triples.view(), &mut seen, &mut kept).unwrap();
        back(gpu, &outputs)
    };
    [outputs, back(gpu, &logs)]
}

fn slope(gpu: &Gpu, shape: Attention, triples: &[f32], above: &[f32]) -> Vec<f32> {
    let [outputs, logs] = seen(gpu, shape, triples);
    let (logs, mut means, blank) = (on(gpu, &logs), Buffer::default(), vec![f32::NAN; 3 * shape.outputs()]);
    let mut room = means.fit(gpu, shape.logs()).unwrap();
    if gpu.keeps_bf16() {
        let [triples, outputs, above, mut slope] = [triples, &outputs, above, &blank].map(|it| bf16::on(gpu, it));
        let attended = Attended { triples: triples.view(), outputs: outputs.view(), logs: logs.view() };
        Bf16::attention_slope(gpu, shape, &attended, &above.view(), &mut room, &mut slope.view_mut()).unwrap();
        return bf16::back(gpu, &slope);
    }
    let [triples, outputs, above, mut slope] = [triples, &outputs, above, &blank].map(|it| on(gpu, it));
    let attended = Attended { triples: triples.view(), outputs: outputs.view(), logs: logs.view() };
    f32::attention_slope(gpu, shape, &attended, &above.view(), &mut room, &mut slope.view_mut()).unwrap();
    back(gpu, &slope)
}

/// Outputs, logarithms, and the derivative by the triples. And how far outputs and derivative may be off when the
/// softmax's weights and the derivative by the scores are off by a share of themselves, in units of that share.
struct Exact {
    outputs: Vec<f64>,
    logs: Vec<f64>,
    slope: Vec<f64>,
    outputs_off: Vec<f64>,
    slope_off: Vec<f64>,
}

fn exact(shape: Attention, triples: &[f32], above: &[f32]) -> Exact {
    let Attention { sequences, time, heads, columns } = shape;
    let (width, scale) = (heads * columns, 1.0 / (columns as f64).sqrt());
    let mut exact = Exact {
        outputs: vec![0.0; shape.outputs()],
        logs: vec![0.0; shape.logs()],
        slope: vec![0.0; 3 * shape.outputs()],
        outputs_off: vec![0.0; shape.outputs()],
        slope_off: vec![0.0; 3 * shape.outputs()],
    };
    for (sequence, head) in (0..sequences).flat_map(|sequence| (0..heads).map(move |head| (sequence, head))) {
        let place = |row: usize, which: usize| ((sequence * time + row) * 3 + which) * width + head * columns;
        let dot = |one: &[f32], two: &[f32]| -> f64 {
            one.iter().zip(two).map(|(&one, &two)| f64::from(one) * f64::from(two)).sum()
        };
        let part = |row, which| &triples[place(row, which)..][..columns];
        for row in 0..time {
            let scores: Vec<f64> = (0..=row).map(|past| dot(part(row, 0), part(past, 1)) * scale).collect();
            let top = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let total: f64 = scores.iter().map(|score| (score - top).exp()).sum();
            exact.logs[(sequence * heads + head) * time + row] = top * std::f64::consts::LOG2_E + total.log2();
            let weights: Vec<f64> = scores.iter().map(|score| (score - top).exp() / total).collect();
            let out = (sequence * time + row) * width + head * columns;
            let above = &above[out..][..columns];
            let inner: Vec<f64> = (0..=row).map(|past| dot(above, part(past, 2))).collect();
            let mean: f64 = weights.iter().zip(&inner).map(|(weight, inner)| weight * inner).sum();
            // The mean is computed from the outputs, so it is off by as much as those, which are rounded themselves.
            let mean_off: f64 = (0..columns)
                .map(|i| {
                    let off: f64 = (0..=row).map(|past| weights[past] * f64::from(part(past, 2)[i]).abs()).sum();
                    exact.outputs_off[out + i] = off;
                    2.0 * off * f64::from(above[i]).abs()
                })
                .sum();
            for past in 0..=row {
                let weight = weights[past];
                let by_score = weight * (inner[past] - mean) * scale;
                let by_score_off = by_score.abs() + weight * mean_off * scale;
                for (i, &above) in above.iter().enumerate() {
                    let [query, key, value] = [part(row, 0)[i], part(past, 1)[i], part(past, 2)[i]].map(f64::from);
                    exact.outputs[out + i] += weight * value;
                    for (place, by, off, times) in [
                        (place(row, 0), by_score, by_score_off, key),
                        (place(past, 1), by_score, by_score_off, query),
                        (place(past, 2), weight, weight, f64::from(above)),
                    ] {
                        exact.slope[place + i] += by * times;
                        exact.slope_off[place + i] += off * times.abs();
                    }
                }
            }
        }
    }
    exact
}

/// How far the nearest bf16 may be from a number, as a share of it: bf16 has 8 bits.
const ROUNDING: f64 = 1.0 / 256.0;

/// Each number is as near as it must be when weights and the result are rounded to bf16: `off` is as in [`Exact`], and
/// `more` is added.
fn assert_within(found: &[f32], wanted: &[f64], off: &[f64], more: f64, what: &str) {
    assert_eq!(found.len(), wanted.len(), "{what}");
    for (place, ((&found, &wanted), &off)) in found.iter().zip(wanted).zip(off).enumerate() {
        let allowed = ROUNDING * (off + wanted.abs()) + more * (1.0 + wanted.abs());
        let is_off = (f64::from(found) - wanted).abs();
        assert!(is_off <= allowed, "{what} at {place}: {found}, not {wanted}, which is off by more than {allowed}");
    }
}

#[test]
fn attention_and_its_slope_match_the_definition() {
    let gpu = gpu();
    for shape in shapes() {
        // Far enough apart that the largest score changes from tile to tile.
        let triples: Vec<f32> = numbers(3 * shape.outputs(), 1).iter().map(|number| 4.0 * number).collect();
        let above = numbers(shape.outputs(), 2);
        let exact = exact(shape, &triples, &above);
        let [outputs, logs] = seen(&gpu, shape, &triples);
        assert_near(&outputs, &exact.outputs, 1e-5, &format!("outputs of {shape:?}"));
        assert_near(&logs, &exact.logs, 1e-5, &format!("logarithms of {shape:?}"));
        let found = slope(&gpu, shape, &triples, &above);
        assert_near(&found, &exact.slope, 3e-5, &format!("slope of {shape:?}"));
        assert_eq!(slope(&gpu, shape, &triples, &above), found, "again, of {shape:?}");
    }
}

/// A GPU for each precision.
fn gpus() -> [Gpu; 2] {
    [gpu(), gpu().multiplying_in(Precision::Bf16)]
}

#[test]
fn scores_of_any_size_have_finite_weights() {
    for gpu in gpus() {
        let shape = attention(1, 66, 1, 8);
        // In bf16 they are the same numbers.
        let triples: Vec<f32> = numbers(3 * shape.outputs(), 3).iter().map(|number| nearest(500.0 * number)).collect();
        let above: Vec<f32> = numbers(shape.outputs(), 4).into_iter().map(nearest).collect();
        let exact = exact(shape, &triples, &above);
        let [outputs, _] = seen(&gpu, shape, &triples);
        assert_within(&outputs, &exact.outputs, &exact.outputs_off, 2e-3, "outputs");
        assert!(slope(&gpu, shape, &triples, &above).iter().all(|slope| slope.is_finite()));
    }
}

#[test]
fn a_rows_bits_depend_on_what_it_sees_alone() {
    for gpu in gpus() {
        for (sequences, time, heads, columns) in and_on_a_gpu([(3, 70, 2, 16), (3, 40, 1, 128)], [(32, 1024, 12, 64)]) {
            assert_bits_depend_on_what_a_row_sees(&gpu, attention(sequences, time, heads, columns));
        }
    }
}

/// The last of the sequences has the same bits by itself, and its first 33 rows without those after them.
fn assert_bits_depend_on_what_a_row_sees(gpu: &Gpu, many: Attention) {
    let Attention { sequences, time, heads, columns } = many;
    let width = heads * columns;
    let (triples, above) = (numbers(3 * many.outputs(), 5), numbers(many.outputs(), 6));
    let ([outputs, _], slopes) = (seen(gpu, many, &triples), slope(gpu, many, &triples, &above));
    let one = attention(1, time, heads, columns);
    let last_above = (sequences - 1) * time * width;
    let (alone, alone_above) = (&triples[3 * last_above..], &above[last_above..]);
    assert_eq!(seen(gpu, one, alone)[0], outputs[last_above..]);
    assert_eq!(slope(gpu, one, alone, alone_above), slopes[3 * last_above..]);
    let shorter = attention(1, 33, heads, columns);
    let beginning = &alone[..3 * shorter.outputs()];
    assert_eq!(seen(gpu, shorter, beginning)[0], outputs[last_above..][..shorter.outputs()]);
}

#[test]
fn heads_without_kernels_are_refused() {
    assert_eq!(Attention::refusal(128), None);
    let reason = Attention::refusal(129).unwrap();
    assert!(reason.contains("heads have 129 columns") && reason.contains("at most 128"), "{reason}");
}
