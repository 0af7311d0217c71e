//! Stores behind one narrow trait: etcd v3, and a small embedded store that speaks etcd's API. Also what reaching them
//! needs: TLS, listening sockets, this machine's clocks. A job's records are in [`elastic_rendezvous::job`].
//!
//! | module | what it is |
//! |---|---|
//! | [`clock`] | this machine's clocks |
//! | [`followed`] | files that are read again while the program runs |
//! | [`tls`] | TLS of what we serve, and mutual TLS among peers |
//! | [`listener`] | listening sockets, and the descriptors that they cost |
//! | [`Store`] | the trait |
//! | [`Mirror`] | a prefix that is read once and then watched |
//! | [`etcd`] | etcd v3 |
//! | [`embedded`] | a store of our own, served over etcd's API: for one machine and trials |
//! | [`metered`] | any store, with its calls counted |

#![deny(unsafe_code)]

pub mod clock;
pub mod embedded;
pub mod etcd;
pub mod followed;
pub mod listener;
pub mod metered;
mod mirror;
mod service;
pub mod tls;

pub use elastic_rendezvous::kv::*;
pub use mirror::Mirror;
pub use service::{Store, Watcher};
