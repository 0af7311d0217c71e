//! Whether the GPUs of a round sum over NCCL, and what follows a failure: the same round continues, over TCP if need
//! be.
//!
//! Which way a sum takes changes no bit of it, so ranks may change over between two steps. They do it together: each
//! step begins with a small exchange over TCP, in which a rank also tells that NCCL failed it in the step before. The
//! others are then at most one step ahead, as after the loss of a peer, and all agree on a state again. A round that
//! continues over TCP is not the end of NCCL: a later one tries it again, see [`Failures`].

use std::io;
use std::ops::Range;

use elastic_collective::{CollectiveError, Group, list_ranks};
use elastic_cuda::nccl::retry::Failures;
use elastic_cuda::nccl::{Communicator, Joined, Library, LibraryError};
use elastic_cuda::{CudaError, CudaSlice, Gpu, NcclStream};
use tracing::{info, warn};

use super::EngineError;
use crate::settings::{Collectives, Environment, Settings};

/// Why gradients are not summed over NCCL.
#[derive(Debug, thiserror::Error)]
pub(super) enum NoNccl {
    /// NCCL is not asked for, or this worker has no peer.
    #[error("it is not asked for")]
    Unasked,
    #[error(transparent)]
    Library(#[from] LibraryError),
    #[error(transparent)]
    Gpu(#[from] CudaError),
    #[error("cannot start the thread for NCCL: {0}")]
    Thread(#[from] io::Error),
    #[error("a thread of this worker hangs in a call of NCCL")]
    Stuck,
    #[error("the workers have different versions of NCCL ({0}); install the same version on all nodes")]
    Unlike(String),
    #[error("NCCL does not work for this worker: {0}")]
    Failed(String),
    /// This rank had no failure of its own, or joined later.
    #[error("NCCL failed between these workers")]
    Between,
    /// This rank could use NCCL, others cannot.
    #[error("rank {} cannot use NCCL; its log says why", list_ranks(.0))]
    Ranks(Vec<usize>),
}

/// A rank's NCCL.
pub(super) struct Nccl {
    collectives: Collectives,
    communicator: Result<Communicator, NoNccl>,
    /// Whether the present round's ranks sum over it.
    joined: bool,
    /// Whether a sum has gone over it since then.
    carried: bool,
    failures: Failures,
    /// The last failure on this rank.
    cause: Option<String>,
    /// The last warning that TCP is used instead, so that it is not repeated.
    said: Option<String>,
    staging: Option<CudaSlice<f32>>,
}

impl Nccl {
    /// Loads it where there may be somebody to sum with. That there is none is no error yet.
    pub(super) fn load(gpu: &Gpu, settings: &Settings, environment: &Environment) -> Nccl {
        let collectives = settings.collectives;
        let wanted = match collectives {
            Collectives::Auto => environment.agent.is_some() || environment.world_size > 1,
            Collectives::Tcp => false,
            Collectives::Nccl => true,
        };
        let load = || {
            let library = Library::open(settings.nccl_library.as_deref(), &environment.cuda)?;
            info!("NCCL {} ({})", library.version_text(), library.path());
            Ok(Communicator::new(library, Box::new(NcclStream::new(gpu)?))?)
        };
        let communicator = if wanted { load() } else { Err(NoNccl::Unasked) };
        Nccl {
            collectives,
            communicator,
            joined: false,
            carried: false,
            failures: Failures::default(),
            cause: None,
            said: None,
            staging: None,
        }
    }

    pub(super) fn usable(&self) -> Result<(), &NoNccl> {
        self.communicator.as_ref().map(drop)
    }

    pub(super) fn is_joined(&self) -> bool {
        self.joined
    }

    /// How often NCCL has failed, as far as the ranks know together.
    pub(super) fn failures(&self) -> u64 {
        self.failures.total
    }

    /// Makes a communicator of a round's ranks, if all of them can.
    pub(super) fn join(&mut self, group: &mut Group) -> Result<(), EngineError> {
        self.joined = false;
        if std::mem::take(&mut self.carried) {
            (self.failures, self.cause) = (self.failures.with_success(), None);
        }
        if self.communicator.as_ref().is_ok_and(Communicator::is_stuck) {
            self.communicator = Err(NoNccl::Stuck);
        }
        if group.world_size() == 1 {
            self.communicator.iter_mut().for_each(Communicator::end);
            return Ok(());
        }
        let [total, in_a_row, not_before, after_sum] = self.failures.to_words();
        let usable = u64::from(self.communicator.is_ok());
        let all = group.gather([usable, total, in_a_row, not_before, after_sum])?;
        self.failures = Failures::of_all(all.iter().map(|&[_, ref words @ ..]| *words));
        let without: Vec<usize> = (0..all.len()).filter(|&rank| all[rank][0] == 0).collect();
        let Ok(communicator) = self.communicator.as_mut() else { return self.fall_back(NoNccl::Ranks(without)) };
        if !without.is_empty() || !self.failures.allow(group.round()) {
            communicator.end();
            let failed = self.failed();
            return self.fall_back(if without.is_empty() { failed } else { NoNccl::Ranks(without) });
        }
        match communicator.join(group)? {
            Joined::Made => {
                self.joined = true;
                if self.said.take().is_some() {
                    info!("gradients are summed over NCCL again");
                }
                Ok(())
            }
            // That is no failure: in a later round the versions may be alike.
            Joined::Unlike { versions } => self.fall_back(NoNccl::Unlike(versions)),
            Joined::Refused { ranks, cause } => {
                // All ranks know of this failure.
                self.failures = self.failures.with_round(group.round());
                self.cause = cause;
                let failed = self.failed();
                self.fall_back(if self.cause.is_some() { failed } else { NoNccl::Ranks(ranks) })
            }
        }
    }

    fn failed(&self) -> NoNccl {
        self.cause.clone().map_or(NoNccl::Between, NoNccl::Failed)
    }

    /// Continues over TCP, and says why, unless that is what was asked for. `others` is why, where this rank has NCCL.
    fn fall_back(&mut self, others: NoNccl) -> Result<(), EngineError> {
        let cause = self.communicator.as_ref().err().unwrap_or(&others);
        match self.collectives {
            Collectives::Tcp => {}
            Collectives::Nccl => {
                let communicator = std::mem::replace(&mut self.communicator, Err(NoNccl::Unasked));
                return Err(EngineError::NoNccl(communicator.err().unwrap_or(others).to_string()));
            }
            Collectives::Auto => {
                let mut text = cause.to_string();
                if self.failures.in_a_row > 0 && self.communicator.is_ok() {
                    text += &format!("; NCCL is tried again in round {}", self.failures.not_before);
                }
                if self.said.as_ref() != Some(&text) {
                    warn!("gradients are summed over TCP, through the host: {text}");
                    self.said = Some(text);
                }
            }
        }
        Ok(())
    }

    /// The ranks' words before a sum, put together. An error where NCCL failed one of them in the sum before.
    pub(super) fn exchange(&mut self, group: &mut Group, vote: u32) -> Result<u32, EngineError> {
        let all = group.gather([u64::from(vote), 0])?;
        if all.iter().any(|[_, failed]| *failed > 0) {
            // The rank where NCCL failed warns of it. For this rank it is no failure of its own.
            return Err(EngineError::Again);
        }
        Ok(all.iter().fold(0, |votes, [vote, _]| votes | *vote as u32))
    }

    /// Writes the sum over all ranks of a `part` of the numbers into that part of `sum`. The GPU's own stream must have
    /// finished with it.
    pub(super) fn sum(
        &mut self,
        gpu: &Gpu,
        group: &mut Group,
        shards: u32,
        partials: &[CudaSlice<f32>],
        sum: &mut CudaSlice<f32>,
        part: Range<usize>,
    ) -> Result<(), EngineError> {
        let (Ok(communicator), Some(staging)) = (&mut self.communicator, &mut self.staging) else {
            unreachable!("it is joined, and there is room")
        };
        let partials: Vec<_> = partials.iter().map(|partial| partial.slice(part.clone())).collect();
        let sum = &mut sum.slice_mut(part);
        let result = elastic_cuda::ordered_sum(gpu, communicator, group, shards, &partials, sum, staging);
        self.judge(gpu, group, result)
    }

    fn judge(&mut self, gpu: &Gpu, group: &mut Group, result: Result<(), CollectiveError>) -> Result<(), EngineError> {
        match result {
            Err(CollectiveError::Nccl { cause, .. }) => {
                // What goes wrong in a gradient is no fault of NCCL's, which then cannot continue either.
                gpu.wait()?;
                warn!("NCCL failed in a sum ({cause}); all ranks start again after the last step");
                (self.joined, self.carried) = (false, false);
                (self.failures, self.cause) = (self.failures.with_sum(group.round()), Some(cause));
                group.gather([0, 1])?;
                Err(EngineError::Again)
            }
            result => {
                result?;
                self.carried = true;
                Ok(())
            }
        }
    }

    /// Room for what others send in sums of these lengths. What is asked of the GPU's own stream afterwards finds it.
    pub(super) fn make_room(
        &mut self,
        gpu: &Gpu,
        group: &Group,
        shards: u32,
        lengths: impl Iterator<Item = usize>,
    ) -> Result<(), CudaError> {
        // A rank's chunk of fewer numbers may be longer than that of more.
        let needed = lengths.map(|length| Communicator::staging_elements(group, shards, length)).max().unwrap_or(0);
        if self.staging.as_ref().is_none_or(|staging| staging.len() < needed) {
            // Not both at once.
            self.staging = None;
            self.staging = Some(gpu.zeros(needed)?);
        }
        Ok(())
    }
}
