//! The agent's end: hands the requests of those who may read on. It reads no file.

use std::sync::Arc;

use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tonic::{Request, Response, Status, Streaming};

use elastic_proto::logs::logs_server::{Logs, LogsServer};
use elastic_proto::logs::{LogsReply, LogsRequest};

use super::{LogQuery, READERS};
use crate::peer_port::PeerPort;
use crate::proven::{self, MESSAGE, ReplyStream};

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
