//! Promises about guarded transactions, revisions and reads.

use elastic_store::{Guard, Op, OpResult, Revision, Txn};

use super::{Case, Ctx, is_invalid};
use crate::contract_cases;

/// Every promise of this group.
pub const CASES: &[Case] = contract_cases![
    put_over_a_live_key_keeps_its_create_revision,
    recreated_key_has_a_new_create_revision,
    all_writes_of_a_transaction_share_one_revision,
    reads_do_not_move_the_revision,
    failed_guard_takes_the_else_branch,
    failed_guard_without_else_changes_nothing,
    guard_on_create_revision,
    guard_on_mod_revision,
    guard_on_absence,
    guard_on_empty_prefix,
    guards_are_a_conjunction,
    reads_see_the_writes_before_them_in_the_transaction,
    range_is_in_key_order,
    last_is_the_last_in_key_order,
    prefix_is_no_neighbour,
    prefix_that_ends_in_the_highest_characters,
    count_counts,
    delete_reports_how_many,
    deleting_nothing_does_not_move_the_revision,
    delete_prefix_spares_neighbours,
    values_are_bytes,
    full_transaction_of_128_operations,
    too_many_operations_are_refused,
    key_written_twice_is_refused,
    key_put_and_prefix_deleted_is_refused,
    concurrent_guarded_increments_lose_none,
];

/// The last key of a prefix is read alone, whatever was written last.
pub async fn last_is_the_last_in_key_order(ctx: Ctx) {
    for name in ["n/2", "n/3", "n/1", "o"] {
        ctx.put(name, name).await;
    }
    let last = async |name: &str| {
        let result = ctx.txn(Txn::of([Op::last(ctx.key(name))])).await;
        result.results[0].values().iter().map(|kv| kv.key.clone()).collect::<Vec<_>>()
    };
    assert_eq!(last("n/").await, [ctx.key("n/3")]);
    assert_eq!(last("none/").await, Vec::<String>::new());
}

/// A put over a live key moves its mod revision and keeps its create revision.
pub async fn put_over_a_live_key_keeps_its_create_revision(ctx: Ctx) {
    let first = ctx.put("a", "1").await;
    let second = ctx.put("a", "2").await;
    assert!(second > first);
    let kv = ctx.store.get(&ctx.key("a")).await.unwrap().unwrap();
    assert_eq!((kv.create_revision, kv.mod_revision, kv.value), (first, second, b"2".to_vec()));
    assert_eq!(kv.lease, None);
}

/// A key that was deleted and put again has a new create revision.
pub async fn recreated_key_has_a_new_create_revision(ctx: Ctx) {
    let first = ctx.put("a", "1").await;
    assert!(ctx.store.delete(vec![], &ctx.key("a")).await.unwrap());
    assert_eq!(ctx.store.get(&ctx.key("a")).await.unwrap(), None);
    let again = ctx.put("a", "2").await;
    let kv = ctx.store.get(&ctx.key("a")).await.unwrap().unwrap();
    assert!(again > first.next(), "the delete has a revision too");
    assert_eq!((kv.create_revision, kv.mod_revision), (again, again));
}

/// Everything that one transaction writes has the revision that the transaction reports.
pub async fn all_writes_of_a_transaction_share_one_revision(ctx: Ctx) {
    let result = ctx.txn(Txn::of([Op::put(ctx.key("a"), "1"), Op::put(ctx.key("b"), "2")])).await;
    assert!(result.succeeded);
    assert_eq!(result.results, [OpResult::Put, OpResult::Put]);
    let (values, read_at) = ctx.store.range(&ctx.prefix).await.unwrap();
    assert!(read_at >= result.revision);
    assert!(values.iter().all(|kv| kv.mod_revision == result.revision && kv.create_revision == result.revision));
    assert_eq!(values.len(), 2);
}

/// A read-only transaction reports a revision and makes none: the next write's is not skipped.
pub async fn reads_do_not_move_the_revision(ctx: Ctx) {
    let written = ctx.put("a", "1").await;
    let read = ctx.txn(Txn::of([Op::get(ctx.key("a")), Op::range(&ctx.prefix), Op::count(&ctx.prefix)])).await;
    assert!(read.revision >= written);
    let values = read.results[0].values();
    assert_eq!(values[0].mod_revision, written);
}

/// When a guard fails, the else branch is done instead, and its results are returned.
pub async fn failed_guard_takes_the_else_branch(ctx: Ctx) {
    ctx.put("a", "1").await;
    let txn = Txn::of([Op::put(ctx.key("then"), "x")])
        .guarded([Guard::absent(ctx.key("a"))])
        .or_else([Op::get(ctx.key("a")), Op::put(ctx.key("else"), "y")]);
    let result = ctx.txn(txn).await;
    assert!(!result.succeeded);
    assert_eq!(result.results.len(), 2);
    assert_eq!(result.results[0].value().unwrap().value, b"1");
    assert_eq!(ctx.value("then").await, None);
    let other = ctx.store.get(&ctx.key("else")).await.unwrap().unwrap();
    assert_eq!(other.mod_revision, result.revision);
}

