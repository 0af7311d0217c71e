//! Random histories, played on the state machine and on a model too plain to be wrong: it keeps every state whole.

use std::collections::BTreeMap;
use std::time::Duration;

use proptest::collection::vec;
use proptest::prelude::*;

use super::*;

/// Value, create revision, mod revision, version, lease.
type Row = (Vec<u8>, i64, i64, i64, Option<i64>);
type State = BTreeMap<Vec<u8>, Row>;
/// A key's record after and before, by revision and key.
type Changes = BTreeMap<(i64, Key), [Option<Arc<Record>>; 2]>;

/// One state for each revision, from revision 1 on, and the leases with their ends.
struct Model {
    states: Vec<State>,
    oldest: i64,
    leases: BTreeMap<i64, (Duration, Time)>,
}

impl Model {
    fn new() -> Model {
        Model { states: vec![State::new()], oldest: 0, leases: BTreeMap::new() }
    }

    fn revision(&self) -> i64 {
        self.states.len() as i64
    }

    fn state(&self, revision: i64) -> &State {
        &self.states[revision as usize - 1]
    }

    fn now(&self) -> &State {
        &self.states[self.states.len() - 1]
    }

    fn expire(&mut self, now: Time) {
        let mut over: Vec<_> = self.leases.iter().map(|(id, lease)| (lease.1, *id)).filter(|l| l.0 <= now).collect();
        over.sort();
        for (_, id) in over {
            self.end(id);
        }
    }

    fn end(&mut self, id: i64) -> bool {
        let existed = self.leases.remove(&id).is_some();
        let mut next = self.now().clone();
        next.retain(|_, row| row.4 != Some(id));
        if next != *self.now() {
            self.states.push(next);
        }
        existed
    }

    /// `None` where the store must refuse.
    fn txn(&mut self, txn: &MvccTxn) -> Option<TxnResponse> {
        let (before, mut next, mut wrote) = (self.now().clone(), self.now().clone(), false);
        let at = self.revision() + 1;
        let succeeded = txn.compare.iter().all(|compare| {
            let found: Vec<&Row> =
                before.iter().filter(|(key, _)| compare.span.contains(key)).map(|(_, row)| row).collect();
            if found.is_empty() {
                let absent = (vec![], 0, 0, 0, None);
                return !matches!(compare.target, Target::Value(_)) && relates(compare, &absent);
            }
            found.into_iter().all(|row| relates(compare, row))
        });
        let mut responses = Vec::new();
        for request in if succeeded { &txn.success } else { &txn.failure } {
            responses.push(match request {
                MvccRequest::Range(range) => Response::Range(self.range(range, &next)?),
                MvccRequest::Put(put) => {
                    let old = next.get(&put.key).cloned();
                    let lease = match put.lease {
                        PutLease::None => None,
                        PutLease::On(LeaseId(id)) => Some(*self.leases.get_key_value(&id)?.0),
                        PutLease::Keep => old.as_ref()?.4,
                    };
                    let value = match &put.value {
                        Some(value) => value.clone(),
                        None => old.as_ref()?.0.clone(),
                    };
                    let (created, version) = old.as_ref().map_or((at, 1), |old| (old.1, old.3 + 1));
                    wrote = true;
                    next.insert(put.key.clone(), (value, created, at, version, lease));
                    Response::Put(old.filter(|_| put.prev_kv).map(|row| record(&put.key, &row)))
                }
                MvccRequest::Delete(delete) => {
                    let gone: State = next
                        .iter()
                        .filter(|(key, _)| delete.span.contains(key))
                        .map(|(k, v)| (k.clone(), v.clone()))
                        .collect();
                    wrote |= !gone.is_empty();
                    next.retain(|key, _| !gone.contains_key(key));
                    let prev = gone.iter().filter(|_| delete.prev_kv).map(|(key, row)| record(key, row)).collect();
                    Response::Delete { deleted: gone.len(), prev }
                }
            });
        }
        if wrote {
            self.states.push(next);
        }
        Some(TxnResponse { succeeded, responses, revision: Revision(self.revision()) })
    }

