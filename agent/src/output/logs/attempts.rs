//! The folders of attempts: what they are called, and which are removed, as `--log-attempts` says.

use std::collections::VecDeque;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;

/// An attempt's folder. It stays for as long as somebody holds this.
pub(super) type Folder = Arc<PathBuf>;

/// The folders of one agent's attempts.
#[derive(Debug)]
pub(super) struct Attempts {
    /// How many of the newest stay; `None`: all of them.
    kept: Option<u32>,
    made: Mutex<Made>,
}

#[derive(Debug, Default)]
struct Made {
    /// The newest restart count whose folder has torchrun's name.
    named: Option<u32>,
    /// The oldest first; empty if all of them stay.
    folders: VecDeque<Folder>,
}

impl Attempts {
    pub(super) fn new(kept: Option<u32>) -> Attempts {
        Attempts { kept, made: Mutex::default() }
    }

    /// Makes the folder of an attempt in this one. Older ones that are too many go, unless a worker still writes there.
    pub(super) fn begin(&self, root: &Path, restarts: u32, round: u64) -> io::Result<Folder> {
        let mut made = self.made.lock().unwrap_or_else(PoisonError::into_inner);
        let name = format!("attempt_{restarts}");
        // A name is given once, also where the folder that had it is no longer there.
        let plain = (made.named < Some(restarts)).then(|| root.join(&name));
        let folder = match plain {
            Some(path) => path,
            None => root.join(format!("{name}_round_{round}")),
        };
        match fs::create_dir(&folder) {
            // Somebody removed the logs' folder during the run.
            Err(error) if error.kind() == io::ErrorKind::NotFound => fs::create_dir_all(&folder)?,
            // Workers of one round may start one after the other. Files are appended to.
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            made => made?,
        }
        made.named = made.named.max(Some(restarts));
        if let Some(same) = made.folders.iter().find(|made| ***made == folder) {
            return Ok(Arc::clone(same));
        }
        let folder = Folder::new(folder);
        if let Some(kept) = self.kept {
            made.folders.push_back(Arc::clone(&folder));
            remove(made.surplus(kept as usize));
        }
        Ok(folder)
    }
}

impl Made {
    /// Takes out the folders that are older than the newest `keep`, and that no process holds.
    fn surplus(&mut self, kept: usize) -> Vec<Folder> {
        let old = self.folders.len().saturating_sub(kept);
        let newer = self.folders.split_off(old);
        let (held, idle): (Vec<_>, Vec<_>) = self.folders.drain(..).partition(|folder| Arc::strong_count(folder) > 1);
        self.folders = held.into_iter().chain(newer).collect();
        idle
    }
}

/// Removes these folders in a thread of its own: no worker waits for a slow disk to forget.
fn remove(folders: Vec<Folder>) {
    if folders.is_empty() {
        return;
    }
    let work = move || {
        for folder in folders {
            if let Err(error) = fs::remove_dir_all(&*folder) {
                tracing::warn!(folder = %folder.display(), %error, "cannot remove the logs of an old attempt");
            }
        }
    };
    if let Err(error) = thread::Builder::new().name("old logs".to_owned()).spawn(work) {
        tracing::warn!(%error, "cannot start the thread that removes the logs of old attempts: they stay");
    }
}

#[cfg(test)]
mod tests {

    use super::*;

    fn names(root: &Path) -> Vec<String> {
        let mut names: Vec<String> =
            fs::read_dir(root).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    /// Waits until these folders are there, and no others.
    fn left(root: &Path, wanted: &[&str]) {
        let begun = elastic_store::clock::now();
        while names(root) != wanted {
            assert!(elastic_store::clock::now().since(begun).as_secs() < 10, "{:?}, and not {wanted:?}", names(root));
            thread::yield_now();
        }
    }

    #[test]
    fn a_restart_count_names_a_folder_once() {
        let root = tempfile::tempdir().unwrap();
        let attempts = Attempts::new(None);
        for (restarts, round) in [(0, 1), (0, 2), (1, 3), (1, 4), (1, 4), (4, 5)] {
            attempts.begin(root.path(), restarts, round).unwrap();
        }
        let wanted = ["attempt_0", "attempt_0_round_2", "attempt_1", "attempt_1_round_4", "attempt_4"];
        assert_eq!(names(root.path()), wanted);
        assert!(attempts.made.lock().unwrap().folders.is_empty());
    }

    #[test]
    fn the_newest_stay_and_those_that_a_worker_writes_to() {
        let root = tempfile::tempdir().unwrap();
        let attempts = Attempts::new(Some(2));
        let begin = |round| {
            let folder = attempts.begin(root.path(), 0, round).unwrap();
            fs::write(folder.join("stdout.log"), "text").unwrap();
            folder
        };
        let held = begin(1);
        for round in 2..=4 {
            begin(round);
        }
        left(root.path(), &["attempt_0", "attempt_0_round_3", "attempt_0_round_4"]);
        drop(held);
        begin(5);
        left(root.path(), &["attempt_0_round_4", "attempt_0_round_5"]);
        // What is gone gives no name back, and the same round has the same folder.
        begin(6);
        begin(6);
        left(root.path(), &["attempt_0_round_5", "attempt_0_round_6"]);
    }

    #[test]
    fn a_folder_that_somebody_else_removed_is_no_obstacle() {
        let root = tempfile::tempdir().unwrap();
        let attempts = Attempts::new(Some(1));
        let first = attempts.begin(root.path(), 0, 1).unwrap();
        fs::remove_dir(&*first).unwrap();
        drop(first);
        attempts.begin(root.path(), 0, 2).unwrap();
        left(root.path(), &["attempt_0_round_2"]);
        attempts.begin(&root.path().join("gone"), 0, 3).unwrap();
        left(&root.path().join("gone"), &["attempt_0_round_3"]);
    }
}
