//! Saving the state so that a crash at any moment leaves the last good checkpoint, and loading one that is whole.
//! When to save is decided in `train/saving.rs`; to commit is the agent's transaction.
//!
//! ```text
//! <folder>/step-00000120-r3/rank0-of-1.safetensors    the flat state; PyTorch's safetensors can read it
//! <folder>/step-00000120-r3/manifest.json             written last: without it the folder is no checkpoint
//! <folder>/committed                                  the newest that the job is known to have committed
//! <folder>/job                                        whose folder it is: two jobs would overwrite each other's
//! ```
//!
//! A folder carries its round, so that a member that was left behind by its round cannot overwrite what a later round
//! committed. Files are written under a temporary name, made durable, renamed, and the folder made durable: a rename is
//! durable only then.

pub mod command;
#[cfg(test)]
mod crash_test;
pub mod disk;
mod error;
#[cfg(test)]
pub(crate) mod faulty;
mod final_save;
pub(crate) mod folder_lock;
pub(crate) mod looking;
pub mod manifest;
mod pages;
mod reading;
pub mod retention;
pub(crate) mod sharded_write;
pub mod snapshot;
pub mod snapshot_slots;
pub(crate) mod tensors;
pub mod writer;

use std::collections::BTreeSet;
use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

use elastic_proto::worker::Checkpoint;
use tracing::{info, warn};

use command::Folder;
use disk::Disk;
pub use error::CheckpointError;
use manifest::{Extent, Manifest, digest};
use retention::{Name, Retention};
use snapshot::Slot;

const MANIFEST: &str = "manifest.json";
const DATA: &str = "rank0-of-1.safetensors";
const TEMPORARY: &str = ".tmp";
const PROBE: &str = ".writable";
/// Names the newest checkpoint that is known to be committed.
const COMMITTED: &str = "committed";
/// Names the job that saves here.
const OWNER: &str = "job";

/// Most bytes of a manifest: that of 100 TB has fewer.
const LONGEST: u64 = 1 << 28;

/// Bytes under one checksum.
const CHUNK: usize = 8 << 20;

/// Room for a state of so many bytes, if there is enough memory. A manifest may claim anything.
pub(crate) fn room(bytes: u64) -> Result<Vec<f32>, String> {
    let lacks = || format!("there is no memory for its state of {bytes} bytes");
    let numbers = usize::try_from(bytes / size_of::<f32>() as u64).map_err(|_| lacks())?;
    bytemuck::allocation::try_zeroed_vec(numbers).map_err(|()| lacks())
}

/// Takes a removal that finds nothing for a success: somebody else was quicker, or a file system over a network removed
/// the file, lost its answer, and was asked again.
fn removed(result: io::Result<()>) -> io::Result<()> {
    match result {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        result => result,
    }
}

/// A checkpoint that was read and found whole: what training has made so far.
#[derive(Debug, Clone, PartialEq)]
pub struct Loaded {
    /// What it says about itself.
    #[doc(hidden)]
    pub manifest: Manifest,
    /// The flat state.
    #[doc(hidden)]
    pub state: Vec<f32>,
}

impl Loaded {
    /// Reads the newest whole checkpoint in a folder that `--checkpoint-dir` named, or that of a step.
    pub fn from_folder(dir: &Path, step: Option<u64>) -> crate::Result<Loaded> {
        Ok(command::chosen(&Folder::open(dir)?, step)?.1)
    }

    /// Steps that were done.
    pub fn step(&self) -> u64 {
        self.manifest.step
    }

    /// What fixes the steps' results, in words: the model's and the data's identities, and flags.
    pub fn settings(&self) -> &str {
        &self.manifest.settings
    }

    /// Shape and numbers of a tensor, by its name in the model.
    pub fn tensor(&self, name: &str) -> Option<(&[usize], &[f32])> {
        let entry = self.manifest.tensors.iter().find(|entry| entry.name == name)?;
        let [first, count] = [entry.offset, entry.len].map(|bytes| bytes as usize / size_of::<f32>());
        Some((&entry.shape, self.state.get(first..)?.get(..count)?))
    }
}

