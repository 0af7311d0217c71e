//! Which checkpoint a rank would resume from, by what the manifests in its folders say.
//!
//! What the job has committed is the only one that counts, where there is one. Otherwise the newest in the job's own
//! folder does: it was whole and durable when its name appeared, and each step has one result. A
//! store that knows of no commit may be a new one, and its job must not write over what the folder holds.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::io;
use std::path::{Path, PathBuf};

use elastic_proto::worker::Checkpoint;
use tracing::warn;

use super::disk::{Disk, Host};
use super::manifest::Manifest;
use super::retention::Name;
use super::{CheckpointError, Checkpoints, MANIFEST};
use crate::settings::resume::Resume;

/// What a rank looks for.
#[derive(Debug, Clone)]
pub(crate) struct Search {
    /// What the job has committed.
    pub(crate) committed: Option<Checkpoint>,
    /// The folder that the job saves to.
    pub(crate) folder: Option<PathBuf>,
    /// Whose checkpoints count there; none where everybody's do.
    pub(crate) job: Option<String>,
    pub(crate) resume: Resume,
    /// Whether the job begins. A later start resumes from what the job itself has saved.
    pub(crate) begins: bool,
    /// Manifests of checkpoints that were found to be damaged.
    pub(crate) bad: BTreeSet<PathBuf>,
}

/// A checkpoint whose manifest is right, and whose files have the right lengths.
#[derive(Debug, Clone)]
pub(crate) struct Found {
    /// Its manifest's path.
    pub(crate) path: PathBuf,
    pub(crate) manifest: Manifest,
}

impl Search {
    /// What this rank can offer. An error is a checkpoint that cannot be read, where there is no other; or one that
    /// would be overwritten.
    pub(crate) fn look(&self) -> Result<Option<Found>, CheckpointError> {
        if let Some(committed) = &self.committed {
            let path = PathBuf::from(&committed.path);
            if self.bad.contains(&path) {
                return Ok(None);
            }
            let manifest = Checkpoints::new(Host, &path).about(&path, Some(&committed.digest))?;
            return Ok(Some(Found { path, manifest }));
        }
        let own = self.folder.as_deref().map(|folder| Checkpoints::new(Host, folder));
        let newest = || own.as_ref().map_or(Ok(None), |own| own.offer(self.job.as_deref(), |_| true, &self.bad));
        match &self.resume {
            Resume::Auto => newest(),
            Resume::Never if self.begins => own.map_or(Ok(()), |own| own.check_behind(None)).map(|()| None),
            Resume::Never => newest(),
            Resume::From { dir, step } => {
                let saved = if self.begins { None } else { newest()? };
                if saved.is_some() {
                    return Ok(saved);
                }
                let found = self.named(dir, *step)?;
                own.filter(|_| self.begins).map_or(Ok(()), |own| own.check_behind(Some(&found)))?;
                Ok(Some(found))
            }
        }
    }

    /// What `--resume` names.
    fn named(&self, dir: &Path, step: Option<u64>) -> Result<Found, CheckpointError> {
        let one = dir.file_name().and_then(OsStr::to_str).and_then(Name::parse);
        let folder = dir.parent().filter(|_| one.is_some()).unwrap_or(dir);
        let wanted = |name: Name| step.is_none_or(|step| name.step == step) && one.is_none_or(|one| one == name);
        let found = Checkpoints::new(Host, folder).offer(None, wanted, &self.bad)?;
        found.ok_or_else(|| CheckpointError::NotThere { dir: dir.to_owned(), step })
    }
}

impl<D: Disk> Checkpoints<D> {
    /// The newest checkpoint that `job` may resume from, that is wanted, and that is not `bad`. What cannot be read is
    /// reported and skipped; an error where there is nothing else.
    pub(super) fn offer(
        &self,
        job: Option<&str>,
        wanted: impl Fn(Name) -> bool,
        bad: &BTreeSet<PathBuf>,
    ) -> Result<Option<Found>, CheckpointError> {
        let mut unread = None;
        for name in self.whole()?.into_iter().rev().filter(|name| wanted(*name)) {
            let path = self.path(name).join(MANIFEST);
            if bad.contains(&path) {
                continue;
            }
            match self.about(&path, None) {
                Ok(manifest) if job.is_none_or(|job| manifest.job.is_empty() || manifest.job == *job) => {
                    return Ok(Some(Found { path, manifest }));
                }
                Ok(_) => {}
                Err(error) => {
                    warn!(%error, "skipped a checkpoint");
                    unread.get_or_insert(error);
                }
            }
        }
        unread.map_or(Ok(None), Err)
    }

    /// Fails where the folder holds a checkpoint that a job which begins with `found`, or at step 0, would write over
    /// or leave behind.
    fn check_behind(&self, found: Option<&Found>) -> Result<(), CheckpointError> {
        let Some(newest) = self.whole()?.into_iter().next_back() else { return Ok(()) };
        let here = |found: &&Found| found.path.starts_with(&self.folder) && found.manifest.step >= newest.step;
        match found.filter(here) {
            Some(_) => Ok(()),
            None => Err(CheckpointError::Occupied { folder: self.folder.clone(), step: newest.step }),
        }
    }

