//! The trainer's all-reduce beside PyTorch's gloo, between processes over loopback, in turns in one run: what else the
//! machine does meanwhile troubles all alike. Run by `make bench`; without PyTorch, ours alone.

#![allow(clippy::print_stdout, clippy::unwrap_used, clippy::expect_used)]

use std::io::{BufRead, BufReader, Write};
use std::process::{ChildStdin, ChildStdout};

use anyhow::{Context, Result};
use elastic_tests::prelude::*;

const RANKS: [usize; 2] = [2, 4];
const BYTES: [usize; 3] = [1024, 1 << 20, 64 << 20];
const REPETITIONS: usize = 15;

fn main() -> Result<()> {
    let torch = Torch::find();
    println!("all-reduce over loopback: milliseconds, median (min–max) of {REPETITIONS} interleaved blocks");
    for ranks in RANKS {
        let ours = Ranks::start(ranks, || {
            let mut command = Command::new(binary("elastic-trainer"));
            command.arg("bench-allreduce");
            command
        })?;
        let gloo = torch.as_ref().map(|torch| {
            Ranks::start(ranks, || {
                let mut command = torch.command();
                // As torchrun and elastic-agent set it for several workers.
                command.arg(torch::script("bench_gloo.py")).env("OMP_NUM_THREADS", "1");
                command
            })
        });
        compare(ranks, ours, gloo.transpose()?)?;
    }
    Ok(())
}

fn compare(ranks: usize, mut ours: Ranks, mut gloo: Option<Ranks>) -> Result<()> {
    for bytes in BYTES {
        let turns = (32_000_000 / bytes).clamp(1, 1000);
        let mut samples: [Vec<f64>; 2] = Default::default();
        for _ in 0..REPETITIONS {
            samples[0].push(ours.time("ordered", bytes, turns)?);
            if let Some(gloo) = &mut gloo {
                samples[1].push(gloo.time("gloo", bytes, turns)?);
            }
        }
        let [ordered, theirs] = samples.map(|samples| Spread::of(&samples));
        print!("{ranks} ranks {bytes:>9} bytes   ordered {ordered:.3}");
        if gloo.is_some() {
            print!("   gloo {theirs:.3}   ordered/gloo {:.2}", ordered.median / theirs.median);
        }
        println!();
    }
    Ok(())
}

/// Processes that take tasks together and sleep in between.
struct Ranks(Vec<(Child, ChildStdin, BufReader<ChildStdout>)>);

impl Ranks {
    fn start(count: usize, command: impl Fn() -> Command) -> Result<Ranks> {
        // Free when asked: good enough for a benchmark.
        let port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
        let start = |rank: usize| {
            let mut child = command()
                .envs([("MASTER_ADDR", "127.0.0.1".to_owned()), ("MASTER_PORT", port.to_string())])
                .envs([("RANK", rank.to_string()), ("WORLD_SIZE", count.to_string())])
                .stdin(Stdio::piped())
                .stdout(Stdio::piped())
                .spawn()
                .context("cannot start a rank")?;
            let (stdin, stdout) = (child.stdin.take().expect("a pipe"), child.stdout.take().expect("a pipe"));
            Ok((child, stdin, BufReader::new(stdout)))
        };
        (0..count).map(start).collect::<Result<_>>().map(Ranks)
    }

    /// Milliseconds of a turn at the slowest rank.
    fn time(&mut self, what: &str, bytes: usize, turns: usize) -> Result<f64> {
        for (_, stdin, _) in &mut self.0 {
            writeln!(stdin, "{what} {bytes} {turns}")?;
        }
        let mut slowest: f64 = 0.0;
        for (_, _, stdout) in &mut self.0 {
            let mut line = String::new();
            stdout.read_line(&mut line)?;
            slowest = slowest.max(line.trim().parse().with_context(|| format!("a rank of {what} failed"))?);
        }
        Ok(slowest)
    }
}

impl Drop for Ranks {
    fn drop(&mut self) {
        // The end of its input ends each, unless it has failed.
        let children: Vec<Child> = self.0.drain(..).map(|(child, _, _)| child).collect();
        for mut child in children {
            let _ = child.wait();
        }
    }
}
