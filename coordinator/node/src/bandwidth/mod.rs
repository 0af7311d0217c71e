//! Measures how fast bytes come from a node of a job, through its agent's peer port.
//!
//! The client has no place in the job yet, so the proof is that of [`logs`](super::logs).
//!
//! ```text
//!  client                                    agent
//!    │ ── Measure ─────────────────────────▶ │
//!    │ ◀──────────── nonce, 32 random bytes ─ │
//!    │ ── job, node, client, proof ────────▶ │  proof = HMAC(secret; purpose, nonce, job, node, client)
//!    │ ◀──────────── bytes, for one second ─ │
//! ```
//!
//! A job's training continues meanwhile, so an agent serves one client at once, and none for long.

#[cfg(test)]
mod tests;

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Semaphore;
use tokio::time::timeout;
use tonic::{Request, Response, Status, Streaming, transport};

use elastic_proto::bandwidth::bandwidth_client::BandwidthClient;
use elastic_proto::bandwidth::bandwidth_server::{Bandwidth, BandwidthServer};
use elastic_proto::bandwidth::{MeasureReply, MeasureRequest};

use super::dial;
use super::peer_port::PeerPort;
use super::proven::{self, MESSAGE, ProvenReply, ProvenRequest, Replies, ReplyStream, Unanswered};
use super::random_bytes;
use elastic_rendezvous::job::{Claim, Endpoint, JobId, JobSecret, NodeId};
use elastic_store::tls::MutualTls;

/// How long a client takes bytes.
pub const TAKEN: Duration = Duration::from_secs(1);

/// The longest that an agent pours, whatever the client does.
const POURED: Duration = Duration::from_secs(2);

const CHUNK: usize = 32 << 10;

impl ProvenRequest for MeasureRequest {
    fn claim<'a>(&'a self, nonce: &'a [u8]) -> Claim<'a> {
        Claim { purpose: "elastic bandwidth 1", nonce, job: &self.job, node: &self.node, client: &self.client }
    }
    fn proof(&mut self) -> &mut Vec<u8> {
        &mut self.proof
    }
}

impl ProvenReply for MeasureReply {
    fn first(nonce: Vec<u8>) -> MeasureReply {
        MeasureReply { nonce, ..MeasureReply::default() }
    }
    fn nonce(self) -> Vec<u8> {
        self.nonce
    }
}

/// Bytes that may be under way: 10 Gbit/s for 12 ms there and back. HTTP/2's own default carries a tenth of that.
const WINDOW: u32 = 16 << 20;

/// Why nothing could be measured.
#[derive(Debug, thiserror::Error)]
pub enum BandwidthError {
    /// No one listens there, or the network does not lead there.
    #[error("its agent is not reached from here: {0}")]
    Unreached(String),
    /// The agent refuses, measures with somebody else, or has gone.
    #[error("its agent says: {0}")]
    Refused(String),
}

impl From<Status> for BandwidthError {
    fn from(status: Status) -> BandwidthError {
        BandwidthError::Refused(status.message().to_owned())
    }
}

/// What has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Poured {
    /// So many bytes.
    pub bytes: u64,
    /// In this time.
    pub within: Duration,
}

/// Has a node's agent pour bytes for [`TAKEN`]. `client` names who asks, for the agent's log.
pub async fn measure(
    (job, node): (&JobId, &NodeId),
    peer: &Endpoint,
    secret: &JobSecret,
    client: &str,
    tls: Option<&MutualTls>,
) -> Result<Poured, BandwidthError> {
    let unreached = BandwidthError::Unreached;
    let wide = |to: transport::Endpoint| to.initial_stream_window_size(WINDOW).initial_connection_window_size(WINDOW);
    let channel = dial::channel(peer, tls, wide).await.map_err(|error| unreached(dial::innermost(&error)))?;
    let (job, node, client) = (job.to_string(), node.to_string(), client.to_owned());
    let request = MeasureRequest { job, node, client, proof: Vec::new() };
    let pour = async |requests| BandwidthClient::new(channel).measure(requests).await;
    let (replies, _requests) = proven::ask(pour, secret, request).await.map_err(|unanswered| match unanswered {
        Unanswered::Silent(cause) => unreached(cause),
        Unanswered::Said(status) => status.into(),
    })?;
    Ok(take(replies).await?)
}

/// Counts what comes. An agent that has answered and sends nothing is one behind a link that carries nothing.
async fn take(mut replies: Streaming<MeasureReply>) -> Result<Poured, Status> {
    let (begun, mut bytes) = (elastic_store::clock::now(), 0);
    let counting = async {
        while let Some(reply) = replies.message().await? {
            bytes += reply.filler.len() as u64;
        }
        Ok::<_, Status>(())
    };
    timeout(TAKEN, counting).await.unwrap_or(Ok(()))?;
    Ok(Poured { bytes, within: elastic_store::clock::now().since(begun) })
}

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
