//! The identity of this agent: the node's name, which a lock protects, its incarnation, and the machine under it.
//!
//! A *name* says which place in the job a node takes, and it outlives a restart. An *incarnation* is one agent process.
//! The lock on the name makes a restart safe. The agent holds it, and through a duplicated descriptor its guard holds
//! it until the last process of the agent's tree is gone. So an agent that gets the lock knows that no worker of its
//! predecessor is left.

mod lock;
mod runtime;
#[cfg(test)]
mod tests;
mod unnamed;

use std::ffi::OsString;
use std::fmt;
use std::fs;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::Duration;

use uuid::Uuid;

use lock::Attempt;
pub(crate) use lock::Holder;
pub(crate) use runtime::{RuntimeDir, fnv1a};

/// How long an agent waits for its predecessor's processes to be gone.
pub(crate) const PATIENCE: Duration = Duration::from_secs(15);
/// The most agents of one job on one host that may run without `--node-name`.
const MOST_SLOTS: u32 = 1000;
/// flock cannot wait with a deadline, so a held lock is tried again this often.
const RETRY: Duration = Duration::from_millis(20);

/// Why an agent could not get an identity.
#[derive(Debug, thiserror::Error)]
pub(crate) enum IdentityError {
    #[error(
        "node name `{name}` is in use on this host: {holder} still holds it after {waited:?}; if the agent was started \
         twice by mistake, end one, else give this one another --node-name"
    )]
    NameHeld { name: String, holder: String, waited: Duration },
    #[error("all of {host} to {host}-{MOST_SLOTS} are held by agents of this job; give this one a --node-name")]
    NoFreeSlot { host: String },
    #[error(
        "runtime directory {}: {cause}; set XDG_RUNTIME_DIR to a directory that only this user can write",
        path.display()
    )]
    Runtime { path: PathBuf, cause: String },
}

const SOCKET: &str = ".sock";

/// This node's identity. Dropping it gives up the name, unless a duplicate of the lock's descriptor is still open.
#[derive(Debug)]
pub(crate) struct NodeIdentity {
    /// The node's name, unique in the job.
    pub name: String,
    pub incarnation: Uuid,
    /// The machine's id: `/etc/machine-id`, or an id made of the boot's id where there is none.
    pub machine_id: String,
    pub boot_id: String,
    /// The host's name, to show to people.
    pub host: String,
    job: String,
    lock: OwnedFd,
    directory: PathBuf,
}

/// The node's id, `name:incarnation`.
impl fmt::Display for NodeIdentity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.name, self.incarnation)
    }
}

impl NodeIdentity {
    /// Takes a name in this job and locks it: `name`, or without it the first free slot of [`unnamed::name`]. While a
    /// predecessor of the same name ends, this blocks for at most `patience`, usually [`PATIENCE`]. Without a name, it
    /// blocks for at most that long at each slot.
    pub(crate) fn claim(
        job: &str,
        name: Option<&str>,
        runtime: &RuntimeDir,
        patience: Duration,
    ) -> Result<NodeIdentity, IdentityError> {
        let host = hostname();
        let machine_id = machine_id(&MACHINE_IDS.map(Path::new));
        let boot_id = boot_id(machine_id.as_deref(), &host);
        let incarnation = Uuid::new_v4();
        let directory = runtime.open(job)?;
        let (name, lock) = match name {
            Some(name) => (name.to_owned(), named(&directory, name, incarnation, patience)?),
            None => {
                let unnamed = unnamed::here(&host, &boot_id, machine_id.as_deref(), &directory.locks()?);
                first_free(&directory, &unnamed, incarnation, patience)?
            }
        };
        let machine_id = machine_id.unwrap_or_else(|| format!("boot-{boot_id}"));
        let job = job.to_owned();
        Ok(NodeIdentity { name, incarnation, machine_id, boot_id, host, job, lock, directory: directory.path })
    }

    /// Takes the name again where its file is gone, as `$XDG_RUNTIME_DIR` is after its user's last session. The job's
    /// directory may be in another place then. An error if another agent has the name there.
    pub(crate) fn settle_again(&mut self, runtime: &RuntimeDir) -> Result<(), IdentityError> {
        if !self.directory.join(lock::file_name(&self.name)).exists() {
            let directory = runtime.open(&self.job)?;
            self.lock = named(&directory, &self.name, self.incarnation, Duration::ZERO)?;
            self.directory = directory.path;
        }
        Ok(())
    }

    /// The lock's descriptor, which is closed on exec. The guard is given a duplicate (`dup` without close-on-exec).
    /// The name is free when the last duplicate is closed. Never unlock the descriptor: that would free the name
    /// although the other duplicates are still open.
    pub(crate) fn lock_fd(&self) -> BorrowedFd<'_> {
        self.lock.as_fd()
    }

    /// Gives up the name and removes its file, and the job's directory if no other agent of the job is on this host. The
    /// workers must be gone: an agent that makes the file again has the name at once.
    pub(crate) fn retire(self) {
        // This is only tidying. A file that cannot be removed goes with the next boot.
        self.remove_sockets();
        let _ = fs::remove_file(self.directory.join(lock::file_name(&self.name)));
        runtime::remove(&self.directory);
    }

    /// A path for the workers' socket that no agent has had. Sockets that killed agents of this node have left are
    /// removed: who holds the name is its only agent, and has none of their workers.
    pub(crate) fn fresh_socket(&self) -> PathBuf {
        self.remove_sockets();
        let fresh = &Uuid::new_v4().simple().to_string()[..6];
        self.directory.join(format!("{}{fresh}{SOCKET}", runtime::socket_prefix(&self.name)))
    }

    fn remove_sockets(&self) {
        let own = runtime::socket_prefix(&self.name);
        for entry in fs::read_dir(&self.directory).into_iter().flatten().flatten() {
            let name = entry.file_name();
            if name.to_str().is_some_and(|name| name.starts_with(&own) && name.ends_with(SOCKET)) {
                let _ = fs::remove_file(entry.path());
            }
        }
    }

    /// This job's directory on this host, for sockets. Only this user can write in it.
    #[cfg(test)]
    pub(crate) fn runtime_dir(&self) -> &Path {
        &self.directory
    }
}

