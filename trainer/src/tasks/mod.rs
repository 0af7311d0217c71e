//! What `elastic-trainer` trains: for each of its commands the flags, the model, the data, and what is told at the end.

pub mod digits;
pub mod gpt;
