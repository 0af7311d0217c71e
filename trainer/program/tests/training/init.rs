//! Where a run begins and what it may change: `--init`, and `--change`.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::thread;

use elastic_trainer::{Elastic, Environment, Outcome, Result, Settings, Tensor, TrainError};
use safetensors::Dtype;
use safetensors::tensor::{TensorView, serialize_to_file};

use crate::example::Changed;
use crate::example::line::Points;
use crate::worker::{environment, free_port, run, together, train};

/// A file of these tensors: shape, kind, and the first number, which the others follow.
fn file(folder: &Path, name: &str, tensors: &[(&str, &[usize], Dtype, f32)]) -> PathBuf {
    let bytes: BTreeMap<&str, Vec<u8>> = tensors
        .iter()
        .map(|&(name, shape, kind, first)| {
            let count = shape.iter().product::<usize>() * if kind == Dtype::F64 { 2 } else { 1 };
            (name, (0..count).flat_map(|number| (first + number as f32).to_le_bytes()).collect())
        })
        .collect();
    let views = tensors
        .iter()
        .map(|&(name, shape, kind, _)| (name, TensorView::new(kind, shape.to_vec(), &bytes[name]).unwrap()));
    let path = folder.join(name);
    serialize_to_file(views, None, &path).unwrap();
    path
}

const W: (&str, &[usize], Dtype, f32) = ("w", &[2, 2], Dtype::F32, 1.0);
const B: (&str, &[usize], Dtype, f32) = ("b", &[3], Dtype::F32, 10.0);

fn settings(init: Option<&Path>, epochs: u64) -> Settings {
    let (init, epochs) = (init.map(Into::into), epochs.try_into().unwrap());
    Settings { init, epochs, weight_decay: 0.0, ..Settings::default() }
}

/// Trains parameters that do not move.
fn still(settings: Settings, environment: Environment) -> Result<Outcome, TrainError> {
    let mut nowhere = std::io::sink();
    let gradient = |_: &[f32], gradient: &mut [f32]| {
        gradient.fill(0.0);
        1.0
    };
    let tensors = Tensor::sequence([("w", vec![2, 2]), ("b", vec![3])]);
    let still = Changed { tensors, first: vec![0.0; 7], gradient, identity: None };
    Elastic::new(settings, environment).output(&mut nowhere).run(&still, &Points(640))
}

#[test]
fn a_run_begins_with_the_parameters_of_a_file_by_their_names() {
    let folder = tempfile::tempdir().unwrap();
    // In another order, and beside what an optimizer has kept
    let path = file(folder.path(), "first", &[B, W, ("adamw.mean.w", &[2, 2], Dtype::F32, 5.0)]);
    for world_size in [1, 3] {
        let state = together(world_size, 0, |place| still(settings(Some(&path), 1), place).unwrap());
        assert_eq!(state.parameters(), [1.0, 2.0, 3.0, 4.0, 10.0, 11.0, 12.0]);
    }
}

#[test]
fn a_file_that_does_not_fit_is_refused_and_its_tensor_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let wrong = |tensors: &[(&str, &[usize], Dtype, f32)], said: &str| {
        let path = file(folder.path(), "wrong", tensors);
        let error = still(settings(Some(&path), 1), environment(0, 1, 0, 0)).unwrap_err();
        assert!(matches!(error, TrainError::InitUnfit { .. }) && error.to_string().contains(said), "{error}");
    };
    wrong(&[W], "it has no tensor b");
    wrong(&[W, ("bias", &[3], Dtype::F32, 0.0)], "it has no tensor b, but has bias");
    wrong(&[W, B, ("c", &[1], Dtype::F32, 0.0)], "it has a tensor c, which the model has not");
    wrong(&[("w", &[4, 1], Dtype::F32, 0.0), B], "its tensor w has shape [4, 1] instead of [2, 2]");
    wrong(&[W, ("b", &[3], Dtype::F64, 0.0)], "its tensor b is of F64 instead of F32");
    wrong(&[W, ("b", &[3], Dtype::F32, f32::INFINITY)], "its tensor b has numbers that are not finite");
    let torn = folder.path().join("torn");
    std::fs::write(&torn, "no tensors").unwrap();
    let error = still(settings(Some(&torn), 1), environment(0, 1, 0, 0)).unwrap_err().to_string();
    assert!(error.contains("torn: it is no safetensors file"), "{error}");
    let error = still(settings(Some(&folder.path().join("none")), 1), environment(0, 1, 0, 0)).unwrap_err();
    assert!(matches!(error, TrainError::Init { .. }), "{error}");
}

#[test]
fn a_run_is_that_of_its_first_parameters() {
    let folder = tempfile::tempdir().unwrap();
    let (first, other) =
        (file(folder.path(), "first", &[W, B]), file(folder.path(), "other", &[W, ("b", &[3], Dtype::F32, 9.0)]));
    let kept = folder.path().join("kept");
    let run = |init: Option<&Path>, epochs| {
        still(Settings { checkpoint_dir: Some(kept.clone()), ..settings(init, epochs) }, environment(0, 1, 0, 0))
    };
    run(Some(&first), 1).unwrap();
    // It continues with the same, from its checkpoint, and with nothing else
    assert_eq!(run(Some(&first), 2).unwrap().state.step, 20);
    for init in [None, Some(other.as_path())] {
        let error = run(init, 3).unwrap_err();
        assert!(
            matches!(error, TrainError::OtherSettings { .. }) && error.to_string().contains("--init crc32c:"),
            "{error}"
        );
    }
    // Nor do such workers meet
    let port = free_port();
    let meet = |rank, init: &Path| {
        let form_timeout = std::time::Duration::from_secs(5);
        still(Settings { form_timeout, ..settings(Some(init), 1) }, environment(rank, 2, 0, port))
            .unwrap_err()
            .to_string()
    };
    thread::scope(|scope| {
        scope.spawn(|| meet(0, &first));
        let error = meet(1, &other);
        assert!(error.contains("refused this worker") && error.contains("--init crc32c:"), "{error}");
    });
}

#[test]
fn a_change_that_is_meant_continues_a_checkpoint() {
    let folder = tempfile::tempdir().unwrap();
    let flags = |more: &str| format!("--hidden 16 --checkpoint-dir {} {more}", folder.path().display());
    train(&flags("--epochs 1"), 1, 0);
    let refused = |more: &str| run(&flags(more), environment(0, 1, 1, 0)).unwrap_err().to_string();
    let error = refused("--epochs 2 --lr 0.002 --clip 1");
    assert!(error.contains("--lr 0.002 instead of --lr 0.001; --clip 1 instead of none"), "{error}");
    assert!(error.ends_with("; if that is meant, add --change lr,clip"), "{error}");
    let error = refused("--epochs 2 --lr 0.002 --clip 1 --change lr");
    assert!(error.contains("it has --clip 1 instead of none;") && error.ends_with("--change clip"), "{error}");
    let error = refused("--epochs 2 --lr 0.002 --batch 32 --change lr");
    assert!(error.contains("--batch 32 instead of --batch 64") && !error.contains("--change"), "{error}");
    // When it is meant, then it takes effect, and the next start has it too
    let changed = train(&flags("--epochs 2 --lr 0.002 --change lr"), 2, 2);
    assert!(changed.step == 46 && changed != train("--hidden 16 --epochs 2", 1, 0));
    assert!(train(&flags("--epochs 2 --lr 0.002"), 1, 3) == changed);
    assert!(refused("--epochs 2").contains("--lr 0.001 instead of --lr 0.002"));
}
