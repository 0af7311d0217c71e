//! Stories about single behaviours, in etcd's words; `against_model` checks their sum.

mod against_model;

use std::time::Duration;

use super::*;
use crate as store;
use crate::{Op, StoreError};
use elastic_rendezvous::time::Time;

const T0: Time = Time::from_millis(1_000);

fn store() -> Mvcc {
    Mvcc::new(Limits::default(), LeaseId(100))
}

fn put(key: &str, value: &str) -> MvccRequest {
    MvccRequest::Put(Put { key: key.into(), value: Some(value.into()), lease: PutLease::None, prev_kv: false })
}

fn delete(span: Span) -> MvccRequest {
    MvccRequest::Delete(Delete { span, prev_kv: false })
}

fn all() -> Span {
    Span::prefix(b"")
}

fn keys(response: &RangeResponse) -> Vec<&str> {
    response.records.iter().map(|record| std::str::from_utf8(&record.key).unwrap()).collect()
}

/// Writes keys in turn, a revision each, from revision 2 on.
fn with(keys: &[&str]) -> Mvcc {
    let mut store = store();
    for key in keys {
        store.txn(T0, &MvccTxn::one(put(key, "x"))).unwrap();
    }
    store
}

#[test]
fn a_past_revision_shows_what_was_there_then() {
    let mut store = with(&["a", "b", "a"]);
    store.txn(T0, &MvccTxn::one(delete(Span::One(b"b".into())))).unwrap();
    let at = |revision| store.range(&Range { revision: Some(Revision(revision)), ..Range::of(all()) });
    assert_eq!(keys(&at(1).unwrap()), [] as [&str; 0]);
    assert_eq!(keys(&at(2).unwrap()), ["a"]);
    assert_eq!(keys(&at(3).unwrap()), ["a", "b"]);
    assert_eq!(at(3).unwrap().records[0].version, 1);
    assert_eq!(keys(&at(5).unwrap()), ["a"]);
    assert_eq!(at(6), Err(Error::FutureRevision { requested: Revision(6), current: Revision(5) }));
}

#[test]
fn compaction_takes_the_past_and_leaves_the_present() {
    let mut store = with(&["a", "b", "c"]);
    store.compact(Revision(3)).unwrap();
    let gone = Compacted { requested: Revision(2), oldest: Revision(3) };
    assert_eq!(store.events(&all(), Revision(2)).err(), Some(gone));
    assert_eq!(store.events(&all(), Revision(3)).unwrap().count(), 2);
    assert_eq!(store.range(&Range { revision: Some(Revision(2)), ..Range::of(all()) }), Err(gone.into()));
    assert_eq!(keys(&store.range(&Range { revision: Some(Revision(3)), ..Range::of(all()) }).unwrap()), ["a", "b"]);
    assert_eq!(store.compact(Revision(3)), Err(Error::Compacted { requested: Revision(3), oldest: Revision(3) }));
    assert!(matches!(store.compact(Revision(9)), Err(Error::FutureRevision { .. })));
}

#[test]
fn history_is_bounded_by_revisions_and_by_bytes_and_the_newest_revision_stays() {
    for limits in [
        Limits { history_revisions: 3, ..Limits::default() },
        Limits { history_bytes: 2_000, ..Limits::default() },
        Limits { history_bytes: 0, ..Limits::default() },
    ] {
        let mut store = Mvcc::new(limits.clone(), LeaseId(1));
        for _ in 0..100 {
            store.txn(T0, &MvccTxn::one(put("a", "value"))).unwrap();
        }
        let kept = store.events(&all(), store.history.oldest()).unwrap().count();
        assert!((1..=5).contains(&kept), "{limits:?} keeps {kept}");
        assert_eq!(store.range(&Range::of(all())).unwrap().count, 1);
        assert!(store.size() < 2_500, "{limits:?} holds {} bytes", store.size());
    }
}

#[test]
fn a_full_store_refuses_growth_and_takes_everything_else() {
    let limits = Limits { live_bytes: 1_000, live_keys: 3, ..Limits::default() };
    let mut store = Mvcc::new(limits, LeaseId(1));
    for key in ["a", "b", "c"] {
        store.txn(T0, &MvccTxn::one(put(key, "value"))).unwrap();
    }
    assert_eq!(store.txn(T0, &MvccTxn::one(put("d", "v"))), Err(Error::NoSpace));
    assert_eq!(store.txn(T0, &MvccTxn::one(put("a", &"v".repeat(1_000)))), Err(Error::NoSpace));
    assert!(matches!(store.apply(T0, &store::Txn::of([Op::put("d", "v")])), Err(StoreError::NoSpace { .. })));
    store.txn(T0, &MvccTxn::one(put("a", "other"))).unwrap();
    store.txn(T0, &MvccTxn::one(delete(Span::One(b"a".into())))).unwrap();
    store.txn(T0, &MvccTxn::one(put("d", "v"))).unwrap();
}