/// A part of a checkpoint that is not as its manifest says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Flaw {
    /// The file.
    pub file: String,
    /// The chunk, where it is one: counted from 0.
    pub chunk: Option<u64>,
    /// What is wrong.
    pub cause: String,
}

impl fmt::Display for Flaw {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.chunk {
            None => write!(f, "{}: {}", self.file, self.cause),
            Some(chunk) => write!(f, "{} is damaged in chunk {chunk}: {}", self.file, self.cause),
        }
    }
}

/// A folder of checkpoints.
#[derive(Debug)]
pub struct Checkpoints<D> {
    disk: D,
    folder: PathBuf,
    owner: Option<SavingJob>,
}

/// Who saves.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SavingJob {
    /// The job: what another one wrote is not overwritten or removed.
    pub job: String,
    /// It saves beside another job's checkpoints too: it has no agent that tells what it has committed, so that it
    /// resumes from the newest in the folder, whichever job wrote that.
    pub beside_others: bool,
}

impl<D: Disk> Checkpoints<D> {
    /// Nothing is touched yet.
    pub fn new(disk: D, folder: &Path) -> Checkpoints<D> {
        let folder = std::path::absolute(folder).unwrap_or_else(|_| folder.to_owned());
        Checkpoints { disk, folder, owner: None }
    }

    /// The same, for a job that saves there. Without a job, as when a person runs a command, all in it may be removed.
    pub fn owned_by(self, owner: SavingJob) -> Checkpoints<D> {
        Checkpoints { owner: Some(owner), ..self }
    }

    /// Where they are, as an absolute path.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Creates the folder where only its last part is missing, proves that it takes files, and makes it its job's.
    pub fn prepare(&mut self) -> Result<(), CheckpointError> {
        let folder = self.folder.clone();
        if self.disk.list(&folder).is_err() {
            self.create().map_err(|cause| match cause.kind() {
                io::ErrorKind::NotFound => CheckpointError::NoParent { folder: folder.clone() },
                _ => CheckpointError::NotWritable { folder: folder.clone(), cause },
            })?;
        }
        let probe = folder.join(PROBE);
        let result = self.disk.write(&probe, b"this folder takes files\n");
        let result = result.and_then(|()| removed(self.disk.remove_file(&probe)));
        let claimed = result.and_then(|()| self.claim());
        let theirs = claimed.map_err(|cause| CheckpointError::NotWritable { folder: folder.clone(), cause })?;
        match (theirs, &self.owner) {
            (Some(theirs), Some(SavingJob { job, beside_others: false })) => {
                Err(CheckpointError::Anothers { folder, theirs, job: job.clone() })
            }
            _ => Ok(()),
        }
    }

    /// Makes the folder its job's, or says whose it is. A folder that names no job, since its file of that was
    /// removed, is the job's whose checkpoints it holds.
    fn claim(&mut self) -> io::Result<Option<String>> {
        let Some(SavingJob { job, .. }) = self.owner.clone() else { return Ok(None) };
        // A folder that was begun by hand, by a run without a name, is anyone's.
        let another = |theirs: Option<String>| theirs.filter(|theirs| *theirs != job && !theirs.is_empty());
        let (path, word) = (self.folder.join(OWNER), format!("{job}\n"));
        match self.claimed() {
            Some(claimed) if claimed.is_empty() && !job.is_empty() => {
                return self.write_file(&path, word.as_bytes()).map(|()| None);
            }
            Some(claimed) => return Ok(another(Some(claimed))),
            None => {}
        }
        let names = self.names()?;
        let theirs = names.into_iter().rev().find_map(|name| another(self.job_of(&self.path(name))));
        if theirs.is_some() {
            return Ok(theirs);
        }
        match self.disk.write_new(&path, word.as_bytes()) {
            // Another was quicker; or a crash cut the word short.
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => match self.claimed() {
                None => self.write_file(&path, word.as_bytes()).map(|()| None),
                claimed => Ok(another(claimed)),
            },
            result => result.map(|()| None),
        }
    }

