//! What the GPT is trained on: a text, a file of tokens, or generated text.

use std::num::NonZeroU64;
use std::path::{Path, PathBuf};

use clap::Args;
use elastic_trainer::{Data, Result};

use crate::data::token_file::{Form, TokenFile, TokenFileError, Windows};
use crate::data::{Corpus, Markov};
use crate::gpt::Size;

/// About how many tokens the result is judged by.
const HELD_OUT: usize = 1 << 15;
/// And no more than this part of a file, if they come from its end.
const PART: u64 = 10;

/// Tokens of a text's bytes.
pub(super) const BYTES: usize = 1 << 8;

/// Where the tokens come from.
#[derive(Debug, Clone, Args)]
pub struct Text {
    /// Train on this text: each byte is a token, so the vocabulary is 256 [default: on generated text]
    #[arg(long, value_name = "FILE", group = "file", conflicts_with_all = ["vocabulary", "windows", "corpus_seed"])]
    pub text: Option<PathBuf>,
    /// Train on the tokens in this file: uint16 as nanoGPT writes them, or with llm.c's header. An epoch is the file
    /// once. --vocabulary must be larger than each token
    #[arg(long, value_name = "FILE", group = "file", conflicts_with_all = ["windows", "corpus_seed"])]
    pub tokens: Option<PathBuf>,
    /// Bytes of a token in a file without a header: 2 (uint16) or 4 (uint32)
    #[arg(long, value_name = "BYTES", default_value = "2", value_parser = token_bytes, requires = "tokens")]
    pub token_bytes: u8,
    /// Take the held-out windows from this file of the same form [default: the last ones of --text or --tokens]
    #[arg(long, value_name = "FILE", requires = "file")]
    pub val_tokens: Option<PathBuf>,
    /// Windows of generated text: the samples of an epoch
    #[arg(long, value_name = "COUNT", default_value = "4096")]
    pub windows: NonZeroU64,
    /// Seed of the generated text; --seed is that of the first parameters and of the order of the windows
    #[arg(long, value_name = "SEED", default_value_t = 0)]
    pub corpus_seed: u64,
    /// Hold out so many windows, which are not trained on. The loss in them is printed at the end, computed on one
    /// thread of rank 0; 0: not at all [default: about 32,768 tokens, but at most a tenth of a file]
    #[arg(long, value_name = "COUNT")]
    pub held_out: Option<u64>,
}

fn token_bytes(text: &str) -> Result<u8, String> {
    text.parse().ok().filter(|bytes| [2, 4].contains(bytes)).ok_or("must be 2 or 4".to_owned())
}

impl Text {
    /// Opens the file, if there is one.
    pub(super) fn make(&self, size: Size) -> Result<Corpus> {
        let held_out = HELD_OUT.div_ceil(size.context) as u64;
        let Some(path) = self.text.as_ref().or(self.tokens.as_ref()) else {
            let train = Markov::new(size.vocabulary, size.context, self.windows.get(), self.corpus_seed);
            let held_out = train.held_out(self.held_out.unwrap_or(held_out));
            return Ok(Corpus { train: Box::new(train), held_out: Box::new(held_out) });
        };
        let all = self.windows_of(path, size)?;
        let (train, held_out) = match &self.val_tokens {
            Some(path) => {
                let others = self.windows_of(path, size)?;
                let count = self.held_out.unwrap_or(held_out.min(others.samples()));
                others.at_least(count.max(1))?;
                (all, others.split(count).0)
            }
            None => {
                let count = self.held_out.unwrap_or(held_out.min(all.samples().div_ceil(PART)));
                all.at_least(count.saturating_add(1))?;
                let trained = all.samples() - count;
                all.split(trained)
            }
        };
        train.at_least(1)?;
        Ok(Corpus { train: Box::new(train), held_out: Box::new(held_out) })
    }

    fn windows_of(&self, path: &Path, size: Size) -> Result<Windows, TokenFileError> {
        let form = if self.text.is_some() { Form::Text } else { Form::Numbers(self.token_bytes) };
        Ok(Windows::all(TokenFile::open(path, form, size.vocabulary)?, size.context))
    }

    /// The vocabulary, where the text fixes it.
    pub(super) fn vocabulary(&self) -> Option<usize> {
        self.text.as_ref().map(|_| BYTES)
    }
}
