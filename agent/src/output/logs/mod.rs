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
//! | stderr with neither flag | through the agent to its stderr, bytes unchanged, so that the last lines are known; inherited where that is a terminal |
//! | `--redirects` | straight to its file; the agent does not touch it, unless it is to be rotated |
//! | `--tee` | through the agent: raw bytes to its file, whole lines with a prefix to the console |
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
mod route;
mod stream;
mod text;

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fs::{self, DirBuilder, File};
use std::io::{self, Read, Seek, SeekFrom};
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStringExt;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};
use std::thread;
use std::time::Duration;

use crate::output::template;

pub use console::{Console, ConsoleStream};
pub use file::Rotation;
pub use filter::Needles;
pub use history::History;
pub use options::{LogDir, LogOptions};
pub use reading::LogReaders;
pub use route::{ParseStreamsError, Streams, StreamsByRank};

use attempts::{Attempts, Folder};
use file::LogFile;
use filter::Duplicates;
use history::Source;
use in_use::in_use;
use lines::{Lines, Tail};
use ring::Ring;
use stream::{Course, Flow, SharedTail, Stream};

/// A worker's output descriptors. `None`: the agent's own stream.
#[derive(Debug, Default)]
pub struct Stdio {
    /// Standard output.
    pub stdout: Option<OwnedFd>,
    /// Standard error.
    pub stderr: Option<OwnedFd>,
}

/// The size of a worker's pipe: as much as a pipe may hold without a privilege. A large pipe needs fewer switches
/// between worker and agent.
const PIPE_SIZE: usize = 1 << 20;
/// How much of a file's end is read. This is enough for the last lines.
const TAIL_BYTES: u64 = 64 * 1024;

/// The settings of the log flags.
#[derive(Debug, Clone, Default)]
pub struct LogSpec {
    /// `--log-dir`. `None` makes a directory under the system's temporary one. With `/dev/null` nothing is written.
    pub dir: Option<PathBuf>,
    /// The job's id.
    pub run_id: String,
    /// `--redirects`.
    pub redirects: StreamsByRank,
    /// `--tee`.
    pub tee: StreamsByRank,
    /// `--local-ranks-filter`: the workers whose output reaches the console. `None`: all.
    pub console_ranks: Option<BTreeSet<u32>>,
    /// `--log-line-prefix-template`, with `${role_name}`, `${local_rank}`, `${rank}` and `${hostname}`. `None` stands
    /// for `[${role_name}${local_rank}]:`.
    pub prefix: Option<String>,
    /// `--duplicate-stdout-filters`: lines of tee'd outputs with these words are copied to a file of their own.
    pub duplicate_stdout: Option<Needles>,
    /// `--duplicate-stderr-filters`: the same for standard error.
    pub duplicate_stderr: Option<Needles>,
    /// `--log-rotate`.
    pub rotation: Option<Rotation>,
    /// `--log-attempts`: how many attempts' folders stay, beside those that workers still write to. `None`: all.
    pub attempts: Option<u32>,
    /// `--role`.
    pub role: String,
    /// This host's name.
    pub hostname: String,
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
    spec: LogSpec,
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
    /// Creates the directory for this agent's logs.
    ///
    /// # Errors
    ///
    /// The directory cannot be created. It is better to say so now than after the first hour of training.
    pub fn open(spec: LogSpec, console: Console) -> Result<Logs, LogError> {
        let random = || uuid::Uuid::new_v4().simple().to_string()[..8].to_owned();
        let base = match &spec.dir {
            Some(dir) if dir == Path::new("/dev/null") => {
                return Ok(Logs::at(None, spec, console));
            }
            Some(dir) => std::path::absolute(dir).unwrap_or_else(|_| dir.clone()),
            None => std::env::temp_dir().join(format!("torchelastic_{}", random())),
        };
        // An id may be any text, but a directory's name may not.
        let directory = base.join(format!("{}_{}", spec.run_id.replace(['/', '\0'], "_"), random()));
        let created = match spec.dir {
            Some(_) => fs::create_dir_all(&directory),
            // No setting says who may read the logs, so only this user may. A temporary directory that does not exist
            // is a mistake and is not created.
            None => DirBuilder::new().mode(0o700).create(&base).and_then(|()| fs::create_dir(&directory)),
        };
        match created {
            Ok(()) => Ok(Logs::at(Some(directory), spec, console)),
            Err(cause) if spec.dir.is_none() => {
                // No flag asks for files. So training continues without them.
                tracing::warn!(
                    "cannot create a log directory, {}: {cause}; the agent writes no output and no error files: \
                     name a directory with --log-dir, or correct TMPDIR",
                    directory.display()
                );
                Ok(Logs::at(None, spec, console))
            }
            Err(cause) => Err(LogError { directory, cause }),
        }
    }

