//! Where the workers' output goes: the agent's own streams, files in torchrun's layout, the console with a prefix.
//!
//! ```text
//! <log_dir>/<run id>_<random>/attempt_<n>/<local rank>/stdout.log   (redirected or tee'd)
//!                                                      stderr.log
//!                                                      error.json   (written by the worker)
//! ```
//!
//! The first round with a restart count gets torchrun's `attempt_<restart count>`. A later round with the same count,
//! after nodes came or went, gets `attempt_<restart count>_round_<round>`, because torchrun's name is taken by then.
//! (torchrun itself erases what is there.)
//!
//! | for a stream | it goes |
//! |---|---|
//! | stdout with neither flag | to the agent's own stdout, inherited |
//! | stderr with neither flag | through the agent to its stderr, bytes unchanged; inherited where that is a terminal |
//! | `--redirects` | straight to its file; the agent does not touch it, unless it is to be rotated |
//! | `--tee` | through the agent: raw bytes to its file, whole lines with a prefix to the console |
//!
//! Stderr goes through the agent so that the agent knows its last lines.
//!
//! A slow file or console loses nothing that goes through the agent. A worker that writes faster than they take it
//! waits in its own write, as it would without the agent. Choose `--redirects` where the console may hang.
//!
//! Trouble with the logs is no reason to stop training. An unusable log directory is an error at the agent's start,
//! when nothing is lost yet. Later, a stream whose file cannot be opened goes to the console instead, with a warning. A
//! file that the agent writes drops what a full disk does not take, notes the gap, and continues. A *redirected* stream
//! is the worker's own file: on a full disk the worker's own write fails, as with any shell redirection.

mod attempts;
mod console;
mod file;
mod filter;
mod history;
mod in_use;
mod lines;
mod options;
mod reading;
mod ring;
mod stream;
mod text;
mod worker;

use std::fs::{self, DirBuilder, File};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};
use std::thread;
use std::time::Duration;

pub use console::Console;
pub(crate) use console::ConsoleStream;
pub(crate) use file::Rotation;
pub(crate) use filter::Needles;
pub(crate) use history::History;
#[cfg(test)]
pub(crate) use options::Streams;
pub(crate) use options::StreamsByRank;
pub use options::{LogDir, LogNames, LogOptions};
pub(crate) use reading::LogReaders;
pub use worker::WorkerLogs;

use attempts::{Attempts, Folder};
use filter::Duplicates;
use history::Source;
use in_use::in_use;
use stream::Flow;
use worker::{StderrTail, WorkerOutput};

/// A worker's output descriptors. `None`: the agent's own stream.
#[derive(Debug, Default)]
pub struct Stdio {
    /// Standard output.
    pub stdout: Option<OwnedFd>,
    /// Standard error.
    pub stderr: Option<OwnedFd>,
}

/// The log directory cannot be used.
#[derive(Debug, thiserror::Error)]
#[error(
    "cannot create the log directory {}: {cause}; choose another with --log-dir, or --log-dir=/dev/null for none",
    .directory.display()
)]
pub struct LogError {
    directory: PathBuf,
    cause: io::Error,
}

/// The logs of one agent.
#[derive(Debug)]
pub struct Logs {
    options: LogOptions,
    names: LogNames,
    console: Console,
    /// `<log_dir>/<run id>_<random>`. `None` if nothing is written.
    root: Option<PathBuf>,
    attempts: Attempts,
    /// Holds a lock on `root`, see [`in_use()`].
    _in_use: Arc<OnceLock<File>>,
    flow: Flow,
    history: History,
}

