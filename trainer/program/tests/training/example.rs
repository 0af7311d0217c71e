//! The example of a model of one's own, in groups.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::thread;

use elastic_proto::worker::FailureClass;
use elastic_trainer::checkpoint::Checkpoints;
use elastic_trainer::checkpoint::disk::Host;
use elastic_trainer::{Elastic, Gradient, Model, Outcome, Result, Rule, Settings, Step, Stop, Tensor, TrainError};

use crate::agent::{Agent, Commits};
use crate::worker::{environment, free_port, places, together, wait_for};
use line::{HEIGHT, Line, Points, SLOPE};

#[allow(dead_code)] // Its `main`.
#[path = "../../../examples/line.rs"]
pub(crate) mod line;

fn settings(epochs: u64) -> Settings {
    Settings { lr: 0.01, epochs: epochs.try_into().unwrap(), ..Settings::default() }
}

#[test]
fn a_model_of_ones_own_trains_to_the_same_bits_in_every_group() {
    let train = |world_size, epochs, round, folder: Option<&std::path::Path>| {
        together(world_size, round, |environment| {
            let settings = Settings { checkpoint_dir: folder.map(Into::into), ..settings(epochs) };
            let mut nowhere = std::io::sink();
            Elastic::new(settings, environment).output(&mut nowhere).run(&Line::new(), &Points(4096)).unwrap()
        })
    };
    let alone = train(1, 6, 0, None);
    let &[slope, height] = alone.parameters() else { panic!("two parameters") };
    assert!((slope - SLOPE).abs() < 0.1 && (height - HEIGHT).abs() < 0.1, "{slope} {height}");
    assert!(train(3, 6, 0, None) == alone);
    // And in a group that changes, from a checkpoint
    let folder = tempfile::tempdir().unwrap();
    train(2, 2, 1, Some(folder.path()));
    assert!(train(3, 6, 2, Some(folder.path())) == alone);
}

/// A model that on one rank differs from that on the others, as on a faulty machine: in its first parameters, or in
/// each step after the first.
struct Faulty {
    line: Line,
    decaying: Option<Vec<Tensor>>,
    begun: AtomicBool,
    first: f32,
}

impl Faulty {
    fn new(first: f32, decays: bool) -> Faulty {
        let line = Line::new();
        let mut tensors = line.tensors().to_vec();
        tensors.iter_mut().for_each(|tensor| tensor.rule = Rule::of_shape(&[1, 1]));
        Faulty { line, decaying: decays.then_some(tensors), begun: AtomicBool::new(false), first }
    }
}

impl Model for Faulty {
    type Batch = Vec<[f32; 2]>;
    type Replica = ();
    fn tensors(&self) -> &[Tensor] {
        let decaying = self.decaying.as_ref().filter(|_| self.begun.load(Ordering::Relaxed));
        decaying.map_or(self.line.tensors(), Vec::as_slice)
    }
    fn init(&self, seed: u64) -> Result<Vec<f32>> {
        let mut parameters = self.line.init(seed)?;
        parameters[1] += self.first;
        Ok(parameters)
    }
    fn replica(&self) -> Result<()> {
        Ok(())
    }
    fn gradient(
        &self,
        step: &Step<'_>,
        parameters: &[f32],
        batch: &Vec<[f32; 2]>,
        replica: &mut (),
        gradient: &mut Gradient<'_>,
    ) -> Result<f32> {
        self.begun.store(true, Ordering::Relaxed);
        self.line.gradient(step, parameters, batch, replica, gradient)
    }
}

/// Trains with three ranks; one is faulty.
fn with_a_faulty_rank(rank: u32, first: f32, decays: bool) -> elastic_trainer::State {
    together(3, 0, |environment| {
        let faulty = environment.rank == rank;
        let model = Faulty::new(if faulty { first } else { 0.0 }, faulty && decays);
        let settings = Settings { checkpoint_every: 1.try_into().unwrap(), ..settings(1) };
        let mut nowhere = std::io::sink();
        Elastic::new(settings, environment).output(&mut nowhere).run(&model, &Points(4096)).unwrap()
    })
}

