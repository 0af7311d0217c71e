//! The reader's end: proves that it knows the job's secret, and takes what comes.

use tokio::sync::mpsc;
use tonic::{Code, Status, Streaming};

use elastic_proto::logs::logs_client::LogsClient;
use elastic_proto::logs::{LogsReply, LogsRequest};

use super::LogQuery;
use crate::dial;
use crate::proven::{self, Unanswered};
use elastic_rendezvous::job::{Endpoint, JobId, JobSecret, NodeId};
use elastic_store::tls::MutualTls;

/// Why a node's logs cannot be read.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum LogsError {
    /// No one listens there, or the network does not lead there.
    #[error("its agent at {peer} is not reached from here: {cause}")]
    Unreached { peer: Endpoint, cause: String },
    /// The agent refuses, or has ended.
    #[error("its agent says: {0}")]
    Refused(String),
    /// The agent or the network fell silent in the middle.
    #[error("its agent has broken off: {0}")]
    Gone(String),
}

impl From<Status> for LogsError {
    fn from(status: Status) -> LogsError {
        match status.code() {
            // Those that tonic makes itself when a connection breaks.
            Code::Unknown | Code::Internal | Code::Cancelled => LogsError::Gone(status.message().to_owned()),
            _ => LogsError::Refused(status.message().to_owned()),
        }
    }
}

/// What a node's agent tells, message by message.
#[derive(Debug)]
pub struct LogStream {
    replies: Streaming<LogsReply>,
    /// The agent hears that the reader is gone when this is dropped.
    _requests: mpsc::Sender<LogsRequest>,
}

impl LogStream {
    /// The next message; `None` once the agent has told everything. The wait may be cancelled.
    pub async fn next(&mut self) -> Result<Option<LogsReply>, LogsError> {
        match self.replies.message().await? {
            Some(reply) if reply.end => Ok(None),
            Some(reply) => Ok(Some(reply)),
            None => Err(LogsError::Gone("it waits ten minutes for a reader that takes nothing".to_owned())),
        }
    }
}

/// Asks a node for its workers' output. `client` names who asks, for the agent's log. An agent that refuses says so in
/// the stream.
pub async fn open(
    (job, node): (&JobId, &NodeId),
    peer: &Endpoint,
    secret: &JobSecret,
    client: &str,
    query: LogQuery,
    tls: Option<&MutualTls>,
) -> Result<LogStream, LogsError> {
    let unreached = |cause: String| LogsError::Unreached { peer: peer.clone(), cause };
    let channel =
        dial::channel(peer, tls, std::convert::identity).await.map_err(|error| unreached(dial::innermost(&error)))?;
    let LogQuery { rank, round, lines, follow } = query;
    let (job, node, client) = (job.to_string(), node.to_string(), client.to_owned());
    let request = LogsRequest { job, node, client, rank, round, lines, follow, proof: Vec::new() };
    let read = async |requests| LogsClient::new(channel).read(requests).await;
    let (replies, requests) = proven::ask(read, secret, request).await.map_err(|unanswered| match unanswered {
        Unanswered::Silent(cause) => unreached(cause),
        Unanswered::Said(status) => status.into(),
    })?;
    Ok(LogStream { replies, _requests: requests })
}
