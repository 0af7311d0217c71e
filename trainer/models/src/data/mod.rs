//! What the models are trained on.

mod corpus;
pub(crate) mod digits;
pub(crate) mod markov;
pub mod token_file;

pub use corpus::{Corpus, Source};
pub use markov::Markov;
