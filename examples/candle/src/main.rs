//! candle's network for MNIST learns hand-written digits, by candle's autograd, elastically.

mod conv_net;

use std::collections::BTreeMap;
use std::process::ExitCode;

use candle_core::{DType, Device, Result as Candle, Tensor, Var};
use candle_nn::{VarBuilder, VarMap, loss};
use conv_net::ConvNet;
use elastic_models::{Digits, Rows};
use elastic_trainer::program::{self, Task};
use elastic_trainer::{Gradient, Model, Result, Settings, Step};

/// Learn hand-written digits with candle's network for MNIST
#[derive(clap::Args)]
struct Flags {
    #[command(flatten, next_help_heading = "Training")]
    settings: Settings,
}

/// Candle's part: a network, and the variables in it by name.
struct Net {
    vars: BTreeMap<String, Var>,
    net: ConvNet,
}

impl Net {
    fn new() -> Candle<Net> {
        let map = VarMap::new();
        let net = ConvNet::new(VarBuilder::from_varmap(&map, DType::F32, &Device::Cpu))?;
        let vars = map.data().lock().expect("no other thread has it").clone().into_iter().collect();
        Ok(Net { vars, net })
    }
}

/// Pictures of 28×28 pixels, as MNIST's: each digit's 8×8 in three times the size, in training at a random place.
fn pictures(at: &Step, batch: &Rows) -> Vec<f32> {
    let mut pictures = vec![0.0; at.samples().len() * 28 * 28];
    for ((digit, picture), &sample) in batch.inputs.chunks(64).zip(pictures.chunks_mut(28 * 28)).zip(at.samples()) {
        // The same on every worker that computes this sample.
        let mut random = at.random(sample);
        let [down, right] = [(); 2].map(|()| if at.trains() { random.below(5) as usize } else { 2 });
        for (row, column) in (0..24).flat_map(|row| (0..24).map(move |column| (row, column))) {
            picture[(row + down) * 28 + column + right] = digit[row / 3 * 8 + column / 3];
        }
    }
    pictures
}

struct Classifier(Vec<elastic_trainer::Tensor>);

impl Model for Classifier {
    type Batch = Rows;
    type Replica = Net;

    fn tensors(&self) -> &[elastic_trainer::Tensor] {
        &self.0
    }

    fn init(&self, seed: u64) -> Result<Vec<f32>> {
        let (mut random, mut first) = (Step::new(seed, 0, 0, &[]).random(0), Vec::new());
        for tensor in &self.0 {
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
        for tensor in &self.0 {
            let numbers = &flat[tensor.range.clone()];
            net.vars[&tensor.name].set(&Tensor::from_slice(numbers, tensor.shape.as_slice(), &Device::Cpu)?)?;
        }
        let count = batch.labels.len();
        let images = Tensor::from_vec(pictures(at, batch), (count, 28 * 28), &Device::Cpu)?;
        let labels = Tensor::from_slice(&batch.labels, count, &Device::Cpu)?.to_dtype(DType::U32)?;
        // Without candle's dropout, which draws from a generator of the thread's.
        let scores = net.net.forward(&images, false)?;
        let loss = (loss::cross_entropy(&scores, &labels)? * count as f64)?;
        let slopes = loss.backward()?;
        for tensor in &self.0 {
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
        Ok((Classifier(elastic_trainer::Tensor::sequence(shapes)), Digits::load(None, false)?))
    }
}

fn main() -> ExitCode {
    program::main::<Flags>()
}
