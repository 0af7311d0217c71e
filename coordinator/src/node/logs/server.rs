//! The agent's end: admits those who know the job's secret, and hands their requests on. It reads no file.

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use futures::Stream;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tokio::time::timeout;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status, Streaming};

use elastic_proto::logs::logs_server::{Logs, LogsServer};
use elastic_proto::logs::{LogsReply, LogsRequest};

use super::{LogQuery, READERS, claim};
use crate::node::pulse_server::{NONCE, PeerPort};
use crate::node::random_bytes;

/// Largest message of a client: a job's id and a node's, its own name, a proof.
const MESSAGE: usize = 2 << 10;

/// Longest wait for the request, once the nonce was sent.
const FIRST_WORDS: Duration = Duration::from_secs(5);

/// Replies that wait for the network, of one reader.
const AHEAD: usize = 4;

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
pub(in crate::node) fn service(
    front: Arc<PeerPort>,
    requests: mpsc::Sender<LogRequest>,
) -> LogsServer<impl Logs + use<>> {
    let service = LogService(Arc::new(Gate { front, requests, places: Arc::new(Semaphore::new(READERS)) }));
    LogsServer::new(service).max_decoding_message_size(MESSAGE)
}

struct LogService(Arc<Gate>);

struct Gate {
    front: Arc<PeerPort>,
    requests: mpsc::Sender<LogRequest>,
    places: Arc<Semaphore>,
}

#[tonic::async_trait]
impl Logs for LogService {
    type ReadStream = Pin<Box<dyn Stream<Item = Result<LogsReply, Status>> + Send>>;

    async fn read(&self, request: Request<Streaming<LogsRequest>>) -> Result<Response<Self::ReadStream>, Status> {
        let nonce: [u8; NONCE] = random_bytes().map_err(|error| Status::unavailable(error.to_string()))?;
        let (replies, stream) = mpsc::channel(AHEAD);
        let first = LogsReply { nonce: nonce.to_vec(), ..LogsReply::default() };
        replies.try_send(Ok(first)).map_err(|_| Status::internal("a fresh channel is full"))?;
        let (gate, messages) = (Arc::clone(&self.0), request.into_inner());
        tokio::spawn(async move {
            if let Err(refused) = gate.admit(&nonce, messages, &replies).await {
                // Who is gone hears nothing.
                let _ = replies.send(Err(refused)).await;
            }
        });
        Ok(Response::new(Box::pin(ReceiverStream::new(stream))))
    }
}

impl Gate {
    async fn admit(
        &self,
        nonce: &[u8],
        mut messages: Streaming<LogsRequest>,
        replies: &mpsc::Sender<Result<LogsReply, Status>>,
    ) -> Result<(), Status> {
        let request = timeout(FIRST_WORDS, messages.message())
            .await
            .map_err(|_| Status::deadline_exceeded("no request came"))??
            .ok_or_else(|| Status::invalid_argument("the first message must be a request"))?;
        self.front.admit(&claim(&request, nonce), &request.proof)?;
        let full =
            |_| Status::resource_exhausted(format!("{READERS} others are reading the logs here: try again later"));
        let place = Arc::clone(&self.places).try_acquire_owned().map_err(full)?;
        let LogsRequest { rank, round, lines, follow, client, .. } = request;
        let client: String = client.chars().filter(|c| !c.is_control()).take(128).collect();
        tracing::info!(%client, "the workers' output is read through this agent");
        let query = LogQuery { rank, round, lines, follow };
        // There are as many places in this channel as readers.
        self.requests
            .try_send(LogRequest { query, replies: replies.clone(), _place: place })
            .map_err(|_| Status::unavailable("this agent is about to leave"))
    }
}
