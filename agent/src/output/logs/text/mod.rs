//! The text of one stream as a reader goes through it: from its last lines on, in pieces that end where lines do. Whose
//! stream it is, and who reads, does not matter here.

use std::collections::VecDeque;
use std::fs::{self, File};
use std::io::{self, Read, Seek, SeekFrom};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use elastic_node::logs::CHUNK;
use elastic_rendezvous::time::Time;

use super::file::rotated;
use super::ring::Ring;

/// How long the rest of a line is waited for.
const QUIET: Duration = Duration::from_secs(1);

#[derive(Debug)]
pub(super) struct Text {
    origin: Origin,
    /// Bytes that may still be read, if only those that were there at the beginning are wanted.
    left: u64,
    /// The beginning of a line whose end has not come.
    pending: Vec<u8>,
    moved: Time,
}

#[derive(Debug)]
enum Origin {
    /// The files that hold the stream, the oldest first. The last one has this path, until it is rotated.
    Files(VecDeque<File>, PathBuf),
    Memory(Ring, u64),
}

impl Text {
    /// The last lines of a file, and of those that were rotated away from it.
    pub(super) fn of_file(path: &Path, lines: u32, follow: bool) -> io::Result<Text> {
        let (mut files, mut missing, mut left) = (VecDeque::new(), u64::from(lines), 0);
        for n in 0.. {
            let name = if n == 0 { path.to_owned() } else { rotated(path, n) };
            let mut file = match File::open(&name) {
                Err(error) if n > 0 && error.kind() == io::ErrorKind::NotFound => break,
                opened => opened?,
            };
            left += seek_to_last(&mut file, &mut missing)?;
            files.push_front(file);
            if missing == 0 {
                break;
            }
        }
        Ok(Text::new(Origin::Files(files, path.to_owned()), left, follow))
    }

    /// The last lines of those that are in memory.
    pub(super) fn of_memory(ring: &Ring, lines: u32, follow: bool) -> Text {
        let mut bytes = vec![0; Ring::ROOM];
        let (begin, count) = ring.read(0, &mut bytes);
        let at = match u64::from(lines) {
            0 => count,
            mut missing => begin_of_last(without_end(&bytes[..count]), &mut missing).unwrap_or(0),
        };
        Text::new(Origin::Memory(ring.clone(), begin + at as u64), (count - at) as u64, follow)
    }

    fn new(origin: Origin, left: u64, follow: bool) -> Text {
        Text {
            origin,
            left: if follow { u64::MAX } else { left },
            pending: Vec::new(),
            moved: elastic_store::clock::now(),
        }
    }

    /// The next piece: whole lines, or the beginning of a line that is long, or whose end does not come in a while or
    /// is not to be waited for. `None`: there is nothing now. Nothing follows after an error.
    pub(super) fn next(&mut self, to_the_end: bool) -> io::Result<Option<Vec<u8>>> {
        let mut piece = [0; CHUNK];
        loop {
            let room = (CHUNK - self.pending.len()).min(usize::try_from(self.left).unwrap_or(usize::MAX));
            let count = match self.origin.read(&mut piece[..room]) {
                Ok(count) => count,
                Err(error) => {
                    self.origin.give_up();
                    return Err(error);
                }
            };
            let now = elastic_store::clock::now();
            if count > 0 {
                self.moved = now;
                self.left -= count as u64;
                self.pending.extend_from_slice(&piece[..count]);
            }
            let ends = to_the_end || self.left == 0 || now.since(self.moved) >= QUIET;
            let whole = match memchr::memrchr2(b'\n', b'\r', &self.pending) {
                Some(at) => at + 1,
                None if self.pending.len() == CHUNK || (count == 0 && ends) => self.pending.len(),
                None => 0,
            };
            if whole > 0 {
                let rest = self.pending.split_off(whole);
                return Ok(Some(std::mem::replace(&mut self.pending, rest)));
            }
            if count == 0 {
                return Ok(None);
            }
        }
    }

    /// Whether nothing has come for a while, and nothing is kept back.
    pub(super) fn is_quiet(&self) -> bool {
        self.pending.is_empty() && elastic_store::clock::now().since(self.moved) >= QUIET
    }
}

impl Origin {
    fn give_up(&mut self) {
        if let Origin::Files(files, _) = self {
            files.clear();
        }
    }

    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        match self {
            Origin::Memory(ring, at) => {
                let (begin, count) = ring.read(*at, into);
                *at = begin + count as u64;
                Ok(count)
            }
            Origin::Files(files, path) => loop {
                let Some(file) = files.front_mut() else { return Ok(0) };
                let count = file.read(into)?;
                if count > 0 || into.is_empty() {
                    return Ok(count);
                }
                if files.len() > 1 {
                    files.pop_front();
                } else if !follow_rotation(files, path)? {
                    return Ok(0);
                }
                // What came just before the rotation is read, too.
            },
        }
    }
}

/// Opens the file that has taken the place of the one that was read to its end. Returns whether there is one.
fn follow_rotation(files: &mut VecDeque<File>, path: &Path) -> io::Result<bool> {
    let (Some(file), Ok(there)) = (files.front(), fs::metadata(path)) else { return Ok(false) };
    let here = file.metadata()?;
    if (here.dev(), here.ino()) == (there.dev(), there.ino()) {
        return Ok(false);
    }
    files.push_back(File::open(path)?);
    Ok(true)
}

/// Goes to where the last lines begin. `missing` is how many are wanted, and then how many of these the file does not
/// have. Returns how many bytes follow.
fn seek_to_last(file: &mut File, missing: &mut u64) -> io::Result<u64> {
    let length = file.metadata()?.len();
    if *missing == 0 {
        file.seek(SeekFrom::Start(length))?;
        return Ok(0);
    }
    let (mut end, mut block) = (length, vec![0; CHUNK]);
    while end > 0 {
        let begin = end.saturating_sub(CHUNK as u64);
        let block = &mut block[..(end - begin) as usize];
        file.seek(SeekFrom::Start(begin))?;
        file.read_exact(block)?;
        let searched = if end == length { without_end(block) } else { block };
        if let Some(at) = begin_of_last(searched, missing) {
            let at = begin + at as u64;
            file.seek(SeekFrom::Start(at))?;
            return Ok(length - at);
        }
        end = begin;
    }
    // The first line has no line's end before it.
    *missing -= u64::from(length > 0);
    file.seek(SeekFrom::Start(0))?;
    Ok(length)
}

/// Where the last lines of these bytes begin, if there are so many line ends. Counts those that were found off `missing`.
fn begin_of_last(bytes: &[u8], missing: &mut u64) -> Option<usize> {
    for at in memchr::memrchr_iter(b'\n', bytes) {
        *missing -= 1;
        if *missing == 0 {
            return Some(at + 1);
        }
    }
    None
}

/// Leaves out the end of the last line, after which no other begins.
fn without_end(bytes: &[u8]) -> &[u8] {
    bytes.strip_suffix(b"\n").unwrap_or(bytes)
}

#[cfg(test)]
mod tests;
