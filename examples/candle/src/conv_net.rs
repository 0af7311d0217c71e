//! The network of candle's example `mnist-training`, as published: candle-examples/examples/mnist-training/main.rs in
//! <https://github.com/huggingface/candle> (MIT or Apache-2.0). Models of `candle-transformers` cannot take its place:
//! candle 0.11 has no backward pass for its `layer_norm`, `rms_norm` and `softmax_last_dim`, nor for max pools whose
//! stride is not their size.

use candle_core::{Result, Tensor};
use candle_nn::{Conv2d, Linear, ModuleT, VarBuilder};

const LABELS: usize = 10;

#[derive(Debug)]
pub struct ConvNet {
    conv1: Conv2d,
    conv2: Conv2d,
    fc1: Linear,
    fc2: Linear,
    dropout: candle_nn::Dropout,
}

impl ConvNet {
    pub fn new(vs: VarBuilder) -> Result<Self> {
        let conv1 = candle_nn::conv2d(1, 32, 5, Default::default(), vs.pp("c1"))?;
        let conv2 = candle_nn::conv2d(32, 64, 5, Default::default(), vs.pp("c2"))?;
        let fc1 = candle_nn::linear(1024, 1024, vs.pp("fc1"))?;
        let fc2 = candle_nn::linear(1024, LABELS, vs.pp("fc2"))?;
        let dropout = candle_nn::Dropout::new(0.5);
        Ok(Self { conv1, conv2, fc1, fc2, dropout })
    }

    pub fn forward(&self, xs: &Tensor, train: bool) -> Result<Tensor> {
        let (b_sz, _img_dim) = xs.dims2()?;
        let xs = xs
            .reshape((b_sz, 1, 28, 28))?
            .apply(&self.conv1)?
            .max_pool2d(2)?
            .apply(&self.conv2)?
            .max_pool2d(2)?
            .flatten_from(1)?
            .apply(&self.fc1)?
            .relu()?;
        self.dropout.forward_t(&xs, train)?.apply(&self.fc2)
    }
}
