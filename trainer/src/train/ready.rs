//! What a worker makes before it has a place: the GPU opened, its kernels and NCCL loaded. It takes long.

use std::collections::BTreeSet;

use super::TrainError;
use super::init::InitFile;
use crate::checkpoint;
use crate::data::Data;
use crate::engine::feed::Feed;
use crate::engine::{self, DeviceError, Engine};
use crate::model::optimizer::PREFIXES;
use crate::model::{Model, Optimizer, Tensor};
use crate::settings::{Collectives, Environment, Settings};

/// What a worker needs whatever its place, and takes long to make.
pub(crate) struct Ready<'a, M: Model> {
    pub(super) model: &'a M,
    pub(super) feed: &'a Feed<'a, M::Batch>,
    pub(super) init: Option<InitFile>,
    pub(super) engine: Box<dyn Engine<M> + 'a>,
}

impl<'a, M: Model> Ready<'a, M> {
    /// Opens the GPU, with its kernels and NCCL, if there is to be one.
    pub(crate) fn make(
        settings: &Settings,
        environment: &Environment,
        model: &'a M,
        feed: &'a Feed<'a, M::Batch>,
    ) -> Result<Ready<'a, M>, TrainError> {
        let data = feed.data();
        settings.beyond().map_or(Ok(()), |said| Err(TrainError::Beyond(said)))?;
        settings.contradiction().map_or(Ok(()), |said| Err(TrainError::Contradiction(said)))?;
        check(model, &settings.optimizer(), data).map_err(TrainError::Unusable)?;
        if settings.eval_every.is_some() && data.held_out().is_none_or(|held_out| held_out.samples() == 0) {
            let cause = "there are no held-out samples to evaluate it on; leave --eval-every out";
            return Err(TrainError::Unusable(cause.to_owned()));
        }
        let init = settings.init.as_deref().map(|path| InitFile::open(path, model.tensors())).transpose()?;
        let (samples, epochs) = (data.samples(), settings.epochs.get());
        let in_epochs = samples.div_ceil(settings.batch.get()).checked_mul(epochs);
        if settings.max_steps.is_none() && in_epochs.is_none() {
            return Err(TrainError::Beyond(format!("--epochs {epochs} of {samples} samples are too many steps")));
        }
        let (device, precision) = (settings.device, settings.precision);
        let engine = engine::choose(settings, environment, model).map_err(|cause| match cause {
            DeviceError::Task(error) => error.into(),
            cause => TrainError::Device { device, precision, cause },
        })?;
        if settings.collectives == Collectives::Nccl {
            engine.nccl().map_err(TrainError::NoNccl)?;
        }
        Ok(Ready { model, feed, init, engine })
    }
}

/// What is wrong with a model or its data.
fn check<M: Model>(model: &M, optimizer: &Optimizer, data: &dyn Data<Batch = M::Batch>) -> Result<(), String> {
    let mut end = 0;
    for Tensor { name, shape, range, .. } in model.tensors() {
        let place = end..end + shape.iter().product::<usize>();
        if *range != place {
            return Err(format!("tensor {name} of shape {shape:?} lies at {range:?} instead of {place:?}"));
        }
        end = range.end;
    }
    if end != model.parameters() || end == 0 {
        return Err(format!("its tensors hold {end} numbers, and it has {} parameters", model.parameters()));
    }
    if let Some(one) = model.tensors().iter().find(|one| PREFIXES.iter().any(|kept| one.name.starts_with(kept))) {
        return Err(format!("its tensor {} has a name like those of an optimizer's state: give it another", one.name));
    }
    let mut names = BTreeSet::new();
    if let Some(one) = model.tensors().iter().find(|one| !names.insert(&one.name)) {
        return Err(format!("two of its tensors are called {}", one.name));
    }
    // The state, a gradient and its sum. It is only asked for, not touched.
    checkpoint::room(((3 + optimizer.kept().len()) * end * size_of::<f32>()) as u64)?;
    match data.samples() {
        0 => Err("there are no samples".to_owned()),
        _ => Ok(()),
    }
}
