//! The perceptron's pass on a GPU: the same products and the same loss as on the host.

use elastic_cuda::{After, Buffer, CudaError, CudaSlice, Done, Gpu, Labels, Matrix};

use super::{Mlp, Rows};

/// Memory for the activations of a batch, on the GPU.
pub(super) struct Pass<'a> {
    model: &'a Mlp,
    rows: usize,
    inputs: Buffer<f32>,
    labels: Labels,
    /// The batch's classes, on the host.
    classes: Vec<u32>,
    outputs: Vec<Buffer<f32>>,
    losses: Buffer<f32>,
    slope: Buffer<f32>,
    slope_before: Buffer<f32>,
}

impl<'a> Pass<'a> {
    pub(super) fn new(model: &'a Mlp) -> Pass<'a> {
        let outputs = model.layers.iter().map(|_| Buffer::default()).collect();
        let labels = Labels::new(model.sizes[model.layers.len()]);
        let (inputs, losses, slope, slope_before) = Default::default();
        Pass { model, rows: 0, inputs, labels, classes: Vec::new(), outputs, losses, slope, slope_before }
    }
}

impl elastic_cuda::Pass<Rows> for Pass<'_> {
    fn load(&mut self, gpu: &Gpu, batch: &Rows) -> Result<u64, CudaError> {
        self.rows = batch.labels.len();
        gpu.upload(&batch.inputs, &mut self.inputs.fit(gpu, batch.inputs.len())?)?;
        self.classes.clear();
        self.classes.extend(batch.labels.iter().map(|&label| u32::from(label)));
        self.labels.upload(gpu, &self.classes)?;
        Ok(self.rows as u64)
    }

    fn gradient(
        &mut self,
        gpu: &Gpu,
        parameters: &CudaSlice<f32>,
        gradient: &mut CudaSlice<f32>,
        done: &mut Done<'_>,
    ) -> Result<(), CudaError> {
        let Pass { model, rows, inputs, labels, classes: _, outputs, losses, slope, slope_before } = self;
        // The references are swapped below, not the buffers. So each call launches the same.
        let (mut slope, mut slope_before) = (slope, slope_before);
        let (rows, sizes, layers) = (*rows, &model.sizes, &model.layers);

        let weight =
            |layer: usize| Matrix::new(parameters.slice(layers[layer].weight.clone()), sizes[layer + 1], sizes[layer]);
        for layer in 0..layers.len() {
            let (done, open) = outputs.split_at_mut(layer);
            let before = Matrix::new(done.last().unwrap_or(inputs).view(), rows, sizes[layer]);
            let bias = parameters.slice(layers[layer].bias.clone());
            let last = layer + 1 == layers.len();
            let after = if last { After::Bias(bias) } else { After::BiasRelu(bias) };
            // The last layer's scores become the slope in place.
            let output = if last { &mut *slope } else { &mut open[0] };
            gpu.product(&mut output.fit(gpu, rows * sizes[layer + 1])?, &before, &weight(layer).transposed(), &after)?;
        }

        let count = gradient.len();
        gpu.cross_entropy(&mut slope.view_mut(), &labels.all(), &mut losses.fit(gpu, rows)?)?;
        gpu.sum_all(&mut gradient.slice_mut(count - 1..), &losses.view())?;
        for layer in (0..layers.len()).rev() {
            let before = || if layer == 0 { inputs.view() } else { outputs[layer - 1].view() };
            let (width, affine) = (sizes[layer + 1], &layers[layer]);
            let slopes = || Matrix::new(slope.view(), rows, width);
            let (inputs, mut out) =
                (Matrix::new(before(), rows, sizes[layer]), gradient.slice_mut(affine.weight.clone()));
            gpu.product(&mut out, &slopes().transposed(), &inputs, &After::Plain)?;
            gpu.sum_rows(&mut gradient.slice_mut(affine.bias.clone()), &slope.view())?;
            if layer > 0 {
                done(gradient.slice_mut(affine.weight.start..))?;
                let mut out = slope_before.fit(gpu, rows * sizes[layer])?;
                gpu.product(&mut out, &slopes(), &weight(layer), &After::WherePositive(before()))?;
                std::mem::swap(&mut slope, &mut slope_before);
            }
        }
        Ok(())
    }
}
