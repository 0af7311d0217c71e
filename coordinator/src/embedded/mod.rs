//! A small store of our own, served over etcd's v3 gRPC API, so that one client, `etcdctl` and dashboards work on it.
//! Not for production: one process holds it in memory, and all is gone when that ends. Production is etcd.
//!
//! [`Hub`] holds the state, [`EmbeddedServer`] serves it, and [`crate::store::MemoryStore`] is the way in for the
//! process that hosts it. Every start is a new cluster with a new id, so a client notices that the store it knew is gone.

mod admin;
mod hub;
mod kv;
mod lease;
mod server;
mod shares;
mod status;
mod watch;
mod wire;

pub use hub::{Batch, Hub, Subscription};
pub use server::{EmbeddedError, EmbeddedServer, Options};
