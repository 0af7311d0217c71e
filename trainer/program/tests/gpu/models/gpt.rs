//! The GPT's whole gradient, compared with the host's.

use elastic_cuda::{CudaViewMut, Precision};
use elastic_models::{Gpt, gpt::Size, gpt::Tokens};
use elastic_trainer::Model;
use elastic_trainer::random::unit;

use crate::buffers::{assert_near, gpu, numbers};
use crate::double::and_on_a_gpu;

fn batch(gpt: &Gpt, sequences: usize, time: usize) -> Tokens {
    let token = |key: u64| (unit(key) * gpt.size().vocabulary as f32) as u32;
    let count = (sequences * time) as u64;
    Tokens::new(time, (0..count).map(token).collect(), (0..count).map(|i| token(1 << 40 | i)).collect())
}

/// The difference is small compared with the whole, and no number is NaN.
fn assert_close(found: &[f32], wanted: &[f64], allowed: f64, what: &str) {
    let norm = |numbers: &mut dyn Iterator<Item = f64>| numbers.map(|number| number * number).sum::<f64>().sqrt();
    let off = norm(&mut found.iter().zip(wanted).map(|(&found, &wanted)| f64::from(found) - wanted));
    let share = off / norm(&mut wanted.iter().copied());
    assert!(share <= allowed, "{what}: off by {share:e} of its norm");
}

#[test]
fn a_gpts_gradient_is_the_hosts() {
    let gpu = gpu();
    let size = |vocabulary, context, layers, heads, width| Size { vocabulary, context, layers, heads, width };
    let small = [
        // Rows that cannot be read by fours; larger, smaller and larger again, since the buffers are kept.
        (size(11, 5, 2, 2, 6), vec![(2, 5), (1, 3), (4, 5)]),
        // More than a tile of attention, in several blocks
        (size(37, 70, 3, 2, 16), vec![(2, 67)]),
        (size(7, 40, 1, 1, 128), vec![(1, 40)]),
        // More rows than are scored at once
        (size(5, 50, 1, 1, 4), vec![(42, 50)]),
    ];
    // One block of GPT-2. With twelve the host takes too long.
    for (size, batches) in and_on_a_gpu(small, [(size(50_257, 1024, 1, 12, 768), vec![(2, 1024)])]) {
        let gpt = Gpt::new(size);
        let mut pass = gpt.on_gpu().unwrap();
        let count = gpt.parameters();
        // Far from the first parameters, so that every part matters; not so far that sums over wide rows grow.
        let spread = 0.4 * (16.0 / size.width as f32).min(1.0);
        let first: Vec<f32> =
            gpt.init(5).unwrap().iter().zip(numbers(count, 30)).map(|(init, more)| init + spread * more).collect();
        let mut parameters = gpu.zeros::<f32>(count).unwrap();
        gpu.upload(&first, &mut parameters.as_view_mut()).unwrap();
        for (sequences, time) in batches {
            let batch = batch(&gpt, sequences, time);
            let mut found = || {
                // NaN shows that all of it is overwritten.
                let mut gradient = gpu.zeros::<f32>(count + 1).unwrap();
                gpu.upload(&vec![f32::NAN; count + 1], &mut gradient.as_view_mut()).unwrap();
                pass.load(&gpu, &batch).unwrap();
                // The callback takes away what is final at once.
                let (mut taken, mut from) = (gpu.zeros::<f32>(count + 1).unwrap(), count + 1);
                let take = &mut |mut end: CudaViewMut<'_, f32>| {
                    let fresh = count + 1 - end.len()..std::mem::replace(&mut from, count + 1 - end.len());
                    let mut part = end.slice_mut(..fresh.len());
                    gpu.copy(&part.as_view(), &mut taken.slice_mut(fresh))?;
                    gpu.clear(&mut part)
                };
                pass.gradient(&gpu, &parameters, &mut gradient, take).unwrap();
                assert_eq!(from, (size.vocabulary + size.context) * size.width, "all but the embeddings");
                let mut found = vec![0.0; count + 1];
                gpu.download(&gradient.as_view(), &mut found).unwrap();
                assert!(found[from..].iter().all(|&number| number == 0.0), "it is left alone");
                gpu.download(&taken.slice(from..), &mut found[from..]).unwrap();
                found
            };
            let (once, again) = (found(), found());
            assert_eq!(once, again, "{size:?}, {sequences}×{time}, again");
            let mut wanted = vec![0.0; count];
            let loss = gpt.pass(&first, &batch, &mut Default::default(), &mut wanted, &mut |_| ());
            let wanted: Vec<f64> = wanted.iter().chain([&loss]).map(|&number| f64::from(number)).collect();
            for tensor in gpt.tensors() {
                let what = format!("{size:?}, {sequences}×{time}, {}", tensor.name);
                let (found, wanted) = (&once[tensor.range.clone()], &wanted[tensor.range.clone()]);
                // Both sum over thousands of tokens in f32.
                if size.width > 512 {
                    assert_close(found, wanted, 1e-4, &what)
                } else {
                    assert_near(found, wanted, 1e-4, &what)
                }
            }
            assert_near(&once[count..], &wanted[count..], 1e-5, "loss");
        }
    }
}

