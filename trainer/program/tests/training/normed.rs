//! A model with dropout, augmentation and batch norm: the same bits for every history of members, and each optimizer.

use std::fs::File;
use std::num::NonZeroUsize;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use elastic_trainer::settings::{OptimizerName, OptimizerState};
use elastic_trainer::{
    Data, Elastic, Environment, Gradient, Model, Outcome, Result, Rule, SampleError, Settings, State, Step, Stop, Sums,
    Tensor, TrainError,
};
use rustix::fs::{MemfdFlags, memfd_create};

use crate::agent::{Agent, Commits};
use crate::worker::{last_step, places, together, trace, wait_for};

const INPUTS: usize = 4;
const SAMPLES: u64 = 100;
/// 7 steps an epoch.
const EPOCHS: u64 = 20;
/// Far more than a test needs.
const AMPLE: Duration = Duration::from_secs(40);

/// A weighted sum of inputs that are normed over their batch, and dropped out at random. It has more numbers than ranks
/// send to all others, so each rank of a sharded optimizer owns some: they follow random ones.
struct Normed(Vec<Tensor>);

/// Where the tensors lie.
const BIAS: usize = INPUTS;
const MEAN: usize = INPUTS + 1;
const VARIANCE: usize = MEAN + INPUTS;
const FOLLOWING: usize = VARIANCE + INPUTS;
const AVERAGED: usize = FOLLOWING + 8000;
const END: usize = AVERAGED + 4000;

impl Normed {
    fn new() -> Normed {
        let mut tensors = Tensor::sequence([
            ("weight", vec![1, INPUTS]),
            ("bias", vec![1]),
            ("mean", vec![INPUTS]),
            ("variance", vec![INPUTS]),
            ("following", vec![AVERAGED - FOLLOWING]),
            ("averaged", vec![END - AVERAGED]),
        ]);
        [2, 3, 5].into_iter().for_each(|number| tensors[number].rule = Rule::Average { momentum: 0.1 });
        Normed(tensors)
    }
}

/// An input's mean and variance over a batch.
fn statistics(batch: &[[f32; INPUTS]], input: usize) -> (f32, f32) {
    let mean_of =
        |of: &dyn Fn(f32) -> f32| batch.iter().map(|sample| of(sample[input])).sum::<f32>() / batch.len() as f32;
    let mean = mean_of(&|number| number);
    (mean, mean_of(&|number| (number - mean).powi(2)))
}

impl Model for Normed {
    type Batch = Vec<[f32; INPUTS]>;
    type Replica = ();

    fn tensors(&self) -> &[Tensor] {
        &self.0
    }

    fn init(&self, _: u64) -> Result<Vec<f32>> {
        Ok(vec![0.25; END])
    }

    fn replica(&self) -> Result<()> {
        Ok(())
    }

    fn gradient(
        &self,
        step: &Step<'_>,
        parameters: &[f32],
        batch: &Vec<[f32; INPUTS]>,
        (): &mut (),
        gradient: &mut Gradient<'_>,
    ) -> Result<f32> {
        gradient.fill(0.0);
        let of_inputs: [_; INPUTS] = std::array::from_fn(|input| statistics(batch, input));
        let mut loss = 0.0;
        for (&sample, inputs) in step.samples().iter().zip(batch) {
            let mut random = step.random(sample);
            let normed: [f32; INPUTS] = std::array::from_fn(|input| {
                let (mean, variance) = of_inputs[input];
                if random.unit() < 0.3 { 0.0 } else { (inputs[input] - mean) / (variance + 1e-3).sqrt() / 0.7 }
            });
            let sum: f32 = normed.iter().zip(parameters).map(|(input, weight)| input * weight).sum();
            let error = sum + parameters[BIAS] - (sample % 7) as f32 / 3.0;
            gradient.iter_mut().zip(&normed).for_each(|(slope, input)| *slope += 2.0 * error * input);
            gradient[BIAS] += 2.0 * error;
            for (slope, number) in gradient[FOLLOWING..].iter_mut().zip(&parameters[FOLLOWING..AVERAGED]) {
                *slope += 1e-3 * (number - random.unit());
            }
            gradient[AVERAGED..].iter_mut().for_each(|sum| *sum += random.unit());
            loss += error * error;
        }
        for (input, (mean, variance)) in of_inputs.into_iter().enumerate() {
            gradient[MEAN + input] = mean * batch.len() as f32;
            gradient[VARIANCE + input] = variance * batch.len() as f32;
        }
        Ok(loss)
    }

