//! Promises about leases.
//!
//! These cases wait in real time, since it passes in the store. A store may grant more than was asked for, never less.

use std::time::{Duration, Instant};

use elastic_store::{Event, LeaseId, Op, StoreError, Txn};

use super::{Case, Ctx};
use crate::contract_cases;
use crate::wait::eventually;

/// Every promise of this group.
pub const CASES: &[Case] = contract_cases![
    key_shows_its_lease,
    put_without_lease_detaches,
    put_moves_a_key_to_another_lease,
    revoke_deletes_the_keys,
    revoke_of_a_lease_that_is_gone_is_no_error,
    put_with_a_dead_lease_is_refused,
    keep_alive_of_a_lease_that_is_gone_is_none,
    keep_alive_tells_the_time_left,
    keep_alive_keeps_alive,
    expiry_deletes_all_keys_at_one_revision,
    leases_are_distinct,
];

/// Longer than any case takes.
const LONG: Duration = Duration::from_secs(60);

/// The shortest lease that every store grants.
const SHORT: Duration = Duration::from_secs(1);

/// The longest that any store keeps a lease of [`SHORT`]: etcd rounds it up to its election timeout and looks for
/// expired leases every half second.
const GONE_BY: Duration = Duration::from_secs(8);

async fn put_leased(ctx: &Ctx, name: &str, lease: LeaseId) {
    ctx.txn(Txn::of([Op::put_leased(ctx.key(name), "x", lease)])).await;
}

/// A key read back, and its watch event, name its lease.
pub async fn key_shows_its_lease(ctx: Ctx) {
    let from = ctx.revision().await.next();
    let lease = ctx.store.grant(LONG).await.unwrap();
    put_leased(&ctx, "a", lease).await;
    assert_eq!(ctx.store.get(&ctx.key("a")).await.unwrap().unwrap().lease, Some(lease));
    let events = ctx.watch_all(from).await.collect(1).await;
    assert!(matches!(&events[0], Event::Put(kv) if kv.lease == Some(lease)));
}

/// A put without a lease takes the key off the one it had, so that it outlives it.
pub async fn put_without_lease_detaches(ctx: Ctx) {
    let lease = ctx.store.grant(LONG).await.unwrap();
    put_leased(&ctx, "done", lease).await;
    put_leased(&ctx, "node", lease).await;
    ctx.put("done", "y").await;
    assert_eq!(ctx.store.get(&ctx.key("done")).await.unwrap().unwrap().lease, None);
    ctx.store.revoke(lease).await.unwrap();
    assert_eq!(ctx.value("node").await, None);
    assert_eq!(ctx.value("done").await.as_deref(), Some("y"));
}

/// A put with another lease moves the key to it.
pub async fn put_moves_a_key_to_another_lease(ctx: Ctx) {
    let (old, new) = (ctx.store.grant(LONG).await.unwrap(), ctx.store.grant(LONG).await.unwrap());
    put_leased(&ctx, "a", old).await;
    put_leased(&ctx, "a", new).await;
    ctx.store.revoke(old).await.unwrap();
    assert!(ctx.value("a").await.is_some());
    ctx.store.revoke(new).await.unwrap();
    assert_eq!(ctx.value("a").await, None);
}

/// Revoking a lease deletes its keys, at one revision, before it returns; a watch sees them go.
pub async fn revoke_deletes_the_keys(ctx: Ctx) {
    let lease = ctx.store.grant(LONG).await.unwrap();
    for name in ["a", "b", "c"] {
        put_leased(&ctx, name, lease).await;
    }
    ctx.put("other", "x").await;
    let mut watched = ctx.watch_all(ctx.revision().await.next()).await;
    ctx.store.revoke(lease).await.unwrap();
    let (left, _) = ctx.store.range(&ctx.prefix).await.unwrap();
    assert_eq!(left.iter().map(|kv| kv.key.clone()).collect::<Vec<_>>(), [ctx.key("other")]);
    all_deleted_at_once(&ctx, &watched.events().await, &["a", "b", "c"]);
}

fn all_deleted_at_once(ctx: &Ctx, events: &[Event], names: &[&str]) {
    let mut keys: Vec<_> = events.iter().map(|event| event.key().to_owned()).collect();
    keys.sort();
    assert_eq!(keys, names.iter().map(|name| ctx.key(name)).collect::<Vec<_>>());
    assert!(events.iter().all(|event| matches!(event, Event::Delete { .. })));
    assert!(events.iter().all(|event| event.revision() == events[0].revision()));
}

