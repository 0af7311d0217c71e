//! The end of who is about to join: proves that it knows the job's secret, and counts what comes.

use std::time::Duration;

use tokio::time::timeout;
use tonic::{Status, Streaming, transport};

use elastic_proto::bandwidth::bandwidth_client::BandwidthClient;
use elastic_proto::bandwidth::{MeasureReply, MeasureRequest};

use super::TAKEN;
use crate::dial;
use crate::proven::{self, Unanswered};
use elastic_rendezvous::job::{Endpoint, JobId, JobSecret, NodeId};
use elastic_store::tls::MutualTls;

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
