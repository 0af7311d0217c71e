//! Calls on a store that is gone, frozen, full or losing its leader.

use elastic_tests::prelude::*;

const LIMIT: Duration = Duration::from_secs(15);

fn put(key: &str, value: &str) -> Txn {
    Txn::of([Op::put(key, value)])
}

/// A store through a proxy, with a deadline of one second.
fn impatient(address: String) -> EtcdStore {
    let mut config = EtcdConfig::new([address]);
    config.call_timeout = Duration::from_secs(1);
    EtcdStore::connect(config).unwrap()
}

#[tokio::test]
async fn a_store_that_is_not_up_yet_is_found_when_it_is() {
    // Given a store whose etcd is down
    let mut server = EtcdServer::start(EtcdOptions::default()).await;
    server.kill();
    let store = server.store();

    // Then calls fail at once, and even a write is known not to have happened
    let start = Instant::now();
    assert!(matches!(store.get("a").await, Err(StoreError::Unavailable { .. })));
    assert!(matches!(store.txn(put("a", "1")).await, Err(StoreError::Unavailable { .. })));
    assert!(matches!(store.probe().await, Err(StoreError::Unavailable { .. })));
    assert!(start.elapsed() < Duration::from_secs(3), "{:?}", start.elapsed());

    // When it comes up, then the same store works
    server.restart().await;
    store.txn(put("a", "1")).await.unwrap();
    assert!(store.probe().await.unwrap().version.starts_with("3."));
}

#[tokio::test]
async fn a_frozen_server_costs_no_more_than_four_times_the_deadline() {
    let server = EtcdServer::start(EtcdOptions::default()).await;
    let store = impatient(server.address());
    store.txn(put("a", "1")).await.unwrap();
    let lease = store.grant(Duration::from_secs(60)).await.unwrap();
    store.keep_alive(lease).await.unwrap();

    // When the server freezes with our connection open
    server.pause().await;

    // Then every call ends in time; a write's outcome is unknown, a read's failure is not
    let timed = async |what: &str, outcome: &mut dyn FnMut(StoreError) -> bool, call: Call<'_>| {
        let start = Instant::now();
        let error = within(what, LIMIT, call).await.unwrap_err();
        assert!(outcome(error.clone()), "{what}: {error}");
        // After a late call the next gets twice the time, once over each connection; and a probe continues to ask what is
        // wrong.
        let limit = match what {
            "a write" => 1500,
            "a read" | "a keep-alive" => 2500,
            _ => 5500,
        };
        let limit = Duration::from_millis(limit);
        assert!(start.elapsed() < limit, "{what} took {:?}", start.elapsed());
    };
    let unknown = &mut |error: StoreError| error.outcome_unknown();
    let unavailable = &mut |error: StoreError| matches!(error, StoreError::Unavailable { .. });
    timed("a write", unknown, Box::pin(async { store.txn(put("a", "2")).await.map(drop) })).await;
    timed("a read", unavailable, Box::pin(async { store.get("a").await.map(drop) })).await;
    timed("a keep-alive", unavailable, Box::pin(async { store.keep_alive(lease).await.map(drop) })).await;
    timed("a probe", unavailable, Box::pin(async { store.probe().await.map(drop) })).await;

    // When it thaws, then all is as before
    server.resume();
    eventually("the store answers again", LIMIT, async || store.get("a").await.ok()).await;
    assert!(store.keep_alive(lease).await.unwrap().is_some());
}

type Call<'a> = std::pin::Pin<Box<dyn Future<Output = Result<(), StoreError>> + 'a>>;

#[tokio::test]
async fn a_write_whose_answer_is_lost_is_unknown_and_not_repeated() {
    let server = EtcdServer::start(EtcdOptions::default()).await;
    let proxy = FaultProxy::start(server.address()).await;
    let (store, direct) = (EtcdStore::connect(EtcdConfig::new([proxy.address()])).unwrap(), server.store());
    let before = store.txn(put("a", "0")).await.unwrap().revision;

    // When the answer to a write is held back and the connection is cut after the write was done
    proxy.stall_answers();
    let write = tokio::spawn({
        let store = store.clone();
        async move { store.txn(put("a", "1")).await }
    });
    let written =
        eventually("the write arrives", LIMIT, async || direct.get("a").await.unwrap().filter(|kv| kv.value == b"1"))
            .await;
    proxy.cut();
    proxy.heal();

    // Then the caller learns that the result is unknown, and reads that it happened, once
    let error = within("the call ends", LIMIT, write).await.unwrap().unwrap_err();
    assert!(error.outcome_unknown(), "{error}");
    let kv = store.get("a").await.unwrap().unwrap();
    assert_eq!((kv.value, kv.mod_revision), (b"1".to_vec(), written.mod_revision));
    assert_eq!(written.mod_revision, before.next());
}

