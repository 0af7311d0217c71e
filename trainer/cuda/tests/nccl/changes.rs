//! Groups that change: ranks come, leave and die, and each round has a new communicator.

use std::time::{Duration, Instant};

use crate::libraries::fake;
use crate::process::{LONG, Process, all, every, join, start};

#[test]
fn groups_of_every_size_sum() {
    let mut processes: [Process; 4] = start(&fake());
    for ranks in 1..=4 {
        let mut present: Vec<&mut Process> = processes[..ranks].iter_mut().collect();
        every(&join(&mut present, ranks as u64, LONG), "joined");
        every(&all(&mut present, "sum"), "right");
        every(&all(&mut present, "ordered"), "right");
    }
    every(&all(&mut processes.each_mut(), "leave"), "left");
}

#[test]
fn survivors_of_a_death_in_a_sum_name_the_lost_rank_and_sum_in_the_next_round() {
    let mut processes: [Process; 3] = start(&fake());
    every(&join(&mut processes.each_mut(), 1, LONG), "joined");
    every(&all(&mut processes.each_mut(), "sum"), "right");
    let [a, b, mut c] = processes;
    let mut survivors = [a, b];
    assert_eq!(c.ask("set FAKE_NCCL_HANG ncclGroupEnd"), "set");
    c.begin("sum");
    survivors.iter_mut().for_each(|process| process.begin("sum"));
    let died = Instant::now();
    drop(c);
    for survivor in &mut survivors {
        let answer = survivor.answer();
        assert!(answer.starts_with("error: lost rank 2"), "{answer}");
    }
    assert!(died.elapsed() < LONG / 3, "noticed after {:?}", died.elapsed());
    every(&join(&mut survivors.each_mut(), 2, LONG), "joined");
    every(&all(&mut survivors.each_mut(), "sum"), "right");
    every(&all(&mut survivors.each_mut(), "leave"), "left");
}

#[test]
fn a_slow_nccl_changes_nothing_but_the_time() {
    let mut processes: [Process; 3] = start(&fake());
    every(&all(&mut processes.each_mut(), "set FAKE_NCCL_SLOW 40"), "set");
    let [a, b, c] = &mut processes;
    every(&join(&mut [&mut *a, &mut *b], 1, LONG), "joined");
    every(&join(&mut [&mut *a, &mut *b, &mut *c], 2, LONG), "joined");
    for task in ["sum", "ordered"] {
        every(&all(&mut [&mut *a, &mut *b, &mut *c], task), "right");
    }
    every(&join(&mut [&mut *a, &mut *c], 3, LONG), "joined");
    every(&all(&mut [&mut *a, &mut *c], "sum"), "right");
    every(&all(&mut [a, c], "leave"), "left");
}

#[test]
fn a_rank_that_is_refused_once_joins_the_next_round() {
    let mut processes: [Process; 3] = start(&fake());
    every(&join(&mut processes.each_mut(), 1, LONG), "joined");
    let [mut a, mut b, c] = processes;
    drop(c);
    assert_eq!(a.ask("set FAKE_NCCL_FAIL ncclCommInitRankConfig:2"), "set");
    let answers = join(&mut [&mut a, &mut b], 2, Duration::from_secs(2));
    assert!(answers[0].contains("refused by [0") && answers[0].contains("failed with code 2"), "{answers:?}");
    assert_eq!(a.ask("set FAKE_NCCL_FAIL"), "set");
    every(&join(&mut [&mut a, &mut b], 3, LONG), "joined");
    every(&all(&mut [&mut a, &mut b], "sum"), "right");
}

#[test]
fn a_rank_that_comes_back_with_an_old_communicator_joins() {
    let mut processes: [Process; 3] = start(&fake());
    let [a, b, c] = &mut processes;
    every(&join(&mut [&mut *a, &mut *b], 1, LONG), "joined");
    // Without the first rank, and then with it again
    every(&join(&mut [&mut *b, &mut *c], 2, LONG), "joined");
    every(&join(&mut [&mut *b, &mut *c, &mut *a], 3, LONG), "joined");
    every(&all(&mut [b, c, a], "sum"), "right");
}
