//! A log file that the agent writes. It is rotated if the user asks for that. A full disk is no reason to stop
//! training.

use std::ffi::OsString;
use std::fs::File;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::str::FromStr;

/// When a log file is full, and how many full files are kept: `SIZE[:KEEP]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rotation {
    /// The size in bytes at which a file is full.
    pub size: u64,
    /// How many full files are kept beside the one that is written.
    pub keep: u32,
}

/// A smaller size is taken for a mistake.
const LEAST: u64 = 4096;
const KEEP: u32 = 4;
const MOST_KEPT: u32 = 1000;

impl FromStr for Rotation {
    type Err = String;

    /// Reads `500M`, `500MiB` or `1G:10`. K, M and G are powers of 1024. Without a number of files, four are kept.
    fn from_str(text: &str) -> Result<Rotation, String> {
        let (size, keep) = text.split_once(':').map_or((text, None), |(size, keep)| (size, Some(keep)));
        let size = elastic_flags::size(size).map_err(|refused| refused.cause)?;
        if size < LEAST {
            return Err(format!("{size} bytes are less than {}", LEAST));
        }
        let keep = match keep {
            None => KEEP,
            Some(text) => text
                .parse()
                .ok()
                .filter(|keep| (1..=MOST_KEPT).contains(keep))
                .ok_or_else(|| format!("`{text}` is not a number of files from 1 to {}", MOST_KEPT))?,
        };
        Ok(Rotation { size, keep })
    }
}

/// A file, its path, and its state.
#[derive(Debug)]
pub(super) struct LogFile {
    file: File,
    path: PathBuf,
    rotation: Option<Rotation>,
    /// The bytes in the file that is written.
    size: u64,
    /// Whether these bytes end with the end of a line.
    whole: bool,
    /// The bytes dropped since a write to the file last succeeded.
    lost: u64,
}

impl LogFile {
    /// Opens `path` to append to it, and keeps what is there.
    pub(super) fn open(path: &Path, rotation: Option<Rotation>) -> io::Result<LogFile> {
        let file = append_to(path)?;
        let size = file.metadata()?.len();
        Ok(LogFile { file, path: path.to_owned(), rotation, size, whole: true, lost: 0 })
    }

