//! The agent's end: pours bytes to those who know the job's secret, to one at once.

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use futures::Stream;
use tokio::sync::{Semaphore, mpsc};
use tokio::time::timeout;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status, Streaming};

use elastic_proto::bandwidth::bandwidth_server::{Bandwidth, BandwidthServer};
use elastic_proto::bandwidth::{MeasureReply, MeasureRequest};

use super::{CHUNK, POURED, claim};
use crate::node::pulse_server::{NONCE, PeerPort};
use crate::node::random_bytes;

/// Largest message of a client: a job's id and a node's, its own name, a proof.
const MESSAGE: usize = 2 << 10;

/// Longest wait for the request, once the nonce was sent.
const FIRST_WORDS: Duration = Duration::from_secs(5);

/// Messages that wait for the network.
const AHEAD: usize = 4;

/// The service, for an agent's peer port.
pub(in crate::node) fn service(front: Arc<PeerPort>) -> BandwidthServer<impl Bandwidth + use<>> {
    let service = BandwidthService(Arc::new(Gate { front, place: Semaphore::new(1) }));
    BandwidthServer::new(service).max_decoding_message_size(MESSAGE)
}

struct BandwidthService(Arc<Gate>);

struct Gate {
    front: Arc<PeerPort>,
    /// Of the one that is poured to.
    place: Semaphore,
}

type Replies = mpsc::Sender<Result<MeasureReply, Status>>;

#[tonic::async_trait]
impl Bandwidth for BandwidthService {
    type MeasureStream = Pin<Box<dyn Stream<Item = Result<MeasureReply, Status>> + Send>>;

    async fn measure(
        &self,
        request: Request<Streaming<MeasureRequest>>,
    ) -> Result<Response<Self::MeasureStream>, Status> {
        let nonce: [u8; NONCE] = random_bytes().map_err(|error| Status::unavailable(error.to_string()))?;
        let (replies, stream) = mpsc::channel(AHEAD);
        let first = MeasureReply { nonce: nonce.to_vec(), ..MeasureReply::default() };
        replies.try_send(Ok(first)).map_err(|_| Status::internal("a fresh channel is full"))?;
        let (gate, messages) = (Arc::clone(&self.0), request.into_inner());
        tokio::spawn(async move {
            if let Err(refused) = gate.pour(&nonce, messages, &replies).await {
                // Who is gone hears nothing.
                let _ = replies.send(Err(refused)).await;
            }
        });
        Ok(Response::new(Box::pin(ReceiverStream::new(stream))))
    }
}

impl Gate {
    async fn pour(
        &self,
        nonce: &[u8],
        mut messages: Streaming<MeasureRequest>,
        replies: &Replies,
    ) -> Result<(), Status> {
        let request = timeout(FIRST_WORDS, messages.message())
            .await
            .map_err(|_| Status::deadline_exceeded("no request came"))??
            .ok_or_else(|| Status::invalid_argument("the first message must be a request"))?;
        self.front.admit(&claim(&request, nonce), &request.proof)?;
        let _place = self
            .place
            .try_acquire()
            .map_err(|_| Status::resource_exhausted("another node measures its bandwidth to here: try again later"))?;
        let client: String = request.client.chars().filter(|c| !c.is_control()).take(128).collect();
        tracing::info!(%client, "measures its bandwidth to here, for a second");
        // Nothing on the way can compress it.
        let filler: [u8; CHUNK] = random_bytes().map_err(|error| Status::unavailable(error.to_string()))?;
        let reply = MeasureReply { nonce: Vec::new(), filler: filler.to_vec() };
        // It ends when the client is gone, and at the latest when the time is over.
        let _ = timeout(POURED, async { while replies.send(Ok(reply.clone())).await.is_ok() {} }).await;
        Ok(())
    }
}
