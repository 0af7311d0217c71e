//! What `--device` and `--precision` say: where a step is computed, and in what.

#![deny(clippy::disallowed_methods, clippy::disallowed_types)]

use std::fmt;
use std::str::FromStr;

/// Where a step is computed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Device {
    /// On a GPU, if there is one that is usable and the model can compute on it; else on CPUs.
    #[default]
    Auto,
    /// On CPUs.
    Cpu,
    /// On a GPU: the one with this number, or else with the worker's local rank.
    Cuda(Option<u32>),
}

/// What products of matrices are computed in, attention's too. Parameters, gradients, the optimizer's state, and all
/// sums are `f32` with either.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum Precision {
    /// f32
    #[default]
    F32,
    /// Operands rounded to bf16, sums in f32: faster, only on GPUs
    Bf16,
}

impl Device {
    /// The number of the GPU for a worker with this local rank, where there are `gpus` of them. `None`: compute on
    /// CPUs. Whether a GPU of that number exists is not checked.
    pub fn gpu(self, local_rank: u32, gpus: usize) -> Option<usize> {
        match self {
            Device::Cpu => None,
            Device::Cuda(Some(number)) => Some(number as usize),
            Device::Cuda(None) => Some(local_rank as usize),
            // Workers share GPUs where there are fewer: all must compute on the same kind of device.
            Device::Auto => (local_rank as usize).checked_rem(gpus),
        }
    }
}

impl FromStr for Device {
    type Err = String;

    fn from_str(text: &str) -> Result<Device, String> {
        let number = |text: &str| text.parse().ok().filter(|_| text.bytes().all(|byte| byte.is_ascii_digit()));
        match text {
            "auto" => Ok(Device::Auto),
            "cpu" => Ok(Device::Cpu),
            "cuda" => Ok(Device::Cuda(None)),
            text => match text.strip_prefix("cuda:").and_then(number) {
                Some(number) => Ok(Device::Cuda(Some(number))),
                None => Err("must be auto, cpu, cuda, or cuda:N for GPU N, counted from 0".to_owned()),
            },
        }
    }
}

impl fmt::Display for Device {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Device::Auto => out.write_str("auto"),
            Device::Cpu => out.write_str("cpu"),
            Device::Cuda(None) => out.write_str("cuda"),
            Device::Cuda(Some(number)) => write!(out, "cuda:{number}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_read_and_written() {
        for text in ["auto", "cpu", "cuda", "cuda:0", "cuda:12"] {
            assert_eq!(text.parse::<Device>().unwrap().to_string(), text);
        }
        for text in ["", "gpu", "cuda:", "cuda:x", "cuda:+1", "cuda:-1", "cuda:99999999999", "CUDA"] {
            assert!(text.parse::<Device>().unwrap_err().contains("cuda:N"), "{text}");
        }
    }

    #[test]
    fn a_worker_takes_the_gpu_of_its_local_rank() {
        for (device, local_rank, gpus, gpu) in [
            (Device::Auto, 0, 0, None),
            (Device::Auto, 1, 4, Some(1)),
            (Device::Auto, 5, 4, Some(1)),
            (Device::Cpu, 0, 4, None),
            (Device::Cuda(None), 5, 4, Some(5)),
            (Device::Cuda(Some(2)), 0, 4, Some(2)),
        ] {
            assert_eq!(device.gpu(local_rank, gpus), gpu, "{device} {local_rank}");
        }
    }
}
