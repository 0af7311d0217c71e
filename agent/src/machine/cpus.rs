//! Sets of CPUs, and how many this process may use. [`crate::machine::numa`] chooses them for each worker.

use std::collections::BTreeSet;
use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use crate::guard::tree;
use crate::machine::cgroups::{self, Version};
use crate::machine::field;

/// A set of logical CPUs, written as the kernel writes it: `0-3,8,10-11`.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct CpuSet(pub BTreeSet<u32>);

/// The text is not a list of CPUs.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not a list of CPUs")]
pub struct ParseCpusError(String);

/// CPU numbers are below this. No Linux can be built for more CPUs, and a mask of so many still fits into one packet to
/// the guard.
const MOST: u32 = 8192;

impl FromStr for CpuSet {
    type Err = ParseCpusError;

    fn from_str(text: &str) -> Result<CpuSet, ParseCpusError> {
        let number = |text: &str| text.trim().parse::<u32>().ok().filter(|cpu| *cpu < MOST);
        let range = |part: &str| match part.split_once('-') {
            Some((first, last)) => Some(number(first)?..=number(last)?),
            None => number(part).map(|cpu| cpu..=cpu),
        };
        let parts = text.trim().split(',').filter(|part| !part.trim().is_empty());
        let ranges: Option<Vec<_>> = parts.map(range).collect();
        let ranges = ranges.ok_or_else(|| ParseCpusError(text.trim().to_owned()))?;
        Ok(CpuSet(ranges.into_iter().flatten().collect()))
    }
}

impl fmt::Display for CpuSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut cpus = self.0.iter().copied().peekable();
        let mut separator = "";
        while let Some(first) = cpus.next() {
            let mut last = first;
            while let Some(next) = cpus.next_if(|cpu| *cpu == last + 1) {
                last = next;
            }
            write!(f, "{separator}{first}")?;
            if last > first {
                write!(f, "-{last}")?;
            }
            separator = ",";
        }
        Ok(())
    }
}

impl CpuSet {
    /// The CPUs in both.
    pub fn and(&self, other: &CpuSet) -> CpuSet {
        CpuSet(self.0.intersection(&other.0).copied().collect())
    }

    /// The set as the kernel takes it: words with one bit for each CPU.
    pub(crate) fn mask(&self) -> Vec<u64> {
        let words = self.0.last().map_or(0, |last| *last as usize / 64 + 1);
        let mut mask = vec![0; words];
        for cpu in &self.0 {
            mask[*cpu as usize / 64] |= 1 << (cpu % 64);
        }
        mask
    }
}

/// The CPUs that this thread may run on: its affinity, which is limited by the cpuset of its cgroup. None where /proc
/// is not mounted.
pub fn allowed() -> Option<CpuSet> {
    // sched_getaffinity is not used, because the size of its buffer has to be guessed. This file covers every CPU.
    field(&tree::text("/proc/thread-self/status").ok()?, "Cpus_allowed_list")?.parse().ok()
}

/// How many CPUs this process may use at once. This is the number of CPUs that it may run on, or its cgroup's quota in
/// CPUs, rounded down, if that is less. At least 1.
pub(crate) fn usable() -> u32 {
    let allowed = allowed().map(|cpus| cpus.0.len() as u32).filter(|count| *count > 0);
    let fallback = || std::thread::available_parallelism().map_or(1, |n| n.get() as u32);
    let allowed = allowed.unwrap_or_else(fallback);
    quota(Path::new("/")).map_or(allowed, |quota| allowed.min(quota.floor() as u32)).max(1)
}

/// The CPU time that this process's cgroup may use, in CPUs: the smallest quota of the cgroup itself and those above
/// it. `root` is the root directory. Source: the kernel's documentation, cgroup-v2 (`cpu.max`), and for version 1
/// sched-bwc (`cpu.cfs_quota_us`).
fn quota(root: &Path) -> Option<f64> {
    let groups = cgroups::own("cpu", root);
    let quotas = groups.iter().flat_map(|group| {
        group.upwards().filter_map(|directory| {
            let directory = root.join(directory.strip_prefix("/").unwrap_or(directory));
            if group.version == Version::V1 { of_v1(directory) } else { of_v2(directory) }
        })
    });
    quotas.min_by(f64::total_cmp)
}

fn of_v2(directory: PathBuf) -> Option<f64> {
    let text = fs::read_to_string(directory.join("cpu.max")).ok()?;
    let (quota, period) = text.trim().split_once(' ')?;
    ratio(quota, period)
}

