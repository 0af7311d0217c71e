//! What computes a step, on CPUs or a GPU, and has its gradient summed over the ranks.
//!
//! The loop keeps a [`State`]. An engine may work on a copy of its own, which it takes when the loop has another one
//! from elsewhere, and gives back when the numbers are needed at once: for a newcomer, at the end. Meanwhile the loop's
//! state may have no numbers; it always holds how many steps are done. Snapshots may be taken of the engine's copy,
//! while steps continue.

pub mod feed;
#[cfg(feature = "cuda")]
mod gpu;
#[cfg(not(feature = "cuda"))]
#[path = "no_gpu.rs"]
mod gpu;
pub mod gradient;
mod host;
pub mod interruption;
#[cfg(feature = "cuda")]
mod nccl;
pub(crate) mod owners;
pub mod state;
mod thread_pool;

use std::io;

use elastic_collective::tree::Node;
use elastic_collective::{CollectiveError, Group};
#[cfg(feature = "cuda")]
use elastic_cuda::CudaError;
use tracing::{info, warn};

pub(crate) use crate::error::TaskError;
use crate::model::{Model, OnCpusAlone, Optimizer, Stride, Tensor};
use crate::settings::device::{Device, Precision};
use crate::settings::{Environment, Settings};
use gradient::GradientTask;
use host::OnHost;
use state::State;

#[cfg(feature = "cuda")]
pub(crate) use elastic_cuda::HostCopy;
#[cfg(not(feature = "cuda"))]
pub(crate) use gpu::HostCopy;

/// What computes steps of a model.
pub(crate) trait Engine<M: Model> {
    /// What equal bits need besides equal settings, in words; nothing where there is no more.
    fn kind(&self) -> Option<String>;

    /// Takes over a state that the engine has not computed itself.
    fn take(&mut self, state: &State) -> Result<(), EngineError>;

    /// Why there is no NCCL, where there is none.
    fn nccl(&self) -> Result<(), String> {
        Err("steps are computed on CPUs, and NCCL sums between GPUs (--device)".to_owned())
    }

    /// What carries the present round's sums between ranks, and how often NCCL has failed.
    fn transport(&self) -> Transport {
        Transport { name: "tcp", nccl_failures: 0 }
    }

    /// Makes ready to sum over the ranks of a round. All of them call it, before anything else that they do together;
    /// and again in the same round when [`EngineError::Again`] says so.
    fn join(&mut self, group: &mut Group) -> Result<(), EngineError> {
        let _ = group;
        Ok(())
    }

    /// Waits until all ranks have what was summed last: until then, none may end what it sends with. All of them call
    /// it when they end the round together.
    fn leave(&mut self, group: &mut Group) -> Result<(), EngineError> {
        let _ = group;
        Ok(())
    }

    /// Sums the gradient of a step over all its shards, in the order of the tree, and keeps the sum for
    /// [`advance`](Self::advance).
    fn reduce(&mut self, task: &GradientTask<'_, M>, ranks: Ranks<'_>) -> Result<Reduced, EngineError>;

    /// Sums an evaluation over all its shards, in the order of the tree: the loss, and the metrics that it has on this
    /// kind of engine.
    fn evaluate(&mut self, task: &GradientTask<'_, M>, ranks: Ranks<'_>) -> Result<Evaluated, EngineError>;

    /// The step whose summed gradient is with its owners here, and was not done yet, where the optimizer's numbers are
    /// sharded. Once one rank has done that step, all others have this too.
    fn summed(&self) -> Option<u64> {
        None
    }

    /// Has all ranks know that each has its part of the sum of `step`, and that all of it is finite, where a sum goes
    /// to owners alone: after that each rank can do the step, whichever die. Returns the loss.
    fn commit(&mut self, group: &mut Group, step: u64, along: &Advance<'_>, loss: f32) -> Result<f32, EngineError> {
        let _ = (group, step, along);
        Ok(loss)
    }

    /// Does the step whose gradient was summed. One that is not finite changes nothing.
    fn advance(&mut self, state: &mut State, along: &Advance<'_>) -> Result<(), EngineError>;

    /// Has all ranks hold the parameters that their owners have moved, where the optimizer's numbers are sharded.
    fn gather(&mut self, state: &mut State, group: &mut Group) -> Result<(), EngineError> {
        let _ = (state, group);
        Ok(())
    }

    /// Brings the numbers of the loop's state up to its step. Afterwards it has room for all.
    fn give(&mut self, state: &mut State) -> Result<(), EngineError>;

    /// A checksum of the numbers that the engine holds, which are the loop's where it has no copy of its own. Engines of
    /// one kind have the same for the same bits.
    fn checksum(&mut self, state: &State) -> Result<u64, EngineError>;

    /// Begins a copy of the state's numbers that steps to come do not change. None where those of the loop's state will
    /// do: they are brought up to its step, and do not change until it is [advanced](Self::advance).
    fn snapshot(&mut self, state: &mut State) -> Result<Option<HostCopy>, EngineError> {
        self.give(state).map(|()| None)
    }
}

/// For the record of a round.
pub(crate) struct Transport {
    /// As `--collectives` names it.
    pub(crate) name: &'static str,
    pub(crate) nccl_failures: u64,
}

/// The ranks that share a step, and this one's part in it.
pub(crate) struct Ranks<'a> {
    pub(crate) group: &'a mut Group,
    /// The nodes of the tree all of whose shards are this rank's.
    pub(crate) nodes: &'a [Node],
    /// Gives this rank's votes; called as late as possible.
    pub(crate) vote: &'a mut dyn FnMut() -> u32,
}

