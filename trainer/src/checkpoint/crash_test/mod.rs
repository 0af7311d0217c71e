//! Crashes between and inside all disk calls, full disks, errors, lies, flipped bits and cut files: the last good
//! checkpoint survives, and what is wrong is said.

mod shares;

use std::num::NonZeroUsize;

use super::disk::Host;
use super::faulty::{Fault, FaultyDisk};
use super::manifest::{Entry, Position};
use super::sharded_write::Share;
use super::snapshot::{Layout, SnapshotHeader, Unfit};
use super::*;

const LENGTH: usize = 700;

/// Bytes under one checksum, so that each of three writers has some.
const SMALL: usize = 1000;

fn state(step: u64) -> Vec<f32> {
    (0..LENGTH).map(|place| (step * 1000) as f32 + place as f32).collect()
}

/// Saves `step`'s state as round `round`.
fn save<D: Disk>(checkpoints: &mut Checkpoints<D>, step: u64, round: u64) -> Result<Checkpoint, CheckpointError> {
    checkpoints.save(&slot(step, round))
}

/// A copy of `step`'s state.
fn slot(step: u64, round: u64) -> Slot {
    frame_of("test", step, round)
}

fn frame_of(job: &str, step: u64, round: u64) -> Slot {
    let tensors = [
        Entry { name: "a".into(), dtype: "F32".into(), shape: vec![20, 10], offset: 0, len: 800 },
        Entry { name: "b".into(), dtype: "F32".into(), shape: vec![500], offset: 800, len: 2000 },
    ];
    let data = Position { epoch: 1, cursor: 7, samples: 100, seed: 3, global_batch: 7, shards: 2 };
    let mut slot = Slot::alone(&Layout::in_chunks(SMALL, job, "any", &tensors));
    slot.fill(&SnapshotHeader { round, world_size: 2, step, done: None, data }, &state(step));
    slot
}

fn open(disk: FaultyDisk) -> Checkpoints<FaultyDisk> {
    Checkpoints::new(disk, Path::new("/ckpt"))
}

fn last(keep: usize) -> Retention {
    Retention { keep: NonZeroUsize::new(keep).unwrap(), every: None }
}

/// Saves as [`save`] does, with a share for each of `count` writers, which write in another order at each step; all of
/// it where one of them cannot.
fn save_shared(
    checkpoints: &mut Checkpoints<FaultyDisk>,
    step: u64,
    count: usize,
) -> Result<Checkpoint, CheckpointError> {
    let slot = slot(step, 1);
    let part = |index| Share { nonce: 7, index, count };
    let mut failed = false;
    for place in 0..count {
        failed |= checkpoints.share(&slot, &part((place * 2 + step as usize) % count)).is_err();
    }
    if failed { checkpoints.save(&slot) } else { checkpoints.complete(&slot, &part(0)) }
}

/// Prepares the folder and saves, commits and prunes a few steps, giving up where the machine does. Returns the last
/// step that was saved, and the step whose commit was known.
fn life(checkpoints: &mut Checkpoints<FaultyDisk>) -> Option<u64> {
    life_by(checkpoints, |checkpoints, step| save(checkpoints, step, 1))
}

