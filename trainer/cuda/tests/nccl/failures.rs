//! NCCL that hangs, fails or does not return from a call, while all ranks live.

use std::time::{Duration, Instant};

use crate::libraries::fake;
use crate::process::{LONG, Process, all, every, join, start};
use crate::rank::NUMBERS;

#[test]
fn a_rank_that_hangs_is_given_up_after_the_deadline() {
    let mut processes: [Process; 3] = start(&fake());
    let (short, folder) = (Duration::from_secs(2), tempfile::tempdir().unwrap());
    every(&all(&mut processes.each_mut(), &format!("records {}", folder.path().display())), "set");
    every(&join(&mut processes.each_mut(), 1, short), "joined");
    every(&all(&mut processes.each_mut(), "sum"), "right");
    let [a, b, mut c] = processes;
    assert_eq!(c.ask("set FAKE_NCCL_HANG ncclGroupEnd"), "set");
    let mut survivors = [a, b];
    c.begin("sum");
    survivors.iter_mut().for_each(|process| process.begin("sum"));
    for survivor in &mut survivors {
        let answer = survivor.answer();
        assert!(answer.contains("did not end within"), "{answer}");
    }
    let record = std::fs::read(folder.path().join("collectives-round-1-rank-0.json")).unwrap();
    let record: serde_json::Value = serde_json::from_slice(&record).unwrap();
    let [.., done, last] = &record["operations"].as_array().unwrap()[..] else { panic!("{record}") };
    assert_eq!((&done["transport"], &done["state"]), (&"nccl".into(), &"done".into()));
    assert_eq!((&last["transport"], &last["operation"]), (&"nccl".into(), &"ordered sum".into()));
    assert_eq!((&last["state"], &last["bytes"]), (&"given up".into(), &(NUMBERS * 4).into()));
    every(&join(&mut survivors.each_mut(), 2, LONG), "joined");
    every(&all(&mut survivors.each_mut(), "sum"), "right");
}

#[test]
fn an_error_of_nccls_names_the_peer_that_is_gone() {
    let mut processes: [Process; 3] = start(&fake());
    every(&all(&mut processes.each_mut(), "set FAKE_NCCL_DEATHS seen"), "set");
    every(&join(&mut processes.each_mut(), 1, LONG), "joined");
    let [mut a, mut b, mut c] = processes;
    assert_eq!(c.ask("set FAKE_NCCL_HANG ncclGroupEnd"), "set");
    [&mut a, &mut b, &mut c].into_iter().for_each(|process| process.begin("sum"));
    drop(c);
    for survivor in [&mut a, &mut b] {
        let answer = survivor.answer();
        assert!(answer.starts_with("error: lost rank 2"), "{answer}");
    }
    // What fails though all ranks live is a failure of NCCL.
    every(&join(&mut [&mut a, &mut b], 2, LONG), "joined");
    every(&all(&mut [&mut a, &mut b], "set FAKE_NCCL_FAIL ncclGroupEnd:2"), "set");
    let failed = "error: NCCL: ncclGroupEnd failed with code 2: an error of the stand-in";
    every(&all(&mut [&mut a, &mut b], "sum"), failed);
    every(&all(&mut [&mut a, &mut b], "set FAKE_NCCL_FAIL"), "set");
    every(&join(&mut [&mut a, &mut b], 3, LONG), "joined");
    every(&all(&mut [&mut a, &mut b], "sum"), "right");
}

#[test]
fn a_communicator_that_is_never_made_is_given_up() {
    let mut processes: [Process; 2] = start(&fake());
    assert_eq!(processes[0].ask("set FAKE_NCCL_HANG ncclCommInitRankConfig"), "set");
    let answers = join(&mut processes.each_mut(), 1, Duration::from_secs(1));
    // All ranks learn of it, and the group works again.
    let given_up = |answer: &String| answer.contains("refused by [0, 1]") && answer.contains("did not end within");
    assert!(answers.iter().all(given_up), "{answers:?}");
    assert_eq!(processes[0].ask("set FAKE_NCCL_HANG"), "set");
    every(&join(&mut processes.each_mut(), 2, LONG), "joined");
    every(&all(&mut processes.each_mut(), "sum"), "right");
}

#[test]
fn a_round_that_forms_ends_a_sum_that_has_had_its_time() {
    let mut processes: [Process; 3] = start(&fake());
    every(&join(&mut processes.each_mut(), 1, LONG), "joined");
    let [mut a, mut b, c] = processes;
    assert_eq!(a.ask("forming 2 400"), "set");
    // The others do not begin, so nothing fails for them.
    let begun = Instant::now();
    assert_eq!(a.ask("sum"), "error: round 2 is forming");
    assert!(begun.elapsed() < LONG / 3);
    drop(c);
    every(&join(&mut [&mut a, &mut b], 2, LONG), "joined");
    every(&all(&mut [&mut a, &mut b], "sum"), "right");
}

#[test]
fn a_call_that_never_returns_is_reported() {
    let mut processes: [Process; 2] = start(&fake());
    every(&join(&mut processes.each_mut(), 1, Duration::from_secs(2)), "joined");
    assert_eq!(processes[0].ask("set FAKE_NCCL_BLOCK ncclGroupEnd"), "set");
    let answers = all(&mut processes.each_mut(), "sum");
    assert!(answers[0].contains("NCCL hangs in ordered sum"), "{answers:?}");
    assert!(answers[1].contains("did not end within"), "{answers:?}");
    assert!(processes[0].ask("sum").contains("NCCL hangs in an earlier call"));
}

#[test]
fn an_abort_that_takes_long_holds_up_no_round() {
    let mut processes: [Process; 3] = start(&fake());
    let seen = "set FAKE_NCCL_DEATHS seen";
    every(&all(&mut processes.each_mut(), seen), "set");
    every(&join(&mut processes.each_mut(), 1, LONG), "joined");
    every(&all(&mut processes.each_mut(), "set FAKE_NCCL_BLOCK ncclCommAbort"), "set");
    let [mut a, mut b, mut c] = processes;
    assert_eq!(c.ask("set FAKE_NCCL_HANG ncclGroupEnd"), "set");
    for process in [&mut a, &mut b, &mut c] {
        process.begin("sum");
    }
    drop(c);
    for survivor in [&mut a, &mut b] {
        let answer = survivor.answer();
        assert!(answer.starts_with("error: lost rank 2"), "{answer}");
    }
    every(&join(&mut [&mut a, &mut b], 2, Duration::from_secs(5)), "joined");
    every(&all(&mut [&mut a, &mut b], "sum"), "right");
    every(&all(&mut [&mut a, &mut b], "set FAKE_NCCL_BLOCK"), "set");
}

#[test]
fn an_operation_that_never_comes_to_the_stream_is_given_up() {
    let mut processes: [Process; 3] = start(&fake());
    every(&join(&mut processes.each_mut(), 1, Duration::from_secs(2)), "joined");
    assert_eq!(processes[1].ask("set FAKE_NCCL_STALL ncclGroupEnd"), "set");
    for answer in all(&mut processes.each_mut(), "sum") {
        assert!(answer.contains("did not end within"), "{answer}");
    }
    assert_eq!(processes[1].ask("set FAKE_NCCL_STALL"), "set");
    let [mut a, mut b, c] = processes;
    drop(c);
    every(&join(&mut [&mut a, &mut b], 2, LONG), "joined");
    for task in ["sum", "ordered"] {
        every(&all(&mut [&mut a, &mut b], task), "right");
    }
}
