//! Layer norm, GELU, embeddings and sums over many rows, compared with their definitions in f64.

use elastic_cuda::{Buffer, Chunks, Gpu, Labels, More, Norm, Occurrences, Residual, SlopeIn};

use crate::buffers::{assert_near, back, gpu, numbers, on};
use crate::double::and_on_a_gpu;

/// Numbers of rows and widths: some fill warps, blocks and groups of four, and some do not.
pub(crate) const SHAPES: [(usize, usize); 6] = [(1, 1), (5, 3), (4, 128), (9, 130), (3, 260), (300, 36)];

fn wide(numbers: &[f32]) -> Vec<f64> {
    numbers.iter().map(|&number| f64::from(number)).collect()
}

/// A buffer for so many numbers, filled with NaN.
fn blank(gpu: &Gpu, count: usize) -> Buffer<f32> {
    on(gpu, &vec![f32::NAN; count])
}

fn written(into: &mut Buffer<f32>, adds: bool) -> SlopeIn<'_> {
    SlopeIn { rows: into.view_mut(), adds }
}

/// Rows to normalise, and what is added to them before.
struct Given {
    rows: usize,
    width: usize,
    stream: Vec<f32>,
    more: Vec<f32>,
    weight: Vec<f32>,
    bias: Vec<f32>,
    slope: Vec<f32>,
}

impl Given {
    fn new((rows, width): (usize, usize)) -> Given {
        let count = rows * width;
        let (stream, more, slope) = (numbers(count, 1), numbers(count, 2), numbers(count, 5));
        Given { rows, width, stream, more, weight: numbers(width, 3), bias: numbers(width, 4), slope }
    }

    /// The sums that are normalised, exactly.
    fn sums(&self) -> Vec<f64> {
        self.stream.iter().zip(&self.more).map(|(&one, &two)| f64::from(one + two)).collect()
    }

    fn stats(&self) -> Vec<f64> {
        let row = |row: &[f64]| {
            let mean = row.iter().sum::<f64>() / row.len() as f64;
            let variance = row.iter().map(|value| (value - mean).powi(2)).sum::<f64>() / row.len() as f64;
            [mean, 1.0 / (variance + 1e-5).sqrt()]
        };
        self.sums().chunks_exact(self.width).flat_map(row).collect()
    }

    fn normal(&self) -> Vec<f64> {
        let (stats, sums) = (self.stats(), self.sums());
        let of = |(place, sum): (usize, &f64)| {
            let row = place / self.width;
            (sum - stats[2 * row]) * stats[2 * row + 1]
        };
        sums.iter().enumerate().map(of).collect()
    }

    /// Computes it on the GPU. Returns the outputs, the stats, and the stream. The norm's parameters begin `off`
    /// numbers after the beginning of a buffer.
    fn normed(&self, gpu: &Gpu, off: usize) -> [Vec<f32>; 3] {
        let shifted = |numbers: &[f32]| on(gpu, &[&vec![0.0; off][..], numbers].concat());
        let (weight, bias) = (shifted(&self.weight), shifted(&self.bias));
        let norm = Norm { weight: weight.view().slice(off..), bias: bias.view().slice(off..) };
        let (mut stream, more) = (on(gpu, &self.stream), on(gpu, &self.more));
        let (mut out, mut stats) = (blank(gpu, self.stream.len()), blank(gpu, 2 * self.rows));
        let more = More { numbers: more.view(), to: None };
        let given = Residual { rows: stream.view_mut(), more: Some(more) };
        gpu.layer_norm(&norm, given, &mut out.view_mut(), &mut stats.view_mut()).unwrap();
        [back(gpu, &out), back(gpu, &stats), back(gpu, &stream)]
    }
}

