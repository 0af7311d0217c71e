//! The store through which the agents find each other: the etcd that was named, else one that this process serves.

use std::net::{Ipv4Addr, SocketAddr};
use std::thread;

use anyhow::Context;
use elastic_store::embedded::{EmbeddedError, EmbeddedServer};
use elastic_store::etcd::{EtcdConfig, EtcdStore};
use tokio::sync::oneshot;

pub(crate) struct DemoStore {
    /// `host:port`, for the agents' flags.
    pub(crate) endpoint: String,
    pub(crate) name: String,
    pub(crate) client: EtcdStore,
    /// Dropping it ends the store of this process.
    _served: Option<oneshot::Sender<()>>,
}

/// Connects to `etcd`, or serves a store on a free loopback port.
pub(crate) async fn open(etcd: Option<&str>) -> anyhow::Result<DemoStore> {
    let (endpoint, served) = match etcd {
        Some(endpoint) => (endpoint.to_owned(), None),
        None => {
            let (address, served) = serve().await.context("serve the embedded store")?;
            (address.to_string(), Some(served))
        }
    };
    let client = EtcdStore::connect(EtcdConfig::new([endpoint.clone()]))?;
    let probe = client.probe().await?;
    let name = match &served {
        Some(_) => format!("embedded store of this process at {endpoint}"),
        None => format!("etcd {} at {endpoint}", probe.version),
    };
    Ok(DemoStore { endpoint, name, client, _served: served })
}

/// Serves a store on a thread of its own, since a paused terminal must not pause the store.
async fn serve() -> anyhow::Result<(SocketAddr, oneshot::Sender<()>)> {
    let (opened, address) = oneshot::channel::<Result<SocketAddr, EmbeddedError>>();
    let (stop, stopped) = oneshot::channel::<()>();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let serving = async move {
        match EmbeddedServer::bind((Ipv4Addr::LOCALHOST, 0).into(), false).await {
            Ok(server) => {
                let _ = opened.send(Ok(server.address()));
                // It serves until the process ends. If it stops earlier, every agent's log says so.
                let _ = server.serve(async { drop(stopped.await) }).await;
            }
            Err(error) => drop(opened.send(Err(error))),
        }
    };
    thread::Builder::new().name("store".into()).spawn(move || runtime.block_on(serving))?;
    Ok((address.await.context("its thread ended")??, stop))
}
