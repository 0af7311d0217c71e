//! The trainer's step on CPUs beside PyTorch's with fused AdamW, in turns in one run, on as many threads. Run by
//! `make bench`; without PyTorch, ours alone.

#![allow(clippy::print_stdout, clippy::unwrap_used, clippy::expect_used)]

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Stdio};
use std::time::Instant;

use anyhow::{Context, Result};
use elastic_tests::torch::{self, Torch};
use elastic_trainer::model::gpt::{Size, Tokens};
use elastic_trainer::model::{AdamW, Gpt, Mlp, Model, Workspace};
use elastic_trainer::random::unit;

const BLOCKS: usize = 9;
/// What one block takes, about.
const BLOCK_MS: f64 = 600.0;
const MLP: [usize; 4] = [784, 512, 512, 10];
const GPTS: [(&str, Size, usize); 2] = [
    ("GPT 0.9 M", Size { vocabulary: 512, context: 64, layers: 4, heads: 4, width: 128 }, 16),
    ("GPT 4.9 M", Size { vocabulary: 512, context: 128, layers: 6, heads: 8, width: 256 }, 8),
];

fn main() -> Result<()> {
    let torch = Torch::find();
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    println!("a training step: milliseconds, median (min–max) of {BLOCKS} interleaved blocks");
    for threads in [1, 2].into_iter().filter(|&threads| threads <= cores) {
        let batch = 128;
        let words = std::iter::once(batch).chain(MLP).map(|number| number.to_string());
        let run = Run::new(threads, Mlp::new(&MLP), |model, shard| Shard::mlp(model, batch / threads, shard));
        compare("MLP 0.7 M", threads, run, torch.as_ref(), std::iter::once("mlp".into()).chain(words))?;
        for (name, size, batch) in GPTS {
            let Size { vocabulary, context, layers, heads, width } = size;
            let words = [batch, context, vocabulary, context, layers, heads, width].map(|number| number.to_string());
            let run = Run::new(threads, Gpt::new(size), |model, shard| Shard::gpt(model, batch / threads, shard));
            compare(name, threads, run, torch.as_ref(), std::iter::once("gpt".into()).chain(words))?;
        }
    }
    Ok(())
}

fn compare<M: Model>(
    name: &str,
    threads: usize,
    mut run: Run<M>,
    torch: Option<&Torch>,
    words: impl Iterator<Item = String>,
) -> Result<()> {
    let mut theirs = torch.map(|torch| Theirs::start(torch, threads, words)).transpose()?;
    run.time(3);
    let steps = ((BLOCK_MS / run.time(3)) as usize).max(3);
    let (mut ours, mut torch) = (Vec::new(), Vec::new());
    for _ in 0..BLOCKS {
        ours.push(run.time(steps));
        if let Some(theirs) = &mut theirs {
            torch.push(theirs.time(steps)?);
        }
    }
    print!("{name}, {threads} threads   here {}", spread(&mut ours));
    match torch.is_empty() {
        true => println!(),
        false => println!("   PyTorch {}   ratio {:.2}", spread(&mut torch), ours[BLOCKS / 2] / torch[BLOCKS / 2]),
    }
    Ok(())
}

fn spread(all: &mut [f64]) -> String {
    all.sort_by(f64::total_cmp);
    format!("{:.1} ({:.1}–{:.1})", all[all.len() / 2], all[0], all[all.len() - 1])
}

/// A thread's samples and its gradient.
struct Shard<B> {
    batch: B,
    gradient: Vec<f32>,
}

impl Shard<Workspace> {
    fn mlp(model: &Mlp, samples: usize, shard: usize) -> Shard<Workspace> {
        let key = (shard as u64) << 40;
        let inputs = (0..samples * MLP[0]).map(|i| unit(key | i as u64)).collect();
        let batch = Workspace::new(inputs, (0..samples).map(|i| (i % MLP[3]) as u8).collect());
        Shard { batch, gradient: vec![0.0; model.parameters()] }
    }
}

impl Shard<Tokens> {
    fn gpt(model: &Gpt, sequences: usize, shard: usize) -> Shard<Tokens> {
        let Size { vocabulary, context, .. } = model.size();
        let tokens = |salt: usize| -> Vec<u32> {
            let key = ((2 * shard + salt) as u64) << 40;
            (0..sequences * context).map(|i| (unit(key | i as u64) * vocabulary as f32) as u32).collect()
        };
        let batch = Tokens::new(context, tokens(0), tokens(1));
        Shard { batch, gradient: vec![0.0; model.parameters()] }
    }
}

/// Our side: a thread for each shard, the sum, and the step.
struct Run<M: Model> {
    model: M,
    rule: AdamW,
    parameters: Vec<f32>,
    mean: Vec<f32>,
    square: Vec<f32>,
    shards: Vec<Shard<M::Batch>>,
    steps: u64,
}

impl<M: Model> Run<M> {
    fn new(threads: usize, model: M, shard: impl Fn(&M, usize) -> Shard<M::Batch>) -> Run<M> {
        let parameters = model.init(1);
        let zeros = vec![0.0; parameters.len()];
        let shards = (0..threads).map(|number| shard(&model, number)).collect();
        Run { rule: AdamW::new(1e-4, 0.1), mean: zeros.clone(), square: zeros, parameters, shards, model, steps: 0 }
    }

    /// Milliseconds of a step.
    fn time(&mut self, steps: usize) -> f64 {
        let begun = Instant::now();
        (0..steps).for_each(|_| self.step());
        begun.elapsed().as_secs_f64() * 1e3 / steps as f64
    }

    fn step(&mut self) {
        let Run { model, parameters, shards, .. } = self;
        std::thread::scope(|scope| {
            let (first, others) = shards.split_first_mut().unwrap();
            let (model, parameters) = (&*model, &*parameters);
            for shard in others {
                scope.spawn(move || model.gradient(parameters, &mut shard.batch, &mut shard.gradient));
            }
            model.gradient(parameters, &mut first.batch, &mut first.gradient);
        });
        let (first, others) = shards.split_first_mut().unwrap();
        for other in others {
            first.gradient.iter_mut().zip(&other.gradient).for_each(|(sum, more)| *sum += more);
        }
        self.steps += 1;
        let (gradient, scale) = (&shards[0].gradient, 1e-3);
        let tensors = self.model.tensors();
        self.rule.step(self.steps, tensors, parameters, &mut self.mean, &mut self.square, gradient, scale);
    }
}

/// PyTorch's side, in a process that sleeps in between.
struct Theirs(Child, Option<ChildStdin>, BufReader<ChildStdout>);

impl Theirs {
    fn start(torch: &Torch, threads: usize, words: impl Iterator<Item = String>) -> Result<Theirs> {
        let mut command = torch.command();
        command.arg(torch::script("bench_step.py")).arg(threads.to_string()).args(words);
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().context("start Python")?;
        let (stdin, stdout) = (child.stdin.take(), child.stdout.take().expect("a pipe"));
        Ok(Theirs(child, stdin, BufReader::new(stdout)))
    }

    /// Milliseconds of a step.
    fn time(&mut self, steps: usize) -> Result<f64> {
        writeln!(self.1.as_mut().context("its input")?, "{steps}")?;
        let mut line = String::new();
        self.2.read_line(&mut line)?;
        line.trim().parse().context("PyTorch's side has failed")
    }
}

impl Drop for Theirs {
    fn drop(&mut self) {
        // The end of its input ends it.
        drop(self.1.take());
        let _ = self.0.wait();
    }
}
