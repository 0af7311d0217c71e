//! Wire types of elastic training: messages between hosts (gRPC) and on the worker socket (JSON lines). There is no
//! logic here: no function decides anything.
//!
//! | module | what it is |
//! |---|---|
//! | [`worker`] | the worker socket's messages |
//! | [`pulse`] | the `Pulse` service between agents (feature `grpc`) |
//! | [`logs`] | the `Logs` service of an agent, for operators (feature `grpc`) |
//! | [`replication`] | between the agents that hold one embedded store together (feature `grpc`) |
//! | [`bandwidth`] | the `Bandwidth` service of an agent, for nodes that are about to join (feature `grpc`) |
//! | [`jobs`] | the `Jobs` service of the coordinator, for operators' programs (feature `grpc`) |

#![forbid(unsafe_code)]

pub mod worker;

/// Generated from `proto/jobs.proto`, with serde: in JSON, its messages are what the coordinator's JSON API answers.
#[cfg(feature = "grpc")]
#[allow(missing_docs, unreachable_pub, clippy::all, clippy::too_many_lines)]
pub mod jobs {
    use serde::de::DeserializeOwned;
    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    tonic::include_proto!("elastic.jobs.v1");

    /// The file itself, for those who ask a server what it speaks.
    pub const DESCRIPTORS: &[u8] = tonic::include_file_descriptor_set!("jobs");

    /// Writes an enum's value by its name, and the unspecified one as null.
    fn name_of<E, S>(value: &i32, serializer: S) -> Result<S::Ok, S::Error>
    where
        E: Serialize + TryFrom<i32>,
        S: Serializer,
    {
        E::try_from(*value).ok().filter(|_| *value != 0).serialize(serializer)
    }

    /// Reads an enum's value by its name; one that is not among them is unspecified.
    fn named<'de, E, D>(deserializer: D) -> Result<i32, D::Error>
    where
        E: DeserializeOwned + Default + Into<i32>,
        D: Deserializer<'de>,
    {
        let name = serde_json::Value::deserialize(deserializer)?;
        Ok(serde_json::from_value::<E>(name).unwrap_or_default().into())
    }
}

/// Generated from `proto/replication.proto`.
#[cfg(feature = "grpc")]
#[allow(missing_docs, unreachable_pub, clippy::all, clippy::too_many_lines)]
pub mod replication {
    tonic::include_proto!("elastic.v1.replication");
}

/// Generated from `proto/bandwidth.proto`.
#[cfg(feature = "grpc")]
#[allow(missing_docs, unreachable_pub, clippy::all, clippy::too_many_lines)]
pub mod bandwidth {
    tonic::include_proto!("elastic.v1.bandwidth");
}

/// Generated from `proto/logs.proto`.
#[cfg(feature = "grpc")]
#[allow(missing_docs, unreachable_pub, clippy::all, clippy::too_many_lines)]
pub mod logs {
    tonic::include_proto!("elastic.v1.logs");
}

/// Generated from `proto/pulse.proto`.
#[cfg(feature = "grpc")]
#[allow(missing_docs, unreachable_pub, clippy::all, clippy::too_many_lines)]
pub mod pulse {
    tonic::include_proto!("elastic.v1");
}
