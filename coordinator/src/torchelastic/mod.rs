//! TorchElastic's own rendezvous, the one that torchrun calls `etcd`, as a pure machine: what a node asks of etcd's v2
//! API and does with its workers, so that elastic agents and torchrun meet in one job. IO is in
//! [`crate::node::torchelastic`], our own protocol in [`crate::rendezvous`].
//!
//! | module | what it is |
//! |---|---|
//! | [`keys`] | where everything lies |
//! | [`state`] | the state that all write by compare-and-swap |
//! | `view` | what a node knows of it, kept up by one watch |
//! | `exchange` | ranks and rank 0's address, told through the version's key-value store |
//! | [`participant`] | the machine |
//!
//! There is no leader: each node reads the state and writes the next one, if no one was faster.

#![deny(clippy::disallowed_methods, clippy::disallowed_types)]

mod exchange;
pub mod keys;
pub mod participant;
pub mod state;
mod view;

pub use keys::{DEFAULT_PREFIX, Paths};
pub use participant::{Input, Membership, Output, Participant, ParticipantSetup, Upkeep};
pub use state::{JobEnd, RendezvousState, RendezvousStatus};

/// What to tell where the state of torchrun's dynamic rendezvous was found at `key`.
pub fn dynamic_found(key: &str) -> String {
    format!(
        "torchrun nodes of this job's id meet by --rdzv-backend=etcd-v2: their state is at {key}. That is another protocol, which no elastic-agent speaks, so the two would never meet. Start those nodes with --rdzv-backend=etcd, or this one under another --rdzv-id; if no such node is left, delete that key, which else lasts two hours"
    )
}
