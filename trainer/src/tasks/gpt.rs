//! A GPT that learns generated text.

use std::num::{NonZeroU64, NonZeroUsize};
use std::time::{Duration, Instant};

use clap::{Args, ValueEnum};
use tracing::info;

use crate::data::Data;
use crate::data::markov::{Corpus, FOLLOWERS, Markov};
use crate::error::Result;
use crate::model::Gpt;
use crate::model::gpt::{Size, Tokens};
use crate::program::Task;
use crate::settings::Settings;

/// About how many tokens the result is judged by.
const HELD_OUT: usize = 1 << 15;

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
    /// Size of the network; the next five flags change parts of it
    #[arg(long, value_enum, default_value_t = Preset::Tiny)]
    pub size: Preset,
    /// Tokens of context, which is also the length of a window of the corpus
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
    /// Windows in the corpus: the samples of an epoch
    #[arg(long, value_name = "COUNT", default_value = "4096")]
    pub windows: NonZeroU64,
    /// Seed of the text; --seed is that of the first parameters and of the order of the windows
    #[arg(long, value_name = "SEED", default_value_t = 0)]
    pub corpus_seed: u64,
    /// Judge the result by the loss in so many windows that were not trained on; 0: not at all. That is computed on one
    /// thread of rank 0 [default: about 32,768 tokens]
    #[arg(long, value_name = "COUNT")]
    pub held_out: Option<u64>,
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
        let part = |flag: Option<NonZeroUsize>, otherwise: usize| flag.map_or(otherwise, NonZeroUsize::get);
        let size = Size {
            vocabulary: self.vocabulary.map_or(whole.vocabulary, |tokens| tokens as usize),
            context: part(self.context, whole.context),
            layers: part(self.layers, whole.layers),
            heads: part(self.heads, whole.heads),
            width: part(self.width, whole.width),
        };
        size.refusal().map_or(Ok(size), |reason| Err(SizeError(reason)))
    }

    /// The mean loss of a token in windows that were not trained on, and the number of these windows.
    pub fn held_out_loss(model: &Gpt, corpus: &Corpus, parameters: &[f32]) -> (f64, u64) {
        let (context, windows) = (model.size().context, corpus.held_out.samples());
        let (numbers, mut batch, mut room) = ((0..windows).collect::<Vec<_>>(), Tokens::default(), Default::default());
        let (begun, mut loss) = (Instant::now(), 0.0);
        let pieces = numbers.chunks((JUDGED / context).max(1));
        let others = pieces.len().saturating_sub(1);
        for (number, piece) in pieces.enumerate() {
            corpus.held_out.fill(piece, &mut batch);
            loss += f64::from(model.loss(parameters, &batch, &mut room));
            let left = begun.elapsed() * others as u32;
            if number == 0 && left > LONG {
                info!("the loss in {windows} windows that were not trained on takes about {} s", left.as_secs());
            }
        }
        (loss / (windows * context as u64) as f64, windows)
    }
}

impl Task for Flags {
    type Model = Gpt;
    type Data = Corpus;

    fn settings(&self) -> &Settings {
        &self.settings
    }

    fn make(&self) -> Result<(Gpt, Corpus)> {
        let size = self.size()?;
        let train = Markov::new(size.vocabulary, size.context, self.windows.get(), self.corpus_seed);
        let held_out = train.held_out(self.held_out.unwrap_or(HELD_OUT.div_ceil(size.context) as u64));
        Ok((Gpt::new(size), Corpus { train, held_out }))
    }

    fn judge(&self, model: &Gpt, corpus: &Corpus, parameters: &[f32]) -> Option<String> {
        if self.held_out == Some(0) {
            return Some("the result is not judged (--held-out 0)".to_owned());
        }
        let (loss, windows) = Flags::held_out_loss(model, corpus, parameters);
        let reachable = corpus.reachable_loss().unwrap_or_default();
        Some(format!("held-out loss {loss:.4} in {windows} windows ({reachable:.4} is reachable)"))
    }
}
