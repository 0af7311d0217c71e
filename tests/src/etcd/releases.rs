//! The servers that tests can take: the machine's own, and those that `scripts/etcd.sh` puts into the user's cache.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use crate::requirement::skip;

/// The releases that tests run on, oldest first. The first is Debian 12's, the only one with a v2 API.
pub const RELEASES: [&str; 4] = ["3.4", "3.5", "3.6", "3.7"];

/// Names another release for tests that name none: see [`usual_etcd`].
const CHOICE: &str = "ELASTIC_ETCD";

/// The server of a release, `3.5`, `3.6` or `3.7`, that `scripts/etcd.sh` has put into the user's cache: its newest. That
/// of `3.4` is the machine's own.
///
/// Panics if there is none and `ELASTIC_REQUIRE_ETCD35`, or that of another release, is set.
pub fn etcd_of(release: &str) -> Option<PathBuf> {
    let own = || Some(own_etcd()).filter(|own| version(own).is_some_and(|version| version.starts_with(release)));
    let found = if release == RELEASES[0] { own() } else { cached(release) };
    if found.is_none() {
        let why = match release == RELEASES[0] {
            true => format!("the machine's own etcd is not {release}"),
            false => format!("there is no etcd {release}: `scripts/etcd.sh {release}` gets one"),
        };
        skip(&format!("ETCD{}", release.replace('.', "")), why);
    }
    found
}

/// The server that tests start unless they name one: of the release in `ELASTIC_ETCD`, else the newest of
/// [`RELEASES`], else the machine's own, which is said once.
///
/// Panics if the one in `ELASTIC_ETCD` is not there, or the newest is required and is not there.
pub fn usual_etcd() -> &'static Path {
    static USUAL: OnceLock<PathBuf> = OnceLock::new();
    USUAL.get_or_init(|| {
        if let Ok(release) = std::env::var(CHOICE) {
            return etcd_of(&release).unwrap_or_else(|| panic!("{CHOICE} is {release}, and there is no such etcd"));
        }
        let newest = RELEASES[RELEASES.len() - 1];
        etcd_of(newest).unwrap_or_else(|| {
            eprintln!("these tests take the machine's own etcd, and not {newest}");
            own_etcd()
        })
    })
}

/// The machine's own server, also where a later one comes before it on the path.
pub(super) fn own_etcd() -> PathBuf {
    let installed = PathBuf::from("/usr/bin/etcd");
    if installed.exists() { installed } else { PathBuf::from("etcd") }
}

/// What a server says that it is.
fn version(binary: &Path) -> Option<String> {
    let output = Command::new(binary).arg("--version").output().ok()?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    Some(text.lines().next()?.strip_prefix("etcd Version: ")?.to_owned())
}

fn cached(release: &str) -> Option<PathBuf> {
    let folder = |name: &str| std::env::var_os(name).map(PathBuf::from);
    let cache = folder("XDG_CACHE_HOME").or_else(|| Some(folder("HOME")?.join(".cache")))?;
    let kept = std::fs::read_dir(cache.join("elastic-etcd")).ok()?;
    let patch = |name: &str| match name.strip_prefix(release)?.strip_prefix('.') {
        Some(patch) => patch.parse::<u32>().ok(),
        None => (name == release).then_some(0),
    };
    let servers = kept
        .flatten()
        .filter_map(|entry| Some((patch(entry.file_name().to_str()?)?, entry.path().join("etcd"))))
        .filter(|(_, binary)| binary.exists());
    Some(servers.max()?.1)
}