#[test]
fn malformed_requests_are_refused_and_change_nothing() {
    let mut store = with(&["a"]);
    let before = store.clone();
    let many = |count: usize| (0..count).map(|i| put(&i.to_string(), "")).collect::<Vec<_>>();
    let keep = |key: &str| Put { key: key.into(), value: None, lease: PutLease::None, prev_kv: false };
    let cases = [
        (vec![put("", "x")], Error::EmptyKey),
        (many(129), Error::TooManyOps { max: 128 }),
        (vec![put("k", "x"), put("k", "y")], Error::DuplicateKey),
        (vec![put("k", "x"), delete(Span::prefix(b"k"))], Error::DuplicateKey),
        (vec![delete(all()), put("k", "x")], Error::DuplicateKey),
        (vec![put("k", &"x".repeat(3 << 19))], Error::TooLarge { bytes: (3 << 19) + 1, max: 3 << 19 }),
        (vec![put("k", "x"), MvccRequest::Put(keep("other"))], Error::KeyNotFound),
        (
            vec![MvccRequest::Put(Put { value: Some(vec![]), lease: PutLease::On(LeaseId(7)), ..keep("k") })],
            Error::LeaseNotFound,
        ),
        (vec![MvccRequest::Put(Put { lease: PutLease::On(LeaseId(7)), ..keep("other") })], Error::LeaseNotFound),
    ];
    for (success, error) in cases {
        assert_eq!(store.txn(T0, &MvccTxn { success, ..MvccTxn::default() }), Err(error));
        assert_eq!(store, before);
    }
    let opposite = MvccTxn { success: vec![put("k", "x")], failure: vec![put("k", "y")], ..MvccTxn::default() };
    store.txn(T0, &opposite).unwrap();
}

#[test]
fn a_lease_takes_its_keys_with_it_in_one_revision() {
    let mut store = store();
    let (lease, ttl) = store.grant(T0, None, Duration::from_millis(2_500)).unwrap();
    assert_eq!((lease, ttl), (LeaseId(100), Duration::from_secs(3)));
    store.apply(T0, &store::Txn::of([Op::put_leased("a", "", lease), Op::put_leased("b", "", lease)])).unwrap();
    store.apply(T0, &store::Txn::of([Op::put_leased("c", "", lease), Op::put("d", "")])).unwrap();
    // A put without the lease takes a key off it.
    store.apply(T0, &store::Txn::of([Op::put("c", "")])).unwrap();
    assert_eq!(store.next_expiry(), Some(T0 + ttl));

    assert_eq!(store.expire((T0 + ttl).minus(Duration::from_millis(1))), []);
    assert_eq!(store.expire(T0 + ttl), [lease]);

    assert_eq!(store.revision(), Revision(5));
    assert_eq!(store.events(&all(), Revision(5)).unwrap().count(), 2);
    assert_eq!(keys(&store.range(&Range::of(all())).unwrap()), ["c", "d"]);
    assert_eq!((store.next_expiry(), store.keep_alive(T0, lease)), (None, None));
    assert_eq!(store.revoke(T0, lease), Err(Error::LeaseNotFound));
}

#[test]
fn a_renewal_counts_from_when_it_came_and_comes_too_late_at_the_deadline() {
    let mut store = store();
    let (lease, ttl) = store.grant(T0, Some(LeaseId(-5)), Duration::from_secs(10)).unwrap();
    assert_eq!(lease, LeaseId(-5));
    assert_eq!(store.grant(T0, Some(lease), ttl), Err(Error::LeaseExists));
    let later = T0 + Duration::from_secs(7);
    assert_eq!(store.keep_alive(later, lease), Some(ttl));
    let status = store.lease(later + Duration::from_secs(4), lease).unwrap();
    assert_eq!((status.left, status.granted), (Duration::from_secs(6), ttl));
    assert_eq!(store.keep_alive(later + ttl, lease), None);
}

#[test]
fn a_short_wish_is_raised_and_an_endless_one_refused() {
    let mut store = store();
    assert_eq!(store.grant(T0, None, Duration::ZERO).unwrap().1, Duration::from_secs(2));
    assert!(matches!(store.grant(T0, None, MAX_TTL + Duration::from_secs(1)), Err(Error::TtlTooLarge { .. })));
}

#[test]
fn prefixes_end_where_they_should() {
    for (prefix, inside, outside) in [
        (&b"a"[..], &b"a\xff\xff"[..], &b"b"[..]),
        (b"a\xff", b"a\xff\x00", b"b"),
        (b"\xff", b"\xff\xff", b"\xfe"),
        (b"", b"\x00", b""),
    ] {
        let span = Span::prefix(prefix);
        assert!(span.contains(inside) && !span.contains(outside), "{span:?}");
    }
}
