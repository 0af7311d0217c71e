//! Disks that fail as disks do: power that goes, no room, errors at any call, lies, and silence.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex};

use super::disk::Disk;
use crate::random::mix;

/// A file's bytes as programs see them, and those that are sure to survive a crash.
#[derive(Debug, Clone, Default)]
struct Contents {
    now: Vec<u8>,
    durable: Vec<u8>,
    /// A sync of it has failed: the kernel takes it for clean, and syncs no more.
    lost: bool,
}

/// A name's change that is not durable yet.
#[derive(Debug, Clone)]
enum Change {
    Set(PathBuf, Thing),
    Unset(PathBuf),
    Move(PathBuf, PathBuf),
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Thing {
    File(usize),
    Folder,
}

/// What goes wrong.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Fault {
    /// This call and all later ones fail.
    Crash,
    /// This call alone fails, for want of room.
    Full,
    /// This call alone fails: a write, a sync, a close, or a name's change.
    Error,
    /// From this call on nothing can be changed.
    ReadOnly,
    /// This call, if it writes, leaves out the file's last bytes and says nothing of it.
    Short,
    /// This call, if it changes a name, is carried out; but its answer is lost, and the second request's is returned.
    Twice,
}

/// A disk that keeps only what was synced, and fails at the call that the test chooses.
#[derive(Debug, Clone, Default)]
pub(crate) struct FaultyDisk {
    files: Vec<Contents>,
    names: BTreeMap<PathBuf, Thing>,
    durable_names: BTreeMap<PathBuf, Thing>,
    changes: Vec<Change>,
    calls: usize,
    pub(crate) fault: Option<(usize, Fault)>,
    pub(crate) seed: u64,
    pub(crate) hit: bool,
    reads: Cell<usize>,
    /// The read that gets one bit wrong.
    pub(crate) flip: Option<usize>,
}

fn apply(names: &mut BTreeMap<PathBuf, Thing>, change: &Change) {
    match change {
        Change::Set(path, thing) => drop(names.insert(path.clone(), *thing)),
        Change::Unset(path) => drop(names.remove(path)),
        Change::Move(from, to) => {
            if let Some(thing) = names.remove(from) {
                names.insert(to.clone(), thing);
            }
        }
    }
}

impl FaultyDisk {
    pub(crate) fn failing(at: usize, fault: Fault, seed: u64) -> FaultyDisk {
        FaultyDisk { fault: Some((at, fault)), seed, ..FaultyDisk::default() }
    }

    /// Fails at the call after so many.
    pub(crate) fn fail_after(&mut self, calls: usize, fault: Fault) {
        self.fault = Some((self.calls + calls + 1, fault));
    }

    /// Counts a call; whether it fails now, and whether it still has its effect.
    fn call(&mut self) -> (io::Result<()>, bool) {
        self.calls += 1;
        let Some((at, fault)) = self.fault else { return (Ok(()), true) };
        let (error, takes_effect): (io::Error, bool) = match fault {
            Fault::Crash if self.calls >= at => {
                (io::Error::other("power is gone"), !self.hit && mix(self.seed).is_multiple_of(2))
            }
            Fault::Full if self.calls == at => (ErrorKind::StorageFull.into(), false),
            Fault::Error if self.calls == at => (rustix::io::Errno::IO.into(), mix(self.seed ^ 1).is_multiple_of(2)),
            Fault::ReadOnly if self.calls >= at => (ErrorKind::ReadOnlyFilesystem.into(), false),
            _ => return (Ok(()), true),
        };
        self.hit = true;
        (Err(error), takes_effect)
    }

    fn change(&mut self, change: Change) -> io::Result<()> {
        let (result, takes_effect) = self.call();
        let twice = self.fault == Some((self.calls, Fault::Twice)) && !matches!(change, Change::Set(..));
        if takes_effect {
            apply(&mut self.names, &change);
            self.changes.push(change);
        }
        self.hit |= twice;
        if twice { Err(ErrorKind::NotFound.into()) } else { result }
    }

