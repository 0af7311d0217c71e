//! Watches over the network: replay, order, filters, progress, compaction, and clients that read slowly or not at all.

use std::time::Duration;

use elastic_store::embedded::Options;
use elastic_store::embedded::mvcc::Limits;
use elastic_store::{Op, Revision, Store, Txn};
use etcd_client::{EventType, WatchFilterType, WatchOptions};

use super::{Served, next, serve, serve_with, within};

async fn put(server: &Served, key: &str, value: &str) -> Revision {
    server.store.txn(Txn::of([Op::put(key, value)])).await.unwrap().revision
}

#[tokio::test]
async fn a_replay_under_concurrent_writers_has_every_event_once_and_in_order() {
    const WRITERS: usize = 4;
    const WRITES: usize = 200;
    let server = serve().await;
    let writers: Vec<_> = (0..WRITERS)
        .map(|writer| {
            let (store, address) = (server.store.clone(), server.address.to_string());
            tokio::spawn(async move {
                let mut client = etcd_client::Client::connect([address], None).await.unwrap();
                for write in 0..WRITES {
                    let (key, value) = (format!("k/{writer}"), write.to_string());
                    if writer % 2 == 0 {
                        client.put(key, value, None).await.unwrap();
                    } else {
                        store.txn(Txn::of([Op::put(key, value), Op::put("other", "")])).await.unwrap();
                    }
                }
            })
        })
        .collect();
    let mut client = server.client().await;
    // Watches that start in the middle of it all, each from the beginning.
    for _ in 0..5 {
        let options = WatchOptions::new().with_prefix().with_start_revision(2);
        let mut stream = client.watch("k/", Some(options)).await.unwrap();
        let (mut seen, mut last) = (vec![0; WRITERS], 0);
        while seen.iter().sum::<usize>() < WRITERS * WRITES {
            for event in next(&mut stream).await.events() {
                let kv = event.kv().unwrap();
                assert!(kv.mod_revision() > last, "in order, each once");
                last = kv.mod_revision();
                let writer: usize = kv.key_str().unwrap()[2..].parse().unwrap();
                assert_eq!(kv.value_str().unwrap(), seen[writer].to_string());
                seen[writer] += 1;
            }
        }
    }
    for writer in writers {
        within(writer).await.unwrap();
    }
}

#[tokio::test]
async fn events_of_a_transaction_come_together() {
    let server = serve().await;
    let mut client = server.client().await;
    let mut stream = client.watch("", Some(WatchOptions::new().with_all_keys())).await.unwrap();
    assert!(next(&mut stream).await.created());
    server.store.txn(Txn::of([Op::put("b", ""), Op::put("a", ""), Op::put("c", "")])).await.unwrap();
    let response = next(&mut stream).await;
    let keys: Vec<_> = response.events().iter().map(|event| event.kv().unwrap().key_str().unwrap()).collect();
    assert_eq!(keys, ["b", "a", "c"]);
    assert_eq!(response.header().unwrap().revision(), 2);
}

#[tokio::test]
async fn filters_ranges_and_previous_values_are_kept_to() {
    let server = serve().await;
    let mut client = server.client().await;
    let mut deletions = client
        .watch("a", Some(WatchOptions::new().with_range("c").with_filters([WatchFilterType::NoPut]).with_prev_key()))
        .await
        .unwrap();
    let mut puts =
        client.watch("a", Some(WatchOptions::new().with_filters([WatchFilterType::NoDelete]))).await.unwrap();
    assert!(next(&mut deletions).await.created() && next(&mut puts).await.created());
    for (key, value) in [("a", "1"), ("b", "2"), ("c", "3")] {
        put(&server, key, value).await;
    }
    server.store.txn(Txn::of([Op::delete_prefix("")])).await.unwrap();
    put(&server, "a", "4").await;

    let response = next(&mut deletions).await;
    let seen: Vec<_> = response
        .events()
        .iter()
        .map(|event| (event.event_type(), event.kv().unwrap().key(), event.prev_kv().unwrap().value()))
        .collect();
    assert_eq!(seen, [(EventType::Delete, &b"a"[..], &b"1"[..]), (EventType::Delete, b"b", b"2")]);
    let mut values = Vec::new();
    while values.len() < 2 {
        for event in next(&mut puts).await.events() {
            assert!(event.prev_kv().is_none());
            values.push(event.kv().unwrap().value_str().unwrap().to_owned());
        }
    }
    assert_eq!(values, ["1", "4"]);
}

#[tokio::test]
async fn a_watch_of_compacted_history_is_canceled_with_the_oldest_revision() {
    let server = serve().await;
    let mut client = server.client().await;
    for _ in 0..5 {
        client.put("a", "x", None).await.unwrap();
    }
    client.compact(4, None).await.unwrap();
    let mut stream = client.watch("a", Some(WatchOptions::new().with_start_revision(3))).await.unwrap();
    assert!(next(&mut stream).await.created());
    let canceled = next(&mut stream).await;
    assert!(canceled.canceled());
    assert_eq!(canceled.compact_revision(), 4);
    assert_eq!(canceled.cancel_reason(), "etcdserver: mvcc: required revision has been compacted");
    // The stream itself continues.
    stream.watch("a", Some(WatchOptions::new().with_start_revision(4))).await.unwrap();
    assert!(next(&mut stream).await.created());
    assert_eq!(next(&mut stream).await.events().len(), 3);
}

