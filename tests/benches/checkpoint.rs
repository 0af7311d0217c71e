//! What a save costs training, and how fast it gets to disk, beside `dd oflag=direct` of the same size in turns. In the
//! folder that `ELASTIC_BENCH_DIR` names, or in the build's. Run by `make bench`.

#![allow(clippy::print_stdout)]

use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use elastic_trainer::checkpoint::Checkpoints;
use elastic_trainer::checkpoint::disk::Host;
use elastic_trainer::checkpoint::manifest::{Entry, Position};
use elastic_trainer::checkpoint::retention::Retention;
use elastic_trainer::checkpoint::snapshot::Snapshot;
use elastic_trainer::checkpoint::writer::{Offer, Writer};
use elastic_trainer::model::{AdamW, Mlp, Model};

const SAVES: u64 = 100;
/// Writes beside dd's.
const RACES: u64 = 15;
const LONG: Duration = Duration::from_secs(120);

fn main() -> Result<()> {
    let parent =
        std::env::var_os("ELASTIC_BENCH_DIR").map_or_else(|| env!("CARGO_TARGET_TMPDIR").into(), PathBuf::from);
    let folder = tempfile::tempdir_in(&parent).with_context(|| format!("use {}", parent.display()))?;
    let mut training = Training::new();
    let bytes = size_of_val(&training.flat[..]);
    let checkpoints = Checkpoints::new(Host, &folder.path().join("checkpoints"));
    let retention = Retention { keep: NonZeroUsize::MIN, every: None };
    let writer = Writer::start(checkpoints, retention, &training.entries, LONG)?;
    writer.wait(LONG);
    println!("a state of {:.0} MB, saved {SAVES} times to {}; milliseconds", bytes as f64 / 1e6, parent.display());

    // Every other save comes while the one before is still being written.
    let (mut idle, mut busy, mut quiet, mut writing) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    for turn in 0..SAVES {
        quiet.push(training.step());
        let overlaps = turn % 2 == 1;
        if overlaps {
            idle.push(training.save(&writer)?);
            writing.push(training.step());
            busy.push(training.save(&writer)?);
            settle(&writer, 2)?;
        } else {
            idle.push(training.save(&writer)?);
            writing.push(training.step());
            settle(&writer, 1)?;
        }
    }
    tell("training waits for a save, disk idle", idle);
    tell("training waits for a save, the one before being written", busy);
    tell("an optimizer step, nothing being written", quiet);
    tell("an optimizer step right after a save", writing);

    let (mut ours, mut theirs) = (Vec::new(), Vec::new());
    for _ in 0..RACES {
        training.step();
        training.save(&writer)?;
        ours.push(bytes as f64 / 1e6 / settle(&writer, 1)?);
        theirs.push(dd(&folder.path().join("dd"), bytes)?);
    }
    let (ours, theirs) = (sorted(ours), sorted(theirs));
    let middle = ours.len() / 2;
    for (name, all) in [("checksummed, durable, renamed", &ours), ("dd oflag=direct conv=fsync", &theirs)] {
        println!("{name}: {:.0} ({:.0}–{:.0}) MB/s", all[middle], all[0], all[all.len() - 1]);
    }
    println!("ratio of the medians {:.2}", ours[middle] / theirs[middle]);
    Ok(())
}

/// A state that an optimizer moves.
struct Training {
    model: Mlp,
    entries: Vec<Entry>,
    rule: AdamW,
    /// Parameters, means, squares.
    flat: Vec<f32>,
    gradient: Vec<f32>,
    step: u64,
}

impl Training {
    fn new() -> Training {
        let model = Mlp::new(&[2048, 2816, 1024, 10]);
        let mut flat = model.init(1);
        let gradient = vec![1e-3; flat.len()];
        flat.resize(3 * gradient.len(), 0.0);
        let entries = elastic_trainer::state::State::entries(model.tensors());
        Training { model, entries, rule: AdamW::new(1e-4, 0.1), flat, gradient, step: 0 }
    }

    /// Milliseconds of an optimizer step.
    fn step(&mut self) -> f64 {
        let begun = Instant::now();
        self.step += 1;
        let (parameters, rest) = self.flat.split_at_mut(self.gradient.len());
        let (mean, square) = rest.split_at_mut(self.gradient.len());
        self.rule.step(self.step, self.model.tensors(), parameters, mean, square, &self.gradient, 1.0);
        begun.elapsed().as_secs_f64() * 1e3
    }

    /// Milliseconds that training waits.
    fn save(&self, writer: &Writer) -> Result<f64> {
        let snapshot = Snapshot {
            job: "bench",
            round: 0,
            world_size: 1,
            step: self.step,
            settings: "",
            data: Position::default(),
            tensors: &self.entries,
            state: &self.flat,
        };
        let begun = Instant::now();
        let offer = writer.offer(&snapshot);
        let took = begun.elapsed().as_secs_f64() * 1e3;
        ensure!(offer == Offer::Taken, "{offer:?}: the writer had not ended");
        Ok(took)
    }
}

/// Waits until so many saves are durable, and the last one's predecessors are gone. Seconds to the first of these.
fn settle(writer: &Writer, saves: usize) -> Result<f64> {
    let begun = Instant::now();
    let mut took = 0.0;
    for _ in 0..saves {
        let checkpoint = loop {
            match writer.ended() {
                Some(ended) => break ended?,
                None if begun.elapsed() > LONG => bail!("a save takes too long"),
                None => writer.wait(LONG),
            }
        };
        took = begun.elapsed().as_secs_f64();
        writer.prune(checkpoint);
    }
    while !writer.is_idle() {
        writer.wait(LONG);
    }
    Ok(took)
}

/// MB a second.
fn dd(file: &Path, bytes: usize) -> Result<f64> {
    let block = 8 << 20;
    let count = bytes.div_ceil(block);
    let begun = Instant::now();
    let status = Command::new("dd")
        .args(["if=/dev/zero", "oflag=direct", "conv=fsync", "status=none"])
        .args([format!("of={}", file.display()), format!("bs={block}"), format!("count={count}")])
        .stderr(Stdio::inherit())
        .status()
        .context("start dd")?;
    let rate = (count * block) as f64 / 1e6 / begun.elapsed().as_secs_f64();
    ensure!(status.success(), "dd failed: {status}");
    std::fs::remove_file(file)?;
    Ok(rate)
}

fn sorted(mut all: Vec<f64>) -> Vec<f64> {
    all.sort_by(f64::total_cmp);
    all
}

fn tell(name: &str, all: Vec<f64>) {
    let all = sorted(all);
    let at = |share: f64| all[((all.len() - 1) as f64 * share).round() as usize];
    println!("{name}: median {:.1}, 99th percentile {:.1}, most {:.1}, of {}", at(0.5), at(0.99), at(1.0), all.len());
}
