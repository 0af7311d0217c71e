//! Processes that run while a test does: the product's own programs, as built next to the tests, and others. Programs are
//! built before the tests run: a test that builds is a slow test.

#![allow(unsafe_code)]

use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

use crate::wait::eventually;

/// Where the built binary `name` is: next to the test executable's directory.
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

/// Has the kernel kill the process with the thread that starts it.
pub fn dies_with_test(command: &mut Command) {
    // SAFETY: between fork and exec, prctl is async-signal-safe and touches only the child.
    unsafe {
        command.pre_exec(|| match libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) {
            0 => Ok(()),
            _ => Err(std::io::Error::last_os_error()),
        });
    }
}

/// A process and its log. Dropping it kills it; it also dies with the thread that started it.
#[derive(Debug)]
pub struct Process {
    /// Names it in messages.
    pub name: String,
    child: Child,
    log: PathBuf,
    begin: usize,
    folder: Option<TempDir>,
}

impl Process {
    /// Starts a built program with a log of its own, which a test that fails prints.
    pub fn start(program: &str, args: &[&str]) -> Process {
        Process::start_program(&binary(program), args)
    }

    /// Starts a program of another build, in the same way.
    pub fn start_program(program: &Path, args: &[&str]) -> Process {
        let folder = tempfile::Builder::new().prefix("elastic-process-").tempdir().expect("a temporary directory");
        let mut command = Command::new(program);
        command.args(args);
        let name = program.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let mut process = Process::spawn(&name, command, &folder.path().join("log"));
        process.folder = Some(folder);
        process
    }

    /// Starts a command. Its standard output and error are appended to `log`.
    pub fn spawn(name: &str, mut command: Command, log: &Path) -> Process {
        let out = std::fs::File::options().create(true).append(true).open(log).expect("a log file");
        command.stdout(out.try_clone().expect("a log file")).stderr(out);
        Process::spawn_as(name, command, log)
    }

    /// Starts a command whose standard output and error are set already.
    pub fn spawn_as(name: &str, mut command: Command, log: &Path) -> Process {
        let begin = std::fs::metadata(log).map_or(0, |metadata| metadata.len() as usize);
        command.stdin(Stdio::null());
        dies_with_test(&mut command);
        let child = command.spawn().unwrap_or_else(|error| panic!("cannot start {name}: {error}"));
        Process { name: name.into(), child, log: log.to_owned(), begin, folder: None }
    }

    /// Its process id.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// A number of kilobytes out of its `/proc/<pid>/status`.
    pub fn kilobytes(&self, field: &str) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.pid())).expect("a process that lives");
        let line = status.lines().find_map(|line| line.strip_prefix(field)).unwrap_or_else(|| panic!("no {field}"));
        line.trim().trim_end_matches(" kB").parse().expect("a number of kilobytes")
    }

    /// Sends it a signal.
    pub fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal)
            .unwrap_or_else(|error| panic!("signal {}: {error}", self.name));
    }

    /// Sends it a signal again and again, until it has ended. Within 30 s.
    pub async fn signal_until_it_ends(&mut self, signal: Signal) {
        let what = format!("the end of {} by {signal:?}", self.name);
        let ended = || {
            let gone = self.is_gone();
            if !gone {
                self.signal(signal);
            }
            std::future::ready(gone.then_some(()))
        };
        eventually(&what, Duration::from_secs(30), ended).await;
    }

    /// SIGKILL, and waits for its end. One that has ended already stays so.
    pub fn kill(&mut self) {
        self.child.kill().expect("kill a process");
        self.child.wait().expect("wait for a process");
    }

    /// SIGTERM, and waits for its end: the exit code, or minus the signal.
    pub async fn terminate(&mut self, limit: Duration) -> i32 {
        self.signal(Signal::TERM);
        self.exit(limit).await
    }

    /// Waits for its end: the exit code, or minus the signal.
    pub async fn exit(&mut self, limit: Duration) -> i32 {
        let what = format!("process {} ends", self.name);
        eventually(&what, limit, || std::future::ready(self.ended())).await
    }

    /// Its exit code, or minus the signal, if it has ended.
    pub fn ended(&mut self) -> Option<i32> {
        let status = self.child.try_wait().unwrap_or_else(|error| panic!("wait for {}: {error}", self.name))?;
        Some(status.code().unwrap_or_else(|| -status.signal().unwrap_or_default()))
    }

    /// Whether it has ended.
    pub fn is_gone(&mut self) -> bool {
        self.ended().is_some()
    }

    /// What it has written since it was started.
    pub fn output(&self) -> String {
        let text = std::fs::read(&self.log).unwrap_or_default();
        String::from_utf8_lossy(text.get(self.begin..).unwrap_or_default()).into_owned()
    }

    /// Waits until it has written `text`. Returns what follows, up to the next blank or slash.
    pub async fn says(&self, text: &str, limit: Duration) -> String {
        eventually(&format!("process {} says {text:?}", self.name), limit, async || {
            let output = self.output();
            let (_, rest) = output.split_once(text)?;
            let end = rest.find(|c: char| c.is_whitespace() || c == '/')?;
            Some(rest[..end].to_owned())
        })
        .await
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // It may have ended and been waited for.
        let _ = self.child.kill();
        let _ = self.child.wait();
        if self.folder.is_some() && std::thread::panicking() {
            eprintln!("--- {}\n{}", self.name, self.output());
        }
    }
}

