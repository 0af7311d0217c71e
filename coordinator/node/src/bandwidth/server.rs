//! The agent's end: pours bytes, to one client at once.

use std::sync::Arc;

use tokio::sync::Semaphore;
use tokio::time::timeout;
use tonic::{Request, Response, Status, Streaming};

use elastic_proto::bandwidth::bandwidth_server::{Bandwidth, BandwidthServer};
use elastic_proto::bandwidth::{MeasureReply, MeasureRequest};

use super::{CHUNK, POURED};
use crate::peer_port::PeerPort;
use crate::proven::{self, MESSAGE, Replies, ReplyStream};
use crate::random_bytes;

/// The service, for an agent's peer port.
pub(crate) fn service(front: Arc<PeerPort>) -> BandwidthServer<impl Bandwidth + use<>> {
    let service = BandwidthService { front, place: Arc::new(Semaphore::new(1)) };
    BandwidthServer::new(service).max_decoding_message_size(MESSAGE)
}

struct BandwidthService {
    front: Arc<PeerPort>,
    /// Of the one that is poured to.
    place: Arc<Semaphore>,
}

#[tonic::async_trait]
impl Bandwidth for BandwidthService {
    type MeasureStream = ReplyStream<MeasureReply>;

    async fn measure(
        &self,
        request: Request<Streaming<MeasureRequest>>,
    ) -> Result<Response<Self::MeasureStream>, Status> {
        let place = Arc::clone(&self.place);
        proven::answer(Arc::clone(&self.front), request.into_inner(), move |_, client, replies| async move {
            let _place = place.try_acquire().map_err(|_| {
                Status::resource_exhausted("another node measures its bandwidth to here: try again later")
            })?;
            tracing::info!(%client, "measures its bandwidth to here, for a second");
            pour(replies).await
        })
    }
}

async fn pour(replies: Replies<MeasureReply>) -> Result<(), Status> {
    // Nothing on the way can compress it.
    let filler: [u8; CHUNK] = random_bytes().map_err(|error| Status::unavailable(error.to_string()))?;
    let reply = MeasureReply { nonce: Vec::new(), filler: filler.to_vec() };
    // It ends when the client is gone, and at the latest when the time is over.
    let _ = timeout(POURED, async { while replies.send(Ok(reply.clone())).await.is_ok() {} }).await;
    Ok(())
}
