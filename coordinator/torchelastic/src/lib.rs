//! TorchElastic's own rendezvous, the one that torchrun calls `etcd`, on etcd's v2 API, so that elastic agents and
//! torchrun meet in one job. Our own protocol is in [`elastic_rendezvous`].
//!
//! | module | what it is |
//! |---|---|
//! | [`etcd_v2`] | a client of etcd's v2 API |
//! | [`keys`] | where everything lies |
//! | [`state`] | the state that all write by compare-and-swap |
//! | `view` | what a node knows of it, kept up by one watch |
//! | `exchange` | ranks and rank 0's address, told through the version's key-value store |
//! | [`participant`] | the machine: pure, with the time as an argument |
//! | `driver` | runs the machine: requests, the watch, timers |
//! | `barrier` | barriers of workers on the v2 API |
//!
//! There is no leader: each node reads the state and writes the next one, if no one was faster.

#![deny(unsafe_code)]

mod barrier;
mod driver;
pub mod etcd_v2;
mod exchange;
pub mod keys;
pub mod participant;
pub mod state;
mod view;

pub use barrier::meet_on_v2;
pub use driver::{TorchElastic, met_on_v2};
pub use keys::{DEFAULT_PREFIX, Paths};
pub use participant::{Input, Output, Participant, ParticipantSetup, Upkeep};
pub use state::{JobEnd, RendezvousState, RendezvousStatus};

/// What to tell where the state of torchrun's dynamic rendezvous was found at `key`.
pub fn dynamic_found(key: &str) -> String {
    format!(
        "torchrun nodes of this job's id meet by --rdzv-backend=etcd-v2: their state is at {key}. That is another \
         protocol, which no elastic-agent speaks, so the two would never meet. Start those nodes with \
         --rdzv-backend=etcd, or this one under another --rdzv-id; if no such node is left, delete that key, which \
         else lasts two hours"
    )
}
