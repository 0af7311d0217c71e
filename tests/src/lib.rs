//! The harness that tests across crates share: real servers, injected faults, and the contract that every store keeps.
//! Nothing here is built into a binary that users run.
//!
//! | module | what it is |
//! |---|---|
//! | [`agents`] | built agents as processes, their workers as scripts that tell where they are |
//! | [`balancer`] | a TCP balancer that moves connections and cuts them |
//! | [`contract`] | the promises of `elastic_store::Store`, as cases to run on any implementation |
//! | [`cost_model`] | what a node costs its etcd, by the protocol |
//! | [`counting_store`] | a store that counts what is asked of it |
//! | [`etcd`] | real etcd servers and clusters: started, killed, frozen, restarted |
//! | [`hostile`] | any bytes, given to each parser that faces the world |
//! | [`http`] | what a server says of itself |
//! | [`in_process`] | many nodes in one process, their workers simulated |
//! | [`launcher`] | the agent run to its end under any name, as launch scripts run it |
//! | [`linearizability`] | judges whether a history of store calls is linearizable |
//! | [`percentile`] | percentiles of what was measured |
//! | [`prelude`] | what most tests and benchmarks name |
//! | [`previous_release`] | the programs of the release before this one |
//! | [`processes`] | processes that run while a test does, and the product's own programs |
//! | [`processor`] | what processes and threads cost the machine |
//! | [`proxy`] | a TCP proxy that cuts, stalls, delays and refuses |
//! | [`rack`] | hosts that fail together |
//! | [`replicas`] | an embedded store that three servers hold; each can end like a process |
//! | [`requirement`] | what a test needs: where the machine lacks it, the test is skipped, or fails if it is required |
//! | [`torch`] | a Python that has PyTorch, if there is one |
//! | [`trace`] | the trace that a training writes |
//! | [`wait`] | waiting for a condition with a deadline |

// A harness reports by panicking, as tests do.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stderr)]

pub mod agents;
pub mod balancer;
pub mod contract;
pub mod cost_model;
pub mod counting_store;
pub mod etcd;
pub mod hostile;
pub mod http;
pub mod in_process;
pub mod launcher;
pub mod linearizability;
pub mod percentile;
pub mod prelude;
pub mod previous_release;
pub mod processes;
pub mod processor;
pub mod proxy;
pub mod rack;
pub mod replicas;
pub mod requirement;
pub mod torch;
pub mod trace;
pub mod wait;
