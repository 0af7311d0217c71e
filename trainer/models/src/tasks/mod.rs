//! What `elastic-trainer` trains: for each of its commands the flags, the model, the data, and the printed result.

#![allow(clippy::disallowed_methods, clippy::disallowed_types)]

pub mod digits;
pub mod gpt;
