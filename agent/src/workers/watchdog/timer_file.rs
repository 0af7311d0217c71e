//! The named pipe through which workers set timers: the protocol of PyTorch's file-based timers
//! (`torch.distributed.elastic.timer.FileTimerClient`). What follows when a timer expires is in `mod.rs`.
//!
//! A worker opens the pipe named in `TORCHELASTIC_TIMER_FILE`, writes one JSON line, and closes it:
//!
//! ```text
//! {"version": 1, "pid": 4711, "scope_id": "step", "expiration_time": 1795210355.25, "signal": 9}
//! ```
//!
//! `expiration_time` is in seconds since the Unix epoch. A negative time releases the scope. `signal` is the signal to
//! end the process with. No signal is sent if it is zero or negative.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::fs::Mode;
use serde::Deserialize;
use tokio::io::AsyncReadExt;
use tokio::net::unix::pipe::Receiver;

/// Environment variable that names the timers' pipe, for the agent and for its workers.
pub(crate) const TIMER_FILE: &str = "TORCHELASTIC_TIMER_FILE";

/// Whether workers may set timers by PyTorch's file-based protocol.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) enum Timers {
    /// No. Timers have no effect.
    #[default]
    Off,
    /// Through a pipe that has no name but its descriptor in the agent.
    Fresh,
    At(PathBuf),
}

/// A line is shorter than this, in bytes. Writes beyond `PIPE_BUF` (4096) may be torn, and torch does not attempt them.
const LONGEST: usize = 8192;

/// The pipe cannot be created.
#[derive(Debug, thiserror::Error)]
#[error("cannot make the timers' pipe {}: {source}; name another with TORCHELASTIC_TIMER_FILE, or unset \
         TORCHELASTIC_ENABLE_FILE_TIMER", .path.display())]
pub(crate) struct TimerFileError {
    path: PathBuf,
    source: io::Error,
}

#[derive(Debug, Clone, PartialEq)]
pub(crate) enum TimerRequest {
    /// End the process with the signal, unless another request comes within this time.
    Set {
        pid: i32,
        scope: String,
        left: Duration,
        /// The signal's number. Zero or less: no signal.
        signal: i32,
    },
    /// The process left the scope in time.
    Release { pid: i32, scope: String },
}

#[derive(Deserialize)]
struct TimerLine {
    pid: i32,
    scope_id: String,
    expiration_time: f64,
    signal: i32,
}

/// Parses a line. `unix_now` is the time of the wall clock. Workers on the same host set their timers by this clock.
pub(super) fn parse(line: &[u8], unix_now: Duration) -> Result<TimerRequest, serde_json::Error> {
    let TimerLine { pid, scope_id: scope, expiration_time, signal } = serde_json::from_slice(line)?;
    if expiration_time < 0.0 {
        return Ok(TimerRequest::Release { pid, scope });
    }
    // An expiration time beyond the range of `Duration` never comes.
    let until = Duration::try_from_secs_f64(expiration_time).unwrap_or(Duration::from_secs(u64::from(u32::MAX)));
    Ok(TimerRequest::Set { pid, scope, left: until.saturating_sub(unix_now), signal })
}

/// The reading end of the pipe. Dropping it removes the pipe's file.
#[derive(Debug)]
pub(crate) struct TimerFile {
    path: PathBuf,
    receiver: Receiver,
    unread: Vec<u8>,
}

impl TimerFile {
    /// Makes the pipe at `path`, for this user alone. Replaces a leftover pipe, but not a file of another kind. Must be
    /// called within a tokio runtime.
    pub(crate) fn open(path: &Path) -> Result<TimerFile, TimerFileError> {
        use std::os::unix::fs::FileTypeExt;
        let failed = |source: io::Error| TimerFileError { path: path.to_owned(), source };
        match std::fs::symlink_metadata(path) {
            Ok(found) if found.file_type().is_fifo() => std::fs::remove_file(path).map_err(failed)?,
            Ok(_) => return Err(failed(io::Error::other("a file that is no pipe is there"))),
            Err(_) => {}
        }
        rustix::fs::mkfifoat(rustix::fs::CWD, path, Mode::from_raw_mode(0o600)).map_err(|e| failed(e.into()))?;
        TimerFile::opened(path.to_owned())
    }

    fn opened(path: PathBuf) -> Result<TimerFile, TimerFileError> {
        // The pipe is opened for writing too, so that there is no end of file between two workers.
        let pipe = File::options().read(true).write(true).custom_flags(libc::O_NONBLOCK).open(&path);
        match pipe.and_then(Receiver::from_file_unchecked) {
            Ok(receiver) => Ok(TimerFile { path, receiver, unread: Vec::new() }),
            Err(source) => Err(TimerFileError { path, source }),
        }
    }

