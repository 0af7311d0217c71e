//! What all services of the embedded store share: the header of every answer, and the end of every stream.

use std::pin::Pin;

use etcd_client::proto::PbResponseHeader;
use tokio::sync::watch;
use tonic::Status;

use crate::Revision;

pub(super) type RpcResult<T> = Result<T, Status>;
pub(super) type Stream<T> = Pin<Box<dyn futures::Stream<Item = RpcResult<T>> + Send>>;

/// Who answers: new at every start.
#[derive(Clone, Copy, Debug)]
pub(super) struct Cluster {
    id: u64,
    member: u64,
}

impl Cluster {
    pub(super) fn new() -> Cluster {
        // Never zero, which is how protobuf says nothing.
        Cluster { id: rand::random_range(1..u64::MAX), member: rand::random_range(1..u64::MAX) }
    }

    /// A member of a replicated store: its cluster and its life.
    pub(super) fn of(id: u64, member: u64) -> Cluster {
        Cluster { id, member }
    }

    pub(super) fn id(self) -> u64 {
        self.id
    }

    pub(super) fn header(self, revision: Revision) -> PbResponseHeader {
        PbResponseHeader { cluster_id: self.id, member_id: self.member, revision: revision.0, raft_term: 1 }
    }
}

/// Completes when the server stops, or serves no more, for streams, which would otherwise continue for ever.
#[derive(Clone)]
pub(super) struct Closing(pub(super) watch::Receiver<()>);

impl Closing {
    pub(super) async fn closed(mut self) {
        // Nothing is ever sent: this fails when the sender is dropped.
        while self.0.changed().await.is_ok() {}
    }
}
