//! A model's whole pass, and a step of AdamW, compared with the same on the host. On the double of the driver, or, by
//! `make gpu`, on a real GPU.

mod gpt;

use elastic_cuda::Decays;
use elastic_models::{Mlp, Rows};
use elastic_trainer::model::{AdamW, Model, Moved, Optimizer, Stride, Tensor};

use crate::buffers::{assert_near, gpu, numbers};

#[test]
fn adamw_is_the_hosts() {
    let gpu = gpu();
    // One that does not decay at both ends, two that do beside each other, and borders that are no multiple of four.
    let pieces =
        [("a", vec![3]), ("w", vec![30, 20]), ("v", vec![2, 3]), ("b", vec![30]), ("u", vec![1, 5]), ("c", vec![2])];
    let tensors = Tensor::sequence(pieces);
    let (count, rule) = (646, AdamW::new(0.1));
    let decays = tensors.iter().map(|tensor| (tensor.range.clone(), tensor.shape.len() > 1));
    let decays = Decays::new(&gpu, decays).unwrap();
    let mut host = [numbers(count, 9), vec![0.0; count], vec![0.0; count]];
    let mut device = [&host[0], &host[1], &host[2]].map(|numbers| {
        let mut buffer = gpu.zeros::<f32>(count).unwrap();
        gpu.upload(numbers, &mut buffer.as_view_mut()).unwrap();
        buffer
    });
    for step in 1..=5 {
        // One number more than there are parameters: the loss.
        let gradient = numbers(count + 1, 10 + step);
        let mut room = gpu.zeros::<f32>(count + 1).unwrap();
        gpu.upload(&gradient, &mut room.as_view_mut()).unwrap();
        let stride = Stride { step, rate: 0.01, mean: 0.5, scale: 0.5 };
        rule.step_on_gpu(&gpu, &stride, &decays, &mut device, &room).unwrap();
        let [parameters, mean, square] = &mut host;
        let gradient = &gradient[..count];
        let moved = Moved { first: 0, parameters, kept: vec![mean, square], gradient };
        Optimizer::AdamW(rule).step(&stride, &tensors, moved);
    }
    for (device, host) in device.iter().zip(&host) {
        let mut found = vec![0.0; count];
        gpu.download(&device.as_view(), &mut found).unwrap();
        assert_near(&found, &host.iter().map(|&number| f64::from(number)).collect::<Vec<_>>(), 1e-6, "state");
    }
}

#[test]
fn a_perceptrons_gradient_is_the_hosts() {
    let gpu = gpu();
    for sizes in [vec![5, 3], vec![64, 128, 10], vec![20, 70, 33, 4]] {
        let model = Mlp::new(&sizes);
        let mut pass = model.on_gpu().unwrap();
        let count = model.parameters();
        let mut parameters = gpu.zeros::<f32>(count).unwrap();
        let first: Vec<f32> =
            model.init(3).unwrap().iter().zip(numbers(count, 20)).map(|(init, more)| init + 0.1 * more).collect();
        gpu.upload(&first, &mut parameters.as_view_mut()).unwrap();
        // Larger, smaller and larger again, since the buffers are kept.
        for rows in [8, 3, 70] {
            let labels = (0..rows).map(|row| (row % sizes[sizes.len() - 1]) as u8).collect();
            let batch = Rows { inputs: numbers(rows * sizes[0], 21), labels };
            let mut gradient = gpu.zeros::<f32>(count + 1).unwrap();
            assert_eq!(pass.load(&gpu, &batch).unwrap(), rows as u64);
            pass.gradient(&gpu, &parameters, &mut gradient, &mut |_| Ok(())).unwrap();
            let mut found = vec![f32::NAN; count + 1];
            gpu.download(&gradient.as_view(), &mut found).unwrap();
            let mut wanted = vec![0.0; count];
            let loss = model.pass(&first, &batch, &mut Default::default(), &mut wanted, &mut |_| ());
            let wanted: Vec<f64> = wanted.iter().chain([&loss]).map(|&number| f64::from(number)).collect();
            assert_near(&found, &wanted, 1e-4, &format!("{sizes:?}, {rows} samples"));
        }
    }
}
