//! Why training ends early, and whose fault it is.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use elastic_collective::CollectiveError;
use elastic_collective::identity::{Difference, listed};
#[cfg(feature = "cuda")]
use elastic_cuda::CudaError;
use elastic_proto::worker::FailureClass;

use super::shards::gone;
use super::trace::TraceError;
use crate::agent::AgentError;
use crate::checkpoint::CheckpointError;
use crate::engine::state::State;
use crate::engine::{DeviceError, EngineError, TaskError};
use crate::model::Tensor;
use crate::settings::device::{Device, Precision};
use crate::settings::identity::advice;

/// Why training ended early.
#[derive(Debug, thiserror::Error)]
pub enum TrainError {
    /// The model or its data contradicts itself: a fault in the program that defines them.
    #[error("cannot train this model on this data: {0}")]
    Unusable(String),
    /// The model or its data has failed.
    #[error(transparent)]
    Task(#[from] TaskError),
    /// A setting is too large.
    #[error("{0}; choose a smaller number")]
    Beyond(String),
    /// Settings contradict each other.
    #[error("{0}; change one of these flags")]
    Contradiction(&'static str),
    /// The file of first parameters cannot be read.
    #[error("cannot read --init {}: {cause}", path.display())]
    Init {
        /// The file.
        path: PathBuf,
        /// Why.
        cause: io::Error,
    },
    /// The file of first parameters is not this model's.
    #[error("cannot begin with --init {}: {cause}; use a file of this model's parameters", path.display())]
    InitUnfit {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        cause: String,
    },
    /// The device that was asked for cannot be had.
    #[error(
        "cannot use --device {device}{}: {cause}; {}--device auto uses the CPU then",
        unless_f32(*precision, " --precision bf16"),
        unless_f32(*precision, "--precision f32 and "),
    )]
    Device {
        /// As asked for.
        device: Device,
        /// The flag --precision.
        precision: Precision,
        /// Why.
        cause: DeviceError,
    },
    /// The GPU failed.
    #[cfg(feature = "cuda")]
    #[error(transparent)]
    Cuda(#[from] CudaError),
    /// NCCL is to be used, and cannot be.
    #[error("cannot use --collectives nccl: {0}; --collectives auto uses TCP then")]
    NoNccl(String),
    /// The peers cannot be worked with.
    #[error(transparent)]
    Collective(CollectiveError),
    /// The same, in the middle of an operation.
    #[error("{cause}; the collectives before it are in {}", record.display())]
    GivenUp {
        /// Why.
        cause: CollectiveError,
        /// The flight recorder's file.
        record: PathBuf,
    },
    /// Checkpoints cannot be written or read.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// The committed checkpoint cannot be resumed from.
    #[error(
        "the job must resume from step {step}, but {cause}; restore that file, or, to start over, drop the resume \
        point once the job has ended (elasticctl drop-checkpoint JOB) and choose another --checkpoint-dir"
    )]
    Resume {
        /// The committed step.
        step: u64,
        /// What is wrong with its checkpoint.
        cause: CheckpointError,
    },
    /// The checkpoint is another run's.
    #[error(
        "this run does not continue the checkpoint of step {step}: it has {}; use the same flags, or another \
        --checkpoint-dir{}",
        listed(differences),
        advice(differences)
    )]
    OtherSettings {
        /// Its step.
        step: u64,
        /// What differs.
        differences: Vec<Difference>,
    },
    /// The checkpoint is another model's.
    #[error(
        "checkpoint of step {step} has other tensors than this model: {cause}; use the model that it was saved with, \
        or another --checkpoint-dir"
    )]
    OtherTensors {
        /// Its step.
        step: u64,
        /// The first that differs.
        cause: String,
    },
    /// The agent cannot be worked with.
    #[error(transparent)]
    Agent(AgentError),
    /// The trace cannot be written.
    #[error(transparent)]
    Trace(#[from] TraceError),
    /// The picture cannot be written.
    #[error("cannot write the plot {}: {cause}; choose another --plot, or leave it out", path.display())]
    Plot {
        /// The file.
        path: PathBuf,
        /// Why.
        cause: io::Error,
    },
    /// Ranks that should hold the same do not, and no more than half of them agree.
    #[error(
        "the ranks hold different states after step {step}, and no majority agrees ({sums}): a machine, its memory or \
         a build is faulty. The workers drop their states; training resumes from the committed checkpoint"
    )]
    Split {
        /// The step.
        step: u64,
        /// The checksums of what they hold.
        sums: String,
    },
    /// With sharded numbers of the optimizer, both owners of a part have died.
    #[error(
        "{} (ranks {ranks} have the rest): the workers start again from the newest snapshot or checkpoint",
        gone(*step)
    )]
    OwnersLost {
        /// The furthest step that a rank had.
        step: u64,
        /// Who had a part.
        ranks: String,
    },
    /// A peer's state was damaged on its way.
    #[error("the state of step {step} arrived damaged from the peers that hold it")]
    Damaged {
        /// The step.
        step: u64,
    },
    /// The peers have left for another round, but the agent does not announce it.
    #[error("the peers left round {round} for a later one, but the agent announced none within {:.1} s",
        waited.as_secs_f64())]
    LeftAlone {
        /// The round they left.
        round: u64,
        /// How long the agent was listened to.
        waited: Duration,
    },
    /// Training ended, but its result is not safe.
    #[error("the state after the last step ({step}) is not saved: {cause}")]
    Unsaved {
        /// The last step.
        step: u64,
        /// Why.
        cause: String,
    },
    /// The system refused another thread.
    #[error("cannot start the reduction thread: {0}; raise the limit on processes, or choose fewer --threads")]
    Thread(#[source] io::Error),
    /// Samples are skipped, and all of a step's were.
    #[error("none of {what} samples of step {step} can be read; repair the data")]
    NothingRead {
        /// The step.
        step: u64,
        /// Which samples.
        what: &'static str,
    },
    /// The loss is no number.
    #[error(
        "the loss of step {step} is not finite; {}correct the model or its data",
        unless_first(*step, "lower --lr, or ")
    )]
    Diverged {
        /// The step.
        step: u64,
    },
    /// A gradient holds something else than numbers.
    #[error(
        "the gradient of step {step} is not finite in tensor {tensor}, and is not applied; {}correct the model, which \
        must write every number of it, or its data",
        unless_first(*step, "lower --lr, bound the gradient with --clip, or ")
    )]
    Gradient {
        /// The step.
        step: u64,
        /// The first such tensor.
        tensor: String,
    },
    /// The state holds something else than numbers.
    #[error(
        "the state of step {step} has numbers that are not finite, in tensor {tensor}, and training cannot continue \
        from it; lower --lr, and start over or resume from an older checkpoint"
    )]
    NotFinite {
        /// The step.
        step: u64,
        /// The first such tensor.
        tensor: String,
    },
    /// The stop flag was raised.
    #[error("stopped")]
    Stopped,
}