/// Ending a lease twice is no error.
pub async fn revoke_of_a_lease_that_is_gone_is_no_error(ctx: Ctx) {
    let lease = ctx.store.grant(LONG).await.unwrap();
    ctx.store.revoke(lease).await.unwrap();
    ctx.store.revoke(lease).await.unwrap();
}

/// A put that names a dead lease is refused as such, and nothing of its transaction happens.
pub async fn put_with_a_dead_lease_is_refused(ctx: Ctx) {
    let lease = ctx.store.grant(LONG).await.unwrap();
    ctx.store.revoke(lease).await.unwrap();
    let txn = Txn::of([Op::put(ctx.key("a"), "x"), Op::put_leased(ctx.key("b"), "x", lease)]);
    assert_eq!(ctx.store.txn(txn).await, Err(StoreError::LeaseGone));
    assert_eq!(ctx.store.range(&ctx.prefix).await.unwrap().0, []);
}

/// A lease that was revoked cannot be renewed, nor one that never was.
pub async fn keep_alive_of_a_lease_that_is_gone_is_none(ctx: Ctx) {
    let lease = ctx.store.grant(LONG).await.unwrap();
    assert!(ctx.store.keep_alive(lease).await.unwrap().is_some());
    ctx.store.revoke(lease).await.unwrap();
    assert_eq!(ctx.store.keep_alive(lease).await.unwrap(), None);
    assert_eq!(ctx.store.keep_alive(lease).await.unwrap(), None, "and stays gone");
    assert_eq!(ctx.store.keep_alive(LeaseId(i64::MAX - 7)).await.unwrap(), None);
}

/// A renewal gives the whole time again, at least what was asked for.
pub async fn keep_alive_tells_the_time_left(ctx: Ctx) {
    let lease = ctx.store.grant(LONG).await.unwrap();
    for _ in 0..3 {
        let left = ctx.store.keep_alive(lease).await.unwrap().expect("the lease lives");
        assert!(left >= LONG && left <= 2 * LONG, "{left:?}");
    }
}

/// A lease that is renewed in time lives on, past several times its length; left alone, it goes.
pub async fn keep_alive_keeps_alive(ctx: Ctx) {
    let lease = ctx.store.grant(SHORT).await.unwrap();
    put_leased(&ctx, "a", lease).await;
    let start = Instant::now();
    let mut tick = tokio::time::interval(SHORT / 5);
    let mut full = SHORT;
    while start.elapsed() < 2 * full {
        tick.tick().await;
        full = ctx.store.keep_alive(lease).await.unwrap().expect("a lease that is renewed in time lives");
    }
    assert!(ctx.value("a").await.is_some());
    eventually("a lease that is not renewed is gone", GONE_BY, async || ctx.value("a").await.is_none().then_some(()))
        .await;
    assert_eq!(ctx.store.keep_alive(lease).await.unwrap(), None);
}

/// When a lease expires, all its keys go at one revision, not before its time, and a watch says so in one update.
pub async fn expiry_deletes_all_keys_at_one_revision(ctx: Ctx) {
    let start = Instant::now();
    let lease = ctx.store.grant(SHORT).await.unwrap();
    let mut watched = ctx.watch_all(ctx.revision().await.next()).await;
    let puts = ["a", "b", "c"].map(|name| Op::put_leased(ctx.key(name), "x", lease));
    ctx.txn(Txn::of(puts)).await;
    assert_eq!(watched.events().await.len(), 3);
    let events = watched.events().await;
    assert!(start.elapsed() >= SHORT, "not before its time: {:?}", start.elapsed());
    all_deleted_at_once(&ctx, &events, &["a", "b", "c"]);
    assert_eq!(ctx.store.range(&ctx.prefix).await.unwrap().0, []);
}

/// No two leases share an id, and the end of one leaves the other's keys.
pub async fn leases_are_distinct(ctx: Ctx) {
    let (one, two) = (ctx.store.grant(LONG).await.unwrap(), ctx.store.grant(LONG).await.unwrap());
    assert_ne!(one, two);
    put_leased(&ctx, "a", one).await;
    put_leased(&ctx, "b", two).await;
    ctx.store.revoke(one).await.unwrap();
    assert_eq!(ctx.value("a").await, None);
    assert!(ctx.value("b").await.is_some());
}
