use std::collections::BTreeSet;
use std::num::NonZeroUsize;
use std::path::Path;

use super::*;
use crate::checkpoint::disk::Host;
use crate::checkpoint::faulty::{Fault, FaultyDisk, Gate, Gated};
use crate::checkpoint::manifest::{Entry, Position};
use crate::checkpoint::retention::Name;
use crate::checkpoint::sharded_write::EndedShare;
use crate::checkpoint::snapshot::Layout;

const NUMBERS: usize = 5000;
/// Nothing here takes this long.
const LONG: Duration = Duration::from_secs(60);

fn tensors() -> Vec<Entry> {
    vec![Entry { name: "a".into(), dtype: "F32".into(), shape: vec![NUMBERS], offset: 0, len: 4 * NUMBERS as u64 }]
}

/// The header and the state after `step` steps, which is that number again and again.
fn at_step(step: u64) -> (SnapshotHeader, Vec<f32>) {
    let header = SnapshotHeader { round: 1, world_size: 1, step, done: None, data: Position::default() };
    (header, vec![step as f32; NUMBERS])
}

/// Saves the state after `step` steps. Returns whether there was a slot for it.
fn save(saving: &mut Saving, step: u64) -> bool {
    let (header, state) = at_step(step);
    saving.save(&header, Some(&state))
}

fn slots() -> SnapshotSlots {
    SnapshotSlots::own(&Layout::new("test", "", &tensors())).unwrap()
}

fn start<D: Disk + Send + 'static>(disk: D, folder: &Path) -> Saving {
    let retention = Retention { keep: NonZeroUsize::new(9).unwrap(), every: None };
    let saving = Saving::start(Checkpoints::new(disk, folder), retention, slots(), 0).unwrap();
    saving.writer.wait(LONG);
    saving
}

fn finish(saving: &mut Saving, step: u64, time: Duration) -> Result<Vec<u64>, String> {
    let mut committed = Vec::new();
    let on_commit = |checkpoint: &Checkpoint| committed.push(checkpoint.step);
    let (header, state) = at_step(step);
    let result = saving.finish(&header, Some(&state), None, time, &Stop::default(), on_commit);
    result.map(|()| committed)
}

fn step_folders(folder: &Path) -> BTreeSet<String> {
    Host.list(folder).unwrap().into_iter().filter(|name| name != "committed").collect()
}

fn wait_until_writing(saving: &Saving, step: u64) {
    let begun = Instant::now();
    while saving.writer.writing().is_none_or(|writing| writing.step != step) {
        assert!(begun.elapsed() < LONG, "step {step} is never written");
        std::thread::yield_now();
    }
}

#[test]
fn a_slow_disk_holds_no_step_up_and_gets_the_newest_state() {
    let folder = tempfile::tempdir().unwrap();
    let gate = Gate::default();
    // The folder's trial.
    gate.open(1);
    let mut saving = start(Gated(Host, gate.clone()), folder.path());
    save(&mut saving, 1);
    wait_until_writing(&saving, 1);
    // When states come that it has no time for, then no caller waits for it: this thread opens the gate
    for step in 2..=20 {
        save(&mut saving, step);
        assert_eq!(saving.follow(None).unwrap(), []);
    }
    gate.open(usize::MAX / 2);
    assert_eq!(finish(&mut saving, 20, LONG).unwrap(), [1, 20]);
    let found = Checkpoints::new(Host, folder.path()).newest().unwrap();
    assert_eq!((found.manifest.step, found.state), (20, vec![20.0; NUMBERS]));
    let names = step_folders(folder.path());
    assert_eq!(names, [1, 20].map(|step| Name { step, round: 1 }.to_string()).into());
}

#[test]
fn what_is_durable_is_not_written_again_before_it_is_heard_of() {
    let folder = tempfile::tempdir().unwrap();
    let mut saving = start(Host, folder.path());
    save(&mut saving, 1);
    saving.writer.wait(LONG);
    save(&mut saving, 1);
    assert_eq!((saving.writer.under_way(), saving.writer.is_idle()), (1, true));
    assert_eq!(saving.follow(None).unwrap().len(), 1);
}

#[test]
fn a_disk_that_hangs_holds_up_neither_steps_nor_the_end_and_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let gate = Gate::default();
    // The folder's trial, a checkpoint of two files, and word of its commit.
    gate.open(4);
    let mut saving = start(Gated(Host, gate), folder.path());
    save(&mut saving, 1);
    saving.writer.wait(LONG);
    for step in 2..9 {
        save(&mut saving, step);
    }
    let begun = Instant::now();
    let cause = finish(&mut saving, 9, Duration::from_millis(20)).unwrap_err();
    assert!(cause.contains("does its file system hang") && cause.contains(folder.path().to_str().unwrap()), "{cause}");
    drop(saving);
    assert!(begun.elapsed() < LONG / 2);
    // And what was saved before is still there.
    assert_eq!(Checkpoints::new(Host, folder.path()).newest().unwrap().manifest.step, 1);
}

