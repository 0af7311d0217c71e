//! Memory of this node that outlives its workers. Each worker may have some, and the worker that takes its place gets
//! the same memory. The agent does not know the memory's content.
//!
//! The agent only holds descriptors. It never maps the memory, whose pages are allocated when a worker first touches
//! them. The memory is freed when the agent ends.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, fstat, ftruncate, memfd_create};

use crate::machine::cgroups::{self, Version};
use crate::machine::field;

/// The size in bytes of the blocks that `fstat` counts.
const BLOCK: u64 = 512;

#[derive(Debug, thiserror::Error)]
pub(crate) enum MemoryError {
    #[error(
        "{} MB of memory that outlives a worker are more than this node can spare: {} MB, half of what is free",
        mb(*wanted),
        mb(*spare)
    )]
    TooMuch { wanted: u64, spare: u64 },
    #[error("no worker of this local rank has left memory on this node")]
    Nothing,
    #[error("cannot get memory that outlives a worker: {0}")]
    Kernel(#[from] io::Error),
}

fn mb(bytes: u64) -> u64 {
    bytes.div_ceil(1_000_000)
}

/// The memory of this node's workers, by local rank.
#[derive(Debug, Default)]
pub(crate) struct Memories {
    generation: u64,
    lent: BTreeMap<u32, Arc<OwnedFd>>,
    /// The command that saves each worker's memory, if the worker named one.
    savers: BTreeMap<u32, Vec<String>>,
}

/// Memory that can be saved after its worker has ended.
#[derive(Debug, Clone)]
pub struct Left {
    pub file: Arc<OwnedFd>,
    /// The command line that saves it.
    pub command: Vec<String>,
}

impl Memories {
    /// From now on, the workers that run belong to this generation of the job. Memory of another generation is dropped.
    pub(crate) fn begin(&mut self, generation: u64) {
        if std::mem::replace(&mut self.generation, generation) != generation {
            self.lent.clear();
            self.savers.clear();
        }
    }

    /// Records the command that saves a worker's memory. If `command` is empty, the memory cannot be saved.
    pub(crate) fn saved_by(&mut self, local_rank: u32, command: Vec<String>) {
        if command.is_empty() {
            self.savers.remove(&local_rank);
        } else {
            self.savers.insert(local_rank, command);
        }
    }

    /// Drops the memory that a worker gives back.
    pub(crate) fn forget(&mut self, local_rank: u32) {
        self.lent.remove(&local_rank);
        self.savers.remove(&local_rank);
    }

    /// Memory that can be saved. Data-parallel workers hold the same data, so this is the first worker's.
    pub(crate) fn left(&self) -> Option<Left> {
        let both = |(rank, command): (&u32, &Vec<String>)| {
            Some(Left { file: Arc::clone(self.lent.get(rank)?), command: command.clone() })
        };
        self.savers.iter().find_map(both)
    }

    /// Lends a worker a file in memory. If the worker already has a file of this size, it gets the same file. Otherwise
    /// it gets a new file, whose size no process can change. `spare` is how many bytes the node can spare.
    pub(crate) fn lend(&mut self, local_rank: u32, bytes: u64, spare: u64) -> Result<Arc<OwnedFd>, MemoryError> {
        if bytes == 0 {
            return Err(MemoryError::Nothing);
        }
        if let Some(known) = self.lent.get(&local_rank)
            && fstat(known).is_ok_and(|about| about.st_size as u64 == bytes)
        {
            return Ok(Arc::clone(known));
        }
        let spare = spare.saturating_sub(self.untouched(local_rank));
        if bytes > spare {
            return Err(MemoryError::TooMuch { wanted: bytes, spare });
        }
        let fresh = Arc::new(sealed(bytes)?);
        self.lent.insert(local_rank, Arc::clone(&fresh));
        Ok(fresh)
    }

