//! `--eval-every`: evaluation on held-out samples during training.

use std::io;
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use clap::Parser;
use elastic_models::tasks::digits;
use elastic_trainer::program::Task;
use elastic_trainer::{
    Data, Elastic, Environment, Event, Gradient, Model, Observer, Outcome, Result, SampleError, Settings, Step, Stop,
    Sums, Tensor, TrainError,
};
use serde_json::Value;

use crate::agent::{Agent, Commits};
use crate::worker::{environment, free_port, together, trace, train, wait_for};

type Arguments = crate::worker::Words<digits::Flags>;

fn evaluated(path: &Path) -> Vec<Value> {
    let mut lines: Vec<Value> = trace(path).into_iter().filter(|line| line["event"] == "evaluated").collect();
    lines.iter_mut().filter_map(Value::as_object_mut).for_each(|line| _ = line.remove("time_ms"));
    lines
}

#[test]
fn every_number_of_workers_finds_the_same_loss_and_accuracy_and_trains_as_without() {
    let flags = "--epochs 2 --hidden 16 --batch 100 --lr 0.01";
    let folder = tempfile::tempdir().unwrap();
    let found = |workers: u32, more: &str| {
        let path = folder.path().join(workers.to_string());
        let state = train(&format!("{flags} --eval-every 10 --trace {}{more}", path.display()), workers, 0);
        (state, evaluated(&path))
    };
    let (state, alone) = found(1, "");
    assert!(train(flags, 1, 0) == state, "an evaluation changes nothing");
    let steps: Vec<u64> = alone.iter().map(|line| line["step"].as_u64().unwrap()).collect();
    assert_eq!(steps, [10, 20, 30], "the last step is 30");
    // What the task itself finds
    let arguments = Arguments::parse_from(["test", "--hidden", "16"]);
    let (model, data) = arguments.flags.make().unwrap();
    let (right, all) = digits::count_correct(&model, &data, state.parameters());
    assert_eq!(
        (alone[2]["samples"].as_u64(), alone[2]["metrics"]["accuracy"].as_f64()),
        (Some(all), Some(right as f64 / all as f64))
    );
    assert!(alone[2]["loss"].as_f64() < alone[0]["loss"].as_f64(), "{alone:?}");
    for (workers, more) in [(2, ""), (3, " --threads 2"), (9, "")] {
        assert!(found(workers, more) == (state.clone(), alone.clone()), "{workers} workers");
    }
}

/// A number that rises, and an evaluation that writes down what it saw.
struct Counted {
    tensors: Vec<Tensor>,
    /// Whether the fourth sample waits.
    holds: AtomicBool,
    seen: Mutex<Vec<(u64, u64)>>,
}

impl Counted {
    fn new(holds: bool) -> Counted {
        let tensors = Tensor::sequence([("number", vec![1])]);
        Counted { tensors, holds: holds.into(), seen: Mutex::default() }
    }
}

impl Model for Counted {
    type Batch = Vec<u64>;
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
        _: &[f32],
        _: &Vec<u64>,
        (): &mut (),
        gradient: &mut Gradient<'_>,
    ) -> Result<f32> {
        assert!(step.trains());
        gradient.fill(-1.0);
        Ok(1.0)
    }
    fn metrics(&self) -> &[&'static str] {
        &["samples"]
    }
    fn evaluate(&self, step: &Step<'_>, _: &[f32], batch: &Vec<u64>, (): &mut ()) -> Result<Sums> {
        assert!(!step.trains() && step.samples() == batch);
        self.seen.lock().unwrap().extend(batch.iter().map(|sample| (step.number(), *sample)));
        if self.seen.lock().unwrap().len() > 3 {
            wait_for("the word to continue", || (!self.holds.load(Ordering::Relaxed)).then_some(()));
        }
        Ok(Sums { loss: batch.iter().sum::<u64>() as f32, metrics: vec![batch.len() as f32] })
    }
}

/// So many numbers, and others that are held out.
struct Numbers(u64, Option<Box<Numbers>>);

impl Data for Numbers {
    type Batch = Vec<u64>;
    fn samples(&self) -> u64 {
        self.0
    }
    fn read(&self, samples: &[u64], _: &Step<'_>, batch: &mut Vec<u64>) -> Result<(), SampleError> {
        samples.clone_into(batch);
        Ok(())
    }
    fn held_out(&self) -> Option<&dyn Data<Batch = Vec<u64>>> {
        self.1.as_deref().map(|held_out| held_out as _)
    }
}

fn data() -> Numbers {
    Numbers(40, Some(Box::new(Numbers(37, None))))
}

fn settings(batch: u64, trace: &Path) -> Settings {
    Settings {
        batch: batch.try_into().unwrap(),
        epochs: 1.try_into().unwrap(),
        micro_batch: 3.try_into().ok(),
        eval_every: 2.try_into().ok(),
        trace: Some(trace.to_owned()),
        ..Settings::default()
    }
}

