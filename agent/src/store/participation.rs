//! A node's part in a job, by our own protocol or by TorchElastic's. Decides nothing itself.

use std::sync::Arc;

use elastic_node::{Command, GroupReport, Node, Parting, Status};
use elastic_rendezvous::MemberSetup;
use elastic_rendezvous::job::{JobId, Keys};
use elastic_store::Store;
use elastic_torchelastic::Paths;
use elastic_torchelastic::TorchElastic;
use elastic_torchelastic::etcd_v2::EtcdV2;
use tokio::sync::{mpsc, watch};

/// The store, and the protocol by which nodes meet on it.
#[derive(Clone)]
pub enum JobStore {
    /// By our own protocol.
    Store(Arc<dyn Store>),
    /// By TorchElastic's protocol, on etcd's v2 API.
    TorchElastic(EtcdV2),
}

impl JobStore {
    /// The store of our own protocol.
    pub fn store(&self) -> Option<&Arc<dyn Store>> {
        match self {
            JobStore::Store(store) => Some(store),
            JobStore::TorchElastic(_) => None,
        }
    }
}

/// Where the store keeps one job's records.
#[derive(Clone)]
pub struct JobPaths {
    /// The job.
    pub job: JobId,
    /// Keys of our own protocol.
    pub keys: Keys,
    /// Paths of TorchElastic's protocol.
    pub paths: Paths,
}

/// The protocol that carries the node's part. The agent treats both alike.
pub(crate) enum Participation {
    /// Our own protocol.
    Own(Node),
    /// TorchElastic's protocol, which torchrun calls `etcd`.
    TorchElastic(TorchElastic),
}

impl Participation {
    /// The node's status, as it changes.
    pub(crate) fn status(&self) -> watch::Receiver<Status> {
        match self {
            Participation::Own(node) => node.status(),
            Participation::TorchElastic(node) => node.status(),
        }
    }

    /// Runs one incarnation to its end.
    pub(crate) async fn run(
        &self,
        setup: MemberSetup,
        commands: &mpsc::UnboundedSender<Command>,
        reports: &mut mpsc::UnboundedReceiver<GroupReport>,
    ) -> Parting {
        match self {
            Participation::Own(node) => node.run(setup, commands, reports).await,
            Participation::TorchElastic(node) => node.run(setup, commands, reports).await,
        }
    }
}
