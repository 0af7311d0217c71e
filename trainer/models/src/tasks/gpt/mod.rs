//! A GPT that learns a text, or generated text.

mod corpus;
mod export;
mod generate;
mod trained;

use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use clap::{Args, ValueEnum};
use elastic_trainer::program::Task;
use elastic_trainer::{Data, Result, SampleError, Settings, Step};
use tracing::info;

use crate::Gpt;
use crate::data::Corpus;
use crate::data::markov::FOLLOWERS;
use crate::gpt::pretrained::Pretrained;
use crate::gpt::{Size, Tokens};
pub use corpus::Text;
pub use export::Export;
pub use generate::Generate;

/// Rows that are judged at once.
const JUDGED: usize = 1 << 8;

/// Work that takes longer than this is announced before it begins.
const LONG: Duration = Duration::from_secs(5);

/// What to train, and how.
#[derive(Debug, Clone, Args)]
#[command(mut_arg("epochs", |epochs| epochs.default_value("4")))]
#[command(mut_arg("batch", |batch| batch.default_value("32")))]
#[command(mut_arg("lr", |lr| lr.default_value("0.003")))]
pub struct Flags {
    /// What to train it on
    #[command(flatten)]
    pub text: Text,
    /// Begin with this GPT-2: a folder with config.json and model.safetensors, as transformers' save_pretrained and
    /// `elastic-trainer export` write it. It has its own size; --context may shorten the windows.
    /// Each start of the run needs it
    #[arg(long, value_name = "DIR|FILE", requires = "file")]
    #[arg(conflicts_with_all = ["size", "layers", "heads", "width", "vocabulary", "init"])]
    pub init_from: Option<PathBuf>,
    /// Size of the network; the next five flags change parts of it
    #[arg(long, value_enum, default_value_t = Preset::Tiny)]
    pub size: Preset,
    /// Tokens of context, which is also the length of a window, the sample
    #[arg(long, value_name = "TOKENS")]
    pub context: Option<NonZeroUsize>,
    /// Blocks (attention and perceptron)
    #[arg(long, value_name = "COUNT")]
    pub layers: Option<NonZeroUsize>,
    /// Attention heads; --width must be a multiple
    #[arg(long, value_name = "COUNT")]
    pub heads: Option<NonZeroUsize>,
    /// Numbers in a token's embedding
    #[arg(long, value_name = "COUNT")]
    pub width: Option<NonZeroUsize>,
    /// Size of the vocabulary, at least 4
    #[arg(long, value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(FOLLOWERS as i64..))]
    pub vocabulary: Option<u32>,
    /// How to train it
    #[command(flatten, next_help_heading = "Training")]
    pub settings: Settings,
}

/// A size with a name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Preset {
    /// 0.1 million parameters: 64 tokens of context, 2 layers, 4 heads, width 64, a vocabulary of 64
    Tiny,
    /// 124 million parameters, as GPT-2: context 1024, 12 layers, 12 heads, width 768, a vocabulary of 50257
    Gpt2,
}

/// The flags ask for a network that is impossible.
#[derive(Debug, thiserror::Error)]
#[error("cannot build this GPT: {0}; change --layers, --width, --heads, --context or --vocabulary")]
pub struct SizeError(String);

impl Flags {
    /// The size that the flags ask for.
    fn size(&self) -> Result<Size, SizeError> {
        let whole = match self.size {
            Preset::Tiny => Size { vocabulary: 64, context: 64, layers: 2, heads: 4, width: 64 },
            Preset::Gpt2 => Size::GPT2,
        };
        let chosen = self.vocabulary.map_or(whole.vocabulary, |tokens| tokens as usize);
        let part = |flag: Option<NonZeroUsize>, otherwise: usize| flag.map_or(otherwise, NonZeroUsize::get);
        let size = Size {
            vocabulary: self.text.vocabulary().unwrap_or(chosen),
            context: part(self.context, whole.context),
            layers: part(self.layers, whole.layers),
            heads: part(self.heads, whole.heads),
            width: part(self.width, whole.width),
        };
        size.refusal().map_or(Ok(size), |reason| Err(SizeError(reason)))
    }

    /// The mean loss of a token in windows that were not trained on, and the number of these windows.
    pub fn held_out_loss(model: &Gpt, corpus: &Corpus, parameters: &[f32]) -> Result<(f64, u64), SampleError> {
        let (context, windows) = (corpus.unit().of_a_sample as usize, corpus.held_out.samples());
        let (numbers, mut batch, mut room) = ((0..windows).collect::<Vec<_>>(), Tokens::default(), Default::default());
        let (begun, mut loss) = (Instant::now(), 0.0);
        let pieces = numbers.chunks((JUDGED / context).max(1));
        let others = pieces.len().saturating_sub(1);
        for (number, piece) in pieces.enumerate() {
            corpus.held_out.read(piece, &Step::evaluation(0, 0, 0, piece), &mut batch)?;
            loss += f64::from(model.loss(parameters, &batch, &mut room));
            let left = begun.elapsed() * others as u32;
            if number == 0 && left > LONG {
                info!("the loss in {windows} windows that were not trained on takes about {} s", left.as_secs());
            }
        }
        Ok((loss / (windows * context as u64) as f64, windows))
    }
}

impl Task for Flags {
    type Model = Gpt;
    type Data = Corpus;

    fn settings(&self) -> &Settings {
        &self.settings
    }

    fn make(&self) -> Result<(Gpt, Corpus)> {
        let Some(path) = &self.init_from else {
            let size = self.size()?;
            return Ok((Gpt::new(size), self.text.make(size)?));
        };
        let first = Pretrained::open(path)?;
        let (size, is_of_bytes) = (first.size(), first.is_of_bytes());
        if self.text.text.is_some() && !is_of_bytes {
            let cause = "its tokens are not the bytes of a text; train it with --tokens";
            return Err(format!("cannot train {} with --text: {cause}", path.display()).into());
        }
        let context = self.context.map_or(size.context, NonZeroUsize::get);
        if context > size.context {
            return Err(format!("--context {context} is more than the {} of {}", size.context, path.display()).into());
        }
        Ok((Gpt::of(first, context), self.text.make(Size { context, ..size })?))
    }

    fn judge(&self, model: &Gpt, corpus: &Corpus, parameters: &[f32]) -> Option<String> {
        if corpus.held_out.samples() == 0 {
            return Some("the result is not judged (--held-out 0)".to_owned());
        }
        let reachable = corpus.reachable_loss().map_or(String::new(), |loss| format!(" ({loss:.4} is reachable)"));
        Some(match Flags::held_out_loss(model, corpus, parameters) {
            Ok((loss, windows)) => format!("held-out loss {loss:.4} in {windows} windows{reachable}"),
            Err(error) => format!("the result is not judged: {error}"),
        })
    }
}