fn of_v1(directory: PathBuf) -> Option<f64> {
    let read = |name: &str| fs::read_to_string(directory.join(name)).ok();
    ratio(read("cpu.cfs_quota_us")?.trim(), read("cpu.cfs_period_us")?.trim())
}

/// The quota in CPUs. `max` and -1 mean that there is no limit.
fn ratio(quota: &str, period: &str) -> Option<f64> {
    let (quota, period): (f64, f64) = (quota.parse().ok()?, period.parse().ok()?);
    (quota > 0.0 && period > 0.0).then(|| quota / period)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set(text: &str) -> CpuSet {
        text.parse().unwrap()
    }

    #[test]
    fn lists_are_written_as_the_kernel_writes_them() {
        for (list, count, shown) in
            [("0-3,8,10-11\n", 7, "0-3,8,10-11"), ("3,1,2", 3, "1-3"), ("", 0, ""), (" 5 ", 1, "5")]
        {
            assert_eq!((set(list).0.len(), set(list).to_string().as_str()), (count, shown), "{list:?}");
        }
        for wrong in ["x", "1-", "-1", "1-2-3", "4294967295", "0-99999999"] {
            assert!(wrong.parse::<CpuSet>().is_err(), "{wrong}");
        }
        assert_eq!(set("0-3,8").and(&set("2-9")), set("2-3,8"));
        assert_eq!(set("0,63,64,130").mask(), [1 << 63 | 1, 1, 1 << 2]);
    }

    #[test]
    fn cpus_are_those_of_the_affinity_mask() {
        // A thread that may run on one CPU sees one CPU.
        let one = std::thread::spawn(|| {
            let first = *allowed().unwrap().0.first().unwrap();
            let mut cpus = rustix::thread::CpuSet::new();
            cpus.set(first as usize);
            rustix::thread::sched_setaffinity(None, &cpus).unwrap();
            (allowed().unwrap(), usable(), first)
        });
        let (allowed, usable, first) = one.join().unwrap();
        assert_eq!((allowed.to_string(), usable), (first.to_string(), 1));
    }

    /// A root directory with these files.
    fn root(files: &[(&str, &str)]) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        for (path, text) in files {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        root
    }

    const V2: &str = "25 1 0:22 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate";

    #[test]
    fn the_least_quota_on_the_way_up_counts() {
        let root = root(&[
            ("proc/self/cgroup", "0::/user.slice/job.scope\n"),
            ("proc/self/mountinfo", V2),
            ("sys/fs/cgroup/user.slice/job.scope/cpu.max", "max 100000\n"),
            ("sys/fs/cgroup/user.slice/cpu.max", "250000 100000\n"),
        ]);
        assert_eq!(quota(root.path()), Some(2.5));
        fs::write(root.path().join("sys/fs/cgroup/user.slice/job.scope/cpu.max"), "50000 100000\n").unwrap();
        assert_eq!(quota(root.path()), Some(0.5));
    }

    #[test]
    fn a_container_sees_its_own_group_as_the_top() {
        let mounted = V2.replace("0:22 / /sys", "0:22 /kubepods/pod1 /sys");
        let root = root(&[
            ("proc/self/cgroup", "0::/kubepods/pod1\n"),
            ("proc/self/mountinfo", &mounted),
            ("sys/fs/cgroup/cpu.max", "400000 100000\n"),
        ]);
        assert_eq!(quota(root.path()), Some(4.0));
    }

    #[test]
    fn version_1_has_its_own_files() {
        let mount = "31 25 0:27 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n\
                     32 25 0:28 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory";
        let root = root(&[
            ("proc/self/cgroup", "5:memory:/docker/1\n4:cpu,cpuacct:/docker/1\n1:name=systemd:/docker/1\n0::/\n"),
            ("proc/self/mountinfo", mount),
            ("sys/fs/cgroup/cpu,cpuacct/docker/1/cpu.cfs_quota_us", "300000\n"),
            ("sys/fs/cgroup/cpu,cpuacct/docker/1/cpu.cfs_period_us", "100000\n"),
            ("sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us", "-1\n"),
            ("sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us", "100000\n"),
        ]);
        assert_eq!(quota(root.path()), Some(3.0));
    }

    #[test]
    fn without_a_quota_there_is_none() {
        let root = root(&[("proc/self/cgroup", "0::/\n"), ("proc/self/mountinfo", V2)]);
        assert_eq!(quota(root.path()), None);
        assert_eq!(quota(&root.path().join("absent")), None);
    }
}
