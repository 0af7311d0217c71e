//! Models and data that people bring: their errors, and random numbers that they draw.

use std::io;
use std::num::NonZeroUsize;
use std::process::{Command, ExitCode, Stdio};
use std::thread;

use elastic_proto::worker::FailureClass;
use elastic_trainer::program;
use elastic_trainer::{
    Data, Elastic, Environment, Gradient, Model, Outcome, Result, SampleError, Settings, Step, Tensor, TrainError,
};
use serde_json::Value;

use crate::agent::{Agent, Commits};
use crate::worker::{environment, places, together};

const SAMPLES: u64 = 100;

/// Weights of a sum whose inputs are dropped out at random, and which can fail.
struct Weights {
    tensors: Vec<Tensor>,
    fails: bool,
}

impl Weights {
    fn new(fails: bool) -> Weights {
        Weights { tensors: Tensor::sequence([("weights", vec![5]), ("bias", vec![1])]), fails }
    }
}

impl Model for Weights {
    type Batch = Vec<[f32; 5]>;
    type Replica = Vec<f32>;

    fn tensors(&self) -> &[Tensor] {
        &self.tensors
    }

    fn init(&self, _seed: u64) -> Result<Vec<f32>> {
        Ok(vec![0.25; 6])
    }

    fn replica(&self) -> Result<Vec<f32>> {
        Ok(vec![0.0; 5])
    }

    fn gradient(
        &self,
        step: &Step<'_>,
        parameters: &[f32],
        batch: &Vec<[f32; 5]>,
        kept: &mut Vec<f32>,
        gradient: &mut Gradient<'_>,
    ) -> Result<f32> {
        if self.fails && step.number() == 3 {
            Err("its sum has 4 weights instead of 5")?;
        }
        gradient.fill(0.0);
        let mut loss = 0.0;
        for (&sample, inputs) in step.samples().iter().zip(batch) {
            let mut random = step.random(sample);
            for (kept, input) in kept.iter_mut().zip(inputs) {
                *kept = if random.unit() < 0.3 { 0.0 } else { *input };
            }
            let sum: f32 = kept.iter().zip(parameters).map(|(input, weight)| input * weight).sum();
            let error = sum + parameters[5] - 1.0;
            gradient.iter_mut().zip(&*kept).for_each(|(slope, input)| *slope += 2.0 * error * input);
            gradient[5] += 2.0 * error;
            loss += error * error;
        }
        Ok(loss)
    }
}

/// Numbers with noise that differs each time; one may be unreadable.
#[derive(Default)]
struct Noisy {
    unreadable: Option<SampleError>,
    number: u64,
}

impl Data for Noisy {
    type Batch = Vec<[f32; 5]>;

    fn samples(&self) -> u64 {
        SAMPLES
    }

    fn read(&self, samples: &[u64], step: &Step<'_>, batch: &mut Vec<[f32; 5]>) -> Result<(), SampleError> {
        if let Some(error) = self.unreadable.as_ref().filter(|_| samples.contains(&self.number)) {
            return Err(error.clone());
        }
        batch.clear();
        batch.extend(samples.iter().map(|&sample| {
            let mut random = step.stream(sample, 1);
            std::array::from_fn(|place| (sample + place as u64) as f32 / SAMPLES as f32 + 0.1 * random.unit())
        }));
        Ok(())
    }
}

fn settings(threads: usize, bucket_mb: f32) -> Settings {
    Settings {
        threads: NonZeroUsize::new(threads).unwrap(),
        bucket_mb,
        batch: 16.try_into().unwrap(),
        epochs: 3.try_into().unwrap(),
        ..Settings::default()
    }
}

fn run(model: &Weights, data: &Noisy, settings: Settings, environment: Environment) -> Result<Outcome, TrainError> {
    let mut nowhere = io::sink();
    Elastic::new(settings, environment).output(&mut nowhere).run(model, data)
}

#[test]
fn dropout_and_noise_are_the_same_for_every_number_of_workers_and_threads() {
    let train = |world_size, threads, bucket_mb| {
        together(world_size, 0, |environment| {
            run(&Weights::new(false), &Noisy::default(), settings(threads, bucket_mb), environment).unwrap()
        })
    };
    let alone = train(1, 1, 25.0);
    assert!(train(3, 1, 25.0) == alone);
    assert!(train(2, 2, 1e-6) == alone);
    // Another seed draws others, though neither the first weights nor the noiseless data depend on it.
    let other = Settings { seed: 1, ..settings(1, 25.0) };
    let other = run(&Weights::new(false), &Noisy::default(), other, environment(0, 1, 0, 0)).unwrap();
    assert!(other.state != alone);
}

/// What a worker that trains alone ends with, and what it tells its agent.
fn told(model: &Weights, data: &Noisy, settings: Settings, round: u64) -> (TrainError, (FailureClass, String)) {
    let folder = tempfile::tempdir().unwrap();
    let mut environment = environment(0, 1, round, 0);
    let agent = Agent::start(folder.path(), &environment, None, Commits::Granted);
    environment.agent = Some(agent.socket.clone());
    (run(model, data, settings, environment).unwrap_err(), agent.failure())
}