#[test]
fn layer_norms_match_the_definition() {
    let gpu = gpu();
    for shape in and_on_a_gpu(SHAPES, [(32 * 1024, 768)]) {
        let given = Given::new(shape);
        let [out, stats, stream] = given.normed(&gpu, 0);
        let wanted: Vec<f64> = given
            .normal()
            .iter()
            .enumerate()
            .map(|(place, normal)| {
                normal * f64::from(given.weight[place % given.width]) + f64::from(given.bias[place % given.width])
            })
            .collect();
        // The deviation of a single column is only the epsilon, which makes rounding errors large.
        assert_near(&stats, &given.stats(), 1e-5, &format!("stats of {shape:?}"));
        assert_near(&out, &wanted, 2e-5, &format!("outputs of {shape:?}"));
        assert_eq!(stream, given.sums().iter().map(|&sum| sum as f32).collect::<Vec<_>>(), "stream of {shape:?}");
        // The alignment of the numbers changes how they are read, and not the result.
        assert_eq!(given.normed(&gpu, 1)[0], out, "{shape:?}, unaligned");

        // With nothing to add
        let plain = Given { stream: stream.clone(), more: vec![0.0; stream.len()], ..Given::new(shape) };
        let (weight, bias, mut rows) = (on(&gpu, &plain.weight), on(&gpu, &plain.bias), on(&gpu, &stream));
        let (mut again, mut stats) = (blank(&gpu, stream.len()), blank(&gpu, 2 * plain.rows));
        let norm = Norm { weight: weight.view(), bias: bias.view() };
        let stream = Residual { rows: rows.view_mut(), more: None };
        gpu.layer_norm(&norm, stream, &mut again.view_mut(), &mut stats.view_mut()).unwrap();
        assert_eq!(back(&gpu, &again), out, "{shape:?}, already added");
    }
}

#[test]
fn a_rows_norm_has_the_same_bits_among_any_number_of_rows() {
    let gpu = gpu();
    let all = Given::new((9, 130));
    let [out, stats, _] = all.normed(&gpu, 0);
    let first = |numbers: &[f32]| numbers[..2 * 130].to_vec();
    let some = Given { rows: 2, stream: first(&all.stream), more: first(&all.more), ..all };
    let found = some.normed(&gpu, 0);
    assert_eq!(found[0], out[..2 * 130]);
    assert_eq!(found[1], stats[..4]);
}

#[test]
fn layer_norms_slopes_match_the_definition() {
    let gpu = gpu();
    for shape in and_on_a_gpu(SHAPES, [(32 * 1024, 768)]) {
        let given = Given::new(shape);
        let (width, count) = (given.width, given.stream.len());
        let (normal, stats, slope) = (given.normal(), given.stats(), wide(&given.slope));
        let mut wanted = Vec::new();
        for row in 0..given.rows {
            let here = row * width..(row + 1) * width;
            let scaled: Vec<f64> = slope[here.clone()]
                .iter()
                .zip(&given.weight)
                .map(|(slope, &weight)| slope * f64::from(weight))
                .collect();
            let level = scaled.iter().sum::<f64>() / width as f64;
            let along = scaled.iter().zip(&normal[here.clone()]).map(|(a, b)| a * b).sum::<f64>() / width as f64;
            let by_input = scaled.iter().zip(&normal[here]).map(|(s, n)| (s - level - n * along) * stats[2 * row + 1]);
            wanted.extend(by_input);
        }
        let by_column = |of: &dyn Fn(usize) -> f64| -> Vec<f64> {
            (0..width).map(|column| (0..given.rows).map(|row| of(row * width + column)).sum()).collect()
        };

        let as_f32 = |numbers: &[f64]| numbers.iter().map(|&number| number as f32).collect::<Vec<_>>();
        let (inputs, stats) = (on(&gpu, &as_f32(&given.sums())), on(&gpu, &as_f32(&stats)));
        let (weight, above) = (on(&gpu, &given.weight), on(&gpu, &given.slope));
        let made = (&inputs.view(), &stats.view());
        let mut into = blank(&gpu, count);
        gpu.layer_norm_slope(&weight.view(), made, &above.view(), written(&mut into, false), None).unwrap();
        assert_near(&back(&gpu, &into), &wanted, 1e-4, &format!("written, {shape:?}"));
        gpu.layer_norm_slope(&weight.view(), made, &above.view(), written(&mut into, true), None).unwrap();
        let twice: Vec<f64> = wanted.iter().map(|slope| 2.0 * slope).collect();
        assert_near(&back(&gpu, &into), &twice, 1e-4, &format!("added, {shape:?}"));

        let (mut weights, mut biases) = (blank(&gpu, width), blank(&gpu, width));
        let pair = (&mut weights.view_mut(), &mut biases.view_mut());
        gpu.layer_norm_parameters(made, &above.view(), pair, &mut Chunks::default()).unwrap();
        let wanted = by_column(&|place| slope[place] * normal[place]);
        assert_near(&back(&gpu, &weights), &wanted, 1e-4, &format!("weights, {shape:?}"));
        assert_near(&back(&gpu, &biases), &by_column(&|place| slope[place]), 1e-4, &format!("biases, {shape:?}"));
    }
}

