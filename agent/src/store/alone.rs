//! Says why no other node comes to the store that this agent serves, where its endpoint is the reason.

use std::convert::Infallible;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use elastic_rendezvous::job::{Endpoint, Keys, NodeId};
use elastic_store::Store;
use elastic_store::etcd::{EtcdConfig, EtcdStore};
use elastic_store::tls::MutualTls;

use super::backend::{Backend, resolve};
use crate::machine::interfaces;
use crate::store::choice::{StoreChoice, StoreOptions};

/// How long a node is alone before it looks for a reason.
const PATIENCE: Duration = Duration::from_secs(5);

/// How long the endpoint may take to answer.
const ANSWER: Duration = Duration::from_secs(3);

/// What is at the endpoint that other nodes use.
#[derive(Debug, Clone, PartialEq, Eq)]
enum AtEndpoint {
    /// The store that this agent serves.
    This,
    /// On each machine, that machine itself. The address is one of this machine that others may reach.
    EachItself(IpAddr, Option<IpAddr>),
    /// A store that does not know this node.
    Another,
    /// No store.
    Nothing,
}

/// What to look for, and where.
pub(crate) struct Alone {
    pub options: StoreOptions,
    /// The most nodes that the job may have.
    pub nodes: u32,
    pub keys: Keys,
    /// This node.
    pub node: NodeId,
    pub tls: Option<MutualTls>,
}

impl Alone {
    /// Warns once if this agent serves the store of a job of several nodes, no other node comes, and the endpoint does
    /// not lead other nodes here. Never returns.
    pub(crate) async fn watch(self, backend: &Backend) -> Infallible {
        if let (true, Some(store), StoreChoice::Hosted { endpoint, .. }) =
            (backend.serves && self.nodes > 1, backend.store(), &self.options.choice)
        {
            tokio::time::sleep(PATIENCE).await;
            let alone = store.range(&self.keys.nodes()).await.is_ok_and(|(nodes, _)| nodes.len() < 2);
            if alone && let Some(why) = why_alone(endpoint, &self.look(endpoint).await) {
                tracing::warn!("{}", self.options.in_form(why));
            }
        }
        std::future::pending().await
    }

    async fn look(&self, endpoint: &Endpoint) -> AtEndpoint {
        let addresses = resolve(endpoint).await.unwrap_or_default();
        if let Some(itself) = each_itself(&addresses) {
            let own = interfaces::all().unwrap_or_default().into_iter().map(|interface| interface.ip);
            let reachable = own.filter(|ip| !ip.is_loopback() && !interfaces::is_of_one_link(ip));
            return AtEndpoint::EachItself(itself, reachable.min_by_key(IpAddr::is_ipv6));
        }
        let mut config = EtcdConfig::new([endpoint.to_string()]);
        config.peers = self.tls.clone();
        let Ok(store) = EtcdStore::connect(config) else { return AtEndpoint::Nothing };
        match tokio::time::timeout(ANSWER, store.get(&self.keys.node(&self.node))).await {
            Ok(Ok(Some(_))) => AtEndpoint::This,
            Ok(Ok(None)) => AtEndpoint::Another,
            _ => AtEndpoint::Nothing,
        }
    }
}

/// The loopback address that the endpoint means on each machine, if it has no other address.
pub(super) fn each_itself(addresses: &[SocketAddr]) -> Option<IpAddr> {
    let first = addresses.first()?.ip();
    addresses.iter().all(|address| address.ip().is_loopback()).then_some(first)
}

/// What to say of a node that is alone.
fn why_alone(endpoint: &Endpoint, found: &AtEndpoint) -> Option<String> {
    let alone = format!("no other node has come in {} s", PATIENCE.as_secs());
    Some(match found {
        AtEndpoint::This => return None,
        AtEndpoint::EachItself(loopback, reachable) => {
            let address = reachable
                .map_or("ADDRESS".to_owned(), |ip| Endpoint { host: ip.to_string(), port: endpoint.port }.to_string());
            format!(
                "{alone}: the endpoint {endpoint} is {loopback} here, which is each machine itself, so a node on another \
                 machine serves a store of its own; give all nodes an address of one of them, such as \
                 --rdzv-endpoint={address}, unless all run on this machine"
            )
        }
        AtEndpoint::Another => format!(
            "{alone}: this agent serves a store, but at {endpoint} another agent serves one: give \
             --rdzv-conf=is_host=1 to one node only, the one at {endpoint}"
        ),
        AtEndpoint::Nothing => format!(
            "{alone}: this agent serves the store, but nothing answers at {endpoint}: give --rdzv-conf=is_host=1 to the \
             node at that address and to no other, or write this node's address as --rdzv-endpoint"
        ),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_loopback_address_is_each_machine_itself() {
        let parsed = |list: &[&str]| list.iter().map(|text| text.parse().unwrap()).collect::<Vec<SocketAddr>>();
        assert_eq!(each_itself(&parsed(&["127.0.1.1:1"])), Some("127.0.1.1".parse().unwrap()));
        assert_eq!(each_itself(&parsed(&["[::1]:1", "127.0.0.1:1"])), Some("::1".parse().unwrap()));
        assert_eq!(each_itself(&parsed(&["127.0.1.1:1", "10.0.0.5:1"])), None);
        assert_eq!(each_itself(&[]), None);
    }

    #[test]
    fn who_is_alone_hears_what_to_write() {
        let endpoint = Endpoint { host: "127.0.1.1".into(), port: 29500 };
        let itself = AtEndpoint::EachItself("127.0.1.1".parse().unwrap(), Some("10.0.0.5".parse().unwrap()));
        let said = |found: &AtEndpoint| why_alone(&endpoint, found).unwrap_or_default();
        assert!(said(&itself).contains("such as --rdzv-endpoint=10.0.0.5:29500"), "{}", said(&itself));
        for found in [AtEndpoint::Another, AtEndpoint::Nothing] {
            assert!(said(&found).contains("--rdzv-conf=is_host=1"), "{found:?}");
        }
        assert_eq!(said(&AtEndpoint::This), "");
    }
}
