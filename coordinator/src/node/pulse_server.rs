//! The peer port: takes members' pulse streams and says who is here. Not for answering beats (the driver does).

use std::collections::BTreeMap;
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use futures::{Stream, StreamExt};
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio_stream::wrappers::{TcpListenerStream, UnboundedReceiverStream};
use tonic::{Request, Response, Status, Streaming};

use elastic_proto::pulse::pulse_server::{Pulse, PulseServer};
use elastic_proto::pulse::{IdentifyReply, IdentifyRequest, LeaderMessage, MemberMessage};

use super::lead::{LeaderInbox, LeaderNote};
use crate::job::{JobId, NodeId};

/// Who answers behind a peer port, and where the pulses of each job go. An agent takes part in one job; a coordinator's
/// replica leads many, under one node id.
#[derive(Default)]
pub(crate) struct Front {
    inner: Mutex<Behind>,
}

#[derive(Default)]
struct Behind {
    node: String,
    jobs: BTreeMap<String, LeaderInbox>,
}

impl Front {
    /// Takes pulses for `job` from here on, as `node`.
    pub(crate) fn open(&self, node: &NodeId, job: &JobId, inbox: LeaderInbox) {
        let mut behind = self.lock();
        behind.node = node.to_string();
        behind.jobs.insert(job.to_string(), inbox);
    }

    /// Takes none for `job` any more.
    pub(crate) fn close(&self, job: &JobId) {
        self.lock().jobs.remove(job.as_ref());
    }

    /// Names nobody any more: whoever took part here is about to go, and does nothing that others need fear. Asked by
    /// then, this port would vouch for a node whose stream and key end in the same moment, and nobody would ask again.
    pub(crate) fn leave(&self) {
        self.lock().node.clear();
    }

    /// Says who is here before there is a job.
    pub(crate) fn introduce(&self, node: &NodeId) {
        self.lock().node = node.to_string();
    }

    fn lock(&self) -> MutexGuard<'_, Behind> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Serves until the runtime ends.
pub(crate) async fn serve(listener: TcpListener, front: Arc<Front>) {
    let service = PulseServer::new(Peer { front, next: Arc::default() });
    let incoming = TcpListenerStream::new(listener);
    if let Err(error) = tonic::transport::Server::builder().add_service(service).serve_with_incoming(incoming).await {
        tracing::error!(%error, "the peer port failed; other nodes will find this one silent");
    }
}

struct Peer {
    front: Arc<Front>,
    next: Arc<AtomicU64>,
}

#[tonic::async_trait]
impl Pulse for Peer {
    type WatchStream = Pin<Box<dyn Stream<Item = Result<LeaderMessage, Status>> + Send>>;

    async fn watch(&self, request: Request<Streaming<MemberMessage>>) -> Result<Response<Self::WatchStream>, Status> {
        let mut messages = request.into_inner();
        let hello = messages
            .message()
            .await?
            .and_then(|message| message.hello)
            .ok_or_else(|| Status::invalid_argument("the first message must be a hello"))?;
        let inbox = self.front.lock().jobs.get(&hello.job).cloned();
        let inbox =
            inbox.ok_or_else(|| Status::failed_precondition(format!("job {:?} is not led from here", hello.job)))?;
        let stream = self.next.fetch_add(1, Ordering::Relaxed);
        let (answers, outgoing) = mpsc::unbounded_channel();
        let opened = LeaderNote::Opened { stream, node: NodeId::from_text(&hello.node), answers };
        inbox.send(opened).map_err(|_| Status::unavailable("this port is being left"))?;
        tokio::spawn(async move {
            while let Ok(Some(message)) = messages.message().await {
                if let Some(beat) = message.beat
                    && inbox.send(LeaderNote::Beat { stream, beat }).is_err()
                {
                    return;
                }
            }
            let _ = inbox.send(LeaderNote::Closed { stream });
        });
        Ok(Response::new(Box::pin(UnboundedReceiverStream::new(outgoing).map(Ok))))
    }

    async fn identify(&self, _: Request<IdentifyRequest>) -> Result<Response<IdentifyReply>, Status> {
        let behind = self.front.lock();
        // With many jobs none is named: the node id tells who is here.
        let mut jobs = behind.jobs.keys();
        let job = jobs.next().filter(|_| jobs.next().is_none()).cloned().unwrap_or_default();
        Ok(Response::new(IdentifyReply { job, node: behind.node.clone() }))
    }
}
