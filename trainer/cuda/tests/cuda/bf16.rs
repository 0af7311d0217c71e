//! Numbers in bf16 on the GPU, and what is computed with them: products with epilogues, norms, sums and losses,
//! compared with their definitions in f64.

use std::num::NonZero;
use std::ops::Range;
use std::thread;

use elastic_cuda::{Bf16, Buffer, Chunks, Epilogue, Gpu, Labels, Matrix, More, Norm, Precision, Residual, SlopeIn};

use crate::buffers::{self, assert_near, gpu, numbers};
use crate::double::and_on_a_gpu;
use crate::kernels::rows::SHAPES;

/// How far the nearest bf16 may be from a number, as a share of it.
const HALF_A_STEP: f64 = 1.0 / 256.0;

/// The nearest bf16 by its definition: of the two neighbours the nearer one, or the even one if both are equally near.
pub(crate) fn nearest(value: f32) -> f32 {
    if value.is_nan() {
        return value;
    }
    // After the largest number the next would be 2^128.
    let at = |bits: u32| match f32::from_bits(bits) {
        infinite if infinite.is_infinite() && value.is_finite() => 2f64.powi(128).copysign(infinite.into()),
        number => number.into(),
    };
    let below = value.to_bits() & 0xffff_0000;
    let above = below.wrapping_add(0x1_0000);
    let (down, up) = ((f64::from(value) - at(below)).abs(), (f64::from(value) - at(above)).abs());
    let even = if below & 0x1_0000 == 0 { below } else { above };
    let bits = if value.is_infinite() || down < up {
        below
    } else if up < down {
        above
    } else {
        even
    };
    f32::from_bits(bits)
}

/// Rounds numbers as they go to the GPU.
pub(crate) fn on(gpu: &Gpu, numbers: &[f32]) -> Buffer<Bf16> {
    let upper: Vec<Bf16> = numbers.iter().map(|&number| (nearest(number).to_bits() >> 16) as Bf16).collect();
    let mut room = Buffer::default();
    gpu.upload(&upper, &mut room.fit(gpu, upper.len()).unwrap()).unwrap();
    room
}

pub(crate) fn back(gpu: &Gpu, room: &Buffer<Bf16>) -> Vec<f32> {
    let view = room.view();
    let mut upper = vec![0; view.len()];
    gpu.download(&view, &mut upper).unwrap();
    upper.iter().map(|&upper| f32::from_bits(u32::from(upper) << 16)).collect()
}

fn rounded(numbers: Vec<f32>) -> Vec<f32> {
    numbers.into_iter().map(nearest).collect()
}

fn in_bf16() -> Gpu {
    gpu().multiplying_in(Precision::Bf16)
}

/// What is written to bf16: a step more than f32's own error, which `error` is.
fn assert_rounded(found: &[f32], wanted: &[f64], error: f64, what: &str) {
    assert_near(found, wanted, HALF_A_STEP + error, what);
    // And no further from it than rounding does, except numbers in the middle between two.
    for (&found, &wanted) in found.iter().zip(wanted) {
        let allowed = HALF_A_STEP * wanted.abs() + 2.0 * error * (1.0 + wanted.abs());
        assert!((f64::from(found) - wanted).abs() <= allowed, "{what}: {found}, not {wanted}");
    }
}

/// A matrix. Each core computes some rows by `compute`, which gets their numbers and zeros. At GPT-2's sizes one
/// core would take minutes.
fn on_all_cores(rows: usize, columns: usize, compute: impl Fn(Range<usize>, &mut [f64]) + Sync) -> Vec<f64> {
    let each = rows.div_ceil(thread::available_parallelism().map_or(1, NonZero::get));
    let mut matrix = vec![0.0; rows * columns];
    thread::scope(|threads| {
        for (part, numbers) in matrix.chunks_mut(each * columns).enumerate() {
            let (compute, first) = (&compute, part * each);
            threads.spawn(move || compute(first..first + numbers.len() / columns, numbers));
        }
    });
    matrix
}

fn gelu(x: f64) -> f64 {
    0.5 * x * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (x + 0.044_715 * x.powi(3))).tanh())
}

fn gelu_slope(x: f64) -> f64 {
    (gelu(x + 1e-6) - gelu(x - 1e-6)) / 2e-6
}