    /// Whose the folder is, if that was said to its end.
    fn claimed(&self) -> Option<String> {
        Some(self.text(OWNER)?.strip_suffix('\n')?.to_owned())
    }

    /// Who wrote a checkpoint, as far as its manifest can be read.
    fn job_of(&self, folder: &Path) -> Option<String> {
        #[derive(serde::Deserialize)]
        struct Job {
            job: String,
        }
        serde_json::from_slice(&self.contents(&folder.join(MANIFEST)).ok()?).ok().map(|Job { job }| job)
    }

    /// Whether its job may remove what a folder holds: another's checkpoint it may not, nor what may become one.
    fn may_discard(&self, folder: &Path) -> bool {
        let Some(SavingJob { job, .. }) = &self.owner else { return true };
        self.job_of(folder).or_else(|| self.claimed()).is_none_or(|theirs| theirs.is_empty() || theirs == *job)
    }

    /// Creates the folder so that a crash does not take it, and what will be in it, away again.
    fn create(&mut self) -> io::Result<()> {
        if let Err(error) = self.disk.create_folder(&self.folder) {
            // It may be there all the same, and not be durable. The next attempt would find it and trust it.
            let _ = self.disk.remove_folder(&self.folder);
            return Err(error);
        }
        let Some(parent) = self.folder.parent() else { return Ok(()) };
        match self.disk.sync_folder(parent) {
            // A user with write but no read permission cannot do this.
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => Ok(()),
            Err(error) => {
                // As above.
                let _ = self.disk.remove_folder(&self.folder);
                Err(error)
            }
            Ok(()) => Ok(()),
        }
    }

    /// Saves a copy of a snapshot. When this returns, the checkpoint is whole and durable.
    pub fn save(&mut self, slot: &Slot) -> Result<Checkpoint, CheckpointError> {
        let step = slot.step();
        let folder = self.path(Name { step, round: slot.about.round });
        self.write(&folder, slot).map_err(|cause| {
            // Room for the next attempt, where the disk is full; what cannot be removed is removed later.
            if self.check_own(&folder).is_ok()
                && let Err(error) = self.discard(&folder)
            {
                info!(folder = %folder.display(), %error, "cannot remove an incomplete checkpoint");
            }
            CheckpointError::Save { step, folder: self.folder.clone(), cause }
        })
    }

    fn write(&mut self, folder: &Path, slot: &Slot) -> io::Result<Checkpoint> {
        slot.check_finite()?;
        self.check_own(folder)?;
        match self.discard(folder) {
            // Somebody has written a share that is not wanted any more. It does no harm.
            Err(error) if error.kind() == io::ErrorKind::DirectoryNotEmpty => {}
            result => result?,
        }
        self.disk.create_folder(folder)?;
        self.write_file(&folder.join(DATA), slot.file.bytes())?;
        self.seal(folder, slot)
    }

    /// Fails where another job has a checkpoint.
    fn check_own(&self, folder: &Path) -> io::Result<()> {
        let (Some(SavingJob { job, .. }), Some(theirs)) = (&self.owner, self.job_of(folder)) else { return Ok(()) };
        if theirs.is_empty() || theirs == *job {
            return Ok(());
        }
        let cause = format!("{} is a checkpoint of job {theirs}; choose another --checkpoint-dir", folder.display());
        Err(io::Error::new(io::ErrorKind::AlreadyExists, cause))
    }

