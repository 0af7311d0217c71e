//! This machine: its processors, accelerators, network interfaces, limits, and the names that a node has on it.
//!
//! | module | what it is |
//! |---|---|
//! | [`address`] | the address at which other nodes reach this one |
//! | [`cgroups`] | the cgroups that this process is in |
//! | [`cpus`] | sets of CPUs, and how many this process may use |
//! | [`devices`] | the accelerators, and which of them a process sees |
//! | [`gpu_watch`] | how the workers' GPUs are, whenever somebody asks |
//! | [`identity`] | the node's name, incarnation and lock |
//! | [`interfaces`] | the network interface that gloo and NCCL are given |
//! | [`numa`] | the CPUs near a worker's GPU |
//! | [`nvml`] | the GPUs, as the driver describes them |
//! | [`out_of_memory`] | the kernel's counts of processes that ran out of memory |
//! | [`parent`] | programs that end when the process that started them does |
//! | [`preflight`] | whether this machine is fit to take part |
//! | [`shortage`] | what to do while the host lacks descriptors, processes or memory |

pub(crate) mod address;
pub(crate) mod cgroups;
pub(crate) mod cpus;
pub(crate) mod devices;
pub(crate) mod gpu_watch;
pub(crate) mod identity;
pub(crate) mod interfaces;
pub(crate) mod numa;
pub(crate) mod nvml;
pub(crate) mod out_of_memory;
pub(crate) mod parent;
pub(crate) mod preflight;
pub(crate) mod shortage;

/// The value of a line `name: value`, as many files of /proc have it.
pub(crate) fn field<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    text.lines().find_map(|line| Some(line.strip_prefix(name)?.strip_prefix(':')?.trim()))
}