#[test]
fn a_rank_that_holds_other_numbers_than_most_takes_theirs() {
    let right = with_a_faulty_rank(3, 0.0, false);
    assert!(with_a_faulty_rank(1, 0.5, false) == right, "one began with others");
    assert!(with_a_faulty_rank(0, 0.0, true) == right, "one, which saves, changed them otherwise in each step");
}

#[test]
fn two_ranks_that_hold_different_numbers_both_stop() {
    let port = free_port();
    let rank = |rank| {
        let model = Faulty::new(0.0, rank == 1);
        let settings = Settings { checkpoint_every: 5.try_into().unwrap(), ..settings(1) };
        let mut nowhere = std::io::sink();
        let ended =
            Elastic::new(settings, environment(rank, 2, 0, port)).output(&mut nowhere).run(&model, &Points(4096));
        let Err(error) = ended else { panic!("training continued") };
        assert!(matches!(error, TrainError::Split { step: 5, .. }), "{error}");
        let said = error.to_string();
        assert!(said.contains("rank 0: ") && said.contains("rank 1: "), "{said}");
    };
    thread::scope(|scope| {
        scope.spawn(|| rank(1));
        rank(0);
    });
}

#[test]
fn a_model_that_contradicts_itself_is_refused() {
    let gap = Tensor { name: "late".into(), shape: vec![2], range: 1..3, rule: Rule::of_shape(&[2]) };
    for (tensors, first, points, said) in [
        (vec![gap], 3, 9, "tensor late of shape [2] lies at 1..3 instead of 0..2"),
        (Vec::new(), 0, 9, "its tensors hold 0 numbers"),
        (Tensor::sequence([("w", vec![2]), ("v", vec![1]), ("w", vec![1])]), 4, 9, "are called w"),
        (Tensor::sequence([("w", vec![2]), ("sgd.w", vec![2])]), 4, 9, "sgd.w has a name like those of an optimizer"),
        (Tensor::sequence([("w", vec![1 << 48])]), 4, 9, "there is no memory"),
        (Tensor::sequence([("w", vec![2, 2])]), 3, 9, "3 first parameters instead of 4"),
        (Tensor::sequence([("w", vec![1]), ("v", vec![2])]), 3, 9, "first parameters in tensor v are not finite"),
        (Tensor::sequence([("w", vec![2, 2])]), 4, 0, "there are no samples"),
    ] {
        let elastic = Elastic::new(settings(1), environment(0, 1, 0, 0)).stop(Stop::default());
        let first = [0.0, 0.0, f32::NAN, 0.0][..first].to_vec();
        let gradient = |_: &[f32], _: &mut [f32]| -> f32 { panic!("it must not come to this") };
        let wrong = Changed { tensors, first, gradient, identity: None };
        let error = elastic.run(&wrong, &Points(points)).unwrap_err();
        assert!(matches!(error, TrainError::Unusable(_)), "{error}");
        assert!(error.to_string().contains(said), "{error}");
    }
}

/// A model with tensors, first parameters, a gradient and an identity of one's own.
pub(crate) struct Changed<G> {
    pub(crate) tensors: Vec<Tensor>,
    pub(crate) first: Vec<f32>,
    pub(crate) gradient: G,
    pub(crate) identity: Option<&'static str>,
}

impl<G: Fn(&[f32], &mut [f32]) -> f32 + Sync> Changed<G> {
    fn new(names: [&str; 2], gradient: G) -> Changed<G> {
        let tensors = Tensor::sequence(names.map(|name| (name, vec![1])));
        Changed { tensors, first: vec![0.0; 2], gradient, identity: Some("two numbers") }
    }
}

impl<G: Fn(&[f32], &mut [f32]) -> f32 + Sync> Model for Changed<G> {
    type Batch = Vec<[f32; 2]>;
    type Replica = ();
    fn tensors(&self) -> &[Tensor] {
        &self.tensors
    }
    fn init(&self, _: u64) -> Result<Vec<f32>> {
        Ok(self.first.clone())
    }
    fn replica(&self) -> Result<()> {
        Ok(())
    }
    fn gradient(
        &self,
        _: &Step<'_>,
        parameters: &[f32],
        _: &Vec<[f32; 2]>,
        (): &mut (),
        gradient: &mut Gradient<'_>,
    ) -> Result<f32> {
        Ok((self.gradient)(parameters, gradient))
    }
    fn identity(&self) -> String {
        // Without one, as a model that says nothing of itself.
        self.identity.map_or_else(|| Line(self.tensors.clone()).identity(), str::to_owned)
    }
}

