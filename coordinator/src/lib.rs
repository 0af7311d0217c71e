//! `elastic-coordinator`, the service that leads jobs while it runs, and `elasticctl`, the operator's command. Each
//! module uses only those above it in this table.
//!
//! | module | what it is |
//! |---|---|
//! | [`nodes`] | a job's nodes by their names, and the members of its round |
//! | [`removal`] | deleting the records of a job that has ended |
//! | [`operator`] | what operators see of jobs and ask of them |
//! | [`service`] | what `elastic-coordinator` runs |
//! | [`flags`] | the command lines of both programs |
//!
//! What only `elasticctl` does is in `bin/elasticctl`.

#![deny(unsafe_code)]

pub mod flags;
pub mod nodes;
pub mod operator;
pub mod removal;
pub mod service;