fn run(model: &Counted, data: &Numbers, settings: Settings, environment: Environment) -> Result<Outcome, TrainError> {
    Elastic::new(settings, environment).output(&mut io::sink()).run(model, data)
}

#[test]
fn each_held_out_sample_is_evaluated_once_by_all_workers_together() {
    let folder = tempfile::tempdir().unwrap();
    for workers in [1, 3] {
        let (model, path) = (Counted::new(false), folder.path().join(workers.to_string()));
        together(workers, 0, |environment| run(&model, &data(), settings(8, &path), environment).unwrap());
        let mut seen = model.seen.into_inner().unwrap();
        seen.sort_unstable();
        // Five steps of 8 of 40 samples
        let all: Vec<_> = [2, 4, 5].iter().flat_map(|step| (0..37).map(move |sample| (*step, sample))).collect();
        assert_eq!(seen, all);
        let lines = evaluated(&path);
        assert_eq!(lines.len(), 3);
        assert!(lines.iter().all(|line| line["loss"] == 18.0 && line["metrics"]["samples"] == 1.0), "{lines:?}");
    }
}

/// What it heard, in short.
#[derive(Default)]
struct Heard(Vec<String>);

impl Observer for Heard {
    fn see(&mut self, event: &Event<'_>, _: Instant) {
        self.0.push(match event {
            Event::Begin { step, world_size, .. } => format!("{world_size} begin after {step}"),
            Event::Step { step, .. } => format!("step {step}"),
            Event::Evaluated { step, samples, .. } => format!("{samples} evaluated after {step}"),
            other => format!("{other:?}"),
        });
    }
}

#[test]
fn an_observer_hears_of_each_step_and_evaluation_on_every_rank() {
    let folder = tempfile::tempdir().unwrap();
    for workers in [1, 2] {
        let path = folder.path().join(workers.to_string());
        let all = Mutex::new(Vec::new());
        together(workers, 0, |environment| {
            let mut heard = Heard::default();
            let elastic = Elastic::new(settings(8, &path), environment).observer(&mut heard);
            let outcome = elastic.output(&mut io::sink()).run(&Counted::new(false), &data()).unwrap();
            all.lock().unwrap().push(heard.0);
            outcome
        });
        let begin = format!("{workers} begin after 0");
        let evaluated = |step| format!("37 evaluated after {step}");
        let mut expected = vec![begin, "step 1".into(), "step 2".into(), evaluated(2)];
        expected.extend(["step 3".into(), "step 4".into(), evaluated(4), "step 5".into(), evaluated(5)]);
        assert_eq!(all.into_inner().unwrap(), vec![expected; workers as usize]);
    }
}

#[test]
fn an_evaluation_that_a_forming_round_interrupts_is_done_in_the_next() {
    let (folder, port) = (tempfile::tempdir().unwrap(), free_port());
    let path = folder.path().join("trace");
    let mut place = environment(0, 1, 1, port);
    let agent = Agent::start(folder.path(), &place, None, Commits::Granted);
    place.agent = Some(agent.socket.clone());
    let model = Counted::new(true);
    let (stop, settings) = (Stop::default(), settings(1, &path));
    thread::scope(|scope| {
        // 37 pieces of an evaluation, one after the other
        let worker = scope.spawn(|| {
            let mut nowhere = io::sink();
            Elastic::new(settings, place).stop(stop.clone()).output(&mut nowhere).run(&model, &data())
        });
        wait_for("some pieces", || (model.seen.lock().unwrap().len() > 3).then_some(()));
        agent.forming(2, Duration::from_secs(40));
        wait_for("the agent's word", || stop.forming_after(1));
        model.holds.store(false, Ordering::Relaxed);
        assert_eq!(agent.quiesced(2), 2, "after the step that is evaluated");
        assert!(model.seen.lock().unwrap().len() < 37 && evaluated(&path).is_empty(), "not at its end");
        agent.assign(&environment(0, 1, 2, port));
        wait_for("the evaluation", || evaluated(&path).first().cloned().filter(|line| line["step"] == 2));
        worker.join().unwrap().unwrap();
    });
    let lines = evaluated(&path);
    assert_eq!((lines[0]["round"].as_u64(), lines.len()), (Some(2), 20), "each once");
}

#[test]
fn without_held_out_samples_there_is_nothing_to_evaluate_on() {
    let folder = tempfile::tempdir().unwrap();
    for data in [Numbers(40, None), Numbers(40, Some(Box::new(Numbers(0, None))))] {
        let model = Counted::new(false);
        let settings = settings(8, &folder.path().join("trace"));
        let error = run(&model, &data, settings, environment(0, 1, 0, 0)).unwrap_err().to_string();
        assert!(error.contains("no held-out samples to evaluate it on; leave --eval-every out"), "{error}");
    }
}