fn life_by(
    checkpoints: &mut Checkpoints<FaultyDisk>,
    save: impl Fn(&mut Checkpoints<FaultyDisk>, u64) -> Result<Checkpoint, CheckpointError>,
) -> Option<u64> {
    let mut saved = None;
    if checkpoints.prepare().is_err() {
        let _ = checkpoints.prepare(); // The operator has made room.
    }
    for step in [3, 6, 9, 12] {
        if let Ok(checkpoint) = save(checkpoints, step) {
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
            // And later saves work over whatever the crash left, even under the same names.
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

/// Saves all steps, by `save`, on disks that answer a second request where the first one's answer was lost.
fn survives_lost_answers(save: fn(&mut Checkpoints<FaultyDisk>, u64) -> Result<Checkpoint, CheckpointError>) {
    let mut hits = 0;
    for at in 1..250 {
        let mut checkpoints = open(FaultyDisk::failing(at, Fault::Twice, 0));
        checkpoints.prepare().unwrap();
        for step in [3, 6, 9, 12] {
            let checkpoint = save(&mut checkpoints, step).unwrap();
            assert_eq!(checkpoints.newest().unwrap().state, state(step), "at call {at}");
            assert!(checkpoints.prune(&checkpoint, &last(2)).is_empty(), "at call {at}");
        }
        hits += usize::from(checkpoints.disk.hit);
    }
    assert!(hits > 10, "{hits} hits");
}

#[test]
fn a_lost_answer_to_a_name_s_change_costs_nothing() {
    survives_lost_answers(|checkpoints, step| save(checkpoints, step, 1));
    survives_lost_answers(|checkpoints, step| {
        let (slot, part) = (slot(step, 1), |index| Share { nonce: 7, index, count: 3 });
        (0..3).for_each(|index| checkpoints.share(&slot, &part(index)).unwrap());
        checkpoints
            .join(&checkpoints.path(Name { step, round: 1 }), &slot, &part(0))
            .map_err(|cause| CheckpointError::Save { step, folder: checkpoints.folder.clone(), cause })
    });
}

#[test]
fn a_name_that_another_file_has_is_no_lost_answer() {
    let mut checkpoints = open(FaultyDisk::default());
    checkpoints.prepare().unwrap();
    let path = Path::new("/ckpt/committed");
    checkpoints.write_file(path, b"step-00000003-r1").unwrap();
    for other in [&b"step-00000006-r1"[..], b"longer than what is there"] {
        let renamed = checkpoints.rename(Path::new("/ckpt/none"), path, other);
        assert_eq!(renamed.unwrap_err().kind(), io::ErrorKind::NotFound);
    }
    checkpoints.rename(Path::new("/ckpt/none"), path, b"step-00000003-r1").unwrap();
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
        // A manifest and the chunks are read of each.
        let chunks = slot(3, 1).about.extents[0].crc32c.len();
        for (read, expected) in [(1, 3), (2, 3), (1 + chunks, 3), (2 + chunks, 6)] {
            let mut checkpoints = open(checkpoints.disk.clone());
            (checkpoints.disk.flip, checkpoints.disk.seed) = (Some(read), seed);
            let found = checkpoints.newest().unwrap();
            assert_eq!((found.manifest.step, found.state), (expected, state(expected)), "read {read}, seed {seed}");
        }
    }
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
    // When a member that was left behind in round 3 saves the same step, then the commit remains.
    save(&mut checkpoints, 6, 3).unwrap();
    assert!(checkpoints.load(Path::new(&committed.path), Some(&committed.digest)).is_ok());
    // And a manifest that is whole but not the committed one is refused.
    let error = checkpoints.load(Path::new(&committed.path), Some("crc32c:00000000")).unwrap_err().to_string();
    assert!(error.contains(&committed.path) && error.contains("digest"), "{error}");
}

/// A job's way to a folder: with an agent, unless it shares the folder with other jobs.
fn by<'a>(folder: &Path, job: &'a str, beside_others: bool) -> (Checkpoints<Host>, impl Fn(u64) -> Slot + 'a) {
    let checkpoints = Checkpoints::new(Host, folder).owned_by(SavingJob { job: job.to_owned(), beside_others });
    (checkpoints, move |step| frame_of(job, step, 1))
}

#[test]
fn a_folder_is_one_jobs() {
    let folder = tempfile::tempdir().unwrap();
    let (mut first, slot) = by(folder.path(), "first", false);
    first.prepare().unwrap();
    let (mut second, _) = by(folder.path(), "second", false);
    // Before anything is saved, and after.
    for round in 0..2 {
        let error = second.prepare().unwrap_err().to_string();
        assert!(error.contains("belongs to job first, and job second would overwrite"), "{round}: {error}");
        first.prepare().unwrap();
        first.save(&slot(3)).unwrap();
        // Without the word, its checkpoints say whose it is.
        let _ = std::fs::remove_file(folder.path().join(OWNER));
    }
    assert_eq!(first.newest().unwrap().manifest.job, "first");
    // An owner's name that a crash cut short counts for no job.
    std::fs::write(folder.path().join(OWNER), "fir").unwrap();
    assert!(second.prepare().is_err());
    first.prepare().unwrap();
    assert_eq!(std::fs::read_to_string(folder.path().join(OWNER)).unwrap(), "first\n");
}

#[test]
fn a_job_that_resumes_from_whatever_is_there_destroys_nothing_of_anothers() {
    let folder = tempfile::tempdir().unwrap();
    let (mut first, first_frame) = by(folder.path(), "first", false);
    first.prepare().unwrap();
    for step in [3, 6] {
        first.save(&first_frame(step)).unwrap();
    }
    // One that is being saved.
    let under_way = folder.path().join("step-00000007-r1");
    std::fs::create_dir(&under_way).unwrap();
    let (mut second, slot) = by(folder.path(), "second", true);
    second.prepare().unwrap();
    let error = second.save(&slot(6)).unwrap_err().to_string();
    assert!(error.contains("is a checkpoint of job first"), "{error}");
    for step in [9, 12] {
        let committed = second.save(&slot(step)).unwrap();
        assert!(second.prune(&committed, &last(1)).is_empty());
    }
    let mut names = Host.list(folder.path()).unwrap();
    names.sort();
    assert_eq!(names, ["job", "step-00000003-r1", "step-00000006-r1", "step-00000007-r1", "step-00000012-r1"]);
}

#[test]
fn what_a_symbolic_link_leads_to_stays() {
    let (folder, elsewhere) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let mut checkpoints = Checkpoints::new(Host, folder.path());
    let kept = elsewhere.path().join("manifest.json");
    for (step, link) in [(6, "step-00000003-r1"), (9, "step-00000009-r1")] {
        std::fs::write(&kept, "{}").unwrap();
        let link = folder.path().join(link);
        std::os::unix::fs::symlink(elsewhere.path(), &link).unwrap();
        let committed = save(&mut checkpoints, step, 1).unwrap();
        assert!(checkpoints.prune(&committed, &last(1)).is_empty());
        assert!(kept.exists(), "step {step}");
        assert!(!link.is_symlink(), "the link goes");
    }
    assert_eq!(checkpoints.newest().unwrap().state, state(9));
}

#[test]
fn a_state_that_is_not_finite_is_not_saved() {
    let folder = tempfile::tempdir().unwrap();
    let mut checkpoints = Checkpoints::new(Host, folder.path());
    for bad in [f32::NAN, f32::INFINITY] {
        let mut slot = slot(3, 1);
        let mut state = state(3);
        let last = state.len() - 1;
        state[last] = bad;
        let header = SnapshotHeader { round: 1, world_size: 2, step: 3, done: None, data: slot.about.data };
        slot.fill(&header, &state);
        assert_eq!((slot.flaw(), slot.take_up()), (Some(last), Err(Unfit::Torn)), "nor is it taken up from memory");
        for error in [checkpoints.save(&slot).unwrap_err(), {
            checkpoints.share(&slot, &Share { nonce: 7, index: 0, count: 1 }).unwrap_err()
        }] {
            assert!(error.to_string().contains("not finite"), "{error}");
        }
    }
    assert!(Host.list(folder.path()).unwrap().is_empty());
}

#[test]
fn a_manifest_that_claims_more_than_there_is_room_for_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let mut checkpoints = Checkpoints::new(Host, folder.path());
    let path = PathBuf::from(save(&mut checkpoints, 3, 1).unwrap().path);
    // A manifest may say what it likes. What is held while checksums are compared does not follow from that.
    let mut manifest = checkpoints.about(&path, None).unwrap();
    let (chunk, len) = (1 << 62, 1 << 62);
    let [extent] = &mut manifest.extents[..] else { panic!() };
    (extent.file_offset, extent.len, extent.file_len, extent.chunk) = (0, len, len, chunk);
    extent.crc32c.truncate(1);
    manifest.state_bytes = len;
    std::fs::write(&path, manifest.encode()).unwrap();
    let error = checkpoints.load(&path, None).unwrap_err().to_string();
    assert!(error.contains("is out of place"), "{error}");
    let error = room(len).unwrap_err();
    assert!(error.contains("no memory for its state"), "{error}");
    // Nor need there be room for all of a manifest.
    std::fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(1 << 40).unwrap();
    let error = checkpoints.load(&path, None).unwrap_err().to_string();
    assert!(error.contains("none of these files has more"), "{error}");
}

#[test]
fn every_flipped_bit_and_every_cut_is_found() {
    let folder = tempfile::tempdir().unwrap();
    let mut checkpoints = Checkpoints::new(Host, folder.path());
    save(&mut checkpoints, 3, 1).unwrap();
    let newer = PathBuf::from(save(&mut checkpoints, 6, 1).unwrap().path);
    for file in [newer.clone(), newer.with_file_name(DATA)] {
        let good = std::fs::read(&file).unwrap();
        for place in (0..good.len()).step_by(7).chain([good.len() - 1]) {
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