/// Trains alone, in this folder.
fn alone<M: Model<Batch = Vec<[f32; 2]>>>(
    model: &M,
    folder: &std::path::Path,
    epochs: u64,
) -> Result<Outcome, TrainError> {
    let settings = Settings {
        checkpoint_dir: Some(folder.to_owned()),
        checkpoint_every: 3.try_into().unwrap(),
        keep: 50.try_into().unwrap(),
        ..settings(epochs)
    };
    let mut nowhere = std::io::sink();
    Elastic::new(settings, environment(0, 1, 0, 0)).output(&mut nowhere).run(model, &Points(640))
}

#[test]
fn a_gradient_that_is_not_finite_is_not_applied_and_its_tensor_is_named() {
    let folder = tempfile::tempdir().unwrap();
    // Its loss is finite throughout. Steps are of about 0.01 each, the second number's too.
    let spoilt = |parameters: &[f32], gradient: &mut [f32]| {
        let far = parameters[0] < -0.055;
        gradient.copy_from_slice(&[1.0, if far { f32::NAN } else { 1.0 }]);
        1.0
    };
    let error = alone(&Changed::new(["first", "second"], spoilt), folder.path(), 2).unwrap_err();
    assert!(matches!(&error, TrainError::Gradient { step: 7, tensor } if tensor == "second"), "{error}");
    // A process that resumes here may also have a model that does not write the whole gradient.
    for advice in ["lower --lr", "correct the model, which must write every number of it"] {
        assert!(error.to_string().contains(advice), "{error}");
    }
    // In the first step a lower rate is no help.
    let forgets = |_: &[f32], gradient: &mut [f32]| {
        gradient[0] = 1.0;
        1.0
    };
    let error = alone(&Changed::new(["first", "second"], forgets), &folder.path().join("other"), 2).unwrap_err();
    assert!(matches!(&error, TrainError::Gradient { step: 1, tensor } if tensor == "second"), "{error}");
    assert!(error.to_string().contains("correct the model, which must write every number of it"), "{error}");
    assert!(!error.to_string().contains("--lr"), "{error}");
}

#[test]
fn an_error_that_each_restart_would_meet_again_is_permanent() {
    let folder = tempfile::tempdir().unwrap();
    let told = |round, gradient: fn(&[f32], &mut [f32]) -> f32| {
        let mut environment = environment(0, 1, round, 0);
        let agent = Agent::start(folder.path(), &environment, None, Commits::Granted);
        environment.agent = Some(agent.socket.clone());
        let model = Changed::new(["first", "second"], gradient);
        let run = move || {
            let elastic = Elastic::new(settings(1), environment).stop(Stop::default());
            elastic.output(&mut std::io::sink()).run(&model, &Points(64)).map(drop)
        };
        (thread::spawn(run).join().map_err(drop), agent.failure())
    };
    let (ended, (class, message)) = told(1, |_, _| f32::NAN);
    assert!(matches!(ended, Ok(Err(TrainError::Diverged { step: 1 }))), "{ended:?}");
    let said = "the loss of step 1 is not finite; correct the model or its data";
    assert_eq!((class, message.as_str()), (FailureClass::Permanent, said));
    let (ended, told) = told(2, |_, _| panic!("index out of bounds"));
    assert!(ended.is_err(), "it panics as before");
    assert_eq!(told, (FailureClass::Permanent, String::new()), "standard error says what it was");
}

#[test]
fn a_state_that_is_not_finite_is_not_kept_and_its_tensor_is_named() {
    let folder = tempfile::tempdir().unwrap();
    // The square of this gradient is beyond f32.
    let large = |parameters: &[f32], gradient: &mut [f32]| {
        gradient.copy_from_slice(&[1.0, if parameters[0] < -0.025 { 1e30 } else { 1.0 }]);
        1.0
    };
    let error = alone(&Changed::new(["first", "second"], large), folder.path(), 2).unwrap_err();
    assert!(matches!(&error, TrainError::NotFinite { step: 6, tensor } if tensor == "adamw.square.second"), "{error}");
    assert!(Checkpoints::new(Host, folder.path()).newest().is_none_or(|kept| kept.manifest.step == 3));
}

