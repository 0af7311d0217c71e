//! What `make dist` has made, each installed where nothing else is, and a job of two nodes trained there. `make test-dist`
//! runs these.
//!
//! | module | what it is installed into |
//! |---|---|
//! | `debian` | the packages, into a root of this machine's own Debian or Ubuntu, fresh from its mirror |
//! | `tarball` | into a root that has glibc's libraries and no other file |
//! | `wheel` | into a fresh virtual environment |
//! | `place` | such a place, and what runs in it |

mod debian;
mod place;
mod tarball;
mod wheel;

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use elastic_tests::requirement::skip;

fn root() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/.."))
}

/// The files of `dist/` that begin and end so, sorted. Empty, with a line that says so, where there are none, unless
/// `ELASTIC_REQUIRE_DIST` is set.
fn made(begin: &str, end: &str) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(root().join("dist")).into_iter().flatten().flatten();
    let fits = |path: &PathBuf| {
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        name.starts_with(begin) && name.ends_with(end)
    };
    let mut files: Vec<PathBuf> = entries.map(|entry| entry.path()).filter(fits).collect();
    files.sort();
    if files.is_empty() {
        skip("DIST", format_args!("there is no dist/{begin}*{end}: run `make dist`"));
    }
    files
}

/// Only root can put a root of its own together.
fn is_root() -> bool {
    let root = rustix::process::geteuid().is_root();
    if !root {
        skip("DIST", "only root can install into a root of its own");
    }
    root
}

fn printed(output: &Output) -> String {
    String::from_utf8_lossy(&[&output.stdout[..], &output.stderr[..]].concat()).into_owned()
}

fn succeeds(command: &mut Command) -> String {
    let output = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    assert!(output.status.success(), "{command:?}\n{}", printed(&output));
    printed(&output)
}

#[test]
#[ignore = "needs dist/: make test-dist"]
fn the_sums_are_those_of_all_files() {
    let files = made("", "");
    if files.is_empty() {
        return;
    }
    let dist = root().join("dist");
    succeeds(Command::new("sha256sum").args(["--check", "--strict", "SHA256SUMS"]).current_dir(&dist));
    let sums = std::fs::read_to_string(dist.join("SHA256SUMS")).unwrap();
    assert_eq!(sums.lines().count(), files.len() - 1, "one line for each file but their own:\n{sums}");
}
