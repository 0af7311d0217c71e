//! The embedded server as clients see it: etcd's own command, and the Rust client. The rules about keys are tested
//! beside the state machine.

// Tests report by panicking, their helpers too.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod client;
mod etcdctl;
mod lifecycle;
mod watches;

use std::future::Future;
use std::net::SocketAddr;
use std::time::Duration;

use elastic_store::embedded::MemoryStore;
use elastic_store::embedded::{EmbeddedError, EmbeddedServer, Options};
use etcd_client::{Client, WatchResponse, WatchStream};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

/// Long for what takes milliseconds, short for a hang.
const PATIENCE: Duration = Duration::from_secs(20);

/// A server on a port of the kernel's choosing.
struct Served {
    address: SocketAddr,
    store: MemoryStore,
    stop: oneshot::Sender<()>,
    task: JoinHandle<Result<(), EmbeddedError>>,
}

async fn serve() -> Served {
    serve_with(Options::default()).await
}

async fn serve_with(options: Options) -> Served {
    let server = EmbeddedServer::bind_with("127.0.0.1:0".parse().unwrap(), options).await.unwrap();
    let (stop, stopped) = oneshot::channel();
    let (address, store) = (server.address(), server.store());
    let task = tokio::spawn(server.serve(async { drop(stopped.await) }));
    Served { address, store, stop, task }
}

impl Served {
    async fn client(&self) -> Client {
        within(Client::connect([self.address.to_string()], None)).await.unwrap()
    }
}

async fn within<T>(what: impl Future<Output = T>) -> T {
    tokio::time::timeout(PATIENCE, what).await.expect("done in time")
}

async fn next(stream: &mut WatchStream) -> WatchResponse {
    within(stream.message()).await.unwrap().expect("the stream continues")
}
