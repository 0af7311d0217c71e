//! The programs of the release before this one, built from its git tag. What they do in one job with ours is tested in
//! `tests/tests/upgrade`.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The longest time that one test waits for the programs, in seconds.
const LIMIT: &str = "1800";

/// The built programs.
pub struct PreviousRelease {
    programs: PathBuf,
}

impl PreviousRelease {
    /// Builds the programs of the newest tag before this commit in `target/previous-release`, unless they are there.
    /// `None`, with a word of it, while there is no such tag.
    pub fn build() -> Option<PreviousRelease> {
        let root = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/.."));
        let described =
            Command::new("git").current_dir(root).args(["describe", "--tags", "--abbrev=0", "HEAD^"]).output();
        let Some(described) = described.ok().filter(|described| described.status.success()) else {
            eprintln!("skipped: no commit before this one has a git tag, so there is no release to compare with");
            return None;
        };
        let tag = String::from_utf8_lossy(&described.stdout).trim().to_owned();
        let target = root.join("target/previous-release").join(&tag);
        let (sources, built) = (target.join("sources"), target.join("build"));
        std::fs::create_dir_all(&target).expect("a folder for the build");
        // Each test is a process. The others wait for the one that builds.
        let lock = File::create(target.join("lock")).expect("a lock");
        lock.lock().expect("lock the build");
        if !sources.exists() {
            let worktree = ["worktree", "add", "--force", "--detach"];
            succeeds(Command::new("git").current_dir(root).args(worktree).arg(&sources).arg(&tag));
        }
        let cargo = [LIMIT, "cargo", "build", "--locked", "--package=elastic-agent", "--package=elastic-coordinator"];
        let target = [Path::new("--bins"), Path::new("--target-dir"), &built];
        succeeds(Command::new("timeout").current_dir(&sources).args(cargo).args(target));
        Some(PreviousRelease { programs: built.join("debug") })
    }

    /// Where one of its programs lies.
    pub fn program(&self, name: &str) -> PathBuf {
        let path = self.programs.join(name);
        assert!(path.is_file(), "the release before has no {name}");
        path
    }
}

fn succeeds(command: &mut Command) {
    let ended = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    assert!(ended.status.success(), "{command:?}: {}", String::from_utf8_lossy(&ended.stderr));
}