/// When a guard fails and there is no else branch, nothing changes.
pub async fn failed_guard_without_else_changes_nothing(ctx: Ctx) {
    let key = ctx.key("a");
    assert_eq!(ctx.store.put(vec![Guard::created(&key, Revision(1))], Op::put(&key, "x")).await.unwrap(), None);
    assert!(!ctx.store.delete(vec![Guard::created(&key, Revision(1))], &key).await.unwrap());
    assert_eq!(ctx.value("a").await, None);
}

/// Whether a guard holds, asked without changing anything.
async fn holds(ctx: &Ctx, guard: Guard) -> bool {
    ctx.txn(Txn::of([]).guarded([guard])).await.succeeded
}

/// The create guard holds for the create revision alone, also after later puts.
pub async fn guard_on_create_revision(ctx: Ctx) {
    let created = ctx.put("a", "1").await;
    let modified = ctx.put("a", "2").await;
    assert!(holds(&ctx, Guard::created(ctx.key("a"), created)).await);
    assert!(!holds(&ctx, Guard::created(ctx.key("a"), modified)).await);
    assert!(!holds(&ctx, Guard::created(ctx.key("a"), Revision(created.0 - 1))).await);
    assert!(!holds(&ctx, Guard::created(ctx.key("missing"), created)).await);
}

/// The mod guard holds for the last write alone: a put of the same value breaks it.
pub async fn guard_on_mod_revision(ctx: Ctx) {
    let created = ctx.put("a", "1").await;
    assert!(holds(&ctx, Guard::modified(ctx.key("a"), created)).await);
    let modified = ctx.put("a", "1").await;
    assert!(!holds(&ctx, Guard::modified(ctx.key("a"), created)).await);
    assert!(holds(&ctx, Guard::modified(ctx.key("a"), modified)).await);
    assert!(holds(&ctx, Guard::modified(ctx.key("missing"), Revision::NONE)).await);
    assert!(!holds(&ctx, Guard::modified(ctx.key("a"), Revision::NONE)).await);
}

/// The absence guard holds before a key is put and after it is deleted.
pub async fn guard_on_absence(ctx: Ctx) {
    assert!(holds(&ctx, Guard::absent(ctx.key("a"))).await);
    ctx.put("a", "1").await;
    assert!(!holds(&ctx, Guard::absent(ctx.key("a"))).await);
    ctx.store.delete(vec![], &ctx.key("a")).await.unwrap();
    assert!(holds(&ctx, Guard::absent(ctx.key("a"))).await);
}

/// The empty guard holds exactly while no key has the prefix, be it the prefix itself or something under it.
pub async fn guard_on_empty_prefix(ctx: Ctx) {
    let nodes = ctx.key("nodes/");
    assert!(holds(&ctx, Guard::empty(&nodes)).await);
    ctx.put("nodes0", "a neighbour").await;
    ctx.put("nodes", "a shorter one").await;
    assert!(holds(&ctx, Guard::empty(&nodes)).await);
    ctx.put("nodes/a", "1").await;
    ctx.put("nodes/b", "1").await;
    assert!(!holds(&ctx, Guard::empty(&nodes)).await);
    ctx.store.delete(vec![], &ctx.key("nodes/a")).await.unwrap();
    assert!(!holds(&ctx, Guard::empty(&nodes)).await);
    ctx.store.delete(vec![], &ctx.key("nodes/b")).await.unwrap();
    assert!(holds(&ctx, Guard::empty(&nodes)).await);
    ctx.put("nodes/", "the prefix itself").await;
    assert!(!holds(&ctx, Guard::empty(&nodes)).await);
    assert!(!holds(&ctx, Guard::empty("")).await, "the empty prefix covers every key");
}

/// One failing guard among holding ones fails them all.
pub async fn guards_are_a_conjunction(ctx: Ctx) {
    let a = ctx.put("a", "1").await;
    let good = [Guard::created(ctx.key("a"), a), Guard::absent(ctx.key("b")), Guard::empty(ctx.key("c/"))];
    let key = ctx.key("out");
    assert!(ctx.store.put(good.to_vec(), Op::put(&key, "1")).await.unwrap().is_some());
    for spoilt in 0..good.len() {
        let mut guards = good.to_vec();
        guards[spoilt] = Guard::absent(ctx.key("a"));
        assert_eq!(ctx.store.put(guards, Op::put(&key, "2")).await.unwrap(), None, "guard {spoilt} is heeded");
    }
    assert_eq!(ctx.value("out").await.as_deref(), Some("1"));
}

