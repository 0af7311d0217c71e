//! An embedded store that three servers hold. Each has a runtime of its own, with which all that it does ends at once, as
//! with a process. What comes to one passes through a proxy: from clients, and from the others.

use std::collections::BTreeSet;
use std::time::Duration;

use elastic_store::embedded::{EmbeddedServer, Options, Replicas};
use elastic_store::etcd::EtcdConfig;
use etcd_client::Client;
use tokio::runtime::{Builder, Runtime};

use crate::etcd::free_port;
use crate::proxy::FaultProxy;
use crate::wait::eventually;

/// The longest that three take until all of them vote.
const AGREED: Duration = Duration::from_secs(30);

/// The store, its servers, and the ways to them.
pub struct Replicated {
    ports: Vec<u16>,
    ways: Vec<FaultProxy>,
    servers: Vec<Option<Runtime>>,
    /// Lives that have ended, among those that had a vote.
    ended: BTreeSet<u64>,
    voters: Vec<u64>,
}

impl Replicated {
    /// Begins all three, and waits until all of them vote.
    pub async fn start() -> Replicated {
        let ports: Vec<u16> = (0..3).map(|_| free_port()).collect();
        let mut ways = Vec::new();
        for port in &ports {
            ways.push(FaultProxy::start(format!("127.0.0.1:{port}")).await);
        }
        let (ended, voters) = (BTreeSet::new(), vec![0; 3]);
        let mut store = Replicated { ports, ways, servers: vec![None, None, None], ended, voters };
        (0..3).for_each(|at| store.begin(at));
        store.all_vote().await;
        store
    }

    /// The ways by which clients and servers reach each of them.
    pub fn ways(&self) -> &[FaultProxy] {
        &self.ways
    }

    /// For clients, past the proxies.
    pub fn config(&self) -> EtcdConfig {
        EtcdConfig::new(self.ports.iter().map(|port| format!("127.0.0.1:{port}")))
    }

    /// Starts one that knows nothing.
    pub fn begin(&mut self, at: usize) {
        let endpoints: Vec<String> = self.ways.iter().map(FaultProxy::address).collect();
        let (address, replicas) = (([127, 0, 0, 1], self.ports[at]).into(), Replicas { endpoints, seat: at });
        let runtime = Builder::new_multi_thread().worker_threads(1).enable_all().build().expect("a runtime");
        runtime.spawn(async move {
            loop {
                let options = Options { replicas: Some(replicas.clone()), ..Options::default() };
                match EmbeddedServer::bind_with(address, options).await {
                    Ok(server) => return server.serve(std::future::pending()).await.expect("it serves"),
                    // The one before may hold the port for a moment more.
                    Err(_) => tokio::time::sleep(Duration::from_millis(10)).await,
                }
            }
        });
        self.servers[at] = Some(runtime);
    }

    /// Ends one at once, with all that it knows.
    pub fn end(&mut self, at: usize) {
        if let Some(runtime) = self.servers[at].take() {
            runtime.shutdown_background();
            self.ended.insert(self.voters[at]);
        }
    }

    /// The one that serves, past the proxies.
    pub async fn serving(&self) -> usize {
        eventually("one of the three serves", AGREED, async || {
            for (at, port) in self.ports.iter().enumerate() {
                let Ok(mut client) = Client::connect([format!("127.0.0.1:{port}")], None).await else { continue };
                if client.get("/", None).await.is_ok() {
                    return Some(at);
                }
            }
            None
        })
        .await
    }

    /// A client of the one that serves.
    pub async fn client(&self) -> Client {
        let port = self.ports[self.serving().await];
        Client::connect([format!("127.0.0.1:{port}")], None).await.expect("it serves")
    }

    /// Waits until all three that are there now have a vote.
    pub async fn all_vote(&mut self) {
        self.voters = eventually("all three have a vote", AGREED, async || {
            let members = self.client().await.member_list().await.ok()?;
            let lives: Vec<u64> = members.members().iter().map(etcd_client::Member::id).collect();
            (lives.len() == 3 && lives.iter().all(|life| !self.ended.contains(life))).then_some(lives)
        })
        .await;
    }
}

impl Drop for Replicated {
    fn drop(&mut self) {
        (0..3).for_each(|at| self.end(at));
    }
}
