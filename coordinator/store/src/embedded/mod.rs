//! A small store of our own, served over etcd's v3 gRPC API, so that one client, `etcdctl` and dashboards work on it.
//! It is for trials: one process holds it in memory, and everything is gone when that process ends. Production uses
//! etcd.
//!
//! [`mvcc`] is the state machine, [`Hub`] holds the one live copy of it, [`EmbeddedServer`] serves that, and
//! [`MemoryStore`] is the way in for the process that hosts it. Every start is a new cluster with a new id, so a client
//! notices that the store it knew is gone.

mod admin;
mod cluster;
mod command;
mod gate;
mod hub;
mod kv;
mod lease;
mod memory_store;
pub mod mvcc;
pub mod replicated;
mod server;
mod status;
mod watch;
mod wire;

pub use hub::{Batch, Hub, Subscription};
pub use memory_store::MemoryStore;
pub use replicated::{Group, Replicas};
pub use server::{EmbeddedError, EmbeddedServer, Options, names_loopback};
