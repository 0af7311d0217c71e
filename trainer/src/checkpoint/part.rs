//! Checkpoints that several nodes' workers write to one folder: each a share of the one file. Not for who they are, nor
//! for when all have written theirs: that is [`super::shares`].
//!
//! ```text
//! <folder>/.shared-<nonce>                                        who finds what rank 0 has put there shares the folder
//! <folder>/step-00000120-r3/rank0-of-1.safetensors.<nonce>.tmp    all write to it, each its own chunks
//! <folder>/step-00000120-r3/<nonce>.1.crc                         what share 1's writer has written, for rank 0
//! ```
//!
//! The nonce is the round's: a writer that was left behind by its round, or by rank 0's patience, writes to a name, or a
//! file without one, that nobody else uses any more.

use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};

use elastic_proto::worker::Checkpoint;
use tracing::{debug, warn};

use super::disk::Disk;
use super::retention::Name;
use super::snapshot::Frame;
use super::{CheckpointError, Checkpoints, DATA, TEMPORARY, removed};

/// How the file begins by which a shared folder is told.
const SHARED: &str = ".shared-";

/// One of the shares that a round's checkpoints are cut into.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Part {
    /// The round's.
    pub nonce: u64,
    /// Which share, from 0, which is rank 0's.
    pub index: usize,
    /// Of how many.
    pub count: usize,
}

impl Part {
    /// The chunks that are this share's, of a file of so many bytes in chunks of so many.
    pub fn chunks(&self, len: usize, chunk: usize) -> Range<usize> {
        let chunks = len.div_ceil(chunk);
        chunks * self.index / self.count..chunks * (self.index + 1) / self.count
    }

    /// The bytes of these.
    pub fn bytes(&self, len: usize, chunk: usize) -> Range<usize> {
        let Range { start, end } = self.chunks(len, chunk);
        (start * chunk).min(len)..(end * chunk).min(len)
    }

    /// What all of its round write to.
    fn file(&self, folder: &Path) -> PathBuf {
        folder.join(format!("{DATA}.{:016x}{TEMPORARY}", self.nonce))
    }

    fn sums(&self, folder: &Path) -> PathBuf {
        folder.join(format!("{:016x}.{}.crc", self.nonce, self.index))
    }
}

/// The checksums of a share's chunks, in lines.
fn sums(part: &Part, frame: &Frame) -> Vec<u8> {
    let all: Vec<&str> = frame.about.extents.iter().flat_map(|extent| &extent.crc32c).map(String::as_str).collect();
    let own = all.get(part.chunks(frame.file.bytes().len(), frame.chunk())).unwrap_or_default();
    format!("{}\n{}\n", frame.step(), own.join("\n")).into_bytes()
}

impl<D: Disk> Checkpoints<D> {
    /// Puts something into the folder that others can look for.
    pub fn mark_shared(&mut self, nonce: u64) -> io::Result<()> {
        let path = self.shared(nonce);
        self.disk.write(&path, b"whoever sees this writes its share of the checkpoints here\n")
    }

    /// Whether it is there.
    pub fn is_shared(&self, nonce: u64) -> bool {
        self.disk.length(&self.shared(nonce)).is_ok()
    }

    /// Removes it, and what others before have left.
    pub fn unmark_shared(&mut self) {
        for name in self.disk.list(&self.folder).unwrap_or_default() {
            if name.starts_with(SHARED) {
                // Whoever comes next tries again.
                let _ = self.disk.remove_file(&self.folder.join(name));
            }
        }
    }

    fn shared(&self, nonce: u64) -> PathBuf {
        self.folder.join(format!("{SHARED}{nonce:016x}"))
    }

    /// Writes a share of a snapshot. When this returns it is durable, but no checkpoint.
    pub fn share(&mut self, frame: &Frame, part: &Part) -> Result<(), CheckpointError> {
        let folder = self.of(frame);
        let all = frame.file.bytes();
        let range = part.bytes(all.len(), frame.chunk());
        let mut write = || {
            frame.check_finite()?;
            self.disk.create_folder(&folder)?;
            self.disk.write_part(&part.file(&folder), range.start as u64, &all[range.clone()])?;
            if part.index == 0 { Ok(()) } else { self.disk.write(&part.sums(&folder), &sums(part, frame)) }
        };
        let (step, bytes) = (frame.step(), range.len());
        write().map_err(|cause| CheckpointError::Save { step, folder: self.folder.clone(), cause })?;
        debug!(step, share = part.index, of = part.count, bytes, "wrote a share of the checkpoint");
        Ok(())
    }

    /// Makes a checkpoint of a snapshot whose shares are all durable; if that cannot be, saves all of it.
    pub fn complete(&mut self, frame: &Frame, part: &Part) -> Result<Checkpoint, CheckpointError> {
        let folder = self.of(frame);
        match self.join(&folder, frame, part) {
            Ok(checkpoint) => Ok(checkpoint),
            Err(cause) => {
                warn!(
                    step = frame.step(),
                    "cannot join the shares of the checkpoint: {cause}; rank 0 writes all of it"
                );
                self.save(frame)
            }
        }
    }

    pub(super) fn join(&mut self, folder: &Path, frame: &Frame, part: &Part) -> io::Result<Checkpoint> {
        let (file, len) = (part.file(folder), frame.file.bytes().len() as u64);
        let kept = self.disk.length(&file)?;
        if kept != len {
            return Err(io::Error::other(format!("the file system kept {kept} of {len} bytes")));
        }
        for index in 1..part.count {
            let theirs = Part { index, ..*part };
            let (path, expected) = (theirs.sums(folder), sums(&theirs, frame));
            if self.contents(&path)? != expected {
                return Err(io::Error::other(format!("writer {index} has written another state than this rank's")));
            }
            removed(self.disk.remove_file(&path))?;
        }
        self.rename(&file, &folder.join(DATA), frame.file.bytes())?;
        debug!(step = frame.step(), shares = part.count, "joined the shares of the checkpoint");
        self.seal(folder, frame)
    }

    fn of(&self, frame: &Frame) -> PathBuf {
        self.path(Name { step: frame.step(), round: frame.about.round })
    }
}

#[cfg(test)]
mod tests {
    use super::super::CHUNK;
    use super::*;

    #[test]
    fn shares_cover_a_file_once_and_begin_at_chunks() {
        for len in [1, CHUNK - 1, CHUNK, CHUNK + 1, 5 * CHUNK + 77, 12 * CHUNK] {
            for count in 1..8 {
                let mut end = 0;
                for index in 0..count {
                    let part = Part { nonce: 1, index, count };
                    let bytes = part.bytes(len, CHUNK);
                    assert_eq!(bytes.start, end, "share {index} of {count}, of {len} bytes");
                    assert!(bytes.start == len || bytes.start.is_multiple_of(CHUNK));
                    end = bytes.end;
                }
                assert_eq!(end, len, "{count} shares of {len} bytes");
            }
        }
    }
}
