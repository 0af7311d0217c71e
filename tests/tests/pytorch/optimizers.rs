//! The trainer's optimizers and learning rates against PyTorch's.

use std::fs;

use elastic_tests::prelude::*;
use elastic_trainer::model::{Course, Moved, ParameterGroup, Rule, Stride};
use elastic_trainer::random::unit;
use elastic_trainer::settings::OptimizerName;
use elastic_trainer::{Settings, Tensor};

const STEPS: u64 = 12;

fn numbers(count: usize, salt: u64) -> Vec<f32> {
    (0..count as u64).map(|place| 2.0 * unit(salt << 40 | place) - 1.0).collect()
}

/// A matrix, a bias, and a tensor with a rate and a decay of its own.
fn tensors() -> Vec<Tensor> {
    let mut tensors = Tensor::sequence([("w", vec![6, 5]), ("b", vec![7]), ("slow", vec![4])]);
    tensors[2].rule = Rule::Optimize { group: ParameterGroup { rate: 0.5, decay: 2.0 } };
    tensors
}

/// As the script reads them.
fn groups(tensors: &[Tensor]) -> impl Iterator<Item = String> {
    tensors.iter().flat_map(|tensor| {
        let Rule::Optimize { group: ParameterGroup { rate, decay } } = tensor.rule else { panic!("no average") };
        ["--group".to_owned(), format!("{},{rate},{decay}", tensor.range.len())]
    })
}

/// What the parameters, and what is kept for them, come to after these gradients.
fn stepped(settings: &Settings, parameters: &[f32], gradients: &[Vec<f32>]) -> Vec<f32> {
    let (tensors, rule, rate) = (tensors(), settings.optimizer(), settings.rate(STEPS));
    let mut all = vec![vec![0.0; parameters.len()]; 1 + rule.kept().len()];
    all[0].copy_from_slice(parameters);
    for (step, gradient) in (1..).zip(gradients) {
        let mut parts = all.iter_mut().map(Vec::as_mut_slice);
        let parameters = parts.next().unwrap();
        // The script has the mean, and the trainer a sum over four samples.
        let sum: Vec<f32> = gradient.iter().map(|number| 4.0 * number).collect();
        let moved = Moved { first: 0, parameters, kept: parts.collect(), gradient: &sum };
        rule.step(&Stride { step, rate: rate.of(step), mean: 0.25, scale: 0.25 }, &tensors, moved);
    }
    all.concat()
}

fn compare(torch: &Torch, settings: &Settings, flags: &str) {
    let tensors = tensors();
    let count = tensors.last().unwrap().range.end;
    let parameters = numbers(count, 1);
    let gradients: Vec<Vec<f32>> = (0..STEPS).map(|step| numbers(count, 2 + step)).collect();
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    let bytes = |numbers: &[f32]| numbers.iter().flat_map(|number| number.to_le_bytes()).collect::<Vec<_>>();
    fs::write(path("parameters"), bytes(&parameters)).unwrap();
    fs::write(path("gradients"), bytes(&gradients.concat())).unwrap();
    let mut script = torch.run(&torch::script("optimizers.py"));
    script.arg(folder.path()).arg(STEPS.to_string()).args(flags.split_whitespace()).args(groups(&tensors));
    let ran = script.output().unwrap();
    assert!(ran.status.success(), "{flags}: {}", String::from_utf8_lossy(&ran.stderr));

    let rate = settings.rate(STEPS);
    let rates = String::from_utf8(ran.stdout).unwrap();
    assert_eq!(rates.lines().count() as u64, STEPS, "{flags}: {rates}");
    for (step, theirs) in (1..).zip(rates.lines()) {
        let (ours, theirs) = (rate.of(step), theirs.parse::<f32>().unwrap());
        assert!((ours - theirs).abs() <= 1e-6 * theirs, "{flags}: step {step} has rate {ours}, PyTorch's {theirs}");
    }
    let ours = stepped(settings, &parameters, &gradients);
    let theirs = fs::read(path("state")).unwrap();
    let theirs: Vec<f32> = theirs.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect();
    assert_eq!(theirs.len(), ours.len(), "{flags}: what is kept");
    for (place, (ours, theirs)) in ours.iter().zip(&theirs).enumerate() {
        assert!(
            (ours - theirs).abs() <= 2e-6 * theirs.abs().max(0.1),
            "{flags}: {ours} at {place}, PyTorch has {theirs}"
        );
    }
}

#[test]
fn steps_and_rates_are_pytorchs() {
    let Some(torch) = Torch::find() else { return };
    let adamw = Settings { lr: 0.02, ..Settings::default() };
    let sgd = Settings { optimizer: OptimizerName::Sgd, weight_decay: 0.0, ..adamw.clone() };
    let momentum = Settings { momentum: 0.9, weight_decay: 0.1, ..sgd.clone() };
    let rising = Settings { warmup_steps: 4, ..adamw.clone() };

    for (settings, flags) in [
        (adamw.clone(), "--lr 0.02"),
        (
            Settings { betas: [0.8, 0.95], eps: 1e-3, weight_decay: 0.2, ..adamw.clone() },
            "--lr 0.02 --betas 0.8,0.95 --eps 1e-3 --weight-decay 0.2",
        ),
        (sgd.clone(), "--lr 0.02 --optimizer sgd"),
        (momentum.clone(), "--lr 0.02 --optimizer sgd --momentum 0.9 --weight-decay 0.1"),
        (
            Settings { nesterov: true, ..momentum.clone() },
            "--lr 0.02 --optimizer sgd --momentum 0.9 --weight-decay 0.1 --nesterov",
        ),
        (Settings { schedule: Course::Cosine, ..rising.clone() }, "--lr 0.02 --warmup-steps 4 --schedule cosine"),
        (
            Settings { schedule: Course::Linear, lr_min: 0.002, ..rising },
            "--lr 0.02 --warmup-steps 4 --schedule linear --lr-min 0.002",
        ),
        (
            Settings { schedule: Course::Linear, ..momentum },
            "--lr 0.02 --optimizer sgd --momentum 0.9 --weight-decay 0.1 --schedule linear",
        ),
    ] {
        compare(&torch, &settings, flags);
    }
}
