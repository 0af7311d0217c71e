//! Who this agent is: the node's name, held by a lock, its incarnation, and the machine under it. Not for the record
//! that the store holds of it.
//!
//! A *name* says which place in the job a node takes and outlives a restart; an *incarnation* is one agent process.
//! The name's lock is what makes a restart safe: it is held by the agent and, through a duplicated descriptor, by its
//! guard until the last process of its tree is gone. Who gets the lock knows that its predecessor's workers are no more.

mod lock;
mod runtime;
#[cfg(test)]
mod tests;

use std::ffi::OsString;
use std::fmt;
use std::fs;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::{Path, PathBuf};
use std::time::Duration;

use elastic_coordinator::time::Time;
use uuid::Uuid;

pub use lock::Holder;
use lock::{Attempt, NameLock};
pub use runtime::RuntimeDir;

/// How long an agent waits for its predecessor's processes to be gone.
pub const PATIENCE: Duration = Duration::from_secs(15);
/// Nameless agents of one job on one host.
const MOST_SLOTS: u32 = 1000;
/// flock cannot wait with a deadline, so a held lock is tried again this often.
const RETRY: Duration = Duration::from_millis(20);

/// Why an agent has no identity.
#[derive(Debug, thiserror::Error)]
pub enum IdentityError {
    /// The name is another agent's.
    #[error(
        "node name `{name}` is in use on this host: {holder} still holds it after {waited:?}; if the agent was started \
         twice by mistake, end one, else give this one another --node-name"
    )]
    NameHeld {
        /// The name.
        name: String,
        /// Who holds it.
        holder: String,
        /// How long it was waited for.
        waited: Duration,
    },
    /// Every slot of the host's name is taken.
    #[error("all of {host} to {host}-{MOST_SLOTS} are held by agents of this job; give this one a --node-name")]
    NoFreeSlot {
        /// The host's name.
        host: String,
    },
    /// Lock files have no safe place.
    #[error("runtime directory {}: {cause}; set XDG_RUNTIME_DIR to a directory that only this user can write", path.display())]
    Runtime {
        /// The directory, or the file in it.
        path: PathBuf,
        /// What is wrong with it.
        cause: String,
    },
    /// The kernel does not say which boot this is.
    #[error("read /proc/sys/kernel/random/boot_id: {0}; the agent needs /proc")]
    BootId(io::Error),
}

/// What to claim an identity for.
#[derive(Debug, Clone)]
pub struct Claim<'a> {
    /// The job's id; names of different jobs do not meet.
    pub job: &'a str,
    /// `--node-name`; without it the host's name and its first free slot are taken.
    pub node_name: Option<&'a str>,
    /// Where locks lie.
    pub runtime: RuntimeDir,
    /// How long to wait for a predecessor: [`PATIENCE`].
    pub patience: Duration,
}

/// This node, for as long as it is kept: dropping it gives up the name, unless a duplicate of the lock lives on.
#[derive(Debug)]
pub struct NodeIdentity {
    /// The node's name, unique in the job on this machine.
    pub name: String,
    /// This agent process.
    pub incarnation: Uuid,
    /// The machine: `/etc/machine-id`, or the boot where there is none.
    pub machine_id: String,
    /// The machine's current boot.
    pub boot_id: String,
    /// The host's name, for people.
    pub host: String,
    lock: NameLock,
    directory: PathBuf,
}

/// The node's id, `name:incarnation`.
impl fmt::Display for NodeIdentity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.name, self.incarnation)
    }
}

impl NodeIdentity {
    /// Takes a name and locks it. Blocks, while a predecessor of the same name ends, for at most the claim's patience
    /// (for each slot, where no name is given).
    ///
    /// # Errors
    /// The name is held, or there is no safe place for its lock.
    pub fn claim(claim: &Claim<'_>) -> Result<NodeIdentity, IdentityError> {
        let boot_id = boot_id()?;
        let host = hostname();
        let incarnation = Uuid::new_v4();
        let directory = claim.runtime.open(claim.job)?;
        let (name, lock) = match claim.node_name {
            Some(name) => (name.to_owned(), named(&directory, name, incarnation, claim.patience)?),
            None => first_free(&directory, &node_name(&host), incarnation, claim.patience)?,
        };
        let machine_id = machine_id(&[Path::new("/etc/machine-id"), Path::new("/var/lib/dbus/machine-id")], &boot_id);
        Ok(NodeIdentity { name, incarnation, machine_id, boot_id, host, lock, directory: directory.path })
    }

