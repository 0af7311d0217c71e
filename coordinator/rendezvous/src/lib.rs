//! The rendezvous protocol without IO: values, and functions of values. The time is an argument of every decision; a driver
//! reads it by `Time::now`. What carries all this out is `elastic_coordinator`. Each module uses only those above it in this table.
//!
//! | module | what it is |
//! |---|---|
//! | [`time`] | time as a value, and dates for people |
//! | [`store`] | the narrow trait over a key-value store |
//! | [`mvcc`] | a store of our own, as a state machine |
//! | [`job`] | a job's vocabulary: ids, keys, records |
//! | [`rendezvous`] | the pure machines: `decide` for the leader, `step` for every node |
//!
//! It is a crate of its own so that its simulation is compiled to be fast, and what does IO is compiled fast.

#![deny(unsafe_code)]

pub mod job;
pub mod mvcc;
pub mod rendezvous;
pub mod store;
pub mod time;
