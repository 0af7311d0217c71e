//! The commands of `elastic-trainer`, as far as others need them: its command line, for its manual pages, and the check
//! of GPUs, for tests.

#[cfg(feature = "cuda")]
pub mod check;
pub mod command;
