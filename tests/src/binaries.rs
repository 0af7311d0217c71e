//! The product's own binaries, as built beside the tests, and running them. They are built before the tests run: a test
//! that builds is a slow test.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Output};
use std::time::Duration;

use tempfile::TempDir;

use crate::etcd::process;
use crate::wait::eventually;

/// Where the built binary `name` lies: next to the test executable's directory.
///
/// Panics, saying how to build it, if it is not there.
pub fn binary(name: &str) -> PathBuf {
    let test = std::env::current_exe().expect("the test's own path");
    let deps = test.parent().expect("the test's directory");
    let built = if deps.ends_with("deps") { deps.parent().expect("the profile's directory") } else { deps };
    let path = built.join(name);
    assert!(path.is_file(), "{} is not built: run `cargo build --workspace --bins` first", path.display());
    path
}

/// Removes the variables that would configure an agent or torchrun from the environment that `command` inherits.
pub fn remove_settings(command: &mut Command) {
    for (name, _) in std::env::vars().filter(|(name, _)| name.starts_with("PET_") || name.starts_with("TORCH")) {
        command.env_remove(name);
    }
}

/// A binary that runs beside the test. Dropping it kills it; it also dies with the test's thread.
pub struct Running {
    dir: TempDir,
    child: Child,
}

impl Running {
    /// Starts a binary; what it prints goes to a file.
    pub fn start(name: &str, args: &[&str]) -> Running {
        Running::start_program(&binary(name), args)
    }

    /// Starts a program of another build.
    pub fn start_program(program: &Path, args: &[&str]) -> Running {
        let dir = tempfile::Builder::new().prefix("elastic-running-").tempdir().expect("a temporary directory");
        let args: Vec<String> = args.iter().map(ToString::to_string).collect();
        let child = process::spawn(program, &args, &dir.path().join("log"));
        Running { dir, child }
    }

    /// All that it has printed.
    pub fn log(&self) -> String {
        std::fs::read_to_string(self.dir.path().join("log")).unwrap_or_default()
    }

    /// What follows `mark` in its log up to the next blank or slash, once that is there.
    pub async fn says(&self, mark: &str, within: Duration) -> String {
        eventually(&format!("the log says {mark:?}"), within, async || {
            let log = self.log();
            let (_, rest) = log.split_once(mark)?;
            let end = rest.find(|c: char| c.is_whitespace() || c == '/')?;
            Some(rest[..end].to_owned())
        })
        .await
    }

    /// Its process id.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Waits for its own end: its exit code, if no signal ended it.
    pub async fn exit(&mut self, within: Duration) -> Option<i32> {
        let child = &mut self.child;
        let ended = || std::future::ready(child.try_wait().expect("wait for it"));
        eventually("it ends by itself", within, ended).await.code()
    }

    /// SIGKILL, and waits for its end.
    pub fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    /// SIGTERM, and waits for its end.
    pub async fn terminate(&mut self, within: Duration) -> ExitStatus {
        process::signal(&self.child, libc::SIGTERM);
        let child = &mut self.child;
        eventually("it ends after SIGTERM", within, || std::future::ready(child.try_wait().expect("wait for it"))).await
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.kill();
        if std::thread::panicking() {
            eprintln!("its log:\n{}", self.log());
        }
    }
}

/// Runs a binary to its end, without the variables that would configure it.
///
/// Panics if that takes longer than `within`.
pub async fn output(name: &str, args: &[&str], within: Duration) -> Output {
    output_of(&binary(name), args, within).await
}

/// As [`output`], of a program of another build.
pub async fn output_of(program: &Path, args: &[&str], within: Duration) -> Output {
    let mut command = tokio::process::Command::new(program);
    command.args(args).env_remove("ELASTIC_ETCD").env_remove("ELASTIC_PREFIX").kill_on_drop(true);
    let ended = tokio::time::timeout(within, command.output()).await;
    ended.unwrap_or_else(|_| panic!("{} {args:?} did not end within {within:?}", program.display())).expect("run it")
}