    fn at(root: Option<PathBuf>, spec: LogSpec, console: Console) -> Logs {
        let attempts = Attempts::new(spec.attempts);
        let in_use = root.as_deref().map(in_use).unwrap_or_default();
        Logs { spec, console, root, attempts, _in_use: in_use, flow: Flow::new(), history: History::default() }
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
            duplicate_stdout: duplicates(&self.spec.duplicate_stdout, "filtered_stdout.log"),
            duplicate_stderr: duplicates(&self.spec.duplicate_stderr, "filtered_stderr.log"),
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
pub fn remove_if_empty(directory: &Path) {
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
    /// The attempt's directory. `None` if nothing is written.
    pub fn directory(&self) -> Option<&Path> {
        self.directory.as_ref().map(|folder| folder.as_path())
    }

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
        let spec = &self.logs.spec;
        let (redirects, tee) = (spec.redirects.of(local_rank), spec.tee.of(local_rank));
        let mut logs = WorkerLogs {
            error_file: directory.as_ref().map(|directory| directory.join("error.json")),
            _attempt: self.directory.clone(),
            stderr: StderrTail::Unseen,
            streams: Vec::new(),
        };
        let place = WorkerOutput { attempt: self, local_rank, rank, directory: directory.as_deref() };
        let (stdout, out) = place.open(ConsoleStream::Stdout, redirects.stdout, tee.stdout, &mut logs);
        let (stderr, err) = place.open(ConsoleStream::Stderr, redirects.stderr, tee.stderr, &mut logs);
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

/// One worker's place in an attempt.
struct WorkerOutput<'a> {
    attempt: &'a Attempt<'a>,
    local_rank: u32,
    rank: u32,
    directory: Option<&'a Path>,
}

impl WorkerOutput<'_> {
    /// The descriptor for one stream, `None` if the worker inherits the agent's; and where the stream can be read.
    fn open(&self, stream: ConsoleStream, redirect: bool, tee: bool, logs: &mut WorkerLogs) -> (Option<File>, Source) {
        const PAST: Source = Source::Nowhere("goes to the agent's own console, past the agent");
        let Logs { spec, console, root, flow, .. } = self.attempt.logs;
        // Without a directory to write to, torchrun leaves redirected streams on the console.
        let redirect = redirect && root.is_some();
        let is_stderr = stream == ConsoleStream::Stderr;
        let shown = spec.console_ranks.as_ref().is_none_or(|ranks| ranks.contains(&self.local_rank));
        let file = if redirect || tee { self.open_file(stream) } else { None };
        let on_console = shown && (tee || file.is_none());
        let duplicates = if is_stderr { &self.attempt.duplicate_stderr } else { &self.attempt.duplicate_stdout };
        let duplicates = duplicates.clone().filter(|_| tee);
        let plain = !redirect && !tee;
        match file {
            Some(file) if !on_console && duplicates.is_none() && spec.rotation.is_none() => {
                let (file, path) = file.into_parts();
                if is_stderr {
                    logs.stderr = StderrTail::File(path.clone());
                }
                (Some(file), Source::File(path))
            }
            None if plain && on_console && (!is_stderr || console.stderr_is_terminal()) => (None, PAST),
            None if !on_console && !is_stderr => {
                let dropped = Source::Nowhere("is dropped, as --local-ranks-filter says");
                (self.or_warn("open /dev/null", open_null()), dropped)
            }
            file => {
                let tail = SharedTail::default();
                let ring = file.is_none().then(Ring::default);
                let path = file.as_ref().map(|file| file.path().to_owned());
                let source = path.map(Source::File).or(ring.clone().map(Source::Memory)).unwrap_or(PAST);
                let course = Course {
                    file,
                    console: on_console.then(|| (console.clone(), stream)),
                    prefix: (!plain).then(|| self.prefix()),
                    duplicates,
                    tail: tail.clone(),
                    ring,
                };
                let name = format!("{} {}", if is_stderr { "stderr" } else { "stdout" }, self.local_rank);
                let started = pipe(!plain).and_then(|(reader, writer)| {
                    let stream = Stream::start(name, reader, course, flow)?;
                    Ok((stream, writer))
                });
                let Some((stream, writer)) = self.or_warn("open a pipe for its output", started) else {
                    return (None, PAST);
                };
                logs.streams.push(stream);
                if is_stderr {
                    logs.stderr = StderrTail::Memory(tail);
                }
                (Some(writer), source)
            }
        }
    }

    fn open_file(&self, stream: ConsoleStream) -> Option<LogFile> {
        let name = if stream == ConsoleStream::Stdout { "stdout.log" } else { "stderr.log" };
        let file = LogFile::open(&self.directory?.join(name), self.attempt.logs.spec.rotation);
        self.or_warn("open its log file", file)
    }

    fn prefix(&self) -> Vec<u8> {
        let spec = &self.attempt.logs.spec;
        let template = spec.prefix.as_deref().unwrap_or("[${role_name}${local_rank}]:");
        let value = |name: &str| match name {
            "role_name" => Some(spec.role.clone()),
            "local_rank" => Some(self.local_rank.to_string()),
            "rank" => Some(self.rank.to_string()),
            "hostname" => Some(spec.hostname.clone()),
            _ => None,
        };
        template::substitute(OsStr::new(template), value).into_vec()
    }

    fn or_warn<T>(&self, what: &str, result: io::Result<T>) -> Option<T> {
        result
            .inspect_err(|error| tracing::warn!(local_rank = self.local_rank, %error, "cannot {what} for a worker"))
            .ok()
    }
}

/// The agent's part of one worker's output.
#[derive(Debug)]
pub struct WorkerLogs {
    error_file: Option<PathBuf>,
    /// Keeps the attempt's folder for as long as the worker may write there, and its error is to be read.
    _attempt: Option<Folder>,
    stderr: StderrTail,
    streams: Vec<Stream>,
}

/// Where the last lines of standard error can be found.
#[derive(Debug, Clone)]
enum StderrTail {
    /// The stream is inherited, so the agent does not see it.
    Unseen,
    File(PathBuf),
    Memory(SharedTail),
}

impl WorkerLogs {
    /// The path for `TORCHELASTIC_ERROR_FILE`. `None` if nothing is written.
    pub fn error_file(&self) -> Option<&Path> {
        self.error_file.as_deref()
    }

