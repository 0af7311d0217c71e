//! What `elastic-trainer` trains: for each of its commands the flags, the model, the data, and the printed result.

pub mod digits;
pub mod gpt;