/// What all ranks know of a step once its gradient is summed.
pub(crate) struct Reduced {
    /// The loss, summed over all samples.
    pub(crate) loss: f32,
    /// Each bit that any rank has set.
    pub(crate) votes: u32,
}

/// What all ranks know of a part of an evaluation.
pub(crate) struct Evaluated {
    /// The loss, and after it the metrics.
    pub(crate) sums: Vec<f32>,
    /// Each bit that any rank has set.
    pub(crate) votes: u32,
}

/// A step cannot be computed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum EngineError {
    #[cfg(feature = "cuda")]
    #[error(transparent)]
    Cuda(#[from] CudaError),
    #[error(transparent)]
    Collective(#[from] CollectiveError),
    /// Why NCCL, which is to be used, cannot be.
    #[cfg(feature = "cuda")]
    #[error("{0}")]
    NoNccl(String),
    #[error("cannot start the reduction thread: {0}")]
    Thread(#[source] io::Error),
    #[error(transparent)]
    Task(#[from] TaskError),
    /// The gradient of this step cannot be applied.
    #[error("the gradient of step {step} is not finite in tensor {tensor}")]
    NotFinite { step: u64, tensor: String },
    /// All ranks hear of it at the same point. Their states may differ by one step.
    #[cfg_attr(not(feature = "cuda"), allow(dead_code))] // Only NCCL fails so.
    #[error("it failed on a rank, and all ranks start again")]
    Again,
}

/// How to move along a gradient.
pub(crate) struct Advance<'a> {
    pub(crate) optimizer: &'a Optimizer,
    pub(crate) tensors: &'a [Tensor],
    pub(crate) rate: f32,
    /// What makes the mean of the summed gradient.
    pub(crate) mean: f32,
    /// The greatest norm that the mean may have.
    pub(crate) clip: Option<f32>,
}

impl Advance<'_> {
    /// The step after `done` steps, along a gradient that is multiplied by `scale`.
    fn stride(&self, done: u64, scale: f32) -> Stride {
        Stride { step: done + 1, rate: self.rate, mean: self.mean, scale }
    }
}

/// The device that was asked for cannot be had.
#[derive(Debug, thiserror::Error)]
pub enum DeviceError {
    /// The model has no pass for it.
    #[error(transparent)]
    HostModel(#[from] OnCpusAlone),
    /// The model cannot be computed on CPUs.
    #[error(transparent)]
    Task(#[from] TaskError),
    /// What was asked for is no work for GPUs.
    #[error("GPUs step only by AdamW, at one learning rate: {0}")]
    ByAdamWAlone(String),
    /// What was asked for is no work for GPUs.
    #[error("GPUs keep all of the optimizer's numbers (--optimizer-state whole)")]
    WholeAlone,
    /// What was asked for is no work for CPUs.
    #[error("CPUs compute only in f32")]
    InF32Alone,
    /// The GPU cannot be used.
    #[cfg(feature = "cuda")]
    #[error(transparent)]
    Cuda(#[from] CudaError),
    /// There is no code for it.
    #[cfg(not(feature = "cuda"))]
    #[error("this program was built without GPU support (Cargo feature `cuda`)")]
    NotBuilt,
}

impl DeviceError {
    /// Whether there is a GPU, which lies idle then.
    fn leaves_a_gpu_idle(&self) -> bool {
        match self {
            #[cfg(feature = "cuda")]
            DeviceError::Cuda(error) => error.is_of_a_gpu(),
            DeviceError::WholeAlone => true,
            _ => false,
        }
    }
}

/// The engine that the settings ask for. Left the choice, it is CPUs where a GPU cannot be had, and that is said; but
/// not for what CPUs do not compute.
pub(crate) fn choose<'a, M: Model>(
    settings: &Settings,
    environment: &Environment,
    model: &'a M,
) -> Result<Box<dyn Engine<M> + 'a>, DeviceError> {
    let host = || OnHost::new(settings, model).map(|host| Box::new(host) as Box<dyn Engine<M> + 'a>);
    let host_will_do = settings.precision == Precision::F32;
    if settings.device == Device::Cpu {
        return if host_will_do { Ok(host()?) } else { Err(DeviceError::InF32Alone) };
    }
    match gpu::open(settings, environment, model) {
        Err(why) if settings.device == Device::Auto && host_will_do => {
            if why.leaves_a_gpu_idle() {
                warn!("computes on the CPU: {why}");
            } else {
                info!("computes on the CPU: {why}");
            }
            Ok(host()?)
        }
        result => result,
    }
}
