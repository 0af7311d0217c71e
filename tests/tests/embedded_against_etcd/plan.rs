//! The steps of a history, with keys and revisions relative to the case. They are made absolute for each server.

use etcd_client::{
    Client, Compare, CompareOp, DeleteOptions, GetOptions, LeaseGrantOptions, LeaseTimeToLiveOptions, PutOptions,
    SortOrder, SortTarget, Txn, TxnOp,
};
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::select;

use crate::embedded_against_etcd::answer::{Answer, revision};

const KEYS: [&str; 6] = ["a", "ab", "abc", "b", "ba", "c"];

/// Longer than any case.
const LEASE_SECONDS: i64 = 3_600;

#[derive(Clone, Debug)]
pub(crate) enum Step {
    Txn(Plan),
    Range(Range),
    Put(Put),
    Delete(Span, bool),
    Compact(i64),
    Grant(i64),
    KeepAlive(i64),
    Revoke(i64),
    Inspect(i64),
}

#[derive(Clone, Debug)]
pub(crate) enum Span {
    One(&'static str),
    Prefix(&'static str),
    Between(&'static str, &'static str),
}

#[derive(Clone, Debug)]
pub(crate) struct Range {
    span: Span,
    revision: Option<i64>,
    limit: i64,
    sort: Option<(SortTarget, SortOrder)>,
    flags: (bool, bool),
    created_by: Option<i64>,
}

#[derive(Clone, Debug)]
pub(crate) struct Put {
    key: &'static str,
    value: Option<&'static str>,
    /// `None` keeps the key's lease, zero is none.
    lease: Option<i64>,
    prev: bool,
}

#[derive(Clone, Debug)]
pub(crate) struct Condition {
    span: Span,
    op: CompareOp,
    target: Target,
}

#[derive(Clone, Debug)]
pub(crate) enum Target {
    Version(i64),
    Created(Option<i64>),
    Modified(Option<i64>),
    Value(&'static str),
    Lease(i64),
}

#[derive(Clone, Debug)]
pub(crate) enum Op {
    Range(Range),
    Put(Put),
    Delete(Span, bool),
}

#[derive(Clone, Debug)]
pub(crate) struct Plan {
    when: Vec<Condition>,
    then: Vec<Op>,
    otherwise: Vec<Op>,
}

/// Makes the keys, revisions and leases of a case absolute for one server.
#[derive(Clone, Copy)]
struct Absolute<'a> {
    base: i64,
    prefix: &'a str,
    case: u32,
}

impl Absolute<'_> {
    fn key(&self, key: &str) -> String {
        format!("{}{key}", self.prefix)
    }

    fn revision(&self, revision: i64) -> i64 {
        self.base + revision
    }

    /// Leases are shared by all cases, so each has ids of its own; zero stays none.
    fn lease(&self, lease: i64) -> i64 {
        if lease == 0 { 0 } else { i64::from(self.case) * 10 + lease }
    }

    fn grant(&self, lease: Option<i64>) -> LeaseGrantOptions {
        LeaseGrantOptions::new().with_id(self.lease(lease.unwrap_or(0)))
    }

    fn get(&self, range: &Range) -> (String, GetOptions) {
        let mut options = GetOptions::new().with_limit(range.limit);
        let key = match range.span {
            Span::One(key) => self.key(key),
            Span::Prefix(prefix) => {
                options = options.with_prefix();
                self.key(prefix)
            }
            Span::Between(start, end) => {
                options = options.with_range(self.key(end));
                self.key(start)
            }
        };
        if let Some(revision) = range.revision {
            options = options.with_revision(self.revision(revision));
        }
        if let Some((target, order)) = range.sort {
            options = options.with_sort(target, order);
        }
        if range.flags.0 {
            options = options.with_keys_only();
        }
        if range.flags.1 {
            options = options.with_count_only();
        }
        (key, options.with_max_create_revision(range.created_by.map_or(0, |at| self.revision(at))))
    }

    fn put(&self, put: &Put) -> (String, &'static str, PutOptions) {
        let mut options = PutOptions::new();
        match put.lease {
            Some(lease) => options = options.with_lease(self.lease(lease)),
            None => options = options.with_ignore_lease(),
        }
        if put.value.is_none() {
            options = options.with_ignore_value();
        }
        if put.prev {
            options = options.with_prev_key();
        }
        (self.key(put.key), put.value.unwrap_or(""), options)
    }

    fn delete(&self, span: &Span, prev: bool) -> (String, DeleteOptions) {
        let options = if prev { DeleteOptions::new().with_prev_key() } else { DeleteOptions::new() };
        match *span {
            Span::One(key) => (self.key(key), options),
            Span::Prefix(prefix) => (self.key(prefix), options.with_prefix()),
            Span::Between(start, end) => (self.key(start), options.with_range(self.key(end))),
        }
    }

    fn compare(&self, condition: &Condition) -> Compare {
        let start = match condition.span {
            Span::One(key) | Span::Prefix(key) | Span::Between(key, _) => self.key(key),
        };
        let at = |revision: Option<i64>| revision.map_or(0, |revision| self.revision(revision));
        let compare = match condition.target {
            Target::Version(version) => Compare::version(start, condition.op, version),
            Target::Created(revision) => Compare::create_revision(start, condition.op, at(revision)),
            Target::Modified(revision) => Compare::mod_revision(start, condition.op, at(revision)),
            Target::Value(value) => Compare::value(start, condition.op, value),
            Target::Lease(lease) => Compare::lease(start, condition.op, self.lease(lease)),
        };
        match condition.span {
            Span::One(_) => compare,
            Span::Prefix(_) => compare.with_prefix(),
            Span::Between(_, end) => compare.with_range(self.key(end)),
        }
    }

    fn txn(&self, plan: &Plan) -> Txn {
        let ops = |ops: &[Op]| ops.iter().map(|op| self.op(op)).collect::<Vec<_>>();
        let when: Vec<_> = plan.when.iter().map(|condition| self.compare(condition)).collect();
        let txn = if when.is_empty() { Txn::new() } else { Txn::new().when(when) };
        txn.and_then(ops(&plan.then)).or_else(ops(&plan.otherwise))
    }

    fn op(&self, op: &Op) -> TxnOp {
        match op {
            Op::Range(range) => {
                let (key, options) = self.get(range);
                TxnOp::get(key, Some(options))
            }
            Op::Put(put) => {
                let (key, value, options) = self.put(put);
                TxnOp::put(key, value, Some(options))
            }
            Op::Delete(span, prev) => {
                let (key, options) = self.delete(span, *prev);
                TxnOp::delete(key, Some(options))
            }
        }
    }
}

impl Step {
    pub(crate) async fn play(&self, client: &mut Client, base: i64, prefix: &str, case: u32) -> Answer {
        let absolute = Absolute { base, prefix, case };
        let played = match self {
            Step::Txn(plan) => client.txn(absolute.txn(plan)).await.map(|done| Answer::txn(done.0, base)),
            Step::Range(range) => {
                let (key, options) = absolute.get(range);
                client.get(key, Some(options)).await.map(|done| Answer::range(done.0, base))
            }
            Step::Put(put) => {
                let (key, value, options) = absolute.put(put);
                if put.value.is_none() && put.lease.is_some_and(|lease| lease != 0) {
                    // Servers may name either of two faults, so the request must have only one: grant the lease first.
                    let _ = client.lease_grant(LEASE_SECONDS, Some(absolute.grant(put.lease))).await;
                }
                let done = client.put(key, value, Some(options)).await;
                done.map(|done| Answer::written(&done.0.header, done.0.prev_kv.into_iter().collect(), 0, base))
            }
            Step::Delete(span, prev) => {
                let (key, options) = absolute.delete(span, *prev);
                let done = client.delete(key, Some(options)).await;
                done.map(|done| Answer::written(&done.0.header, done.0.prev_kvs, done.0.deleted, base))
            }
            Step::Compact(at) => {
                let done = client.compact(absolute.revision(*at), None).await;
                done.map(|done| Answer::Done(revision(&done.0.header, base)))
            }
            Step::Grant(lease) => {
                let done = client.lease_grant(LEASE_SECONDS, Some(absolute.grant(Some(*lease)))).await;
                done.map(|done| Answer::Lease(done.0.ttl, vec![]))
            }
            Step::KeepAlive(lease) => match client.lease_keep_alive(absolute.lease(*lease)).await {
                // The client reads the first answer itself.
                Ok(_kept) => Ok(Answer::Lease(1, vec![])),
                // The client reports a lease without time left as an error.
                Err(etcd_client::Error::LeaseKeepAliveError(_)) => Ok(Answer::Lease(0, vec![])),
                Err(error) => Err(error),
            },
            Step::Revoke(lease) => {
                let done = client.lease_revoke(absolute.lease(*lease)).await;
                done.map(|done| Answer::Done(revision(&done.0.header, base)))
            }
            Step::Inspect(lease) => {
                let options = LeaseTimeToLiveOptions::new().with_keys();
                let done = client.lease_time_to_live(absolute.lease(*lease), Some(options)).await;
                done.map(|done| {
                    let mut keys = done.0.keys;
                    keys.sort();
                    Answer::Lease(done.0.granted_ttl, keys)
                })
            }
        };
        played.unwrap_or_else(Answer::refused)
    }
}

fn key() -> impl Strategy<Value = &'static str> {
    select(&KEYS[..])
}

