//! Attention, compared with its definition in f64.

use elastic_cuda::{Attended, Attention, Buffer, Gpu};

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

/// What the GPU computes from these triples.
fn seen(gpu: &Gpu, shape: Attention, triples: &Buffer<f32>) -> (Buffer<f32>, Buffer<f32>) {
    let (mut outputs, mut logs) = (Buffer::default(), Buffer::default());
    let (mut seen, mut kept) = (outputs.fit(gpu, shape.outputs()).unwrap(), logs.fit(gpu, shape.logs()).unwrap());
    gpu.attention(shape, &triples.view(), &mut seen, &mut kept).unwrap();
    (outputs, logs)
}

fn slope(gpu: &Gpu, shape: Attention, triples: &Buffer<f32>, above: &Buffer<f32>) -> Vec<f32> {
    let (outputs, logs) = seen(gpu, shape, triples);
    let attended = Attended { triples: triples.view(), outputs: outputs.view(), logs: logs.view() };
    let (mut means, mut slope) = (Buffer::default(), on(gpu, &vec![f32::NAN; 3 * shape.outputs()]));
    let mut room = means.fit(gpu, shape.logs()).unwrap();
    gpu.attention_slope(shape, &attended, &above.view(), &mut room, &mut slope.view_mut()).unwrap();
    back(gpu, &slope)
}

/// Outputs, logarithms, and the derivative by the triples.
struct Exact {
    outputs: Vec<f64>,
    logs: Vec<f64>,
    slope: Vec<f64>,
}

fn exact(shape: Attention, triples: &[f32], above: &[f32]) -> Exact {
    let Attention { sequences, time, heads, columns } = shape;
    let (width, scale) = (heads * columns, 1.0 / (columns as f64).sqrt());
    let mut exact = Exact {
        outputs: vec![0.0; shape.outputs()],
        logs: vec![0.0; shape.logs()],
        slope: vec![0.0; 3 * shape.outputs()],
    };
    for (sequence, head) in (0..sequences).flat_map(|sequence| (0..heads).map(move |head| (sequence, head))) {
        let place = |row: usize, which: usize| ((sequence * time + row) * 3 + which) * width + head * columns;
        let dot = |one: &[f32], two: &[f32]| -> f64 {
            one.iter().zip(two).map(|(&one, &two)| f64::from(one) * f64::from(two)).sum()
        };
        let part = |row, which| &triples[place(row, which)..][..columns];
        for row in 0..time {
            let scores: Vec<f64> = (0..=row).map(|past| dot(part(row, 0), part(past, 1)) * scale).collect();
            let total: f64 = scores.iter().map(|score| score.exp()).sum();
            exact.logs[(sequence * heads + head) * time + row] = total.log2();
            let weights: Vec<f64> = scores.iter().map(|score| score.exp() / total).collect();
            let out = (sequence * time + row) * width + head * columns;
            let above = &above[out..][..columns];
            let inner: Vec<f64> = (0..=row).map(|past| dot(above, part(past, 2))).collect();
            let mean: f64 = weights.iter().zip(&inner).map(|(weight, inner)| weight * inner).sum();
            for past in 0..=row {
                let by_score = weights[past] * (inner[past] - mean) * scale;
                for (i, &above) in above.iter().enumerate() {
                    exact.outputs[out + i] += weights[past] * f64::from(part(past, 2)[i]);
                    exact.slope[place(row, 0) + i] += by_score * f64::from(part(past, 1)[i]);
                    exact.slope[place(past, 1) + i] += by_score * f64::from(part(row, 0)[i]);
                    exact.slope[place(past, 2) + i] += weights[past] * f64::from(above);
                }
            }
        }
    }
    exact
}

