//! A multi-layer perceptron with ReLU between its layers and a softmax cross-entropy loss; forward and backward by
//! hand.

#[cfg(feature = "cuda")]
mod gpu;

use elastic_trainer::{Gradient, Model, Result, Step, Sums, Tensor, random};

use super::affine::{Affine, TensorLayout};
use super::pointwise::{cross_entropy_slope, relu, relu_slope};

/// A network's shape. Its parameters live in a flat slice that the caller keeps.
#[derive(Debug, Clone, PartialEq)]
pub struct Mlp {
    sizes: Vec<usize>,
    tensors: Vec<Tensor>,
    layers: Vec<Affine>,
}

/// A batch of samples.
#[derive(Debug, Clone, Default)]
pub struct Rows {
    /// The samples, one row each.
    pub inputs: Vec<f32>,
    /// Their classes.
    pub labels: Vec<u8>,
}

/// Memory for the activations of a batch, kept from step to step.
#[derive(Debug, Default)]
pub struct Workspace {
    /// Output of each layer, after its ReLU if it has one.
    outputs: Vec<Vec<f32>>,
    /// Derivative of the loss by the present layer's output, and by the previous layer's.
    slope: Vec<f32>,
    slope_before: Vec<f32>,
}

impl Mlp {
    /// A network with these layer sizes, inputs first and classes last.
    ///
    /// # Panics
    /// With fewer than two sizes.
    pub fn new(sizes: &[usize]) -> Mlp {
        assert!(sizes.len() >= 2, "a network has inputs and outputs");
        let mut layout = TensorLayout::default();
        let layers = sizes.windows(2).enumerate();
        let layers =
            layers.map(|(layer, pair)| layout.affine(&format!("layers.{layer}"), vec![pair[1], pair[0]])).collect();
        Mlp { sizes: sizes.to_vec(), tensors: layout.0, layers }
    }

    /// The most likely class of each sample. The batch has as many samples as labels.
    pub fn predict(&self, parameters: &[f32], batch: &Rows, workspace: &mut Workspace) -> Vec<u8> {
        if batch.labels.is_empty() {
            return Vec::new();
        }
        self.forward(parameters, batch, &mut workspace.outputs);
        let classes = self.sizes[self.sizes.len() - 1];
        let scores = &workspace.outputs[self.sizes.len() - 2];
        let best = |row: &[f32]| (0..classes).max_by(|&a, &b| row[a].total_cmp(&row[b])).unwrap_or(0);
        scores.chunks_exact(classes).map(|row| best(row) as u8).collect()
    }

    fn forward(&self, parameters: &[f32], batch: &Rows, outputs: &mut Vec<Vec<f32>>) {
        let rows = batch.labels.len();
        outputs.resize(self.layers.len(), Vec::new());
        for (number, layer) in self.layers.iter().enumerate() {
            let (done, open) = outputs.split_at_mut(number);
            let inputs = done.last().unwrap_or(&batch.inputs);
            let output = &mut open[0];
            output.resize(rows * self.sizes[number + 1], 0.0);
            layer.forward(parameters, inputs, output, rows);
            if number + 1 < self.layers.len() {
                relu(output);
            }
        }
    }

    /// The batch's summed loss, and its derivative. `done` gets the part of it that is final, which is its end. Without
    /// samples the gradient is zero.
    ///
    /// # Panics
    /// When a slice has the wrong length.
    pub fn pass(
        &self,
        parameters: &[f32],
        batch: &Rows,
        workspace: &mut Workspace,
        gradient: &mut [f32],
        done: &mut dyn FnMut(&[f32]),
    ) -> f32 {
        let rows = batch.labels.len();
        if rows == 0 {
            gradient.fill(0.0);
            return 0.0;
        }
        let Workspace { outputs, slope, slope_before } = workspace;
        self.forward(parameters, batch, outputs);
        slope.clone_from(&outputs[self.layers.len() - 1]);
        let loss = cross_entropy_slope(slope, &batch.labels);
        for (number, layer) in self.layers.iter().enumerate().rev() {
            let before = if number == 0 { &batch.inputs } else { &outputs[number - 1] };
            layer.gradient(before, slope, gradient, rows);
            done(&gradient[layer.weight.start..]);
            if number > 0 {
                slope_before.resize(rows * self.sizes[number], 0.0);
                layer.back(parameters, slope, slope_before, rows);
                relu_slope(before, slope_before);
                std::mem::swap(slope, slope_before);
            }
        }
        loss
    }
}

impl Model for Mlp {
    type Batch = Rows;
    type Replica = Workspace;

    fn tensors(&self) -> &[Tensor] {
        &self.tensors
    }

    /// First parameters for a seed: weights uniform with variance 2 / inputs (He et al., "Delving deep into
    /// rectifiers", 2015), biases zero.
    fn init(&self, seed: u64) -> Result<Vec<f32>> {
        let mut parameters = vec![0.0; self.parameters()];
        for tensor in &self.tensors {
            if let [_, inputs] = tensor.shape.as_slice() {
                let bound = (6.0 / *inputs as f32).sqrt();
                for place in tensor.range.clone() {
                    let number = random::unit(random::mix(seed) ^ place as u64);
                    parameters[place] = (number * 2.0 - 1.0) * bound;
                }
            }
        }
        Ok(parameters)
    }

