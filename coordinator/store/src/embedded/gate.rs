//! Who carries out what clients ask: this process alone, or it together with two others. The services of etcd's API
//! do not tell the two apart.

use std::sync::Arc;

use elastic_proto::replication::command::What;
use elastic_rendezvous::time::Time;
use etcd_client::proto::PbResponseHeader;

use super::Hub;
use super::cluster::{Closing, Cluster, RpcResult};
use super::command::{self, Answer};
use super::mvcc::Mvcc;
use super::replicated::Group;

#[derive(Clone)]
pub(super) enum Gate {
    Alone { hub: Arc<Hub>, cluster: Cluster, closing: Closing },
    Replicated(Arc<Group>),
}

/// One time of serving: what a stream needs, which ends with it.
pub(super) struct Reign {
    pub(super) hub: Arc<Hub>,
    pub(super) cluster: Cluster,
    pub(super) closing: Closing,
}

impl Gate {
    /// Carries out a command, after all that was answered before.
    pub(super) async fn run(&self, what: What) -> RpcResult<(Answer, PbResponseHeader)> {
        let (answer, revision, cluster) = match self {
            Gate::Alone { hub, cluster, .. } => {
                let (answer, revision) = hub.with(|mvcc, now| command::carry_out(mvcc, &command::at(now, what)));
                (answer, revision, *cluster)
            }
            Gate::Replicated(group) => group.run(what).await?,
        };
        Ok((answer, cluster.header(revision)))
    }

    /// Reads from a state that has all that was answered before.
    pub(super) async fn read<T>(&self, read: impl FnOnce(&Mvcc, Time) -> T) -> RpcResult<(T, PbResponseHeader)> {
        let (_, header) = self.run(command::tick()).await?;
        let hub = match self {
            Gate::Alone { hub, .. } => hub,
            Gate::Replicated(group) => group.hub(),
        };
        Ok(hub.look(|mvcc| {
            let revision = mvcc.revision().0;
            (read(mvcc, crate::clock::now()), PbResponseHeader { revision, ..header })
        }))
    }

    /// Those who hold a replicated store and have a vote: their lives and addresses.
    pub(super) fn voters(&self) -> Option<Vec<(u64, String)>> {
        match self {
            Gate::Alone { .. } => None,
            Gate::Replicated(group) => Some(group.voters()),
        }
    }

    /// For a stream, while this process serves.
    pub(super) async fn reign(&self) -> RpcResult<Reign> {
        match self {
            Gate::Alone { hub, cluster, closing } => {
                Ok(Reign { hub: Arc::clone(hub), cluster: *cluster, closing: closing.clone() })
            }
            Gate::Replicated(group) => group.reign().await,
        }
    }
}