    /// A pipe without a name, which workers open by its descriptor in this process: it needs no folder that may go.
    /// Must be called within a tokio runtime.
    fn fresh() -> Result<TimerFile, TimerFileError> {
        let descriptor = |number| PathBuf::from(format!("/proc/{}/fd/{number}", std::process::id()));
        let (reader, _writer) =
            io::pipe().map_err(|source| TimerFileError { path: "without a name".into(), source })?;
        let mut timers = TimerFile::opened(descriptor(reader.as_raw_fd()))?;
        timers.path = descriptor(timers.receiver.as_raw_fd());
        Ok(timers)
    }

    /// Opens the pipe at the path that the user named, or else a fresh one. Must be called within a tokio runtime.
    pub(crate) fn as_asked(timers: &Timers) -> Result<Option<TimerFile>, TimerFileError> {
        match timers {
            Timers::Off => Ok(None),
            Timers::At(path) => TimerFile::open(path).map(Some),
            Timers::Fresh => TimerFile::fresh().map(Some),
        }
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// The next request. Unreadable lines are skipped with a warning. The wait may be cancelled.
    pub(crate) async fn next(&mut self) -> TimerRequest {
        loop {
            while let Some(end) = self.unread.iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = self.unread.drain(..=end).collect();
                let unix_now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
                match parse(&line, unix_now) {
                    Ok(request) => return request,
                    Err(error) => tracing::warn!(%error, "cannot parse a line in the timers' pipe"),
                }
            }
            if self.unread.len() > LONGEST {
                tracing::warn!("dropping a line in the timers' pipe that has no end");
                self.unread.clear();
            }
            if let Err(error) = self.receiver.read_buf(&mut self.unread).await {
                tracing::error!(%error, "cannot read the timers' pipe; timers have no effect after this");
                std::future::pending().await
            }
        }
    }
}

impl Drop for TimerFile {
    fn drop(&mut self) {
        // The next user of the name replaces a leftover pipe.
        let _ = std::fs::remove_file(&self.path);
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    const NOW: Duration = Duration::from_secs(1_795_210_355);

    #[test]
    fn lines_of_torch_are_understood() {
        let set = br#"{"version": 1, "pid": 4711, "scope_id": "step", "expiration_time": 1795210357.5, "signal": 9}"#;
        let left = Duration::from_millis(2500);
        assert_eq!(parse(set, NOW).unwrap(), TimerRequest::Set { pid: 4711, scope: "step".into(), left, signal: 9 });
        let release = br#"{"version": 1, "pid": 4711, "scope_id": "step", "expiration_time": -1, "signal": 0}"#;
        assert_eq!(parse(release, NOW).unwrap(), TimerRequest::Release { pid: 4711, scope: "step".into() });
    }

    #[test]
    fn a_time_that_is_past_or_never_comes_is_one_all_the_same() {
        let left = |time: &str| {
            let line = format!(r#"{{"pid":1,"scope_id":"s","expiration_time":{time},"signal":9}}"#);
            match parse(line.as_bytes(), NOW).unwrap() {
                TimerRequest::Set { left, .. } => left,
                TimerRequest::Release { .. } => panic!("no release"),
            }
        };
        assert_eq!(left("12.0"), Duration::ZERO);
        assert!(left("1e300") > Duration::from_secs(86_400));
    }

    #[tokio::test]
    async fn lines_come_whole_in_order_and_from_many_writers() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("timers");
        let mut timers = TimerFile::open(&path).unwrap();
        for scope in ["a", "b"] {
            let mut writer = File::options().write(true).open(&path).unwrap();
            write!(writer, r#"{{"pid":7,"scope_id":"{scope}","expira"#).unwrap();
            writeln!(writer, r#"tion_time":-1,"signal":0}}"#).unwrap();
            writeln!(writer, "nonsense").unwrap();
        }
        for scope in ["a", "b"] {
            assert_eq!(timers.next().await, TimerRequest::Release { pid: 7, scope: scope.into() });
        }
        drop(timers);
        assert!(!path.exists());
    }

    #[tokio::test]
    async fn a_leftover_pipe_is_replaced_and_a_file_is_not() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("timers");
        std::mem::forget(TimerFile::open(&path).unwrap());
        TimerFile::open(&path).unwrap();
        std::fs::write(&path, "precious").unwrap();
        let error = TimerFile::open(&path).unwrap_err().to_string();
        assert!(error.contains("no pipe") && error.contains("TORCHELASTIC_TIMER_FILE"), "{error}");
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "precious");
    }
}
