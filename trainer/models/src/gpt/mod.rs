//! GPT-2 (Radford et al., "Language models are unsupervised multitask learners", 2019): its shape, its parameters and
//! their first values. The pass through it is in `pass`, and on a GPU in `gpu`.

mod decoder;
#[cfg(feature = "cuda")]
mod gpu;
mod pass;
pub mod pretrained;
#[cfg(test)]
mod tests;

use std::ops::Range;

use elastic_trainer::{Gradient, Model, Result, Step, Sums, Tensor, random};

pub use decoder::Decoder;
pub use pass::{Tokens, Workspace};
use pretrained::Pretrained;

use super::affine::{Affine, TensorLayout};

/// How large the network is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Size {
    /// Different tokens.
    pub vocabulary: usize,
    /// Tokens that it can look back on, the present one included.
    pub context: usize,
    /// Blocks of attention and perceptron.
    pub layers: usize,
    /// Heads of each attention.
    pub heads: usize,
    /// Numbers that represent a token inside the network.
    pub width: usize,
}

impl Size {
    /// GPT-2 with 124 million parameters.
    pub const GPT2: Size = Size { vocabulary: 50_257, context: 1024, layers: 12, heads: 12, width: 768 };

    /// Why no network can have this size.
    pub fn refusal(&self) -> Option<String> {
        let Size { vocabulary, context, layers, heads, width } = *self;
        let most = 1 << 20;
        let parts = [
            ("vocabulary", vocabulary, most),
            ("context", context, most),
            ("layers", layers, 1 << 12),
            ("heads", heads, most),
            ("width", width, most),
        ];
        if let Some((name, count, most)) = parts.into_iter().find(|&(_, count, most)| !(1..=most).contains(&count)) {
            return Some(format!("--{name} is {count}, not 1 to {most}"));
        }
        (width % heads != 0).then(|| format!("a width of {width} is not divisible by {heads} heads"))
    }
}

/// A network's shape. Its parameters live in a flat slice that the caller keeps.
#[derive(Debug, Clone, PartialEq)]
pub struct Gpt {
    size: Size,
    tensors: Vec<Tensor>,
    places: Places,
    /// Where the first parameters come from; without it, from the seed.
    first: Option<Pretrained>,
    /// Tokens of a window, at most the context.
    window: usize,
}

/// Where a block's parameters lie.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Block {
    norm_1: Affine,
    attention: Affine,
    attention_out: Affine,
    norm_2: Affine,
    up: Affine,
    down: Affine,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Places {
    tokens: Range<usize>,
    positions: Range<usize>,
    blocks: Vec<Block>,
    norm: Affine,
}

impl Gpt {
    /// A network of this size. The last layer shares its weights with the tokens' embedding.
    ///
    /// # Panics
    /// When [`Size::refusal`] has a reason.
    pub fn new(size: Size) -> Gpt {
        assert_eq!(size.refusal(), None, "such a network cannot be");
        let (mut layout, width) = (TensorLayout::default(), size.width);
        let tokens = layout.push("transformer.wte.weight".into(), vec![size.vocabulary, width]);
        let positions = layout.push("transformer.wpe.weight".into(), vec![size.context, width]);
        let blocks = (0..size.layers).map(|layer| {
            let mut affine = |name: &str, shape| layout.affine(&format!("transformer.h.{layer}.{name}"), shape);
            Block {
                norm_1: affine("ln_1", vec![width]),
                attention: affine("attn.c_attn", vec![3 * width, width]),
                attention_out: affine("attn.c_proj", vec![width, width]),
                norm_2: affine("ln_2", vec![width]),
                up: affine("mlp.c_fc", vec![4 * width, width]),
                down: affine("mlp.c_proj", vec![width, 4 * width]),
            }
        });
        let blocks = blocks.collect();
        let norm = layout.affine("transformer.ln_f", vec![width]);
        Gpt {
            size,
            tensors: layout.0,
            places: Places { tokens, positions, blocks, norm },
            first: None,
            window: size.context,
        }
    }

