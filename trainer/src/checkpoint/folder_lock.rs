//! A lock that keeps two runs out of one folder, where no store does: they would take each other's checkpoints for their
//! own.

use std::fs::{File, OpenOptions};
use std::io;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;
use tracing::warn;

use super::CheckpointError;

/// The file that is locked. It stays: another process may have it open.
const LOCK: &str = ".lock";

/// How long a process that was just killed may still have the lock.
const PATIENCE: Duration = Duration::from_secs(5);
const PAUSE: Duration = Duration::from_millis(50);

/// A lock on a folder, until it is dropped or its process ends.
#[derive(Debug)]
pub(crate) struct FolderLock {
    _file: Option<File>,
}

impl FolderLock {
    /// Locks a folder. One whose file system has no locks is used without.
    pub(crate) fn take(folder: &Path) -> Result<FolderLock, CheckpointError> {
        FolderLock::within(folder, PATIENCE)
    }

    fn within(folder: &Path, patience: Duration) -> Result<FolderLock, CheckpointError> {
        let unlocked = |cause: io::Error| {
            warn!(folder = %folder.display(), %cause, "cannot lock the checkpoint folder; start no second run in it");
            FolderLock { _file: None }
        };
        let file = match OpenOptions::new().create(true).truncate(false).write(true).open(folder.join(LOCK)) {
            Ok(file) => file,
            Err(cause) => return Ok(unlocked(cause)),
        };
        let deadline = Instant::now() + patience;
        loop {
            match flock(&file, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => return Ok(FolderLock { _file: Some(file) }),
                Err(Errno::WOULDBLOCK) if Instant::now() < deadline => thread::sleep(PAUSE),
                Err(Errno::WOULDBLOCK) => return Err(CheckpointError::Busy { folder: folder.to_owned() }),
                Err(Errno::INTR) => {}
                Err(cause) => return Ok(unlocked(cause.into())),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_at_a_time_has_the_folder() {
        let folder = tempfile::tempdir().unwrap();
        let take = || FolderLock::within(folder.path(), Duration::ZERO);
        let first = take().unwrap();
        assert!(matches!(take(), Err(CheckpointError::Busy { .. })));
        drop(first);
        take().unwrap();
    }
}
