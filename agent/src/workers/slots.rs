//! How many workers this node runs: turns `--nproc-per-node` and the machine's devices into a number. Does not assign
//! devices.

use std::path::Path;

use crate::machine::cpus;
use crate::machine::devices::{self, Gpus};

/// How the number of workers on this node is given: `--nproc-per-node`. [`crate::workers::slots`] turns it into a
/// number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum WorkerCount {
    Count(u32),
    /// One for each CPU that this process may run on.
    Cpu,
    Gpu,
    Xpu,
    /// As [`WorkerCount::Gpu`] where there is a GPU, else as [`WorkerCount::Cpu`].
    Auto,
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum SlotsError {
    #[error("--nproc-per-node=gpu: {0}; check the driver and CUDA_VISIBLE_DEVICES, or give a number, `cpu` or `auto`")]
    NoGpu(String),
    #[error(
        "--nproc-per-node=xpu: there is no Intel GPU here: no render node of Intel's is in /dev/dri, or \
         ZE_AFFINITY_MASK names none; give a number, `cpu` or `auto`"
    )]
    NoXpu,
}

/// The number of workers. `env` looks up the agent's environment. GPUs are looked up only if they matter.
pub(crate) fn count<'a>(
    workers: WorkerCount,
    gpus: impl FnOnce() -> &'a Gpus,
    env: &dyn Fn(&str) -> Option<String>,
) -> Result<u32, SlotsError> {
    match workers {
        WorkerCount::Count(n) => Ok(n),
        WorkerCount::Cpu => Ok(cpus::usable()),
        WorkerCount::Gpu => by_gpu(gpus(), env("CUDA_VISIBLE_DEVICES").as_deref()),
        WorkerCount::Auto => match by_gpu(gpus(), env("CUDA_VISIBLE_DEVICES").as_deref()) {
            Ok(gpus) => Ok(gpus),
            Err(_) => Ok(cpus::usable()),
        },
        WorkerCount::Xpu => {
            let (mask, hierarchy) = (env("ZE_AFFINITY_MASK"), env("ZE_FLAT_DEVICE_HIERARCHY"));
            match devices::xpus(Path::new("/"), mask.as_deref(), hierarchy.as_deref()) {
                0 => Err(SlotsError::NoXpu),
                n => Ok(n),
            }
        }
    }
}

fn by_gpu(gpus: &Gpus, list: Option<&str>) -> Result<u32, SlotsError> {
    match devices::visible(list, gpus).len() as u32 {
        0 if gpus.all.is_empty() => {
            let why = gpus.unknown.as_ref().map_or("the driver shows none".to_owned(), ToString::to_string);
            Err(SlotsError::NoGpu(format!("there is no NVIDIA GPU here: no /dev/nvidia0, and {why}")))
        }
        0 => Err(SlotsError::NoGpu(format!(
            "CUDA_VISIBLE_DEVICES={} shows none of the {} GPUs",
            list.unwrap_or_default(),
            gpus.all.len()
        ))),
        n => Ok(n),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::machine::devices::Gpu;
    use crate::machine::nvml::NvmlError;

    fn gpus(count: usize) -> Gpus {
        let unknown = (count == 0).then(|| NvmlError::Absent("libnvidia-ml.so.1: no such file".into()));
        Gpus { all: vec![Gpu::default(); count], unknown }
    }

    fn counted(workers: WorkerCount, present: usize, visible: Option<&str>) -> Result<u32, SlotsError> {
        let gpus = gpus(present);
        count(workers, || &gpus, &|name| (name == "CUDA_VISIBLE_DEVICES").then(|| visible.map(str::to_owned)).flatten())
    }

    #[test]
    fn workers_are_counted_as_asked() {
        let cpus = cpus::usable();
        let table = [
            (WorkerCount::Count(3), 0, None, 3),
            (WorkerCount::Cpu, 2, None, cpus),
            (WorkerCount::Auto, 0, None, cpus),
            (WorkerCount::Auto, 7, None, 7),
            (WorkerCount::Auto, 7, Some(""), cpus),
            (WorkerCount::Gpu, 7, None, 7),
            (WorkerCount::Gpu, 2, Some("1"), 1),
        ];
        for (workers, present, visible, expected) in table {
            assert_eq!(counted(workers, present, visible), Ok(expected), "{workers:?} {present} {visible:?}");
        }
    }

    #[test]
    fn asking_for_what_is_not_there_says_which_kind_of_nothing_it_is() {
        let absent = counted(WorkerCount::Gpu, 0, None).unwrap_err().to_string();
        assert!(absent.contains("no /dev/nvidia0") && absent.contains("libnvidia-ml.so.1"), "{absent}");
        let hidden = counted(WorkerCount::Gpu, 2, Some("-1")).unwrap_err().to_string();
        assert!(hidden.contains("CUDA_VISIBLE_DEVICES=-1 shows none of the 2 GPUs"), "{hidden}");
        let none = count(WorkerCount::Xpu, || unreachable!(), &|name| (name == "ZE_AFFINITY_MASK").then(|| "x".into()));
        assert_eq!(none, Err(SlotsError::NoXpu));
    }
}
