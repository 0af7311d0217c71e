//! Groups that change: ranks come, leave and die, and the others keep their communicator.

use std::path::Path;
use std::time::{Duration, Instant};

use crate::libraries::{fake, without};
use crate::process::{LONG, Process, all, every, join, start};

#[test]
fn groups_of_every_size_sum() {
    let mut processes: [Process; 4] = start(&fake());
    for ranks in 1..=4 {
        let mut present: Vec<&mut Process> = processes[..ranks].iter_mut().collect();
        let way = if ranks == 1 { "Renew" } else { "Grow" };
        every(&join(&mut present, ranks as u64, LONG), way);
        every(&all(&mut present, "sum"), "right");
        every(&all(&mut present, "ordered"), "right");
    }
    every(&all(&mut processes.each_mut(), "leave"), "left");
}

/// One of three dies in the middle of a sum: what the survivors report, and how they continue.
fn after_a_death(library: &Path, expected: &str) {
    let mut processes: [Process; 3] = start(library);
    every(&join(&mut processes.each_mut(), 1, LONG), "Renew");
    every(&all(&mut processes.each_mut(), "sum"), "right");
    let [a, b, mut c] = processes;
    let mut survivors = [a, b];
    assert_eq!(c.ask("set FAKE_NCCL_HANG ncclAllReduce"), "set");
    c.begin("sum");
    survivors.iter_mut().for_each(|process| process.begin("sum"));
    let died = Instant::now();
    drop(c);
    for survivor in &mut survivors {
        let answer = survivor.answer();
        assert!(answer.starts_with("error: lost rank 2"), "{answer}");
    }
    assert!(died.elapsed() < LONG / 3, "noticed after {:?}", died.elapsed());
    every(&join(&mut survivors.each_mut(), 2, LONG), expected);
    every(&all(&mut survivors.each_mut(), "sum"), "right");
    every(&all(&mut survivors.each_mut(), "leave"), "left");
}

#[test]
fn survivors_of_a_death_shrink() {
    after_a_death(&fake(), "Shrink { without: [2], revoke: true }");
}

#[test]
fn survivors_whose_library_cannot_shrink_begin_anew() {
    let folder = tempfile::tempdir().unwrap();
    after_a_death(&without(&["ncclCommShrink", "ncclCommRevoke"], folder.path()), "Renew");
}

/// One of three leaves, and the shrink fails for one of the others: all make a new communicator.
fn after_a_bad_shrink(fault: &str) {
    let mut processes: [Process; 3] = start(&fake());
    every(&join(&mut processes.each_mut(), 1, LONG), "Renew");
    let [mut a, mut b, c] = processes;
    drop(c);
    assert_eq!(a.ask(&format!("set {fault}")), "set");
    every(&join(&mut [&mut a, &mut b], 2, Duration::from_secs(2)), "Renew");
    every(&all(&mut [&mut a, &mut b], "sum"), "right");
}

#[test]
fn a_shrink_that_fails_for_one_is_made_anew_for_all() {
    after_a_bad_shrink("FAKE_NCCL_FAIL ncclCommShrink:2");
}

#[test]
fn a_shrink_that_hangs_is_given_up_and_nothing_of_it_stays() {
    // NCCL hands out the child when its parent is aborted. The stand-in ends a process that keeps a second
    // communicator.
    after_a_bad_shrink("FAKE_NCCL_HANG ncclCommShrink");
}

#[test]
fn a_slow_nccl_changes_nothing_but_the_time() {
    let mut processes: [Process; 3] = start(&fake());
    every(&all(&mut processes.each_mut(), "set FAKE_NCCL_SLOW 40"), "set");
    let [a, b, c] = &mut processes;
    every(&join(&mut [&mut *a, &mut *b], 1, LONG), "Renew");
    every(&join(&mut [&mut *a, &mut *b, &mut *c], 2, LONG), "Grow");
    for task in ["sum", "ordered"] {
        every(&all(&mut [&mut *a, &mut *b, &mut *c], task), "right");
    }
    every(&join(&mut [&mut *a, &mut *c], 3, LONG), "Shrink { without: [1], revoke: false }");
    every(&all(&mut [&mut *a, &mut *c], "sum"), "right");
    every(&all(&mut [a, c], "leave"), "left");
}

#[test]
fn whoever_comes_joins_those_who_are_there() {
    let folder = tempfile::tempdir().unwrap();
    let old = without(&["ncclCommGrow"], folder.path());
    for (joiner, way) in [(fake(), "Grow"), (old, "Renew")] {
        let mut processes: [Process; 2] = start(&fake());
        every(&join(&mut processes.each_mut(), 1, LONG), "Renew");
        let ([a, b], mut c) = (&mut processes, Process::start(&joiner));
        every(&join(&mut [&mut *a, &mut *b, &mut c], 2, LONG), way);
        every(&all(&mut [&mut *a, &mut *b, &mut c], "sum"), "right");
        // And without the first rank, after all have done their part.
        every(&join(&mut [&mut *b, &mut c], 3, LONG), "Shrink { without: [0], revoke: false }");
        every(&all(&mut [&mut *b, &mut c], "sum"), "right");
        // The first rank comes back, with its old communicator.
        every(&join(&mut [&mut *b, &mut c, &mut *a], 4, LONG), way);
        every(&all(&mut [b, &mut c, a], "sum"), "right");
    }
}
