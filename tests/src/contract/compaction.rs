//! Promises about history that was compacted away.

use elastic_store::{Event, Op, Scope, Txn, WatchUpdate};

use super::{Case, Ctx};
use crate::contract_cases;

/// Every promise of this group. They run one after another.
pub const CASES: &[Case] = contract_cases![
    watch_from_compacted_history_begins_with_a_snapshot,
    snapshot_of_a_key_that_is_gone_is_empty,
    open_watch_survives_compaction,
    watch_from_after_the_compaction_replays,
    guards_outlive_compaction,
];

/// Instead of the lost events come the values that are left, and then every later event.
pub async fn watch_from_compacted_history_begins_with_a_snapshot(ctx: Ctx) {
    let from = ctx.put("a", "1").await;
    let b = ctx.put("b", "1").await;
    ctx.put("gone", "1").await;
    ctx.store.delete(vec![], &ctx.key("gone")).await.unwrap();
    let a = ctx.put("a", "2").await;
    ctx.compact(a).await;

    let mut watched = ctx.watch_all(from).await;
    let WatchUpdate::Snapshot { revision, values } = watched.update().await else { panic!("a snapshot comes first") };
    assert!(revision >= a);
    let state: Vec<_> = values.iter().map(|kv| (kv.key.clone(), kv.value.clone(), kv.mod_revision)).collect();
    assert_eq!(state, [(ctx.key("a"), b"2".to_vec(), a), (ctx.key("b"), b"1".to_vec(), b)]);
    assert_eq!(values[0].create_revision, from);

    let next = ctx.put("c", "3").await;
    let events = watched.collect(1).await;
    assert_eq!((events.len(), events[0].revision()), (1, next));
}

/// The snapshot of a scope without keys is empty: so its reader learns of the deletion it missed.
pub async fn snapshot_of_a_key_that_is_gone_is_empty(ctx: Ctx) {
    let from = ctx.put("a", "1").await;
    ctx.store.delete(vec![], &ctx.key("a")).await.unwrap();
    let last = ctx.put("a/neighbour", "1").await;
    ctx.compact(last).await;
    let mut watched = ctx.watch(Scope::Key(ctx.key("a")), from).await;
    match watched.update().await {
        WatchUpdate::Snapshot { values, .. } => assert_eq!(values, []),
        other => panic!("a snapshot comes first, not {other:?}"),
    }
    let again = ctx.put("a", "2").await;
    assert_eq!(watched.collect(1).await[0].revision(), again);
}

/// A watch that is up to date loses nothing by compaction and does not see it.
pub async fn open_watch_survives_compaction(ctx: Ctx) {
    let mut watched = ctx.watch_all(ctx.revision().await.next()).await;
    let first = ctx.put("a", "1").await;
    assert_eq!(watched.collect(1).await[0].revision(), first);
    ctx.put("a", "2").await;
    let last = ctx.put("a", "3").await;
    assert_eq!(watched.collect(2).await.len(), 2);
    ctx.compact(last).await;
    let after = ctx.txn(Txn::of([Op::delete(ctx.key("a"))])).await.revision;
    assert_eq!(watched.collect(1).await, [Event::Delete { key: ctx.key("a"), revision: after }]);
}

/// A watch from a revision after the compacted ones is an ordinary watch.
pub async fn watch_from_after_the_compaction_replays(ctx: Ctx) {
    let compacted = ctx.put("a", "1").await;
    let kept = ctx.put("a", "2").await;
    ctx.compact(compacted).await;
    let events = ctx.watch_all(kept).await.collect(1).await;
    assert_eq!(events[0].revision(), kept);
}

/// Compaction takes history, not state: keys keep their create and mod revisions.
pub async fn guards_outlive_compaction(ctx: Ctx) {
    let created = ctx.put("a", "1").await;
    let modified = ctx.put("a", "2").await;
    let last = ctx.put("b", "1").await;
    ctx.compact(last).await;
    let kv = ctx.store.get(&ctx.key("a")).await.unwrap().unwrap();
    assert_eq!((kv.create_revision, kv.mod_revision), (created, modified));
}