#[tokio::test]
async fn a_stream_carries_many_watches_and_each_can_be_canceled() {
    let server = serve().await;
    let mut client = server.client().await;
    let mut stream = client.watch("a", Some(WatchOptions::new().with_watch_id(7))).await.unwrap();
    let first = next(&mut stream).await;
    assert_eq!((first.created(), first.watch_id()), (true, 7));
    stream.watch("b", None).await.unwrap();
    let second = next(&mut stream).await.watch_id();
    assert_ne!(second, 7);
    stream.watch("c", Some(WatchOptions::new().with_watch_id(7))).await.unwrap();
    let refused = next(&mut stream).await;
    assert!(refused.created() && refused.canceled() && refused.cancel_reason().contains("duplicate watch ID"));
    stream.watch("z", Some(WatchOptions::new().with_range("a"))).await.unwrap();
    assert!(next(&mut stream).await.cancel_reason().contains("watcher range is empty"));

    put(&server, "a", "").await;
    assert_eq!(next(&mut stream).await.watch_id(), 7);
    stream.cancel(7).await.unwrap();
    let canceled = next(&mut stream).await;
    assert_eq!((canceled.canceled(), canceled.watch_id()), (true, 7));
    put(&server, "a", "").await;
    put(&server, "b", "").await;
    assert_eq!(next(&mut stream).await.watch_id(), second);
}

#[tokio::test]
async fn watches_beyond_the_bound_are_refused_until_others_end() {
    // A stream and a watch on it.
    let server = serve_with(Options { watches: 2, ..Options::default() }).await;
    let mut client = server.client().await;
    let mut stream = client.watch("a", Some(WatchOptions::new().with_watch_id(7))).await.unwrap();
    assert!(next(&mut stream).await.created());
    stream.watch("b", None).await.unwrap();
    let refused = next(&mut stream).await;
    assert!(refused.canceled() && refused.cancel_reason().contains("as many watches as it takes"), "{refused:?}");
    let mut other = server.client().await;
    let refused = other.watch("c", None).await.unwrap_err();
    assert!(refused.to_string().contains("as many watches as it takes"), "{refused}");
    stream.cancel(7).await.unwrap();
    assert!(next(&mut stream).await.canceled());
    stream.watch("b", None).await.unwrap();
    let created = next(&mut stream).await;
    assert!(created.created() && !created.canceled());
}

#[tokio::test]
async fn a_watch_of_the_future_waits_for_it() {
    let server = serve().await;
    let mut client = server.client().await;
    let mut stream = client.watch("a", Some(WatchOptions::new().with_start_revision(4))).await.unwrap();
    assert!(next(&mut stream).await.created());
    for value in ["2", "3", "4"] {
        put(&server, "a", value).await;
    }
    assert_eq!(next(&mut stream).await.events()[0].kv().unwrap().value(), b"4");
}

#[tokio::test]
async fn progress_is_reported_when_asked_for_and_from_time_to_time() {
    let options = Options { progress_every: Duration::from_millis(50), ..Options::default() };
    let server = serve_with(options).await;
    let mut client = server.client().await;
    let mut asked = client.watch("a", None).await.unwrap();
    let mut regular = client.watch("a", Some(WatchOptions::new().with_progress_notify())).await.unwrap();
    assert!(next(&mut asked).await.created() && next(&mut regular).await.created());
    let revision = put(&server, "elsewhere", "").await;

    asked.request_progress().await.unwrap();
    let progress = next(&mut asked).await;
    assert_eq!((progress.watch_id(), progress.header().unwrap().revision()), (-1, revision.0));
    loop {
        let progress = next(&mut regular).await;
        assert!(progress.events().is_empty());
        if progress.header().unwrap().revision() == revision.0 {
            break;
        }
    }
}

#[tokio::test]
async fn a_client_that_does_not_read_blocks_no_other_and_is_cut_off_once_its_revision_is_compacted() {
    let limits = Limits { history_bytes: 4 << 20, ..Limits::default() };
    let server = serve_with(Options { limits, ..Options::default() }).await;
    let mut client = server.client().await;
    let mut idle = client.watch("big", None).await.unwrap();
    assert!(next(&mut idle).await.created());
    let mut other = client.watch("last", None).await.unwrap();
    assert!(next(&mut other).await.created());

    let value = "x".repeat(1 << 20);
    for _ in 0..64 {
        within(put(&server, "big", &value)).await;
        tokio::task::yield_now().await;
    }
    put(&server, "last", "").await;

    assert_eq!(next(&mut other).await.events().len(), 1);
    let held = server.store.clone();
    assert!(within(held.get("big")).await.unwrap().is_some());
    // It got some of it while there was room on the way, and then learns that it missed the rest.
    loop {
        let response = next(&mut idle).await;
        if response.canceled() {
            assert!(response.compact_revision() > 2);
            break;
        }
    }
}