    /// The lock's descriptor, closed on exec. The guard is given a duplicate (`dup` without close-on-exec); the name is
    /// free when the last duplicate is closed. Never unlock it: that would free the name under everyone.
    pub fn lock_fd(&self) -> BorrowedFd<'_> {
        self.lock.as_fd()
    }

    /// Names the lock itself: equal for two agents exactly if they competed for the same one. Two containers can share a
    /// machine id and a node name without sharing a lock; then holding it proves nothing about the other.
    pub fn lock_id(&self) -> String {
        format!("{}:{}", self.boot_id, self.lock.file_id())
    }

    /// Gives up the name and removes its file, and the job's directory if nothing else is in it. For a job that only
    /// this agent knows, after its workers are gone: where others may claim names, the files stay for them.
    pub fn retire(self) {
        // Tidiness only: what cannot be removed goes with the next boot.
        let _ = fs::remove_file(self.directory.join(lock::file_name(&self.name)));
        let _ = fs::remove_dir(&self.directory);
    }

    /// A directory of this job on this host that only this user can enter, for sockets.
    pub fn runtime_dir(&self) -> &Path {
        &self.directory
    }
}

/// This host's name.
pub fn hostname() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}

fn named(
    directory: &runtime::Directory,
    name: &str,
    incarnation: Uuid,
    patience: Duration,
) -> Result<NameLock, IdentityError> {
    match wait(directory, name, incarnation, patience, |_| true)? {
        Attempt::Locked(lock) => Ok(lock),
        Attempt::Held(holder) => Err(IdentityError::NameHeld {
            name: name.to_owned(),
            holder: holder.map_or_else(|| "an agent".into(), |holder| holder.to_string()),
            waited: patience,
        }),
    }
}

/// `host`, `host-2`, …: the first that no living agent has. One whose agent is dead while its lock is held is being
/// cleaned up by that agent's guard: its successor waits for it, rather than start beside workers about to end.
fn first_free(
    directory: &runtime::Directory,
    host: &str,
    incarnation: Uuid,
    patience: Duration,
) -> Result<(String, NameLock), IdentityError> {
    for slot in 1..=MOST_SLOTS {
        let name = if slot == 1 { host.to_owned() } else { format!("{host}-{slot}") };
        let being_cleaned = |holder: Option<&Holder>| holder.is_some_and(|holder| !holder.is_alive());
        if let Attempt::Locked(lock) = wait(directory, &name, incarnation, patience, being_cleaned)? {
            return Ok((name, lock));
        }
    }
    Err(IdentityError::NoFreeSlot { host: host.to_owned() })
}

/// Tries until the lock is ours, patience ends, or the holder is not `worth_waiting` for.
fn wait(
    directory: &runtime::Directory,
    name: &str,
    incarnation: Uuid,
    patience: Duration,
    worth_waiting: impl Fn(Option<&Holder>) -> bool,
) -> Result<Attempt, IdentityError> {
    let deadline = Time::now() + patience;
    let mut said = false;
    loop {
        let attempt = NameLock::attempt(directory, name, incarnation)?;
        let holder = match &attempt {
            Attempt::Held(holder) if worth_waiting(holder.as_ref()) && Time::now() < deadline => holder,
            _ => return Ok(attempt),
        };
        if !std::mem::replace(&mut said, true) {
            let holder = holder.as_ref().map_or_else(|| "pid unknown".into(), |holder| format!("pid {}", holder.pid));
            tracing::warn!(name, "waiting for the previous agent of this name ({holder}) to end");
        }
        std::thread::sleep(RETRY);
    }
}

/// A host's name as a node's: other characters than ids may hold become dashes.
fn node_name(host: &str) -> String {
    let allowed = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
    let name: String = host.chars().map(|c| if allowed(c) { c } else { '-' }).take(200).collect();
    let name = name.trim_matches(['.', '-']);
    if name.is_empty() { "node".into() } else { name.to_owned() }
}

fn boot_id() -> Result<String, IdentityError> {
    let text = fs::read_to_string("/proc/sys/kernel/random/boot_id").map_err(IdentityError::BootId)?;
    Ok(text.trim().to_owned())
}

/// The first valid file of `files`. Containers often have none; then the boot's id stands for the machine. It names
/// the same kernel for as long as that runs, and never two machines, as a host's name might.
fn machine_id(files: &[&Path], boot_id: &str) -> String {
    let valid = |text: &str| text.len() == 32 && text.bytes().all(|b| b.is_ascii_hexdigit());
    let read = |path: &&Path| Some(fs::read_to_string(path).ok()?.trim().to_owned()).filter(|text| valid(text));
    files.iter().find_map(read).unwrap_or_else(|| format!("boot-{boot_id}"))
}

/// The runtime directory of this process: see [`RuntimeDir::of`].
pub fn process_runtime_dir() -> RuntimeDir {
    RuntimeDir::of(&|name: &str| -> Option<OsString> { std::env::var_os(name) }, rustix::process::geteuid().as_raw())
}
