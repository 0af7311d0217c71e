//! Which nodes of a job are silent, by the leases that their keys hang on. A leader hears the nodes themselves; to others
//! the store is what knows.

use std::collections::BTreeMap;
use std::time::Duration;

use elastic_rendezvous::job::{Keys, NodeId};
use elastic_store::etcd::EtcdStore;
use elastic_store::{Result, Store};
use futures::StreamExt;
use serde_json::{Value, json};

const AT_ONCE: usize = 64;

/// Nodes that have missed two renewals of their leases, and how long ago their last one was.
pub(crate) type Silent = BTreeMap<NodeId, Duration>;

/// Those of the job with these keys.
pub(crate) async fn look(etcd: &EtcdStore, keys: &Keys) -> Result<Silent> {
    let (values, _) = etcd.range(&keys.nodes()).await?;
    let leases = values.iter().filter_map(|kv| Some((Keys::node_of(&keys.nodes(), &kv.key)?, kv.lease?)));
    let leases: Vec<_> = leases.collect();
    let asked = leases.into_iter().map(|(node, lease)| async move {
        let [renewed, granted] = etcd.lease_times(lease).await.ok().flatten()?;
        // Agents renew in each fifth of it. etcd counts in whole seconds.
        (renewed > granted * 2 / 5 + Duration::from_secs(1)).then_some((node, renewed))
    });
    Ok(futures::stream::iter(asked).buffer_unordered(AT_ONCE).filter_map(std::future::ready).collect().await)
}

/// Says of each silent node in a job's JSON for how many seconds it has been so. Of the others it says what the API does.
pub(crate) fn tell(mut job: Value, silent: &Silent) -> Value {
    for node in job["nodes"].as_array_mut().into_iter().flatten() {
        if let Some(time) = node["id"].as_str().and_then(|id| silent.get(&NodeId::from_text(id))) {
            node["silent_s"] = json!(time.as_secs());
        }
    }
    job
}
