//! `scripts/setup.sh` on machines that lack something: it says so in one line, and what to do.

use elastic_tests::prelude::*;
use std::os::unix::fs::symlink;

/// A machine that has these programs of this one, and no others but those that a test adds.
struct Machine(TempDir);

impl Machine {
    fn new() -> Machine {
        let machine = Machine(tempfile::tempdir().unwrap());
        std::fs::set_permissions(machine.0.path(), PermissionsExt::from_mode(0o755)).unwrap();
        for program in ["bash", "cat", "dirname", "env", "head", "sed", "sort"] {
            symlink(Machine::installed(program), machine.0.path().join(program)).unwrap();
        }
        machine
    }

    fn installed(program: &str) -> PathBuf {
        let path = std::env::var_os("PATH").unwrap();
        let found = std::env::split_paths(&path).map(|folder| folder.join(program)).find(|path| path.is_file());
        found.unwrap_or_else(|| panic!("{program} is not on PATH"))
    }

    /// With a program that is this line of shell.
    fn with(self, program: &str, line: &str) -> Machine {
        let path = self.0.path().join(program);
        std::fs::write(&path, format!("#!/bin/bash\n{line}\n")).unwrap();
        std::fs::set_permissions(&path, PermissionsExt::from_mode(0o755)).unwrap();
        self
    }

    fn with_rust(self, version: &str) -> Machine {
        self.with("cargo", "exit 1").with("rustc", &format!("echo 'rustc {version}'"))
    }

    /// What setup says in its last line as a user without rights; it must have failed.
    fn refuses(&self) -> String {
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../scripts/setup.sh").canonicalize().unwrap();
        let source = std::fs::read_to_string(&script).unwrap();
        // The script's own folder may be one that only its owner can enter.
        let root = self.0.path().join("checkout");
        std::fs::create_dir_all(root.join("scripts")).unwrap();
        std::fs::write(root.join("scripts/setup.sh"), source).unwrap();
        std::fs::write(root.join("Cargo.toml"), "rust-version = \"1.90\"\n").unwrap();
        let mut command = Command::new(Machine::installed("setpriv"));
        if rustix::process::geteuid().is_root() {
            command.args(["--reuid=65534", "--clear-groups"]);
        }
        command.arg(self.0.path().join("bash")).arg(root.join("scripts/setup.sh")).arg("demo");
        let output = command.env("PATH", self.0.path()).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(1), "{said}");
        said.lines().last().unwrap_or_default().to_owned()
    }
}

#[test]
fn an_old_rustc_is_named_with_the_version_that_is_needed() {
    for old in ["1.63.0 (4b91a6ea7 2022-08-08) (built from a source tarball)", "1.89.0-nightly (x)", "1.9.0"] {
        let said = Machine::new().with_rust(old).refuses();
        let number = old.split(['-', ' ']).next().unwrap();
        assert!(said.starts_with(&format!("setup: rustc {number} (")), "{said}");
        assert!(said.contains("1.90 or newer is needed: 'rustup update stable'"), "{said}");
    }
    let said = Machine::new().refuses();
    assert!(said.contains("Rust is not installed, and 1.90 or newer is needed: see https://rustup.rs"), "{said}");
}

#[test]
fn a_new_rustc_is_taken_and_what_else_is_missing_is_named() {
    for new in ["1.90.0 (x)", "1.100.0-nightly (x)", "2.0.0"] {
        let said = Machine::new().with_rust(new).refuses();
        assert!(said.contains("what Debian calls build-essential protobuf-compiler"), "{new}: {said}");
    }
}

#[test]
fn without_sudo_or_network_one_line_says_what_to_do() {
    let by_hand = "run 'apt-get install build-essential protobuf-compiler' as root, then try again";
    let machine = Machine::new().with_rust("1.95.0").with("apt-get", "exit 100");
    let said = machine.refuses();
    assert!(said.contains("there is no sudo") && said.ends_with(by_hand), "{said}");

    let said = machine.with("sudo", "exec \"$@\"").refuses();
    assert!(
        said.contains("could not be installed") && said.contains("no network?") && said.ends_with(by_hand),
        "{said}"
    );
}
