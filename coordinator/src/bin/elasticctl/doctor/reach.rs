//! Reads a job, and tries the ports that its nodes and its leader must reach each other through. What it means is judged
//! in `job`.

use std::collections::{BTreeMap, BTreeSet};
use std::io::ErrorKind;
use std::sync::Arc;

use elastic_coordinator::flags::StoreFlags;
use elastic_rendezvous::job::overview::Job;
use elastic_rendezvous::job::{Endpoint, JobId, Phase};
use elastic_store::Store;
use futures::StreamExt;
use tokio::net::TcpStream;

use super::look::within;
use elastic_coordinator::operator::{Operator, OperatorError};

const AT_ONCE: usize = 128;

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Port {
    Accepts,
    Refuses,
    /// It did not answer, or its name leads nowhere.
    Silent(String),
}

/// A job, and what its ports did, as seen from this host.
#[derive(Debug)]
pub(super) struct Seen {
    pub(super) id: JobId,
    pub(super) job: Job,
    pub(super) ports: BTreeMap<Endpoint, Port>,
}

pub(super) async fn look(flags: &StoreFlags, id: &str) -> Result<Seen, OperatorError> {
    let store: Arc<dyn Store> = Arc::new(flags.connect()?);
    let (id, job, _) = Operator::new(store, &flags.prefix).job(id).await?;
    // A done node's key stays after its agent.
    let here = job.nodes.values().filter(|node| node.value.phase != Phase::Done).map(|node| &node.value.peer);
    let peers: BTreeSet<Endpoint> = here.chain(job.leader.iter().map(|leader| &leader.value.peer)).cloned().collect();
    let tried = futures::stream::iter(peers).map(async |peer| {
        let port = knock(&peer).await;
        (peer, port)
    });
    let ports = tried.buffer_unordered(AT_ONCE).collect().await;
    Ok(Seen { id, job, ports })
}

async fn knock(peer: &Endpoint) -> Port {
    let knock = async {
        match TcpStream::connect((peer.host.as_str(), peer.port)).await {
            Ok(_) => Ok(Port::Accepts),
            Err(error) if error.kind() == ErrorKind::ConnectionRefused => Ok(Port::Refuses),
            Err(error) => Err(error),
        }
    };
    within(knock).await.unwrap_or_else(Port::Silent)
}
