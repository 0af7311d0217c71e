//! Promises about watches: every event, once, in order, and each transaction whole.

use std::collections::BTreeMap;

use elastic_store::{Event, Op, Revision, Scope, StoreError, Txn};

use super::{Case, Ctx};
use crate::contract_cases;

/// Every promise of this group.
pub const CASES: &[Case] = contract_cases![
    watch_replays_history_from_a_revision,
    watch_from_the_next_revision_sees_only_what_comes,
    watch_from_a_revision_that_is_yet_to_come,
    watch_from_zero_is_refused,
    watch_of_a_key_sees_only_that_key,
    watch_of_a_prefix_sees_no_neighbour,
    deletes_are_events,
    transaction_is_one_update,
    put_and_recreation_carry_their_create_revisions,
    concurrent_writers_are_seen_whole_and_in_order,
    slow_reader_misses_nothing,
    many_watches_see_the_same,
    dropped_watch_leaves_the_others_alone,
];

fn keys(events: &[Event]) -> Vec<&str> {
    events.iter().map(Event::key).collect()
}

/// A watch from a revision in the past replays everything since, that revision included.
pub async fn watch_replays_history_from_a_revision(ctx: Ctx) {
    ctx.put("a", "0").await;
    let from = ctx.put("a", "1").await;
    ctx.put("b", "2").await;
    ctx.store.delete(vec![], &ctx.key("a")).await.unwrap();
    let mut watched = ctx.watch_all(from).await;
    let events = watched.collect(3).await;
    assert_eq!(keys(&events), [ctx.key("a"), ctx.key("b"), ctx.key("a")]);
    assert_eq!(events[0].revision(), from);
    assert!(matches!(events[2], Event::Delete { .. }));
    let live = ctx.put("c", "3").await;
    assert_eq!(watched.collect(1).await[0].revision(), live, "after the past comes the present");
}

/// A read and a watch from the revision after it leave no gap and overlap in nothing.
pub async fn watch_from_the_next_revision_sees_only_what_comes(ctx: Ctx) {
    ctx.put("a", "1").await;
    let (values, read_at) = ctx.store.range(&ctx.prefix).await.unwrap();
    assert_eq!(values.len(), 1);
    let mut watched = ctx.watch_all(read_at.next()).await;
    let second = ctx.put("a", "2").await;
    let events = watched.collect(1).await;
    assert_eq!(events.len(), 1);
    assert_eq!(events[0].revision(), second);
}

/// A watch may begin at a revision that does not exist yet, and hears nothing from before it.
pub async fn watch_from_a_revision_that_is_yet_to_come(ctx: Ctx) {
    let now = ctx.revision().await;
    let from = Revision(now.0 + 100);
    let mut watched = ctx.watch_all(from).await;
    // Others write to this store too, so the target is reached, not counted.
    while ctx.put("a", "x").await < from {}
    let events = watched.collect(1).await;
    assert!(events[0].revision() >= from, "{:?} is before {from:?}", events[0]);
}

/// There is no revision zero to watch from.
pub async fn watch_from_zero_is_refused(ctx: Ctx) {
    let refused = ctx.store.watch(Scope::Prefix(ctx.prefix.clone()), Revision::NONE).await;
    assert!(matches!(refused, Err(StoreError::Invalid(_))), "{refused:?}");
}

/// A watch of one key hears of no longer and no shorter one.
pub async fn watch_of_a_key_sees_only_that_key(ctx: Ctx) {
    let mut watched = ctx.watch(Scope::Key(ctx.key("a")), ctx.revision().await.next()).await;
    for name in ["a/", "a0", "ab", ""] {
        ctx.put(name, "x").await;
    }
    let own = ctx.put("a", "1").await;
    let events = watched.collect(1).await;
    assert_eq!(keys(&events), [ctx.key("a")]);
    assert_eq!(events[0].revision(), own);
}

/// A watch of `a/` hears of `a/…` and not of `a` or `a0`; of a mixed transaction it hears its own part.
pub async fn watch_of_a_prefix_sees_no_neighbour(ctx: Ctx) {
    let mut watched = ctx.watch(Scope::Prefix(ctx.key("a/")), ctx.revision().await.next()).await;
    for name in ["a", "a.", "a0"] {
        ctx.put(name, "x").await;
    }
    let puts = ["a0", "a/x", "b", "a/"].map(|name| Op::put(ctx.key(name), "x"));
    ctx.txn(Txn::of(puts)).await;
    let events = watched.events().await;
    let mut seen = keys(&events);
    seen.sort_unstable();
    assert_eq!(seen, [ctx.key("a/"), ctx.key("a/x")]);
}

/// A delete is an event with its own revision, of each key that a prefix delete hits.
pub async fn deletes_are_events(ctx: Ctx) {
    let from = ctx.revision().await.next();
    ctx.txn(Txn::of([Op::put(ctx.key("a"), "1"), Op::put(ctx.key("d/1"), "1"), Op::put(ctx.key("d/2"), "1")])).await;
    let mut watched = ctx.watch_all(from).await;
    assert_eq!(watched.events().await.len(), 3);
    let one = ctx.txn(Txn::of([Op::delete(ctx.key("a"))])).await.revision;
    assert_eq!(watched.events().await, [Event::Delete { key: ctx.key("a"), revision: one }]);
    let many = ctx.txn(Txn::of([Op::delete_prefix(ctx.key("d/"))])).await.revision;
    let mut events = watched.events().await;
    events.sort_by(|a, b| a.key().cmp(b.key()));
    let expected = ["d/1", "d/2"].map(|name| Event::Delete { key: ctx.key(name), revision: many });
    assert_eq!(events, expected);
}

