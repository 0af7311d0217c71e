//! The few things that saving needs from a file system. A seam, so that tests can crash between any two of them, and
//! let a file system hang or lie; not a file API.

use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind, Seek, SeekFrom, Write};
use std::os::fd::IntoRawFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;

use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};

/// What direct writes must start at, in memory and in the file, and be a multiple of. Enough for every disk in use.
pub(super) const ALIGNMENT: usize = 4096;

/// Bytes of a direct write: large enough for a disk's full rate, small enough that a kernel takes it in one piece.
const STRIDE: usize = 8 << 20;

/// A file system, as far as checkpoints use one.
pub trait Disk {
    /// Creates a folder whose parent exists; one that is there already is fine.
    fn create_folder(&mut self, path: &Path) -> io::Result<()>;
    /// Names in a folder, in no order.
    fn list(&self, folder: &Path) -> io::Result<Vec<String>>;
    /// The present length of a file, also where another host has written it.
    fn length(&self, path: &Path) -> io::Result<u64>;
    /// Fills `buffer` with a file's bytes from `offset` on; a file that ends before is an error.
    fn read(&self, path: &Path, offset: u64, buffer: &mut [u8]) -> io::Result<()>;
    /// Creates or replaces a file, makes its contents durable and closes it. Its name is durable only after
    /// [`sync_folder`](Self::sync_folder).
    fn write(&mut self, path: &Path, bytes: &[u8]) -> io::Result<()>;
    /// The same for a file that must not be there yet, even where several try at once: one that is has
    /// [`ErrorKind::AlreadyExists`].
    fn write_new(&mut self, path: &Path, bytes: &[u8]) -> io::Result<()>;
    /// Whether it is a symbolic link.
    fn is_link(&self, path: &Path) -> bool;
    /// Writes a piece of a file, which need not be there yet, makes it durable and closes the file. Others may write
    /// other pieces meanwhile.
    fn write_part(&mut self, path: &Path, offset: u64, bytes: &[u8]) -> io::Result<()>;
    /// Gives a file another name in its folder, replacing what had it.
    fn rename(&mut self, from: &Path, to: &Path) -> io::Result<()>;
    /// Makes a folder's names durable.
    fn sync_folder(&mut self, path: &Path) -> io::Result<()>;
    /// Removes a file.
    fn remove_file(&mut self, path: &Path) -> io::Result<()>;
    /// Removes an empty folder.
    fn remove_folder(&mut self, path: &Path) -> io::Result<()>;
}

/// The file system of this host.
///
/// Large files whose bytes lie at a multiple of 4 KiB in memory are written around the page cache where the file system
/// allows that: it is faster, leaves the cache to others, and an error is known at the write instead of some time
/// later.
#[derive(Debug, Default)]
pub struct Host;

impl Disk for Host {
    fn create_folder(&mut self, path: &Path) -> io::Result<()> {
        match fs::create_dir(path) {
            Err(error) if error.kind() == ErrorKind::AlreadyExists && path.is_dir() => Ok(()),
            result => result,
        }
    }

    fn list(&self, folder: &Path) -> io::Result<Vec<String>> {
        fs::read_dir(folder)?.map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned())).collect()
    }

    fn length(&self, path: &Path) -> io::Result<u64> {
        // What `stat` says may come from a cache of the file system's, and be old. Opening asks the server (NFS's
        // close-to-open consistency).
        Ok(open(path, OpenOptions::new().read(true))?.metadata()?.len())
    }

    fn read(&self, path: &Path, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
        let around = read_around(path, offset, buffer)?;
        match buffer.get_mut(around..).filter(|rest| !rest.is_empty()) {
            Some(rest) => open(path, OpenOptions::new().read(true))?.read_exact_at(rest, offset + around as u64),
            None => Ok(()),
        }
    }

    fn write(&mut self, path: &Path, bytes: &[u8]) -> io::Result<()> {
        let (file, direct) = create(path, true, bytes.len() >= STRIDE / 8)?;
        write_all(&mut &file, bytes, direct, || end_direct(&file))?;
        file.sync_all()?;
        close(file)
    }

    fn write_new(&mut self, path: &Path, bytes: &[u8]) -> io::Result<()> {
        let mut file = OpenOptions::new().write(true).create_new(true).open(path)?;
        file.write_all(bytes)?;
        file.sync_all()?;
        close(file)
    }

    fn is_link(&self, path: &Path) -> bool {
        fs::symlink_metadata(path).is_ok_and(|about| about.is_symlink())
    }

    fn write_part(&mut self, path: &Path, offset: u64, bytes: &[u8]) -> io::Result<()> {
        let aligned = offset.is_multiple_of(ALIGNMENT as u64);
        let (mut file, direct) = create(path, false, aligned && bytes.len() >= STRIDE / 8)?;
        file.seek(SeekFrom::Start(offset))?;
        write_all(&mut &file, bytes, direct, || end_direct(&file))?;
        file.sync_data()?;
        close(file)
    }

    fn rename(&mut self, from: &Path, to: &Path) -> io::Result<()> {
        fs::rename(from, to)
    }

    fn sync_folder(&mut self, path: &Path) -> io::Result<()> {
        File::open(path)?.sync_all()
    }

    fn remove_file(&mut self, path: &Path) -> io::Result<()> {
        fs::remove_file(path)
    }

    fn remove_folder(&mut self, path: &Path) -> io::Result<()> {
        fs::remove_dir(path)
    }
}

