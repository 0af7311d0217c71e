//! The trace that a training writes: a line of JSON for each event.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use serde_json::Value;

/// A trace that is read while it is written.
#[derive(Debug, Clone)]
pub struct Tail {
    path: PathBuf,
    read: u64,
}

impl Tail {
    /// Reads this file, from its beginning. It need not exist yet.
    pub fn new(path: &Path) -> Tail {
        Tail { path: path.to_owned(), read: 0 }
    }

    /// The events that were written since the last call.
    ///
    /// Panics at a line that is none. A worker that is killed may leave a part of one: then, see [`Tail::lines`].
    pub fn read(&mut self) -> Vec<Value> {
        self.lines().iter().map(|line| serde_json::from_str(line).expect("a line of JSON")).collect()
    }

    /// The lines that were written since the last call. What follows the last newline is still being written.
    pub fn lines(&mut self) -> Vec<String> {
        let Ok(mut file) = File::open(&self.path) else { return Vec::new() };
        let mut text = Vec::new();
        file.seek(SeekFrom::Start(self.read)).expect("seek in the trace");
        file.read_to_end(&mut text).expect("read the trace");
        text.truncate(text.iter().rposition(|&byte| byte == b'\n').map_or(0, |end| end + 1));
        self.read += text.len() as u64;
        String::from_utf8_lossy(&text).lines().map(str::to_owned).collect()
    }
}

/// A file's whole lines as JSON objects; none if it is not there.
pub fn json_lines(path: &Path) -> Vec<Value> {
    Tail::new(path).read()
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    #[test]
    fn lines_are_read_once_and_only_when_they_are_whole() {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        let mut tail = Tail::new(file.path());
        write!(file, "{{\"step\": 1}}\n{{\"step\"").unwrap();
        assert_eq!(tail.read(), [serde_json::json!({"step": 1})]);
        writeln!(file, ": 2}}").unwrap();
        assert_eq!(tail.read(), [serde_json::json!({"step": 2})]);
        assert_eq!((tail.read().len(), json_lines(file.path()).len()), (0, 2));
        assert_eq!(json_lines(Path::new("/nowhere")).len(), 0);
    }
}