/// Operations of a branch run in order: a count after a put counts it. Barriers count their arrivals this way.
pub async fn reads_see_the_writes_before_them_in_the_transaction(ctx: Ctx) {
    ctx.put("b/1", "x").await;
    let before_and_after = [
        Op::count(ctx.key("b/")),
        Op::put(ctx.key("b/2"), "y"),
        Op::count(ctx.key("b/")),
        Op::get(ctx.key("b/2")),
        Op::delete(ctx.key("b/1")),
        Op::range(ctx.key("b/")),
    ];
    let result = ctx.txn(Txn::of(before_and_after)).await;
    assert_eq!(result.results[0], OpResult::Count(1));
    assert_eq!(result.results[2], OpResult::Count(2));
    assert_eq!(result.results[3].value().unwrap().mod_revision, result.revision);
    let left: Vec<_> = result.results[5].values().iter().map(|kv| kv.key.clone()).collect();
    assert_eq!(left, [ctx.key("b/2")]);
}

/// A range is in byte order of its keys, whatever the order of writing.
pub async fn range_is_in_key_order(ctx: Ctx) {
    for name in ["b", "a/2", "a", "a/10", "ä", "B", "a0"] {
        ctx.put(name, "x").await;
    }
    let (values, _) = ctx.store.range(&ctx.prefix).await.unwrap();
    let keys: Vec<_> = values.into_iter().map(|kv| kv.key).collect();
    let expected: Vec<_> = ["B", "a", "a/10", "a/2", "a0", "b", "ä"].iter().map(|name| ctx.key(name)).collect();
    assert_eq!(keys, expected);
}

/// The prefix `a/` covers neither `a` nor `a0`, which are its neighbours on either side.
pub async fn prefix_is_no_neighbour(ctx: Ctx) {
    for name in ["a", "a.", "a/", "a/x", "a0"] {
        ctx.put(name, "x").await;
    }
    let (values, _) = ctx.store.range(&ctx.key("a/")).await.unwrap();
    let keys: Vec<_> = values.into_iter().map(|kv| kv.key).collect();
    assert_eq!(keys, [ctx.key("a/"), ctx.key("a/x")]);
    assert_eq!(ctx.store.range(&ctx.key("nothing/")).await.unwrap().0, []);
}

/// A prefix that ends in the highest code points ends where it should. (As UTF-8, keys never hold the byte 0xff.)
pub async fn prefix_that_ends_in_the_highest_characters(ctx: Ctx) {
    let high = "\u{10ffff}\u{10ffff}";
    for name in [high.to_owned(), format!("{high}x"), format!("{high}{high}"), "\u{10ffff}".to_owned()] {
        ctx.put(&name, "x").await;
    }
    let prefix = ctx.key(high);
    assert_eq!(ctx.store.range(&prefix).await.unwrap().0.len(), 3);
    let result = ctx.txn(Txn::of([Op::count(&prefix), Op::delete_prefix(&prefix)])).await;
    assert_eq!(result.results, [OpResult::Count(3), OpResult::Deleted(3)]);
    assert_eq!(ctx.value("\u{10ffff}").await.as_deref(), Some("x"));
}

/// A count is the number of keys with the prefix.
pub async fn count_counts(ctx: Ctx) {
    let count = async |name: &str| ctx.txn(Txn::of([Op::count(ctx.key(name))])).await.results;
    assert_eq!(count("c/").await, [OpResult::Count(0)]);
    for n in 0..7 {
        ctx.put(&format!("c/{n}"), "x").await;
    }
    ctx.put("c", "a neighbour").await;
    assert_eq!(count("c/").await, [OpResult::Count(7)]);
}

/// Deletes say how many keys they deleted.
pub async fn delete_reports_how_many(ctx: Ctx) {
    for name in ["a", "d/1", "d/2", "d/3"] {
        ctx.put(name, "x").await;
    }
    let deletes = [Op::delete(ctx.key("a")), Op::delete_prefix(ctx.key("d/")), Op::delete(ctx.key("never"))];
    let result = ctx.txn(Txn::of(deletes)).await;
    assert_eq!(result.results, [OpResult::Deleted(1), OpResult::Deleted(3), OpResult::Deleted(0)]);
    assert_eq!(ctx.store.range(&ctx.prefix).await.unwrap().0, []);
}

/// A delete that finds nothing makes no event: a watch sees only the put after it.
pub async fn deleting_nothing_does_not_move_the_revision(ctx: Ctx) {
    let mut watched = ctx.watch_all(ctx.revision().await.next()).await;
    ctx.store.delete(vec![], &ctx.key("never")).await.unwrap();
    ctx.txn(Txn::of([Op::delete_prefix(ctx.key("never/"))])).await;
    let put = ctx.put("a", "1").await;
    let events = watched.collect(1).await;
    assert_eq!(events.iter().map(|event| event.revision()).collect::<Vec<_>>(), [put]);
}

