//! Reading ahead, and samples that cannot be read.

use std::collections::BTreeSet;
use std::io;
use std::num::NonZeroUsize;
use std::path::Path;
use std::sync::Mutex;
use std::thread;
use std::time::Duration;

use elastic_proto::worker::FailureClass;
use elastic_trainer::settings::{OptimizerName, Unreadable};
use elastic_trainer::{
    Data, Elastic, Environment, Gradient, Model, Outcome, Result, SampleError, Settings, Step, Sums, Tensor, TrainError,
};

use crate::worker::{environment, together, trace, wait_for};

const SAMPLES: u64 = 60;

/// What happened, in order.
#[derive(Default)]
struct Log(Mutex<Vec<String>>);

impl Log {
    fn add(&self, said: String) {
        self.0.lock().unwrap().push(said);
    }

    fn has(&self, said: &str) -> bool {
        self.0.lock().unwrap().iter().any(|line| line == said)
    }
}

/// A number that moves to the mean of the samples.
struct Mean<'l> {
    tensors: Vec<Tensor>,
    /// From this step on, a gradient ends only when a read for the next step has begun.
    waits_from: u64,
    steps: u64,
    log: &'l Log,
}

impl<'l> Mean<'l> {
    fn new(log: &'l Log) -> Mean<'l> {
        Mean { tensors: Tensor::sequence([("mean", vec![1])]), waits_from: u64::MAX, steps: 0, log }
    }
}

impl Model for Mean<'_> {
    type Batch = Vec<f32>;
    type Replica = ();
    fn tensors(&self) -> &[Tensor] {
        &self.tensors
    }
    fn init(&self, _: u64) -> Result<Vec<f32>> {
        Ok(vec![0.0])
    }
    fn replica(&self) -> Result<()> {
        Ok(())
    }
    fn gradient(
        &self,
        step: &Step<'_>,
        parameters: &[f32],
        batch: &Vec<f32>,
        (): &mut (),
        gradient: &mut Gradient<'_>,
    ) -> Result<f32> {
        assert_eq!(step.samples().len(), batch.len());
        if (self.waits_from..self.steps).contains(&step.number()) {
            let next = format!("read {}", step.number() + 1);
            wait_for(&next, || self.log.has(&next).then_some(()));
        }
        gradient[0] = batch.iter().map(|sample| parameters[0] - sample).sum();
        Ok(batch.iter().map(|sample| (parameters[0] - sample).powi(2)).sum())
    }
    fn metrics(&self) -> &[&'static str] {
        &["seen"]
    }
    fn evaluate(&self, _: &Step<'_>, _: &[f32], batch: &Vec<f32>, (): &mut ()) -> Result<Sums> {
        Ok(Sums { loss: batch.iter().sum(), metrics: vec![batch.len() as f32] })
    }
}

/// What a read of a sample meets.
#[derive(Clone, Copy, PartialEq)]
enum Flaw {
    Damage,
    Absence,
    Panic,
}

/// The numbers from 0 on, with noise; some cannot be read.
struct Numbers<'l> {
    flaws: Vec<(u64, Flaw)>,
    takes: Duration,
    log: &'l Log,
    held_out: Option<Box<Numbers<'l>>>,
}

impl<'l> Numbers<'l> {
    fn new(flaws: &[(u64, Flaw)], log: &'l Log) -> Numbers<'l> {
        Numbers { flaws: flaws.to_vec(), takes: Duration::ZERO, log, held_out: None }
    }
}

impl Data for Numbers<'_> {
    type Batch = Vec<f32>;
    fn samples(&self) -> u64 {
        SAMPLES
    }
    fn read(&self, samples: &[u64], step: &Step<'_>, batch: &mut Vec<f32>) -> Result<(), SampleError> {
        self.log.add(format!("{} {}", if step.trains() { "read" } else { "read held-out after" }, step.number()));
        thread::sleep(self.takes);
        if let Some((sample, flaw)) = self.flaws.iter().find(|(sample, _)| samples.contains(sample)) {
            return Err(match flaw {
                Flaw::Damage => SampleError::damaged(*sample, "its checksum differs"),
                Flaw::Absence => SampleError::unavailable(*sample, "the server is away"),
                Flaw::Panic => std::panic::panic_any(format!("index {sample} is out of bounds")),
            });
        }
        batch.clear();
        batch.extend(samples.iter().map(|&sample| sample as f32 + step.random(sample).unit()));
        Ok(())
    }
    fn held_out(&self) -> Option<&dyn Data<Batch = Vec<f32>>> {
        self.held_out.as_deref().map(|held_out| held_out as _)
    }
}

