//! Crashes between and inside all disk calls, full disks, errors, lies, flipped bits and cut files: the last good
//! checkpoint survives, and what is wrong is said.

use std::num::NonZeroUsize;

use super::disk::Host;
use super::faulty::{Fault, FaultyDisk};
use super::manifest::{Entry, Position};
use super::snapshot::{Layout, Snapshot};
use super::*;

const LENGTH: usize = 700;

fn state(step: u64) -> Vec<f32> {
    (0..LENGTH).map(|place| (step * 1000) as f32 + place as f32).collect()
}

/// Saves `step`'s state as round `round`.
fn save<D: Disk>(checkpoints: &mut Checkpoints<D>, step: u64, round: u64) -> Result<Checkpoint, CheckpointError> {
    let tensors = [
        Entry { name: "a".into(), dtype: "F32".into(), shape: vec![20, 10], offset: 0, len: 800 },
        Entry { name: "b".into(), dtype: "F32".into(), shape: vec![500], offset: 800, len: 2000 },
    ];
    let data = Position { epoch: 1, cursor: 7, samples: 100, seed: 3, global_batch: 7, shards: 2 };
    let state = state(step);
    let (done, tensors, state) = (None, &tensors, &state);
    let snapshot = Snapshot { job: "test", round, world_size: 2, step, done, settings: "any", data, tensors, state };
    let mut frame = Frame::alone(&Layout::new("test", "any", tensors));
    frame.fill(&snapshot);
    checkpoints.save(&frame)
}

fn open(disk: FaultyDisk) -> Checkpoints<FaultyDisk> {
    Checkpoints::new(disk, Path::new("/ckpt"))
}

fn last(keep: usize) -> Retention {
    Retention { keep: NonZeroUsize::new(keep).unwrap(), every: None }
}

/// Prepares the folder and saves, commits and prunes a few steps, giving up where the machine does. Returns the last
/// step that was saved, and the step whose commit was known.
fn life(checkpoints: &mut Checkpoints<FaultyDisk>) -> Option<u64> {
    let mut saved = None;
    if checkpoints.prepare().is_err() {
        let _ = checkpoints.prepare(); // The operator has made room.
    }
    for step in [3, 6, 9, 12] {
        if let Ok(checkpoint) = save(checkpoints, step, 1) {
            saved = Some(step);
            checkpoints.prune(&checkpoint, &last(2));
        }
    }
    saved
}

#[test]
fn a_crash_at_any_call_leaves_the_last_good_checkpoint() {
    let mut crashes = 0;
    for seed in 0..24 {
        for at in 1.. {
            let mut checkpoints = open(FaultyDisk::failing(at, Fault::Crash, seed));
            let saved = life(&mut checkpoints);
            if !checkpoints.disk.hit {
                break;
            }
            crashes += 1;
            let mut checkpoints = open(checkpoints.disk.reboot());
            let found = checkpoints.newest();
            let step = found.as_ref().map(|found| found.manifest.step);
            assert!(step >= saved, "seed {seed}, crash at call {at}: step {saved:?} was saved, found {step:?}");
            if let Some(found) = found {
                assert_eq!(found.state, state(found.manifest.step), "seed {seed}, crash at call {at}");
            }
            // And life goes on over whatever the crash left, even under the same names.
            checkpoints.prepare().unwrap();
            for step in [12, 15] {
                let checkpoint = save(&mut checkpoints, step, 1).unwrap();
                assert!(checkpoints.prune(&checkpoint, &last(2)).is_empty());
                assert_eq!(checkpoints.newest().unwrap().state, state(step), "seed {seed}, crash at call {at}");
            }
        }
    }
    assert!(crashes > 500, "{crashes} crashes");
}

