//! The CPUs near a worker's GPU: `--numa-binding`. A worker binds itself to them before its program runs
//! ([`crate::guard`]). Memory needs no binding: the kernel takes it near the thread that touches it first.
//!
//! The modes are those of torch 2.15 (`torch.numa.binding`): worker n belongs to the n-th GPU that it sees. torch runs
//! `numactl`. This module reads sysfs and runs nothing.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use crate::machine::cpus::{CpuSet, ParseCpusError};
use crate::machine::devices::{Gpus, Visible};

/// How near to its GPU a worker is bound.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Affinity {
    /// The CPUs of the GPU's NUMA node.
    Node,
    /// The CPUs of all NUMA nodes of the GPU's socket.
    Socket,
    /// A share of the node's physical cores that is not given to the worker of any other GPU.
    Exclusive,
    /// The cores of the node that share one last-level cache. If there are fewer such caches than GPUs, they are used
    /// in turn.
    CoreComplex,
}

/// Why workers cannot be bound.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum NumaError {
    #[error("--numa-binding: worker {local_rank} has no GPU: {why}; start fewer workers, or leave it out")]
    NoGpu { local_rank: u32, why: String },
    #[error("--numa-binding: the place of worker {local_rank}'s GPU is unknown: {why}; leave --numa-binding out")]
    Unplaced { local_rank: u32, why: String },
    #[error(
        "--numa-binding: the firmware does not say which of the {nodes} NUMA nodes GPU {pci} belongs to; leave \
         --numa-binding out"
    )]
    Homeless { pci: String, nodes: usize },
    #[error(
        "--numa-binding: this process may run on none of the CPUs of NUMA node {node}, where a worker's GPU sits; give \
         its cpuset CPUs of that node, or leave --numa-binding out"
    )]
    NotAllowed { node: u32 },
    #[error(
        "--numa-binding=exclusive: NUMA node {node} has {cores} cores for {gpus} GPUs; use `node`, or start fewer workers"
    )]
    TooFewCores { node: u32, cores: usize, gpus: usize },
    #[error("--numa-binding: cannot read {}: {cause}; leave --numa-binding out", .path.display())]
    Sysfs { path: PathBuf, cause: String },
}

/// The CPUs that this process may use, by NUMA node, as sysfs describes them.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Topology {
    nodes: BTreeMap<u32, CpuSet>,
    sys: PathBuf,
}

/// The CPUs of each of the first `workers` workers. `sys` is the path of sysfs, `allowed` are the CPUs that this
/// process may run on, and `visible` are the devices that it sees.
pub(crate) fn bind(
    affinity: Affinity,
    workers: u32,
    gpus: &Gpus,
    visible: &[Visible],
    allowed: &CpuSet,
    sys: &Path,
) -> Result<Vec<CpuSet>, NumaError> {
    let topology = Topology::read(sys, allowed)?;
    let mut homes = Vec::new();
    for (local_rank, device) in (0..).zip(visible) {
        homes.push(topology.home(&pci(local_rank, device, gpus)?)?);
    }
    (0..workers).map(|worker| topology.cpus(affinity, worker, &homes)).collect()
}

fn pci(local_rank: u32, device: &Visible, gpus: &Gpus) -> Result<String, NumaError> {
    let unplaced = |why: String| NumaError::Unplaced { local_rank, why };
    match device {
        Visible::Gpu(index) => gpus.all[*index].pci.clone().ok_or_else(|| {
            unplaced(gpus.unknown.as_ref().map_or("the driver did not tell".to_owned(), ToString::to_string))
        }),
        Visible::Named(uuid) => Err(unplaced(format!("the driver did not say which GPU {uuid} is"))),
        Visible::Mig(uuid) => Err(unplaced(format!("{uuid} is a part of a GPU"))),
    }
}

impl Topology {
    fn read(sys: &Path, allowed: &CpuSet) -> Result<Topology, NumaError> {
        let directory = sys.join("devices/system/node");
        let names = fs::read_dir(&directory).into_iter().flatten().flatten().map(|entry| entry.file_name());
        let numbers = names.filter_map(|name| name.to_str()?.strip_prefix("node")?.parse::<u32>().ok());
        let mut nodes = BTreeMap::new();
        for node in numbers {
            nodes.insert(node, cpus(&directory.join(format!("node{node}/cpulist")))?.and(allowed));
        }
        if nodes.is_empty() {
            // A kernel without NUMA has one node with everything.
            nodes.insert(0, allowed.clone());
        }
        Ok(Topology { nodes, sys: sys.to_owned() })
    }

    fn home(&self, pci: &str) -> Result<u32, NumaError> {
        let path = self.sys.join("bus/pci/devices").join(pci).join("numa_node");
        // Where there is only one node, the kernel often says -1.
        let told = fs::read_to_string(&path).ok().and_then(|text| text.trim().parse::<u32>().ok());
        match (told, self.nodes.keys().next()) {
            (Some(node), _) if self.nodes.contains_key(&node) => Ok(node),
            (_, Some(only)) if self.nodes.len() == 1 => Ok(*only),
            _ => Err(NumaError::Homeless { pci: pci.to_owned(), nodes: self.nodes.len() }),
        }
    }

