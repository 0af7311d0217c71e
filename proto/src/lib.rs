//! Wire types of elastic training: messages between hosts (gRPC) and on the worker socket (JSON lines). There is no
//! logic here: no function decides anything.
//!
//! | module | what it is |
//! |---|---|
//! | [`worker`] | the worker socket's messages |
//! | [`pulse`] | the `Pulse` service between agents (feature `grpc`) |
//! | [`logs`] | the `Logs` service of an agent, for operators (feature `grpc`) |

#![forbid(unsafe_code)]

pub mod worker;

/// Generated from `proto/logs.proto`.
#[cfg(feature = "grpc")]
#[allow(missing_docs, unreachable_pub, clippy::all)]
pub mod logs {
    tonic::include_proto!("elastic.v1.logs");
}

/// Generated from `proto/pulse.proto`.
#[cfg(feature = "grpc")]
#[allow(missing_docs, unreachable_pub, clippy::all)]
pub mod pulse {
    tonic::include_proto!("elastic.v1");
}
