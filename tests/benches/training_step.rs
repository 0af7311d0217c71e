//! The trainer's step on CPUs beside PyTorch's with fused AdamW, in turns in one run, on as many threads. Run by
//! `make bench`; without PyTorch, ours alone.

#![allow(clippy::print_stdout, clippy::unwrap_used, clippy::expect_used)]

mod step;

use std::io::{BufRead, BufReader, Write};
use std::process::{ChildStdin, ChildStdout};

use anyhow::{Context, Result};
use elastic_models::{Gpt, Mlp, gpt::Size};
use elastic_tests::prelude::*;
use elastic_trainer::Model;
use step::{GPTS, MLP, Run, Shards};

const BLOCKS: usize = 9;
const BLOCK_MS: f64 = 600.0;

fn main() -> Result<()> {
    let torch = Torch::find();
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    println!("a training step: milliseconds, median (min–max) of {BLOCKS} interleaved blocks");
    for threads in [1, 2].into_iter().filter(|&threads| threads <= cores) {
        let batch = 128;
        let words = std::iter::once(batch).chain(MLP).map(|number| number.to_string());
        let run = Run::new(threads, Mlp::new(&MLP), Shards::mlp(batch / threads));
        compare("MLP 0.7 M", threads, run, torch.as_ref(), std::iter::once("mlp".into()).chain(words))?;
        for (name, size, batch) in GPTS {
            let Size { vocabulary, context, layers, heads, width } = size;
            let words = [batch, context, vocabulary, context, layers, heads, width].map(|number| number.to_string());
            let run = Run::new(threads, Gpt::new(size), Shards::gpt(size, batch / threads));
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
    let (ours, torch) = (Spread::of(&ours), (!torch.is_empty()).then(|| Spread::of(&torch)));
    print!("{name}, {threads} threads   here {ours:.1}");
    if let Some(torch) = torch {
        print!("   PyTorch {torch:.1}   ratio {:.2}", ours.median / torch.median);
    }
    println!();
    Ok(())
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
