//! A perceptron that reads hand-written digits.

use std::num::NonZeroUsize;
use std::path::PathBuf;

use clap::Args;
use elastic_trainer::program::Task;
use elastic_trainer::{Data, Result, Settings};

use crate::data::digits::{CLASSES, PIXELS};
use crate::{Digits, Mlp, Rows};

/// What to train, and how.
#[derive(Debug, Clone, Args)]
pub struct Flags {
    /// Images to train on: lines of 64 pixels and a digit, as CSV or gzipped CSV [default: the UCI digits, built in]
    #[arg(long, value_name = "FILE")]
    pub data: Option<PathBuf>,
    /// Train on nine copies of each image: itself, and moved by one pixel in eight directions
    #[arg(long)]
    pub shifts: bool,
    /// Widths of the hidden layers, separated by commas
    #[arg(long, value_name = "WIDTH,…", value_delimiter = ',', default_value = "128", value_parser = width)]
    pub hidden: Vec<NonZeroUsize>,
    /// How to train it
    #[command(flatten, next_help_heading = "Training")]
    pub settings: Settings,
}

/// The widest layer: two such layers have as many weights between them as fit into 16 GiB.
const WIDEST: usize = 65_536;

fn width(text: &str) -> Result<NonZeroUsize, String> {
    let width = text.parse().ok().filter(|width: &NonZeroUsize| width.get() <= WIDEST);
    width.ok_or_else(|| format!("must be 1 to {WIDEST}"))
}

impl Task for Flags {
    type Model = Mlp;
    type Data = Digits;

    fn settings(&self) -> &Settings {
        &self.settings
    }

    fn make(&self) -> Result<(Mlp, Digits)> {
        let digits = Digits::load(self.data.as_deref(), self.shifts)?;
        let hidden = self.hidden.iter().map(|width| width.get());
        let sizes: Vec<usize> = [PIXELS].into_iter().chain(hidden).chain([CLASSES]).collect();
        Ok((Mlp::new(&sizes), digits))
    }

    fn judge(&self, model: &Mlp, digits: &Digits, parameters: &[f32]) -> Option<String> {
        let (right, all) = count_correct(model, digits, parameters);
        Some(format!("test accuracy {:.4} ({right} of {all})", right as f64 / all as f64))
    }
}

/// Test images that these parameters name correctly, and their number.
pub fn count_correct(model: &Mlp, digits: &Digits, parameters: &[f32]) -> (u64, u64) {
    let test = &digits.test;
    let mut batch = Rows::default();
    test.fill(&(0..test.samples()).collect::<Vec<_>>(), &mut batch);
    let predicted = model.predict(parameters, &batch, &mut Default::default());
    let correct = predicted.iter().zip(&batch.labels).filter(|(predicted, label)| predicted == label).count();
    (correct as u64, test.samples())
}
