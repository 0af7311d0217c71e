//! The in-process store where it differs from a networked one: slow watchers, and what ends with whom.
//! What it shares with every store is in the contract suite.

// Tests report by panicking, their helpers too.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::time::Duration;

use elastic_store::embedded::Hub;
use elastic_store::embedded::MemoryStore;
use elastic_store::embedded::mvcc::Limits;
use elastic_store::{Event, Mirror, News, Op, Revision, Scope, Store, Txn, WatchUpdate, Watcher};

const PATIENCE: Duration = Duration::from_secs(10);

async fn update(watcher: &mut Watcher) -> WatchUpdate {
    tokio::time::timeout(PATIENCE, watcher.recv()).await.expect("an update in time").expect("the watch continues")
}

async fn put(store: &MemoryStore, key: &str, value: &str) -> Revision {
    store.txn(Txn::of([Op::put(key, value)])).await.unwrap().revision
}

#[tokio::test]
async fn a_watcher_that_reads_nothing_holds_up_no_writer_and_then_gets_every_event() {
    let store = MemoryStore::start(Limits::default());
    let mut slow = store.watch(Scope::Prefix("k/".into()), Revision(2)).await.unwrap();
    let mut last = Revision::NONE;
    for write in 0..2_000 {
        last = put(&store, &format!("k/{}", write % 7), &write.to_string()).await;
        tokio::task::yield_now().await;
    }
    let mut seen = 1;
    while seen < last.0 {
        let WatchUpdate::Events(events) = update(&mut slow).await else { panic!("history is long enough") };
        for event in events {
            seen += 1;
            assert_eq!(event.revision(), Revision(seen));
        }
    }
}

#[tokio::test]
async fn a_watcher_that_falls_behind_the_history_starts_again_from_a_snapshot() {
    let store = MemoryStore::start(Limits { history_revisions: 10, ..Limits::default() });
    let mut slow = store.watch(Scope::Key("a".into()), Revision(2)).await.unwrap();
    for write in 0..100 {
        put(&store, "a", &write.to_string()).await;
        tokio::task::yield_now().await;
    }
    let mut known = (Revision::NONE, String::new());
    while known.1 != "99" {
        known = match update(&mut slow).await {
            WatchUpdate::Events(events) => {
                assert_eq!(events[0].revision(), if known.0 == Revision::NONE { Revision(2) } else { known.0.next() });
                let Some(Event::Put(kv)) = events.into_iter().last() else { panic!("nothing was deleted") };
                (kv.mod_revision, String::from_utf8(kv.value).unwrap())
            }
            WatchUpdate::Snapshot { revision, values } => {
                assert!(revision > known.0);
                (revision, String::from_utf8(values[0].value.clone()).unwrap())
            }
            WatchUpdate::Broken(error) => panic!("{error}"),
        };
    }
}

#[tokio::test]
async fn a_watcher_of_a_quiet_scope_loses_nothing_however_much_is_written_elsewhere() {
    let store = MemoryStore::start(Limits { history_revisions: 10, ..Limits::default() });
    let mut quiet = store.watch(Scope::Key("quiet".into()), Revision(2)).await.unwrap();
    for _ in 0..1_000 {
        put(&store, "loud", "").await;
        tokio::task::yield_now().await;
    }
    put(&store, "quiet", "").await;
    let got = update(&mut quiet).await;
    assert!(matches!(&got, WatchUpdate::Events(events) if events.len() == 1), "{got:?}");
}

#[tokio::test]
async fn a_lease_ends_in_time_without_a_call() {
    let store = MemoryStore::start(Limits { min_ttl: Duration::from_secs(1), ..Limits::default() });
    let mut watcher = store.watch(Scope::Key("mine".into()), Revision(2)).await.unwrap();
    // A later lease first, so that the shorter one has to wake the sleeper.
    store.grant(Duration::from_secs(60)).await.unwrap();
    let since = tokio::time::Instant::now();
    let lease = store.grant(Duration::from_secs(1)).await.unwrap();
    store.txn(Txn::of([Op::put_leased("mine", "", lease)])).await.unwrap();
    assert!(
        matches!(&update(&mut watcher).await, WatchUpdate::Events(events) if matches!(events[..], [Event::Put(_)]))
    );
    let gone = update(&mut watcher).await;
    assert!(matches!(&gone, WatchUpdate::Events(events) if matches!(events[..], [Event::Delete { .. }])), "{gone:?}");
    assert!(since.elapsed() >= Duration::from_secs(1) && since.elapsed() < Duration::from_secs(30));
}

#[tokio::test]
async fn a_dropped_watcher_and_a_dropped_store_leave_nothing_behind() {
    let hub = Hub::start(Limits::default());
    let gone = std::sync::Arc::downgrade(&hub);
    let store = MemoryStore::on(hub);
    let watcher = store.watch(Scope::Key("a".into()), Revision(2)).await.unwrap();
    store.grant(Duration::from_secs(60)).await.unwrap();
    drop((watcher, store));
    let all_gone = async {
        while gone.upgrade().is_some() {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(PATIENCE, all_gone).await.expect("the hub is freed");
}

#[tokio::test]
async fn a_mirror_reads_once_and_then_tells_each_change_once() {
    let store = MemoryStore::start(Limits::default());
    put(&store, "j/a", "1").await;
    let mut mirror = Mirror::open(&store, "j/").await.unwrap();
    // After the read, and before the mirror reports it.
    put(&store, "j/b", "2").await;
    put(&store, "elsewhere", "").await;
    let News::All { revision, values } = mirror.next().await.unwrap() else { panic!("all comes first") };
    assert_eq!((revision, values.len()), (Revision(2), 1));
    let told = |news: News| match news {
        News::Changes(events) => events.iter().map(|event| event.key().to_owned()).collect::<Vec<_>>(),
        News::All { .. } => panic!("the mirror reports all values once"),
    };
    assert_eq!(told(mirror.next().await.unwrap()), ["j/b"]);
    assert_eq!(mirror.try_next().unwrap(), None);
    store.txn(Txn::of([Op::put("j/c", ""), Op::delete("j/a")])).await.unwrap();
    assert_eq!(told(mirror.next().await.unwrap()), ["j/c", "j/a"]);
}

#[tokio::test]
async fn a_mirror_whose_history_was_compacted_reads_all_again() {
    let store = MemoryStore::start(Limits { history_revisions: 10, ..Limits::default() });
    let mut mirror = Mirror::open(&store, "j/").await.unwrap();
    for write in 0..100 {
        put(&store, &format!("j/{}", write % 3), &write.to_string()).await;
    }
    let mut alls = 0;
    let newest = loop {
        match mirror.next().await.unwrap() {
            News::All { revision, values } => {
                alls += 1;
                if alls == 2 {
                    break (revision, values.len());
                }
            }
            News::Changes(_) => {}
        }
    };
    assert_eq!(newest, (Revision(101), 3));
    put(&store, "j/new", "").await;
    let next = mirror.next().await.unwrap();
    assert!(matches!(&next, News::Changes(events) if events[0].key() == "j/new"), "{next:?}");
}
