//! The directory on this host that a job's locks and sockets lie in, safe against other users.

use std::ffi::OsString;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, FlockOperation, Mode, OFlags};

use super::IdentityError;

/// The longest name of a job's directory, in bytes. A UUID fits.
const LONGEST_NAME: usize = 40;
/// The longest path of a job's directory, in bytes. A socket's path has 107 bytes at most (unix(7)), and a socket in the
/// directory adds 20.
const LONGEST_PATH: usize = 87;

/// Where runtime files are kept on this host: in the first of these places that can be used.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct RuntimeDir {
    places: Vec<Candidate>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Candidate {
    /// A directory that exists already.
    base: PathBuf,
    /// The name of our directory in it.
    own: String,
}

impl RuntimeDir {
    /// `$XDG_RUNTIME_DIR/elastic-agent`, then for root `/run/elastic-agent`, then `elastic-agent-<uid>` in `/tmp`, then
    /// that in `$TMPDIR`. The last comes last because schedulers give each job its own.
    pub(crate) fn of(env: &dyn Fn(&str) -> Option<OsString>, uid: u32) -> RuntimeDir {
        // The specification demands an absolute path, and says to ignore any other.
        let absolute = |name: &str| env(name).map(PathBuf::from).filter(|path| path.is_absolute());
        let own =
            absolute("XDG_RUNTIME_DIR").into_iter().chain((uid == 0).then(|| "/run".into())).map(Candidate::under);
        let shared = [PathBuf::from("/tmp")].into_iter().chain(absolute("TMPDIR").filter(|path| path != "/tmp"));
        let shared = shared.map(|base| Candidate { base, own: format!("elastic-agent-{uid}") });
        RuntimeDir { places: own.chain(shared).collect() }
    }

    /// Only `<base>/elastic-agent`.
    #[cfg(test)]
    pub(crate) fn under(base: impl Into<PathBuf>) -> RuntimeDir {
        RuntimeDir { places: vec![Candidate::under(base.into())] }
    }

    /// Opens the job's directory, and makes it where needed.
    pub(super) fn open(&self, job: &str) -> Result<Directory, IdentityError> {
        let name = job_directory(job);
        self.first(name.len(), |place| place.open(&name))
    }

    /// The directory in which the directories of most jobs lie.
    pub(super) fn locks(&self) -> Result<Locks, IdentityError> {
        self.first(LONGEST_NAME, |place| place.own()?.locks())
    }

    /// Uses the first place that can be used for a job whose directory's name has `length` bytes. A place that cannot is
    /// skipped with a warning, because `$XDG_RUNTIME_DIR` often belongs to another host or another user. One with a long
    /// path is skipped without a word, as is right where a user has chosen it for other programs.
    fn first<T>(
        &self,
        length: usize,
        used: impl Fn(&Candidate) -> Result<T, IdentityError>,
    ) -> Result<T, IdentityError> {
        let fits = |place: &&Candidate| place.path().as_os_str().len() + 1 + length <= LONGEST_PATH;
        let mut places = self.places.iter().filter(fits);
        let longest = self.places.last().map(Candidate::path).unwrap_or_default();
        let mut place = places.next().ok_or_else(|| refuse(&longest, "its path is too long for sockets".into()))?;
        loop {
            match (used(place), places.next()) {
                (Err(error), Some(next)) => {
                    tracing::warn!("{error}; using {} instead", next.path().display());
                    place = next;
                }
                (opened, _) => return opened,
            }
        }
    }
}

impl Candidate {
    fn under(base: PathBuf) -> Candidate {
        Candidate { base, own: "elastic-agent".into() }
    }

    fn path(&self) -> PathBuf {
        self.base.join(&self.own)
    }

    /// Opens our directory.
    fn own(&self) -> Result<Directory, IdentityError> {
        let base = rustix::fs::openat(CWD, &self.base, DIRECTORY, Mode::empty())
            .map_err(|errno| refuse(&self.base, errno.to_string()))?;
        Directory { fd: base, path: self.base.clone(), parent: None }.private(&self.own)
    }

    /// Opens the directory of this name in ours.
    fn open(&self, name: &str) -> Result<Directory, IdentityError> {
        let own = self.own()?;
        rustix::fs::flock(&own.fd, FlockOperation::LockShared).map_err(|errno| refuse(&own.path, errno.to_string()))?;
        let job = own.private(name)?;
        Ok(Directory { parent: Some(own.fd), ..job })
    }
}