#[test]
fn one_failing_call_leaves_the_last_good_checkpoint() {
    for fault in [Fault::Full, Fault::Error, Fault::Short] {
        let mut hits = 0;
        for (at, seed) in (1..150).flat_map(|at| [(at, 0), (at, 2)]) {
            let mut checkpoints = open(FaultyDisk::failing(at, fault, seed));
            let saved = life(&mut checkpoints).expect("one failure does not stop all saves");
            let found = checkpoints.newest().unwrap();
            assert!(found.manifest.step >= saved, "{fault:?} at call {at}");
            assert_eq!(found.state, state(found.manifest.step), "{fault:?} at call {at}");
            // And what was saved is durable.
            let found = open(checkpoints.disk.reboot()).newest().unwrap();
            assert!(
                found.manifest.step >= saved && found.state == state(found.manifest.step),
                "{fault:?} at call {at}"
            );
            hits += usize::from(checkpoints.disk.hit);
        }
        assert!(hits > 10, "{fault:?}: {hits} hits");
    }
}

#[test]
fn a_disk_that_becomes_read_only_keeps_what_it_has_and_says_so() {
    for at in 1.. {
        let mut checkpoints = open(FaultyDisk::failing(at, Fault::ReadOnly, 0));
        let saved = life(&mut checkpoints);
        if !checkpoints.disk.hit {
            break;
        }
        let found = checkpoints.newest();
        assert!(found.as_ref().map(|found| found.manifest.step) >= saved, "from call {at}");
        assert!(found.is_none_or(|found| found.state == state(found.manifest.step)), "from call {at}");
        let error = save(&mut checkpoints, 30, 1).unwrap_err().to_string();
        assert!(error.contains("step 30") && error.contains("/ckpt") && error.contains("read-only"), "{error}");
    }
}

#[test]
fn an_error_names_the_step_the_folder_and_the_cause() {
    let mut causes = BTreeSet::new();
    for calls in 0..20 {
        for fault in [Fault::Full, Fault::Error, Fault::Short] {
            let mut checkpoints = open(FaultyDisk::default());
            checkpoints.prepare().unwrap();
            checkpoints.disk.fail_after(calls, fault);
            if let Err(error) = save(&mut checkpoints, 3, 1) {
                let error = error.to_string();
                let cause = error.strip_prefix("cannot save the checkpoint of step 3 in /ckpt: ");
                causes.insert(cause.unwrap_or_else(|| panic!("{error}")).to_owned());
            }
        }
    }
    let said: Vec<&str> = causes.iter().map(String::as_str).collect();
    let expected = ["Input/output error (os error 5)", "no storage space", "the file system kept"];
    for words in expected {
        assert!(said.iter().any(|cause| cause.contains(words)), "{words}: {said:?}");
    }
}

#[test]
fn a_bit_that_is_flipped_while_reading_is_found_and_an_older_checkpoint_taken() {
    let mut checkpoints = open(FaultyDisk::default());
    checkpoints.prepare().unwrap();
    for step in [3, 6] {
        save(&mut checkpoints, step, 1).unwrap();
    }
    for seed in 0..64 {
        // A manifest and one chunk are read of each.
        for (read, expected) in [(1, 3), (2, 3), (3, 6)] {
            let mut checkpoints = open(checkpoints.disk.clone());
            (checkpoints.disk.flip, checkpoints.disk.seed) = (Some(read), seed);
            let found = checkpoints.newest().unwrap();
            assert_eq!((found.manifest.step, found.state), (expected, state(expected)), "read {read}, seed {seed}");
        }
    }
}

#[test]
fn the_last_few_are_kept_and_the_rest_goes() {
    let folder = tempfile::tempdir().unwrap();
    let mut checkpoints = Checkpoints::new(Host, folder.path());
    for step in [3, 6, 9] {
        let checkpoint = save(&mut checkpoints, step, 1).unwrap();
        assert!(checkpoints.prune(&checkpoint, &last(2)).is_empty());
    }
    let mut names = Host.list(folder.path()).unwrap();
    names.sort();
    assert_eq!(names, ["step-00000006-r1", "step-00000009-r1"]);
}