/// The host name of this machine.
pub fn hostname() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}

/// What an agent without `--node-name` takes first on this machine.
pub(crate) fn unnamed_here(runtime: &RuntimeDir) -> Result<String, IdentityError> {
    let (host, machine_id) = (hostname(), machine_id(&MACHINE_IDS.map(Path::new)));
    let boot_id = boot_id(machine_id.as_deref(), &host);
    Ok(unnamed::here(&host, &boot_id, machine_id.as_deref(), &runtime.locks()?))
}

fn named(
    directory: &runtime::Directory,
    name: &str,
    incarnation: Uuid,
    patience: Duration,
) -> Result<OwnedFd, IdentityError> {
    match wait(directory, name, incarnation, patience, |_| true)? {
        Attempt::Locked(lock) => Ok(lock),
        Attempt::Held(holder) => Err(IdentityError::NameHeld {
            name: name.to_owned(),
            holder: holder.map_or_else(|| "an agent".into(), |holder| holder.to_string()),
            waited: patience,
        }),
    }
}

/// Takes the first of `host`, `host-2`, … that no living agent holds. If a slot's agent is dead but its lock is held,
/// that agent's guard is still ending the agent's processes. The new agent waits for this slot, so that it does not
/// start beside workers that are about to end.
fn first_free(
    directory: &runtime::Directory,
    host: &str,
    incarnation: Uuid,
    patience: Duration,
) -> Result<(String, OwnedFd), IdentityError> {
    for slot in 1..=MOST_SLOTS {
        let name = if slot == 1 { host.to_owned() } else { format!("{host}-{slot}") };
        let being_cleaned = |holder: Option<&Holder>| holder.is_some_and(|holder| !holder.is_alive());
        if let Attempt::Locked(lock) = wait(directory, &name, incarnation, patience, being_cleaned)? {
            return Ok((name, lock));
        }
    }
    Err(IdentityError::NoFreeSlot { host: host.to_owned() })
}

/// Tries until this agent has the lock, its patience ends, or the holder is not `worth_waiting` for.
fn wait(
    directory: &runtime::Directory,
    name: &str,
    incarnation: Uuid,
    patience: Duration,
    worth_waiting: impl Fn(Option<&Holder>) -> bool,
) -> Result<Attempt, IdentityError> {
    let deadline = elastic_store::clock::now() + patience;
    let mut said = false;
    loop {
        let attempt = lock::attempt(directory, name, incarnation)?;
        let holder = match &attempt {
            Attempt::Held(holder) if worth_waiting(holder.as_ref()) && elastic_store::clock::now() < deadline => holder,
            _ => return Ok(attempt),
        };
        if !std::mem::replace(&mut said, true) {
            let holder = holder.as_ref().map_or_else(|| "pid unknown".into(), |holder| format!("pid {}", holder.pid));
            tracing::warn!(name, "waiting for the previous agent of this name ({holder}) to end");
        }
        std::thread::sleep(RETRY);
    }
}

/// Turns a host's name into a node's name. Characters that ids may not contain become dashes.
fn node_name(host: &str) -> String {
    let allowed = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
    let name: String = host.chars().map(|c| if allowed(c) { c } else { '-' }).take(200).collect();
    let name = name.trim_matches(['.', '-']);
    if name.is_empty() { "node".into() } else { name.to_owned() }
}

/// The id of the running kernel. Where /proc does not show it (`subset=pid`), it is made of the machine's id, or else of
/// the host's name.
fn boot_id(machine_id: Option<&str>, host: &str) -> String {
    match fs::read_to_string("/proc/sys/kernel/random/boot_id") {
        Ok(text) => text.trim().to_owned(),
        Err(error) => {
            tracing::info!(%error, "/proc does not show this boot's id, so the machine's id is used for it");
            machine_id.map_or_else(|| format!("host-{host}"), |id| format!("machine-{id}"))
        }
    }
}

const MACHINE_IDS: [&str; 2] = ["/etc/machine-id", "/var/lib/dbus/machine-id"];

/// The id in the first valid file of `files`. Containers often have none, and then the boot's id is used for the
/// machine. The boot's id names one running kernel. It never names two machines, as a host's name might.
fn machine_id(files: &[&Path]) -> Option<String> {
    let valid = |text: &str| text.len() == 32 && text.bytes().all(|b| b.is_ascii_hexdigit());
    let read = |path: &&Path| Some(fs::read_to_string(path).ok()?.trim().to_owned()).filter(|text| valid(text));
    files.iter().find_map(read)
}

pub(crate) fn process_runtime_dir() -> RuntimeDir {
    RuntimeDir::of(&|name: &str| -> Option<OsString> { std::env::var_os(name) }, rustix::process::geteuid().as_raw())
}