    /// Waits until everything that the worker wrote is in its files and queued for the console. The worker must have
    /// exited. Returns `false` after `patience`. Processes that still hold the worker's streams are not waited for.
    pub async fn settled(&self, patience: Duration) -> bool {
        let all = async {
            for stream in &self.streams {
                stream.settled().await;
            }
        };
        tokio::time::timeout(patience, all).await.is_ok()
    }

    /// The last lines of standard error, to be read later where blocking does no harm.
    pub fn stderr(&self) -> LastLines {
        LastLines(self.stderr.clone())
    }
}

/// The last lines of a worker's standard error.
#[derive(Debug, Clone)]
pub struct LastLines(StderrTail);

impl LastLines {
    /// Reads 40 lines at most, and none where the agent cannot see them, as on a terminal. May have to read a file.
    pub fn read(&self) -> Vec<String> {
        match &self.0 {
            StderrTail::Unseen => Vec::new(),
            StderrTail::Memory(tail) => tail.lines(),
            // A report without these lines is better than no report.
            StderrTail::File(path) => file_tail(path).unwrap_or_default(),
        }
    }
}

fn file_tail(path: &Path) -> io::Result<Vec<String>> {
    let mut file = File::open(path)?;
    let skipped = file.metadata()?.len().saturating_sub(TAIL_BYTES);
    file.seek(SeekFrom::Start(skipped))?;
    let mut bytes = Vec::new();
    file.take(TAIL_BYTES).read_to_end(&mut bytes)?;
    let (mut lines, mut tail) = (Lines::default(), Tail::default());
    lines.feed(&bytes, |line| tail.push(line));
    lines.finish(|line| tail.push(line));
    Ok(tail.lines())
}

fn pipe(large: bool) -> io::Result<(File, File)> {
    let (reader, writer) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)?;
    if large {
        // The kernel refuses this when the user's pipe budget is spent. The default size works too.
        let _ = rustix::pipe::fcntl_setpipe_size(&writer, PIPE_SIZE);
    }
    Ok((reader.into(), writer.into()))
}

fn open_null() -> io::Result<File> {
    File::options().write(true).open("/dev/null")
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