#[test]
fn a_folder_that_does_not_answer_is_an_error_in_time() {
    let folder = tempfile::tempdir().unwrap();
    let checkpoints = Checkpoints::new(Gated(Host, Gate::default()), folder.path());
    let retention = Retention { keep: NonZeroUsize::MIN, every: None };
    let error = Writer::start(checkpoints, retention, slots(), Duration::from_millis(20)).unwrap_err().to_string();
    assert!(error.contains("file system hang") && error.contains("--checkpoint-dir"), "{error}");
}

#[test]
fn the_last_state_is_tried_again_until_the_disk_has_room() {
    // The trial takes four calls: a list is none.
    for (fault, works) in [(Fault::Error, true), (Fault::ReadOnly, false)] {
        let mut disk = FaultyDisk::default();
        Disk::create_folder(&mut disk, Path::new("/ckpt")).unwrap();
        disk.fail_after(8, fault);
        let mut saving = start(disk, Path::new("/ckpt"));
        match finish(&mut saving, 7, if works { LONG } else { TRY_AGAIN * 3 }) {
            Ok(committed) => assert!(works && committed == [7], "{fault:?}: {committed:?}"),
            Err(cause) => assert!(!works && cause.contains("step 7") && cause.contains("read-only"), "{cause}"),
        }
        assert!(if works { saving.failures == 0 } else { saving.failures > 1 }, "{}", saving.failures);
    }
}

#[test]
fn what_is_saved_again_and_again_is_pruned_by_the_flags() {
    let folder = tempfile::tempdir().unwrap();
    let retention = Retention { keep: NonZeroUsize::new(2).unwrap(), every: std::num::NonZeroU64::new(10) };
    let mut saving = Saving::start(Checkpoints::new(Host, folder.path()), retention, slots(), 0).unwrap();
    for step in (4..40).step_by(4) {
        finish(&mut saving, step, LONG).unwrap();
    }
    let names = step_folders(folder.path());
    assert_eq!(names, [12, 20, 32, 36].map(|step| Name { step, round: 1 }.to_string()).into());
}

#[test]
fn two_write_a_checkpoint_in_shares_and_rank_0_all_of_what_the_other_does_not() {
    let folder = tempfile::tempdir().unwrap();
    let mut saving = start(Host, folder.path());
    let peers = slots();
    assert!(peers.wait(LONG));
    let helper = Writer::helping(Checkpoints::new(Host, folder.path()), peers.clone()).unwrap();
    let share = |index| Share { nonce: 5, index, count: 2 };
    let ended = |look: &dyn Fn() -> Option<EndedShare>| {
        let begun = Instant::now();
        loop {
            if let Some(ended) = look() {
                return (ended.step, ended.share.index, ended.result.is_ok());
            }
            assert!(begun.elapsed() < LONG);
            std::thread::yield_now();
        }
    };
    let begin = |saving: &mut Saving, step| {
        let (header, state) = at_step(step);
        let mut reserved = saving.reserve_for_share(step, share(0)).unwrap();
        reserved.slot.fill(&header, &state);
        saving.take_in(reserved);
    };
    // Given a step that both have written their share of
    begin(&mut saving, 1);
    let (header, state) = at_step(1);
    let mut reserved = ReservedSlot::for_share(peers.take().unwrap(), share(1));
    reserved.slot.fill(&header, &state);
    helper.take_in(reserved);
    assert_eq!(ended(&|| helper.ended_share()), (1, 1, true));
    assert_eq!(ended(&|| saving.writer.ended_share()), (1, 0, true));
    assert!(saving.is_pending() && saving.follow(None).unwrap().is_empty(), "not before the decision");
    saving.writer.decide(WriteMode::Complete(share(0)));
    saving.writer.wait(LONG);
    assert_eq!(saving.follow(None).unwrap()[0].step, 1);
    // And one whose other share never comes
    begin(&mut saving, 2);
    saving.writer.decide(WriteMode::Whole);
    saving.writer.wait(LONG);
    assert_eq!(saving.follow(None).unwrap()[0].step, 2);
    // And one that the run's end overtakes
    begin(&mut saving, 3);
    assert_eq!(finish(&mut saving, 4, LONG).unwrap(), [4]);
    let found = Checkpoints::new(Host, folder.path()).newest().unwrap();
    assert_eq!((found.manifest.step, found.state), (4, vec![4.0; NUMBERS]));
    assert!(saving.writer.is_idle() && peers.take().is_some());
}