/// Opens a file that is there. That it was not there a moment ago may be all that a file system over a network knows:
/// opening its folder has NFS ask the server.
fn open(path: &Path, options: &OpenOptions) -> io::Result<File> {
    match (options.open(path), path.parent()) {
        (Err(error), Some(folder)) if error.kind() == ErrorKind::NotFound => {
            drop(File::open(folder));
            options.open(path)
        }
        (result, _) => result,
    }
}

/// Reads the whole blocks of a large piece around the page cache, where the file system allows that: no process reads a
/// checkpoint twice. How many bytes it has read.
fn read_around(path: &Path, offset: u64, buffer: &mut [u8]) -> io::Result<usize> {
    let blocks = buffer.len() / ALIGNMENT * ALIGNMENT;
    let aligned = offset.is_multiple_of(ALIGNMENT as u64) && buffer.as_ptr().align_offset(ALIGNMENT) == 0;
    if !aligned || blocks < STRIDE / 8 {
        return Ok(0);
    }
    let refused = |error: &io::Error| matches!(error.kind(), ErrorKind::InvalidInput | ErrorKind::Unsupported);
    let file = open(path, OpenOptions::new().read(true).custom_flags(OFlags::DIRECT.bits().cast_signed()));
    let read = file.and_then(|file| file.read_exact_at(&mut buffer[..blocks], offset));
    match read {
        Err(error) if refused(&error) => Ok(0),
        read => read.map(|()| blocks),
    }
}

/// A file, emptied if it is to be `empty`, and whether it is written around the page cache.
fn create(path: &Path, anew: bool, direct: bool) -> io::Result<(File, bool)> {
    let mut options = OpenOptions::new();
    options.write(true).create(true).truncate(anew);
    if direct {
        match options.clone().custom_flags(OFlags::DIRECT.bits().cast_signed()).open(path) {
            Err(error) if matches!(error.kind(), ErrorKind::InvalidInput | ErrorKind::Unsupported) => {}
            result => return result.map(|file| (file, true)),
        }
    }
    options.open(path).map(|file| (file, false))
}

fn end_direct(file: &File) -> io::Result<()> {
    Ok(fcntl_setfl(file, fcntl_getfl(file)? & !OFlags::DIRECT)?)
}

