//! The coordination library: everything that nodes must agree on, over a key-value store. What needs no IO is in
//! [`elastic_rendezvous`]: [`time`], [`job`] (a job's vocabulary), [`rendezvous`] (our protocol as pure machines). Of the
//! rest, each module uses only those above it in this table.
//!
//! | module | what it is |
//! |---|---|
//! | [`followed`] | files that are read again while the program runs |
//! | [`tls`] | TLS of what we serve, and mutual TLS among peers |
//! | [`store`] | etcd v3 behind the narrow trait of [`elastic_rendezvous::store`] |
//! | [`etcd_v2`] | a client of etcd's v2 API |
//! | [`listener`] | listening sockets, and the descriptors that they cost |
//! | [`embedded`] | a store of our own, served over etcd's API: for one machine and trials |
//! | [`torchelastic`] | TorchElastic's own rendezvous on etcd v2, as a pure machine |
//! | [`node`] | the drivers that carry the machines: IO, timers, pulses, and logs through peer ports |
//! | [`workers`] | what a round's workers ask for through their agents: barriers, checkpoint commits |
//! | [`removal`] | deleting the records of a job that has ended |
//! | [`operator`] | what operators see of jobs and ask of them |
//! | [`service`] | what `elastic-coordinator` runs: leads every job while it is up |
//! | [`flags`] | the command lines of `elastic-coordinator` and `elasticctl` |
//!
//! What only `elasticctl` does lies next to it, in `bin/elasticctl`.

#![deny(unsafe_code)]

pub mod embedded;
pub mod etcd_v2;
pub mod flags;
pub mod followed;
pub mod listener;
pub mod node;
pub mod operator;
pub mod removal;
pub mod service;
pub mod store;
pub mod tls;
pub mod torchelastic;
pub mod workers;

pub use elastic_rendezvous::{job, rendezvous, time};
