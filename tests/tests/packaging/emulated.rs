//! What `make dist ARCH=…` has made for machines of another architecture, run by qemu with nothing of theirs but glibc
//! (`scripts/setup.sh dist-test ARCH`).

use elastic_tests::prelude::*;

use super::{PROGRAMS, made, printed, root, succeeds};

const LIMIT: Duration = Duration::from_secs(60);

/// The other architecture: as Rust and Python call it, as Debian does, and as readelf does.
const OTHER: (&str, &str, &str) =
    if cfg!(target_arch = "x86_64") { ("aarch64", "arm64", "AArch64") } else { ("x86_64", "amd64", "X86-64") };

/// The one file of `dist/` that is so for the other architecture. `None` where there is none.
fn package(begin: &str, end: &str) -> Option<PathBuf> {
    let mut files = made("EMULATED", begin, end);
    assert!(files.len() <= 1, "one of each: {files:?}");
    files.pop()
}

fn unpacked_tarball(into: &Path) -> Option<PathBuf> {
    let tarball = package("elastic-", &format!("-{}-linux.tar.gz", OTHER.0))?;
    succeeds(Command::new("tar").arg("-xzf").arg(tarball).arg("--strip-components=1").arg("-C").arg(into));
    Some(into.join("bin"))
}

/// That these are the tarball's programs, which another test runs.
fn same_programs(found: &[PathBuf], tarballs: &Path) {
    assert!(!found.is_empty());
    for program in found {
        let theirs = tarballs.join(program.file_name().unwrap());
        assert!(std::fs::read(program).unwrap() == std::fs::read(theirs).unwrap(), "{}", program.display());
    }
}

#[tokio::test]
#[ignore = "needs dist/: make dist ARCH=aarch64, make test-dist ARCH=aarch64"]
async fn every_program_runs_and_workers_train() {
    let dir = tempfile::tempdir().unwrap();
    let Some(bin) = unpacked_tarball(dir.path()) else { return };
    let emulator = root().join(format!("target/packaging/emulator-{}/bin/emulator", OTHER.0));
    if !emulator.is_file() {
        return skip("EMULATED", format_args!("there is no qemu: run scripts/setup.sh dist-test {}", OTHER.0));
    }
    let emulated = |program: &str| {
        let mut command = Command::new(&emulator);
        command.arg(bin.join(program)).stdin(Stdio::null());
        command
    };
    for program in PROGRAMS {
        let header = succeeds(Command::new("readelf").arg("--file-header").arg(bin.join(program)));
        assert!(header.lines().any(|line| line.contains("Machine:") && line.contains(OTHER.2)), "{header}");
        let version = succeeds(emulated(program).arg("--version"));
        assert_eq!(version, format!("{program} {}\n", env!("CARGO_PKG_VERSION")));
        let help = succeeds(emulated(program).arg("--help"));
        assert!(help.contains(&format!("Usage: {program} ")), "{help}");
    }

    // The store and the operator's program, over gRPC
    let store = format!("127.0.0.1:{}", free_port());
    let peer = format!("127.0.0.1:{}", free_port());
    let mut coordinator = emulated("elastic-coordinator");
    coordinator.args(["--embedded", "--listen", &store, "--peer-listen", &peer]);
    let mut coordinator = Process::spawn("coordinator", coordinator, &dir.path().join("coordinator.log"));
    let told = eventually("elasticctl looks the coordinator's store over", LIMIT, async || {
        let output = emulated("elasticctl").args(["doctor", "--etcd", &store]).output().unwrap();
        output.status.success().then(|| printed(&output))
    })
    .await;
    assert!(told.contains("the embedded store") && told.contains("\n0 failed, "), "{told}");
    coordinator.kill();

    // Workers of the other architecture under an agent of this one: qemu has no PR_SET_CHILD_SUBREAPER for an agent.
    let mut agent = Command::new(binary("elastic-agent"));
    agent.args(["--standalone", "--nproc-per-node=2", "--no-python"]).arg(&emulator);
    let said = succeeds(agent.arg(bin.join("elastic-trainer")).arg("digits").current_dir(dir.path()));
    assert!(said.contains("world_size=2") && said.contains("test accuracy 0.9"), "{said}");
    eprintln!("packaging: two workers for {} have trained by qemu", OTHER.0);
}

#[test]
#[ignore = "needs dist/: make dist ARCH=aarch64, make test-dist ARCH=aarch64"]
fn debian_packages_are_of_its_architecture() {
    let dir = tempfile::tempdir().unwrap();
    let Some(bin) = unpacked_tarball(dir.path()) else { return };
    let mut found = Vec::new();
    for name in ["elastic-train-agent", "elastic-train-coordinator"] {
        let file = package(&format!("{name}_"), &format!("_{}.deb", OTHER.1)).expect("made with the tarball");
        let said = succeeds(Command::new("dpkg-deb").arg("--field").arg(&file).args(["Package", "Architecture"]));
        assert_eq!(said, format!("Package: {name}\nArchitecture: {}\n", OTHER.1));
        let tree = dir.path().join(name);
        succeeds(Command::new("dpkg-deb").arg("--extract").arg(&file).arg(&tree));
        found.extend(std::fs::read_dir(tree.join("usr/bin")).unwrap().map(|entry| entry.unwrap().path()));
    }
    assert_eq!(found.len(), PROGRAMS.len(), "{found:?}");
    same_programs(&found, &bin);
}

#[test]
#[ignore = "needs dist/: make dist ARCH=aarch64, make test-dist ARCH=aarch64"]
fn pip_takes_the_wheel_for_that_platform() {
    let dir = tempfile::tempdir().unwrap();
    let Some(bin) = unpacked_tarball(dir.path()) else { return };
    let install = |platform: &str, into: &Path| {
        let mut pip = Command::new("python3");
        pip.args(["-m", "pip", "install", "--quiet", "--no-index", "--disable-pip-version-check", "--no-deps"]);
        pip.args(["--only-binary=:all:", "--platform", platform, "--find-links"]).arg(root().join("dist"));
        pip.arg("--target").arg(into).arg("elastic-agent");
        pip
    };
    let target = dir.path().join("target");
    succeeds(&mut install(&format!("manylinux_2_28_{}", OTHER.0), &target));
    let found: Vec<_> = PROGRAMS.iter().map(|program| target.join("bin").join(program)).collect();
    same_programs(&found, &bin);
    // On an older glibc it would not run.
    let older = install(&format!("manylinux_2_17_{}", OTHER.0), &dir.path().join("older")).output().unwrap();
    assert!(!older.status.success(), "{older:?}");
}