    fn file(&self, path: &Path) -> io::Result<usize> {
        match self.names.get(path) {
            Some(Thing::File(file)) => Ok(*file),
            _ => Err(ErrorKind::NotFound.into()),
        }
    }

    /// What the next start finds: durable names and bytes, and of the rest what chance kept.
    pub(crate) fn reboot(&self) -> FaultyDisk {
        let mut names = self.durable_names.clone();
        for (number, change) in self.changes.iter().enumerate() {
            if self.seed == 0 || (self.seed > 1 && mix(self.seed ^ (number as u64) << 32).is_multiple_of(2)) {
                apply(&mut names, change);
            }
        }
        names.retain(|path, _| {
            path.parent().is_none_or(|parent| {
                parent == Path::new("/") || {
                    // A folder whose own name was lost takes its contents with it.
                    parent == Path::new("/ckpt") || matches!(self.names.get(parent), Some(Thing::Folder))
                }
            })
        });
        let survive = |contents: &Contents| {
            let kept = match self.seed % 3 {
                _ if contents.now == contents.durable => contents.now.clone(),
                0 => contents.durable.clone(),
                1 => contents.now[..contents.now.len() / 2].to_vec(),
                _ => vec![0; contents.now.len()],
            };
            Contents { now: kept.clone(), durable: kept, lost: false }
        };
        let files = self.files.iter().map(survive).collect();
        FaultyDisk { files, durable_names: names.clone(), names, ..FaultyDisk::default() }
    }
}

impl Disk for FaultyDisk {
    fn create_folder(&mut self, path: &Path) -> io::Result<()> {
        self.change(Change::Set(path.to_owned(), Thing::Folder))
    }

    fn list(&self, folder: &Path) -> io::Result<Vec<String>> {
        if self.names.get(folder) != Some(&Thing::Folder) {
            return Err(ErrorKind::NotFound.into());
        }
        let inside = self.names.keys().filter(|path| path.parent() == Some(folder));
        Ok(inside.map(|path| path.file_name().unwrap().to_string_lossy().into_owned()).collect())
    }

    fn length(&self, path: &Path) -> io::Result<u64> {
        Ok(self.files[self.file(path)?].now.len() as u64)
    }

    fn read(&self, path: &Path, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
        let contents = &self.files[self.file(path)?].now;
        let start = offset as usize;
        buffer.copy_from_slice(contents.get(start..start + buffer.len()).ok_or(ErrorKind::UnexpectedEof)?);
        self.reads.set(self.reads.get() + 1);
        if self.flip == Some(self.reads.get()) {
            let place = mix(self.seed) as usize % buffer.len();
            buffer[place] ^= 1 << (self.seed % 8);
        }
        Ok(())
    }

    fn write(&mut self, path: &Path, bytes: &[u8]) -> io::Result<()> {
        if let Ok(file) = self.file(path) {
            self.files[file].now.clear();
        }
        self.put(path, 0, bytes)
    }

    fn write_new(&mut self, path: &Path, bytes: &[u8]) -> io::Result<()> {
        match self.file(path) {
            Ok(_) => Err(ErrorKind::AlreadyExists.into()),
            Err(_) => self.put(path, 0, bytes),
        }
    }

    fn is_link(&self, _: &Path) -> bool {
        false
    }

    fn write_part(&mut self, path: &Path, offset: u64, bytes: &[u8]) -> io::Result<()> {
        self.put(path, offset as usize, bytes)
    }

    fn rename(&mut self, from: &Path, to: &Path) -> io::Result<()> {
        self.file(from)?;
        self.change(Change::Move(from.to_owned(), to.to_owned()))
    }

    fn sync_folder(&mut self, path: &Path) -> io::Result<()> {
        let (result, takes_effect) = self.call();
        if takes_effect {
            let (synced, rest): (Vec<_>, _) =
                std::mem::take(&mut self.changes).into_iter().partition(|change| match change {
                    Change::Set(at, _) | Change::Unset(at) | Change::Move(at, _) => at.parent() == Some(path),
                });
            self.changes = rest;
            synced.iter().for_each(|change| apply(&mut self.durable_names, change));
        }
        result
    }