/// Products with each epilogue. `twice` says that the product is rounded once more, before what follows it.
fn assert_epilogues(gpu: &Gpu, twice: bool, shapes: impl IntoIterator<Item = (usize, usize, usize)>) {
    for (rows, columns, inner) in shapes {
        let (lefts, rights) = (rounded(numbers(rows * inner, 51)), rounded(numbers(inner * columns, 52)));
        let (bias, before) = (rounded(numbers(columns, 53)), rounded(numbers(rows * columns, 54)));
        let before: Vec<f32> = before.iter().map(|number| 4.0 * number).collect();
        let sums = on_all_cores(rows, columns, |some, sums| {
            let lefts = lefts[inner * some.start..inner * some.end].chunks_exact(inner);
            for (sums, left) in sums.chunks_exact_mut(columns).zip(lefts) {
                for (sum, right) in sums.iter_mut().zip(rights.chunks_exact(inner)) {
                    *sum = left.iter().zip(right).map(|(&left, &right)| f64::from(left) * f64::from(right)).sum();
                }
            }
        });
        let biased: Vec<f64> =
            sums.iter().enumerate().map(|(place, sum)| sum + f64::from(bias[place % columns])).collect();

        let [left, right, bias] = [&lefts, &rights, &bias].map(|numbers| on(gpu, numbers));
        let product = |epilogue: Epilogue<'_>| {
            let (left, right) = (Matrix::new(left.view(), rows, inner), Matrix::new(right.view(), columns, inner));
            let mut out = Buffer::default();
            let mut room = out.fit(gpu, rows * columns).unwrap();
            gpu.product_bf16(&mut room, &left, &right.transposed(), epilogue).unwrap();
            back(gpu, &out)
        };
        let what = format!("{rows}×{columns}×{inner}");
        // Where rows of operands are no multiples of 16 bytes, the library may sum in parts and round before it adds a
        // bias (seen with cuBLASLt 13.1 on an H200: algorithm 24, 16 parts, for 65×24×17).
        let twice = twice || !inner.is_multiple_of(8);
        let error = if twice { 4e-3 } else { 2e-6 } * (1.0 + (inner as f64).sqrt() / 4.0);
        // The library takes the GPU's own tanh, which is off by 2^-11 (seen with cuBLASLt 13.1 on an H200). GELU's
        // slope, by which a sum is multiplied, is off by twice that.
        let of_gelu = (2.0 * error).max(5e-4);
        let of_slope = of_gelu * (1.0 + sums.iter().fold(0.0, |most: f64, sum| most.max(sum.abs())));
        assert_rounded(&product(Epilogue::Plain), &sums, 1e-5, &what);
        assert_rounded(&product(Epilogue::Bias(bias.view())), &biased, error, &format!("{what}, biased"));

        let mut inputs = on(gpu, &vec![f32::NAN; rows * columns]);
        let active = product(Epilogue::Gelu { bias: bias.view(), inputs: inputs.view_mut() });
        let wanted: Vec<f64> = biased.iter().map(|&x| gelu(x)).collect();
        assert_rounded(&back(gpu, &inputs), &biased, error, &format!("{what}, GELU's inputs"));
        assert_rounded(&active, &wanted, of_gelu, &format!("{what}, GELU"));

        let inputs = on(gpu, &before);
        let found = product(Epilogue::GeluSlope(inputs.view()));
        let wanted: Vec<f64> = sums.iter().zip(&before).map(|(sum, &x)| sum * gelu_slope(x.into())).collect();
        assert_rounded(&found, &wanted, of_slope, &format!("{what}, GELU's slope"));
        assert_eq!(back(gpu, &inputs), before, "{what}: its inputs are left alone");
    }
}

/// The rows of a result begin at multiples of 16 bytes, so cuBLASLt has a way to each epilogue.
const ALIGNED: [(usize, usize, usize); 4] = [(1, 8, 1), (8, 128, 64), (65, 24, 17), (130, 72, 40)];

#[test]
fn products_and_their_epilogues_match_the_definition() {
    let shapes = and_on_a_gpu(ALIGNED, [(2048, 3072, 768), (2048, 50_304, 768)]);
    assert_epilogues(&in_bf16(), false, shapes);
}

#[test]
fn without_the_library_kernels_of_our_own_do_the_same() {
    assert_epilogues(&in_bf16().without_library(), true, ALIGNED.into_iter().chain([(3, 7, 5), (66, 65, 9)]));
}

