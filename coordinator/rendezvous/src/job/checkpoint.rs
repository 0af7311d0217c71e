//! Where training resumes.

use serde::{Deserialize, Serialize};

/// Where the latest committed checkpoint lies: the record under the `checkpoint` key.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Checkpoint {
    /// Optimizer steps that it contains; training continues with the next one.
    pub step: u64,
    /// Absolute path of its manifest, as the worker that wrote it sees it.
    pub path: String,
    /// Digest of the manifest's bytes, `algorithm:hex`.
    pub digest: String,
    /// The round in which it was committed.
    #[serde(default)]
    pub round: u64,
}
