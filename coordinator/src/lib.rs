//! The coordination library: everything that nodes must agree on, over a key-value store.
//!
//! | module | what it is |
//! |---|---|
//! | [`embedded`] | a store of our own, served over etcd's API: for one machine and trials |
//! | [`mvcc`] | a store as a pure state machine |
//! | [`store`] | the narrow trait over etcd v3 and the embedded store |
//! | [`etcd_v2`] | a client of etcd's v2 API |
//! | [`barrier`] | a named point that all members of a round reach before any passes |
//! | [`checkpoint`] | publishing a checkpoint under the fence |
//! | [`job`] | a job's vocabulary: ids, keys, records |
//! | [`rendezvous`] | the protocol as pure machines: `decide` for the leader, `step` for every node |
//! | [`listener`] | listening sockets, and the descriptors that they cost |
//! | [`node`] | the driver that carries the machines: IO, timers, pulses |
//! | [`overview`] | every job under a prefix, as the store tells it |
//! | [`service`] | the coordinator service: leads every job while it runs |
//! | [`operator`] | what `elasticctl` reads, shows and asks for |
//! | [`flags`] | the flags that say which store, shared by both commands |
//! | [`torchelastic`] | TorchElastic's own rendezvous on v2, as a pure machine |
//! | [`time`] | time as a value |
//! | [`date`] | dates, for people |

#![deny(unsafe_code)]

pub mod barrier;
pub mod checkpoint;
pub mod date;
pub mod embedded;
pub mod etcd_v2;
pub mod flags;
pub mod job;
pub mod listener;
pub mod mvcc;
pub mod node;
pub mod operator;
pub mod overview;
pub mod rendezvous;
pub mod service;
pub mod store;
pub mod time;
pub mod torchelastic;