/// Runs a binary to its end, without the variables that would configure it.
///
/// Panics if that takes longer than `within`.
pub async fn output(name: &str, args: &[&str], within: Duration) -> Output {
    output_of(&binary(name), args, within).await
}

/// Runs `elasticctl` on this store: whether it succeeded, and what it said on both streams.
///
/// Panics if that takes longer than 30 s.
pub async fn ctl(store: &str, args: &[&str]) -> (bool, String) {
    let output = output("elasticctl", &[&["--etcd", store], args].concat(), Duration::from_secs(30)).await;
    (output.status.success(), printed(&output))
}

/// The same, which must succeed.
pub async fn ctl_ok(store: &str, args: &[&str]) -> String {
    let (done, said) = ctl(store, args).await;
    assert!(done, "elasticctl {args:?}: {said}");
    said
}

/// What a program printed, errors last.
pub fn printed(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr)
}

/// Sends a process a signal. One that has ended gets none.
pub fn send(pid: u32, signal: Signal) {
    if let Some(pid) = i32::try_from(pid).ok().and_then(Pid::from_raw) {
        let _ = kill_process(pid, signal);
    }
}

/// The processes that a process has started and that live.
pub fn children(pid: u32) -> Vec<u32> {
    let children = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap_or_default();
    children.split_whitespace().filter_map(|pid| pid.parse().ok()).collect()
}

/// Compiles a library that programs load, with these further flags of the C compiler.
pub fn compile_library(source: &Path, library: &Path, flags: &[&str]) {
    let mut compiler = Command::new("cc");
    compiler.args(["-shared", "-fPIC", "-o"]).args([library, source]).args(flags).arg("-ldl");
    assert!(compiler.status().expect("run the C compiler").success(), "{compiler:?} failed");
}

/// A stand-in for NVIDIA's management library, with these GPUs in C's notation. It lies in `folder`.
pub fn fake_nvml(folder: &Path, gpus: &str) {
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/../agent/tests/fixtures/fake_nvml.c");
    compile_library(Path::new(source), &folder.join("libnvidia-ml.so.1"), &[&format!("-DGPUS={gpus}")]);
}

/// As [`output`], of a program of another build.
pub async fn output_of(program: &Path, args: &[&str], within: Duration) -> Output {
    let mut command = tokio::process::Command::new(program);
    command.args(args).env_remove("ELASTIC_ETCD").env_remove("ELASTIC_PREFIX").kill_on_drop(true);
    let ended = tokio::time::timeout(within, command.output()).await;
    ended.unwrap_or_else(|_| panic!("{} {args:?} did not end within {within:?}", program.display())).expect("run it")
}