#[test]
fn nothing_newer_than_the_commit_is_pruned() {
    let folder = tempfile::tempdir().unwrap();
    let mut checkpoints = Checkpoints::new(Host, folder.path());
    let committed = save(&mut checkpoints, 3, 1).unwrap();
    save(&mut checkpoints, 6, 1).unwrap();
    checkpoints.prune(&committed, &last(1));
    assert_eq!(checkpoints.load(Path::new(&committed.path), Some(&committed.digest)).unwrap().state, state(3));
    assert_eq!(checkpoints.newest().unwrap().state, state(6));
}

#[test]
fn a_round_cannot_overwrite_another_rounds_checkpoint() {
    let folder = tempfile::tempdir().unwrap();
    let mut checkpoints = Checkpoints::new(Host, folder.path());
    let committed = save(&mut checkpoints, 6, 4).unwrap();
    // When a member that was left behind in round 3 saves the same step, then the commit still stands.
    save(&mut checkpoints, 6, 3).unwrap();
    assert!(checkpoints.load(Path::new(&committed.path), Some(&committed.digest)).is_ok());
    // And a manifest that is whole but not the committed one is refused.
    let error = checkpoints.load(Path::new(&committed.path), Some("crc32c:00000000")).unwrap_err().to_string();
    assert!(error.contains(&committed.path) && error.contains("digest"), "{error}");
}

#[test]
fn every_flipped_bit_and_every_cut_is_found() {
    let folder = tempfile::tempdir().unwrap();
    let mut checkpoints = Checkpoints::new(Host, folder.path());
    save(&mut checkpoints, 3, 1).unwrap();
    let newer = PathBuf::from(save(&mut checkpoints, 6, 1).unwrap().path);
    for file in [newer.clone(), newer.with_file_name(DATA)] {
        let good = std::fs::read(&file).unwrap();
        for place in (0..good.len()).step_by(3).chain([good.len() - 1]) {
            let mut bad = good.clone();
            bad[place] ^= 1 << (place % 8);
            std::fs::write(&file, &bad).unwrap();
            assert_eq!(checkpoints.newest().unwrap().manifest.step, 3, "{} flipped at {place}", file.display());
        }
        for length in (0..good.len()).step_by(97).chain([good.len() - 1]) {
            std::fs::write(&file, &good[..length]).unwrap();
            assert_eq!(checkpoints.newest().unwrap().manifest.step, 3, "{} cut to {length}", file.display());
        }
        std::fs::write(&file, &good).unwrap();
        assert_eq!(checkpoints.newest().unwrap().manifest.step, 6);
    }
    std::fs::remove_file(newer.with_file_name(DATA)).unwrap();
    let error = checkpoints.load(&newer, None).unwrap_err().to_string();
    assert!(error.contains(DATA) && error.contains("No such file"), "{error}");
}

#[test]
fn an_unusable_folder_is_explained() {
    let folder = tempfile::tempdir().unwrap();
    let error = Checkpoints::new(Host, &folder.path().join("a/b")).prepare().unwrap_err().to_string();
    assert!(error.contains("parent does not exist") && error.contains("a/b"), "{error}");
    let file = folder.path().join("file");
    std::fs::write(&file, "x").unwrap();
    let error = Checkpoints::new(Host, &file).prepare().unwrap_err().to_string();
    assert!(error.contains("cannot be written") && error.contains("--checkpoint-dir"), "{error}");
    // Read-only even for root.
    let error = Checkpoints::new(Host, Path::new("/proc/sys")).prepare().unwrap_err().to_string();
    assert!(error.contains("cannot be written"), "{error}");
    Checkpoints::new(Host, &folder.path().join("new")).prepare().unwrap();
}

#[test]
fn the_data_file_opens_as_safetensors() {
    let folder = tempfile::tempdir().unwrap();
    let mut checkpoints = Checkpoints::new(Host, folder.path());
    let manifest = save(&mut checkpoints, 3, 1).unwrap().path;
    let bytes = std::fs::read(Path::new(&manifest).with_file_name(DATA)).unwrap();
    let tensors = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let tensor = tensors.tensor("b").unwrap();
    assert_eq!(tensor.shape(), [500]);
    assert_eq!(bytemuck::allocation::pod_collect_to_vec::<u8, f32>(tensor.data()), state(3)[200..]);
}