    /// Every checkpoint that was saved to its end, oldest first; none where there is no folder.
    fn whole(&self) -> Result<BTreeSet<Name>, CheckpointError> {
        match self.names() {
            Ok(names) => Ok(names.into_iter().filter(|&name| self.is_complete(name)).collect()),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(BTreeSet::new()),
            Err(error) => {
                Err(CheckpointError::Load { path: self.folder.clone(), cause: format!("cannot list it: {error}") })
            }
        }
    }

    /// Whose checkpoints these are, as far as anything in the folder says.
    pub(crate) fn owner(&self) -> Option<String> {
        let saved = || self.names().ok()?.into_iter().rev().find_map(|name| self.job_of(&self.path(name)));
        self.claimed().or_else(saved).filter(|job| !job.is_empty())
    }
}

#[cfg(test)]
mod tests {
    use super::super::snapshot::{Layout, Slot, SnapshotHeader};
    use super::super::snapshot_slots::tests::layout;
    use super::*;

    /// Saves these steps, each in this round, for a job.
    fn saved(folder: &Path, job: &str, round: u64, steps: &[u64]) {
        let layout: Layout = layout(job, "--flags");
        let mut slot = Slot::alone(&layout);
        for &step in steps {
            let data = super::super::manifest::Position::default();
            let header = SnapshotHeader { round, world_size: 1, step, done: None, data };
            slot.fill(&header, &vec![step as f32; super::super::snapshot_slots::tests::NUMBERS]);
            Checkpoints::new(Host, folder).save(&slot).unwrap();
        }
    }

    fn search(folder: &Path, resume: &str, begins: bool) -> Search {
        let (job, resume) = (Some("job".to_owned()), resume.parse().unwrap());
        Search { committed: None, folder: Some(folder.to_owned()), job, resume, begins, bad: BTreeSet::new() }
    }

    /// The step that is offered, or the error.
    fn step(search: &Search) -> Result<u64, String> {
        search.look().map(|found| found.map_or(0, |found| found.manifest.step)).map_err(|error| error.to_string())
    }

    #[test]
    fn a_folder_with_checkpoints_is_resumed_from_or_refused() {
        let (own, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let (own, other) = (own.path(), other.path());
        assert_eq!(step(&search(&own.join("none"), "auto", true)), Ok(0));
        assert_eq!(step(&search(own, "never", true)), Ok(0));
        saved(own, "job", 1, &[10, 20]);
        saved(own, "", 1, &[30]);
        saved(own, "else", 1, &[40]);
        saved(other, "else", 3, &[15, 25]);
        // A job's own, and what was saved without a name; not another's
        assert_eq!(step(&search(own, "auto", true)), Ok(30));
        let error = step(&search(own, "never", true)).unwrap_err();
        assert!(error.contains("holds step 40") && error.contains("--resume auto"), "{error}");
        assert_eq!(step(&search(own, "never", false)), Ok(30), "a later start of the same job");

        let named = |dir: &Path, end: &str| format!("{}{end}", dir.display());
        assert!(step(&search(own, &named(other, ""), true)).unwrap_err().contains("holds step 40"));
        assert!(step(&search(own, &named(own, "@20"), true)).unwrap_err().contains("holds step 40"));
        assert_eq!(step(&search(own, &named(own, ""), true)), Ok(40));
        let empty = other.join("empty");
        assert_eq!(step(&search(&empty, &named(other, ""), true)), Ok(25));
        assert_eq!(step(&search(&empty, &named(other, "@15"), true)), Ok(15));
        assert_eq!(step(&search(&empty, &named(&other.join("step-00000015-r3"), ""), true)), Ok(15));
        let error = step(&search(&empty, &named(other, "@16"), true)).unwrap_err();
        assert!(error.contains("no checkpoint of step 16"), "{error}");
        // A later start has its own to resume from
        assert_eq!(step(&search(own, &named(other, ""), false)), Ok(30));
    }

    #[test]
    fn what_cannot_be_read_is_skipped_and_no_beginning() {
        let folder = tempfile::tempdir().unwrap();
        saved(folder.path(), "job", 1, &[10, 20]);
        let manifest = |step| folder.path().join(format!("step-{step:08}-r1")).join(MANIFEST);
        let mut search = search(folder.path(), "auto", true);
        search.bad.insert(manifest(20));
        assert_eq!(step(&search), Ok(10));
        std::fs::write(manifest(20), "torn").unwrap();
        search.bad.clear();
        assert_eq!(step(&search), Ok(10));
        std::fs::write(manifest(10), "torn").unwrap();
        assert!(step(&search).unwrap_err().contains("not a manifest"));
    }
}