    fn range(&self, range: &Range, now: &State) -> Option<RangeResponse> {
        let state = match range.revision {
            Some(at) if at.0 > self.revision() || at.0 < self.oldest => return None,
            Some(at) => self.state(at.0),
            None => now,
        };
        let mut rows: Vec<_> = state.iter().filter(|(key, _)| range.span.contains(key)).collect();
        let count = rows.len();
        if range.count_only {
            return Some(RangeResponse { records: vec![], more: false, count });
        }
        rows.retain(|(_, row)| range.max_create_revision.is_none_or(|max| row.1 <= max.0));
        if let Some(sort) = range.sort {
            rows.sort_by_key(|(key, row)| match sort.by {
                SortBy::Key => (key.to_vec(), 0),
                SortBy::Version => (vec![], row.3),
                SortBy::CreateRevision => (vec![], row.1),
                SortBy::ModRevision => (vec![], row.2),
                SortBy::Value => (row.0.clone(), 0),
            });
            if sort.descending {
                // A stable sort by the opposite order: reverse, then put ties back into key order.
                rows.reverse();
                rows.sort_by(|a, b| match sort.by {
                    SortBy::Key => b.0.cmp(a.0),
                    SortBy::Version => b.1.3.cmp(&a.1.3).then(a.0.cmp(b.0)),
                    SortBy::CreateRevision => b.1.1.cmp(&a.1.1).then(a.0.cmp(b.0)),
                    SortBy::ModRevision => b.1.2.cmp(&a.1.2).then(a.0.cmp(b.0)),
                    SortBy::Value => b.1.0.cmp(&a.1.0).then(a.0.cmp(b.0)),
                });
            }
        }
        let more = range.limit.is_some_and(|limit| rows.len() > limit);
        rows.truncate(range.limit.unwrap_or(usize::MAX));
        let blank = |row: &Row| if range.keys_only { (vec![], row.1, row.2, row.3, row.4) } else { row.clone() };
        Some(RangeResponse { records: rows.into_iter().map(|(k, row)| record(k, &blank(row))).collect(), more, count })
    }

    /// The difference of each two neighbouring states.
    fn changes(&self, span: &Span, from: i64) -> Changes {
        let mut changes = Changes::new();
        for revision in from.max(2)..=self.revision() {
            let (before, after) = (self.state(revision - 1), self.state(revision));
            for key in before.keys().chain(after.keys()).filter(|key| span.contains(key)) {
                if before.get(key) != after.get(key) {
                    let both = [after, before].map(|state| state.get(key).map(|row| record(key, row)));
                    changes.insert((revision, key.as_slice().into()), both);
                }
            }
        }
        changes
    }
}

fn relates(compare: &Compare, row: &Row) -> bool {
    let order = match &compare.target {
        Target::Version(wanted) => row.3.cmp(wanted),
        Target::CreateRevision(wanted) => row.1.cmp(wanted),
        Target::ModRevision(wanted) => row.2.cmp(wanted),
        Target::Lease(wanted) => row.4.unwrap_or(0).cmp(wanted),
        Target::Value(wanted) => row.0.cmp(wanted),
    };
    match compare.relation {
        Relation::Equal => order.is_eq(),
        Relation::NotEqual => order.is_ne(),
        Relation::Greater => order.is_gt(),
        Relation::Less => order.is_lt(),
    }
}

fn record(key: &[u8], row: &Row) -> Arc<Record> {
    Arc::new(Record {
        key: key.into(),
        value: row.0.clone(),
        create_revision: Revision(row.1),
        mod_revision: Revision(row.2),
        version: row.3,
        lease: row.4.map(LeaseId),
    })
}

#[derive(Clone, Debug)]
enum Step {
    Txn(MvccTxn),
    Grant(i64, u64),
    KeepAlive(i64),
    Revoke(i64),
    Wait(u64),
    Compact(i64),
}

fn key() -> impl Strategy<Value = Vec<u8>> {
    prop::sample::select(vec![&b"a"[..], b"ab", b"abc", b"b", b"b\xff", b"\xff"]).prop_map(<[u8]>::to_vec)
}

fn span() -> impl Strategy<Value = Span> {
    prop_oneof![
        key().prop_map(Span::One),
        key().prop_map(|key| Span::prefix(&key)),
        key().prop_map(Span::From),
        (key(), key()).prop_map(|(start, end)| Span::Between(start, end)),
        Just(Span::prefix(b"")),
    ]
}

fn value() -> impl Strategy<Value = Vec<u8>> {
    vec(0u8..3, 0..2)
}

fn range() -> impl Strategy<Value = Range> {
    let by = prop::sample::select(vec![
        SortBy::Key,
        SortBy::Version,
        SortBy::CreateRevision,
        SortBy::ModRevision,
        SortBy::Value,
    ]);
    let sort = prop::option::of((by, any::<bool>()).prop_map(|(by, descending)| Sort { by, descending }));
    let revision = || prop::option::weighted(0.3, (1i64..20).prop_map(Revision));
    (span(), revision(), prop::option::of(1usize..4), sort, any::<(bool, bool)>(), revision()).prop_map(
        |(span, revision, limit, sort, (keys_only, count_only), max_create_revision)| Range {
            revision,
            limit,
            sort,
            keys_only,
            count_only,
            max_create_revision,
            ..Range::of(span)
        },
    )
}

fn compare() -> impl Strategy<Value = Compare> {
    let target = prop_oneof![
        (0i64..4).prop_map(Target::Version),
        (0i64..12).prop_map(Target::CreateRevision),
        (0i64..12).prop_map(Target::ModRevision),
        value().prop_map(Target::Value),
        (0i64..4).prop_map(Target::Lease),
    ];
    let relation = prop::sample::select(vec![Relation::Equal, Relation::NotEqual, Relation::Greater, Relation::Less]);
    (span(), target, relation).prop_map(|(span, target, relation)| Compare { span, target, relation })
}