/// The directory in which the jobs' directories lie, with the locks of their nodes' names.
#[derive(Debug)]
pub(super) struct Locks {
    pub(super) path: PathBuf,
    pub(super) device: u64,
    pub(super) inode: u64,
}

/// An open directory, and its path for messages and sockets.
#[derive(Debug)]
pub(super) struct Directory {
    pub(super) fd: OwnedFd,
    pub(super) path: PathBuf,
    /// Of a job's directory: what it lies in, locked, so that [`remove`] does not take it away while it is open.
    parent: Option<OwnedFd>,
}

/// Removes a job's directory if it is empty and no agent is about to make a file in it. This is only tidying: what stays
/// goes with the next agent of the job, or with the next boot.
pub(super) fn remove(job: &Path) {
    let Some(parent) = job.parent() else { return };
    let Ok(parent) = rustix::fs::openat(CWD, parent, DIRECTORY, Mode::empty()) else { return };
    if rustix::fs::flock(&parent, FlockOperation::NonBlockingLockExclusive).is_ok() {
        let _ = std::fs::remove_dir(job);
    }
}

const DIRECTORY: OFlags = OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::CLOEXEC);

impl Directory {
    /// Opens the directory `name` in this one. It must belong to this user, no other user may write in it, and it must
    /// not be a link that somebody planted.
    fn private(&self, name: &str) -> Result<Directory, IdentityError> {
        let path = self.path.join(name);
        let refuse_errno = |errno: rustix::io::Errno| refuse(&path, errno.to_string());
        match rustix::fs::mkdirat(&self.fd, name, Mode::RWXU) {
            Ok(()) | Err(rustix::io::Errno::EXIST) => {}
            Err(errno) => return Err(refuse_errno(errno)),
        }
        let fd =
            rustix::fs::openat(&self.fd, name, DIRECTORY | OFlags::NOFOLLOW, Mode::empty()).map_err(
                |errno| match errno {
                    rustix::io::Errno::LOOP | rustix::io::Errno::NOTDIR => refuse(&path, "it is no directory".into()),
                    errno => refuse_errno(errno),
                },
            )?;
        let stat = rustix::fs::fstat(&fd).map_err(refuse_errno)?;
        if stat.st_uid != rustix::process::geteuid().as_raw() {
            return Err(refuse(&path, format!("it belongs to user {}", stat.st_uid)));
        }
        if stat.st_mode & 0o022 != 0 {
            return Err(refuse(&path, format!("others can write it (mode {:o})", stat.st_mode & 0o7777)));
        }
        Ok(Directory { fd, path, parent: None })
    }

    /// Ours: of a job's directory, the one that it lies in.
    pub(super) fn locks(&self) -> Result<Locks, IdentityError> {
        let (fd, path) = match (&self.parent, self.path.parent()) {
            (Some(parent), Some(path)) => (parent, path),
            _ => (&self.fd, self.path.as_path()),
        };
        let stat = rustix::fs::fstat(fd).map_err(|errno| refuse(path, errno.to_string()))?;
        Ok(Locks { path: path.to_owned(), device: stat.st_dev, inode: stat.st_ino })
    }
}

pub(super) fn refuse(path: &Path, cause: String) -> IdentityError {
    IdentityError::Runtime { path: path.to_owned(), cause }
}

/// The directory name for a job's id: the id itself if it is short, else its beginning and a hash of the whole id.
fn job_directory(job: &str) -> String {
    // Job ids are made of characters that are safe in file names. Any other text cannot lead out of the directory
    // either.
    let safe = |c: char| c.is_ascii_alphanumeric() || "._-:@+=".contains(c);
    if !job.is_empty() && job.len() <= LONGEST_NAME && job.chars().all(safe) && !job.starts_with('.') {
        return job.to_owned();
    }
    let start: String = job.chars().filter(|&c| safe(c) && c != '.').take(LONGEST_NAME - 17).collect();
    format!("{start}~{:016x}", fnv1a(job.as_bytes()))
}

/// How the names of a node's sockets begin. A socket's path is short, so this short text replaces the node's name.
pub(super) fn socket_prefix(node: &str) -> String {
    let hash = fnv1a(node.as_bytes());
    format!("{:08x}-", (hash ^ (hash >> 32)) as u32)
}

