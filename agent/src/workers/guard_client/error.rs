//! Errors between the agent, its guard and a worker's start, with messages that say what to do. A worker's end is an
//! event, not an error.

use std::ffi::{OsStr, OsString};
use std::io;
use std::path::{Path, PathBuf};

use crate::guard::wire::SpawnRefusal;
use crate::machine::cpus::CpuSet;
use crate::machine::shortage::is_shortage;

use super::WorkerSpec;

/// The guard cannot be reached.
#[derive(Debug, thiserror::Error)]
pub enum GuardClientError {
    /// The guard has ended. [`Event::GuardLost`](super::Event::GuardLost) tells how.
    #[error("the guard process is gone, and with it every worker; start the agent again")]
    GuardLost,
    /// Its socket cannot be watched.
    #[error("cannot reach the guard process: {0}")]
    Connection(io::Error),
}

/// Why a worker was not started.
#[derive(Debug, thiserror::Error)]
pub enum SpawnError {
    /// The program was not found in the worker's PATH.
    #[error("no such program: {} (looked in PATH={})", .0.display(), .1.display())]
    NoSuchProgram(OsString, OsString),
    /// A program that was given as a path does not exist.
    #[error("no such program: {}", .0.display())]
    NoSuchFile(PathBuf),
    /// The program exists, but the interpreter or loader that it names does not.
    #[error("cannot run {}: the interpreter in its first line (or its dynamic loader) does not exist", .0.display())]
    NoInterpreter(PathBuf),
    /// The program may not be executed.
    #[error("not executable: {} (no x bit, a directory, or a noexec file system?)", .0.display())]
    NotExecutable(OsString),
    /// The file is not a program for this machine.
    #[error("cannot run {}: it is not a program for this machine", .0.display())]
    WrongFormat(OsString),
    /// The working directory cannot be entered.
    #[error("cannot enter the working directory {}: {}", .0.display(), .1)]
    Directory(PathBuf, io::Error),
    /// The worker may not use these CPUs, or may not use them any longer.
    #[error("cannot bind a worker to CPUs {0}: {1}; was the agent's cpuset changed, or CPUs switched off?")]
    Cpus(CpuSet, io::Error),
    /// Arguments and environment exceed what the kernel takes.
    #[error(
        "arguments and environment are too large: {total} bytes in all, {largest} of them in {largest_name}; \
         the kernel takes 131071 bytes for one string and a quarter of the stack limit (ulimit -s) in all"
    )]
    TooLarge {
        /// The bytes of all strings.
        total: usize,
        /// The bytes of the longest string.
        largest: usize,
        /// The name of that string.
        largest_name: String,
    },
    /// A string cannot be handed to a process.
    #[error(
        "cannot hand {0} to a process: it contains a NUL byte, or is an environment name that is empty or has a '='"
    )]
    Malformed(String),
    /// There are no arguments at all.
    #[error("no program given")]
    NoProgram,
    /// The system has no room for another process.
    #[error(
        "the system refused to make a process: {0} (check the limits: ulimit -u and -n, the cgroup's pids.max, memory)"
    )]
    NoRoom(io::Error),
    /// The program could not be executed for another reason.
    #[error("cannot run {}: {}", .0.display(), .1)]
    Other(OsString, io::Error),
    /// The last deadline that was sent has passed. This node may be out of the round.
    #[error("not started: the node's deadline has passed, so it may be out of the round")]
    DeadlinePassed,
    /// The workers are being stopped.
    #[error("not started: the workers are being stopped")]
    Stopping,
    /// The guard did not understand the request. This is a bug in this program.
    #[error("the guard refused a damaged request: {0}")]
    Damaged(String),
    /// The guard cannot be reached.
    #[error(transparent)]
    GuardClient(#[from] GuardClientError),
}

impl SpawnError {
    /// Whether the host is short of resources for now, so that the same start may succeed a moment later.
    pub fn is_shortage(&self) -> bool {
        match self {
            SpawnError::NoRoom(_) => true,
            SpawnError::Directory(_, cause) | SpawnError::Other(_, cause) => is_shortage(cause.raw_os_error()),
            _ => false,
        }
    }
}

/// Why the guard or the kernel refused to start a worker.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refused {
    pub(super) asked: SpawnAttempt,
    pub(super) refusal: SpawnRefusal,
}

