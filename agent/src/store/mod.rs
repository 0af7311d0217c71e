//! The store that this node meets the others through: which one, the protocol on it, and the ports towards other nodes.
//! The store that workers find each other through is in [`crate::workers_store`].
//!
//! | module | what it is |
//! |---|---|
//! | [`alone`] | why no other node comes to the store that this agent serves |
//! | [`backend`] | the store a job meets through: etcd, or one that an agent serves |
//! | [`choice`] | which store, as the command line says |
//! | [`participation`] | taking part in a job by one protocol or the other |
//! | [`ports`] | ports that this node listens on or holds |
//! | [`seat`] | this agent's part in a store that three of them hold |

pub(crate) mod alone;
pub(crate) mod backend;
pub(crate) mod choice;
pub(crate) mod participation;
pub(crate) mod ports;
mod seat;
