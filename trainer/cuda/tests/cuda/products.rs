//! Products of numbers that are rounded to bf16. On the double of the driver, or, by `make gpu`, on a real GPU.

use elastic_cuda::{After, Buffer, Gpu, Matrix, Precision};

use crate::bf16::nearest;
use crate::buffers::{assert_near, back, gpu, numbers, on};

fn in_bf16() -> Gpu {
    gpu().multiplying_in(Precision::Bf16)
}

#[test]
fn numbers_are_rounded_to_the_nearest_and_ties_to_even() {
    let some = [0.0, 1.0, 1.5, 3.0e38, 1.0e-40, f32::MAX, f32::MIN_POSITIVE, f32::INFINITY, f32::NAN];
    let bits = [
        0x3f80_8000, // 1 and half a step: to 1
        0x3f81_8000, // a step more: up
        0x3f80_8001,
        0x3f80_7fff,
        0x7f7f_7fff, // the last that does not become infinite
        0x7f7f_8000,
        0x0000_0001, // subnormals
        0x0000_8000,
        0x0000_8001,
        0x0001_8000,
        0x007f_8000, // to the first that is none
        0x7f80_0001, // no number, and its upper half would be infinity
        0x7fff_ffff,
    ];
    let mut given: Vec<f32> = some.into_iter().chain(bits.map(f32::from_bits)).collect();
    given.extend(numbers(500, 30).iter().map(|number| number * 1e-3));
    given.extend(given.clone().iter().map(|number| -number));
    let (gpu, rows) = (in_bf16().without_library(), given.len());
    let (left, one, mut out) = (on(&gpu, &given), on(&gpu, &[1.0]), Buffer::default());
    let (left, right) = (Matrix::new(left.view(), rows, 1), Matrix::new(one.view(), 1, 1));
    gpu.product(&mut out.fit(&gpu, rows).unwrap(), &left, &right, &After::Plain).unwrap();
    for (given, found) in given.iter().zip(back(&gpu, &out)) {
        let wanted = nearest(*given);
        let same = found == wanted || found.is_nan() && wanted.is_nan();
        assert!(same, "{given:e} ({:08x}) became {found:e}, not {wanted:e}", given.to_bits());
    }
    assert_eq!(nearest(f32::from_bits(0x3f80_8000)), 1.0);
    assert_eq!(nearest(f32::MAX), f32::INFINITY);
}

#[test]
fn they_are_those_of_rounded_operands() {
    for gpu in [in_bf16(), in_bf16().without_library()] {
        let shapes = [(1, 1, 1), (8, 128, 64), (65, 10, 17), (3, 130, 100), (130, 70, 33)];
        // If operands were not rounded, the difference would be a hundred times the one allowed.
        assert_products_match(&gpu, shapes, nearest);
    }
}

/// Compares products of the shapes `(rows, columns, inner)` with their definition in f64: of operands as stored and
/// transposed, with everything that can follow a product. `rounded` is how the GPU rounds a number of an operand.
pub(crate) fn assert_products_match(
    gpu: &Gpu,
    shapes: impl IntoIterator<Item = (usize, usize, usize)>,
    rounded: impl Fn(f32) -> f32,
) {
    for (rows, columns, inner) in shapes {
        for flips in 0..4 {
            let (flip_left, flip_right) = (flips & 1 > 0, flips & 2 > 0);
            let (lefts, rights) = (numbers(rows * inner, 31), numbers(inner * columns, 32));
            let (bias, mask) = (numbers(columns, 33), numbers(rows * columns, 34));
            let number_of = |place: usize| -> f64 {
                let (row, column) = (place / columns, place % columns);
                let product = |i: usize| {
                    let left = lefts[if flip_left { i * rows + row } else { row * inner + i }];
                    let right = rights[if flip_right { column * inner + i } else { i * columns + column }];
                    f64::from(rounded(left)) * f64::from(rounded(right))
                };
                (0..inner).map(product).sum()
            };
            let plain: Vec<f64> = (0..rows * columns).map(number_of).collect();
            // What follows a product is not rounded.
            let biased = |place: usize| plain[place] + f64::from(bias[place % columns]);
            let biased: Vec<f64> = (0..plain.len()).map(biased).collect();
            let positive: Vec<f64> = biased.iter().map(|value| value.max(0.0)).collect();
            let masked: Vec<f64> =
                plain.iter().zip(&mask).map(|(&value, &mask)| if mask > 0.0 { value } else { 0.0 }).collect();

            let (lefts, rights) = (on(gpu, &lefts), on(gpu, &rights));
            let (bias, mask) = (on(gpu, &bias), on(gpu, &mask));
            let left = || match flip_left {
                true => Matrix::new(lefts.view(), inner, rows).transposed(),
                false => Matrix::new(lefts.view(), rows, inner),
            };
            let right = || match flip_right {
                true => Matrix::new(rights.view(), columns, inner).transposed(),
                false => Matrix::new(rights.view(), inner, columns),
            };
            for (after, wanted) in [
                (After::Plain, &plain),
                (After::Bias(bias.view()), &biased),
                (After::BiasRelu(bias.view()), &positive),
                (After::WherePositive(mask.view()), &masked),
            ] {
                let mut out = Buffer::default();
                gpu.product(&mut out.fit(gpu, rows * columns).unwrap(), &left(), &right(), &after).unwrap();
                let what = format!("{rows}×{columns}×{inner} {flips} {after:?}");
                assert_near(&back(gpu, &out), wanted, 1e-5, &what);
            }
        }
    }
}
