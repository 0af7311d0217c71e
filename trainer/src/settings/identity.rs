//! What identifies a run: the flags and words that determine the result of a step, and which of them may change when
//! training resumes.

use elastic_collective::identity::{Difference, RunIdentity};

use super::device::Precision;
use super::{OptimizerName, Settings};
use crate::model::Course;

/// The flags that `--change` may name: a step has the same samples, and the state the same tensors, whatever they are,
/// except where momentum begins or ends.
pub(crate) const CHANGEABLE: [&str; 13] = [
    "lr",
    "schedule",
    "lr-min",
    "warmup-steps",
    "epochs",
    "clip",
    "weight-decay",
    "betas",
    "eps",
    "momentum",
    "nesterov",
    "micro-batch",
    "precision",
];

impl Settings {
    /// What determines a step's result in a run of `steps`: these settings, and the words for the model and the data.
    /// Training may only continue with the same, and with what `--change` names.
    pub fn identity(&self, model: &str, data: &str, steps: u64) -> RunIdentity {
        let Settings { batch, shards, lr, weight_decay, seed, .. } = self;
        let mut identity = RunIdentity::parse(model);
        let mut say = |words: String| identity.say(&words);
        say(format!("--batch {batch} --shards {shards} --lr {lr} --weight-decay {weight_decay}"));
        if let Some(samples) = self.micro_batch {
            say(format!("--micro-batch {samples}"));
        }
        if self.warmup_steps > 0 {
            say(format!("--warmup-steps {}", self.warmup_steps));
        }
        if self.schedule != Course::Constant {
            say(format!("--schedule {} --lr-min {} (over {steps} steps)", self.schedule, self.lr_min));
        }
        say(self.of_the_optimizer());
        if let Some(norm) = self.clip {
            say(format!("--clip {norm}"));
        }
        if self.precision == Precision::Bf16 {
            say("--precision bf16".to_owned());
        }
        say(format!("--seed {seed} {data}"));
        identity
    }

    /// What is not as PyTorch's AdamW has it unless told otherwise.
    fn of_the_optimizer(&self) -> String {
        let Settings { optimizer, betas: [beta1, beta2], eps, momentum, nesterov, .. } = *self;
        let mut words = String::new();
        if optimizer == OptimizerName::Sgd {
            words += " --optimizer sgd";
        }
        if momentum > 0.0 {
            words += &format!(" --momentum {momentum}");
        }
        if nesterov {
            words += " --nesterov";
        }
        if (beta1, beta2) != (0.9, 0.999) {
            words += &format!(" --betas {beta1},{beta2}");
        }
        if eps != 1e-8 {
            words += &format!(" --eps {eps}");
        }
        words
    }

    /// Those differences that `--change` does not name.
    pub(crate) fn not_meant(&self, differences: &[Difference]) -> Vec<Difference> {
        differences.iter().filter(|one| !(may_change(one) && self.change.contains(&one.name))).cloned().collect()
    }
}

/// Whether training can resume in spite of a difference. Momentum is a part of the state where there is any.
fn may_change(one: &Difference) -> bool {
    let keeps_the_state = one.name != "momentum" || one.ours.is_some() && one.theirs.is_some();
    CHANGEABLE.contains(&&*one.name) && keeps_the_state
}

/// What may be done about differences, in words.
pub(crate) fn advice(differences: &[Difference]) -> String {
    let names: Vec<&str> = differences.iter().map(|one| &*one.name).collect();
    if differences.iter().all(may_change) {
        format!("; if that is meant, add --change {}", names.join(","))
    } else {
        String::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_is_fixed_by_all_that_changes_its_result() {
        let words = |change: fn(&mut Settings)| {
            let mut settings = Settings::default();
            change(&mut settings);
            settings.identity("--model", "(data)", 70).to_string()
        };
        let plain = "--model --batch 64 --shards 8 --lr 0.001 --weight-decay 0.01 --seed 0 (data)";
        assert_eq!(words(|_| ()), plain);
        assert_eq!(words(|settings| settings.threads = 3.try_into().unwrap()), plain);
        assert_eq!(words(|settings| settings.epochs = 3.try_into().unwrap()), plain);
        assert_eq!(words(|settings| settings.bucket_mb = 1.0), plain);
        for (change, said) in [
            ((|settings| settings.micro_batch = 4.try_into().ok()) as fn(&mut Settings), "--micro-batch 4"),
            (|settings| settings.warmup_steps = 9, "--warmup-steps 9"),
            (|settings| settings.schedule = Course::Cosine, "--schedule cosine --lr-min 0 (over 70 steps)"),
            (|settings| settings.schedule = Course::Linear, "--schedule linear --lr-min 0 (over 70 steps)"),
            (|settings| settings.betas = [0.8, 0.95], "--betas 0.8,0.95"),
            (|settings| settings.eps = 1e-6, "--eps 0.000001"),
            (|settings| settings.optimizer = OptimizerName::Sgd, "--optimizer sgd"),
            (|settings| settings.momentum = 0.5, "--momentum 0.5"),
            (|settings| settings.clip = Some(0.5), "--clip 0.5"),
            (|settings| settings.precision = Precision::Bf16, "--precision bf16"),
        ] {
            assert!(words(change).contains(&format!("--weight-decay 0.01 {said} --seed")), "{}", words(change));
        }
    }

    #[test]
    fn a_change_is_meant_where_each_of_its_fields_is_named() {
        let settings = |change: &[&str]| Settings {
            change: change.iter().map(|name| (*name).to_owned()).collect(),
            lr: 0.5,
            clip: Some(1.0),
            ..Settings::default()
        };
        let theirs = Settings::default().identity("--model", "(data)", 70);
        let left = |change: &[&str]| {
            let settings = settings(change);
            let differences = settings.identity("--model", "(data)", 70).differences(&theirs);
            let left = settings.not_meant(&differences);
            (left.len(), advice(&left))
        };
        assert_eq!(left(&[]), (2, "; if that is meant, add --change lr,clip".to_owned()));
        assert_eq!(left(&["lr"]).0, 1);
        assert_eq!(left(&["clip", "lr"]).0, 0);
        let other = Settings::default().identity("--other", "(data)", 70);
        let differences = other.differences(&theirs);
        assert!(differences.len() == 2 && advice(&differences).is_empty(), "another model is no change");
        // Where momentum begins, the state has other tensors.
        let moving = |momentum| Settings { momentum, change: vec!["momentum".to_owned()], ..Settings::default() };
        for (before, meant) in [(0.0, false), (0.5, true)] {
            let [before, now] = [moving(before), moving(0.9)].map(|one| one.identity("--model", "(data)", 70));
            let differences = now.differences(&before);
            assert_eq!(moving(0.9).not_meant(&differences).is_empty(), meant);
            assert_eq!(advice(&differences).is_empty(), !meant);
        }
    }
}
