//! What `make dist` has made, each installed where nothing else is, and a job of two nodes trained there. `make
//! test-dist` runs these.
//!
//! | module | what it is installed into |
//! |---|---|
//! | `debian` | the packages, into a root of this machine's own Debian or Ubuntu, fresh from its mirror |
//! | `emulated` | what is for machines of another architecture: into folders, and run by qemu |
//! | `tarball` | into a root that has glibc's libraries and no other file |
//! | `wheel` | into a fresh virtual environment |
//! | `place` | such a place, and what runs in it |

mod debian;
mod emulated;
mod place;
mod tarball;
mod wheel;

use elastic_tests::prelude::*;

const PROGRAMS: [&str; 4] = ["elastic-agent", "elastic-coordinator", "elastic-trainer", "elasticctl"];

fn root() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/.."))
}

/// The files of `dist/` that begin and end so, sorted. Empty, with a line that says so, where there are none, unless
/// `ELASTIC_REQUIRE_{required}` is set.
fn made(required: &str, begin: &str, end: &str) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(root().join("dist")).into_iter().flatten().flatten();
    let fits = |path: &PathBuf| {
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        name.starts_with(begin) && name.ends_with(end)
    };
    let mut files: Vec<PathBuf> = entries.map(|entry| entry.path()).filter(fits).collect();
    files.sort();
    if files.is_empty() {
        skip(required, format_args!("there is no dist/{begin}*{end}: run `make dist`"));
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
    let files = made("DIST", "", "");
    if files.is_empty() {
        return;
    }
    let dist = root().join("dist");
    succeeds(Command::new("sha256sum").args(["--check", "--strict", "SHA256SUMS"]).current_dir(&dist));
    let sums = std::fs::read_to_string(dist.join("SHA256SUMS")).unwrap();
    assert_eq!(sums.lines().count(), files.len() - 1, "one line for each file but their own:\n{sums}");
}

#[test]
fn packages_for_machines_whose_standard_library_is_missing_are_refused_in_a_line() {
    let folder = tempfile::tempdir().unwrap();
    // A Rust that has nothing of any other machine's.
    let rustc = folder.path().join("rustc");
    let usual = std::env::var("PATH").unwrap();
    let says = format!(
        "#!/bin/sh\ncase \"$*\" in *target-libdir*) echo /no/such/folder; exit;; esac\nPATH='{usual}' exec rustc \"$@\"\n"
    );
    std::fs::write(&rustc, says).unwrap();
    std::fs::set_permissions(&rustc, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    let path = format!("{}:{usual}", folder.path().display());
    let other = if cfg!(target_arch = "x86_64") { "aarch64" } else { "x86_64" };
    for (arch, said) in [
        (other, format!("rustup target add {other}-unknown-linux-gnu")),
        ("sparc", "packages are made for x86_64 or aarch64, not for sparc".to_owned()),
    ] {
        let mut command = Command::new("python3");
        command.arg(root().join("packaging/dist")).args(["--arch", arch]).current_dir(folder.path());
        command.env("PATH", &path).env("CARGO_TARGET_DIR", folder.path().join("target"));
        let output = command.output().expect("run python3");
        let text = printed(&output);
        assert!(!output.status.success() && text.starts_with("dist: ") && text.contains(&said), "{text}");
        assert_eq!(text.lines().count(), 1, "{text}");
    }
}
