//! A key-value store for workers, on the wire protocol of PyTorch's TCPStore. The agents' own rendezvous does not use
//! it.
//!
//! `torch.distributed` finds its peers through such a store. torchrun's agent keeps one store for all restarts, so keys
//! of the last attempt get in the way of the next. Here each round gets a fresh store. It listens before any other node
//! is informed of it. It lives as long as its agent wants it, even if worker rank 0 dies.
//!
//! | module | home of |
//! |---|---|
//! | [`wire`] | requests out of bytes, in both of torch's dialects |
//! | [`state`] | keys, queues, waits and barriers: a request in, answers out |
//! | [`fence`] | who may speak to it |
//! | [`budget`] | the budget, and values that are charged to it |
//! | `output` | what is still to be sent on a connection |
//! | [`server`] | the sockets and their thread |
//! | [`rank0_port`] | the port at which the ranks of a round find each other: rank 0's agent serves the store there |
//! | [`introduction`] | an agent proves to the store that its host is one of the round's nodes |

pub(crate) mod budget;
pub(crate) mod fence;
pub(crate) mod introduction;
mod output;
pub(crate) mod rank0_port;
pub(crate) mod server;
pub(crate) mod state;
#[cfg(test)]
mod tests;
pub(crate) mod wire;

pub use server::{TcpStore, WorkersStoreLimits};