/// The start is always before the end: etcd's check for keys written twice does not cover the opposite.
fn span() -> impl Strategy<Value = Span> {
    let between = (0..KEYS.len() - 1).prop_flat_map(|start| (Just(start), start + 1..KEYS.len()));
    prop_oneof![
        3 => key().prop_map(Span::One),
        2 => key().prop_map(Span::Prefix),
        1 => Just(Span::Prefix("")),
        1 => between.prop_map(|(start, end)| Span::Between(KEYS[start], KEYS[end])),
    ]
}

fn value() -> impl Strategy<Value = &'static str> {
    select(&["", "x", "y", "xy"][..])
}

fn relative() -> impl Strategy<Value = i64> {
    1i64..16
}

fn lease() -> impl Strategy<Value = i64> {
    1i64..4
}

fn range() -> impl Strategy<Value = Range> {
    use SortOrder::{Ascend, Descend};
    use SortTarget::{Create, Key, Mod, Value, Version};
    let sort = (select(&[Key, Version, Create, Mod, Value][..]), select(&[Ascend, Descend][..]));
    let sort = proptest::option::of(sort);
    let created_by = proptest::option::weighted(0.15, relative());
    (span(), proptest::option::weighted(0.3, relative()), 0i64..4, sort, any::<(bool, bool)>(), created_by).prop_map(
        |(span, revision, limit, sort, flags, created_by)| Range { span, revision, limit, sort, flags, created_by },
    )
}

