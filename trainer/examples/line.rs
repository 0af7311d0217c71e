//! A model of one's own, trained elastically: a line through noisy points. `Model`'s page explains each part.
//!
//! ```text
//! cargo run --example line
//! elastic-agent --standalone --nproc-per-node=3 --no-python target/debug/examples/line --checkpoint-dir=/tmp/line
//! ```

use std::process::ExitCode;

use clap::Args;
use elastic_trainer::program::{self, Task};
use elastic_trainer::{Data, Gradient, Model, Result, SampleError, Settings, Step, Tensor, random};

/// What the points scatter around.
pub(crate) const SLOPE: f32 = 3.0;
pub(crate) const HEIGHT: f32 = -1.0;
/// How far the points lie from the line at most.
const NOISE: f32 = 0.5;

/// Fit a line to points, by as many workers as there happen to be
#[derive(Debug, Args)]
#[command(mut_arg("lr", |lr| lr.default_value("0.01")))]
struct Flags {
    /// Points to fit it to
    #[arg(long, default_value_t = 4096)]
    points: u64,
    #[command(flatten, next_help_heading = "Training")]
    settings: Settings,
}

/// A slope and a height.
#[derive(Debug)]
pub(crate) struct Line(pub(crate) Vec<Tensor>);

impl Line {
    pub(crate) fn new() -> Line {
        Line(Tensor::sequence([("slope", vec![1]), ("height", vec![1])]))
    }
}

impl Model for Line {
    type Batch = Vec<[f32; 2]>;
    type Replica = ();

    fn tensors(&self) -> &[Tensor] {
        &self.0
    }

    fn init(&self, seed: u64) -> Result<Vec<f32>> {
        Ok(vec![random::unit(seed), 0.0])
    }

    fn replica(&self) -> Result<()> {
        Ok(())
    }

    fn gradient(
        &self,
        _: &Step<'_>,
        parameters: &[f32],
        batch: &Vec<[f32; 2]>,
        (): &mut (),
        gradient: &mut Gradient<'_>,
    ) -> Result<f32> {
        gradient.fill(0.0);
        let mut loss = 0.0;
        for [x, y] in batch {
            let error = parameters[0] * x + parameters[1] - y;
            gradient[0] += 2.0 * error * x;
            gradient[1] += 2.0 * error;
            loss += error * error;
        }
        Ok(loss)
    }
}

/// So many points. None is stored: a point follows from its number.
#[derive(Debug)]
pub(crate) struct Points(pub(crate) u64);

impl Data for Points {
    type Batch = Vec<[f32; 2]>;

    fn samples(&self) -> u64 {
        self.0
    }

    fn read(&self, samples: &[u64], _: &Step<'_>, batch: &mut Vec<[f32; 2]>) -> Result<(), SampleError> {
        batch.clear();
        batch.extend(samples.iter().map(|&sample| {
            let x = 2.0 * random::unit(2 * sample) - 1.0;
            let noise = NOISE * (2.0 * random::unit(2 * sample + 1) - 1.0);
            [x, SLOPE * x + HEIGHT + noise]
        }));
        Ok(())
    }

    /// The noise is uniform over a width of twice [`NOISE`], and the variance of that is known.
    fn reachable_loss(&self) -> Option<f64> {
        Some(f64::from(NOISE).powi(2) / 3.0)
    }
}

impl Task for Flags {
    type Model = Line;
    type Data = Points;

    fn settings(&self) -> &Settings {
        &self.settings
    }

    fn make(&self) -> Result<(Line, Points)> {
        Ok((Line::new(), Points(self.points)))
    }

    fn judge(&self, _: &Line, _: &Points, parameters: &[f32]) -> Option<String> {
        Some(format!("y = {:.3} x + {:.3}", parameters[0], parameters[1]))
    }
}

fn main() -> ExitCode {
    program::main::<Flags>()
}