    /// Normed by the running averages, without dropout.
    fn evaluate(&self, step: &Step<'_>, parameters: &[f32], batch: &Vec<[f32; INPUTS]>, (): &mut ()) -> Result<Sums> {
        let error = |(&sample, inputs): (&u64, &[f32; INPUTS])| {
            let normed = (0..INPUTS).map(|input| {
                (inputs[input] - parameters[MEAN + input]) / (parameters[VARIANCE + input] + 1e-3).sqrt()
                    * parameters[input]
            });
            (normed.sum::<f32>() + parameters[BIAS] - (sample % 7) as f32 / 3.0).powi(2)
        };
        Ok(Sums { loss: step.samples().iter().zip(batch).map(error).sum(), metrics: Vec::new() })
    }
}

/// Numbers around 5, with other noise at each step. A step beyond the gate waits.
struct Noisy {
    gate: Arc<AtomicU64>,
    /// The step at which this rank fails.
    fails_at: u64,
}

impl Noisy {
    fn new() -> Noisy {
        Noisy { gate: Arc::new(u64::MAX.into()), fails_at: u64::MAX }
    }
}

impl Data for Noisy {
    type Batch = Vec<[f32; INPUTS]>;

    fn samples(&self) -> u64 {
        SAMPLES
    }

    fn read(&self, samples: &[u64], step: &Step<'_>, batch: &mut Vec<[f32; INPUTS]>) -> Result<(), SampleError> {
        if step.number() == self.fails_at {
            return Err(SampleError::unavailable(samples[0], "the server is away"));
        }
        while self.gate.load(Ordering::Relaxed) < step.number() {
            thread::sleep(Duration::from_millis(1));
        }
        batch.clear();
        batch.extend(samples.iter().map(|&sample| {
            let mut random = step.stream(sample, 1);
            std::array::from_fn(|input| 5.0 + (sample % 7) as f32 * input as f32 + 0.1 * random.unit())
        }));
        Ok(())
    }

    fn held_out(&self) -> Option<&dyn Data<Batch = Self::Batch>> {
        Some(self)
    }
}

fn settings(optimizer: OptimizerName, folder: Option<&Path>, path: &Path) -> Settings {
    let momentum = if optimizer == OptimizerName::Sgd { 0.9 } else { 0.0 };
    Settings {
        optimizer,
        lr: 0.02,
        momentum,
        nesterov: momentum > 0.0,
        batch: 16.try_into().unwrap(),
        micro_batch: None,
        shards: 4.try_into().unwrap(),
        bucket_mb: 0.035,
        epochs: EPOCHS.try_into().unwrap(),
        clip: Some(1.0),
        snapshot_every: 5,
        eval_every: 35.try_into().ok(),
        checkpoint_dir: folder.map(Into::into),
        trace: Some(path.to_owned()),
        ..Settings::default()
    }
}

fn run(data: &Noisy, settings: Settings, environment: Environment, stop: Stop) -> Result<Outcome, TrainError> {
    let mut nowhere = std::io::sink();
    Elastic::new(settings, environment).stop(stop).output(&mut nowhere).run(&Normed::new(), data)
}

/// A worker that is a thread, and its agent.
struct Member {
    agent: Agent,
    stop: Stop,
    thread: JoinHandle<Result<Outcome, TrainError>>,
}

fn member(folder: &Path, place: &Environment, data: Noisy, settings: &Settings, memory: &File) -> Member {
    let memory = Some(memory.try_clone().unwrap()).filter(|_| place.rank == 0);
    let agent = Agent::with_memory(folder, place, None, Commits::Granted, memory);
    let environment = Environment { agent: Some(agent.socket.clone()), local_rank: 0, ..place.clone() };
    let (stop, settings) = (Stop::default(), settings.clone());
    let of_thread = stop.clone();
    Member { agent, stop, thread: thread::spawn(move || run(&data, settings, environment, of_thread)) }
}