fn settings(readers: Option<usize>) -> Settings {
    Settings {
        readers,
        batch: 16.try_into().unwrap(),
        epochs: 2.try_into().unwrap(),
        optimizer: OptimizerName::Sgd,
        lr: 0.5,
        weight_decay: 0.0,
        ..Settings::default()
    }
}

fn run(model: &Mean<'_>, data: &Numbers<'_>, settings: Settings, place: Environment) -> Result<Outcome, TrainError> {
    Elastic::new(settings, place).output(&mut io::sink()).run(model, data)
}

fn alone(model: &Mean<'_>, data: &Numbers<'_>, settings: Settings) -> Result<Outcome, TrainError> {
    run(model, data, settings, environment(0, 1, 0, 0))
}

#[test]
fn the_next_step_is_read_while_a_step_is_computed() {
    // Told to, from the first step on; untold, when reading has turned out to be slow. Each gradient waits for a read
    // that only another thread can begin.
    for (readers, waits_from) in [(Some(1), 1), (Some(3), 1), (None, 2)] {
        let log = Log::default();
        let model = Mean { waits_from, steps: 8, ..Mean::new(&log) };
        let data = Numbers { takes: Duration::from_millis(1), ..Numbers::new(&[], &log) };
        // One shard, so that a step is one read.
        alone(&model, &data, Settings { shards: 1.try_into().unwrap(), ..settings(readers) }).unwrap();
        assert!(!log.has("read 9"), "there are 8 steps");
    }
}

#[test]
fn a_step_is_followed_by_its_evaluation_and_that_by_the_next_step() {
    let log = Log::default();
    let held_out = Some(Box::new(Numbers::new(&[], &log)));
    let data = Numbers { held_out, ..Numbers::new(&[], &log) };
    let every = |steps: u64, readers| Settings { eval_every: steps.try_into().ok(), ..settings(Some(readers)) };
    alone(&Mean::new(&log), &data, every(3, 2)).unwrap();
    let found = std::mem::take(&mut *log.0.lock().unwrap());
    // 8 shards each of 8 steps and of 3 evaluations in 4 parts: each is read once.
    assert_eq!(found.len(), 8 * 8 + 3 * 4 * 8);
    let which: BTreeSet<&str> = found.iter().filter_map(|line| line.strip_prefix("read held-out after ")).collect();
    assert_eq!(Vec::from_iter(which), ["3", "6", "8"]);
}

#[test]
fn readers_change_no_bits() {
    let train = |world_size, threads, bucket_mb, readers| {
        together(world_size, 0, |place| {
            let (log, threads) = (Log::default(), NonZeroUsize::new(threads).unwrap());
            let settings = Settings { threads, bucket_mb, micro_batch: 1.try_into().ok(), ..settings(readers) };
            run(&Mean::new(&log), &Numbers::new(&[], &log), settings, place).unwrap()
        })
    };
    let alone = train(1, 1, 25.0, Some(0));
    for (world_size, threads, bucket_mb, readers) in [(1, 1, 25.0, 3), (3, 2, 1e-6, 2), (9, 1, 25.0, 1)] {
        assert!(train(world_size, threads, bucket_mb, Some(readers)) == alone);
    }
}