    fn remove_file(&mut self, path: &Path) -> io::Result<()> {
        self.change(Change::Unset(path.to_owned()))
    }

    fn remove_folder(&mut self, path: &Path) -> io::Result<()> {
        if !self.list(path)?.is_empty() {
            return Err(ErrorKind::DirectoryNotEmpty.into());
        }
        self.change(Change::Unset(path.to_owned()))
    }
}

impl FaultyDisk {
    /// Writes a piece of a file: a write, a sync and a close. What is durable of it is this piece alone.
    fn put(&mut self, path: &Path, offset: usize, bytes: &[u8]) -> io::Result<()> {
        let (result, _) = self.call();
        let file = self.file(path).unwrap_or_else(|_| {
            self.files.push(Contents::default());
            let file = self.files.len() - 1;
            let change = Change::Set(path.to_owned(), Thing::File(file));
            apply(&mut self.names, &change);
            self.changes.push(change);
            file
        });
        let mut bytes = bytes.to_vec();
        match self.fault {
            _ if result.is_err() => bytes.truncate(bytes.len() / 3),
            Some((at, Fault::Short)) if at == self.calls => {
                bytes.truncate(bytes.len() - 1);
                self.hit = true;
            }
            _ => {}
        }
        let place = |all: &mut Vec<u8>| {
            let end = offset + bytes.len();
            all.resize(all.len().max(end), 0);
            all[offset..end].copy_from_slice(&bytes);
        };
        place(&mut self.files[file].now);
        result?;
        let (synced, takes_effect) = self.call();
        let contents = &mut self.files[file];
        contents.lost |= synced.is_err();
        if takes_effect && !contents.lost {
            contents.durable.truncate(contents.now.len());
            place(&mut contents.durable);
        }
        synced?;
        let (closed, _) = self.call();
        closed
    }
}

/// Lets so many more writes of [`Gated`] through. A disk that is slow gets them one by one, one that hangs none.
#[derive(Debug, Clone, Default)]
pub(crate) struct Gate(Arc<(Mutex<usize>, Condvar)>);

impl Gate {
    pub(crate) fn open(&self, writes: usize) {
        *self.0.0.lock().unwrap() += writes;
        self.0.1.notify_all();
    }

    fn pass(&self) {
        let left = self.0.0.lock().unwrap();
        *self.0.1.wait_while(left, |left| *left == 0).unwrap() -= 1;
    }
}

/// A disk whose every write waits at a gate.
#[derive(Debug)]
pub(crate) struct Gated<D>(pub(crate) D, pub(crate) Gate);

impl<D: Disk> Disk for Gated<D> {
    fn create_folder(&mut self, path: &Path) -> io::Result<()> {
        self.0.create_folder(path)
    }

    fn list(&self, folder: &Path) -> io::Result<Vec<String>> {
        self.0.list(folder)
    }

    fn length(&self, path: &Path) -> io::Result<u64> {
        self.0.length(path)
    }

    fn read(&self, path: &Path, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
        self.0.read(path, offset, buffer)
    }

    fn write(&mut self, path: &Path, bytes: &[u8]) -> io::Result<()> {
        self.1.pass();
        self.0.write(path, bytes)
    }

    fn write_new(&mut self, path: &Path, bytes: &[u8]) -> io::Result<()> {
        self.0.write_new(path, bytes)
    }

    fn is_link(&self, path: &Path) -> bool {
        self.0.is_link(path)
    }

    fn write_part(&mut self, path: &Path, offset: u64, bytes: &[u8]) -> io::Result<()> {
        self.1.pass();
        self.0.write_part(path, offset, bytes)
    }

    fn rename(&mut self, from: &Path, to: &Path) -> io::Result<()> {
        self.0.rename(from, to)
    }

    fn sync_folder(&mut self, path: &Path) -> io::Result<()> {
        self.0.sync_folder(path)
    }

    fn remove_file(&mut self, path: &Path) -> io::Result<()> {
        self.0.remove_file(path)
    }

    fn remove_folder(&mut self, path: &Path) -> io::Result<()> {
        self.0.remove_folder(path)
    }
}
