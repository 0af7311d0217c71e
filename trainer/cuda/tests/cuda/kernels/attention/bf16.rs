//! Attention in bf16, by tensor cores, compared with its definition in f64 of rounded numbers.

use elastic_cuda::{Attention, Precision};

use super::{assert_within, attention, exact, seen, slope};
use crate::bf16::nearest;
use crate::buffers::{assert_near, gpu, numbers};
use crate::double::and_on_a_gpu;

/// What sums in f32 may add to what rounding does.
const IN_F32: f64 = 3e-5;

/// Shapes that fill tiles (64 and 128 rows, 16 to 64 columns) and heads, shapes that do not, a single row, and GPT-2's
/// heads.
fn shapes() -> Vec<Attention> {
    let small = [
        (2, 1, 1, 8),
        (1, 1, 2, 64),
        (1, 67, 2, 16),
        (2, 128, 3, 64),
        (1, 257, 2, 64),
        (2, 64, 1, 20),
        (1, 33, 3, 5),
        (1, 70, 1, 128),
        (2, 64, 1, 128),
        (1, 35, 2, 100),
        (1, 29, 1, 127),
    ];
    let shapes = and_on_a_gpu(small, [(1, 1024, 12, 64)]).into_iter();
    shapes.map(|(sequences, time, heads, columns)| attention(sequences, time, heads, columns)).collect()
}

#[test]
fn attention_in_bf16_and_its_slope_match_the_definition() {
    let (plain, gpu) = (gpu(), gpu().multiplying_in(Precision::Bf16));
    for shape in shapes() {
        // Far enough apart that the largest score changes from tile to tile.
        let triples: Vec<f32> = numbers(3 * shape.outputs(), 11).iter().map(|number| 4.0 * number).collect();
        let above = numbers(shape.outputs(), 12);
        let [triples, above] =
            [&triples, &above].map(|numbers| numbers.iter().map(|&number| nearest(number)).collect::<Vec<f32>>());
        let exact = exact(shape, &triples, &above);
        let [outputs, logs] = seen(&gpu, shape, &triples);
        assert_within(&outputs, &exact.outputs, &exact.outputs_off, IN_F32, &format!("outputs of {shape:?}"));
        assert_near(&logs, &exact.logs, IN_F32, &format!("logarithms of {shape:?}"));
        let found = slope(&gpu, shape, &triples, &above);
        assert_within(&found, &exact.slope, &exact.slope_off, IN_F32, &format!("slope of {shape:?}"));
        assert_eq!(slope(&gpu, shape, &triples, &above), found, "again, of {shape:?}");
        // It is another computation than in f32, except for a row that sees only itself.
        if shape.time == 1 {
            continue;
        }
        assert_ne!(seen(&plain, shape, &triples)[0], outputs, "in f32, of {shape:?}");
        assert_ne!(slope(&plain, shape, &triples, &above), found, "in f32, of {shape:?}");
    }
}