#[test]
fn weights_gradients_are_written_or_added() {
    for gpu in [in_bf16(), in_bf16().without_library()] {
        for (rows, columns, inner) in and_on_a_gpu([(1, 1, 1), (70, 33, 20), (16, 128, 70)], [(3072, 768, 32 * 1024)]) {
            let (lefts, rights) = (rounded(numbers(inner * rows, 55)), rounded(numbers(inner * columns, 56)));
            let wanted = on_all_cores(rows, columns, |some, sums| {
                for (left, right) in lefts.chunks_exact(rows).zip(rights.chunks_exact(columns)) {
                    for (sums, &left) in sums.chunks_exact_mut(columns).zip(&left[some.clone()]) {
                        sums.iter_mut().zip(right).for_each(|(sum, &right)| *sum += f64::from(left) * f64::from(right));
                    }
                }
            });
            let (left, right) = (on(&gpu, &lefts), on(&gpu, &rights));
            let mut out = buffers::on(&gpu, &vec![f32::NAN; rows * columns]);
            // A tensor core cuts off what does not fit behind the sum so far, and does not round it: such errors all
            // have one sign. A term that is missing would be off by 0.06.
            let error = 1e-6 * (1.0 + (inner as f64).sqrt()) + 1e-7 * inner as f64;
            for (adds, times) in [(false, 1.0), (true, 2.0), (true, 3.0)] {
                let (left, right) = (Matrix::new(left.view(), inner, rows), Matrix::new(right.view(), inner, columns));
                gpu.product_bf16_to_f32(&mut out.view_mut(), &left.transposed(), &right, adds).unwrap();
                let wanted: Vec<f64> = wanted.iter().map(|number| times * number).collect();
                let what = format!("{rows}×{columns}×{inner}, {times} times");
                assert_near(&buffers::back(&gpu, &out), &wanted, error, &what);
            }
        }
    }
}

/// The library may cut a long sum into parts.
#[test]
fn a_weights_gradient_has_the_same_bits_each_time() {
    let gpu = in_bf16();
    for (rows, columns) in and_on_a_gpu([(16, 128)], [(768, 768), (768, 2304), (3072, 768)]) {
        let inner = and_on_a_gpu([70], [32 * 1024]).pop().unwrap();
        let (left, right) = (on(&gpu, &numbers(inner * rows, 57)), on(&gpu, &numbers(inner * columns, 58)));
        let once = || {
            let mut out = buffers::on(&gpu, &vec![f32::NAN; rows * columns]);
            let (left, right) = (Matrix::new(left.view(), inner, rows), Matrix::new(right.view(), inner, columns));
            gpu.product_bf16_to_f32(&mut out.view_mut(), &left.transposed(), &right, false).unwrap();
            buffers::back(&gpu, &out)
        };
        let first = once();
        for time in 2..=50 {
            assert_eq!(once(), first, "{rows}×{columns}×{inner}, time {time}");
        }
    }
}

#[test]
fn norms_in_bf16_are_those_in_f32_of_the_same_numbers() {
    let gpu = gpu();
    for (rows, width) in and_on_a_gpu(SHAPES, [(32 * 1024, 768)]) {
        let count = rows * width;
        let (from, more, above) = (numbers(count, 61), rounded(numbers(count, 62)), rounded(numbers(count, 63)));
        let [weight, bias] = [64, 65].map(|salt| buffers::on(&gpu, &numbers(width, salt)));
        let norm = || Norm { weight: weight.view(), bias: bias.view() };
        let blank = vec![f32::NAN; count];
        let [mut stats, mut plain_stats] = [(); 2].map(|()| buffers::on(&gpu, &vec![f32::NAN; 2 * rows]));

        let (mut plain, plain_more) = (buffers::on(&gpu, &from), buffers::on(&gpu, &more));
        let mut plain_out = buffers::on(&gpu, &blank);
        let numbers = More { numbers: plain_more.view(), to: None };
        let stream = Residual { rows: plain.view_mut(), more: Some(numbers) };
        gpu.layer_norm(&norm(), stream, &mut plain_out.view_mut(), &mut plain_stats.view_mut()).unwrap();

        let (before, added) = (buffers::on(&gpu, &from), on(&gpu, &more));
        let (mut sums, mut out) = (buffers::on(&gpu, &blank), on(&gpu, &blank));
        let numbers = More { numbers: added.view(), to: Some(before.view()) };
        let stream = Residual { rows: sums.view_mut(), more: Some(numbers) };
        gpu.layer_norm(&norm(), stream, &mut out.view_mut(), &mut stats.view_mut()).unwrap();
        let what = format!("{rows}×{width}");
        assert_eq!(buffers::back(&gpu, &sums), buffers::back(&gpu, &plain), "{what}, the stream");
        assert_eq!(buffers::back(&gpu, &before), from, "{what}, the stream before");
        assert_eq!(buffers::back(&gpu, &stats), buffers::back(&gpu, &plain_stats), "{what}, its statistics");
        assert_eq!(back(&gpu, &out), rounded(buffers::back(&gpu, &plain_out)), "{what}, the outputs");

        let (plain_above, above) = (buffers::on(&gpu, &above), on(&gpu, &above));
        let (mut into, mut copy) = (buffers::on(&gpu, &blank), on(&gpu, &blank));
        let mut plain_into = buffers::on(&gpu, &blank);
        let made = (&sums.view(), &stats.view());
        for adds in [false, true] {
            let slope_in = SlopeIn { rows: plain_into.view_mut(), adds };
            gpu.layer_norm_slope(&weight.view(), made, &plain_above.view(), slope_in, None).unwrap();
            let slope_in = SlopeIn { rows: into.view_mut(), adds };
            let (above, mut copy) = (above.view(), copy.view_mut());
            gpu.layer_norm_slope(&weight.view(), made, &above, slope_in, Some(&mut copy)).unwrap();
            assert_eq!(buffers::back(&gpu, &into), buffers::back(&gpu, &plain_into), "{what}, the slope, {adds}");
        }
        assert_eq!(back(&gpu, &copy), rounded(buffers::back(&gpu, &into)), "{what}, the rounded slope");

        let columns = || [(); 2].map(|()| buffers::on(&gpu, &vec![f32::NAN; width]));
        let ([mut weights, mut biases], [mut plain_weights, mut plain_biases]) = (columns(), columns());
        let chunks = &mut Chunks::default();
        let pair = (&mut plain_weights.view_mut(), &mut plain_biases.view_mut());
        gpu.layer_norm_parameters(made, &plain_above.view(), pair, chunks).unwrap();
        let pair = (&mut weights.view_mut(), &mut biases.view_mut());
        gpu.layer_norm_parameters(made, &above.view(), pair, chunks).unwrap();
        assert_eq!(buffers::back(&gpu, &weights), buffers::back(&gpu, &plain_weights), "{what}, by the weight");
        assert_eq!(buffers::back(&gpu, &biases), buffers::back(&gpu, &plain_biases), "{what}, by the bias");
        gpu.sum_many_rows(&mut weights.view_mut(), &above.view(), chunks).unwrap();
        assert_eq!(buffers::back(&gpu, &weights), buffers::back(&gpu, &biases), "{what}, the sum of rows");
    }
}

