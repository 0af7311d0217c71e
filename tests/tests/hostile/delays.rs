//! A flood on a port delays neither what renews leases nor what sees a death. Measured beside the same without a flood;
//! what is asserted is only that nothing waits until a lease is in danger, however busy the machine.

use std::net::{Ipv4Addr, SocketAddr};
use std::time::{Duration, Instant};

use elastic_tests::agents::{Agent, Job, LEASE, Round, exits};
use elastic_tests::etcd::{EtcdOptions, EtcdServer};

use crate::floods::{self, Flood};
use crate::free_port;
use crate::tap::Tap;

/// How often a node renews its lease.
const RENEWAL: Duration = Duration::from_millis(LEASE.as_millis() as u64 / 5);

/// Renewals looked at.
const RENEWALS: usize = 6;

/// Two nodes, whose first leads and has ports of this test's choice. The renewals of one of them pass a tap.
struct Scene {
    job: Job,
    leader: Agent,
    other: Agent,
    other_flags: Vec<String>,
    tap: Tap,
    round: Round,
    peer: SocketAddr,
    health: u16,
    _etcd: Option<EtcdServer>,
}

/// What a flood may delay.
#[derive(Debug)]
struct Delays {
    renewal: Duration,
    worker: Duration,
    agent: Duration,
}

impl Scene {
    /// On etcd; the leader's renewals pass the tap.
    async fn on_etcd() -> Scene {
        let etcd = EtcdServer::start(EtcdOptions::default()).await;
        let tap = Tap::before(etcd.address()).await;
        let endpoint = format!("--rdzv-endpoint={}", tap.address());
        let job = Job::on(&etcd, "1:2");
        Scene::begin(job, &[endpoint], Vec::new(), tap, Some(etcd)).await
    }

    /// On the store that the leader serves at `port`; the other's renewals pass the tap.
    async fn on_embedded(port: u16) -> Scene {
        let store = format!("127.0.0.1:{port}");
        let tap = Tap::before(store.clone()).await;
        let job = Job::met_by(&["--rdzv-backend=c10d", &format!("--rdzv-endpoint={store}")], "1:2");
        let other_flags = vec![format!("--rdzv-endpoint={}", tap.address())];
        Scene::begin(job, &[], other_flags, tap, None).await
    }

    async fn begin(
        job: Job,
        leader_flags: &[String],
        other_flags: Vec<String>,
        tap: Tap,
        etcd: Option<EtcdServer>,
    ) -> Scene {
        let job = job.flag("--max-restarts=20");
        let (peer, health) = (free_port(), free_port());
        let ports = [format!("--peer-port={peer}"), format!("--health-port={health}")];
        let leader_flags: Vec<&str> = ports.iter().chain(leader_flags).map(String::as_str).collect();
        let leader = job.start_with("a", &leader_flags);
        let alone = job.runs(1, 1).await.number;
        let other = job.start_with("b", &flags(&other_flags));
        let round = job.runs(alone + 1, 2).await;
        let peer = (Ipv4Addr::LOCALHOST, peer).into();
        Scene { job, leader, other, other_flags, tap, round, peer, health, _etcd: etcd }
    }

    async fn delays(&mut self) -> Delays {
        let renewal = self.tap.longest_pause(RENEWALS).await.saturating_sub(RENEWAL);
        let begun = Instant::now();
        self.round.of("b").kill();
        self.round = self.job.runs(self.round.number + 1, 2).await;
        let worker = begun.elapsed();
        let begun = Instant::now();
        self.other.kill();
        self.round = self.job.runs(self.round.number + 1, 1).await;
        let agent = begun.elapsed();
        self.other = self.job.start_with("b", &flags(&self.other_flags));
        self.round = self.job.runs(self.round.number + 1, 2).await;
        Delays { renewal, worker, agent }
    }

    /// Calm, and in a flood.
    async fn compare(mut self, what: &str, flood: impl FnOnce(&Scene) -> Flood) {
        let calm = self.delays().await;
        let flood = flood(&self);
        flood.says(1_000).await;
        let flooded = self.delays().await;
        drop(flood);
        println!("{what}: calm {calm:?}, in a flood {flooded:?}");
        let patience = LEASE / 2;
        assert!(flooded.renewal < patience, "a renewal came {:?} late", flooded.renewal);
        assert!(flooded.worker < patience, "after a worker's death {:?} passed", flooded.worker);
        assert!(flooded.agent < patience, "after an agent's death {:?} passed", flooded.agent);
        self.round.exit(0);
        let mut agents = [self.leader, self.other];
        assert_eq!(exits(&mut agents).await, [0, 0]);
    }
}

fn flags(flags: &[String]) -> Vec<&str> {
    flags.iter().map(String::as_str).collect()
}

#[tokio::test]
async fn a_flooded_peer_port_delays_nothing() {
    let scene = Scene::on_etcd().await;
    let flood = |scene: &Scene| {
        let peer = scene.peer;
        Flood::start(move |said| floods::beats(peer, said))
    };
    scene.compare("the port for peers", flood).await;
}

#[tokio::test]
async fn a_flooded_health_port_delays_nothing() {
    let scene = Scene::on_etcd().await;
    let flood = |scene: &Scene| {
        let port = scene.health;
        Flood::start(move |said| floods::health(port, said))
    };
    scene.compare("the health port", flood).await;
}

#[tokio::test]
async fn a_flooded_workers_store_delays_nothing() {
    let scene = Scene::on_etcd().await;
    let flood = |scene: &Scene| {
        let store: SocketAddr = scene.round.of("a").master.parse().unwrap();
        Flood::start(move |said| floods::workers_store(store, said))
    };
    scene.compare("the workers' store", flood).await;
}

#[tokio::test]
async fn a_flooded_embedded_store_delays_nothing() {
    let port = free_port();
    let scene = Scene::on_embedded(port).await;
    let flood = |_: &Scene| Flood::start(move |said| floods::embedded_store(format!("127.0.0.1:{port}"), said));
    scene.compare("the embedded store", flood).await;
}