    /// Makes a checkpoint of a folder whose files are there.
    fn seal(&mut self, folder: &Path, slot: &Slot) -> io::Result<Checkpoint> {
        let manifest = slot.about.encode();
        let path = folder.join(MANIFEST);
        self.write_file(&path, &manifest)?;
        self.disk.sync_folder(folder)?;
        self.disk.sync_folder(&self.folder)?;
        let path = path.to_string_lossy().into_owned();
        Ok(Checkpoint { step: slot.step(), path, digest: digest(&manifest), round: slot.about.round })
    }

    /// Writes a file so that half of it never has its name.
    fn write_file(&mut self, path: &Path, bytes: &[u8]) -> io::Result<()> {
        let mut temporary = path.as_os_str().to_owned();
        temporary.push(TEMPORARY);
        let temporary = PathBuf::from(temporary);
        self.disk.write(&temporary, bytes)?;
        let kept = self.disk.length(&temporary)?;
        if kept != bytes.len() as u64 {
            return Err(io::Error::other(format!("the file system kept {kept} of {} bytes", bytes.len())));
        }
        self.rename(&temporary, path, bytes)
    }

    /// Gives a file its name. A file system over a network may rename it, lose its answer, and say to the second
    /// request that there is no such file. Then it is a success if the file of the new name has these bytes.
    fn rename(&mut self, from: &Path, to: &Path, bytes: &[u8]) -> io::Result<()> {
        match self.disk.rename(from, to) {
            Err(error) if error.kind() == io::ErrorKind::NotFound && self.holds(to, bytes) => Ok(()),
            result => result,
        }
    }

    /// Whether these are a file's bytes.
    fn holds(&self, path: &Path, bytes: &[u8]) -> bool {
        let mut read = vec![0; CHUNK.min(bytes.len())];
        let mut pieces = (0u64..).step_by(CHUNK).zip(bytes.chunks(CHUNK));
        self.disk.length(path).is_ok_and(|length| length == bytes.len() as u64)
            && pieces.all(|(offset, piece)| {
                let read = &mut read[..piece.len()];
                self.disk.read(path, offset, read).is_ok() && read == piece
            })
    }

    /// Loads the checkpoint whose manifest lies at `path`. With a digest, only that very manifest will do.
    pub fn load(&self, path: &Path, expected: Option<&str>) -> Result<Loaded, CheckpointError> {
        let manifest = self.about(path, expected)?;
        let room = room(manifest.state_bytes);
        let mut state = room.map_err(|cause| CheckpointError::Load { path: path.to_owned(), cause })?;
        pages::in_large_pages(bytemuck::cast_slice_mut(&mut state));
        self.load_share(path, &manifest, (0, 1), &mut state, |_| ())?;
        Ok(Loaded { manifest, state })
    }

    /// What the checkpoint whose manifest lies at `path` says of itself. Its files are there in their full length, and
    /// not read yet. With a digest, only that very manifest will do.
    pub fn about(&self, path: &Path, expected: Option<&str>) -> Result<Manifest, CheckpointError> {
        self.manifest(path, expected).map_err(|cause| CheckpointError::Load { path: path.to_owned(), cause })
    }

    /// Reads a manifest, whose files may still be damaged but are there in their full length.
    fn manifest(&self, path: &Path, expected: Option<&str>) -> Result<Manifest, String> {
        let bytes = self.contents(path).map_err(|error| error.to_string())?;
        if let Some(expected) = expected.filter(|&expected| digest(&bytes) != *expected) {
            return Err(format!("the manifest's digest is {}, not {expected}", digest(&bytes)));
        }
        let manifest = Manifest::decode(&bytes)?;
        for Extent { file, file_len, .. } in &manifest.extents {
            let found = self.disk.length(&path.with_file_name(file)).map_err(|error| format!("{file}: {error}"))?;
            if found != *file_len {
                return Err(format!("{file} has {found} bytes instead of {file_len}"));
            }
        }
        Ok(manifest)
    }

