//! The library behind `elastic-agent`: what one node does to take part in a job. The rendezvous protocol itself is in
//! `elastic-coordinator`.
//!
//! | module | what it is |
//! |---|---|
//! | [`agent`] | one node's part in a job, from its first read of the store to its exit code; its health |
//! | [`cli`] | flags and `PET_*` variables, parsed into one [`cli::Options`] |
//! | [`guard`] | the small process that starts the workers, and ends them whenever the agent ends |
//! | [`machine`] | this machine: processors, accelerators, interfaces, the node's name |
//! | [`meeting`] | how nodes meet: the store, the protocol, the ports, the workers' own store |
//! | [`output`] | the workers' output, what a dead worker left behind, the final report |
//! | [`spare`] | a host that goes to whichever of several jobs lacks a node |
//! | [`workers`] | the local workers: start, talk to, watch, stop |
//!
//! `cli` depends on the option types of the others, and only `agent`, `spare` and `main` depend on `cli`. Of the rest, each
//! depends on what stands before it in this order: `guard`, `machine`, `output`, `meeting`, `workers`, `agent`.

pub mod agent;
pub mod cli;
pub mod guard;
pub mod machine;
pub mod meeting;
pub mod output;
pub mod spare;
pub mod workers;
