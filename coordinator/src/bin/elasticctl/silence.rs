//! Which nodes of a job are silent, by the leases that their keys hang on. A leader hears the nodes themselves; to others
//! the store is what knows.

use std::collections::BTreeMap;
use std::time::Duration;

use elastic_rendezvous::job::overview::Job;
use elastic_rendezvous::job::{Keys, NodeId};
use elastic_store::etcd::EtcdStore;
use elastic_store::{Result, Store};
use futures::StreamExt;

const AT_ONCE: usize = 64;

/// Nodes that have missed two renewals of their leases, and how long ago their last one was.
pub(crate) type Silent = BTreeMap<NodeId, Duration>;

pub(crate) async fn look(etcd: &EtcdStore, job: &Job) -> Result<Silent> {
    let (values, _) = etcd.range(&job.keys.nodes()).await?;
    let leases = values.iter().filter_map(|kv| Some((Keys::node_of(&job.keys.nodes(), &kv.key)?, kv.lease?)));
    let asked = leases.filter(|(node, _)| job.nodes.contains_key(node)).map(|(node, lease)| async move {
        let [renewed, granted] = etcd.lease_times(lease).await.ok().flatten()?;
        // Agents renew in each fifth of it. etcd counts in whole seconds.
        (renewed > granted * 2 / 5 + Duration::from_secs(1)).then_some((node, renewed))
    });
    Ok(futures::stream::iter(asked).buffer_unordered(AT_ONCE).filter_map(std::future::ready).collect().await)
}
