//! The learning rate of a step: a function of its number, so that no history can change it.

use std::fmt;

/// How the rate continues once it has risen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Course {
    /// It stays
    Constant,
    /// It falls to --lr-min along half a cosine, by the last step
    Cosine,
    /// It falls to --lr-min evenly, by the last step
    Linear,
}

impl fmt::Display for Course {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(match self {
            Course::Constant => "constant",
            Course::Cosine => "cosine",
            Course::Linear => "linear",
        })
    }
}

/// A rate that rises linearly from zero, then follows its course.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Rate {
    /// The rate after the rise.
    pub highest: f32,
    /// The value that a falling rate ends at.
    pub lowest: f32,
    /// Steps of the rise: the last of them has the highest rate.
    pub warmup: u64,
    /// What follows.
    pub course: Course,
    /// Steps in all.
    pub steps: u64,
}

impl Rate {
    /// The rate of a step, counted from 1. Rises as `torch.optim.lr_scheduler.LinearLR` with a start factor of
    /// 1/`warmup`; falls over the steps that remain, as `CosineAnnealingLR` (Loshchilov and Hutter, "SGDR", 2017) or
    /// `LinearLR`.
    pub fn of(&self, step: u64) -> f32 {
        let done = step.saturating_sub(1);
        let (highest, lowest) = (f64::from(self.highest), f64::from(self.lowest));
        if done < self.warmup {
            return (highest * step as f64 / self.warmup as f64) as f32;
        }
        let (fallen, fall) = (done - self.warmup, self.steps.saturating_sub(self.warmup).max(1));
        let share = fallen.min(fall) as f64 / fall as f64;
        let left = match self.course {
            Course::Constant => return self.highest,
            Course::Cosine => (1.0 + (std::f64::consts::PI * share).cos()) / 2.0,
            Course::Linear => 1.0 - share,
        };
        (lowest + (highest - lowest) * left) as f32
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_those_of_pytorchs_formulas() {
        // LinearLR: base · (start + (1 − start) · done / (warmup − 1)) with start 1/4 over 3 scheduler steps.
        // CosineAnnealingLR: lowest + (base − lowest) · (1 + cos(π · done / 8)) / 2, over the 8 steps that remain.
        let rate = Rate { highest: 1e-3, lowest: 1e-4, warmup: 4, course: Course::Cosine, steps: 12 };
        let wanted = [
            (1, 2.5e-4),
            (2, 5e-4),
            (3, 7.5e-4),
            (4, 1e-3),
            (5, 1e-3),
            (6, 9.657_457_9e-4),
            (7, 8.681_980_5e-4),
            (8, 7.222_075_4e-4),
            (9, 5.5e-4),
            (10, 3.777_924_6e-4),
            (11, 2.318_019_5e-4),
            (12, 1.342_542_1e-4),
            (13, 1e-4),
            (99, 1e-4),
        ];
        for (step, wanted) in wanted {
            let found = rate.of(step);
            assert!((found - wanted).abs() < 1e-10, "step {step}: {found}, not {wanted}");
        }
    }

    #[test]
    fn without_a_course_the_rate_is_the_flags_own_bits() {
        let rate = Rate { highest: 0.1, lowest: 0.0, warmup: 0, course: Course::Constant, steps: 5 };
        assert!([1, 2, 5, 6, u64::MAX].into_iter().all(|step| rate.of(step).to_bits() == 0.1f32.to_bits()));
        let rising = Rate { warmup: 10, ..rate };
        assert_eq!([1, 5, 10, 11].map(|step| rising.of(step)), [0.01, 0.05, 0.1, 0.1]);
    }

    #[test]
    fn a_run_that_ends_while_the_rate_rises_has_a_rate() {
        let rate = Rate { highest: 1.0, lowest: 0.0, warmup: 10, course: Course::Cosine, steps: 4 };
        assert_eq!([1, 4, 11].map(|step| rate.of(step)), [0.1, 0.4, 1.0]);
    }
}
