//! The harness that tests across crates share: real servers, injected faults, and the contract that every store keeps.
//! Not for product code: nothing here is built into a binary that users run.
//!
//! | module | what it is |
//! |---|---|
//! | [`agents`] | built agents as processes, their workers as scripts that tell where they are |
//! | [`binaries`] | the product's own binaries, as built beside the tests |
//! | [`contract`] | the promises of `coordinator::store::Store`, as cases to run on any implementation |
//! | [`counted`] | a store that counts what is asked of it |
//! | [`etcd`] | real etcd servers and clusters: started, killed, frozen, restarted |
//! | [`fleet`] | many nodes in one process, their workers as words |
//! | [`grumpy`] | a gRPC proxy that answers "not now" in the server's place |
//! | [`lacking`] | what a machine lacks: a test is left out, or fails where that is required |
//! | [`launcher`] | the agent run to its end under any name, as launch scripts run it |
//! | [`proxy`] | a TCP proxy that cuts, stalls, delays and refuses |
//! | [`torch`] | a Python that has PyTorch, or the word that there is none |
//! | [`wait`] | waiting for a condition with a deadline |

// A harness reports by panicking, as tests do.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stderr)]

pub mod agents;
pub mod binaries;
pub mod contract;
pub mod counted;
pub mod etcd;
pub mod fleet;
pub mod grumpy;
pub mod lacking;
pub mod launcher;
pub mod proxy;
pub mod torch;
pub mod wait;
