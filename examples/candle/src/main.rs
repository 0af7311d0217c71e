//! A convolutional network of candle's learns hand-written digits, by candle's autograd, elastically.

use std::collections::BTreeMap;
use std::process::ExitCode;

use candle_core::{DType, Device, Result as Candle, Tensor, Var};
use candle_nn::{Conv2d, Conv2dConfig, Linear, Module, VarBuilder, VarMap, conv2d, linear, loss};
use elastic_models::{Digits, Rows};
use elastic_trainer::program::{self, Task};
use elastic_trainer::{Gradient, Model, Result, Settings, Step};

/// Learn hand-written digits with a convolutional network of candle's
#[derive(clap::Args)]
struct Flags {
    /// Share of the hidden numbers that is dropped out
    #[arg(long, value_name = "SHARE", default_value_t = 0.2)]
    dropout: f32,
    #[command(flatten, next_help_heading = "Training")]
    settings: Settings,
}

/// Candle's part: a network, and the variables in it by name.
struct Net {
    vars: BTreeMap<String, Var>,
    conv: Conv2d,
    hidden: Linear,
    out: Linear,
}

impl Net {
    fn new() -> Candle<Net> {
        let map = VarMap::new();
        let at = VarBuilder::from_varmap(&map, DType::F32, &Device::Cpu);
        let conv = conv2d(1, 16, 3, Conv2dConfig { padding: 1, ..Default::default() }, at.pp("conv"))?;
        let (hidden, out) = (linear(256, 64, at.pp("hidden"))?, linear(64, 10, at.pp("out"))?);
        let vars = map.data().lock().expect("no other thread has it").clone().into_iter().collect();
        Ok(Net { vars, conv, hidden, out })
    }

    /// The scores of images, whose hidden numbers are multiplied by `kept`.
    fn forward(&self, images: &Tensor, kept: &Tensor) -> Candle<Tensor> {
        let pooled = self.conv.forward(images)?.relu()?.max_pool2d(2)?.flatten_from(1)?;
        self.out.forward(&(self.hidden.forward(&pooled)?.relu()? * kept)?)
    }
}

struct Classifier {
    tensors: Vec<elastic_trainer::Tensor>,
    dropout: f32,
}

impl Model for Classifier {
    type Batch = Rows;
    type Replica = Net;

    fn tensors(&self) -> &[elastic_trainer::Tensor] {
        &self.tensors
    }

    fn init(&self, seed: u64) -> Result<Vec<f32>> {
        let (mut random, mut first) = (Step::new(seed, 0, 0, &[]).random(0), Vec::new());
        for tensor in &self.tensors {
            let inputs: usize = tensor.shape[1..].iter().product();
            let bound = if tensor.shape.len() > 1 { (3.0 / inputs as f32).sqrt() } else { 0.0 };
            first.extend(tensor.range.clone().map(|_| (2.0 * random.unit() - 1.0) * bound));
        }
        Ok(first)
    }

    fn replica(&self) -> Result<Net> {
        Ok(Net::new()?)
    }

    fn gradient(&self, at: &Step, flat: &[f32], batch: &Rows, net: &mut Net, into: &mut Gradient) -> Result<f32> {
        for tensor in &self.tensors {
            let numbers = &flat[tensor.range.clone()];
            net.vars[&tensor.name].set(&Tensor::from_slice(numbers, tensor.shape.as_slice(), &Device::Cpu)?)?;
        }
        let (count, mut kept) = (batch.labels.len(), Vec::new());
        let share = if at.trains() { self.dropout } else { 0.0 };
        for &sample in at.samples() {
            // The same on every worker that computes this sample.
            let mut random = at.random(sample);
            kept.extend((0..64).map(|_| if random.unit() < share { 0.0 } else { 1.0 / (1.0 - share) }));
        }
        let kept = Tensor::from_vec(kept, (count, 64), &Device::Cpu)?;
        let images = Tensor::from_slice(&batch.inputs, (count, 1, 8, 8), &Device::Cpu)?;
        let labels = Tensor::from_slice(&batch.labels, count, &Device::Cpu)?.to_dtype(DType::U32)?;
        let loss = (loss::cross_entropy(&net.forward(&images, &kept)?, &labels)? * count as f64)?;
        let slopes = loss.backward()?;
        for tensor in &self.tensors {
            let slope = slopes.get(&net.vars[&tensor.name]).ok_or("a variable has no gradient")?;
            into[tensor.range.clone()].copy_from_slice(&slope.flatten_all()?.to_vec1::<f32>()?);
        }
        Ok(loss.to_scalar()?)
    }
}

impl Task for Flags {
    type Model = Classifier;
    type Data = Digits;

    fn settings(&self) -> &Settings {
        &self.settings
    }

    fn make(&self) -> Result<(Classifier, Digits)> {
        let vars = Net::new()?.vars;
        let shapes = vars.iter().map(|(name, var)| (name.as_str(), var.dims().to_vec()));
        let (tensors, dropout) = (elastic_trainer::Tensor::sequence(shapes), self.dropout);
        Ok((Classifier { tensors, dropout }, Digits::load(None, false)?))
    }
}

fn main() -> ExitCode {
    program::main::<Flags>()
}
