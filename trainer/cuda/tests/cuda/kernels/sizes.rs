//! Products at GPT-2's sizes on a real GPU: whole rows are compared with their definition in f64, and kernels are
//! timed. On the double this would take minutes: there it is left out, and a line says so.

use std::time::Instant;

use elastic_cuda::{After, Attended, Attends, Attention, Bf16, Buffer, Epilogue, Gpu, Matrix};

use crate::bf16;
use crate::buffers::{assert_near, back, gpu, numbers, on};
use crate::double::is_whole;

/// Each product of a block, and the head's: the rows of a batch of 32 windows of 1,024, the columns, and how many
/// numbers are summed.
const PRODUCTS: [(usize, usize, usize); 5] = [
    (32 * 1024, 2304, 768),
    (32 * 1024, 768, 768),
    (32 * 1024, 3072, 768),
    (32 * 1024, 768, 3072),
    (2048, 50_257, 768),
];

#[test]
fn products_of_gpt2_match_the_definition() {
    if !is_whole() {
        return eprintln!("left out: this is no GPU, or only small shapes are asked for");
    }
    for gpu in [gpu(), gpu().without_library()] {
        for (rows, columns, inner) in PRODUCTS {
            let (lefts, rights) = (numbers(rows * inner, 41), numbers(inner * columns, 42));
            let (left, right, mut out) = (on(&gpu, &lefts), on(&gpu, &rights), Buffer::default());
            let product = |out: &mut Buffer<f32>| {
                let (left, right) = (Matrix::new(left.view(), rows, inner), Matrix::new(right.view(), inner, columns));
                gpu.product(&mut out.fit(&gpu, rows * columns).unwrap(), &left, &right, &After::Plain).unwrap();
                back(&gpu, out)
            };
            let found = product(&mut out);
            for row in [0, 1, rows / 2 + 7, rows - 1] {
                let mut wanted = vec![0.0; columns];
                for (i, right) in rights.chunks_exact(columns).enumerate() {
                    let left = f64::from(lefts[row * inner + i]);
                    wanted.iter_mut().zip(right).for_each(|(sum, &right)| *sum += left * f64::from(right));
                }
                let what = format!("{rows}×{columns}×{inner}, row {row}");
                assert_near(&found[row * columns..][..columns], &wanted, 1e-4, &what);
            }
            // Another run gives the same numbers.
            assert!(product(&mut out) == found, "{rows}×{columns}×{inner}, again");
        }
    }
}

/// Milliseconds of one launch: the mean of twenty that follow each other.
fn timed(gpu: &Gpu, mut launch: impl FnMut()) -> f64 {
    const TIMES: u32 = 20;
    launch();
    gpu.wait().unwrap();
    let begun = Instant::now();
    (0..TIMES).for_each(|_| launch());
    gpu.wait().unwrap();
    begun.elapsed().as_secs_f64() * 1e3 / f64::from(TIMES)
}

#[test]
fn kernels_are_timed_if_this_is_a_gpu() {
    if !is_whole() {
        return eprintln!("kernels: not measured, this is no GPU");
    }
    let gpu = gpu();
    for (rows, columns, inner) in PRODUCTS {
        let (left, right) = (on(&gpu, &numbers(rows * inner, 43)), on(&gpu, &numbers(inner * columns, 44)));
        let mut out = Buffer::default();
        let took = timed(&gpu, || {
            let (left, right) = (Matrix::new(left.view(), rows, inner), Matrix::new(right.view(), inner, columns));
            gpu.product(&mut out.fit(&gpu, rows * columns).unwrap(), &left, &right, &After::Plain).unwrap();
        });
        print_rate("f32", (rows, columns, inner), took);
        // As a pass multiplies: by a weight with a row for each output, the vocabulary's with zeros.
        let columns = columns.next_multiple_of(128);
        let left = bf16::on(&gpu, &numbers(rows * inner, 43));
        let right = bf16::on(&gpu, &numbers(inner * columns, 44));
        let (bias, mut out) = (bf16::on(&gpu, &numbers(columns, 47)), Buffer::default());
        let took = timed(&gpu, || {
            let (left, right) = (Matrix::new(left.view(), rows, inner), Matrix::new(right.view(), columns, inner));
            let mut out = out.fit(&gpu, rows * columns).unwrap();
            gpu.product_bf16(&mut out, &left, &right.transposed(), Epilogue::Bias(bias.view())).unwrap();
        });
        print_rate("bf16, with a bias", (rows, columns, inner), took);
    }
    time_attention(&gpu);
    time_attention_in_bf16(&gpu);
}

#[allow(clippy::print_stdout)] // A part of the test that calls it.
fn print_rate(what: &str, (rows, columns, inner): (usize, usize, usize), took: f64) {
    let rate = 2e-9 * (rows * columns * inner) as f64 / took;
    println!("product {rows}×{columns}×{inner} in {what}: {took:.3} ms, {rate:.0} TFLOP/s");
}

/// GPT-2's heads.
const HEADS: Attention = Attention { sequences: 32, time: 1024, heads: 12, columns: 64 };

/// Prints how long attention takes, and its slope.
#[allow(clippy::print_stdout)] // A part of the test that calls it.
fn time_attention(gpu: &Gpu) {
    let (triples, above) = (on(gpu, &numbers(3 * HEADS.outputs(), 45)), on(gpu, &numbers(HEADS.outputs(), 46)));
    let (mut outputs, mut logs, mut means) = (Buffer::default(), Buffer::default(), Buffer::default());
    let mut slope = on(gpu, &vec![0.0; 3 * HEADS.outputs()]);
    let took = timed(gpu, || {
        let mut outputs = outputs.fit(gpu, HEADS.outputs()).unwrap();
        f32::attention(gpu, HEADS, &triples.view(), &mut outputs, &mut logs.fit(gpu, HEADS.logs()).unwrap()).unwrap();
    });
    println!("attention of 32 windows in f32: {took:.3} ms");
    let took = timed(gpu, || {
        let attended = Attended { triples: triples.view(), outputs: outputs.view(), logs: logs.view() };
        let mut room = means.fit(gpu, HEADS.logs()).unwrap();
        f32::attention_slope(gpu, HEADS, &attended, &above.view(), &mut room, &mut slope.view_mut()).unwrap();
    });
    println!("its slope in f32: {took:.3} ms");
}

/// The same in bf16.
#[allow(clippy::print_stdout)] // A part of the test that calls it.
fn time_attention_in_bf16(gpu: &Gpu) {
    let triples = bf16::on(gpu, &numbers(3 * HEADS.outputs(), 45));
    let above = bf16::on(gpu, &numbers(HEADS.outputs(), 46));
    let (mut outputs, mut logs, mut means) = (Buffer::default(), Buffer::default(), Buffer::default());
    let mut slope = bf16::on(gpu, &vec![0.0; 3 * HEADS.outputs()]);
    let took = timed(gpu, || {
        let mut outputs = outputs.fit(gpu, HEADS.outputs()).unwrap();
        Bf16::attention(gpu, HEADS, &triples.view(), &mut outputs, &mut logs.fit(gpu, HEADS.logs()).unwrap()).unwrap();
    });
    println!("attention of 32 windows in bf16: {took:.3} ms");
    let took = timed(gpu, || {
        let attended = Attended { triples: triples.view(), outputs: outputs.view(), logs: logs.view() };
        let mut room = means.fit(gpu, HEADS.logs()).unwrap();
        Bf16::attention_slope(gpu, HEADS, &attended, &above.view(), &mut room, &mut slope.view_mut()).unwrap();
    });
    println!("its slope in bf16: {took:.3} ms");
}
