//! One worker's streams in an attempt: where each goes, and what the agent can read of it afterwards.

use std::ffi::OsStr;
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::attempts::Folder;
use super::file::LogFile;
use super::history::Source;
use super::lines::{Lines, Tail};
use super::ring::Ring;
use super::stream::{Course, SharedTail, Stream};
use super::{Attempt, ConsoleStream, Logs};
use crate::output::template;

/// The size of a worker's pipe: as much as a pipe may hold without a privilege. A large pipe needs fewer switches
/// between worker and agent.
const PIPE_SIZE: usize = 1 << 20;
/// How much of a file's end is read. This is enough for the last lines.
const TAIL_BYTES: u64 = 64 * 1024;

/// One worker's place in an attempt.
pub(super) struct WorkerOutput<'a> {
    pub(super) attempt: &'a Attempt<'a>,
    pub(super) local_rank: u32,
    pub(super) rank: u32,
    pub(super) directory: Option<&'a Path>,
}

impl WorkerOutput<'_> {
    /// The descriptor for one stream, `None` if the worker inherits the agent's; and where the stream can be read.
    pub(super) fn open(
        &self,
        stream: ConsoleStream,
        redirect: bool,
        tee: bool,
        logs: &mut WorkerLogs,
    ) -> (Option<File>, Source) {
        const PAST: Source = Source::Nowhere("goes to the agent's own console, past the agent");
        let Logs { options, console, root, flow, .. } = self.attempt.logs;
        // Without a directory to write to, torchrun leaves redirected streams on the console.
        let redirect = redirect && root.is_some();
        let is_stderr = stream == ConsoleStream::Stderr;
        let shown = options.console_ranks.as_ref().is_none_or(|ranks| ranks.contains(&self.local_rank));
        let file = if redirect || tee { self.open_file(stream) } else { None };
        let on_console = shown && (tee || file.is_none());
        let duplicates = if is_stderr { &self.attempt.duplicate_stderr } else { &self.attempt.duplicate_stdout };
        let duplicates = duplicates.clone().filter(|_| tee);
        let plain = !redirect && !tee;
        match file {
            Some(file) if !on_console && duplicates.is_none() && options.rotation.is_none() => {
                let (file, path) = file.into_parts();
                if is_stderr {
                    logs.stderr = StderrTail::File(path.clone());
                }
                (Some(file), Source::File(path))
            }
            None if plain && on_console && (!is_stderr || console.stderr_is_terminal()) => (None, PAST),
            None if !on_console && !is_stderr => {
                let dropped = Source::Nowhere("is dropped, as --local-ranks-filter says");
                (self.or_warn("open /dev/null for a worker", open_null()), dropped)
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
                let Some((stream, writer)) = self.or_warn("open a pipe for a worker's output", started) else {
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
        let file = LogFile::open(&self.directory?.join(name), self.attempt.logs.options.rotation);
        self.or_warn("open a worker's log file", file)
    }

    fn prefix(&self) -> Vec<u8> {
        let Logs { options, names, .. } = self.attempt.logs;
        let template = options.prefix.as_deref().unwrap_or("[${role_name}${local_rank}]:");
        let value = |name: &str| match name {
            "role_name" => Some(names.role.clone()),
            "local_rank" => Some(self.local_rank.to_string()),
            "rank" => Some(self.rank.to_string()),
            "hostname" => Some(names.hostname.clone()),
            _ => None,
        };
        template::substitute(OsStr::new(template), value).into_vec()
    }

    fn or_warn<T>(&self, what: &str, result: io::Result<T>) -> Option<T> {
        result.inspect_err(|error| tracing::warn!(local_rank = self.local_rank, %error, "cannot {what}")).ok()
    }
}

/// The agent's part of one worker's output.
#[derive(Debug)]
pub struct WorkerLogs {
    pub(super) error_file: Option<PathBuf>,
    /// Keeps the attempt's folder for as long as the worker may write there, and its error is to be read.
    pub(super) _attempt: Option<Folder>,
    pub(super) stderr: StderrTail,
    pub(super) streams: Vec<Stream>,
}

/// Where the last lines of standard error can be found.
#[derive(Debug, Clone)]
pub enum StderrTail {
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

    /// Where the last lines of standard error are, to be read later where blocking does no harm.
    pub fn stderr(&self) -> StderrTail {
        self.stderr.clone()
    }
}

impl StderrTail {
    /// Reads 40 lines at most, and none where the agent cannot see them, as on a terminal. May have to read a file.
    pub fn read(&self) -> Vec<String> {
        match self {
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