/// All that one transaction did comes in one update, also when it is replayed, also when it is large.
pub async fn transaction_is_one_update(ctx: Ctx) {
    let from = ctx.revision().await.next();
    let mut live = ctx.watch_all(from).await;
    let value = vec![b'x'; 8 * 1024];
    let puts: Vec<_> = (0..100).map(|n| Op::put(ctx.key(&n.to_string()), value.clone())).collect();
    let revision = ctx.txn(Txn::of(puts)).await.revision;
    let mut replayed = ctx.watch_all(from).await;
    for watched in [&mut live, &mut replayed] {
        let events = watched.events().await;
        assert_eq!(events.len(), 100);
        assert!(events.iter().all(|event| event.revision() == revision));
    }
}

/// Put events carry the whole key: value, create and mod revision.
pub async fn put_and_recreation_carry_their_create_revisions(ctx: Ctx) {
    let from = ctx.revision().await.next();
    let first = ctx.put("a", "1").await;
    let second = ctx.put("a", "2").await;
    ctx.store.delete(vec![], &ctx.key("a")).await.unwrap();
    let third = ctx.put("a", "3").await;
    let events = ctx.watch_all(from).await.collect(4).await;
    let puts: Vec<_> = events
        .iter()
        .filter_map(|event| match event {
            Event::Put(kv) => Some((kv.value.as_slice(), kv.create_revision, kv.mod_revision)),
            Event::Delete { .. } => None,
        })
        .collect();
    assert_eq!(puts, [(&b"1"[..], first, first), (b"2", first, second), (b"3", third, third)]);
}

/// Four writers at once: every transaction is seen, once, in order, and both its keys together.
pub async fn concurrent_writers_are_seen_whole_and_in_order(ctx: Ctx) {
    const WRITERS: usize = 4;
    const EACH: usize = 25;
    let mut live = ctx.watch_all(ctx.revision().await.next()).await;
    let from = ctx.revision().await.next();
    let mut writers = tokio::task::JoinSet::new();
    for writer in 0..WRITERS {
        let ctx = ctx.clone();
        writers.spawn(async move {
            let mut done = Vec::new();
            for n in 0..EACH {
                let pair = ["left", "right"].map(|side| Op::put(ctx.key(&format!("{writer}/{side}")), n.to_string()));
                done.push((ctx.txn(Txn::of(pair)).await.revision, (writer, n)));
            }
            done
        });
    }
    let mut written = BTreeMap::new();
    while let Some(done) = writers.join_next().await {
        written.extend(done.expect("a writer"));
    }
    assert_eq!(written.len(), WRITERS * EACH, "no two transactions share a revision");
    let mut replayed = ctx.watch_all(from).await;
    for watched in [&mut live, &mut replayed] {
        let events = watched.collect(2 * WRITERS * EACH).await;
        let mut seen: BTreeMap<Revision, Vec<(String, Vec<u8>)>> = BTreeMap::new();
        for event in events {
            let Event::Put(kv) = event else { panic!("nothing was deleted") };
            seen.entry(kv.mod_revision).or_default().push((kv.key, kv.value));
        }
        let expected: BTreeMap<_, _> = written
            .iter()
            .map(|(revision, (writer, n))| {
                let pair =
                    ["left", "right"].map(|side| (ctx.key(&format!("{writer}/{side}")), n.to_string().into_bytes()));
                (*revision, pair.to_vec())
            })
            .collect();
        assert_eq!(seen, expected);
    }
}

/// A reader that looks only after a thousand writes still gets them all.
pub async fn slow_reader_misses_nothing(ctx: Ctx) {
    const WRITES: usize = 1000;
    let mut watched = ctx.watch_all(ctx.revision().await.next()).await;
    for n in 0..WRITES {
        ctx.put("a", &n.to_string()).await;
    }
    let events = watched.collect(WRITES).await;
    let values: Vec<_> = events
        .iter()
        .map(|event| match event {
            Event::Put(kv) => String::from_utf8(kv.value.clone()).unwrap().parse::<usize>().unwrap(),
            Event::Delete { .. } => panic!("nothing was deleted"),
        })
        .collect();
    assert_eq!(values, (0..WRITES).collect::<Vec<_>>());
}

/// Several watches of one prefix, of different ages, agree.
pub async fn many_watches_see_the_same(ctx: Ctx) {
    let from = ctx.revision().await.next();
    let mut watches = Vec::new();
    for n in 0..10 {
        watches.push(ctx.watch_all(from).await);
        ctx.put("a", &n.to_string()).await;
    }
    let first = watches[0].collect(10).await;
    for watched in &mut watches[1..] {
        assert_eq!(watched.collect(10).await, first);
    }
}

/// Dropping a watch ends it and no other.
pub async fn dropped_watch_leaves_the_others_alone(ctx: Ctx) {
    let from = ctx.revision().await.next();
    let mut kept = ctx.watch_all(from).await;
    drop(ctx.watch_all(from).await);
    let mut brief = ctx.watch_all(from).await;
    ctx.put("a", "1").await;
    assert_eq!(brief.collect(1).await.len(), 1);
    drop(brief);
    ctx.put("a", "2").await;
    assert_eq!(kept.collect(2).await.len(), 2);
}