fn request() -> impl Strategy<Value = MvccRequest> {
    let lease = prop_oneof![
        3 => Just(PutLease::None),
        3 => (1i64..4).prop_map(|id| PutLease::On(LeaseId(id))),
        1 => Just(PutLease::Keep),
    ];
    prop_oneof![
        2 => range().prop_map(MvccRequest::Range),
        4 => (key(), prop::option::weighted(0.9, value()), lease, any::<bool>())
            .prop_map(|(key, value, lease, prev_kv)| MvccRequest::Put(Put { key, value, lease, prev_kv })),
        1 => (span(), any::<bool>()).prop_map(|(span, prev_kv)| MvccRequest::Delete(Delete { span, prev_kv })),
    ]
}

fn txn() -> impl Strategy<Value = MvccTxn> {
    (vec(compare(), 0..2), vec(request(), 0..4), vec(request(), 0..4)).prop_map(|(compare, success, failure)| MvccTxn {
        compare,
        success,
        failure,
    })
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        8 => request().prop_map(|request| Step::Txn(MvccTxn::one(request))),
        8 => txn().prop_map(Step::Txn),
        2 => (1i64..4, 0u64..6).prop_map(|(id, ttl)| Step::Grant(id, ttl)),
        2 => (1i64..4).prop_map(Step::KeepAlive),
        1 => (1i64..4).prop_map(Step::Revoke),
        3 => (1u64..3_000).prop_map(Step::Wait),
        1 => (1i64..20).prop_map(Step::Compact),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2_000, ..ProptestConfig::default() })]

    #[test]
    fn the_state_machine_agrees_with_the_model(steps in vec(step(), 1..40), looks in vec((range(), 1i64..30), 1..6)) {
        let (mut store, mut model, mut now) = (store(), Model::new(), T0);
        for step in steps {
            match step {
                Step::Txn(txn) => {
                    model.expire(now);
                    let got = store.txn(now, &txn);
                    // Requests that are refused only for their form have their own test.
                    if got != Err(Error::DuplicateKey) {
                        prop_assert_eq!(got.ok(), model.txn(&txn), "{:?}", txn);
                    }
                }
                Step::Grant(id, ttl) => {
                    model.expire(now);
                    let ttl = Duration::from_secs(ttl.max(2));
                    let free = !model.leases.contains_key(&id);
                    model.leases.entry(id).or_insert((ttl, now + ttl));
                    prop_assert_eq!(store.grant(now, Some(LeaseId(id)), ttl).is_ok(), free);
                }
                Step::KeepAlive(id) => {
                    model.expire(now);
                    let renewed = model.leases.get_mut(&id).map(|lease| {
                        lease.1 = now + lease.0;
                        lease.0
                    });
                    prop_assert_eq!(store.keep_alive(now, LeaseId(id)), renewed);
                }
                Step::Revoke(id) => {
                    model.expire(now);
                    prop_assert_eq!(store.revoke(now, LeaseId(id)).is_ok(), model.end(id));
                }
                Step::Wait(ms) => {
                    now = now + Duration::from_millis(ms);
                    let due = store.next_expiry().is_some_and(|at| at <= now);
                    prop_assert_eq!(!store.expire(now).is_empty(), due);
                    model.expire(now);
                }
                Step::Compact(at) => {
                    let may = at > model.oldest && at <= model.revision();
                    prop_assert_eq!(store.compact(Revision(at)).is_ok(), may);
                    model.oldest = if may { at } else { model.oldest };
                }
            }
            prop_assert_eq!(store.revision(), Revision(model.revision()));
            let rows = store.range(&Range::of(all())).unwrap().records;
            prop_assert_eq!(rows, model.now().iter().map(|(k, row)| record(k, row)).collect::<Vec<_>>());
        }
        for (range, from) in &looks {
            prop_assert_eq!(store.range(range).ok(), model.range(range, model.now()), "{:?}", range);
            let got = store.events(&range.span, Revision(*from)).ok().map(|events| {
                let mut changes = Changes::new();
                for event in events {
                    let both = changes.entry((event.revision.0, event.key.clone()));
                    both.or_insert([None, event.prev.clone()])[0] = event.record.clone();
                }
                changes
            });
            prop_assert_eq!(got, (*from >= model.oldest).then(|| model.changes(&range.span, *from)));
        }
        let sizes: usize = store.live.values().map(|record| record.size()).sum();
        prop_assert_eq!(store.live_bytes, sizes);
        store.compact(store.revision()).ok();
        store.txn(now, &MvccTxn::one(delete(all()))).unwrap();
        store.compact(store.revision()).ok();
        prop_assert_eq!(store.live_bytes, 0);
    }
}
