//! Giving up a step while it is computed.

use std::sync::OnceLock;
use std::time::Instant;

use elastic_collective::CollectiveError;
use elastic_collective::stop::Stop;

use super::{EngineError, TaskError};

/// Whether a step's gradient is still wanted. A step may take longer than its workers have to quiesce.
#[derive(Debug)]
pub struct Interruption<'a> {
    stop: &'a Stop,
    round: u64,
    /// Why it is not. After that no thread computes any more, and none hands out what it has.
    cause: OnceLock<Cause>,
}

#[derive(Debug)]
enum Cause {
    Superseded { round: u64 },
    Stopped,
    Failed(TaskError),
}

impl<'a> Interruption<'a> {
    /// For a step of this round.
    pub fn new(stop: &'a Stop, round: u64) -> Interruption<'a> {
        Interruption { stop, round, cause: OnceLock::new() }
    }

    /// Whether the gradient is given up.
    pub(crate) fn is_due(&self) -> bool {
        if self.cause.get().is_none()
            && let Err(cause) = self.stop.check(self.round, Instant::now())
        {
            self.set(match cause {
                CollectiveError::Superseded { round } => Cause::Superseded { round },
                _ => Cause::Stopped,
            });
        }
        self.cause.get().is_some()
    }

    /// Gives the gradient up: the model or its data has failed.
    pub(crate) fn fail(&self, error: TaskError) {
        self.set(Cause::Failed(error));
    }

    fn set(&self, cause: Cause) {
        // Another thread may have been quicker.
        let _ = self.cause.set(cause);
    }

    /// Fails where the gradient was given up: then there is none.
    pub(crate) fn result(&self) -> Result<(), EngineError> {
        match self.cause.get() {
            None => Ok(()),
            Some(Cause::Superseded { round }) => Err(CollectiveError::Superseded { round: *round }.into()),
            Some(Cause::Stopped) => Err(CollectiveError::Stopped.into()),
            Some(Cause::Failed(error)) => Err(error.clone().into()),
        }
    }
}