#[tokio::test]
async fn a_read_survives_a_cut_connection() {
    let server = EtcdServer::start(EtcdOptions::default()).await;
    let proxy = FaultProxy::start(server.address()).await;
    let store = EtcdStore::connect(EtcdConfig::new([proxy.address()])).unwrap();
    store.txn(put("a", "1")).await.unwrap();
    proxy.stall_answers();
    let read = tokio::spawn({
        let store = store.clone();
        async move { store.get("a").await }
    });
    // When the connection is cut while the read waits for its answer
    for _ in 0..10 {
        tokio::task::yield_now().await;
    }
    proxy.cut();
    proxy.heal();
    // Then it is asked again on a new one
    assert!(within("the read ends", LIMIT, read).await.unwrap().unwrap().is_some());
}

#[tokio::test]
async fn a_network_that_swallows_everything_is_noticed() {
    let server = EtcdServer::start(EtcdOptions::default()).await;
    let proxy = FaultProxy::start(server.address()).await;
    let store = impatient(proxy.address());
    store.txn(put("a", "1")).await.unwrap();
    proxy.stall();
    assert!(matches!(store.get("a").await, Err(StoreError::Unavailable { .. })));
    proxy.heal();
    eventually("the store answers again", LIMIT, async || store.get("a").await.ok()).await;
    // Slow is not gone.
    proxy.delay(Duration::from_millis(50));
    store.get("a").await.unwrap();
}

#[tokio::test]
async fn a_cluster_continues_without_its_leader() {
    let mut cluster = EtcdCluster::start().await;
    let store = EtcdStore::connect(cluster.config()).unwrap();
    let lease = store.grant(Duration::from_secs(60)).await.unwrap();
    let from = store.txn(put("/n/start", "x")).await.unwrap().revision;
    let mut watcher = store.watch(elastic_store::Scope::Prefix("/n/".into()), from.next()).await.unwrap();

    // When the members that we talk to and the one that leads are killed in turn, one at a time, under a steady writer
    let mut certain = Vec::new();
    for turn in 0..2 {
        let leader = cluster.leader(None).await;
        cluster.members[leader].kill();
        // Then reads, writes and renewals come back by themselves
        for n in 0..10 {
            let key = format!("/n/{turn}/{n}");
            eventually("a write succeeds", LIMIT, async || store.txn(put(&key, "x")).await.ok()).await;
            certain.push(key);
        }
        let renewed = eventually("a renewal succeeds", LIMIT, async || store.keep_alive(lease).await.ok()).await;
        assert!(renewed.is_some(), "the lease outlives the leader");
        cluster.members[leader].restart().await;
    }

    // And the watch has every event, in order, none twice (a write of unknown outcome was written again by us, so a key
    // may come twice, at two revisions)
    let mut seen: Vec<(i64, String)> = Vec::new();
    while !certain.iter().all(|key| seen.iter().any(|(_, name)| name == key)) {
        let update = within("the watch continues", LIMIT, watcher.recv()).await.unwrap();
        let elastic_store::WatchUpdate::Events(events) = update else { panic!("{update:?}") };
        seen.extend(events.iter().map(|event| (event.revision().0, event.key().to_owned())));
    }
    assert!(seen.windows(2).all(|pair| pair[0].0 < pair[1].0), "{seen:?}");
}

#[tokio::test]
async fn clients_spread_over_the_members() {
    let cluster = EtcdCluster::start().await;
    let mut met = std::collections::BTreeMap::<String, usize>::new();
    for seed in 0..12 {
        let config = elastic_store::etcd::EtcdConfig { seed, ..cluster.config() };
        let store = EtcdStore::connect(config).unwrap();
        *met.entry(store.probe().await.unwrap().endpoint).or_default() += 1;
    }
    assert!(met.len() == 3 && met.values().all(|clients| *clients >= 2), "{met:?}");
}

