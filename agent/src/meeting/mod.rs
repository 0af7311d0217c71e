//! How this node meets the others: the store, the protocol on it, the ports, and the store of the workers.
//!
//! | module | what it is |
//! |---|---|
//! | [`backend`] | the store a job meets through: etcd, or one that an agent serves |
//! | [`introduction`] | telling a round's store of the workers that this host is one of its nodes |
//! | [`participation`] | taking part in a job by one protocol or the other |
//! | [`ports`] | ports that this node listens on or holds |
//! | [`rendezvous`] | which store, as the command line says |
//! | [`rendezvous_port`] | the port at which the ranks of a round find each other |
//! | [`workers_store`] | the store behind that port, in torch's wire protocol |

pub mod backend;
pub mod introduction;
pub mod participation;
pub mod ports;
pub mod rendezvous;
pub mod rendezvous_port;
pub mod workers_store;
