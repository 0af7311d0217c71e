//! Watches and renewals across restarts, cuts and compaction.

use elastic_store::Event;
use elastic_tests::prelude::*;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tonic::Code;

use super::refusing_proxy::RefusingProxy;

const LIMIT: Duration = Duration::from_secs(15);

async fn put(store: &EtcdStore, key: &str, value: &str) -> Revision {
    store.txn(Txn::of([Op::put(key, value)])).await.unwrap().revision
}

async fn next(watcher: &mut Watcher) -> WatchUpdate {
    within("an update", LIMIT, watcher.recv()).await.expect("the watch lives")
}

/// The values put, as far as `count` of them, each with its revision.
async fn values(watcher: &mut Watcher, count: usize) -> Vec<(Revision, String)> {
    let mut values = Vec::new();
    while values.len() < count {
        let update = next(watcher).await;
        let WatchUpdate::Events(events) = update else { panic!("events expected, got {update:?}") };
        for event in events {
            let Event::Put(kv) = event else { panic!("nothing was deleted") };
            values.push((kv.mod_revision, String::from_utf8(kv.value).unwrap()));
        }
    }
    values
}

fn prefix() -> Scope {
    Scope::Prefix("/w/".into())
}

/// Thousands that come at once ask etcd for no more than they need.
#[tokio::test]
async fn the_first_renewal_of_a_lease_is_no_call_of_its_own() {
    let server = EtcdServer::start(EtcdOptions::default()).await;
    let store = server.store();
    let lease = store.grant(Duration::from_secs(10)).await.unwrap();
    assert_eq!(store.keep_alive(lease).await.unwrap(), Some(Duration::from_secs(10)));
    let metrics = elastic_tests::http::get(&server.address(), "/metrics").await.unwrap();
    let metrics = String::from_utf8(metrics.to_vec()).unwrap();
    let calls = |method: &str| {
        let handled = metrics.lines().filter(|line| line.starts_with("grpc_server_handled_total{"));
        let counts = handled.filter(|line| line.contains(method)).filter_map(|line| line.rsplit_once(' '));
        counts.map(|(_, count)| count.parse::<f64>().unwrap()).sum::<f64>()
    };
    assert_eq!((calls("\"LeaseGrant\""), calls("\"LeaseTimeToLive\"")), (1.0, 0.0), "{metrics}");
}

#[tokio::test]
async fn a_restarted_server_costs_a_watch_and_a_lease_nothing() {
    // Given an open watch, a lease under renewal and a steady sequence of writes
    let mut server = EtcdServer::start(EtcdOptions::default()).await;
    let store = server.store();
    let lease = store.grant(Duration::from_secs(60)).await.unwrap();
    let mut watcher = store.watch(prefix(), Revision(1)).await.unwrap();
    let (mut written, mut seen) = (Vec::new(), Vec::new());
    for round in 0..3 {
        for n in 0..10 {
            let value = format!("{round}.{n}");
            written.push((put(&store, "/w/a", &value).await, value));
        }
        assert!(store.keep_alive(lease).await.unwrap().is_some());
        if round == 1 {
            // (The last writes of each round are not awaited: the watch may be behind when it breaks.)
            seen.extend(values(&mut watcher, 10).await);
        }
        // When the server is killed and started again
        server.kill();
        assert!(matches!(store.keep_alive(lease).await, Err(StoreError::Unavailable { .. })));
        server.restart().await;
        // Then renewals continue with the next call
        assert!(store.keep_alive(lease).await.unwrap().is_some());
    }
    // And the watch has everything, once
    seen.extend(values(&mut watcher, written.len() - seen.len()).await);
    assert_eq!(seen, written);
    let last = put(&store, "/w/a", "last").await;
    assert_eq!(values(&mut watcher, 1).await, [(last, "last".to_owned())]);
}

#[tokio::test]
async fn a_watch_that_is_cut_again_and_again_loses_and_repeats_nothing() {
    let server = EtcdServer::start(EtcdOptions::default()).await;
    let proxy = FaultProxy::start(server.address()).await;
    let watching = EtcdStore::connect(EtcdConfig::new([proxy.address()])).unwrap();
    let writing = server.store();
    let mut watcher = watching.watch(prefix(), Revision(1)).await.unwrap();
    let mut seen = Vec::new();
    let mut written = Vec::new();
    for n in 0..200 {
        let value = n.to_string();
        written.push((put(&writing, "/w/a", &value).await, value));
        match n % 20 {
            5 => proxy.cut(),
            10 => seen.extend(values(&mut watcher, 1).await),
            _ => {}
        }
    }
    seen.extend(values(&mut watcher, written.len() - seen.len()).await);
    assert_eq!(seen, written);
}

