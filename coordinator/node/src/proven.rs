//! Calls of the peer port that are answered to those alone who know the job's secret: the agent sends a nonce, and the
//! client's one request proves the secret over it. [`logs`](super::logs) and [`bandwidth`](super::bandwidth) are such.

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use futures::Stream;
use tokio::sync::mpsc;
use tokio::time::timeout;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Response, Status, Streaming};

use super::peer_port::PeerPort;
use super::pulse_proof::NONCE;
use super::random_bytes;
use elastic_rendezvous::job::{Claim, JobSecret};

/// Largest message of a client: a job's id and a node's, its own name, a proof.
pub(super) const MESSAGE: usize = 2 << 10;

/// Longest wait of an agent for the request, once the nonce was sent.
const FIRST_WORDS: Duration = Duration::from_secs(5);

/// Longest wait of a client for the nonce, once it is connected.
const ANSWER: Duration = Duration::from_secs(5);

/// Replies that wait for the network, of one call.
const AHEAD: usize = 4;

pub(super) trait ProvenRequest: Send + 'static {
    /// What its proof is over.
    fn claim<'a>(&'a self, nonce: &'a [u8]) -> Claim<'a>;
    fn proof(&mut self) -> &mut Vec<u8>;
}

/// An agent's reply. The first holds a nonce and nothing else.
pub(super) trait ProvenReply: Send + 'static {
    fn first(nonce: Vec<u8>) -> Self;
    fn nonce(self) -> Vec<u8>;
}

/// Where an agent's replies go: closed once the client is gone.
pub(super) type Replies<R> = mpsc::Sender<Result<R, Status>>;

pub(super) type ReplyStream<R> = Pin<Box<dyn Stream<Item = Result<R, Status>> + Send>>;

/// An agent's end: `serve` answers the request of the named client once it is proved. The client gets its error.
pub(super) fn answer<Q, R, F>(
    front: Arc<PeerPort>,
    messages: Streaming<Q>,
    serve: impl FnOnce(Q, String, Replies<R>) -> F + Send + 'static,
) -> Result<Response<ReplyStream<R>>, Status>
where
    Q: ProvenRequest,
    R: ProvenReply,
    F: Future<Output = Result<(), Status>> + Send,
{
    let nonce: [u8; NONCE] = random_bytes().map_err(|error| Status::unavailable(error.to_string()))?;
    let (replies, stream) = mpsc::channel(AHEAD);
    replies.try_send(Ok(R::first(nonce.to_vec()))).map_err(|_| Status::internal("a fresh channel is full"))?;
    tokio::spawn(async move {
        let served = async {
            let (request, client) = admitted(&front, &nonce, messages).await?;
            serve(request, client, replies.clone()).await
        };
        if let Err(refused) = served.await {
            // Who is gone hears nothing.
            let _ = replies.send(Err(refused)).await;
        }
    });
    Ok(Response::new(Box::pin(ReceiverStream::new(stream))))
}

/// The request and its client's name, fit for a log.
async fn admitted<Q: ProvenRequest>(
    front: &PeerPort,
    nonce: &[u8],
    mut messages: Streaming<Q>,
) -> Result<(Q, String), Status> {
    let mut request = timeout(FIRST_WORDS, messages.message())
        .await
        .map_err(|_| Status::deadline_exceeded("no request came"))??
        .ok_or_else(|| Status::invalid_argument("the first message must be a request"))?;
    let proof = std::mem::take(request.proof());
    let claim = request.claim(nonce);
    front.admit(&claim, &proof)?;
    let client = claim.client.chars().filter(|c| !c.is_control()).take(128).collect();
    Ok((request, client))
}

/// Why a client has no replies.
pub(super) enum Unanswered {
    Silent(String),
    Said(Status),
}

impl From<Status> for Unanswered {
    fn from(status: Status) -> Unanswered {
        Unanswered::Said(status)
    }
}

/// A client's end: sends `request` with its proof. Dropping the returned sender tells the agent that the client is
/// gone.
pub(super) async fn ask<Q: ProvenRequest, R: ProvenReply>(
    call: impl AsyncFnOnce(ReceiverStream<Q>) -> Result<Response<Streaming<R>>, Status>,
    secret: &JobSecret,
    mut request: Q,
) -> Result<(Streaming<R>, mpsc::Sender<Q>), Unanswered> {
    let (requests, outgoing) = mpsc::channel(1);
    let opening = async {
        let mut replies = call(ReceiverStream::new(outgoing)).await?.into_inner();
        let nonce = replies.message().await?.map(R::nonce).unwrap_or_default();
        Ok::<_, Status>((replies, nonce))
    };
    let silent = |_| Unanswered::Silent(format!("no answer within {} s", ANSWER.as_secs()));
    let (replies, nonce) = timeout(ANSWER, opening).await.map_err(silent)??;
    *request.proof() = secret.prove(&request.claim(&nonce));
    // It fails only once the stream has ended, and then the stream says why.
    let _ = requests.send(request).await;
    Ok((replies, requests))
}