#[test]
fn sums_of_many_rows_match_the_definition() {
    let gpu = gpu();
    let mut room = Chunks::default();
    for (rows, columns) in and_on_a_gpu([(1, 1), (7, 33), (256, 5), (257, 40), (700, 3)], [(32 * 1024, 3072)]) {
        let given = numbers(rows * columns, 6);
        let mut sum = blank(&gpu, columns);
        gpu.sum_many_rows(&mut sum.view_mut(), &on(&gpu, &given).view(), &mut room).unwrap();
        let of = |column: usize| (0..rows).map(|row| f64::from(given[row * columns + column])).sum();
        let wanted: Vec<f64> = (0..columns).map(of).collect();
        // The rounding error of a sum grows with the root of the number of rows.
        let error = if rows > 1000 { 1e-4 } else { 1e-5 };
        assert_near(&back(&gpu, &sum), &wanted, error, &format!("{rows}×{columns}"));
    }
}

#[test]
fn gelu_and_its_slope_match_the_definition() {
    let gpu = gpu();
    let exact = |x: f64| 0.5 * x * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (x + 0.044_715 * x.powi(3))).tanh());
    for count in and_on_a_gpu([1, 3, 4, 513, 1027], [32 * 1024 * 3072]) {
        let given: Vec<f32> = numbers(count, 7).iter().map(|number| 12.0 * number).collect();
        let (inputs, above) = (on(&gpu, &given), numbers(count, 8));
        let (mut out, mut slope) = (blank(&gpu, count), on(&gpu, &above));
        gpu.gelu(&inputs.view(), &mut out.view_mut()).unwrap();
        gpu.gelu_slope(&inputs.view(), &mut slope.view_mut()).unwrap();
        let given = wide(&given);
        assert_near(&back(&gpu, &out), &given.iter().map(|&x| exact(x)).collect::<Vec<_>>(), 2e-6, "GELU");
        let slopes: Vec<f64> = given
            .iter()
            .zip(&above)
            .map(|(&x, &above)| f64::from(above) * (exact(x + 1e-6) - exact(x - 1e-6)) / 2e-6)
            .collect();
        assert_near(&back(&gpu, &slope), &slopes, 1e-5, "GELU's slope");
    }
    // Where the exponential leaves f32's range, the function gives zero, or its input.
    let far = on(&gpu, &[-100.0, 100.0]);
    let mut out = blank(&gpu, 2);
    gpu.gelu(&far.view(), &mut out.view_mut()).unwrap();
    assert_eq!(back(&gpu, &out), [0.0, 100.0]);
}

#[test]
fn embeddings_and_their_slopes_match_the_definition() {
    let gpu = gpu();
    let mut occurrences = Occurrences::default();
    let shapes = [(1, 1, 1, 1), (3, 5, 4, 6), (2, 40, 11, 128), (1, 9, 1000, 513)];
    for (sequences, time, vocabulary, width) in and_on_a_gpu(shapes, [(32, 1024, 50_257, 768)]) {
        let rows = sequences * time;
        let tokens: Vec<u32> = (0..rows).map(|row| (row * row * 7 % vocabulary) as u32).collect();
        let (weights, positions) = (numbers(vocabulary * width, 9), numbers(time * width, 10));
        let mut uploaded = Labels::new(vocabulary);
        uploaded.upload(&gpu, &tokens).unwrap();
        let labels = uploaded.all();
        let mut out = blank(&gpu, rows * width);
        let (table, places) = (on(&gpu, &weights), on(&gpu, &positions));
        gpu.embed((&table.view(), &places.view()), &labels, time, &mut out.view_mut()).unwrap();
        let at = |place: usize| {
            let (row, column) = (place / width, place % width);
            weights[tokens[row] as usize * width + column] + positions[row % time * width + column]
        };
        assert_eq!(back(&gpu, &out), (0..rows * width).map(at).collect::<Vec<_>>());

        // The rows are added in order to what is there, so the result has the same bits.
        let (slopes, mut wanted) = (numbers(rows * width, 11), weights.clone());
        for (row, &token) in tokens.iter().enumerate() {
            let sums = &mut wanted[token as usize * width..][..width];
            sums.iter_mut().zip(&slopes[row * width..]).for_each(|(sum, slope)| *sum += slope);
        }
        let mut gradient = on(&gpu, &weights);
        occurrences.upload(&gpu, &tokens).unwrap();
        gpu.embed_slope(&labels, &occurrences, &on(&gpu, &slopes).view(), &mut gradient.view_mut()).unwrap();
        assert_eq!(back(&gpu, &gradient), wanted);
    }
}