    /// The newest checkpoint that is whole. Damaged ones are reported and skipped.
    pub fn newest(&self) -> Option<Loaded> {
        self.names().unwrap_or_default().into_iter().rev().find_map(|name| {
            let path = self.path(name).join(MANIFEST);
            self.load(&path, None).inspect_err(|error| warn!(%error, "skipped a checkpoint")).ok()
        })
    }

    /// Removes what `committed` has made superfluous: of the complete checkpoints up to it those that are not to be
    /// retained, and the incomplete ones. Call it only when the commit is confirmed. Returns what could not be removed.
    pub fn prune(&mut self, committed: &Checkpoint, retention: &Retention) -> Vec<(PathBuf, io::Error)> {
        let own = Name { step: committed.step, round: committed.round };
        let names = self.names().unwrap_or_default().into_iter();
        let found: BTreeSet<Name> =
            names.filter(|&found| found <= own && self.may_discard(&self.path(found))).collect();
        let (complete, incomplete): (BTreeSet<Name>, _) = found.into_iter().partition(|&name| self.is_complete(name));
        let mut failures = Vec::new();
        for name in retention.superfluous(&complete).union(&incomplete).filter(|&&name| name != own) {
            let folder = self.path(*name);
            if let Err(error) = self.discard(&folder) {
                failures.push((folder, error));
            }
        }
        failures
    }

    /// Leaves word of a confirmed commit, for users who remove checkpoints by hand.
    pub fn note_commit(&mut self, committed: &Checkpoint) -> io::Result<()> {
        let name = Name { step: committed.step, round: committed.round };
        self.write_file(&self.folder.join(COMMITTED), format!("{name}\n").as_bytes())
    }

    /// The newest checkpoint that is known to be committed. Newer ones may be committed too: word is left after the
    /// fact.
    pub(super) fn committed(&self) -> Option<Name> {
        Name::parse(self.text(COMMITTED)?.trim_end())
    }

    fn text(&self, file: &str) -> Option<String> {
        String::from_utf8(self.contents(&self.folder.join(file)).ok()?).ok()
    }

    /// All of a file that says something of checkpoints.
    fn contents(&self, path: &Path) -> io::Result<Vec<u8>> {
        let length = self.disk.length(path)?;
        if length > LONGEST {
            let cause = format!("it has {length} bytes, and none of these files has more than {LONGEST}");
            return Err(io::Error::new(io::ErrorKind::InvalidData, cause));
        }
        let mut bytes = vec![0; length as usize];
        self.disk.read(path, 0, &mut bytes).map(|()| bytes)
    }

    /// Whether a checkpoint was saved to its end; it may have been damaged since.
    fn is_complete(&self, name: Name) -> bool {
        self.disk.list(&self.path(name)).is_ok_and(|names| names.iter().any(|name| name == MANIFEST))
    }

    /// Removes a checkpoint's folder if it is there: the manifest first, so that what a crash leaves is no checkpoint.
    /// Of a symbolic link only the link: what it leads to is not this folder's.
    fn discard(&mut self, folder: &Path) -> io::Result<()> {
        if self.disk.is_link(folder) {
            return self.disk.remove_file(folder);
        }
        let names = match self.disk.list(folder) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            names => names?,
        };
        if names.iter().any(|name| name == MANIFEST) {
            removed(self.disk.remove_file(&folder.join(MANIFEST)))?;
            self.disk.sync_folder(folder)?;
        }
        for name in names.iter().filter(|name| *name != MANIFEST) {
            removed(self.disk.remove_file(&folder.join(name)))?;
        }
        removed(self.disk.remove_folder(folder))
    }

    /// Every folder that may hold a checkpoint, oldest first.
    fn names(&self) -> io::Result<BTreeSet<Name>> {
        Ok(self.disk.list(&self.folder)?.iter().filter_map(|name| Name::parse(name)).collect())
    }

    fn path(&self, name: Name) -> PathBuf {
        self.folder.join(name.to_string())
    }
}