    /// A network of this model's size, whose training begins with this model's parameters, in windows of so many tokens.
    pub fn of(first: Pretrained, window: usize) -> Gpt {
        let size = first.size();
        Gpt { first: Some(first), window, ..Gpt::new(size) }
    }

    /// Its size.
    pub fn size(&self) -> Size {
        self.size
    }
}

impl Model for Gpt {
    type Batch = Tokens;
    type Replica = Workspace;

    /// Its parameters' names and places. Weights of linear layers have a row for each output, as in `torch.nn.Linear`.
    fn tensors(&self) -> &[Tensor] {
        &self.tensors
    }

    /// First parameters for a seed, as GPT-2 has them: weights normal with deviation 0.02, less by the square root of
    /// twice the number of layers where they lead back into the residual stream; norms 1, biases 0.
    fn init(&self, seed: u64) -> Result<Vec<f32>> {
        if let Some(first) = &self.first {
            return Ok(first.read()?);
        }
        let mut parameters = vec![0.0; self.parameters()];
        for tensor in &self.tensors {
            let place = tensor.range.clone();
            if tensor.shape.len() > 1 {
                let back = tensor.name.ends_with("c_proj.weight");
                let deviation = if back { 0.02 / (2.0 * self.size.layers as f32).sqrt() } else { 0.02 };
                for place in place {
                    parameters[place] = deviation * normal(random::mix(seed) ^ place as u64);
                }
            } else if tensor.name.ends_with("weight") {
                parameters[place].fill(1.0);
            }
        }
        Ok(parameters)
    }

    fn replica(&self) -> Result<Workspace> {
        Ok(Workspace::default())
    }

    /// The blocks' parameters become final one block after the other. The embeddings come first in the gradient and are
    /// final last.
    fn gradient(
        &self,
        _: &Step<'_>,
        parameters: &[f32],
        batch: &Tokens,
        workspace: &mut Workspace,
        gradient: &mut Gradient<'_>,
    ) -> Result<f32> {
        Ok(self.pass(parameters, batch, workspace, gradient.numbers, gradient.done))
    }

    fn evaluate(&self, _: &Step<'_>, parameters: &[f32], batch: &Tokens, workspace: &mut Workspace) -> Result<Sums> {
        Ok(Sums { loss: self.loss(parameters, batch, workspace), metrics: Vec::new() })
    }

    /// A model whose heads are too wide for the kernels is computed on CPUs.
    #[cfg(feature = "cuda")]
    fn on_gpu(&self) -> std::result::Result<Box<dyn elastic_cuda::Pass<Tokens> + '_>, elastic_trainer::OnCpusAlone> {
        match elastic_cuda::Attention::refusal(self.size.width / self.size.heads) {
            Some(reason) => Err(elastic_trainer::OnCpusAlone(reason)),
            None => Ok(Box::new(gpu::Pass::new(self))),
        }
    }

    fn activation_bytes(&self, samples: usize) -> Option<u64> {
        Some(pass::workspace_bytes(self, samples * self.window))
    }

    fn identity(&self) -> String {
        let Size { vocabulary, context, layers, heads, width } = self.size;
        let first = self.first.as_ref().map_or(String::new(), |first| format!(" {}", first.identity()));
        format!(
            "--context {context} --layers {layers} --heads {heads} --width {width} --vocabulary {vocabulary}{first}"
        )
    }
}

/// A number from the standard normal distribution for this key (Box and Muller, "A note on the generation of random
/// normal deviates", 1958).
fn normal(key: u64) -> f32 {
    let (distance, angle) = (1.0 - random::unit(random::mix(key)), random::unit(random::mix(!key)));
    (-2.0 * distance.ln()).sqrt() * (std::f32::consts::TAU * angle).cos()
}