#[test]
fn an_error_or_a_panic_of_a_reader_names_the_sample() {
    for readers in [Some(0), Some(2)] {
        for (flaw, class, said) in [
            (Flaw::Damage, FailureClass::Permanent, "cannot read sample 42: its checksum differs; repair it"),
            (Flaw::Absence, FailureClass::Own, "cannot read sample 42: the server is away"),
            (
                Flaw::Panic,
                FailureClass::Permanent,
                "cannot read sample 42: the data panicked: index 42 is out of bounds; correct the data",
            ),
        ] {
            // What is not damaged for good is not skipped.
            let unreadable = if flaw == Flaw::Damage { Unreadable::Fail } else { Unreadable::Skip };
            let (log, settings) = (Log::default(), Settings { unreadable, ..settings(readers) });
            let error = alone(&Mean::new(&log), &Numbers::new(&[(42, flaw)], &log), settings).unwrap_err();
            assert!(error.to_string().starts_with(said) && error.class() == class, "{error}");
        }
    }
}

/// What a run that skips ends with, and the lines of its trace without their times and ranks.
fn skipping(path: &Path, world_size: u32, threads: usize, readers: usize) -> (f32, Vec<(String, u64, f64, u64)>) {
    let flaws: Vec<(u64, Flaw)> = [3, 4, 5, 41].map(|sample| (sample, Flaw::Damage)).to_vec();
    let state = together(world_size, 0, |place| {
        let log = Log::default();
        let held_out = Some(Box::new(Numbers::new(&[(7, Flaw::Damage), (8, Flaw::Damage)], &log)));
        let data = Numbers { held_out, ..Numbers::new(&flaws, &log) };
        let settings = Settings {
            unreadable: Unreadable::Skip,
            threads: NonZeroUsize::new(threads).unwrap(),
            eval_every: 4.try_into().ok(),
            trace: Some(path.to_owned()),
            ..settings(Some(readers))
        };
        run(&Mean::new(&log), &data, settings, place).unwrap()
    });
    let lines = trace(path).into_iter().filter_map(|line| {
        let number = |name: &str| line[name].as_u64();
        let event = line["event"].as_str()?.to_owned();
        Some((event, number("step")?, line["loss"].as_f64()?, number("skipped")?))
    });
    (state.parameters()[0], lines.collect())
}

#[test]
fn a_skipped_sample_has_no_part_in_the_mean_whoever_reads_it() {
    let folder = tempfile::tempdir().unwrap();
    let alone = skipping(&folder.path().join("1"), 1, 1, 0);
    let of = |event: &str| alone.1.iter().filter(|line| line.0 == event).map(|line| line.3).collect::<Vec<u64>>();
    assert_eq!(of("step").iter().sum::<u64>(), 2 * 4, "four samples in each of two epochs");
    assert_eq!(of("evaluated"), [2, 2]);
    for (world_size, threads, readers) in [(1, 2, 2), (3, 1, 0), (2, 2, 1), (9, 1, 0)] {
        let path = folder.path().join(format!("{world_size}-{threads}"));
        assert!(skipping(&path, world_size, threads, readers) == alone, "{world_size} workers");
    }

    // One step over all samples goes half the way to the mean of those that were read.
    let (log, flaws) = (Log::default(), [0, 1, 59].map(|sample| (sample, Flaw::Damage)));
    let settings = Settings {
        batch: SAMPLES.try_into().unwrap(),
        max_steps: 1.try_into().ok(),
        unreadable: Unreadable::Skip,
        ..settings(None)
    };
    let outcome = self::alone(&Mean::new(&log), &Numbers::new(&flaws, &log), settings).unwrap();
    let none: [u64; 0] = [];
    let at = Step::new(0, 1, 0, &none);
    let mean = (2..59).map(|sample| sample as f32 + at.random(sample).unit()).sum::<f32>() / 57.0;
    assert!((outcome.state.parameters()[0] - mean / 2.0).abs() < 1e-4, "{:?} {mean}", outcome.state.parameters());
}

#[test]
fn a_step_without_a_sample_that_can_be_read_is_an_error() {
    let (log, flaws) = (Log::default(), Vec::from_iter((0..SAMPLES).map(|sample| (sample, Flaw::Damage))));
    let settings = Settings { unreadable: Unreadable::Skip, ..settings(None) };
    let error = alone(&Mean::new(&log), &Numbers::new(&flaws, &log), settings).unwrap_err();
    assert_eq!(error.to_string(), "none of the samples of step 1 can be read; repair the data");
    assert_eq!(error.class(), FailureClass::Permanent);
}