/// A run whose group loses a worker, shrinks, grows, and ends as a whole; another takes it up from its checkpoint, or
/// from its agent's memory.
fn disturbed(optimizer: OptimizerName, optimizer_state: OptimizerState, on_disk: bool) -> (State, Vec<u64>) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("trace");
    let settings = settings(optimizer, on_disk.then(|| folder.path().join("kept")).as_deref(), &path);
    let settings = Settings { optimizer_state, ..settings };
    let gate = Arc::new(AtomicU64::new(20));
    let memory = File::from(memfd_create("test", MemfdFlags::CLOEXEC).unwrap());
    let start = |place: &Environment, fails_at| {
        member(folder.path(), place, Noisy { gate: gate.clone(), fails_at }, &settings, &memory)
    };
    let next = |group: &[Member], round, world_size| {
        group.iter().for_each(|member| member.agent.forming(round, AMPLE));
        gate.fetch_add(20, Ordering::Relaxed);
        group.iter().for_each(|member| _ = member.agent.quiesced(round));
        let places = places(round, world_size);
        group.iter().zip(&places).for_each(|(member, place)| member.agent.assign(place));
        places
    };
    let reached = |wanted| wait_for("a step", || last_step(&path, "step").filter(|step| *step >= wanted));
    // One of three fails, and the round continues with two
    let mut group: Vec<Member> =
        places(1, 3).iter().map(|place| start(place, [u64::MAX, u64::MAX, 13][place.rank as usize])).collect();
    assert!(group.pop().unwrap().thread.join().unwrap().is_err());
    next(&group, 2, 2);
    reached(25);
    // Two newcomers take the state from the others
    let places_of_four = next(&group, 3, 4);
    group.extend(places_of_four[2..].iter().map(|place| start(place, u64::MAX)));
    reached(45);
    // All end
    group.iter().for_each(|member| member.stop.raise());
    gate.fetch_add(20, Ordering::Relaxed);
    for member in group {
        assert!(matches!(member.thread.join().unwrap(), Err(TrainError::Stopped)));
    }
    gate.store(u64::MAX, Ordering::Relaxed);
    let ended = start(&places(4, 1)[0], u64::MAX).thread.join().unwrap().unwrap();
    let begun = trace(&path).into_iter().filter(|line| line["event"] == "begin");
    (ended.state, begun.map(|line| line["step"].as_u64().unwrap()).collect())
}

/// Its evaluations' losses.
fn evaluated(path: &Path) -> Vec<f64> {
    let lines = trace(path).into_iter().filter(|line| line["event"] == "evaluated");
    lines.map(|line| line["loss"].as_f64().unwrap()).collect()
}

#[test]
fn every_history_of_members_gives_the_same_bits() {
    for optimizer in [OptimizerName::AdamW, OptimizerName::Sgd] {
        let folder = tempfile::tempdir().unwrap();
        let train = |world_size, threads: usize, bucket_mb| {
            let path = folder.path().join(format!("{world_size}-{threads}"));
            let settings = Settings {
                threads: NonZeroUsize::new(threads).unwrap(),
                bucket_mb,
                ..settings(optimizer, None, &path)
            };
            let state =
                together(world_size, 0, |place| run(&Noisy::new(), settings.clone(), place, Stop::default()).unwrap());
            (state, evaluated(&path))
        };
        let alone = train(1, 1, 25.0);
        assert!(train(3, 1, 25.0) == alone && train(2, 2, 0.01) == alone);
        let states = [OptimizerState::Whole, OptimizerState::Sharded];
        for (how, on_disk) in states.into_iter().flat_map(|how| [(how, true), (how, false)]) {
            let (state, begun) = disturbed(optimizer, how, on_disk);
            assert!(state == alone.0, "{optimizer:?}, {how:?}, on disk: {on_disk}");
            assert!(begun.len() == 4 && begun.is_sorted() && begun[1] >= 12 && begun[3] >= 40, "{begun:?}");
        }
        // The averages are the inputs', and serve the evaluation
        let (inputs, parameters) = ((0..INPUTS).map(|input| 5.05 + 2.97 * input as f32), alone.0.parameters());
        for (mean, found) in inputs.zip(&parameters[MEAN..]) {
            assert!((mean - found).abs() < 0.6, "{found} instead of {mean}");
        }
        assert!(alone.1.len() == 4 && alone.1.iter().all(|loss| *loss < 0.1), "{:?}", alone.1);
    }
}