    /// Lends a worker the file that was left for it, and its size in bytes.
    pub(crate) fn lend_left(&self, local_rank: u32) -> Result<(Arc<OwnedFd>, u64), MemoryError> {
        let left = self.lent.get(&local_rank).ok_or(MemoryError::Nothing)?;
        Ok((Arc::clone(left), fstat(left).map_err(io::Error::from)?.st_size as u64))
    }

    /// Bytes that were promised to other workers and that the kernel still counts as free.
    fn untouched(&self, local_rank: u32) -> u64 {
        let of_one = |file: &Arc<OwnedFd>| {
            fstat(file).map_or(0, |about| (about.st_size as u64).saturating_sub(about.st_blocks as u64 * BLOCK))
        };
        self.lent.iter().filter(|(rank, _)| **rank != local_rank).map(|(_, file)| of_one(file)).sum()
    }
}

fn sealed(bytes: u64) -> io::Result<OwnedFd> {
    let file = memfd_create("elastic-worker", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    ftruncate(&file, bytes)?;
    // A process that maps a file dies if another process shortens it and it touches the missing part.
    fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
    Ok(file)
}

/// How many bytes this node can spare now: half of the free memory. This is the memory that is free on the host, or in
/// one of the cgroups that this process is in, whichever is least.
pub(crate) fn spare() -> u64 {
    let host = available(&fs::read_to_string("/proc/meminfo").unwrap_or_default()).unwrap_or(0);
    let groups = cgroups::own("memory", Path::new("/"));
    let rooms = groups.iter().flat_map(|group| group.upwards().filter_map(|directory| room(group.version, directory)));
    rooms.fold(host, u64::min) / 2
}

/// The kernel's estimate of what can be used without swapping, from `/proc/meminfo`.
fn available(meminfo: &str) -> Option<u64> {
    Some(field(meminfo, "MemAvailable")?.strip_suffix("kB")?.trim().parse::<u64>().ok()? * 1024)
}

/// How many bytes are left up to a cgroup's limit, if it has one. Cached files count as free, because the kernel gives
/// their memory back when it is needed.
fn room(version: Version, directory: &Path) -> Option<u64> {
    let (limit, usage) = match version {
        Version::V1 => ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        Version::V2 => ("memory.max", "memory.current"),
    };
    let read = |name| fs::read_to_string(directory.join(name)).ok();
    let number = |name| read(name)?.trim().parse::<u64>().ok();
    let cache = cached(&read("memory.stat").unwrap_or_default());
    Some(number(limit)?.saturating_sub(number(usage)?.saturating_sub(cache)))
}

/// Bytes of files that are cached, from `memory.stat`.
fn cached(stat: &str) -> u64 {
    let of = |name: &str| stat.lines().find_map(|line| line.strip_prefix(name)?.trim().parse::<u64>().ok());
    ["active_file ", "inactive_file "].into_iter().filter_map(of).sum()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    use super::*;

    fn file(memory: &Arc<OwnedFd>) -> fs::File {
        memory.try_clone().unwrap().into()
    }

    #[test]
    fn a_successor_gets_the_same_memory_which_cannot_be_resized() {
        let mut memories = Memories::default();
        memories.begin(1);
        file(&memories.lend(0, 8192, 8192).unwrap()).write_all_at(b"left", 4000).unwrap();
        memories.begin(1);
        let again = file(&memories.lend(0, 8192, 0).unwrap());
        let mut left = [0; 4];
        again.read_exact_at(&mut left, 4000).unwrap();
        assert_eq!(&left, b"left");
        assert!(again.set_len(4096).is_err() && again.set_len(10000).is_err());
        // A worker never gets the memory of another worker, nor memory of another size or generation.
        let mut blank = |memories: &mut Memories, local_rank, bytes| {
            file(&memories.lend(local_rank, bytes, 1 << 20).unwrap()).read_exact_at(&mut left, 4000).unwrap();
            left == [0; 4]
        };
        assert!(blank(&mut memories, 1, 8192));
        memories.begin(2);
        assert!(blank(&mut memories, 0, 8192));
        file(&memories.lend(0, 8192, 0).unwrap()).write_all_at(b"left", 4000).unwrap();
        assert!(blank(&mut memories, 0, 12288));
    }

    #[test]
    fn a_successor_that_does_not_know_the_size_asks_for_what_was_left() {
        let mut memories = Memories::default();
        memories.begin(1);
        assert!(matches!(memories.lend_left(0), Err(MemoryError::Nothing)));
        file(&memories.lend(0, 8192, 1 << 20).unwrap()).write_all_at(b"left", 4000).unwrap();
        let (again, bytes) = memories.lend_left(0).unwrap();
        let mut left = [0; 4];
        file(&again).read_exact_at(&mut left, 4000).unwrap();
        assert_eq!((&left, bytes), (b"left", 8192));
        assert!(memories.lend_left(1).is_err(), "another worker's");
        memories.begin(2);
        assert!(memories.lend_left(0).is_err(), "another generation's");
    }

    #[test]
    fn what_can_be_saved_is_memory_whose_worker_has_said_how() {
        let mut memories = Memories::default();
        memories.begin(1);
        let words = |word: &str| vec![word.to_owned()];
        memories.saved_by(0, words("refused"));
        assert!(memories.left().is_none(), "it has no memory");
        memories.lend(1, 4096, 1 << 20).unwrap();
        memories.saved_by(1, words("save"));
        assert_eq!(memories.left().unwrap().command, ["save"]);
        memories.saved_by(1, Vec::new());
        assert!(memories.left().is_none());
        memories.saved_by(1, words("save"));
        memories.forget(1);
        assert!(memories.left().is_none(), "it was given back");
        memories.lend(1, 4096, 1 << 20).unwrap();
        memories.saved_by(1, words("save"));
        memories.begin(2);
        assert!(memories.left().is_none(), "another generation's is not this one's");
    }

    #[test]
    fn no_more_is_promised_than_there_is() {
        let mut memories = Memories::default();
        let spare = 3 << 20;
        memories.lend(0, 2 << 20, spare).unwrap();
        // No process has touched the first memory yet, so the kernel still counts it as free.
        let error = memories.lend(1, 2 << 20, spare).unwrap_err().to_string();
        assert!(error.contains("3 MB") && error.contains("2 MB, half of what is free"), "{error}");
        file(&memories.lend(0, 2 << 20, 0).unwrap()).write_all_at(&vec![1; 2 << 20], 0).unwrap();
        memories.lend(1, 2 << 20, spare).unwrap();
        // A worker that asks for another size loses its first memory, unless the request is refused.
        memories.lend(1, 1 << 20, 1 << 20).unwrap();
        assert!(memories.lend(0, u64::MAX, spare).is_err() && memories.lend(0, 0, spare).is_err());
        let mut left = [0];
        file(&memories.lend(0, 2 << 20, 0).unwrap()).read_exact_at(&mut left, 0).unwrap();
        assert_eq!(left, [1]);
    }

    #[test]
    fn what_is_free_is_read_from_the_host_and_from_cgroups() {
        assert_eq!(available("MemTotal: 9 kB\nMemAvailable:   16384 kB\n"), Some(16 << 20));
        assert!((1..u64::MAX / 4).contains(&spare()), "{}", spare());
        let group = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| fs::write(group.path().join(name), text).unwrap();
        for (name, text) in [("memory.max", "max\n"), ("memory.current", "700\n")] {
            write(name, text);
        }
        assert_eq!(room(Version::V2, group.path()), None, "no limit");
        write("memory.max", "1000\n");
        write("memory.stat", "anon 5\nfile 90\ninactive_file 60\nactive_file 40\n");
        assert_eq!(room(Version::V2, group.path()), Some(400));
        write("memory.max", "500\n");
        assert_eq!(room(Version::V2, group.path()), Some(0));
    }
}
