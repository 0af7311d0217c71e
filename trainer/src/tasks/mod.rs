//! What `elastic-trainer` trains: for each of its commands the flags, the model, the data, and what is told at the end.
//! Not for training itself: these use the library as other programs do.

pub mod digits;
pub mod gpt;
