//! Reads the workers' output through the agents' peer ports. The agent knows what is read, and from which files.
//!
//! Logs may hold anything, so an agent sends them only to clients that prove that they know [the job's
//! secret](elastic_rendezvous::job::JobSecret), which etcd's roles guard:
//!
//! ```text
//!  client                                    agent
//!    │ ── Read ────────────────────────────▶ │
//!    │ ◀──────────── nonce, 32 random bytes ─ │
//!    │ ── job, node, client, proof, query ─▶ │  proof = HMAC(secret; purpose, nonce, job, node, client)
//!    │ ◀───────────────────────────── text ─ │
//! ```
//!
//! The proof keeps strangers out. It does not hide the text from somebody who can read the network.

use std::convert::identity;
use std::sync::Arc;

use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tonic::{Code, Request, Response, Status, Streaming};

use elastic_proto::logs::logs_client::LogsClient;
use elastic_proto::logs::logs_server::{Logs, LogsServer};
use elastic_proto::logs::{LogsReply, LogsRequest};

use super::dial;
use super::peer_port::PeerPort;
use super::proven::{self, MESSAGE, ProvenReply, ProvenRequest, ReplyStream, Unanswered};
use elastic_rendezvous::job::{Claim, Endpoint, JobId, JobSecret, NodeId};
use elastic_store::tls::MutualTls;

/// What a client wants to read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LogQuery {
    /// Only this rank's output. `None`: all of the node's.
    pub rank: Option<u32>,
    /// Only that of workers that were in this round. `None`: of those that are there now, or were last.
    pub round: Option<u64>,
    /// How many of the last lines of each stream to begin with.
    pub lines: u32,
    /// Continue with what comes.
    pub follow: bool,
}

/// Readers that one agent serves at once.
pub const READERS: usize = 8;

/// Bytes of text in one message.
pub const CHUNK: usize = 32 * 1024;

impl ProvenRequest for LogsRequest {
    fn claim<'a>(&'a self, nonce: &'a [u8]) -> Claim<'a> {
        Claim { purpose: "elastic logs 1", nonce, job: &self.job, node: &self.node, client: &self.client }
    }
    fn proof(&mut self) -> &mut Vec<u8> {
        &mut self.proof
    }
}

impl ProvenReply for LogsReply {
    fn first(nonce: Vec<u8>) -> LogsReply {
        LogsReply { nonce, ..LogsReply::default() }
    }
    fn nonce(self) -> Vec<u8> {
        self.nonce
    }
}

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
    let channel = dial::channel(peer, tls, identity).await.map_err(|error| unreached(dial::innermost(&error)))?;
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

/// A request of somebody who may read, for the agent to answer. It ends when this is dropped.
#[derive(Debug)]
pub struct LogRequest {
    /// What to read.
    pub query: LogQuery,
    /// Where the answer goes. It takes a few messages ahead of the network, and is closed once the reader is gone.
    pub replies: mpsc::Sender<Result<LogsReply, Status>>,
    _place: OwnedSemaphorePermit,
}

/// The service, for a peer port. Admitted requests go to `requests`.
pub(crate) fn service(front: Arc<PeerPort>, requests: mpsc::Sender<LogRequest>) -> LogsServer<impl Logs + use<>> {
    let service = LogService { front, requests, places: Arc::new(Semaphore::new(READERS)) };
    LogsServer::new(service).max_decoding_message_size(MESSAGE)
}

struct LogService {
    front: Arc<PeerPort>,
    requests: mpsc::Sender<LogRequest>,
    places: Arc<Semaphore>,
}

#[tonic::async_trait]
impl Logs for LogService {
    type ReadStream = ReplyStream<LogsReply>;

    async fn read(&self, request: Request<Streaming<LogsRequest>>) -> Result<Response<Self::ReadStream>, Status> {
        let (requests, places) = (self.requests.clone(), Arc::clone(&self.places));
        proven::answer(Arc::clone(&self.front), request.into_inner(), move |request, client, replies| async move {
            let place = places.try_acquire_owned().map_err(|_| {
                Status::resource_exhausted(format!("{READERS} others are reading the logs here: try again later"))
            })?;
            tracing::info!(%client, "the workers' output is read through this agent");
            let LogsRequest { rank, round, lines, follow, .. } = request;
            let query = LogQuery { rank, round, lines, follow };
            // There are as many places in this channel as readers.
            requests
                .try_send(LogRequest { query, replies, _place: place })
                .map_err(|_| Status::unavailable("this agent is about to leave"))
        })
    }
}
