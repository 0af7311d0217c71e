//! Replaces `gpu` where the trainer is built without its feature `cuda`: no GPU can be opened.

use super::{DeviceError, Engine, EngineError};
use crate::model::Model;
use crate::settings::{Environment, Settings};

/// There is none.
pub(super) fn open<'a, M: Model>(
    _: &Settings,
    _: &Environment,
    _: &'a M,
) -> Result<Box<dyn Engine<M> + 'a>, DeviceError> {
    Err(DeviceError::NotBuilt)
}

/// A copy that only a GPU makes.
pub(crate) enum HostCopy {}

impl HostCopy {
    pub(crate) fn numbers(&self) -> Result<&[f32], EngineError> {
        match *self {}
    }
}

#[cfg(test)]
mod tests {
    use super::super::choose;
    use super::*;
    use crate::Device;
    use crate::model::tests::Plain;

    #[test]
    fn a_gpu_that_is_asked_for_is_refused_and_left_the_choice_it_is_the_cpu() {
        let environment = Environment::read(|_| None).unwrap();
        let model = Plain(Vec::new(), None);
        let choose = |device| {
            let settings = Settings { device, ..Settings::default() };
            choose(&settings, &environment, &model).map(drop).map_err(|error| error.to_string())
        };
        let refusal = "this program was built without GPU support (Cargo feature `cuda`)";
        for device in [Device::Cuda(None), Device::Cuda(Some(0))] {
            assert_eq!(choose(device), Err(refusal.to_owned()));
        }
        assert_eq!(choose(Device::Auto), Ok(()));
        assert_eq!(choose(Device::Cpu), Ok(()));
    }
}
