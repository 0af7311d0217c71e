//! Tensors in the flat parameters, and the linear layer that a weight and its bias make: the forward pass, and the
//! derivatives.

use std::ops::Range;

use elastic_trainer::{Rule, Tensor};

use super::matmul::{Matrix, multiply};
use super::pointwise::{add_bias, sum_rows};

/// Where a weight and its bias lie in the flat parameters: the bias follows the weight.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Affine {
    pub(super) weight: Range<usize>,
    pub(super) bias: Range<usize>,
}

/// Tensors one after the other.
#[derive(Debug, Default)]
pub(super) struct TensorLayout(pub(super) Vec<Tensor>);

impl TensorLayout {
    /// Appends a tensor and returns its place.
    pub(super) fn push(&mut self, name: String, shape: Vec<usize>) -> Range<usize> {
        let start = self.0.last().map_or(0, |tensor| tensor.range.end);
        let range = start..start + shape.iter().product::<usize>();
        self.0.push(Tensor { name, rule: Rule::of_shape(&shape), shape, range: range.clone() });
        range
    }

    /// Appends a weight and its bias, which has a number for each of the weight's rows, and returns their places.
    pub(super) fn affine(&mut self, name: &str, shape: Vec<usize>) -> Affine {
        let rows = shape[0];
        let weight = self.push(format!("{name}.weight"), shape);
        Affine { weight, bias: self.push(format!("{name}.bias"), vec![rows]) }
    }
}

impl Affine {
    /// Weight and bias in parameters.
    pub(super) fn of<'a>(&self, flat: &'a [f32]) -> (&'a [f32], &'a [f32]) {
        (&flat[self.weight.clone()], &flat[self.bias.clone()])
    }

    /// Weight and bias in a gradient.
    pub(super) fn of_mut<'a>(&self, flat: &'a mut [f32]) -> (&'a mut [f32], &'a mut [f32]) {
        flat[self.weight.start..self.bias.end].split_at_mut(self.weight.len())
    }

    /// The weight: a row for each output.
    fn matrix<'a>(&self, parameters: &'a [f32]) -> Matrix<'a> {
        let outputs = self.bias.len();
        Matrix::new(&parameters[self.weight.clone()], outputs, self.weight.len() / outputs)
    }

    /// Writes the layer's outputs for the rows of `inputs`.
    pub(super) fn forward(&self, parameters: &[f32], inputs: &[f32], outputs: &mut [f32], rows: usize) {
        let inputs = Matrix::new(inputs, rows, inputs.len() / rows);
        multiply(outputs, inputs, self.matrix(parameters).transposed());
        add_bias(outputs, self.of(parameters).1);
    }

    /// Writes the derivatives by weight and bias into `gradient`. `slope` is the derivative by the outputs.
    pub(super) fn gradient(&self, inputs: &[f32], slope: &[f32], gradient: &mut [f32], rows: usize) {
        let (weight, bias) = self.of_mut(gradient);
        let slopes = Matrix::new(slope, rows, bias.len());
        multiply(weight, slopes.transposed(), Matrix::new(inputs, rows, inputs.len() / rows));
        sum_rows(slope, bias);
    }

    /// Writes the derivative by the inputs.
    pub(super) fn back(&self, parameters: &[f32], slope: &[f32], slope_in: &mut [f32], rows: usize) {
        multiply(slope_in, Matrix::new(slope, rows, self.bias.len()), self.matrix(parameters));
    }
}
