//! What a snapshot and a save cost training, how fast a save gets to disk, and how fast it is loaded and verified,
//! beside `dd` around the page cache of the same size in turns. In the folder that `ELASTIC_BENCH_DIR` names, or in the
//! build's. Run by `make bench`.

#![allow(clippy::print_stdout)]

use elastic_tests::prelude::*;
use std::num::NonZeroUsize;

use anyhow::{Context, Result, bail, ensure};
use elastic_models::{Mlp, Rows, mlp::Workspace};
use elastic_trainer::checkpoint::Checkpoints;
use elastic_trainer::checkpoint::command;
use elastic_trainer::checkpoint::disk::Host;
use elastic_trainer::checkpoint::manifest::{Entry, Position};
use elastic_trainer::checkpoint::retention::Retention;
use elastic_trainer::checkpoint::snapshot::{Layout, SnapshotHeader};
use elastic_trainer::checkpoint::snapshot_slots::SnapshotSlots;
use elastic_trainer::checkpoint::writer::Writer;
use elastic_trainer::model::{AdamW, Model, Moved, Optimizer, Stride};
use rustix::fs::{MemfdFlags, memfd_create};

const SAVES: u64 = 100;
/// Writes beside dd's.
const RACES: u64 = 15;
const BATCH: usize = 64;
const LONG: Duration = Duration::from_secs(120);

fn main() -> Result<()> {
    let parent =
        std::env::var_os("ELASTIC_BENCH_DIR").map_or_else(|| env!("CARGO_TARGET_TMPDIR").into(), PathBuf::from);
    let folder = tempfile::tempdir_in(&parent).with_context(|| format!("use {}", parent.display()))?;
    let mut training = Training::new();
    let bytes = size_of_val(&training.flat[..]);
    let checkpoints = Checkpoints::new(Host, &folder.path().join("checkpoints"));
    let retention = Retention { keep: NonZeroUsize::MIN, every: None };
    let layout = Layout::new("bench", "", &training.entries);
    let memory = File::from(memfd_create("bench", MemfdFlags::CLOEXEC)?);
    memory.set_len(layout.bytes())?;
    let (slots, _) = SnapshotSlots::kept(&layout, &memory)?;
    let writer = Writer::start(checkpoints, retention, slots, LONG)?;
    writer.wait(LONG);
    println!("a state of {:.0} MB, saved {SAVES} times to {}; milliseconds", bytes as f64 / 1e6, parent.display());

    // Each in turn: a step, one during which the state before it is copied, and a copy that training waits for.
    let (mut alone, mut copied, mut waits, mut stands) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    // Every other save comes while the one before is still being written.
    for turn in 0..SAVES {
        alone.push(training.gradient());
        training.step();
        let begun = Instant::now();
        waits.push(training.save_during_gradient(&writer)?);
        copied.push(begun.elapsed().as_secs_f64() * 1e3);
        training.step();
        let overlaps = turn % 2 == 1;
        if overlaps {
            stands.push(training.save(&writer)?);
        }
        settle(&writer, 1 + usize::from(overlaps))?;
    }
    tell("a gradient, nothing being copied or written", alone);
    tell("a gradient during which the state is copied, until the optimizer may start", copied);
    tell("the optimizer waits for the rest of the copy", waits);
    tell("a copy between two steps, as of a run's last state", stands);

    let (mut ours, mut theirs) = (Vec::new(), Vec::new());
    for _ in 0..RACES {
        training.step();
        training.save(&writer)?;
        ours.push(bytes as f64 / 1e6 / settle(&writer, 1)?);
        theirs.push(dd(&folder.path().join("dd"), bytes)?);
    }
    let (ours, theirs) = (Spread::of(&ours), Spread::of(&theirs));
    println!("checksummed, durable, renamed: {ours:.0} MB/s");
    println!("dd oflag=direct conv=fsync: {theirs:.0} MB/s");
    println!("ratio of the medians {:.2}", ours.median / theirs.median);
    read(&folder.path().join("checkpoints"), bytes)
}

