//! Launches that are captured and replayed, compared with the same launches made one by one. On the double of the
//! driver, or, by `make gpu`, on a real GPU.

use elastic_cuda::{Buffer, CudaSlice, CudaViewMut, Done, Gpu, Graphs};
use elastic_models::{Mlp, Rows};
use elastic_trainer::Model;

use crate::buffers::{assert_near, back, gpu, numbers, on};
use crate::warnings;

const SIZES: [usize; 4] = [20, 70, 33, 4];

fn batch(rows: usize, salt: u64) -> Rows {
    let labels = (0..rows).map(|row| ((row + salt as usize) % SIZES[3]) as u8).collect();
    Rows { inputs: numbers(rows * SIZES[0], salt), labels }
}

fn fetched(gpu: &Gpu, buffer: &CudaSlice<f32>) -> Vec<f32> {
    let mut found = vec![f32::NAN; buffer.len()];
    gpu.download(&buffer.as_view(), &mut found).unwrap();
    found
}

fn parameters(gpu: &Gpu, model: &Mlp) -> CudaSlice<f32> {
    let mut parameters = gpu.zeros::<f32>(model.parameters()).unwrap();
    gpu.upload(&model.init(5).unwrap(), &mut parameters.as_view_mut()).unwrap();
    parameters
}

#[test]
fn replayed_launches_give_the_same_bits_for_every_batch_shape_and_buffer() {
    let (gpu, model) = (gpu(), Mlp::new(&SIZES));
    let (mut pass, mut plain) = (model.on_gpu().unwrap(), model.on_gpu().unwrap());
    let parameters = parameters(&gpu, &model);
    let buffer = || gpu.zeros::<f32>(model.parameters() + 1).unwrap();
    let (mut wanted, mut results, mut graphs) = (buffer(), [buffer(), buffer()], Graphs::default());
    let mut asked = 0;
    let mut steps = |rounds: u64, rows: &[usize]| {
        asked = 0;
        for round in 0..rounds {
            for (place, &rows) in rows.iter().enumerate() {
                let batch = batch(rows, round * 10 + place as u64);
                let result = &mut results[place % 2];
                let shape = pass.load(&gpu, &batch).unwrap();
                let launches = |result: &mut CudaSlice<f32>, done: &mut Done<'_>| {
                    asked += 1;
                    pass.gradient(&gpu, &parameters, result, done)
                };
                graphs.run(&gpu, shape, result, launches, None).unwrap();
                plain.load(&gpu, &batch).unwrap();
                plain.gradient(&gpu, &parameters, &mut wanted, &mut |_| Ok(())).unwrap();
                assert_eq!(fetched(&gpu, result), fetched(&gpu, &wanted), "round {round}, {rows} rows");
            }
        }
        asked
    };
    steps(4, &[8, 3, 8, 7, 8]);
    // Now there is a graph for each number of rows.
    assert_eq!(steps(3, &[8, 3, 8, 7, 8]), 0);
    // More rows need larger buffers, and the earlier graphs name the old ones.
    assert!(steps(5, &[70, 8]) > 4);
    assert_eq!(steps(2, &[70, 8]), 0);
    // Other memory was allocated, and it is unknown whether the graph uses it.
    gpu.zeros::<f32>(10).unwrap();
    assert_eq!(steps(2, &[70, 8]), 4);
    assert_eq!(steps(2, &[70, 8]), 0);
}

#[test]
fn what_is_reported_as_final_is_final_between_the_parts_of_a_graph() {
    let (gpu, model) = (gpu(), Mlp::new(&SIZES));
    let (mut pass, mut plain) = (model.on_gpu().unwrap(), model.on_gpu().unwrap());
    let parameters = parameters(&gpu, &model);
    let buffer = || gpu.zeros::<f32>(model.parameters() + 1).unwrap();
    let (mut wanted, mut result, mut ends, mut graphs) = (buffer(), buffer(), buffer(), Graphs::default());
    let layers: Vec<usize> = (1..SIZES.len()).map(|layer| (SIZES[layer - 1] + 1) * SIZES[layer]).collect();
    let mut asked = 0;
    for round in 0..6 {
        let shape = pass.load(&gpu, &batch(8, round)).unwrap();
        plain.load(&gpu, &batch(8, round)).unwrap();
        plain.gradient(&gpu, &parameters, &mut wanted, &mut |_| Ok(())).unwrap();
        // Given a callback that takes away what is final
        let mut told = Vec::new();
        let done = &mut |mut end: CudaViewMut<'_, f32>| {
            let (from, fresh) = (wanted.len() - end.len(), end.len() - told.last().unwrap_or(&0));
            told.push(end.len());
            let mut fresh = end.slice_mut(..fresh);
            gpu.copy(&fresh.as_view(), &mut ends.slice_mut(from..from + fresh.len()))?;
            gpu.clear(&mut fresh)
        };
        let launches = |result: &mut CudaSlice<f32>, done: &mut Done<'_>| {
            asked += 1;
            pass.gradient(&gpu, &parameters, result, done)
        };
        graphs.run(&gpu, shape, &mut result, launches, Some(done)).unwrap();
        // Then nothing later changes it, nor what was taken.
        assert_eq!(told, [layers[2] + 1, layers[1] + layers[2] + 1], "all but the first layer");
        let (ends, result, wanted) = (fetched(&gpu, &ends), fetched(&gpu, &result), fetched(&gpu, &wanted));
        assert_eq!(ends[layers[0]..], wanted[layers[0]..], "round {round}");
        assert!(result[..layers[0]] == wanted[..layers[0]] && result[layers[0]..].iter().all(|&number| number == 0.0));
    }
    assert_eq!(asked, 3, "to have memory, to be warm and to be captured; later runs replay it");
}

#[test]
fn more_shapes_than_are_kept_start_over() {
    let (gpu, given) = (gpu(), numbers(80, 1));
    let (all, mut sum, mut graphs) = (on(&gpu, &given), gpu.zeros::<f32>(1).unwrap(), Graphs::default());
    for round in 0..4 {
        for count in 1..80 {
            let from = all.view();
            let launches =
                |sum: &mut CudaSlice<f32>, _: &mut Done<'_>| gpu.sum_all(&mut sum.as_view_mut(), &from.slice(..count));
            graphs.run(&gpu, count as u64, &mut sum, launches, None).unwrap();
            let wanted: f64 = given[..count].iter().map(|&number| f64::from(number)).sum();
            assert_near(&fetched(&gpu, &sum), &[wanted], 1e-5, &format!("round {round}, {count} numbers"));
        }
    }
}

#[test]
fn launches_that_cannot_be_captured_are_made_one_by_one() {
    let gpu = gpu();
    warnings::are_expected();
    let (mut graphs, mut room, mut asked) = (Graphs::default(), Buffer::default(), 0);
    let mut result = gpu.zeros(1).unwrap();
    for salt in 0..5 {
        // A copy from the host is no launch.
        let given = numbers(2, salt);
        let upload = |_: &mut CudaSlice<f32>, _: &mut Done<'_>| {
            asked += 1;
            gpu.upload(&given, &mut room.fit(&gpu, 2)?)
        };
        graphs.run(&gpu, 0, &mut result, upload, None).unwrap();
        assert_eq!(back(&gpu, &room), given);
    }
    // In the third round the launches were asked for twice: once to capture them, and once without a graph.
    assert_eq!(asked, 6);
}