impl Logs {
    /// Creates the directory for this agent's logs. A directory that cannot be created is an error now, rather than
    /// after the first hour of training.
    pub fn open(options: LogOptions, names: LogNames, console: Console) -> Result<Logs, LogError> {
        let random = || uuid::Uuid::new_v4().simple().to_string()[..8].to_owned();
        let base = match &options.dir {
            LogDir::Disabled => return Ok(Logs::at(None, options, names, console)),
            LogDir::At(dir) => std::path::absolute(dir).unwrap_or_else(|_| dir.clone()),
            LogDir::Temporary => std::env::temp_dir().join(format!("torchelastic_{}", random())),
        };
        // An id may be any text, but a directory's name may not.
        let directory = base.join(format!("{}_{}", names.run_id.replace(['/', '\0'], "_"), random()));
        let asked_for = options.dir != LogDir::Temporary;
        let created = match asked_for {
            true => fs::create_dir_all(&directory),
            // No setting says who may read the logs, so only this user may. A temporary directory that does not exist
            // is a mistake and is not created.
            false => DirBuilder::new().mode(0o700).create(&base).and_then(|()| fs::create_dir(&directory)),
        };
        match created {
            Ok(()) => Ok(Logs::at(Some(directory), options, names, console)),
            Err(cause) if !asked_for => {
                // No flag asks for files. So training continues without them.
                tracing::warn!(
                    "cannot create a log directory, {}: {cause}; the agent writes no output and no error files: \
                     name a directory with --log-dir, or correct TMPDIR",
                    directory.display()
                );
                Ok(Logs::at(None, options, names, console))
            }
            Err(cause) => Err(LogError { directory, cause }),
        }
    }

    fn at(root: Option<PathBuf>, options: LogOptions, names: LogNames, console: Console) -> Logs {
        let attempts = Attempts::new(options.attempts);
        let in_use = root.as_deref().map(in_use).unwrap_or_default();
        let (flow, history) = (Flow::new(), History::default());
        Logs { options, names, console, root, attempts, _in_use: in_use, flow, history }
    }

    /// What readers of the output look up here.
    pub fn history(&self) -> History {
        self.history.clone()
    }

    /// The newest worker of this local rank has this rank in this round: its output is found by both.
    pub fn placed(&self, local_rank: u32, round: u64, rank: u32) {
        self.history.placed(local_rank, round, rank);
    }

    /// `<log_dir>/<run id>_<random>`. `None` if nothing is written.
    pub fn directory(&self) -> Option<&Path> {
        self.root.as_deref()
    }

    /// Opens the attempt of a round. If its directory cannot be created, this logs a warning, and the attempt has no
    /// files.
    pub fn begin_attempt(&self, restarts: u32, round: u64) -> Attempt<'_> {
        let directory = self.root.as_ref().and_then(|root| {
            let begun = self.attempts.begin(root, restarts, round);
            begun
                .inspect_err(|error| {
                    tracing::warn!(
                        within = %root.display(), restarts, round, %error,
                        "cannot create a log directory; this attempt's output goes to the console"
                    );
                })
                .ok()
        });
        let duplicates = |needles: &Option<Needles>, name: &str| {
            let path = directory.as_ref()?.join(name);
            let opened = Duplicates::open(needles.as_ref()?, &path);
            opened.inspect_err(|error| tracing::warn!(file = %path.display(), %error, "cannot open a log file")).ok()
        };
        Attempt {
            logs: self,
            duplicate_stdout: duplicates(&self.options.duplicate_stdout, "filtered_stdout.log"),
            duplicate_stderr: duplicates(&self.options.duplicate_stderr, "filtered_stderr.log"),
            directory,
        }
    }

    /// Waits until the output of all workers, which have ended, is in its files and on the console. Returns `false` if
    /// nothing has moved for `patience`.
    pub async fn finish(&self, patience: Duration) -> bool {
        self.flow.ends(patience).await
    }
}

/// Removes a log directory if there is no file in it, and then its parent directory, which was made for it. This is for
/// a directory that no flag asks for.
pub(crate) fn remove_if_empty(directory: &Path) {
    remove_empty(directory);
    if let Some(base) = directory.parent() {
        // A directory that holds something else cannot be removed.
        let _ = fs::remove_dir(base);
    }
}

fn remove_empty(directory: &Path) {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    entries
        .filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()))
        .for_each(|entry| remove_empty(&entry.path()));
    let _ = fs::remove_dir(directory);
}

/// The logs of the workers that start together.
#[derive(Debug)]
pub struct Attempt<'a> {
    logs: &'a Logs,
    directory: Option<Folder>,
    duplicate_stdout: Option<Duplicates>,
    duplicate_stderr: Option<Duplicates>,
}

