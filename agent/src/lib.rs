//! The library behind `elastic-agent`: what one node does to take part in a job. The rendezvous protocol itself is in
//! `elastic-coordinator`.
//!
//! | module | what it is |
//! |---|---|
//! | [`cli`] | flags and `PET_*` variables, parsed into one [`cli::Options`] |
//! | [`guard`] | the small process that starts the workers, and ends them whenever the agent ends |
//! | [`machine`] | this machine: processors, accelerators, interfaces, the node's name |
//! | [`output`] | the workers' output, what a dead worker left behind, the final report |
//! | [`run`] | one node's part in a job, from its first read of the store to its exit code; its health |
//! | [`spare`] | a host that goes to whichever of several jobs lacks a node |
//! | [`store`] | the store that nodes meet through, the protocol on it, the ports |
//! | [`workers_store`] | the store that workers find each other through, in torch's wire protocol |
//! | [`workers`] | the local workers: start, talk to, watch, stop |
//!
//! `cli` depends on the option types of the others, and only `run`, `spare` and `main` depend on `cli`. Of the rest,
//! each depends on those before it in this order: `guard`, `machine`, `output`, `store`, `workers_store`, `workers`, `run`.

pub mod cli;
pub mod guard;
pub mod machine;
pub mod output;
pub mod run;
pub mod spare;
pub mod store;
pub mod workers;
pub mod workers_store;
