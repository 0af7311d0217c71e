//! Wire types of elastic training: what crosses hosts (gRPC) and what crosses the worker socket (JSON lines).
//! Not for logic: no function here decides anything.
//!
//! | module | what it is |
//! |---|---|
//! | [`worker`] | the worker socket's messages |
//! | [`pulse`] | the `Pulse` service between agents (feature `grpc`) |

#![forbid(unsafe_code)]

pub mod worker;

/// Generated from `proto/pulse.proto`.
#[cfg(feature = "grpc")]
#[allow(missing_docs, unreachable_pub, clippy::all)]
pub mod pulse {
    tonic::include_proto!("elastic.v1");
}
