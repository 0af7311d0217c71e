//! What the models are trained on.

mod corpus;
pub(crate) mod digits;
pub(crate) mod markov;
pub(crate) mod token_file;

pub(crate) use corpus::Corpus;
pub(crate) use markov::Markov;
