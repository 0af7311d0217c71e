//! The tarball in a root that has nothing but what it says it needs: glibc's libraries.

use elastic_tests::prelude::*;
use std::env::consts::ARCH;

use super::place::Place;
use super::{PROGRAMS, is_root, made, succeeds};

/// Belong to glibc on every system.
const GLIBC: [&str; 6] = ["ld-linux-", "libc.so.6", "libdl.so.2", "libm.so.6", "libpthread.so.0", "librt.so.1"];

/// Copies the libraries that a program names to the same place in the root.
fn copy_libraries(program: &Path, root: &Path) {
    for word in succeeds(Command::new("ldd").arg(program)).split_whitespace().filter(|word| word.starts_with('/')) {
        let name = Path::new(word).file_name().unwrap().to_str().unwrap();
        assert!(GLIBC.iter().any(|library| name.starts_with(library)), "{} needs {word}", program.display());
        let target = root.join(word.trim_start_matches('/'));
        std::fs::create_dir_all(target.parent().unwrap()).unwrap();
        std::fs::copy(word, target).unwrap();
    }
}

#[tokio::test]
#[ignore = "needs dist/: make test-dist"]
async fn a_job_trains_where_there_is_only_glibc() {
    let files = made("DIST", "elastic-", &format!("-{ARCH}-linux.tar.gz"));
    let [tarball] = &files[..] else { return assert!(files.is_empty(), "one tarball: {files:?}") };
    if !is_root() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path();
    std::fs::create_dir_all(root.join("usr/local")).unwrap();
    let place = Place::root(root, "", "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin");
    let unpack = ["--strip-components=1", "-C", "usr/local"];
    succeeds(Command::new("tar").arg("-xzf").arg(tarball).args(unpack).current_dir(root));
    let bin = root.join("usr/local/bin");
    for program in PROGRAMS {
        copy_libraries(&bin.join(program), root);
        let version = succeeds(place.command(program).arg("--version"));
        assert!(version.ends_with(concat!(" ", env!("CARGO_PKG_VERSION"), "\n")), "{version}");
    }
    place.tell("the tarball is unpacked");
    place.trains_alone("the tarball").await;

    // What lies beside the programs
    let local = root.join("usr/local");
    for file in [
        "share/man/man1/elasticctl-drain.1",
        "share/bash-completion/completions/elastic-agent",
        "share/zsh/site-functions/_elastic-trainer",
        "share/fish/vendor_completions.d/elastic-coordinator.fish",
        "lib/systemd/system/elastic-train-agent@.service",
        "share/doc/elastic/LICENSE-MIT",
        "share/doc/elastic/jobs.proto",
    ] {
        assert!(local.join(file).is_file(), "{file} is missing");
    }
    let licences = std::fs::read_to_string(local.join("share/doc/elastic/THIRD-PARTY-LICENCES")).unwrap();
    assert!(["tokio ", "etcd-client ", "gemm "].iter().all(|library| licences.contains(library)));
    assert!(!licences.contains("proptest "), "what only tests use is no part of the programs");
}

#[test]
#[ignore = "needs dist/: make test-dist"]
fn every_page_and_completion_can_be_read() {
    let files = made("DIST", "elastic-", &format!("-{ARCH}-linux.tar.gz"));
    let [tarball] = &files[..] else { return assert!(files.is_empty(), "one tarball: {files:?}") };
    let dir = tempfile::tempdir().unwrap();
    succeeds(Command::new("tar").arg("-xzf").arg(tarball).arg("--strip-components=1").current_dir(dir.path()));
    for program in PROGRAMS {
        let script = dir.path().join("share/bash-completion/completions").join(program);
        succeeds(Command::new("bash").arg("-n").arg(&script));
        // As bash asks it for the flags that begin so.
        let ask = format!(
            ". {}; COMP_WORDS=({program} --he); COMP_CWORD=1; _comp=$(complete -p {program}); _comp=${{_comp##*-F }}; \
             ${{_comp%% *}} {program} --he {program}; echo ${{COMPREPLY[*]}}",
            script.display()
        );
        let replied = succeeds(Command::new("bash").args(["-c", &ask]));
        assert!(replied.contains("--help"), "{program}: {replied}");
    }
    let pages = std::fs::read_dir(dir.path().join("share/man/man1")).unwrap();
    for page in pages.map(|entry| entry.unwrap().path()) {
        // groff's own complaints would be on standard error.
        let mut man = Command::new("man");
        let output = man.args(["--warnings", "-l"]).arg(&page).env("MANWIDTH", "80").output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success() && text.contains("NAME") && text.contains("SYNOPSIS"), "{page:?}:\n{text}");
        assert_eq!(String::from_utf8_lossy(&output.stderr), "", "{page:?}");
    }
}