#[test]
fn attention_and_its_slope_match_the_definition() {
    let gpu = gpu();
    for shape in shapes() {
        // Far enough apart that the largest score changes from tile to tile.
        let triples: Vec<f32> = numbers(3 * shape.outputs(), 1).iter().map(|number| 4.0 * number).collect();
        let above = numbers(shape.outputs(), 2);
        let exact = exact(shape, &triples, &above);
        let (triples, above) = (on(&gpu, &triples), on(&gpu, &above));
        let (outputs, logs) = seen(&gpu, shape, &triples);
        assert_near(&back(&gpu, &outputs), &exact.outputs, 1e-5, &format!("outputs of {shape:?}"));
        assert_near(&back(&gpu, &logs), &exact.logs, 1e-5, &format!("logarithms of {shape:?}"));
        let found = slope(&gpu, shape, &triples, &above);
        assert_near(&found, &exact.slope, 3e-5, &format!("slope of {shape:?}"));
        assert_eq!(slope(&gpu, shape, &triples, &above), found, "again, of {shape:?}");
    }
}

#[test]
fn scores_of_any_size_have_finite_weights() {
    let gpu = gpu();
    let shape = attention(1, 66, 1, 8);
    let triples: Vec<f32> = numbers(3 * shape.outputs(), 3).iter().map(|number| 500.0 * number).collect();
    let above = numbers(shape.outputs(), 4);
    let exact = exact_in_halves(shape, &triples);
    let (triples, above) = (on(&gpu, &triples), on(&gpu, &above));
    let (outputs, _) = seen(&gpu, shape, &triples);
    assert_near(&back(&gpu, &outputs), &exact, 2e-3, "outputs");
    assert!(slope(&gpu, shape, &triples, &above).iter().all(|slope| slope.is_finite()));
}

/// The outputs of one head, where the largest score is subtracted from all.
fn exact_in_halves(shape: Attention, triples: &[f32]) -> Vec<f64> {
    let Attention { time, columns, .. } = shape;
    let part = |row: usize, which: usize| &triples[(row * 3 + which) * columns..][..columns];
    let mut outputs = vec![0.0; shape.outputs()];
    for row in 0..time {
        let score = |past: usize| -> f64 {
            let products = part(row, 0).iter().zip(part(past, 1)).map(|(&one, &two)| f64::from(one) * f64::from(two));
            products.sum::<f64>() / (columns as f64).sqrt()
        };
        let top = (0..=row).map(score).fold(f64::NEG_INFINITY, f64::max);
        let total: f64 = (0..=row).map(|past| (score(past) - top).exp()).sum();
        for past in 0..=row {
            let weight = (score(past) - top).exp() / total;
            (0..columns).for_each(|i| outputs[row * columns + i] += weight * f64::from(part(past, 2)[i]));
        }
    }
    outputs
}

#[test]
fn a_rows_bits_depend_on_what_it_sees_alone() {
    let gpu = gpu();
    for (sequences, time, heads, columns) in and_on_a_gpu([(3, 70, 2, 16), (3, 40, 1, 128)], [(32, 1024, 12, 64)]) {
        let width = heads * columns;
        let many = attention(sequences, time, heads, columns);
        let (triples, above) = (numbers(3 * many.outputs(), 5), numbers(many.outputs(), 6));
        let (all, all_above) = (on(&gpu, &triples), on(&gpu, &above));
        let (outputs, slopes) = (back(&gpu, &seen(&gpu, many, &all).0), slope(&gpu, many, &all, &all_above));
        // The last sequence by itself
        let one = attention(1, time, heads, columns);
        let last_above = (sequences - 1) * time * width;
        let last = 3 * last_above;
        let (alone, alone_above) = (on(&gpu, &triples[last..]), on(&gpu, &above[last_above..]));
        assert_eq!(back(&gpu, &seen(&gpu, one, &alone).0), outputs[last_above..]);
        assert_eq!(slope(&gpu, one, &alone, &alone_above), slopes[last..]);
        // And its beginning
        let shorter = attention(1, 33, heads, columns);
        let beginning = on(&gpu, &triples[last..][..3 * shorter.outputs()]);
        assert_eq!(back(&gpu, &seen(&gpu, shorter, &beginning).0), outputs[last_above..][..shorter.outputs()]);
    }
}

#[test]
fn heads_without_kernels_are_refused() {
    assert_eq!(Attention::refusal(128), None);
    let reason = Attention::refusal(129).unwrap();
    assert!(reason.contains("heads have 129 columns") && reason.contains("at most 128"), "{reason}");
}