/// FNV-1a, 64 bits (Fowler, Noll, Vo). The standard library's hash may change with its version, but agents of two
/// versions must find the same directory.
pub(crate) fn fnv1a(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt, symlink};

    use super::*;

    #[test]
    fn the_place_is_xdgs_then_run_for_root_then_tmp_then_tmpdir() {
        let with = |xdg: Option<&str>, tmp: Option<&str>, uid| {
            let set = |name: &str| if name == "TMPDIR" { tmp } else { xdg };
            let dir = RuntimeDir::of(&|name| set(name).map(OsString::from), uid);
            dir.places.iter().map(|place| place.path().display().to_string()).collect::<Vec<_>>()
        };
        let dirs = |xdg: Option<&str>, uid| with(xdg, Some("/tmp"), uid);
        assert_eq!(with(None, Some("/scratch"), 7), ["/tmp/elastic-agent-7", "/scratch/elastic-agent-7"]);
        assert_eq!(dirs(Some("/run/user/7"), 7), ["/run/user/7/elastic-agent", "/tmp/elastic-agent-7"]);
        assert_eq!(dirs(Some("relative"), 7), ["/tmp/elastic-agent-7"]);
        assert_eq!(dirs(None, 7), ["/tmp/elastic-agent-7"]);
        assert_eq!(dirs(None, 0), ["/run/elastic-agent", "/tmp/elastic-agent-0"]);
    }

    #[test]
    fn a_place_whose_path_is_too_long_for_a_socket_is_passed_over() {
        let base = tempfile::tempdir().unwrap();
        let long = base.path().join("x".repeat(60));
        std::fs::create_dir(&long).unwrap();
        let dir = RuntimeDir { places: vec![Candidate::under(long.clone()), Candidate::under(base.path().into())] };
        let job = "0123456789abcdef0123456789abcdef0123";
        let opened = dir.open(job).unwrap();
        assert_eq!(opened.path, base.path().join("elastic-agent").join(job));
        let error = RuntimeDir::under(long).open(job).unwrap_err().to_string();
        assert!(error.contains("its path is too long for sockets; set XDG_RUNTIME_DIR"), "{error}");
    }

    #[test]
    fn job_ids_become_distinct_names_that_stay_inside() {
        assert_eq!(job_directory("job-1"), "job-1");
        let long = "x".repeat(255);
        for job in [long.as_str(), "", ".", "..", ".x", "a/b", "../../etc"] {
            let name = job_directory(job);
            assert!(name.len() <= LONGEST_NAME && !name.contains('/') && !name.starts_with('.'), "{job} {name}");
            assert!(name.contains('~'), "no id can hold a tilde, so no id meets it: {name}");
        }
        assert_ne!(job_directory(&long), job_directory(&"x".repeat(254)));
        // The published test vector for "foobar".
        assert_eq!(fnv1a(b"foobar"), 0x8594_4171_f739_67e8);
    }

    #[test]
    fn a_fresh_directory_is_private_and_serves_again() {
        let base = tempfile::tempdir().unwrap();
        for _ in 0..2 {
            let directory = RuntimeDir::under(base.path()).open("J").unwrap();
            assert_eq!(directory.path, base.path().join("elastic-agent/J"));
            assert_eq!(directory.path.metadata().unwrap().permissions().mode() & 0o777, 0o700);
        }
    }

    #[test]
    fn links_and_directories_others_can_write_are_refused() {
        let refused = |prepare: &dyn Fn(&Path)| {
            let base = tempfile::tempdir().unwrap();
            prepare(&base.path().join("elastic-agent"));
            RuntimeDir::under(base.path()).open("J").unwrap_err().to_string()
        };
        let linked = refused(&|path| symlink("/tmp", path).unwrap());
        assert!(linked.contains("it is no directory"), "{linked}");
        let file = refused(&|path| std::fs::write(path, "").unwrap());
        assert!(file.contains("it is no directory"), "{file}");
        let open = refused(&|path| {
            std::fs::create_dir(path).unwrap();
            std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o777)).unwrap();
        });
        assert!(open.contains("others can write it (mode 777); set XDG_RUNTIME_DIR"), "{open}");
    }

    #[test]
    fn another_users_directory_is_refused() {
        if !rustix::process::geteuid().is_root() {
            return;
        }
        let base = tempfile::tempdir().unwrap();
        let path = base.path().join("elastic-agent");
        std::fs::create_dir(&path).unwrap();
        std::os::unix::fs::chown(&path, Some(12345), None).unwrap();
        let error = RuntimeDir::under(base.path()).open("J").unwrap_err().to_string();
        assert!(error.contains("it belongs to user 12345"), "{error}");
    }

    #[test]
    fn a_missing_base_names_itself() {
        let error = RuntimeDir::under("/nowhere/at/all").open("J").unwrap_err().to_string();
        assert!(error.contains("/nowhere/at/all") && error.contains("XDG_RUNTIME_DIR"), "{error}");
    }
}
