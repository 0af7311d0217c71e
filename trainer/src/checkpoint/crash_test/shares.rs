//! The same for checkpoints that several write.

use super::*;

#[test]
fn each_writer_has_a_share() {
    let slot = slot(3, 1);
    let len = slot.file.bytes().len();
    for index in 0..3 {
        assert!(!Share { nonce: 7, index, count: 3 }.bytes(len, slot.chunk()).is_empty(), "writer {index}");
    }
}

#[test]
fn checkpoints_in_shares_survive_crashes_and_failures_as_whole_ones_do() {
    let mut hits = 0;
    for (fault, seed) in
        [Fault::Crash, Fault::Full, Fault::Error].into_iter().flat_map(|fault| (0..6).map(move |seed| (fault, seed)))
    {
        for at in 1.. {
            let mut checkpoints = open(FaultyDisk::failing(at, fault, seed));
            let saved = life_by(&mut checkpoints, |checkpoints, step| save_shared(checkpoints, step, 3));
            if !checkpoints.disk.hit {
                break;
            }
            hits += 1;
            let mut checkpoints = open(checkpoints.disk.reboot());
            let found = checkpoints.newest();
            let step = found.as_ref().map(|found| found.manifest.step);
            assert!(step >= saved, "{fault:?} at call {at}, seed {seed}: {saved:?} was saved, found {step:?}");
            assert!(found.is_none_or(|found| found.state == state(found.manifest.step)), "{fault:?} at call {at}");
            // And later saves work over what is left, even of the same round.
            checkpoints.prepare().unwrap();
            for step in [12, 15] {
                save_shared(&mut checkpoints, step, 3).unwrap();
                assert_eq!(checkpoints.newest().unwrap().state, state(step), "{fault:?} at call {at}, seed {seed}");
            }
        }
    }
    assert!(hits > 500, "{hits} hits");
}

#[test]
fn a_share_of_another_state_or_of_an_attempt_that_was_given_up_changes_nothing() {
    let mut checkpoints = open(FaultyDisk::default());
    checkpoints.prepare().unwrap();
    let part = |nonce, index| Share { nonce, index, count: 2 };
    // Given a peer that has come to another state
    checkpoints.share(&slot(3, 1), &part(7, 0)).unwrap();
    let mut other = slot(3, 1);
    *other.about.extents[0].crc32c.last_mut().unwrap() = "00000000".into();
    checkpoints.share(&other, &part(7, 1)).unwrap();
    let error = checkpoints.join(Path::new("/ckpt/step-00000003-r1"), &slot(3, 1), &part(7, 0)).unwrap_err();
    assert!(error.to_string().contains("another state"), "{error}");
    checkpoints.complete(&slot(3, 1), &part(7, 0)).unwrap();
    assert_eq!(checkpoints.newest().unwrap().state, state(3));
    // When a late writer writes after all, to the name that it was given
    let committed = save(&mut checkpoints, 6, 1).unwrap();
    checkpoints.share(&slot(6, 1), &part(8, 1)).unwrap();
    assert_eq!(checkpoints.load(Path::new(&committed.path), Some(&committed.digest)).unwrap().state, state(6));
    // And what it has left goes with the rest.
    let newer = save(&mut checkpoints, 9, 1).unwrap();
    assert!(checkpoints.prune(&newer, &last(1)).is_empty());
    assert_eq!(checkpoints.disk.list(Path::new("/ckpt")).unwrap(), ["step-00000009-r1"]);
}

#[test]
fn shares_of_several_chunks_make_the_file_that_one_writer_makes() {
    let folder = tempfile::tempdir().unwrap();
    let numbers = (2 * CHUNK + 5000) / 4;
    let tensors =
        [Entry { name: "a".into(), dtype: "F32".into(), shape: vec![numbers], offset: 0, len: 4 * numbers as u64 }];
    let state: Vec<f32> = (0..numbers).map(|place| place as f32).collect();
    let mut slot = Slot::alone(&Layout::new("test", "any", &tensors));
    let data = Position::default();
    slot.fill(&SnapshotHeader { round: 1, world_size: 2, step: 3, done: None, data }, &state);
    let mut checkpoints = Checkpoints::new(Host, folder.path());
    let part = |index| Share { nonce: 7, index, count: 3 };
    for index in [2, 0, 1] {
        checkpoints.share(&slot, &part(index)).unwrap();
    }
    let shared = checkpoints.complete(&slot, &part(0)).unwrap();
    let place = Path::new(&shared.path).parent().unwrap();
    let mut names = Host.list(place).unwrap();
    names.sort();
    assert_eq!(names, [MANIFEST, DATA]);
    let bytes = std::fs::read(place.join(DATA)).unwrap();
    assert!(bytes == slot.file.bytes());
    // And several read it again, each its share.
    let (path, digest) = (Path::new(&shared.path), Some(shared.digest.as_str()));
    let manifest = checkpoints.about(path, digest).unwrap();
    let (mut read, mut end) = (vec![0.0; numbers], 0);
    for index in 0..4 {
        let range = checkpoints.load_share(path, &manifest, (index, 4), &mut read, |_| ()).unwrap();
        assert_eq!(range.start, end);
        end = range.end;
    }
    assert!(end == 4 * numbers as u64 && read == state);
    assert_eq!(checkpoints.save(&slot).unwrap(), shared);
}