    fn cpus(&self, affinity: Affinity, worker: u32, homes: &[u32]) -> Result<CpuSet, NumaError> {
        let Some(&home) = homes.get(worker as usize) else {
            let why = format!("{} are visible", homes.len());
            return Err(NumaError::NoGpu { local_rank: worker, why });
        };
        let own = &self.nodes[&home];
        if own.0.is_empty() {
            return Err(NumaError::NotAllowed { node: home });
        }
        // The place of the worker's GPU among the GPUs of the same node.
        let place = homes[..worker as usize].iter().filter(|node| **node == home).count();
        let gpus = homes.iter().filter(|node| **node == home).count();
        match affinity {
            Affinity::Node => Ok(own.clone()),
            Affinity::Socket => self.socket(own),
            Affinity::Exclusive => {
                let cores = self.groups(own, |cpu| self.siblings(cpu))?;
                let (each, extra) = (cores.len() / gpus, cores.len() % gpus);
                if each == 0 {
                    return Err(NumaError::TooFewCores { node: home, cores: cores.len(), gpus });
                }
                // The first GPUs get the cores that are left over, one core each.
                let first = place * each + place.min(extra);
                let count = each + usize::from(place < extra);
                Ok(CpuSet(cores.into_values().skip(first).take(count).flatten().collect()))
            }
            Affinity::CoreComplex => {
                let caches = self.groups(own, |cpu| self.last_cache(cpu))?;
                let mut caches: Vec<(u32, BTreeSet<u32>)> = caches.into_iter().collect();
                // The largest come first, because a cpuset may leave out some of a cache's CPUs.
                caches.sort_by_key(|(first, cpus)| (std::cmp::Reverse(cpus.len()), *first));
                let turn = place % caches.len();
                Ok(CpuSet(caches.swap_remove(turn).1))
            }
        }
    }

    /// The CPUs of all nodes that are in the same socket as these CPUs.
    fn socket(&self, own: &CpuSet) -> Result<CpuSet, NumaError> {
        // A node without CPUs that this process may use adds nothing.
        let package = |cpus: &CpuSet| cpus.0.first().map(|cpu| self.package(*cpu)).transpose();
        let wanted = package(own)?;
        let mut union = BTreeSet::new();
        for cpus in self.nodes.values() {
            if package(cpus)? == wanted {
                union.extend(&cpus.0);
            }
        }
        Ok(CpuSet(union))
    }

    /// Groups the CPUs. The key is the lowest CPU of the group, which need not be one that this process may use.
    fn groups(
        &self,
        cpus: &CpuSet,
        group: impl Fn(u32) -> Result<CpuSet, NumaError>,
    ) -> Result<BTreeMap<u32, BTreeSet<u32>>, NumaError> {
        let mut groups: BTreeMap<u32, BTreeSet<u32>> = BTreeMap::new();
        for &cpu in &cpus.0 {
            let first = group(cpu)?.0.first().copied().unwrap_or(cpu);
            groups.entry(first).or_default().insert(cpu);
        }
        Ok(groups)
    }

    fn cpu(&self, cpu: u32) -> PathBuf {
        self.sys.join(format!("devices/system/cpu/cpu{cpu}"))
    }

    fn siblings(&self, cpu: u32) -> Result<CpuSet, NumaError> {
        cpus(&self.cpu(cpu).join("topology/thread_siblings_list"))
    }

    fn package(&self, cpu: u32) -> Result<i64, NumaError> {
        let path = self.cpu(cpu).join("topology/physical_package_id");
        let text = read(&path)?;
        text.trim().parse().map_err(|_| NumaError::Sysfs { path, cause: format!("{text:?} is no number") })
    }

    /// The CPUs that share this CPU's data cache of the highest level.
    fn last_cache(&self, cpu: u32) -> Result<CpuSet, NumaError> {
        let path = self.cpu(cpu).join("cache");
        let missing = || NumaError::Sysfs { path: path.clone(), cause: "no cache is described there".into() };
        let mut last: Option<(u32, PathBuf)> = None;
        for entry in fs::read_dir(&path).map_err(|_| missing())?.flatten().map(|entry| entry.path()) {
            let holds_data = || fs::read_to_string(entry.join("type")).is_ok_and(|kind| kind.trim() != "Instruction");
            let level = fs::read_to_string(entry.join("level")).ok().and_then(|level| level.trim().parse().ok());
            if let Some(level) = level.filter(|_| holds_data())
                && last.as_ref().is_none_or(|(highest, _)| level > *highest)
            {
                last = Some((level, entry));
            }
        }
        cpus(&last.ok_or_else(missing)?.1.join("shared_cpu_list"))
    }
}

fn read(path: &Path) -> Result<String, NumaError> {
    fs::read_to_string(path).map_err(|error| NumaError::Sysfs { path: path.to_owned(), cause: error.to_string() })
}

fn cpus(path: &Path) -> Result<CpuSet, NumaError> {
    let unreadable = |error: ParseCpusError| NumaError::Sysfs { path: path.to_owned(), cause: error.to_string() };
    read(path)?.parse().map_err(unreadable)
}

#[cfg(test)]
mod tests;