    fn replica(&self) -> Result<Workspace> {
        Ok(Workspace::default())
    }

    fn gradient(
        &self,
        _: &Step<'_>,
        parameters: &[f32],
        batch: &Rows,
        workspace: &mut Workspace,
        gradient: &mut Gradient<'_>,
    ) -> Result<f32> {
        Ok(self.pass(parameters, batch, workspace, gradient.numbers, gradient.done))
    }

    fn metrics(&self) -> &[&'static str] {
        &["accuracy"]
    }

    fn evaluate(&self, _: &Step<'_>, parameters: &[f32], batch: &Rows, workspace: &mut Workspace) -> Result<Sums> {
        let predicted = self.predict(parameters, batch, workspace);
        let right = predicted.iter().zip(&batch.labels).filter(|(predicted, label)| predicted == label).count();
        let Workspace { outputs, slope, .. } = workspace;
        slope.clone_from(&outputs[self.layers.len() - 1]);
        Ok(Sums { loss: cross_entropy_slope(slope, &batch.labels), metrics: vec![right as f32] })
    }

    #[cfg(feature = "cuda")]
    fn on_gpu(&self) -> std::result::Result<Box<dyn elastic_cuda::Pass<Rows> + '_>, elastic_trainer::OnCpusAlone> {
        Ok(Box::new(gpu::Pass::new(self)))
    }

    fn identity(&self) -> String {
        let hidden: Vec<String> = self.sizes[1..self.sizes.len() - 1].iter().map(ToString::to_string).collect();
        format!("--hidden {}", hidden.join(","))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The summed loss in f64, written from the definition and sharing nothing with the code above.
    fn reference_loss(sizes: &[usize], parameters: &[f64], inputs: &[f32], labels: &[u8]) -> f64 {
        let mut loss = 0.0;
        for (sample, &label) in labels.iter().enumerate() {
            let mut values: Vec<f64> =
                inputs[sample * sizes[0]..(sample + 1) * sizes[0]].iter().map(|&value| f64::from(value)).collect();
            let mut place = 0;
            for layer in 1..sizes.len() {
                let (width, inputs) = (sizes[layer], sizes[layer - 1]);
                let (weights, biases) = (place, place + width * inputs);
                values = (0..width)
                    .map(|out| {
                        let sum: f64 = (0..inputs).map(|i| parameters[weights + out * inputs + i] * values[i]).sum();
                        let sum = sum + parameters[biases + out];
                        if layer + 1 < sizes.len() { sum.max(0.0) } else { sum }
                    })
                    .collect();
                place = biases + width;
            }
            let total: f64 = values.iter().map(|value| value.exp()).sum();
            loss -= (values[usize::from(label)].exp() / total).ln();
        }
        loss
    }

    #[test]
    fn gradients_match_finite_differences_in_f64() {
        for sizes in [vec![5, 3], vec![6, 7, 4], vec![4, 8, 5, 3]] {
            let model = Mlp::new(&sizes);
            let parameters: Vec<f32> =
                model.init(3).unwrap().iter().enumerate().map(|(i, p)| p + 0.1 * random::unit(i as u64)).collect();
            let rows = 6;
            let batch = Rows {
                inputs: (0..rows * sizes[0]).map(|i| random::unit(900 + i as u64) - 0.3).collect(),
                labels: (0..rows).map(|row| (row % sizes[sizes.len() - 1]) as u8).collect(),
            };
            let mut gradient = vec![f32::NAN; model.parameters()];
            let loss = model.pass(&parameters, &batch, &mut Workspace::default(), &mut gradient, &mut |_| ());

            let mut exact: Vec<f64> = parameters.iter().map(|&p| f64::from(p)).collect();
            let expected = reference_loss(&sizes, &exact, &batch.inputs, &batch.labels);
            assert!((f64::from(loss) - expected).abs() < 1e-4 * expected, "loss {loss}, expected {expected}");
            for place in 0..exact.len() {
                let (step, kept) = (1e-6, exact[place]);
                exact[place] = kept + step;
                let above = reference_loss(&sizes, &exact, &batch.inputs, &batch.labels);
                exact[place] = kept - step;
                let below = reference_loss(&sizes, &exact, &batch.inputs, &batch.labels);
                exact[place] = kept;
                let slope = (above - below) / (2.0 * step);
                let error = (f64::from(gradient[place]) - slope).abs();
                assert!(error < 1e-4 * (1.0 + slope.abs()), "{sizes:?} at {place}: {} for {slope}", gradient[place]);
            }
        }
    }

    #[test]
    fn no_samples_have_no_gradient() {
        let model = Mlp::new(&[2, 3, 2]);
        let mut gradient = vec![f32::NAN; model.parameters()];
        let (first, none) = (model.init(0).unwrap(), Rows::default());
        assert_eq!(model.pass(&first, &none, &mut Workspace::default(), &mut gradient, &mut |_| ()), 0.0);
        assert!(gradient.iter().all(|&value| value == 0.0));
    }
}
