//! Another replica that was given this one's `--peer-address`. Agents reach one of the two, and take the other for dead.

use std::sync::Arc;
use std::time::Duration;

use elastic_node::dial;
use elastic_proto::pulse::Found;
use elastic_rendezvous::job::overview::Overview;
use elastic_rendezvous::job::{LeaderRecord, NodeId};
use elastic_store::tls::MutualTls;
use tokio::sync::watch;
use tokio::time::sleep;

use super::{LOOK, Shared};

/// Another replica that leads at this one's address: its predecessor, whose lease has not lapsed yet, or a twin.
fn suspect(overview: &Overview, own: &LeaderRecord) -> Option<NodeId> {
    let mut leaders = overview.jobs.values().filter_map(|job| job.leader.as_ref()).map(|leader| &leader.value);
    let same = |leader: &&LeaderRecord| leader.coordinator && leader.peer == own.peer && leader.node != own.node;
    leaders.find(same).map(|leader| leader.node.clone())
}

/// Tells in `twin` which living replica leads at this one's address, for as long as it leads. Says so once.
pub(super) async fn watch(
    shared: Arc<Shared>,
    own: LeaderRecord,
    tls: Option<MutualTls>,
    twin: watch::Sender<Option<NodeId>>,
) {
    loop {
        sleep(LOOK).await;
        let suspect = shared.overview().as_ref().and_then(|overview| suspect(overview, &own));
        if suspect == *twin.borrow() {
            continue;
        }
        let lives = match &suspect {
            Some(node) => dial::find(&own.peer, node, tls.as_ref(), Duration::ZERO).await == Found::Here,
            None => false,
        };
        if let Some(node) = suspect.as_ref().filter(|_| lives) {
            tracing::error!(
                "replica {node} takes agents' pulses at {} too, and it lives: give each replica a --peer-address of its \
                 own. This one, {}, takes no job while that one leads any",
                own.peer,
                own.node
            );
        }
        twin.send_replace(suspect.filter(|_| lives));
    }
}
