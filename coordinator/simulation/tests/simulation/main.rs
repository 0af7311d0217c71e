//! The real machines in a simulated world: every schedule comes from a seed, so a seed repeats it. The package
//! `tests` runs a real store and real processes.
//!
//! ```text
//! ELASTIC_SEED=123 cargo test -p elastic-simulation --test simulation replay -- --ignored --nocapture
//! ```
//!
//! A seed that breaks a promise ends as a short schedule that still breaks it, see `shrink.rs`.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stdout)]

mod blow;
mod calls;
mod carry;
mod clock;
mod coverage;
mod dice;
mod faults;
mod network;
mod process;
mod promises;
mod refusals;
mod restores;
mod roles;
mod scenario;
mod schedule;
mod service;
mod shrink;
mod story;
mod workers;
mod world;

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use coverage::Coverage;
use scenario::Family;
use schedule::{Telling, run, run_edited};
use shrink::{Edit, shrink};
use world::Mutation;

/// Seeds of one kind of scenario in one test.
const PART: u64 = 360;

/// Plays these seeds; their coverage.
fn play(seeds: Range<u64>) -> Coverage {
    let mut coverage = Coverage::default();
    for seed in seeds {
        let ran = run(seed, None, Telling::Silent);
        if ran.breach.is_some() {
            panic!("{}", shrink(seed, None));
        }
        coverage.add(&ran.coverage);
    }
    coverage
}

/// Messages, answers and processes as late as a lease is long, and hosts that never reach each other.
#[test]
fn what_is_late() {
    play(Family::LATE..Family::LATE + PART);
}

/// Faults for a role: the leader, members, nodes that wait.
#[test]
fn roles() {
    play(Family::ROLES..Family::ROLES + PART);
}

/// Jobs that are paused and resumed, whatever else happens.
#[test]
fn pauses() {
    play(Family::PAUSES..Family::PAUSES + PART);
}

/// Jobs that exclude nodes, by themselves and by their operators.
#[test]
fn exclusions() {
    play(Family::EXCLUSIONS..Family::EXCLUSIONS + PART);
}

/// Jobs that exclude nodes and then need them.
#[test]
fn needs() {
    play(Family::NEEDS..Family::NEEDS + PART);
}

/// Requests that the store refuses, and writes long after their decisions.
#[test]
fn refusals() {
    play(Family::REFUSALS..Family::REFUSALS + PART);
}

/// A store that goes back to what it was, as a whole or in a record.
#[test]
fn restores() {
    play(Family::RESTORES..Family::RESTORES + PART);
}

/// Jobs whose replicas have several nodes.
#[test]
fn replicas() {
    play(Family::REPLICAS..Family::REPLICAS + PART);
}

#[test]
fn crowds() {
    play(Family::CROWDS..Family::CROWDS + 12);
}

/// Runs the seed of the environment variable `ELASTIC_SEED`, and prints everything; of its schedule only the parts in
/// `ELASTIC_ONLY`, if set.
#[test]
#[ignore = "plays one seed, for people"]
fn replay() {
    let seed = number("ELASTIC_SEED").expect("ELASTIC_SEED says which seed to play");
    let edit = std::env::var("ELASTIC_ONLY").ok().map(|only| {
        let kept =
            only.split_terminator(',').map(|part| part.parse().unwrap_or_else(|error| panic!("ELASTIC_ONLY: {error}")));
        Edit::of(&run(seed, None, Telling::Silent), kept)
    });
    let ran = run_edited(seed, None, edit, Telling::Aloud);
    println!("{}", ran.scenario);
    if let Some(breach) = ran.breach {
        panic!("seed {seed} breaks the promise \"{}\": {}", breach.promise, breach.what);
    }
}

/// The number in an environment variable; none where it is not set.
fn number(name: &str) -> Option<u64> {
    let text = std::env::var(name).ok()?;
    Some(text.parse().unwrap_or_else(|error| panic!("{name}={text} is no number of a seed: {error}")))
}

