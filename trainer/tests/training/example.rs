//! The example of a model of one's own, in groups.

use std::thread;

use elastic_trainer::{Elastic, Model, Settings, Stop, Tensor, TrainError};

use crate::worker::{environment, free_port, together};
use line::{HEIGHT, Line, Points, SLOPE};

#[allow(dead_code)] // Its `main`.
#[path = "../../examples/line.rs"]
mod line;

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

/// A model that on one rank differs from that on the others, as on a faulty machine.
struct Faulty {
    line: Line,
    tensors: Vec<Tensor>,
    first: f32,
}

impl Faulty {
    fn new(first: f32, decays: bool) -> Faulty {
        let line = Line::new();
        let mut tensors = line.tensors().to_vec();
        tensors.iter_mut().for_each(|tensor| tensor.decays = decays);
        Faulty { line, tensors, first }
    }
}

impl Model for Faulty {
    type Batch = Vec<[f32; 2]>;
    fn tensors(&self) -> &[Tensor] {
        &self.tensors
    }
    fn init(&self, seed: u64) -> Vec<f32> {
        let mut parameters = self.line.init(seed);
        parameters[1] += self.first;
        parameters
    }
    fn gradient(&self, parameters: &[f32], batch: &mut Vec<[f32; 2]>, gradient: &mut [f32]) -> f32 {
        self.line.gradient(parameters, batch, gradient)
    }
}

/// Trains with three ranks; one is faulty.
fn with_a_faulty_rank(rank: u32, first: f32, decays: bool) -> elastic_trainer::engine::state::State {
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
fn of_two_ranks_that_hold_different_numbers_nobody_goes_on() {
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
    struct Wrong(Vec<Tensor>, usize);
    impl Model for Wrong {
        type Batch = Vec<[f32; 2]>;
        fn tensors(&self) -> &[Tensor] {
            &self.0
        }
        fn init(&self, _seed: u64) -> Vec<f32> {
            vec![0.0; self.1]
        }
        fn gradient(&self, _: &[f32], _: &mut Vec<[f32; 2]>, _: &mut [f32]) -> f32 {
            panic!("it must not come to this")
        }
    }
    let gap = Tensor { name: "late".into(), shape: vec![2], range: 1..3, decays: false };
    for (tensors, first, points, said) in [
        (vec![gap], 3, 9, "tensor late of shape [2] lies at 1..3, after 0 parameters"),
        (Vec::new(), 0, 9, "its tensors hold 0 numbers"),
        (Tensor::sequence([("w", vec![2, 2])]), 3, 9, "3 first parameters instead of 4"),
        (Tensor::sequence([("w", vec![2, 2])]), 4, 0, "there are no samples"),
    ] {
        let elastic = Elastic::new(settings(1), environment(0, 1, 0, 0)).stop(Stop::default());
        let error = elastic.run(&Wrong(tensors, first), &Points(points)).unwrap_err();
        assert!(matches!(error, TrainError::Unusable(_)), "{error}");
        assert!(error.to_string().contains(said), "{error}");
    }
}
