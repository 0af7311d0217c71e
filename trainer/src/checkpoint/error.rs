//! Why a checkpoint cannot be saved or loaded, for the user who can fix it.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use super::OWNER;

/// Why a checkpoint cannot be saved or loaded.
#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
    /// The folder's parent is missing.
    #[error("checkpoint folder {} cannot be created: its parent does not exist; create it, or choose another \
        --checkpoint-dir", folder.display())]
    NoParent {
        /// The folder.
        folder: PathBuf,
    },
    /// The folder does not take files.
    #[error("checkpoint folder {} cannot be written: {cause}; make it writable, or choose another --checkpoint-dir",
        folder.display())]
    NotWritable {
        /// The folder.
        folder: PathBuf,
        /// Why.
        cause: io::Error,
    },
    /// Another job saves there.
    #[error("checkpoint folder {} belongs to job {theirs}, and job {job} would overwrite its checkpoints; choose \
        another --checkpoint-dir, with --resume {} to begin from them; or move step-*, {OWNER} and committed away if \
        job {theirs} does not need them", folder.display(), folder.display())]
    Anothers {
        /// The folder.
        folder: PathBuf,
        /// Whose it is.
        theirs: String,
        /// Who was to save there.
        job: String,
    },
    /// A run would begin before what is there.
    #[error("checkpoint folder {} holds step {step}, and this run would begin before it; to resume from there, use \
        --resume auto; to begin elsewhere, choose another --checkpoint-dir, or move step-*, {OWNER} and committed away",
        folder.display())]
    Occupied {
        /// The folder.
        folder: PathBuf,
        /// The newest step in it.
        step: u64,
    },
    /// Another run saves there at this moment.
    #[error("another run saves in checkpoint folder {} at this moment; end it, or choose another --checkpoint-dir",
        folder.display())]
    Busy {
        /// The folder.
        folder: PathBuf,
    },
    /// What `--resume` names is not there.
    #[error("{} holds no checkpoint{}; see elastic-trainer checkpoint list, and correct --resume", dir.display(),
        step.map_or(String::new(), |step| format!(" of step {step}")))]
    NotThere {
        /// What was named.
        dir: PathBuf,
        /// And the step, if one was.
        step: Option<u64>,
    },
    /// There are checkpoints, and none can be read.
    #[error(
        "no checkpoint can be read: {cause}; restore one, or, to begin at step 0, move step-*, {OWNER} and \
        committed away"
    )]
    NoneWhole {
        /// What is wrong with one of them.
        cause: Box<CheckpointError>,
    },
    /// What is wrong is known to another rank.
    #[error("another rank found it damaged, and says what is wrong with it")]
    Elsewhere,
    /// The folder's file system says nothing.
    #[error("checkpoint folder {} has not answered for {} s; does its file system hang? Repair it, or choose another \
        --checkpoint-dir", folder.display(), waited.as_secs())]
    Silent {
        /// The folder.
        folder: PathBuf,
        /// For how long it was waited for.
        waited: Duration,
    },
    /// There is no memory for copies of the state.
    #[error("cannot get memory for snapshots: {0}; a checkpoint takes twice the state's size")]
    Memory(io::Error),
    /// There is no thread to write with.
    #[error("cannot start the thread that writes checkpoints: {0}")]
    Thread(io::Error),
    /// A save failed on its way; earlier checkpoints are untouched.
    #[error("cannot save the checkpoint of step {step} in {}: {cause}", folder.display())]
    Save {
        /// Its step.
        step: u64,
        /// Where.
        folder: PathBuf,
        /// Why.
        cause: io::Error,
    },
    /// A share was not written since all of its checkpoint was to be.
    #[error("the share of step {step} is not written: rank 0 writes all of it")]
    GivenUp {
        /// Its step.
        step: u64,
    },
    /// Nothing comes of a checkpoint that is being read.
    #[error("nothing of the checkpoint has been read for {:.1} s; does its file system hang?", waited.as_secs_f64())]
    Unread {
        /// For how long.
        waited: Duration,
    },
    /// A checkpoint is missing, incomplete or damaged.
    #[error("cannot load checkpoint {}: {cause}", path.display())]
    Load {
        /// Its manifest.
        path: PathBuf,
        /// What is wrong.
        cause: String,
    },
}