/// Deleting a prefix leaves its neighbours alone.
pub async fn delete_prefix_spares_neighbours(ctx: Ctx) {
    for name in ["d", "d.", "d/1", "d/2", "d0"] {
        ctx.put(name, "x").await;
    }
    ctx.txn(Txn::of([Op::delete_prefix(ctx.key("d/"))])).await;
    let (values, _) = ctx.store.range(&ctx.prefix).await.unwrap();
    let keys: Vec<_> = values.into_iter().map(|kv| kv.key).collect();
    assert_eq!(keys, [ctx.key("d"), ctx.key("d."), ctx.key("d0")]);
}

/// Values are bytes: empty, not UTF-8, large.
pub async fn values_are_bytes(ctx: Ctx) {
    for value in [vec![], vec![0, 0xff, 0xfe, 0x80], vec![b'x'; 256 * 1024]] {
        ctx.txn(Txn::of([Op::put(ctx.key("a"), value.clone())])).await;
        assert_eq!(ctx.store.get(&ctx.key("a")).await.unwrap().unwrap().value, value);
    }
}

/// 128 operations fit into one branch, and happen as one.
pub async fn full_transaction_of_128_operations(ctx: Ctx) {
    let puts: Vec<_> = (0..128).map(|n| Op::put(ctx.key(&format!("{n:03}")), n.to_string())).collect();
    let result = ctx.txn(Txn::of(puts)).await;
    assert_eq!(result.results.len(), 128);
    let (values, _) = ctx.store.range(&ctx.prefix).await.unwrap();
    assert_eq!(values.len(), 128);
    assert!(values.iter().all(|kv| kv.mod_revision == result.revision));
}

/// 129 operations are refused, and none happens.
pub async fn too_many_operations_are_refused(ctx: Ctx) {
    let puts: Vec<_> = (0..129).map(|n| Op::put(ctx.key(&n.to_string()), "x")).collect();
    assert!(is_invalid(&ctx.store.txn(Txn::of(puts)).await));
    assert_eq!(ctx.store.range(&ctx.prefix).await.unwrap().0, []);
}

/// A branch that writes one key twice is refused, and nothing happens.
pub async fn key_written_twice_is_refused(ctx: Ctx) {
    let twice = [Op::put(ctx.key("a"), "1"), Op::put(ctx.key("b"), "1"), Op::put(ctx.key("a"), "2")];
    assert!(is_invalid(&ctx.store.txn(Txn::of(twice.clone())).await));
    let untaken = Txn::of([]).or_else(twice);
    assert!(is_invalid(&ctx.store.txn(untaken).await), "the branch not taken is checked too");
    assert_eq!(ctx.store.range(&ctx.prefix).await.unwrap().0, []);
    let either = Txn::of([Op::put(ctx.key("a"), "1")]).or_else([Op::put(ctx.key("a"), "2")]);
    assert!(ctx.txn(either).await.succeeded, "once in each branch is fine");
}

/// A branch that puts a key and deletes a prefix that covers it is refused in the same way.
pub async fn key_put_and_prefix_deleted_is_refused(ctx: Ctx) {
    let both = [Op::delete_prefix(ctx.key("d/")), Op::put(ctx.key("d/1"), "x")];
    assert!(is_invalid(&ctx.store.txn(Txn::of(both)).await));
    let apart = [Op::delete_prefix(ctx.key("d/")), Op::put(ctx.key("d"), "x")];
    assert!(ctx.txn(Txn::of(apart)).await.succeeded);
}

/// Increments guarded by the mod revision, from several writers at once: the sum is right.
pub async fn concurrent_guarded_increments_lose_none(ctx: Ctx) {
    const WRITERS: usize = 5;
    const EACH: usize = 10;
    let mut writers = tokio::task::JoinSet::new();
    for _ in 0..WRITERS {
        let ctx = ctx.clone();
        writers.spawn(async move {
            let key = ctx.key("counter");
            let mut done = 0;
            while done < EACH {
                let now = ctx.store.get(&key).await.unwrap();
                let revision = now.as_ref().map_or(Revision::NONE, |kv| kv.mod_revision);
                let count: usize = now.map_or(0, |kv| String::from_utf8(kv.value).unwrap().parse().unwrap());
                let put = Op::put(&key, (count + 1).to_string());
                if ctx.store.put(vec![Guard::modified(&key, revision)], put).await.unwrap().is_some() {
                    done += 1;
                }
            }
        });
    }
    while let Some(writer) = writers.join_next().await {
        writer.expect("a writer");
    }
    assert_eq!(ctx.value("counter").await, Some((WRITERS * EACH).to_string()));
}
