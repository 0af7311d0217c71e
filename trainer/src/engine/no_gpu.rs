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
    use clap::Parser;

    use super::super::choose;
    use super::*;
    use crate::model::Mlp;

    #[derive(Parser)]
    struct Flags {
        #[command(flatten)]
        settings: Settings,
    }

    #[test]
    fn a_gpu_that_is_asked_for_is_refused_and_left_the_choice_it_is_the_cpu() {
        let environment = Environment::read(|_| None).unwrap();
        let choose = |device: &str| {
            let flags = Flags::try_parse_from(["test", "--device", device]).unwrap();
            choose(&flags.settings, &environment, &Mlp::new(&[2, 2])).map(drop).map_err(|error| error.to_string())
        };
        let refusal = "this program was built without GPU support (Cargo feature `cuda`)";
        for device in ["cuda", "cuda:0"] {
            assert_eq!(choose(device), Err(refusal.to_owned()));
        }
        assert_eq!(choose("auto"), Ok(()));
        assert_eq!(choose("cpu"), Ok(()));
    }
}