/// Plays as many seeds as the environment variable `ELASTIC_SEEDS` says, from `ELASTIC_FROM` on, by turns of anything, of
/// what is late, of roles, of pauses, of exclusions, of needs, of refusals, of restores and of replicas: for long
/// searches.
#[test]
#[ignore = "takes as long as ELASTIC_SEEDS says"]
fn search() {
    let count = number("ELASTIC_SEEDS").expect("ELASTIC_SEEDS says how many seeds to play");
    let from = number("ELASTIC_FROM").unwrap_or(0);
    let (next, broken) = (AtomicU64::new(0), AtomicU64::new(0));
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                while let Some(number) = Some(next.fetch_add(1, Relaxed)).filter(|&number| number < count) {
                    let seed = from + number + Family::FIRST[number as usize % Family::FIRST.len()];
                    if let Some(breach) = run(seed, None, Telling::Silent).breach {
                        println!("seed {seed} breaks the promise \"{}\": {:.400}", breach.promise, breach.what);
                        if broken.fetch_add(1, Relaxed) == 0 {
                            println!("{}", shrink(seed, None));
                        }
                    }
                    if number % 10_000 == 9_999 {
                        println!("{} seeds played", number + 1);
                    }
                }
            });
        }
    });
    println!("{count} seeds played from {from} on, by turns of each kind but crowds");
    assert_eq!(broken.into_inner(), 0, "of {count} seeds");
}

#[test]
fn a_seed_is_played_the_same_way_twice() {
    for seed in 0..5 {
        let (one, two) = (run(seed, None, Telling::Kept), run(seed, None, Telling::Kept));
        assert!(!one.story.is_empty());
        assert_eq!(one.story, two.story);
    }
}

/// The checker must find a fault that is put in on purpose.
fn found(mutation: Mutation, promise: &str) {
    const SEEDS: u64 = 20_000;
    let breaches = (0..SEEDS).filter_map(|seed| run(seed, Some(mutation), Telling::Silent).breach);
    let mut others = Vec::new();
    for breach in breaches {
        if breach.promise == promise {
            return;
        }
        others.push(breach.promise);
    }
    panic!("{mutation:?} breaks \"{promise}\" in none of {SEEDS} seeds; it breaks {others:?}");
}

#[test]
fn a_guard_that_sleeps_is_found() {
    found(Mutation::GuardSleeps, "one group at work");
}

#[test]
fn a_hint_taken_for_a_death_is_found() {
    found(Mutation::HintsConfirm, "one group at work");
}

#[test]
fn a_leader_that_vouches_for_the_unheard_is_found() {
    found(Mutation::WordVouchesForAll, "one group at work");
}

#[test]
fn leaders_that_are_not_guarded_by_the_round_are_found() {
    found(Mutation::NoRound, "agreement");
}

#[test]
fn leaders_that_are_not_guarded_at_all_are_found() {
    found(Mutation::NoGuards, "agreement");
}

#[test]
fn commits_without_a_fence_are_found() {
    found(Mutation::CommitUnfenced, "fencing");
}

#[test]
fn workers_that_only_claim_to_have_quiesced_are_found() {
    found(Mutation::QuiescedTooSoon, "one group at work");
}

/// Anything, over so many seeds that the machines get into every corner that there is.
#[test]
fn anything_into_every_corner() {
    const SEEDS: u64 = 4_000;
    let halves = std::thread::scope(|scope| {
        let halves = [0..SEEDS / 2, SEEDS / 2..SEEDS].map(|seeds| scope.spawn(|| play(seeds)));
        halves.map(|half| half.join().unwrap_or_else(|breach| std::panic::resume_unwind(breach)))
    });
    let mut all = Coverage::default();
    halves.iter().for_each(|half| all.add(half));
    let wrong = all.wrong();
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
