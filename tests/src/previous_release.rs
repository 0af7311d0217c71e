//! The programs of the release before this one, as `tests/previous-release` keeps them. What they do beside ours is tested
//! in `tests/tests/upgrade`.

use std::path::PathBuf;
use std::process::Command;

use tempfile::TempDir;

/// The kept programs, unpacked into a folder that goes with this.
pub struct PreviousRelease {
    dir: TempDir,
}

impl PreviousRelease {
    /// Unpacks them; `None`, with a word of it, on a machine that they are not for.
    pub fn unpack() -> Option<PreviousRelease> {
        if !cfg!(target_arch = "x86_64") {
            eprintln!("skipped: the release before is kept for x86-64 alone");
            return None;
        }
        let dir = tempfile::Builder::new().prefix("elastic-previous-").tempdir().expect("a temporary directory");
        let archive = concat!(env!("CARGO_MANIFEST_DIR"), "/previous-release/programs.tar.xz");
        let tar = Command::new("tar").args(["-xJf", archive, "-C"]).arg(dir.path()).output().expect("run tar");
        assert!(tar.status.success(), "unpack {archive}: {}", String::from_utf8_lossy(&tar.stderr));
        Some(PreviousRelease { dir })
    }

    /// Where one of its programs lies.
    pub fn program(&self, name: &str) -> PathBuf {
        let path = self.dir.path().join(name);
        assert!(path.is_file(), "the release before has no {name}");
        path
    }
}
