//! Checks that no process of an earlier round still holds this node's GPUs, before the next round's workers need the
//! GPUs' memory. Does not choose GPUs, and ignores processes of other jobs.
//!
//! The guard ends a round's process tree before the next round starts, and a process releases its GPUs before it can be
//! waited for. Two kinds of process may still hold a GPU: one that left the tree when agent and guard were killed at
//! once, and one that the driver is still cleaning up.

use std::collections::BTreeSet;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use tokio::time::timeout;

use crate::machine::nvml::{Nvml, NvmlError};
use crate::workers::environment::NODE_ENV;

/// How often the driver is asked during the wait.
const AGAIN: Duration = Duration::from_millis(200);

/// The longest wait, even if the start timeout would allow more.
const PATIENCE: Duration = Duration::from_secs(20);

/// A process that computes on a GPU, as listed by the driver.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Listed {
    /// The GPU, by NVML's index.
    pub gpu: u32,
    pub pid: u32,
    /// Whether the process exists here. It does not if it is in another pid namespace, or gone.
    pub exists: bool,
    /// Whether its environment is that of a worker of this node and job.
    pub marked: bool,
}

/// A process of an earlier round that holds a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Holder {
    pub gpu: u32,
    pub pid: u32,
}

/// The listed processes that belong to an earlier round. While no worker runs here, every marked process belongs to
/// one. A process that was marked before counts until it is gone, because a dying process has no environment any more.
pub(crate) fn holders(listed: &[Listed], known: &mut BTreeSet<u32>) -> Vec<Holder> {
    known.retain(|pid| listed.iter().any(|process| process.pid == *pid && process.exists));
    known.extend(listed.iter().filter(|process| process.exists && process.marked).map(|process| process.pid));
    let held = listed.iter().filter(|process| known.contains(&process.pid));
    held.map(|process| Holder { gpu: process.gpu, pid: process.pid }).collect()
}

/// Asks the driver which processes hold GPUs. Without a driver there is nothing to wait for.
#[derive(Clone)]
pub(crate) struct GpuHolders {
    asked: Arc<HolderSearch>,
}

struct HolderSearch {
    /// `Some(None)` if there is no driver. Loaded when first needed, because waking the driver may take long.
    nvml: OnceLock<Option<Nvml>>,
    /// Variables in the environment of every worker of this job and node.
    marks: [Vec<u8>; 2],
}

impl GpuHolders {
    /// A check for the workers of this job on this node.
    pub(crate) fn of(job: &str, node: &str) -> GpuHolders {
        let mark = |name: &str, value: &str| format!("{name}={value}").into_bytes();
        let marks = [mark("TORCHELASTIC_RUN_ID", job), mark(NODE_ENV, node)];
        GpuHolders { asked: Arc::new(HolderSearch { nvml: OnceLock::new(), marks }) }
    }

    /// Whether it is already known that there is no driver.
    pub(crate) fn are_absent(&self) -> bool {
        self.asked.nvml.get().is_some_and(Option::is_none)
    }

    /// Waits until no worker of an earlier round holds a GPU of this machine. If one still does at the limit, this logs
    /// a warning and returns. `start_timeout` is how long a member may take from the seal to running workers. The wait
    /// takes at most half of it, and never more than 20 s.
    pub(crate) async fn free(self, start_timeout: Duration) {
        let mut held = Vec::new();
        let patience = PATIENCE.min(start_timeout / 2);
        if timeout(patience, self.wait(&mut held, patience)).await.is_err() {
            let what = if held.is_empty() { "the NVIDIA driver does not answer".to_owned() } else { describe(&held) };
            tracing::warn!("{what} after {patience:?}; starting workers anyway");
        }
    }

    async fn wait(&self, held: &mut Vec<Holder>, patience: Duration) {
        let mut known = BTreeSet::new();
        loop {
            let asked = Arc::clone(&self.asked);
            // The driver may answer slowly.
            let listed = tokio::task::spawn_blocking(move || asked.list()).await.unwrap_or_default();
            let first = held.is_empty();
            *held = holders(&listed, &mut known);
            if held.is_empty() {
                return;
            }
            if first {
                tracing::warn!("{}: waiting for it, up to {:?}", describe(held), patience);
            }
            tokio::time::sleep(AGAIN).await;
        }
    }
}

impl HolderSearch {
    fn nvml(&self) -> Option<&Nvml> {
        let load = || match Nvml::load() {
            Ok(nvml) => Some(nvml),
            Err(NvmlError::Absent(_)) => None,
            Err(error) => {
                tracing::warn!(%error, "cannot check the GPUs before a round starts");
                None
            }
        };
        self.nvml.get_or_init(load).as_ref()
    }

    fn list(&self) -> Vec<Listed> {
        let Some(nvml) = self.nvml() else { return Vec::new() };
        let list = || {
            let mut listed = Vec::new();
            for gpu in 0..nvml.device_count()? {
                for process in nvml.compute_processes(gpu)? {
                    let (pid, folder) = (process.pid, format!("/proc/{}", process.pid));
                    // Another user's process cannot be read, so it is not ours.
                    let environ = std::fs::read(format!("{folder}/environ")).unwrap_or_default();
                    let has = |mark: &Vec<u8>| environ.split(|byte| *byte == 0).any(|entry| entry == mark.as_slice());
                    let exists = std::path::Path::new(&folder).exists();
                    listed.push(Listed { gpu, pid, exists, marked: self.marks.iter().all(has) });
                }
            }
            Ok::<_, NvmlError>(listed)
        };
        list().unwrap_or_else(|error| {
            tracing::warn!(%error, "cannot check the GPUs");
            Vec::new()
        })
    }
}

/// `GPU 0 (pid 4711) held by workers of an earlier round`.
fn describe(held: &[Holder]) -> String {
    let each: Vec<String> = held.iter().map(|holder| format!("GPU {} (pid {})", holder.gpu, holder.pid)).collect();
    format!("{} held by workers of an earlier round", each.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn process(pid: u32, exists: bool, marked: bool) -> Listed {
        Listed { gpu: pid / 100, pid, exists, marked }
    }

    #[test]
    fn only_this_nodes_workers_of_an_earlier_round_are_waited_for() {
        let mut known = BTreeSet::new();
        let listed = [process(101, true, true), process(102, true, false), process(203, false, false)];
        assert_eq!(holders(&listed, &mut known), [Holder { gpu: 1, pid: 101 }]);
    }

    #[test]
    fn one_that_is_dying_is_waited_for_until_it_is_gone() {
        let mut known = BTreeSet::new();
        assert_eq!(holders(&[process(101, true, true)], &mut known).len(), 1);
        // It has exited and has no environment, but the driver has not freed it yet.
        assert_eq!(holders(&[process(101, true, false)], &mut known).len(), 1);
        assert_eq!(holders(&[process(101, false, false)], &mut known), []);
        // The pid may have been reused by now.
        assert_eq!(holders(&[process(101, true, false)], &mut known), []);
    }

    #[test]
    fn what_is_held_is_named() {
        let held = [Holder { gpu: 0, pid: 7 }, Holder { gpu: 3, pid: 8 }];
        assert_eq!(describe(&held), "GPU 0 (pid 7), GPU 3 (pid 8) held by workers of an earlier round");
    }
}
