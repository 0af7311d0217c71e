//! A lock that keeps those who remove old files away from logs that are in use.

use std::fs::File;
use std::path::Path;
use std::sync::{Arc, OnceLock};
use std::thread;

use rustix::fs::{FlockOperation, flock};

/// Tells those who remove old files that this directory is in use, for as long as what this returns is held, by a shared
/// lock on it: systemd-tmpfiles (tmpfiles.d(5)) passes over a directory that it cannot lock, as Debian 13 has it do in
/// `/tmp` after ten days. A network file system's lock may never come, so it is asked for beside everything else.
pub(super) fn in_use(directory: &Path) -> Arc<OnceLock<File>> {
    let lock = Arc::new(OnceLock::new());
    let (kept, directory) = (Arc::clone(&lock), directory.to_owned());
    let work = move || {
        let taken = File::open(&directory).and_then(|file| {
            flock(&file, FlockOperation::NonBlockingLockShared)?;
            Ok(file)
        });
        match taken {
            Ok(file) => drop(kept.set(file)),
            Err(error) => tracing::debug!(directory = %directory.display(), %error, "cannot lock the log directory"),
        }
    };
    if let Err(error) = thread::Builder::new().name("log lock".to_owned()).spawn(work) {
        tracing::debug!(%error, "cannot start the thread that locks the log directory");
    }
    lock
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_directory_in_use_is_locked_as_those_who_remove_old_files_heed() {
        let directory = tempfile::tempdir().unwrap();
        let free = || {
            let file = File::open(directory.path()).unwrap();
            flock(&file, FlockOperation::NonBlockingLockExclusive).is_ok()
        };
        let (one, other) = (in_use(directory.path()), in_use(directory.path()));
        let begun = elastic_store::clock::now();
        while one.get().is_none() || other.get().is_none() {
            assert!(elastic_store::clock::now().since(begun) < Duration::from_secs(10));
            thread::sleep(Duration::from_millis(1));
        }
        assert!(!free());
        drop(one);
        assert!(!free());
        drop(other);
        assert!(free());
    }
}
