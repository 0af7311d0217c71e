//! The real rendezvous machines with one fault each, in the real simulation: it must notice every one of them.
//!
//! A checker that misses faults proves nothing. `list.rs` names the faults, as changes of one place in the sources of
//! `elastic_coordinator::rendezvous`; the build script puts all of them in, each behind a switch; each test turns one
//! on and plays seeds until a promise is broken. The model's mutations test the protocol itself.
//!
//! ```text
//! cargo nextest run -p elastic-mutants
//! cargo test -p elastic-mutants table -- --ignored --nocapture    # which promise each breaks, and at which seed
//! ```

#![cfg(test)]
#![allow(missing_docs, dead_code, unreachable_pub, unused_imports)]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stdout)]
// The switches stand where an expression stood.
#![allow(clippy::nonminimal_bool, clippy::overly_complex_bool_expr, unused_parens, unused_variables)]

mod list;

use std::cell::Cell;

use scenario::Family;
use schedule::{Telling, run};

include!(concat!(env!("OUT_DIR"), "/modules.rs"));

// What the machines use of the rest of the crate.
use elastic_coordinator::{job, store, time};

/// Commits, with the credentials of the mutated machines.
mod checkpoint {
    use elastic_coordinator::job::{Checkpoint, Keys};
    use elastic_coordinator::store::{Revision, Txn};

    use crate::rendezvous::Credentials;

    pub fn commit_txn(keys: &Keys, by: &Credentials, checkpoint: &Checkpoint, pointer: Revision) -> Txn {
        let Credentials { node, created, round, current } = by.clone();
        let credentials = elastic_coordinator::rendezvous::Credentials { node, created, round, current };
        elastic_coordinator::workers::checkpoint::commit_txn(keys, &credentials, checkpoint, pointer)
    }
}

/// Seeds of each kind of scenario after which a mutant counts as missed.
const SEEDS: u64 = 4_000;

thread_local! {
    static ACTIVE: Cell<&'static str> = const { Cell::new("") };
}

/// Whether the mutant of this name is switched on.
fn on(name: &str) -> bool {
    ACTIVE.get() == name
}

/// The first seed at which a mutant breaks a promise, and which promise.
fn breach(name: &'static str) -> Option<(u64, schedule::Ran)> {
    ACTIVE.set(name);
    let seeds = (0..SEEDS).flat_map(|seed| [seed, Family::LATE + seed, Family::ROLES + seed]);
    let found = seeds.map(|seed| (seed, run(seed, None, Telling::Silent))).find(|(_, ran)| ran.breach.is_some());
    ACTIVE.set("");
    found
}

fn found(name: &'static str) {
    assert!(
        breach(name).is_some(),
        "the mutant {name} breaks no promise in {SEEDS} seeds: the simulation is blind to it"
    );
}

/// Without a fault nothing is found: also where batches are so small that a handful of nodes needs several.
#[test]
fn the_machines_as_they_are_keep_every_promise() {
    for seed in (0..500).flat_map(|seed| [seed, Family::LATE + seed, Family::ROLES + seed]) {
        let ran = run(seed, None, Telling::Silent);
        assert!(ran.breach.is_none(), "seed {seed}: {:?}", ran.breach);
    }
}

mod each_is_found {
    include!(concat!(env!("OUT_DIR"), "/tests.rs"));
}

#[test]
#[ignore = "prints a table for the docs"]
fn table() {
    println!("| mutant | what is changed | breaks | first seed |\n|---|---|---|---|");
    for mutant in list::MUTANTS.iter().filter(|mutant| !mutant.what.is_empty()) {
        let (promise, seed) = breach(mutant.name).map_or(("nothing".to_owned(), "–".to_owned()), |(seed, ran)| {
            let kind = match Family::of(seed) {
                Family::Late => "late ",
                Family::Role => "role ",
                _ => "",
            };
            (
                ran.breach.map(|breach| breach.promise.to_owned()).unwrap_or_default(),
                format!("{kind}{}", seed % Family::LATE),
            )
        });
        println!("| `{}` | {} | {promise} | {seed} |", mutant.name, mutant.what);
    }
}