#[tokio::test]
async fn a_frozen_member_is_left_for_another() {
    // Given a store on a cluster whose first member freezes
    let cluster = EtcdCluster::start().await;
    let store = EtcdStore::connect(cluster.config()).unwrap();
    let at = store.txn(put("/n/a", "0")).await.unwrap().revision;
    let mut watcher = store.watch(elastic_store::Scope::Key("/n/a".into()), at.next()).await.unwrap();
    let connected = store.probe().await.unwrap().endpoint;
    let member = cluster.members.iter().find(|member| connected.ends_with(&member.address())).unwrap();
    member.pause().await;

    // Then a read is answered by another within the one call, once the others have a leader
    eventually("a read is answered", LIMIT, async || store.get("/n/a").await.ok()).await;
    assert_ne!(store.probe().await.unwrap().endpoint, connected);
    store.txn(put("/n/a", "1")).await.unwrap();

    // And the watch moves on with it, without waiting for its own pings
    let start = Instant::now();
    within("the watch continues", LIMIT, watcher.recv()).await.unwrap();
    assert!(start.elapsed() < Duration::from_secs(4), "{:?}", start.elapsed());
    member.resume();
}

#[tokio::test]
async fn a_member_without_a_vote_is_passed_over() {
    let mut cluster = EtcdCluster::start().await;
    cluster.add_learner().await;
    // Given endpoints that begin with a learner, for whatever is asked first
    let learner = cluster.members[3].address();
    let others = cluster.members.iter().map(EtcdServer::address).take(2);
    let endpoints: Vec<_> = [learner].into_iter().chain(others).collect();
    for seed in 0..3 {
        let store = || EtcdStore::connect(EtcdConfig { seed, ..EtcdConfig::new(endpoints.clone()) }).unwrap();
        // then a write is made once, by another
        store().txn(put("/l/a", "1")).await.unwrap();
        assert!(store().probe().await.unwrap().version.starts_with("3."));
        let lease = store().grant(Duration::from_secs(60)).await.unwrap();
        assert!(store().keep_alive(lease).await.unwrap().is_some());
        let mut watcher = store().watch(elastic_store::Scope::Key("/l/a".into()), Revision(1)).await.unwrap();
        let update = within("an event", LIMIT, watcher.recv()).await;
        assert!(matches!(&update, Some(WatchUpdate::Events(_))), "{update:?}");
    }

    // When it gets a vote, then a client that knows no other is served
    cluster.promote_learner().await;
    let store = EtcdStore::connect(EtcdConfig::new(&endpoints[..1])).unwrap();
    store.txn(put("/l/a", "2")).await.unwrap();
    assert!(store.probe().await.is_ok());
}

/// What an operator may switch in 3.7, other than it is by default.
#[tokio::test]
async fn the_feature_gates_of_a_release_change_nothing_for_a_job() {
    const GATES: &str =
        "FastLeaseKeepAlive=false,PriorityRequest=true,LeaseCheckpoint=true,StopGRPCServiceOnDefrag=true";
    for (_, options) in EtcdOptions::of(["3.7"]) {
        let mut server = EtcdServer::start(options.args([format!("--feature-gates={GATES}")])).await;
        let store = server.store();
        let [kept, left] = [store.grant(LEASE).await.unwrap(), store.grant(LEASE).await.unwrap()];
        for (key, lease) in [("/n/kept", kept), ("/n/left", left)] {
            store.txn(Txn::of([Op::put_leased(key, "x", lease)])).await.unwrap();
        }
        // A member that is defragmented says so, and is back when it has done
        server.client().await.defragment().await.unwrap();
        let mut ends = store.watch(elastic_store::Scope::Key("/n/left".into()), Revision(1)).await.unwrap();
        // Then a lease that is renewed is kept, and the other ends
        within("the other lease ends", LIMIT, async {
            loop {
                assert!(store.keep_alive(kept).await.unwrap().is_some());
                let quick = tokio::time::timeout(LEASE / 4, ends.recv()).await;
                let Ok(Some(WatchUpdate::Events(events))) = quick else { continue };
                if events.iter().any(|event| matches!(event, elastic_store::Event::Delete { .. })) {
                    return;
                }
            }
        })
        .await;
        assert!(store.get("/n/kept").await.unwrap().is_some());
        server.restart().await;
        assert!(store.keep_alive(kept).await.unwrap().is_some());
    }
}

#[tokio::test]
async fn a_full_store_says_so() {
    let options = EtcdOptions::default().args(["--quota-backend-bytes", "262144"]);
    let server = EtcdServer::start(options).await;
    let store = server.store();
    let value = "x".repeat(64 * 1024);
    let error = eventually("the quota is reached", LIMIT, async || store.txn(put("a", &value)).await.err()).await;
    assert!(matches!(error, StoreError::NoSpace { .. }), "{error}");
    assert!(!error.is_transient());
    assert!(store.get("a").await.unwrap().is_some(), "reads continue");
}