#[test]
fn what_is_behind_the_classes_has_no_probability_and_no_gradient() {
    let gpu = gpu();
    for (rows, classes, padded) in and_on_a_gpu([(2, 5, 128), (3, 128, 128), (2, 3001, 3072)], [(64, 50_257, 50_304)]) {
        let labels: Vec<u32> = (0..rows).map(|row| ((row + 1) * 7 % classes) as u32).collect();
        let scores: Vec<f32> = rounded(numbers(rows * padded, 66).iter().map(|score| 100.0 * score).collect());
        let (mut wanted_slopes, mut wanted_losses) = (Vec::new(), Vec::new());
        for (row, &label) in scores.chunks_exact(padded).zip(&labels) {
            let row = &row[..classes];
            let top = row.iter().copied().fold(f32::MIN, f32::max);
            let powers: Vec<f64> = row.iter().map(|&score| f64::from(score - top).exp()).collect();
            let sum: f64 = powers.iter().sum();
            wanted_losses.push(sum.ln() - f64::from(row[label as usize] - top));
            let is_label = |class| if class == label as usize { 1.0 } else { 0.0 };
            wanted_slopes.extend(powers.iter().enumerate().map(|(class, power)| power / sum - is_label(class)));
            wanted_slopes.extend(vec![0.0; padded - classes]);
        }
        // Whatever is there: the largest of all numbers, or none.
        for behind in [f32::MAX, f32::NAN, f32::INFINITY, 0.0] {
            let mut given = scores.clone();
            given.chunks_exact_mut(padded).for_each(|row| row[classes..].fill(behind));
            let (mut slopes, mut uploaded, mut losses) = (on(&gpu, &given), Labels::new(classes), Buffer::default());
            uploaded.upload(&gpu, &labels).unwrap();
            let mut room = losses.fit(&gpu, rows).unwrap();
            gpu.cross_entropy(&mut slopes.view_mut(), &uploaded.all(), &mut room).unwrap();
            let found = back(&gpu, &slopes);
            assert_near(&buffers::back(&gpu, &losses), &wanted_losses, 1e-5, "losses");
            assert_rounded(&found, &wanted_slopes, 1e-5, "slopes");
            for row in found.chunks_exact(padded) {
                assert!(row[classes..].iter().all(|slope| slope.to_bits() == 0), "behind {classes}, of {behind}");
            }
        }
    }
}

#[test]
fn parameters_are_rounded_with_zeros_between_them() {
    let gpu = gpu();
    for (count, before, gap) in [(1, 1, 0), (7, 3, 5), (40, 16, 8), (1030, 513, 2)] {
        let given = numbers(count, 67);
        let mut room = on(&gpu, &vec![f32::NAN; count + gap]);
        let parameters = buffers::on(&gpu, &given);
        gpu.round_parameters(&parameters.view(), (before, gap), &mut room.view_mut()).unwrap();
        let given = rounded(given);
        let wanted = [&given[..before], &vec![0.0; gap][..], &given[before..]].concat();
        assert_eq!(back(&gpu, &room), wanted, "{count} {before} {gap}");
    }
}