#[test]
fn an_error_of_the_model_ends_the_worker_for_good_with_its_message() {
    let said = "the model cannot compute the gradient of step 3: its sum has 4 weights instead of 5; correct the \
                model: each restart would meet this again";
    for (round, threads, bucket_mb) in [(1, 1, 25.0), (2, 2, 1e-6)] {
        let (error, told) = told(&Weights::new(true), &Noisy::default(), settings(threads, bucket_mb), round);
        assert_eq!((error.to_string().as_str(), told), (said, (FailureClass::Permanent, said.to_owned())));
    }
}

#[test]
fn a_sample_that_cannot_be_read_is_named_and_only_a_damaged_one_ends_the_job() {
    let cause = || io::Error::other("the server is away");
    for (round, error, class) in [
        (3, SampleError::damaged(42, "its checksum differs"), FailureClass::Permanent),
        (4, SampleError::unavailable(42, cause()), FailureClass::Own),
    ] {
        let data = Noisy { unreadable: Some(error.clone()), number: 42 };
        let (ended, told) = told(&Weights::new(false), &data, settings(1, 25.0), round);
        assert!(ended.to_string().starts_with("cannot read sample 42: "), "{ended}");
        assert_eq!((ended.to_string(), told), (error.to_string(), (class, error.to_string())));
    }
}

#[test]
fn where_one_worker_fails_with_a_sample_its_peers_only_lose_it() {
    // In a bucket at a time, so that the others wait for it in the middle of a step.
    let error = SampleError::damaged(7, "its checksum differs");
    let ended: Vec<TrainError> = thread::scope(|scope| {
        let rank = |place: Environment| {
            let data = Noisy { unreadable: Some(error.clone()), number: 7 };
            scope.spawn(move || run(&Weights::new(false), &data, settings(2, 1e-6), place).unwrap_err())
        };
        let ranks: Vec<_> = places(5, 3).into_iter().map(rank).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    });
    let failed = |ended: &&TrainError| matches!(ended, TrainError::Task(_));
    assert_eq!(ended.iter().filter(failed).count(), 1, "{ended:?}");
    assert!(ended.iter().filter(|ended| !failed(ended)).all(|ended| ended.class() == FailureClass::Peer), "{ended:?}");
}

/// The example of a program around a model, with these arguments.
fn line(arguments: &[&str]) -> Command {
    let deps = std::env::current_exe().unwrap();
    let mut command = Command::new(deps.parent().unwrap().with_file_name("examples").join("line"));
    command.args(arguments);
    command
}

#[test]
fn a_program_of_ones_own_has_its_flags_the_trainers_and_the_checkpoint_command() {
    let folder = tempfile::tempdir().unwrap();
    let dir = folder.path().to_str().unwrap();
    let printed = |arguments: &[&str]| {
        let output = line(arguments).output().unwrap();
        assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    };
    let help = printed(&["--help"]);
    assert!(help.starts_with("Fit a line to points") && help.contains("Usage: line ["), "{help}");
    assert!(
        help.contains("--points") && help.contains("--checkpoint-dir") && help.contains("[default: 0.01]"),
        "{help}"
    );

    let trained = printed(&["--points", "640", "--epochs", "20", "--device", "cpu", "--checkpoint-dir", dir]);
    assert!(trained.contains("done: 200 steps") && trained.contains("\ny = "), "{trained}");
    assert!(printed(&["checkpoint", "list", dir]).contains("200"));
    // A checkpoint's command takes no flags of training.
    assert_eq!(line(&["--points", "640", "checkpoint", "list", dir]).status().unwrap().code(), Some(2));
}

#[test]
fn an_error_is_logged_and_written_for_the_agent_with_exit_code_1() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("error.json");
    let mut worker = line(&["--points", "0", "--device", "cpu"]);
    let output = worker.env("TORCHELASTIC_ERROR_FILE", &file).output().unwrap();
    let said = "cannot train this model on this data: there are no samples";
    assert_eq!(output.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&output.stderr).contains(said));
    let written: Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
    assert_eq!(written["message"]["message"], said);
}

#[test]
fn a_panic_is_written_for_the_agent_too() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("error.json");
    // This test's own program, which runs the test below as a program that panics.
    let status = Command::new(std::env::current_exe().unwrap())
        .args(["--ignored", "--exact", "own::a_program_that_panics"])
        .env("TORCHELASTIC_ERROR_FILE", &file)
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .unwrap();
    assert!(status.success());
    let written: Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
    let said = written["message"]["message"].as_str().unwrap();
    assert!(said.contains("own.rs:") && said.ends_with("index 5 is out of bounds"), "{said}");
}

#[test]
#[ignore = "a program for the test above"]
fn a_program_that_panics() {
    let any = clap::Arg::new("any").num_args(..).trailing_var_arg(true).allow_hyphen_values(true);
    let code = program::run(clap::Command::new("panics").arg(any), |_, _| panic!("index 5 is out of bounds"));
    assert!(code == ExitCode::from(101));
}