    /// The descriptor, for a worker that writes the file itself, and the path.
    pub(super) fn into_parts(self) -> (File, PathBuf) {
        (self.file, self.path)
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    pub(super) fn append(&mut self, bytes: &[u8]) {
        let mut rest = bytes;
        while !rest.is_empty() {
            let Some(rotation) = self.rotation else { return self.write(rest) };
            let room = usize::try_from(rotation.size.saturating_sub(self.size)).unwrap_or(usize::MAX);
            if rest.len() <= room {
                return self.write(rest);
            }
            // A file ends with the end of a line. This is the last line that fits, or the line that is under way. A
            // line without an end may take as many bytes again before the file is rotated.
            let end = match memchr::memrchr(b'\n', &rest[..room]) {
                Some(at) => Some(at + 1),
                None if self.whole && self.size > 0 => Some(0),
                None => memchr::memchr(b'\n', rest).map(|at| at + 1),
            };
            let endless = self.size >= 2 * rotation.size;
            let (now, later) = rest.split_at(end.unwrap_or(if endless { 0 } else { rest.len() }));
            self.write(now);
            if end.is_some() || endless {
                self.rotate(rotation.keep);
            }
            rest = later;
        }
    }

    fn rotate(&mut self, keep: u32) {
        // Files that do not exist yet are no trouble. If the newest file cannot be moved, the next rename reports it.
        for n in (1..keep).rev() {
            let _ = std::fs::rename(rotated(&self.path, n), rotated(&self.path, n + 1));
        }
        let renewed = std::fs::rename(&self.path, rotated(&self.path, 1)).and_then(|()| append_to(&self.path));
        match renewed {
            Ok(file) => (self.file, self.size, self.whole) = (file, 0, true),
            Err(error) => {
                tracing::warn!(file = %self.path.display(), %error, "cannot rotate a log file: it keeps growing");
                self.rotation = None;
            }
        }
    }

    fn write(&mut self, bytes: &[u8]) {
        if self.lost > 0 && !bytes.is_empty() {
            let note = format!("\n[elastic-agent: {} bytes are missing here]\n", self.lost);
            if self.file.write_all(note.as_bytes()).is_err() {
                self.lost += bytes.len() as u64;
                return;
            }
            self.lost = 0;
            tracing::info!(file = %self.path.display(), "writing the worker's log again");
        }
        let mut rest = bytes;
        while !rest.is_empty() {
            match self.file.write(rest) {
                Ok(written) if written > 0 => {
                    self.size += written as u64;
                    self.whole = rest[written - 1] == b'\n';
                    rest = &rest[written..];
                }
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                outcome => {
                    let error = outcome.err().unwrap_or_else(|| io::ErrorKind::WriteZero.into());
                    tracing::warn!(
                        file = %self.path.display(), %error,
                        "cannot write the worker's log: output is dropped until there is room, and training continues"
                    );
                    self.lost = rest.len() as u64;
                    return;
                }
            }
        }
    }
}

/// The name of the n-th full file, counted from the newest.
pub(super) fn rotated(path: &Path, n: u32) -> PathBuf {
    let mut name = OsString::from(path.as_os_str());
    name.push(format!(".{n}"));
    name.into()
}

/// Opens a file to append to it, so that several processes of one worker can share it.
pub(super) fn append_to(path: &Path) -> io::Result<File> {
    File::options().append(true).create(true).open(path)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_rotation_is_a_size_and_a_number() {
        let read = |text: &str| text.parse::<Rotation>().map(|rotation| (rotation.size, rotation.keep));
        assert_eq!((read("4096"), read("16k:1"), read("1G:10")), (Ok((4096, 4)), Ok((16384, 1)), Ok((1 << 30, 10))));
        for (text, problem) in [
            ("", "`` is not a size"),
            ("-1", "`-1` is not a size"),
            ("99999999999999G", "`99999999999999G` is not a size"),
            ("4k:0", "`0` is not a number of files"),
            ("1", "1 bytes are less than 4096"),
        ] {
            assert!(read(text).unwrap_err().contains(problem), "{text}: {:?}", read(text));
        }
    }

    /// All files that are kept, the oldest first.
    fn files(path: &Path) -> Vec<Vec<u8>> {
        let old = (1..).map_while(|n| std::fs::read(format!("{}.{n}", path.display())).ok());
        let mut files: Vec<_> = old.collect();
        files.reverse();
        files.push(std::fs::read(path).unwrap());
        files
    }

    #[test]
    fn only_the_newest_files_stay() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("stdout.log");
        let mut log = LogFile::open(&path, Some(Rotation { size: 10, keep: 2 })).unwrap();
        (0..9).for_each(|n| log.append(format!("line {n}\n").as_bytes()));
        assert_eq!(files(&path), [b"line 6\n", b"line 7\n", b"line 8\n"]);
    }

    proptest! {
        #[test]
        fn rotated_files_hold_every_byte_and_whole_lines(
            chunks in proptest::collection::vec("[a-c]{0,9}\n?", 0..40),
        ) {
            let directory = tempfile::tempdir().unwrap();
            let path = directory.path().join("stderr.log");
            let mut log = LogFile::open(&path, Some(Rotation { size: 30, keep: 900 })).unwrap();
            chunks.iter().for_each(|chunk| log.append(chunk.as_bytes()));
            let files = files(&path);
            prop_assert_eq!(files.concat(), chunks.concat().into_bytes());
            let longest = chunks.concat().lines().map(|line| line.len() + 1).max().unwrap_or(0);
            for file in &files[..files.len() - 1] {
                prop_assert!(longest > 30 || file.ends_with(b"\n"));
                prop_assert!(longest > 30 || file.len() < 30 + longest, "a line under way is written to its end");
            }
        }
    }
}