#[test]
fn a_checkpoint_of_other_tensors_is_refused_whatever_the_model_says_of_itself() {
    let folder = tempfile::tempdir().unwrap();
    let flat = |_: &[f32], gradient: &mut [f32]| {
        gradient.fill(1.0);
        1.0
    };
    for identity in [Some("two numbers"), None] {
        let folder = folder.path().join(identity.unwrap_or_default());
        let named = |names| Changed { identity, ..Changed::new(names, flat) };
        alone(&named(["first", "second"]), &folder, 1).unwrap();
        let error = alone(&named(["first", "other"]), &folder, 2).unwrap_err();
        assert!(matches!(error, TrainError::OtherTensors { step: 10, .. }), "{error}");
        assert!(error.to_string().contains("second of shape [1] instead of other of shape [1]"), "{error}");
    }
    // Nor do such workers meet
    let port = free_port();
    let meet = |rank, names| {
        let mut nowhere = std::io::sink();
        let settings = Settings { form_timeout: std::time::Duration::from_secs(5), ..settings(1) };
        let elastic = Elastic::new(settings, environment(rank, 2, 0, port)).output(&mut nowhere);
        elastic.run(&Changed::new(names, flat), &Points(640)).unwrap_err().to_string()
    };
    thread::scope(|scope| {
        scope.spawn(|| meet(0, ["first", "second"]));
        let error = meet(1, ["first", "other"]);
        assert!(error.contains("refused this worker") && error.contains("(tensors "), "{error}");
    });
}

#[test]
fn a_step_that_is_longer_than_the_time_to_quiesce_is_given_up_between_its_pieces() {
    let folder = tempfile::tempdir().unwrap();
    // Given a step of many pieces that takes far longer than a test does
    let computed = AtomicU32::new(0);
    let slow = |_: &[f32], gradient: &mut [f32]| {
        computed.fetch_add(1, Ordering::Relaxed);
        thread::sleep(std::time::Duration::from_millis(20));
        gradient.fill(1.0);
        1.0
    };
    for (threads, workers) in [(1, 1), (2, 1), (2, 2)] {
        let folder = folder.path().join(format!("{threads}-{workers}"));
        std::fs::create_dir(&folder).unwrap();
        thread::scope(|scope| {
            let places = places(1, workers);
            let agents: Vec<Agent> =
                places.iter().map(|place| Agent::start(&folder, place, None, Commits::Granted)).collect();
            let stop = Stop::default();
            for (place, agent) in places.iter().zip(&agents) {
                let environment = elastic_trainer::Environment { agent: Some(agent.socket.clone()), ..place.clone() };
                let settings = Settings {
                    micro_batch: 1.try_into().ok(),
                    batch: 100_000.try_into().unwrap(),
                    threads: threads.try_into().unwrap(),
                    bucket_mb: 1e-6,
                    ..settings(1)
                };
                let stop = Stop::clone(&stop);
                scope.spawn(move || {
                    let mut nowhere = std::io::sink();
                    let model = Changed::new(["first", "second"], slow);
                    let elastic = Elastic::new(settings, environment).stop(stop).output(&mut nowhere);
                    elastic.run(&model, &Points(100_000)).unwrap_err()
                });
            }
            // Then it is given up when a round forms, and its workers stay
            let before = computed.load(Ordering::Relaxed);
            wait_for("some pieces", || (computed.load(Ordering::Relaxed) > before + 20).then_some(()));
            agents.iter().for_each(|agent| agent.forming(2, std::time::Duration::from_secs(4)));
            let asked = std::time::Instant::now();
            agents.iter().for_each(|agent| assert_eq!(agent.quiesced(2), 0));
            assert!(asked.elapsed() < std::time::Duration::from_secs(4), "{threads} threads: {:?}", asked.elapsed());
            stop.raise();
        });
    }
}
