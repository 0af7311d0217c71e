//! Reading what a manifest lists, and comparing every checksum. One thread reads while another checks what was read, so
//! that the disk does not wait for checksums.

use std::io;
use std::ops::Range;
use std::path::Path;
use std::sync::mpsc::{channel, sync_channel};
use std::thread;

use super::disk::Disk;
use super::manifest::{Extent, Manifest, hex};
use super::pages::Pages;
use super::{CheckpointError, Checkpoints, Flaw};

/// One is read while the other is checked.
const BUFFERS: usize = 2;

/// A chunk of a file.
struct Chunk<'a> {
    extent: &'a Extent,
    number: u64,
    expected: &'a str,
    start: u64,
    end: u64,
}

impl Chunk<'_> {
    fn len(&self) -> usize {
        (self.end - self.start) as usize
    }

    fn flaw(&self, cause: &str) -> Flaw {
        let Chunk { extent, number, start, end, .. } = self;
        Flaw { file: extent.file.clone(), chunk: Some(*number), cause: format!("bytes {start} to {end} {cause}") }
    }

    /// Where its part of the flat state begins.
    fn state_offset(&self) -> u64 {
        self.extent.offset + self.start.saturating_sub(self.extent.file_offset).min(self.extent.len)
    }

    /// Compares its checksum, and gives its part of the flat state to `take`, with the offset there.
    fn check(&self, bytes: &[u8], take: &mut impl FnMut(u64, &[u8])) -> Option<Flaw> {
        let found = hex(crc32c::crc32c(bytes));
        if found != *self.expected {
            return Some(self.flaw(&format!("have the checksum {found}, not {}", self.expected)));
        }
        let data = self.extent.file_offset..self.extent.file_offset + self.extent.len;
        let piece = data.start.max(self.start)..data.end.min(self.end);
        if !piece.is_empty() {
            let within = (piece.start - self.start) as usize..(piece.end - self.start) as usize;
            take(self.extent.offset + (piece.start - data.start), &bytes[within]);
        }
        None
    }
}

fn chunks(manifest: &Manifest) -> impl Iterator<Item = Chunk<'_>> {
    manifest.extents.iter().flat_map(|extent| {
        (0..).zip(&extent.crc32c).map(move |(number, expected)| {
            let start = number * extent.chunk;
            Chunk { extent, number, expected, start, end: extent.file_len.min(start + extent.chunk) }
        })
    })
}

/// One of the shares in which several read a checkpoint: its chunks, and the bytes of the flat state in them.
fn share(manifest: &Manifest, index: usize, count: usize) -> (Range<usize>, Range<u64>) {
    let all = chunks(manifest).count();
    let bound = |index: usize| all * index / count;
    let offset = |chunk: usize| chunks(manifest).nth(chunk).map_or(manifest.state_bytes, |chunk| chunk.state_offset());
    (bound(index)..bound(index + 1), offset(bound(index))..offset(bound(index + 1)))
}

impl<D: Disk> Checkpoints<D> {
    /// Reads all files of a checkpoint and says what is wrong with them. Chunks that are right go to `take`, with their
    /// offset in the flat state.
    pub(super) fn check(
        &self,
        path: &Path,
        manifest: &Manifest,
        take: impl FnMut(u64, &[u8]) + Send,
    ) -> io::Result<Vec<Flaw>> {
        self.check_part(path, manifest, 0..usize::MAX, take)
    }

    /// Reads one of `count` shares of a checkpoint's state into its place in `state`, which has room for all of it.
    /// Says which bytes these are; `on_read` hears how many more have been read.
    pub fn load_share(
        &self,
        path: &Path,
        manifest: &Manifest,
        (index, count): (usize, usize),
        state: &mut [f32],
        on_read: impl Fn(u64) + Sync,
    ) -> Result<Range<u64>, CheckpointError> {
        let (chunks, range) = share(manifest, index, count);
        let bytes: &mut [u8] = bytemuck::cast_slice_mut(state);
        let flaws = self.check_part(path, manifest, chunks, |place, piece| {
            bytes[place as usize..place as usize + piece.len()].copy_from_slice(piece);
            on_read(piece.len() as u64);
        });
        let failed = |cause: String| CheckpointError::Load { path: path.to_owned(), cause };
        let flaws = flaws.map_err(|error| failed(error.to_string()))?;
        flaws.first().map_or(Ok(range), |flaw| Err(failed(flaw.to_string())))
    }

    /// The same of these chunks, counted over all files.
    fn check_part(
        &self,
        path: &Path,
        manifest: &Manifest,
        part: Range<usize>,
        take: impl FnMut(u64, &[u8]) + Send,
    ) -> io::Result<Vec<Flaw>> {
        let chunks = || chunks(manifest).skip(part.start).take(part.len());
        let largest = chunks().map(|chunk| chunk.len()).max().unwrap_or(0);
        let (emptied, empty) = channel();
        for _ in 0..BUFFERS {
            let mut buffer = Pages::own(largest.max(1))?;
            buffer.populate();
            // The receiver is here.
            let _ = emptied.send(buffer);
        }
        let (filled, full) = sync_channel::<(Chunk<'_>, Pages)>(BUFFERS);
        let mut unread = Vec::new();
        let damaged = thread::scope(|scope| {
            let mut take = take;
            let checker = move || {
                let mut damaged = Vec::new();
                for (chunk, buffer) in full {
                    damaged.extend(chunk.check(&buffer.bytes()[..chunk.len()], &mut take));
                    // The reader may have ended.
                    let _ = emptied.send(buffer);
                }
                damaged
            };
            let checker = thread::Builder::new().name("checksums".into()).spawn_scoped(scope, checker)?;
            let mut spare = None;
            for chunk in chunks() {
                let Some(mut buffer) = spare.take().or_else(|| empty.recv().ok()) else { break };
                let (file, into) = (path.with_file_name(&chunk.extent.file), &mut buffer.bytes_mut()[..chunk.len()]);
                match self.disk.read(&file, chunk.start, into) {
                    // What goes wrong there is seen at its end.
                    Ok(()) => drop(filled.send((chunk, buffer))),
                    Err(error) => {
                        unread.push(chunk.flaw(&format!("cannot be read: {error}")));
                        spare = Some(buffer);
                    }
                }
            }
            drop(filled);
            checker.join().map_err(|_| io::Error::other("the thread that compares checksums has panicked"))
        })?;
        unread.extend(damaged);
        unread.sort_by_key(|flaw| flaw.chunk);
        Ok(unread)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_cover_the_state_once() {
        // Two files with headers. The first has chunks without state before and after it.
        let extent = |file: &str, file_len, file_offset, offset, len| Extent {
            file: file.into(),
            file_len,
            file_offset,
            offset,
            len,
            chunk: 10,
            crc32c: vec![String::new(); u64::div_ceil(file_len, 10) as usize],
        };
        let extents = vec![extent("a", 60, 24, 0, 12), extent("b", 45, 5, 12, 40)];
        let manifest = Manifest { state_bytes: 52, extents, ..Manifest::default() };
        for count in 1..15 {
            let (mut chunk, mut end) = (0, 0);
            for index in 0..count {
                let (chunks, bytes) = share(&manifest, index, count);
                assert_eq!((chunks.start, bytes.start), (chunk, end), "share {index} of {count}");
                (chunk, end) = (chunks.end, bytes.end);
            }
            assert_eq!((chunk, end), (11, 52), "{count} shares");
        }
    }
}
