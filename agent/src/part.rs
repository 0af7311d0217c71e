//! A node's part in a job, by one protocol or the other. Not for what either decides.

use elastic_coordinator::node::torchelastic::TorchElastic;
use elastic_coordinator::node::{Command, Node, Parting, Report, Status};
use elastic_coordinator::rendezvous::Setup;
use tokio::sync::{mpsc, watch};

/// What carries the node's part. To the agent both are the same.
pub enum Part {
    /// Our own protocol.
    Own(Node),
    /// TorchElastic's, which torchrun calls `etcd`.
    TorchElastic(TorchElastic),
}

impl Part {
    /// How the node stands, as it changes.
    pub fn status(&self) -> watch::Receiver<Status> {
        match self {
            Part::Own(node) => node.status(),
            Part::TorchElastic(node) => node.status(),
        }
    }

    /// Runs one incarnation to its end.
    pub async fn run(
        &self,
        setup: Setup,
        commands: &mpsc::UnboundedSender<Command>,
        reports: &mut mpsc::UnboundedReceiver<Report>,
    ) -> Parting {
        match self {
            Part::Own(node) => node.run(setup, commands, reports).await,
            Part::TorchElastic(node) => node.run(setup, commands, reports).await,
        }
    }
}
