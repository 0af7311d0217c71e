//! The cgroups of a process, as `/proc/self/cgroup` and `/proc/self/mountinfo` name them. What their files say is for
//! others to read.

use std::fs;
use std::path::{Path, PathBuf};

/// A version of cgroups.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Version {
    /// It has a hierarchy for each controller.
    V1,
    /// It has one hierarchy for all controllers.
    V2,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Cgroup {
    pub(crate) version: Version,
    /// The directory where the hierarchy is mounted.
    pub(crate) top: PathBuf,
    /// The process's own directory, in `top` or below it.
    pub(crate) own: PathBuf,
}

impl Cgroup {
    /// The own directory and those above it, up to the top.
    pub(crate) fn upwards(&self) -> impl Iterator<Item = &Path> {
        self.own.ancestors().take_while(|directory| directory.starts_with(&self.top))
    }
}

/// The cgroups of this process that may have this controller, the best first. `root` is the root directory.
pub(crate) fn own(controller: &str, root: &Path) -> Vec<Cgroup> {
    let read = |path: &str| fs::read_to_string(root.join(path)).unwrap_or_default();
    find(controller, &read("proc/self/cgroup"), &read("proc/self/mountinfo"))
}

/// The cgroups of a process that may have this controller, the best first. The texts are those of `/proc/self/cgroup`
/// and `/proc/self/mountinfo`.
pub(crate) fn find(controller: &str, cgroup: &str, mountinfo: &str) -> Vec<Cgroup> {
    // A line is `hierarchy:controllers:path`. In version 2 the list of controllers is empty.
    let path_of = |wanted: &str| {
        cgroup.lines().find_map(|line| {
            let mut parts = line.splitn(3, ':').skip(1);
            let (controllers, path) = (parts.next()?, parts.next()?);
            controllers.split(',').any(|controller| controller == wanted).then_some(path)
        })
    };
    let mounts = mountinfo.lines().filter_map(Mount::parse).collect::<Vec<_>>();
    let mut found = Vec::new();
    for (controller, version) in [(controller, Version::V1), ("", Version::V2)] {
        let Some(path) = path_of(controller) else { continue };
        for mount in mounts.iter().filter(|mount| mount.controls(controller)) {
            // In a container without a cgroup namespace, the path is the host's, but the mount shows only a part of the
            // host's tree.
            let below = Path::new(path).strip_prefix(mount.root).unwrap_or(Path::new(""));
            let own = Path::new(mount.point).components().chain(below.components()).collect();
            found.push(Cgroup { version, top: mount.point.into(), own });
        }
    }
    found
}

/// The fields of a line of mountinfo that matter here: proc_pid_mountinfo(5).
struct Mount<'a> {
    root: &'a str,
    point: &'a str,
    kind: &'a str,
    options: &'a str,
}

impl<'a> Mount<'a> {
    fn parse(line: &'a str) -> Option<Mount<'a>> {
        let (mount, system) = line.split_once(" - ")?;
        let (mut mount, mut system) = (mount.split(' ').skip(3), system.split(' '));
        let (root, point) = (mount.next()?, mount.next()?);
        Some(Mount { root, point, kind: system.next()?, options: system.nth(1)? })
    }

    fn controls(&self, controller: &str) -> bool {
        match controller {
            "" => self.kind == "cgroup2",
            _ => self.kind == "cgroup" && self.options.split(',').any(|option| option == controller),
        }
    }
}