impl Attempt<'_> {
    /// Prepares the output of all workers, given as pairs of local rank and rank. They are prepared at the same time,
    /// so on a slow file system all of them take as long as one.
    pub fn workers(&self, ranks: &[(u32, u32)]) -> Vec<(Stdio, WorkerLogs)> {
        at_once(ranks, |&(local_rank, rank)| self.worker(local_rank, rank))
    }

    /// Prepares the output of one worker: the descriptors to start it with, and what the agent keeps. Never fails. If a
    /// stream's file or pipe cannot be opened, the stream goes to the console or to the agent's own stream, with a
    /// warning.
    pub fn worker(&self, local_rank: u32, rank: u32) -> (Stdio, WorkerLogs) {
        let directory = self.directory.as_ref().map(|attempt| attempt.join(local_rank.to_string()));
        let directory = directory.filter(|directory| match fs::create_dir_all(directory) {
            Ok(()) => true,
            Err(error) => {
                tracing::warn!(
                    directory = %directory.display(), %error,
                    "cannot create a worker's log directory; its output goes to the console"
                );
                false
            }
        });
        let options = &self.logs.options;
        let (redirects, tee) = (options.redirects.of(local_rank), options.tee.of(local_rank));
        let mut logs = WorkerLogs {
            error_file: directory.as_ref().map(|directory| directory.join("error.json")),
            _attempt: self.directory.clone(),
            stderr: StderrTail::Unseen,
            streams: Vec::new(),
        };
        let place = WorkerOutput { attempt: self, local_rank, rank, directory: directory.as_deref() };
        let (stderr, err) = place.open(ConsoleStream::Stderr, redirects.stderr, tee.stderr, &mut logs);
        let plain = ![redirects.stdout, redirects.stderr, tee.stdout, tee.stderr].contains(&true);
        let shared = stderr.as_ref().filter(|_| plain && self.logs.console.is_one_file());
        let (stdout, out) = match shared.and_then(|pipe| pipe.try_clone().ok()) {
            // What the worker writes to both comes out in its order.
            Some(pipe) => (Some(pipe), Source::Nowhere("is with standard error, as both of the agent's are one file")),
            None => place.open(ConsoleStream::Stdout, redirects.stdout, tee.stdout, &mut logs),
        };
        self.logs.history.begin(local_rank, out, err);
        (Stdio { stdout: stdout.map(Into::into), stderr: stderr.map(Into::into) }, logs)
    }
}

/// Does the same work for all items, each in a thread of its own. If no more threads can start, the rest is done one
/// after the other.
fn at_once<I: Sync, T: Send>(items: &[I], work: impl Fn(&I) -> T + Sync) -> Vec<T> {
    let work = &work;
    thread::scope(|scope| {
        let begin = |item| {
            let thread = thread::Builder::new().name("files".to_owned()).stack_size(256 * 1024);
            thread.spawn_scoped(scope, move || work(item)).map_err(|_| item)
        };
        let under_way: Vec<_> = items.iter().map(begin).collect();
        let end = |begun: Result<thread::ScopedJoinHandle<'_, T>, &I>| match begun {
            Ok(thread) => thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)),
            Err(item) => work(item),
        };
        under_way.into_iter().map(end).collect()
    })
}

#[cfg(test)]
mod tests {
    use std::sync::{Condvar, Mutex};

    use super::*;

    #[test]
    fn files_that_take_long_are_opened_at_once() {
        const WORKERS: u32 = 4;
        let (opening, one_more) = (Mutex::new(0), Condvar::new());
        // Each call takes until all calls have begun.
        let all_begun = at_once(&Vec::from_iter(0..WORKERS), |&worker| {
            let mut begun = opening.lock().unwrap();
            *begun += 1;
            one_more.notify_all();
            let waited = one_more.wait_timeout_while(begun, Duration::from_secs(10), |begun| *begun < WORKERS);
            (worker, !waited.unwrap().1.timed_out())
        });
        assert_eq!(all_begun, Vec::from_iter((0..WORKERS).map(|worker| (worker, true))));
    }
}
