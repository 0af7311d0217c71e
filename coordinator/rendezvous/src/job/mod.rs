//! A job's vocabulary: ids, keys and the JSON records that live under them.
//!
//! Dashboards read these records, so their shapes are documented in `docs/protocol.md`. Fields may be added; what
//! programs of other releases make of that is in its "Versions".

#![deny(clippy::disallowed_methods, clippy::disallowed_types)]

mod checkpoint;
mod failure;
mod faults;
pub mod history;
mod ids;
pub mod json;
mod keys;
mod millis;
pub mod overview;
mod progress;
mod record;
mod release;
mod requester;
#[doc(hidden)]
pub mod samples;
mod secret;
mod spec;
mod state;
mod vacancy;
mod waiting;

pub use checkpoint::Checkpoint;
pub use failure::{Failure, FailureClass, Killer, Killing, PERMANENT};
pub use faults::{Excluded, Exclusion, Faults, TakenBack};
pub use ids::{BadJobId, JobId, NodeId};
pub use keys::{JobKey, Keys};
pub use progress::{Advance, FailedStart, LostSoon, ProgressRecord, RoundProgress, StepDone};
pub use record::{
    Endpoint, EventRecord, Fate, LeaderRecord, NodeRecord, Phase, RankRecord, RoundRecord, RoundState, Sealed,
    Tombstone, Versioned, to_json,
};
pub use release::{JobProtocol, Protocols, Release};
pub use requester::{Requester, Via};
pub use secret::{Claim, JobSecret};
pub use spec::{Asked, Desired, Disagreement, OnStoreLoss, RestartPolicy, Spec, SpecError, Timings};
pub use state::JobState;
pub use vacancy::Vacancy;
pub use waiting::{Late, Waiting, Waits};