#[test]
fn a_gpts_gradient_in_bf16_is_near_the_hosts() {
    let gpu = gpu().multiplying_in(Precision::Bf16);
    let size = |vocabulary, context, layers, heads, width| Size { vocabulary, context, layers, heads, width };
    let small = [
        // Larger, smaller and larger again, since the buffers are kept; and a vocabulary that needs no zeros.
        (size(11, 5, 2, 2, 8), vec![(2, 5), (1, 3), (4, 5)]),
        (size(128, 70, 3, 2, 16), vec![(2, 67)]),
        (size(7, 40, 1, 1, 128), vec![(1, 40)]),
        // Narrow rows that begin anywhere, and more of them than are scored at once
        (size(5, 50, 1, 1, 6), vec![(42, 50)]),
    ];
    for (size, batches) in and_on_a_gpu(small, [(size(50_257, 1024, 1, 12, 768), vec![(2, 1024)])]) {
        let gpt = Gpt::new(size);
        let mut pass = gpt.on_gpu().unwrap();
        let count = gpt.parameters();
        let spread = 0.2 * (16.0 / size.width as f32).min(1.0);
        let first: Vec<f32> =
            gpt.init(5).unwrap().iter().zip(numbers(count, 30)).map(|(init, more)| init + spread * more).collect();
        let mut parameters = gpu.zeros::<f32>(count).unwrap();
        gpu.upload(&first, &mut parameters.as_view_mut()).unwrap();
        for (sequences, time) in batches {
            let batch = batch(&gpt, sequences, time);
            let mut found = || {
                let mut gradient = gpu.zeros::<f32>(count + 1).unwrap();
                gpu.upload(&vec![f32::NAN; count + 1], &mut gradient.as_view_mut()).unwrap();
                pass.load(&gpu, &batch).unwrap();
                pass.gradient(&gpu, &parameters, &mut gradient, &mut |_| Ok(())).unwrap();
                let mut found = vec![0.0; count + 1];
                gpu.download(&gradient.as_view(), &mut found).unwrap();
                found
            };
            let (once, again) = (found(), found());
            assert_eq!(once, again, "{size:?}, {sequences}×{time}, again");
            let mut wanted = vec![0.0; count];
            let loss = gpt.pass(&first, &batch, &mut Default::default(), &mut wanted, &mut |_| ());
            let wanted: Vec<f64> = wanted.iter().chain([&loss]).map(|&number| f64::from(number)).collect();
            for tensor in gpt.tensors() {
                let what = format!("{size:?}, {sequences}×{time}, {}", tensor.name);
                assert_close(&once[tensor.range.clone()], &wanted[tensor.range.clone()], 0.03, &what);
            }
            assert_near(&once[count..], &wanted[count..], 2e-3, "loss");
        }
    }
}

#[test]
fn a_gpt_whose_heads_are_too_wide_stays_on_cpus() {
    let gpt = Gpt::new(Size { vocabulary: 4, context: 2, layers: 1, heads: 2, width: 258 });
    let reason = gpt.on_gpu().map(|_| ()).unwrap_err().to_string();
    assert!(reason.contains("computes on CPUs alone: its heads have 129 columns"), "{reason}");
}
