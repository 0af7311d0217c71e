//! The kernel's counts of processes that its out-of-memory killer ended, in the agent's cgroup and on the whole host.
//! [`crate::output::outcome::judge`] decides what they say about one worker.
//!
//! Workers live in the agent's cgroup. `memory.events` (cgroup v2) counts the victims in this cgroup and below it.
//! `memory.oom_control` (v1, from Linux 4.13) counts the victims in this cgroup alone. Both count a victim no
//! matter which memory limit was reached. `/proc/vmstat` counts all victims of the host. See "cgroup-v2" and "memory"
//! in the kernel's admin guide.

use std::fs;
use std::path::{Path, PathBuf};

use super::cgroups::{self, Cgroup, Version};

/// The file that counts the victims in this agent's cgroup, if there is one.
#[derive(Debug, Clone, Default)]
pub(crate) struct Counters {
    file: Option<PathBuf>,
}

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Victims {
    /// In the cgroup, and the file that holds the count.
    pub cgroup: Option<(u64, PathBuf)>,
    pub host: Option<u64>,
}

impl Counters {
    pub(crate) fn find() -> Counters {
        let candidates = candidates(&cgroups::own("memory", Path::new("/")));
        Counters { file: candidates.into_iter().find(|file| count(file).is_some()) }
    }

    /// Reads the counters. Their files belong to the kernel, so reading them does not wait for any disk.
    pub(crate) fn read(&self) -> Victims {
        Victims {
            cgroup: self.file.as_ref().and_then(|file| Some((count(file)?, file.clone()))),
            host: count(Path::new("/proc/vmstat")),
        }
    }
}

fn count(file: &Path) -> Option<u64> {
    victims(&fs::read_to_string(file).ok()?)
}

/// The number after `oom_kill` in a file of `name number` lines.
fn victims(text: &str) -> Option<u64> {
    text.lines().find_map(|line| line.strip_prefix("oom_kill ")?.trim().parse().ok())
}

/// The files that may hold the count for a process in these cgroups, the best first.
fn candidates(groups: &[Cgroup]) -> Vec<PathBuf> {
    let file = |version: Version| if version == Version::V1 { "memory.oom_control" } else { "memory.events" };
    let mut files: Vec<PathBuf> = Vec::new();
    for group in groups {
        files.extend([&group.own, &group.top].map(|directory| directory.join(file(group.version))));
    }
    files.dedup();
    files
}

#[cfg(test)]
mod tests {
    use super::*;

    fn paths(cgroup: &str, mountinfo: &str) -> Vec<String> {
        candidates(&cgroups::find("memory", cgroup, mountinfo)).iter().map(|path| path.display().to_string()).collect()
    }

    #[test]
    fn a_service_of_systemd_is_found_under_version_2() {
        let mountinfo = "26 25 0:23 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate";
        assert_eq!(
            paths("0::/system.slice/train.service\n", mountinfo),
            ["/sys/fs/cgroup/system.slice/train.service/memory.events", "/sys/fs/cgroup/memory.events"]
        );
    }

    #[test]
    fn a_container_is_found_with_and_without_a_cgroup_namespace() {
        let own = "600 590 0:26 / /sys/fs/cgroup ro,nosuid - cgroup2 cgroup rw";
        assert_eq!(paths("0::/\n", own), ["/sys/fs/cgroup/memory.events"]);
        let hosts = "600 590 0:33 /docker/4f2a /sys/fs/cgroup/memory ro,nosuid - cgroup cgroup rw,memory";
        let cgroup = "9:memory:/docker/4f2a\n3:cpu,cpuacct:/docker/4f2a\n";
        assert_eq!(paths(cgroup, hosts), ["/sys/fs/cgroup/memory/memory.oom_control"]);
    }

    #[test]
    fn memory_under_version_1_goes_before_an_empty_version_2() {
        let mountinfo = "35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n\
                         41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw\n\
                         31 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755";
        assert_eq!(
            paths("4:memory:/a/b\n0::/\n", mountinfo),
            [
                "/sys/fs/cgroup/memory/a/b/memory.oom_control",
                "/sys/fs/cgroup/memory/memory.oom_control",
                "/sys/fs/cgroup/unified/memory.events",
            ]
        );
    }

    #[test]
    fn the_count_is_read_from_each_kind_of_file() {
        assert_eq!(victims("oom_kill_disable 0\nunder_oom 0\noom_kill 3\n"), Some(3));
        assert_eq!(victims("low 0\nhigh 0\nmax 12\noom 1\noom_kill 1\noom_group_kill 0\n"), Some(1));
        assert_eq!(victims("oom_kill_disable 0\nunder_oom 0\n"), None);
    }

    #[test]
    fn this_machine_has_no_garbage_in_its_counters() {
        let victims = Counters::find().read();
        assert_eq!(Counters::find().read(), victims, "two readings agree");
    }
}
