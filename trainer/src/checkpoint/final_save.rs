//! Saving what an ended worker has left in memory, by a process that knows nothing of the run but what is there.

use std::io;
use std::os::fd::AsFd;
use std::path::Path;
use std::sync::Arc;

use elastic_proto::worker::Checkpoint;
use tracing::warn;

use super::disk::{ALIGNMENT, Host};
use super::pages::Mapping;
use super::snapshot::{Layout, Slot, Unfit};
use super::snapshot_slots::SLOTS;
use super::{CheckpointError, Checkpoints, SavingJob};

/// Why nothing is saved.
#[derive(Debug, thiserror::Error)]
pub enum FinalSaveError {
    /// It is not memory that a worker kept snapshots in.
    #[error("standard input is not snapshot memory ({0}); agents run this command, users need not")]
    NoMemory(String),
    /// The disk does not take it.
    #[error(transparent)]
    Disk(#[from] CheckpointError),
}

/// Saves the newest whole snapshot in `memory`, if it is newer than step `after`, to a folder. When this returns it is
/// durable.
pub(crate) fn save(memory: impl AsFd, after: u64, folder: &Path) -> Result<Option<Checkpoint>, FinalSaveError> {
    let Some(slot) = newest(memory, after)? else { return Ok(None) };
    let owner = SavingJob { job: slot.about.job.clone(), beside_others: false };
    let mut checkpoints = Checkpoints::new(Host, folder).owned_by(owner);
    checkpoints.prepare()?;
    Ok(Some(checkpoints.save(&slot)?))
}

/// The newest whole slot of a step after `after`.
fn newest(memory: impl AsFd, after: u64) -> Result<Option<Slot>, FinalSaveError> {
    let none = |error: io::Error| FinalSaveError::NoMemory(error.to_string());
    let len = rustix::fs::fstat(&memory).map_err(|error| none(error.into()))?.st_size as usize;
    let slot = len / SLOTS;
    if len == 0 || slot * SLOTS != len || !slot.is_multiple_of(ALIGNMENT) {
        return Err(FinalSaveError::NoMemory(format!("{len} bytes are not those of {SLOTS} slots")));
    }
    let mapping = Arc::new(Mapping::of(memory.as_fd(), len).map_err(none)?);
    let mut found = Vec::new();
    for number in 0..SLOTS {
        match Layout::found(mapping.part(number * slot, slot).bytes()) {
            Ok(layout) if layout.step() > after => found.push((layout.step(), number, layout)),
            Ok(_) | Err(Unfit::Torn) => {}
            Err(Unfit::Flawed(cause)) => warn!("skipped a snapshot in memory: {cause}"),
        }
    }
    found.sort_by_key(|(step, ..)| std::cmp::Reverse(*step));
    for (step, number, layout) in found {
        let mut slot = Slot::at(&mapping, &layout, number);
        match slot.take_up() {
            Ok(_) => return Ok(Some(slot)),
            Err(Unfit::Torn) => {}
            Err(Unfit::Flawed(cause)) => warn!("skipped the snapshot of step {step} in memory: {cause}"),
        }
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::unix::fs::FileExt;

    use rustix::fs::{MemfdFlags, memfd_create};

    use super::super::snapshot_slots::SnapshotSlots;
    use super::super::snapshot_slots::tests::{NUMBERS, keep, layout, memory};
    use super::*;

    /// Memory in which a worker has left snapshots of these steps.
    fn left(steps: &[u64]) -> File {
        let layout = layout("job", "--flags");
        let memory = memory(&layout);
        let (slots, _) = SnapshotSlots::kept(&layout, &memory).unwrap();
        steps.iter().for_each(|&step| keep(&slots, step));
        memory
    }

    /// The step that is saved, and that it loads.
    fn saved(memory: &File, after: u64) -> Option<u64> {
        let folder = tempfile::tempdir().unwrap();
        let saved = save(memory, after, folder.path()).unwrap()?;
        let loaded = Checkpoints::new(Host, folder.path()).load(Path::new(&saved.path), Some(&saved.digest)).unwrap();
        assert_eq!((loaded.manifest.step, loaded.manifest.round, saved.round), (saved.step, 4, 4));
        assert!(loaded.state == vec![saved.step as f32; NUMBERS]);
        Some(saved.step)
    }

    #[test]
    fn the_newest_whole_snapshot_is_saved_if_it_is_newer_than_the_commit() {
        assert_eq!(saved(&left(&[]), 0), None);
        let memory = left(&[5, 9]);
        assert_eq!((saved(&memory, 0), saved(&memory, 8), saved(&memory, 9)), (Some(9), Some(9), None));
        // When a byte of the newest has changed, or it was cut short, then the other one is
        let half = memory.metadata().unwrap().len() / 2;
        let newest = (0..2).map(|slot| slot * half).find(|&start| {
            let mut head = [0; 4096];
            memory.read_exact_at(&mut head, start).unwrap();
            String::from_utf8_lossy(&head).contains("\"step\": 9")
        });
        let newest = newest.unwrap();
        for place in [0, 9, 41, 60, half - 5000] {
            let mut byte = [0];
            memory.read_exact_at(&mut byte, newest + place).unwrap();
            memory.write_all_at(&[byte[0] ^ 0x10], newest + place).unwrap();
            assert_eq!((saved(&memory, 0), saved(&memory, 5)), (Some(5), None), "byte {place}");
            memory.write_all_at(&byte, newest + place).unwrap();
        }
        assert_eq!(saved(&memory, 0), Some(9));
    }

    #[test]
    fn what_is_no_memory_for_snapshots_and_what_no_disk_takes_is_said() {
        let folder = tempfile::tempdir().unwrap();
        let other = File::from(memfd_create("test", MemfdFlags::CLOEXEC).unwrap());
        other.set_len(5000).unwrap();
        let error = save(&other, 0, folder.path()).unwrap_err().to_string();
        assert!(error.contains("is not snapshot memory") && error.contains("5000 bytes"), "{error}");
        other.set_len(8192).unwrap();
        assert_eq!(save(&other, 0, folder.path()).unwrap(), None);
        let file = folder.path().join("file");
        std::fs::write(&file, "").unwrap();
        let error = save(left(&[5]), 0, &file).unwrap_err().to_string();
        assert!(error.contains("cannot be written") && error.contains("file"), "{error}");
    }
}