/// Reads the one checkpoint that is left in `folder`: to load it, to verify it, and as dd does, in turns.
fn read(folder: &Path, bytes: usize) -> Result<()> {
    let checkpoints = Checkpoints::new(Host, folder);
    let step = std::fs::read_to_string(folder.join("committed"))?;
    let step = folder.join(step.trim_end());
    let (manifest, data) = (step.join("manifest.json"), step.join("rank0-of-1.safetensors"));
    let (mut loads, mut verifies, mut theirs) = (Vec::new(), Vec::new(), Vec::new());
    let rate = |begun: Instant| bytes as f64 / 1e6 / begun.elapsed().as_secs_f64();
    for _ in 0..RACES {
        let begun = Instant::now();
        drop(checkpoints.load(&manifest, None)?);
        loads.push(rate(begun));
        let begun = Instant::now();
        command::run(&command::Command::Verify { dir: folder.to_owned() }, &mut std::io::sink())?;
        verifies.push(rate(begun));
        let begun = Instant::now();
        let status = Command::new("dd")
            .args(["of=/dev/null", "iflag=direct", "bs=8M", "status=none"])
            .arg(format!("if={}", data.display()))
            .status()
            .context("start dd")?;
        ensure!(status.success(), "dd failed: {status}");
        theirs.push(rate(begun));
    }
    let theirs = Spread::of(&theirs);
    println!("dd iflag=direct: {theirs:.0} MB/s");
    for (name, all) in [("loaded", Spread::of(&loads)), ("verified", Spread::of(&verifies))] {
        println!("{name}, every checksum compared: {all:.0} MB/s, {:.2} of dd's", all.median / theirs.median);
    }
    Ok(())
}

struct Training {
    model: Mlp,
    entries: Vec<Entry>,
    rule: Optimizer,
    /// Parameters, means, squares.
    flat: Vec<f32>,
    gradient: Vec<f32>,
    batch: Rows,
    workspace: Workspace,
    /// What the gradient goes to: the optimizer has another, so that numbers stay small.
    sink: Vec<f32>,
    step: u64,
}

impl Training {
    fn new() -> Training {
        let model = Mlp::new(&[2048, 2816, 1024, 10]);
        let mut flat = vec![1e-2; model.parameters()];
        let gradient = vec![1e-3; flat.len()];
        flat.resize(3 * gradient.len(), 0.0);
        let rule = Optimizer::AdamW(AdamW::new(0.1));
        let entries = elastic_trainer::State::entries(model.tensors(), &rule);
        let labels = (0..BATCH).map(|row| (row % 10) as u8).collect();
        let (batch, workspace) = (Rows { inputs: vec![0.5; BATCH * 2048], labels }, Workspace::default());
        let sink = gradient.clone();
        Training { model, entries, rule, flat, gradient, batch, workspace, sink, step: 0 }
    }

    /// Milliseconds of a gradient.
    fn gradient(&mut self) -> f64 {
        let begun = Instant::now();
        let parameters = &self.flat[..self.sink.len()];
        self.model.pass(parameters, &self.batch, &mut self.workspace, &mut self.sink, &mut |_| ());
        begun.elapsed().as_secs_f64() * 1e3
    }

    /// Milliseconds from the end of a gradient to that of the copy that was begun with it.
    fn save_during_gradient(&mut self, writer: &Writer) -> Result<f64> {
        let Training { model, flat, batch, workspace, sink, step, .. } = self;
        let mut reserved = writer.reserve(true).context("the writer has no room")?;
        let done = reserved.slot.fill_during(&header(*step), flat, || {
            model.pass(&flat[..sink.len()], batch, workspace, sink, &mut |_| ());
            Instant::now()
        });
        let waited = done.elapsed().as_secs_f64() * 1e3;
        let overtaken = writer.take_in(reserved);
        ensure!(overtaken.is_none(), "step {overtaken:?} is overtaken: the writer had not ended");
        Ok(waited)
    }

    /// Milliseconds of an optimizer step.
    fn step(&mut self) -> f64 {
        let begun = Instant::now();
        self.step += 1;
        let (parameters, rest) = self.flat.split_at_mut(self.gradient.len());
        let kept = rest.chunks_mut(self.gradient.len()).collect();
        let moved = Moved { first: 0, parameters, kept, gradient: &self.gradient };
        let stride = Stride { step: self.step, rate: 1e-4, mean: 1.0, scale: 1.0 };
        self.rule.step(&stride, self.model.tensors(), moved);
        begun.elapsed().as_secs_f64() * 1e3
    }

    /// Milliseconds that training waits.
    fn save(&self, writer: &Writer) -> Result<f64> {
        let begun = Instant::now();
        let mut reserved = writer.reserve(true).context("the writer has no room")?;
        reserved.slot.fill(&header(self.step), &self.flat);
        let overtaken = writer.take_in(reserved);
        let took = begun.elapsed().as_secs_f64() * 1e3;
        ensure!(overtaken.is_none(), "step {overtaken:?} is overtaken: the writer had not ended");
        Ok(took)
    }
}

fn header(step: u64) -> SnapshotHeader {
    SnapshotHeader { round: 0, world_size: 1, step, done: None, data: Position::default() }
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

fn tell(name: &str, all: Vec<f64>) {
    let [median, last, most] = [50.0, 99.0, 100.0].map(|percent| percentile(&all, percent));
    println!("{name}: median {median:.1}, 99th percentile {last:.1}, most {most:.1}, of {}", all.len());
}
