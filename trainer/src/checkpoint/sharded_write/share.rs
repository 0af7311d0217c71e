//! One writer's share of a checkpoint: which bytes of the one file, how it is written, and how all shares become a
//! checkpoint.

use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};

use elastic_proto::worker::Checkpoint;
use tracing::{debug, warn};

use super::super::disk::Disk;
use super::super::retention::Name;
use super::super::snapshot::Slot;
use super::super::{CheckpointError, Checkpoints, DATA, TEMPORARY, removed};

/// How the name of the file begins that shows whether a folder is shared.
const SHARED: &str = ".shared-";

/// One of the shares that a round's checkpoints are cut into.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Share {
    /// The round's.
    pub nonce: u64,
    /// Which share, from 0, which is rank 0's.
    pub index: usize,
    /// Of how many.
    pub count: usize,
}

/// A share that was written, or was not.
#[derive(Debug)]
pub struct EndedShare {
    /// The step whose state it is part of.
    pub step: u64,
    /// Which one.
    pub share: Share,
    /// It is durable, or why not.
    pub result: Result<(), CheckpointError>,
}

impl Share {
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

    /// The file that all writers of its round write to.
    fn file(&self, folder: &Path) -> PathBuf {
        folder.join(format!("{DATA}.{:016x}{TEMPORARY}", self.nonce))
    }

    fn sums(&self, folder: &Path) -> PathBuf {
        folder.join(format!("{:016x}.{}.crc", self.nonce, self.index))
    }
}

/// The checksums of a share's chunks, in lines.
fn sums(share: &Share, slot: &Slot) -> Vec<u8> {
    let all: Vec<&str> = slot.about.extents.iter().flat_map(|extent| &extent.crc32c).map(String::as_str).collect();
    let own = all.get(share.chunks(slot.file.bytes().len(), slot.chunk())).unwrap_or_default();
    format!("{}\n{}\n", slot.step(), own.join("\n")).into_bytes()
}

impl<D: Disk> Checkpoints<D> {
    /// Puts a file into the folder that other nodes can look for.
    pub fn mark_shared(&mut self, nonce: u64) -> io::Result<()> {
        let path = self.shared(nonce);
        self.disk.write(&path, b"each node that sees this file writes its share of the checkpoints here\n")
    }

    /// Whether that file is there.
    pub fn is_shared(&self, nonce: u64) -> bool {
        self.disk.length(&self.shared(nonce)).is_ok()
    }

    /// Removes that file, and those that earlier rounds have left.
    pub fn unmark_shared(&mut self) {
        for name in self.disk.list(&self.folder).unwrap_or_default() {
            if name.starts_with(SHARED) {
                // The next round tries again.
                let _ = self.disk.remove_file(&self.folder.join(name));
            }
        }
    }

    fn shared(&self, nonce: u64) -> PathBuf {
        self.folder.join(format!("{SHARED}{nonce:016x}"))
    }

    /// Writes a share of a snapshot. When this returns it is durable, but no checkpoint.
    pub fn share(&mut self, slot: &Slot, share: &Share) -> Result<(), CheckpointError> {
        let folder = self.of(slot);
        let all = slot.file.bytes();
        let range = share.bytes(all.len(), slot.chunk());
        let mut write = || {
            slot.check_finite()?;
            self.disk.create_folder(&folder)?;
            self.disk.write_part(&share.file(&folder), range.start as u64, &all[range.clone()])?;
            if share.index == 0 { Ok(()) } else { self.disk.write(&share.sums(&folder), &sums(share, slot)) }
        };
        let (step, bytes) = (slot.step(), range.len());
        write().map_err(|cause| CheckpointError::Save { step, folder: self.folder.clone(), cause })?;
        debug!(step, share = share.index, of = share.count, bytes, "wrote a share of the checkpoint");
        Ok(())
    }

    /// Makes a checkpoint of a snapshot whose shares are all durable; if that cannot be, saves all of it.
    pub fn complete(&mut self, slot: &Slot, share: &Share) -> Result<Checkpoint, CheckpointError> {
        let folder = self.of(slot);
        match self.join(&folder, slot, share) {
            Ok(checkpoint) => Ok(checkpoint),
            Err(cause) => {
                warn!(step = slot.step(), "cannot join the shares of the checkpoint: {cause}; rank 0 writes all of it");
                self.save(slot)
            }
        }
    }

    pub(in super::super) fn join(&mut self, folder: &Path, slot: &Slot, share: &Share) -> io::Result<Checkpoint> {
        let (file, len) = (share.file(folder), slot.file.bytes().len() as u64);
        let kept = self.disk.length(&file)?;
        if kept != len {
            return Err(io::Error::other(format!("the file system kept {kept} of {len} bytes")));
        }
        for index in 1..share.count {
            let theirs = Share { index, ..*share };
            let (path, expected) = (theirs.sums(folder), sums(&theirs, slot));
            if self.contents(&path)? != expected {
                return Err(io::Error::other(format!("writer {index} has written another state than this rank's")));
            }
            removed(self.disk.remove_file(&path))?;
        }
        self.rename(&file, &folder.join(DATA), slot.file.bytes())?;
        debug!(step = slot.step(), shares = share.count, "joined the shares of the checkpoint");
        self.seal(folder, slot)
    }

    fn of(&self, slot: &Slot) -> PathBuf {
        self.path(Name { step: slot.step(), round: slot.about.round })
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::CHUNK;
    use super::*;

    #[test]
    fn shares_cover_a_file_once_and_begin_at_chunks() {
        for len in [1, CHUNK - 1, CHUNK, CHUNK + 1, 5 * CHUNK + 77, 12 * CHUNK] {
            for count in 1..8 {
                let mut end = 0;
                for index in 0..count {
                    let share = Share { nonce: 1, index, count };
                    let bytes = share.bytes(len, CHUNK);
                    assert_eq!(bytes.start, end, "share {index} of {count}, of {len} bytes");
                    assert!(bytes.start == len || bytes.start.is_multiple_of(CHUNK));
                    end = bytes.end;
                }
                assert_eq!(end, len, "{count} shares of {len} bytes");
            }
        }
    }
}
