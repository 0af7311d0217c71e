//! A store that was replaced by another one at the same address.

use elastic_tests::prelude::*;

const LIMIT: Duration = Duration::from_secs(15);

/// A server with some history, known to a store with an open watch.
async fn known() -> (EtcdServer, EtcdStore, Watcher) {
    let server = EtcdServer::start(EtcdOptions::default()).await;
    let store = server.store();
    for n in 0..5 {
        store.txn(Txn::of([Op::put("/i/a", n.to_string())])).await.unwrap();
    }
    let mut watcher = store.watch(Scope::Prefix("/i/".into()), Revision(1)).await.unwrap();
    let update = within("history", LIMIT, watcher.recv()).await.unwrap();
    assert!(matches!(update, WatchUpdate::Events(_)));
    (server, store, watcher)
}

async fn is_lost(store: &EtcdStore, mut watcher: Watcher) {
    let update = within("the watch says so", LIMIT, async {
        loop {
            match watcher.recv().await {
                Some(WatchUpdate::Events(_)) => {}
                other => return other,
            }
        }
    })
    .await;
    assert!(matches!(update, Some(WatchUpdate::Broken(StoreError::Lost { .. }))), "{update:?}");
    assert_eq!(watcher.recv().await, None, "nothing follows");
    let lost = |error: StoreError| matches!(error, StoreError::Lost { .. });
    assert!(lost(store.get("/i/a").await.unwrap_err()));
    assert!(lost(store.txn(Txn::of([Op::put("/i/a", "x")])).await.unwrap_err()));
    assert!(lost(store.grant(Duration::from_secs(10)).await.unwrap_err()));
    assert!(lost(store.watch(Scope::Key("/i/a".into()), Revision(1)).await.unwrap_err()));
}

#[tokio::test]
async fn an_emptied_store_is_lost() {
    let (mut server, store, watcher) = known().await;
    // The same flags give an emptied etcd its old cluster id: the revision gives it away.
    server.replace("etcd-cluster").await;
    is_lost(&store, watcher).await;
}

#[tokio::test]
async fn another_cluster_is_lost() {
    let (mut server, store, watcher) = known().await;
    server.replace("another").await;
    // Its history may be longer than the old one's: the cluster id gives it away.
    let other = server.store();
    for _ in 0..20 {
        // The old store's calls must not hide in a shorter history.
        other.txn(Txn::of([Op::put("/i/other", "x")])).await.unwrap();
    }
    is_lost(&store, watcher).await;
}

#[tokio::test]
async fn a_write_to_an_emptied_store_is_reported_lost() {
    let (mut server, store, watcher) = known().await;
    drop(watcher);
    server.replace("etcd-cluster").await;
    let error = eventually("an error that stays", LIMIT, async || {
        let error = store.txn(Txn::of([Op::put("/i/a", "x")])).await.unwrap_err();
        (!error.is_transient()).then_some(error)
    })
    .await;
    assert!(matches!(error, StoreError::Lost { .. }), "{error}");
}

#[tokio::test]
async fn a_restarted_store_is_not_lost() {
    let (mut server, store, mut watcher) = known().await;
    server.restart().await;
    store.txn(Txn::of([Op::put("/i/a", "x")])).await.unwrap();
    let update = within("the watch continues", LIMIT, watcher.recv()).await.unwrap();
    assert!(matches!(update, WatchUpdate::Events(_)), "{update:?}");
}