/// Writes all bytes, by as many calls as it takes. A direct write ends where the rest cannot go that way: at a last
/// piece or after a short write that does not fill a block, or where the file system allows the flag but not the write.
fn write_all(
    file: &mut impl Write,
    bytes: &[u8],
    mut direct: bool,
    end_direct: impl Fn() -> io::Result<()>,
) -> io::Result<()> {
    let mut rest = bytes;
    while !rest.is_empty() {
        let blocks = rest.len().min(STRIDE) / ALIGNMENT * ALIGNMENT;
        if direct && (blocks == 0 || rest.as_ptr().align_offset(ALIGNMENT) != 0) {
            end_direct()?;
            direct = false;
        }
        match file.write(if direct { &rest[..blocks] } else { rest }) {
            Ok(0) => return Err(ErrorKind::WriteZero.into()),
            Ok(written) => rest = &rest[written..],
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) if direct && error.kind() == ErrorKind::InvalidInput => {
                end_direct()?;
                direct = false;
            }
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Closes a file. File systems over a network may tell of a lost write only now, and dropping the file would not.
fn close(file: File) -> io::Result<()> {
    let descriptor = file.into_raw_fd();
    // SAFETY: the descriptor is open, and this is its only owner.
    #[allow(unsafe_code)]
    let result = unsafe { libc::close(descriptor) };
    // After EINTR Linux has closed it all the same.
    match io::Error::last_os_error() {
        error if result != 0 && error.kind() != ErrorKind::Interrupted => Err(error),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use std::cell::{Cell, RefCell};

    use super::super::pages::Pages;
    use super::*;

    /// A file that takes as many bytes as it likes, and direct writes only up to a point.
    struct Moody {
        taken: RefCell<Vec<u8>>,
        calls: Cell<usize>,
        direct: Cell<bool>,
        direct_until: usize,
    }

    impl Write for &Moody {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.calls.set(self.calls.get() + 1);
            if self.calls.get().is_multiple_of(3) {
                return Err(ErrorKind::Interrupted.into());
            }
            let mut taken = self.taken.borrow_mut();
            if self.direct.get() {
                let aligned = |number: usize| number.is_multiple_of(ALIGNMENT);
                assert!(aligned(bytes.as_ptr() as usize) && aligned(bytes.len()) && aligned(taken.len()));
                if taken.len() >= self.direct_until {
                    return Err(ErrorKind::InvalidInput.into());
                }
            }
            let whole_blocks = bytes.len() > 2 * ALIGNMENT && self.calls.get() < 9;
            let count = if whole_blocks { 2 * ALIGNMENT } else { bytes.len().div_ceil(2) };
            taken.extend(&bytes[..count]);
            Ok(count)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn short_writes_and_refused_direct_ones_lose_nothing() {
        let mut pages = Pages::own(20 * ALIGNMENT + 123).unwrap();
        pages.bytes_mut().iter_mut().enumerate().for_each(|(place, byte)| *byte = (place * 7 % 251) as u8);
        for (direct, direct_until, skip) in
            [(false, 0, 0), (true, 0, 0), (true, 6 * ALIGNMENT, 0), (true, usize::MAX, 0), (true, usize::MAX, 1)]
        {
            let bytes = &pages.bytes()[skip..];
            let direct_now = Cell::new(direct);
            let file = Moody { taken: RefCell::default(), calls: Cell::new(0), direct: direct_now, direct_until };
            write_all(&mut &file, bytes, direct, || {
                file.direct.set(false);
                Ok(())
            })
            .unwrap();
            assert!(*file.taken.borrow() == bytes, "direct {direct} until {direct_until}, from byte {skip}");
            assert!(!file.direct.get(), "the last piece is no whole block");
        }
    }

    #[test]
    fn files_of_every_length_are_written_whole_around_the_cache_or_not() {
        // The one is on a disk, mostly; the other may refuse direct writes.
        let parents = [std::env::temp_dir(), "/dev/shm".into()];
        for parent in parents.iter().filter(|path| path.is_dir()) {
            let folder = tempfile::tempdir_in(parent).unwrap();
            let path = folder.path().join("file");
            let mut pages = Pages::own(STRIDE + STRIDE / 4).unwrap();
            pages.bytes_mut().iter_mut().enumerate().for_each(|(place, byte)| *byte = (place % 253) as u8);
            for length in [0, 1, ALIGNMENT, STRIDE / 8, STRIDE / 8 + 1, STRIDE, STRIDE + ALIGNMENT + 5] {
                // In two pieces, the second first.
                let cut = length / 2 / ALIGNMENT * ALIGNMENT;
                let piece = path.with_file_name(format!("pieces-{length}"));
                for range in [cut..length, 0..cut] {
                    Host.write_part(&piece, range.start as u64, &pages.bytes()[range]).unwrap();
                }
                assert!(fs::read(&piece).unwrap() == pages.bytes()[..length], "{length} bytes in pieces");
                for skip in [0, 1] {
                    let bytes = &pages.bytes()[skip..skip + length];
                    Host.write(&path, bytes).unwrap();
                    assert!(fs::read(&path).unwrap() == bytes, "{length} bytes from {skip} in {}", parent.display());
                    let mut read = Pages::own(length + 1).unwrap();
                    Host.read(&path, 0, &mut read.bytes_mut()[..length]).unwrap();
                    assert!(read.bytes()[..length] == *bytes, "{length} bytes read in {}", parent.display());
                    assert!(Host.read(&path, 0, read.bytes_mut()).is_err(), "there are {length} bytes only");
                }
            }
        }
    }
}
