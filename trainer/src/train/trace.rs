//! A record of steps and commits, one JSON object a line, from which anyone can check that each sample was trained on
//! once and that no step was lost.
//!
//! A step that was done again after a failure appears again, in a later round: the last line for a step is the one that
//! counts. Samples are named by their places in the epoch's order, `first` to `end` (exclusive).

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};

use super::observer::Event;

/// The trace cannot be written.
#[derive(Debug, thiserror::Error)]
#[error("cannot write the trace {}: {cause}; choose another --trace, or leave it out", path.display())]
pub struct TraceError {
    path: PathBuf,
    cause: io::Error,
}

#[derive(Serialize)]
struct Line<'a> {
    #[serde(flatten)]
    event: &'a Event<'a>,
    /// Wall clock, in milliseconds since 1970. For people: no order follows from it.
    time_ms: u64,
}

/// An open trace.
#[derive(Debug)]
pub(crate) struct Trace {
    file: File,
    path: PathBuf,
    /// The step that was recorded last.
    last: Option<u64>,
}

impl Trace {
    /// Opens a trace, to append to it.
    pub(crate) fn open(path: &Path) -> Result<Trace, TraceError> {
        let open = || {
            let file = OpenOptions::new().create(true).append(true).read(true).open(path)?;
            let last = last_step(&file)?;
            end_last_line(&file)?;
            Ok((file, last))
        };
        let (file, last) = open().map_err(|cause| TraceError { path: path.to_owned(), cause })?;
        Ok(Trace { file, path: path.to_owned(), last })
    }

    /// The step that was recorded last, by this process or another.
    pub(crate) fn last(&self) -> Option<u64> {
        self.last
    }

    /// Appends a line, in one write.
    pub(crate) fn record(&mut self, event: &Event<'_>) -> Result<(), TraceError> {
        if let Event::Step { step, .. } = event {
            self.last = Some(*step);
        }
        let time_ms = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_millis() as u64);
        let write = || -> io::Result<()> {
            let mut line = serde_json::to_vec(&Line { event, time_ms })?;
            line.push(b'\n');
            (&self.file).write_all(&line)
        };
        write().map_err(|cause| TraceError { path: self.path.clone(), cause })
    }
}

/// Ends a line that a kill has cut short, so that the next one is not taken for its rest.
fn end_last_line(mut file: &File) -> io::Result<()> {
    let mut last = [b'\n'];
    if file.metadata()?.len() > 0 {
        file.seek(SeekFrom::End(-1))?;
        file.read_exact(&mut last)?;
    }
    if last == *b"\n" { Ok(()) } else { file.write_all(b"\n") }
}

/// The step in the last whole line of a step. Its writer may have been killed.
fn last_step(mut file: &File) -> io::Result<Option<u64>> {
    /// Holds some hundred lines.
    const TAIL: u64 = 64 * 1024;
    #[derive(Deserialize)]
    struct Step {
        event: String,
        step: u64,
    }
    let length = file.metadata()?.len();
    file.seek(SeekFrom::Start(length.saturating_sub(TAIL)))?;
    let mut tail = Vec::new();
    file.take(TAIL).read_to_end(&mut tail)?;
    let steps = tail.split(|&byte| byte == b'\n').rev().filter_map(|line| serde_json::from_slice::<Step>(line).ok());
    Ok(steps.into_iter().find(|line| line.event == "step").map(|line| line.step))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_that_a_kill_has_cut_short_takes_no_other_with_it() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("trace");
        let step =
            |step| Event::Step { round: 1, step, epoch: 0, first: 0, end: 1, loss: 1.0, world_size: 1, skipped: None };
        Trace::open(&path).unwrap().record(&step(1)).unwrap();
        let whole = std::fs::read(&path).unwrap();
        std::fs::write(&path, [&whole[..], &whole[..20]].concat()).unwrap();
        let mut trace = Trace::open(&path).unwrap();
        assert_eq!(trace.last(), Some(1));
        trace.record(&step(2)).unwrap();
        let text = std::fs::read_to_string(&path).unwrap();
        let whole: Vec<_> = text.lines().map(|line| serde_json::from_str::<serde_json::Value>(line).is_ok()).collect();
        assert_eq!(whole, [true, false, true], "{text}");
        // An empty file, and one whose last line is whole, do not change.
        drop(Trace::open(&path).unwrap());
        assert_eq!(std::fs::read_to_string(&path).unwrap(), text);
    }
}
