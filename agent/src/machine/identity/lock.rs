//! One name's lock: a file that is locked with flock and names its holder.

use std::fmt;
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;

use rustix::fs::{AtFlags, FileType, FlockOperation, Mode, OFlags};
use rustix::io::Errno;
use rustix::process::Pid;
use uuid::Uuid;

use super::IdentityError;
use super::runtime::{Directory, refuse};
use crate::guard::tree;

/// How often a lock file may vanish between opening and locking it. If it vanishes more often, that is no coincidence.
const MOST_REPLACEMENTS: u32 = 10;

/// The agent that a lock file names. The holder writes the file, for messages, and so that a living agent is
/// distinguished from an agent whose guard is still ending its processes. The lock itself decides who holds the name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Holder {
    pub pid: u32,
    /// When it started, in clock ticks since boot. This tells it from a later process with the same pid.
    start: u64,
    pub incarnation: Uuid,
}

impl Holder {
    fn this_process(incarnation: Uuid) -> Holder {
        let pid = std::process::id();
        Holder { pid, start: start_time(pid).unwrap_or(0), incarnation }
    }

    fn parse(text: &str) -> Option<Holder> {
        let mut words = text.split_whitespace();
        let holder = Holder {
            pid: words.next()?.parse().ok()?,
            start: words.next()?.parse().ok()?,
            incarnation: words.next()?.parse().ok()?,
        };
        words.next().is_none().then_some(holder)
    }

    /// Whether the agent itself still runs.
    pub(crate) fn is_alive(&self) -> bool {
        start_time(self.pid) == Some(self.start)
    }
}

impl fmt::Display for Holder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = if self.is_alive() { "" } else { ", which has ended but left processes behind" };
        write!(f, "the agent with pid {}{state} (incarnation {})", self.pid, self.incarnation)
    }
}

/// The process's start time. None if the process is gone, or only waits to be reaped.
fn start_time(pid: u32) -> Option<u64> {
    let process = tree::process(Pid::from_raw(pid.cast_signed())?)?;
    (!process.is_zombie()).then_some(process.started)
}

/// The result of one try to lock a name.
#[derive(Debug)]
pub(super) enum Attempt {
    /// The name stays locked until this descriptor and all its duplicates are closed.
    Locked(OwnedFd),
    /// The lock is held. The holder is known if its text in the file can be read.
    Held(Option<Holder>),
}

/// Tries once to lock a name, without waiting.
pub(super) fn attempt(directory: &Directory, name: &str, incarnation: Uuid) -> Result<Attempt, IdentityError> {
    let file_name = file_name(name);
    let path = directory.path.join(&file_name);
    for _ in 0..MOST_REPLACEMENTS {
        match once(directory, &file_name, incarnation) {
            Ok(Some(attempt)) => return Ok(attempt),
            Ok(None) => {}
            Err(error) => return Err(refuse(&path, error.to_string())),
        }
    }
    Err(refuse(&path, "the file is deleted again and again".into()))
}

pub(super) fn file_name(name: &str) -> String {
    format!("{name}.lock")
}

/// Tries once. `None`: the file was replaced meanwhile. A lock on a file that no longer has a name would keep no agent
/// out.
fn once(directory: &Directory, file_name: &str, incarnation: Uuid) -> io::Result<Option<Attempt>> {
    let flags = OFlags::RDWR | OFlags::CREATE | OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::NONBLOCK;
    let fd = rustix::fs::openat(&directory.fd, file_name, flags, Mode::RUSR | Mode::WUSR)?;
    let stat = rustix::fs::fstat(&fd)?;
    if !FileType::from_raw_mode(stat.st_mode).is_file() || stat.st_uid != rustix::process::geteuid().as_raw() {
        return Err(io::Error::other("it is not a plain file of this user's"));
    }
    let file = File::from(fd);
    match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => {}
        Err(Errno::WOULDBLOCK) => return Ok(Some(Attempt::Held(read_holder(&file)))),
        Err(errno) => return Err(errno.into()),
    }
    match rustix::fs::statat(&directory.fd, file_name, AtFlags::SYMLINK_NOFOLLOW) {
        Ok(now) if (now.st_dev, now.st_ino) == (stat.st_dev, stat.st_ino) => {}
        Ok(_) | Err(Errno::NOENT) => return Ok(None),
        Err(errno) => return Err(errno.into()),
    }
    let holder = Holder::this_process(incarnation);
    file.set_len(0)?;
    file.write_all_at(format!("{} {} {}\n", holder.pid, holder.start, holder.incarnation).as_bytes(), 0)?;
    Ok(Some(Attempt::Locked(file.into())))
}

fn read_holder(file: &File) -> Option<Holder> {
    let mut buffer = [0; 128];
    let length = file.read_at(&mut buffer, 0).ok()?;
    Holder::parse(std::str::from_utf8(&buffer[..length]).ok()?)
}