/// What is said of bf16.
fn unless_f32(precision: Precision, words: &'static str) -> &'static str {
    if precision == Precision::F32 { "" } else { words }
}

/// In the first step no parameter has moved.
fn unless_first(step: u64, later: &'static str) -> &'static str {
    if step == 1 { "" } else { later }
}

impl From<CollectiveError> for TrainError {
    fn from(error: CollectiveError) -> TrainError {
        match error {
            CollectiveError::Stopped => TrainError::Stopped,
            error => TrainError::Collective(error),
        }
    }
}

impl From<EngineError> for TrainError {
    fn from(error: EngineError) -> TrainError {
        match error {
            #[cfg(feature = "cuda")]
            EngineError::Cuda(error) => error.into(),
            EngineError::Collective(error) => error.into(),
            EngineError::Thread(cause) => TrainError::Thread(cause),
            EngineError::Task(error) => TrainError::Task(error),
            EngineError::NotFinite { step, tensor } => TrainError::Gradient { step, tensor },
            #[cfg(feature = "cuda")]
            EngineError::NoNccl(cause) => TrainError::NoNccl(cause),
            // The loop starts again before it comes to that.
            EngineError::Again => CollectiveError::Nccl { cause: EngineError::Again.to_string(), remote: true }.into(),
        }
    }
}

impl From<AgentError> for TrainError {
    fn from(error: AgentError) -> TrainError {
        match error {
            AgentError::Stopped => TrainError::Stopped,
            error => TrainError::Agent(error),
        }
    }
}

impl TrainError {
    /// The state is not finite at this number of it.
    pub(super) fn not_finite(state: &State, tensors: &[Tensor], number: usize) -> TrainError {
        TrainError::NotFinite { step: state.step, tensor: state.name_at(tensors, number) }
    }

    /// Whether the process has to end: NCCL keeps a thread of it, or the GPU hangs. Such a program says why and ends at
    /// once, by `_exit`: `std::process::exit` and a return from `main` run the ends of libraries, which would wait for
    /// that thread for ever. See [`Elastic::run`](crate::Elastic::run).
    pub fn is_stuck(&self) -> bool {
        match self {
            TrainError::Collective(cause) | TrainError::GivenUp { cause, .. } => {
                matches!(cause, CollectiveError::Stuck { .. })
            }
            #[cfg(feature = "cuda")]
            TrainError::Cuda(error) => matches!(error, CudaError::Hangs { .. }),
            _ => false,
        }
    }

    /// Whether the state is worth nothing after it, or cannot be had from the GPU any more.
    pub(super) fn spoils_the_state(&self) -> bool {
        match self {
            #[cfg(feature = "cuda")]
            TrainError::Cuda(_) => true,
            error => matches!(error, TrainError::Diverged { .. } | TrainError::NotFinite { .. }),
        }
    }

    /// Whose fault it is, as far as this rank can know, and whether a restart can help.
    pub fn class(&self) -> FailureClass {
        match self {
            TrainError::Collective(error) | TrainError::GivenUp { cause: error, .. } => error.class(),
            TrainError::Damaged { .. } | TrainError::LeftAlone { .. } | TrainError::OwnersLost { .. } => {
                FailureClass::Peer
            }
            // A step's numbers depend on the settings alone.
            TrainError::Diverged { .. }
            | TrainError::NothingRead { .. }
            | TrainError::Gradient { .. }
            | TrainError::NotFinite { .. }
            | TrainError::Unusable(_)
            | TrainError::Beyond(_)
            | TrainError::Contradiction(_)
            | TrainError::InitUnfit { .. }
            | TrainError::OtherSettings { .. }
            | TrainError::OtherTensors { .. }
            | TrainError::Checkpoint(CheckpointError::Anothers { .. } | CheckpointError::Occupied { .. }) => {
                FailureClass::Permanent
            }
            TrainError::Task(error) if !error.may_pass() => FailureClass::Permanent,
            _ => FailureClass::Own,
        }
    }
}