#[tokio::test]
async fn compaction_while_a_watch_is_cut_off_gives_it_a_snapshot() {
    let server = EtcdServer::start(EtcdOptions::default()).await;
    let proxy = FaultProxy::start(server.address()).await;
    let watching = EtcdStore::connect(EtcdConfig::new([proxy.address()])).unwrap();
    let writing = server.store();
    put(&writing, "/w/gone", "1").await;
    let mut watcher = watching.watch(prefix(), Revision(1)).await.unwrap();
    values(&mut watcher, 1).await;

    // When history is compacted beyond what the watch saw, while it cannot connect
    proxy.refuse();
    writing.delete(vec![], "/w/gone").await.unwrap();
    put(&writing, "/w/a", "2").await;
    let last = put(&writing, "/w/a", "3").await;
    server.client().await.compact(last.0, None).await.unwrap();
    proxy.heal();

    // Then it is given the present state, and continues from there
    let update = next(&mut watcher).await;
    let WatchUpdate::Snapshot { revision, values: state } = update else { panic!("a snapshot, not {update:?}") };
    assert!(revision >= last);
    let state: Vec<_> = state.into_iter().map(|kv| (kv.key, kv.value, kv.mod_revision)).collect();
    assert_eq!(state, [("/w/a".to_owned(), b"3".to_vec(), last)]);
    let after = put(&writing, "/w/a", "4").await;
    assert_eq!(values(&mut watcher, 1).await, [(after, "4".to_owned())]);
}

#[tokio::test]
async fn a_dropped_watch_ends_at_the_server() {
    let server = EtcdServer::start(EtcdOptions::default()).await;
    let store = server.store();
    let before = watchers(&server).await;
    let watchers_held: Vec<_> = {
        let mut held = Vec::new();
        for _ in 0..5 {
            held.push(store.watch(prefix(), Revision(1)).await.unwrap());
        }
        held
    };
    eventually("etcd has the watches", LIMIT, async || (watchers(&server).await == before + 5).then_some(())).await;
    drop(watchers_held);
    eventually("etcd has let go of them", LIMIT, async || (watchers(&server).await == before).then_some(())).await;
}

/// How many watches etcd says that it holds.
async fn watchers(server: &EtcdServer) -> u64 {
    let mut stream = tokio::net::TcpStream::connect(server.address()).await.unwrap();
    stream.write_all(b"GET /metrics HTTP/1.0\r\n\r\n").await.unwrap();
    let mut text = String::new();
    within("metrics", LIMIT, stream.read_to_string(&mut text)).await.unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix("etcd_debugging_mvcc_watcher_total "));
    line.expect("the metric").parse::<f64>().unwrap() as u64
}

#[tokio::test]
async fn an_answer_that_says_not_now_costs_no_watch() {
    for (code, words, unsure) in [
        (Code::Unavailable, "etcdserver: leader changed", true),
        (Code::Unknown, "etcdserver: too many requests", false),
    ] {
        // Given an open watch over a connection to a member that is well
        let server = EtcdServer::start(EtcdOptions::default()).await;
        let proxy = RefusingProxy::start(server.address(), code, words).await;
        let store = EtcdStore::connect(EtcdConfig::new([proxy.address()])).unwrap();
        let mut watcher = store.watch(prefix(), Revision(1)).await.unwrap();
        let mut written = vec![(put(&store, "/w/a", "first").await, "first".to_owned())];
        assert_eq!(values(&mut watcher, 1).await, written);
        let opened = proxy.watches();

        // when it answers calls with "not now"
        proxy.refuse(3);
        // then a read goes again by itself
        assert!(store.get("/w/a").await.unwrap().is_some(), "{words}");
        proxy.refuse(1);
        // and a write does, unless it may have been carried out
        let write = store.txn(Txn::of([Op::put("/w/a", "second")])).await;
        match write {
            Err(error) => assert!(unsure && error.outcome_unknown(), "{words}: {error}"),
            Ok(done) => {
                assert!(!unsure, "{words}");
                written.push((done.revision, "second".to_owned()));
                assert_eq!(values(&mut watcher, 1).await, written[1..]);
            }
        }
        assert_eq!(proxy.refused(), 4);
        // and the watch was opened once
        let last = put(&store, "/w/a", "last").await;
        assert_eq!(values(&mut watcher, 1).await, [(last, "last".to_owned())]);
        assert_eq!((opened, proxy.watches()), (1, 1), "{words}");
    }
}

#[tokio::test]
async fn a_renewal_that_timed_out_leaves_no_late_answer_behind() {
    // Given a lease whose renewals go through a proxy
    let server = EtcdServer::start(EtcdOptions::default()).await;
    let proxy = FaultProxy::start(server.address()).await;
    let mut config = EtcdConfig::new([proxy.address()]);
    config.call_timeout = Duration::from_millis(500);
    let store = EtcdStore::connect(config).unwrap();
    let lease = store.grant(Duration::from_secs(60)).await.unwrap();
    assert!(store.keep_alive(lease).await.unwrap().is_some());

    // When an answer is held back beyond the deadline, the lease ends, and then the answer comes through
    proxy.stall_answers();
    assert!(store.keep_alive(lease).await.is_err());
    server.store().revoke(lease).await.unwrap();
    proxy.heal();

    // Then the next renewal does not take it for its own
    let renewed = eventually("an answer", LIMIT, async || store.keep_alive(lease).await.ok()).await;
    assert_eq!(renewed, None);
}
