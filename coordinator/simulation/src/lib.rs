//! The real rendezvous machines with one fault each, in the real simulation: it must notice every one of them.
//!
//! A checker that misses faults proves nothing. Comments `// mutant NAME: FROM => TO` in the sources of
//! `elastic_rendezvous` name the faults; the build script puts all of them in, each behind a switch; each test turns one
//! on and runs seeds until a promise is broken. The model's mutations test the protocol itself.
//!
//! ```text
//! cargo nextest run -p elastic-simulation
//! cargo test -p elastic-simulation table -- --ignored --nocapture    # each mutant, which promise it breaks, at which
//!                                                       # seed; with ELASTIC_MUTANTS=NAME,… only these
//! ```

#![cfg(test)]
#![allow(missing_docs, dead_code, unreachable_pub, unused_imports)]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stdout)]
// The switches stand where an expression stood.
#![allow(
    clippy::double_parens,
    clippy::nonminimal_bool,
    clippy::overly_complex_bool_expr,
    unused_parens,
    unused_variables
)]

use std::cell::Cell;

use scenario::Family;
use schedule::{Telling, run};

include!(concat!(env!("OUT_DIR"), "/modules.rs"));

// Each mutant's name, place, text and changed text.
include!(concat!(env!("OUT_DIR"), "/table.rs"));

/// Commits, with the credentials of the mutated machines.
mod checkpoint {
    use elastic_rendezvous::job::{Checkpoint, Keys};
    use elastic_store::{Revision, Txn};

    use crate::machines::Credentials;

    pub fn commit_txn(keys: &Keys, by: &Credentials, checkpoint: &Checkpoint, pointer: Revision) -> Txn {
        let Credentials { node, created, round, current } = by.clone();
        let credentials = elastic_rendezvous::Credentials { node, created, round, current };
        elastic_node::requests::checkpoint::commit_txn(keys, &credentials, checkpoint, pointer)
    }
}

/// Seeds of each kind of scenario after which a mutant counts as missed.
const SEEDS: u64 = 4_000;

/// Where a search that takes long has found its mutant before. It begins there: a hint, no more. Where the machines have
/// changed since, it continues from the first seed.
const FOUND_AT: &[(&str, u64)] = &[
    ("a_successor_is_always_a_member", Family::ROLES + 142),
    ("fence_by_the_newer_proof", Family::ROLES + 68),
    ("word_without_age", Family::ROLES + 83),
    ("proven_by_the_answer", Family::ROLES + 207),
    ("reclaimed_in_spite_of_a_tombstone", Family::ROLES + 105),
    ("a_pause_lets_workers_rest", Family::PAUSES + 182),
    ("who_rests_is_not_paused", Family::PAUSES + 428),
    ("held_for_ever", Family::ROLES + 66),
    ("a_round_s_parts_are_not_guarded", Family::RESTORES + 44),
    ("a_leader_does_not_notice_a_restore", Family::RESTORES + 33),
    ("a_node_does_not_notice_a_restore", Family::RESTORES + 557),
    ("a_part_of_a_replica_joins", Family::REPLICAS + 88),
    ("generation_at_once", Family::ROLES + 7),
];

thread_local! {
    static ACTIVE: Cell<&'static str> = const { Cell::new("") };
}

/// Whether the mutant of this name is switched on.
fn on(name: &str) -> bool {
    ACTIVE.get() == name
}

/// Seeds of each kind of scenario.
fn of_each_kind(seed: u64) -> [u64; 9] {
    Family::FIRST.map(|first| first + seed)
}

/// A seed at which a mutant breaks a promise, the first of `hints` and all others; and which promise.
fn breach(name: &'static str, hints: impl Iterator<Item = u64>) -> Option<(u64, schedule::Ran)> {
    ACTIVE.set(name);
    let all = (0..SEEDS).flat_map(of_each_kind);
    let found =
        hints.chain(all).map(|seed| (seed, run(seed, None, Telling::Silent))).find(|(_, ran)| ran.breach.is_some());
    ACTIVE.set("");
    found
}

fn found(name: &'static str) {
    let hints = FOUND_AT.iter().filter(|(hinted, _)| *hinted == name).map(|(_, seed)| *seed);
    assert!(
        breach(name, hints).is_some(),
        "the mutant {name} breaks no promise in {SEEDS} seeds: the simulation is blind to it"
    );
}

/// Without a fault nothing is found: also where batches are so small that a handful of nodes needs several.
#[test]
fn the_machines_as_they_are_keep_every_promise() {
    for seed in (0..220).flat_map(of_each_kind) {
        if run(seed, None, Telling::Silent).breach.is_some() {
            let ran = run(seed, None, Telling::Kept);
            panic!("seed {seed}: {:?}\n\n{}\n\n{}", ran.breach, ran.scenario, ran.story);
        }
    }
}

mod each_is_found {
    include!(concat!(env!("OUT_DIR"), "/tests.rs"));
}

/// The failing schedules of mutants shrink to a few parts, which still break the same promise.
#[test]
fn schedules_shrink() {
    for (name, seed) in [("absent_is_gone", 0), ("no_tombstone", 0), ("word_without_age", Family::ROLES + 83)] {
        let (seed, ran) = breach(name, [seed].into_iter()).expect("the mutant is found");
        ACTIVE.set(name);
        let shrunk = shrink::shrink(seed, None);
        ACTIVE.set("");
        let promise = |ran: &schedule::Ran| ran.breach.as_ref().map(|breach| breach.promise);
        assert_eq!(promise(&shrunk.ran), promise(&ran), "{name}");
        println!("{name}: seed {seed}, {} of {} parts\n\n{shrunk}\n", shrunk.kept.len(), shrunk.whole);
        assert!(shrunk.kept.len() * 4 <= shrunk.whole, "{name}: {shrunk}");
    }
}

#[test]
#[ignore = "prints a table"]
fn table() {
    println!("| mutant | place | change | breaks | first seed |\n|---|---|---|---|---|");
    let only = std::env::var("ELASTIC_MUTANTS").ok();
    for [name, place, from, to] in MUTANTS {
        if only.as_ref().is_some_and(|names| !names.split(',').any(|other| other == *name)) {
            continue;
        }
        let (promise, seed) = match breach(name, std::iter::empty()) {
            Some((seed, ran)) => {
                let family = format!("{:?} {}", Family::of(seed), seed % Family::LATE);
                (ran.breach.map(|breach| breach.promise).unwrap_or_default(), family)
            }
            None => ("nothing", "–".to_owned()),
        };
        println!("| `{name}` | {place} | `{from}` → `{to}` | {promise} | {seed} |");
    }
}
