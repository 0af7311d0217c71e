//! Where it listens, how it ends, and that a restart is another cluster.

use std::net::SocketAddr;

use elastic_store::embedded::{EmbeddedError, EmbeddedServer};
use elastic_store::{Op, Store, Txn};
use etcd_client::Client;

use super::{next, serve, within};

fn address(text: &str) -> SocketAddr {
    text.parse().unwrap()
}

#[tokio::test]
async fn an_address_that_others_can_reach_needs_permission() {
    for remote in ["0.0.0.0:0", "[::]:0", "192.0.2.1:0"] {
        let error = EmbeddedServer::bind(address(remote), false).await.unwrap_err();
        assert!(matches!(error, EmbeddedError::Remote { .. }));
        assert!(error.to_string().contains("--allow-remote"), "{error}");
    }
    let server = EmbeddedServer::bind(address("0.0.0.0:0"), true).await.unwrap();
    assert_ne!(server.address().port(), 0);
}

#[tokio::test]
async fn a_port_in_use_is_named() {
    let first = EmbeddedServer::bind(address("127.0.0.1:0"), false).await.unwrap();
    let error = EmbeddedServer::bind(first.address(), false).await.unwrap_err();
    assert!(matches!(error, EmbeddedError::InUse { .. }));
    assert!(error.to_string().contains(&first.address().to_string()), "{error}");
}

#[tokio::test]
async fn an_address_that_is_not_here_is_named_with_the_cause() {
    let error = EmbeddedServer::bind(address("192.0.2.1:0"), true).await.unwrap_err();
    assert!(matches!(error, EmbeddedError::Listen { .. }), "{error}");
}

#[tokio::test]
async fn told_to_stop_it_ends_open_streams_and_the_process_keeps_the_store() {
    let server = serve().await;
    let mut client = server.client().await;
    let mut watch = client.watch("a", None).await.unwrap();
    assert!(next(&mut watch).await.created());
    let lease = client.lease_grant(60, None).await.unwrap().id();
    let (_keeper, mut renewals) = client.lease_keep_alive(lease).await.unwrap();

    server.stop.send(()).unwrap();

    assert!(!matches!(within(watch.message()).await, Ok(Some(_))));
    while let Ok(Some(_)) = within(renewals.message()).await {}
    within(server.task).await.unwrap().unwrap();
    server.store.txn(Txn::of([Op::put("a", "after")])).await.unwrap();
    // The port is free again at once.
    EmbeddedServer::bind(server.address, false).await.unwrap();
}

#[tokio::test]
async fn a_restart_is_another_cluster_and_has_other_leases() {
    let mut seen = Vec::new();
    for _ in 0..2 {
        let server = serve().await;
        let mut client: Client = server.client().await;
        let lease = client.lease_grant(60, None).await.unwrap();
        seen.push((lease.header().unwrap().cluster_id(), lease.id()));
    }
    assert!(seen[0].0 != seen[1].0 && seen[0].1 != seen[1].1, "{seen:?}");
}
