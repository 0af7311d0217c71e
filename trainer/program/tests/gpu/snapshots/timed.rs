//! What snapshots cost on a real GPU, by `make gpu`. On the double this shows that it works; its times mean nothing.

use std::thread;
use std::time::Instant;

use elastic_cuda::{CudaSlice, Decays, Done, Gpu, GpuState, Graphs, Pass};
use elastic_models::{Gpt, gpt::Size, gpt::Tokens};
use elastic_trainer::model::{AdamW, Model, Stride};

use crate::buffers::gpu;
use crate::double::is_real;

/// A training of a GPT, one batch again and again.
struct Training<'a> {
    gpu: &'a Gpu,
    decays: Decays,
    pass: Box<dyn Pass<Tokens> + 'a>,
    graphs: Graphs,
    state: GpuState,
    gradient: CudaSlice<f32>,
    batch: Tokens,
    /// What a thread copies snapshots to.
    frame: Vec<f32>,
    steps: u64,
}

impl Training<'_> {
    /// Milliseconds of a step, with a snapshot of the state before it or without.
    fn step(&mut self, with_snapshot: bool) -> f64 {
        let Training { gpu, decays, pass, graphs, state, gradient, batch, frame, steps } = self;
        *steps += 1;
        thread::scope(|scope| {
            let begun = Instant::now();
            if with_snapshot {
                let copy = state.snapshot(gpu).unwrap().unwrap();
                scope.spawn(move || frame.copy_from_slice(copy.numbers().unwrap()));
            }
            let shape = pass.load(gpu, batch).unwrap();
            let [parameters, ..] = state.parts();
            let launches = |gradient: &mut _, done: &mut Done<'_>| pass.gradient(gpu, parameters, gradient, done);
            graphs.run(gpu, shape, gradient, launches, None).unwrap();
            let rule = AdamW::new(0.1);
            let stride = Stride { step: *steps, rate: 1e-4, mean: 1e-4, scale: 1e-4 };
            rule.step_on_gpu(gpu, &stride, decays, state.parts_mut(gpu).unwrap(), gradient).unwrap();
            gpu.wait().unwrap();
            // The copying thread may take longer.
            begun.elapsed().as_secs_f64() * 1e3
        })
    }
}

fn sorted(mut all: Vec<f64>) -> Vec<f64> {
    all.sort_by(f64::total_cmp);
    all
}

#[test]
fn snapshots_are_timed_if_this_is_a_gpu() {
    let size = if is_real() { Size::GPT2 } else { Size { vocabulary: 5, context: 8, layers: 1, heads: 1, width: 4 } };
    let (windows, turns) = if is_real() { (8, 100) } else { (1, 3) };
    let (gpu, gpt) = (gpu(), Gpt::new(size));
    let count = gpt.parameters();
    let mut state = GpuState::new(&gpu, count).unwrap();
    let mut first = gpt.init(1).unwrap();
    first.resize(3 * count, 0.0);
    state.upload(&gpu, &first).unwrap();
    // The first snapshot allocates the memory.
    drop(state.snapshot(&gpu).unwrap());
    let tokens = || (0..(windows * size.context) as u32).map(|place| place % size.vocabulary as u32).collect();
    let mut training = Training {
        gpu: &gpu,
        decays: Decays::new(&gpu, gpt.tensors().iter().map(|tensor| (tensor.range.clone(), tensor.shape.len() > 1)))
            .unwrap(),
        pass: gpt.on_gpu().unwrap(),
        graphs: Graphs::default(),
        state,
        gradient: gpu.zeros(count + 1).unwrap(),
        batch: Tokens::new(size.context, tokens(), tokens()),
        frame: first,
        steps: 0,
    };
    let bytes = size_of_val(&training.frame[..]) as f64;
    let rates = sorted(
        (0..turns)
            .map(|_| {
                let begun = Instant::now();
                training.state.snapshot(&gpu).unwrap().unwrap().numbers().unwrap();
                bytes / 1e9 / begun.elapsed().as_secs_f64()
            })
            .collect(),
    );
    // Steps until graphs are captured
    (0..4).for_each(|_| _ = training.step(false));
    let (mut alone, mut with) = (Vec::new(), Vec::new());
    for _ in 0..turns {
        alone.push(training.step(false));
        with.push(training.step(true));
    }
    let alone = sorted(alone);
    let usual = alone[turns / 2];
    let stalls = sorted(with.into_iter().map(|step| step - usual).collect());
    let late = (turns - 1) * 99 / 100;
    if !is_real() {
        return eprintln!("snapshots: not measured, this is no GPU");
    }
    println!("a state of {:.2} GB to pinned memory: {:.1} GB/s, median of {turns}", bytes / 1e9, rates[turns / 2]);
    println!(
        "a step of {usual:.1} ms (99th percentile {:.1}) with a snapshot takes longer by: median {:.2} ms, \
         99th percentile {:.2} ms, of {turns}",
        alone[late],
        stalls[turns / 2],
        stalls[late]
    );
}
