//! The store that the agents meet through: etcd where one is named, else one of this process.

use std::net::{Ipv4Addr, SocketAddr};
use std::thread;

use anyhow::Context;
use elastic_coordinator::embedded::{EmbeddedError, EmbeddedServer};
use elastic_coordinator::store::etcd::{EtcdConfig, EtcdStore};
use tokio::sync::oneshot;

/// A store that answers.
pub(crate) struct Meeting {
    /// `host:port`, as agents are told.
    pub(crate) endpoint: String,
    /// For people.
    pub(crate) name: String,
    pub(crate) store: EtcdStore,
    /// Dropping it ends the store of this process.
    _served: Option<oneshot::Sender<()>>,
}

/// Connects to `etcd`, or serves a store on a free loopback port.
pub(crate) async fn open(etcd: Option<&str>) -> anyhow::Result<Meeting> {
    let (endpoint, served) = match etcd {
        Some(endpoint) => (endpoint.to_owned(), None),
        None => {
            let (address, served) = serve().await.context("serve the embedded store")?;
            (address.to_string(), Some(served))
        }
    };
    let store = EtcdStore::connect(EtcdConfig::new([endpoint.clone()]))?;
    let probe = store.probe().await?;
    let name = match &served {
        Some(_) => format!("embedded store of this process at {endpoint}"),
        None => format!("etcd {} at {endpoint}", probe.version),
    };
    Ok(Meeting { endpoint, name, store, _served: served })
}

/// On a thread of its own: a terminal that is paused must not pause the store.
async fn serve() -> anyhow::Result<(SocketAddr, oneshot::Sender<()>)> {
    let (opened, address) = oneshot::channel::<Result<SocketAddr, EmbeddedError>>();
    let (stop, stopped) = oneshot::channel::<()>();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let serving = async move {
        match EmbeddedServer::bind((Ipv4Addr::LOCALHOST, 0).into(), false).await {
            Ok(server) => {
                let _ = opened.send(Ok(server.address()));
                // It ends with the process; an end before that shows in every agent's log.
                let _ = server.serve(async { drop(stopped.await) }).await;
            }
            Err(error) => drop(opened.send(Err(error))),
        }
    };
    thread::Builder::new().name("store".into()).spawn(move || runtime.block_on(serving))?;
    Ok((address.await.context("its thread ended")??, stop))
}
