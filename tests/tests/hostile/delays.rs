//! A flood on a port delays neither the renewal of leases nor the detection of a death: no delay comes near a lease's
//! length.

use std::net::Ipv4Addr;

use elastic_tests::prelude::*;

use crate::hostile::floods::{self, Flood};
use crate::hostile::tap::Tap;
use crate::hostile::{WITHIN, coordinator};

const RENEWAL: Duration = Duration::from_millis(LEASE.as_millis() as u64 / 5);

const RENEWALS: usize = 6;

/// Two nodes. The first stays. It leads, unless a coordinator does. The test picks the leader's ports. The
/// lease renewals of one of them pass a tap.
struct Scene {
    job: Job,
    stays: Agent,
    other: Agent,
    tap: Tap,
    round: Round,
    peer: SocketAddr,
    health: u16,
    _etcd: Option<EtcdServer>,
    _coordinator: Option<Process>,
}

impl Scene {
    /// On etcd; the leader's renewals pass the tap.
    async fn on_etcd() -> Scene {
        let etcd = EtcdServer::start(EtcdOptions::default()).await;
        let tap = Tap::before(etcd.address()).await;
        let endpoint = format!("--rdzv-endpoint={}", tap.address());
        let job = Job::on(&etcd, "1:2");
        Scene::begin(job, &[endpoint], &[], tap, Some(etcd)).await
    }

    /// On the store that the leader serves at `port`; the other's renewals pass the tap.
    async fn on_embedded(port: u16) -> Scene {
        let store = format!("127.0.0.1:{port}");
        let tap = Tap::before(store.clone()).await;
        let job = Job::met_by(&["--rdzv-backend=c10d", &format!("--rdzv-endpoint={store}")], "1:2");
        let other_flags = [format!("--rdzv-endpoint={}", tap.address())];
        Scene::begin(job, &[], &other_flags, tap, None).await
    }

    /// On the store of a coordinator that leads; the first node's renewals pass the tap.
    async fn led_by_a_coordinator() -> Scene {
        let (coordinator, [peer, store, http]) = coordinator().await;
        let tap = Tap::before(store.to_string()).await;
        let flags = [format!("--rdzv-endpoint={}", tap.address())];
        let job = Job::met_by(&["--rdzv-backend=etcd", &format!("--rdzv-endpoint={store}")], "1:2");
        let scene = Scene::begin(job, &flags, &[], tap, None).await;
        coordinator.says("leading", WITHIN).await;
        Scene { peer, health: http.port(), _coordinator: Some(coordinator), ..scene }
    }

    async fn begin(
        job: Job,
        first_flags: &[String],
        other_flags: &[String],
        tap: Tap,
        etcd: Option<EtcdServer>,
    ) -> Scene {
        // Its deaths are no fault of b.
        let job = job.flag("--max-restarts=20").flag("--exclude-after=0");
        let (peer, health) = (free_port(), free_port());
        let ports = [format!("--peer-port={peer}"), format!("--health-port={health}")];
        let first_flags: Vec<&str> = ports.iter().chain(first_flags).map(String::as_str).collect();
        let stays = job.start_with("a", &first_flags);
        let alone = job.runs(1, 1).await.number;
        let other = job.start_with("b", &flags(other_flags));
        let round = job.runs(alone + 1, 2).await;
        let peer = (Ipv4Addr::LOCALHOST, peer).into();
        Scene { job, stays, other, tap, round, peer, health, _etcd: etcd, _coordinator: None }
    }

    async fn are_none_in(mut self, what: &str, flood: impl FnOnce(&Scene) -> Flood) {
        let flood = flood(&self);
        flood.says(1_000).await;
        let renewal = self.tap.longest_pause(RENEWALS).await.saturating_sub(RENEWAL);
        let begun = Instant::now();
        self.round.of("b").kill();
        self.round = self.job.runs(self.round.number + 1, 2).await;
        let worker = begun.elapsed();
        let begun = Instant::now();
        self.other.kill();
        self.round = self.job.runs(self.round.number + 1, 1).await;
        let agent = begun.elapsed();
        drop(flood);
        println!("{what}: a renewal {renewal:?} late, {worker:?} for a worker's death, {agent:?} for an agent's");
        let patience = LEASE / 2;
        assert!(renewal < patience, "a renewal came {renewal:?} late");
        assert!(worker < patience, "after a worker's death {worker:?} passed");
        assert!(agent < patience, "after an agent's death {agent:?} passed");
        self.round.exit(0);
        assert_eq!(exits([&mut self.stays]).await, [0]);
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
    scene.are_none_in("the port for peers", flood).await;
}

#[tokio::test]
async fn a_flooded_health_port_delays_nothing() {
    let scene = Scene::on_etcd().await;
    let flood = |scene: &Scene| {
        let port = scene.health;
        Flood::start(move |said| floods::health(port, said))
    };
    scene.are_none_in("the health port", flood).await;
}

#[tokio::test]
async fn a_flooded_workers_store_delays_nothing() {
    let scene = Scene::on_etcd().await;
    let flood = |scene: &Scene| {
        let store: SocketAddr = scene.round.of("a").master.parse().unwrap();
        Flood::start(move |said| floods::workers_store(store, said))
    };
    scene.are_none_in("the workers' store", flood).await;
}

#[tokio::test]
async fn a_flooded_embedded_store_delays_nothing() {
    let port = free_port();
    let scene = Scene::on_embedded(port).await;
    let flood = |_: &Scene| Flood::start(move |said| floods::embedded_store(format!("127.0.0.1:{port}"), said));
    scene.are_none_in("the embedded store", flood).await;
}

#[tokio::test]
async fn a_coordinator_s_flooded_ports_delay_nothing() {
    let scene = Scene::led_by_a_coordinator().await;
    let flood = |scene: &Scene| {
        let (peer, http) = (scene.peer, scene.health);
        Flood::start(move |said| async move {
            tokio::join!(floods::beats(peer, Arc::clone(&said)), floods::health(http, said));
        })
    };
    scene.are_none_in("a coordinator's ports for peers and HTTP", flood).await;
}
