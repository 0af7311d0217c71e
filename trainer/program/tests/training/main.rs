//! Whole training runs: the same bits for every history of workers, each sample once, and the right messages to the
//! agent.
#![allow(clippy::unwrap_used, clippy::panic)] // The harness may panic as its tests may.

mod agent;
mod command;
mod evaluation;
mod example;
mod gpt;
mod init;
mod leaving;
mod live;
mod memory;
mod normed;
mod own;
mod pretrained;
mod reading;
mod record;
mod results;
mod resume;
mod saving;
mod sharded;
mod tokens;
mod worker;