impl Refused {
    /// Whether the node's deadline has passed: see [`SpawnError::DeadlinePassed`].
    pub fn is_late(&self) -> bool {
        self.refusal == SpawnRefusal::Deadline
    }

    /// The reason, for people. May look at files, which can take long.
    pub fn explain(self) -> SpawnError {
        self.asked.explain(self.refusal)
    }
}

/// The parts of a spec that an error message names, kept while the guard works on the spec.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct SpawnAttempt {
    program: OsString,
    path: Option<OsString>,
    directory: PathBuf,
    cpus: CpuSet,
    total: usize,
    largest: (usize, String),
}

impl SpawnAttempt {
    pub(super) fn new(spec: &WorkerSpec) -> Result<SpawnAttempt, SpawnError> {
        let program = spec.argv.first().ok_or(SpawnError::NoProgram)?.clone();
        let named = |name: &OsStr| format!("environment variable {}", name.display());
        let arguments =
            spec.argv.iter().enumerate().map(|(n, arg)| (arg.len() + 1, format!("argument {n}"), has_nul(arg)));
        let variables = spec.env.iter().map(|(name, value)| {
            // A name may begin with `=`: Windows' shells and WSL export such.
            let joined = name.as_encoded_bytes().iter().skip(1).any(|byte| *byte == b'=');
            let malformed = has_nul(name) || has_nul(value) || name.is_empty() || joined;
            (name.len() + value.len() + 2, named(name), malformed)
        });
        let mut total = 0;
        let mut largest = (0, String::new());
        for (length, name, malformed) in arguments.chain(variables) {
            if malformed {
                return Err(SpawnError::Malformed(name));
            }
            total += length;
            if length > largest.0 {
                largest = (length, name);
            }
        }
        if has_nul(spec.cwd.as_os_str()) {
            return Err(SpawnError::Malformed("the working directory".to_owned()));
        }
        let path = spec.env.get(OsStr::new("PATH")).cloned();
        Ok(SpawnAttempt { program, path, directory: spec.cwd.clone(), cpus: spec.cpus.clone(), total, largest })
    }

    fn explain(self, refusal: SpawnRefusal) -> SpawnError {
        let os = io::Error::from_raw_os_error;
        match refusal {
            SpawnRefusal::Deadline => SpawnError::DeadlinePassed,
            SpawnRefusal::Stopping => SpawnError::Stopping,
            SpawnRefusal::Fork(errno) => SpawnError::NoRoom(os(errno)),
            SpawnRefusal::Directory(errno) => SpawnError::Directory(self.directory, os(errno)),
            SpawnRefusal::Cpus(errno) => SpawnError::Cpus(self.cpus, os(errno)),
            SpawnRefusal::Request(what) => SpawnError::Damaged(what),
            SpawnRefusal::Execute(libc::ENOENT) => self.not_found(),
            SpawnRefusal::Execute(libc::EACCES) => SpawnError::NotExecutable(self.program),
            SpawnRefusal::Execute(libc::ENOEXEC) => SpawnError::WrongFormat(self.program),
            SpawnRefusal::Execute(libc::E2BIG) => {
                let (largest, largest_name) = self.largest;
                SpawnError::TooLarge { total: self.total, largest, largest_name }
            }
            SpawnRefusal::Execute(errno) => SpawnError::Other(self.program, os(errno)),
        }
    }

    /// The kernel reports "no such file" both for a missing program and for a missing interpreter that the program
    /// names.
    fn not_found(self) -> SpawnError {
        if self.program.as_encoded_bytes().contains(&b'/') {
            let file = self.directory.join(&self.program);
            return if file.exists() { SpawnError::NoInterpreter(file) } else { SpawnError::NoSuchFile(file) };
        }
        // The directories that execvp searches if PATH is not set.
        let path = self.path.unwrap_or_else(|| "/usr/bin:/bin".into());
        let found =
            std::env::split_paths(&path).map(|dir| self.directory.join(dir).join(&self.program)).find(|f| is_file(f));
        match found {
            Some(file) => SpawnError::NoInterpreter(file),
            None => SpawnError::NoSuchProgram(self.program, path),
        }
    }
}

fn is_file(path: &Path) -> bool {
    path.metadata().is_ok_and(|m| m.is_file())
}

fn has_nul(string: &OsStr) -> bool {
    string.as_encoded_bytes().contains(&0)
}