fn put() -> impl Strategy<Value = Put> {
    let lease = proptest::option::weighted(0.9, prop_oneof![2 => Just(0), 1 => lease()]);
    (key(), proptest::option::weighted(0.9, value()), lease, any::<bool>()).prop_map(|(key, value, lease, prev)| Put {
        key,
        value,
        lease,
        prev,
    })
}

fn condition() -> impl Strategy<Value = Condition> {
    let at = || proptest::option::weighted(0.7, relative());
    let target = prop_oneof![
        (0i64..4).prop_map(Target::Version),
        at().prop_map(Target::Created),
        at().prop_map(Target::Modified),
        value().prop_map(Target::Value),
        (0i64..4).prop_map(Target::Lease),
    ];
    let op = select(&[CompareOp::Equal, CompareOp::NotEqual, CompareOp::Greater, CompareOp::Less][..]);
    (span(), op, target).prop_map(|(span, op, target)| Condition { span, op, target })
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        2 => range().prop_map(Op::Range),
        4 => put().prop_map(Op::Put),
        1 => (span(), any::<bool>()).prop_map(|(span, prev)| Op::Delete(span, prev)),
    ]
}

fn plan() -> impl Strategy<Value = Plan> {
    (vec(condition(), 0..2), vec(op(), 0..4), vec(op(), 0..4)).prop_map(|(when, then, otherwise)| Plan {
        when,
        then,
        otherwise,
    })
}

pub(crate) fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        5 => put().prop_map(Step::Put),
        4 => range().prop_map(Step::Range),
        3 => (span(), any::<bool>()).prop_map(|(span, prev)| Step::Delete(span, prev)),
        8 => plan().prop_map(Step::Txn),
        1 => relative().prop_map(Step::Compact),
        2 => lease().prop_map(Step::Grant),
        1 => lease().prop_map(Step::KeepAlive),
        1 => lease().prop_map(Step::Revoke),
        1 => lease().prop_map(Step::Inspect),
    ]
}
