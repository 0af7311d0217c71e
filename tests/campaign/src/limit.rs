//! Descriptors or memory that a process has no more of.

use anyhow::{Context, Result};
use rustix::io::Errno;
use rustix::process::{Pid, Resource, Rlimit, getrlimit, prlimit};

/// What a process may have, and might have before.
#[derive(Debug)]
pub(crate) struct Limit {
    pid: Pid,
    resource: Resource,
    before: Rlimit,
}

impl Limit {
    /// Lets a process have no more of this than it has now. There is no limit if it has ended.
    pub(crate) fn at_what_it_has(pid: u32, resource: Resource) -> Result<Option<Limit>> {
        let Some(has) = has(pid, resource) else { return Ok(None) };
        let pid = Pid::from_raw(i32::try_from(pid)?).context("a process's id")?;
        // The most that may be asked for stays: without CAP_SYS_RESOURCE, as in a container, it could not be given back.
        let limit = Rlimit { current: Some(has), maximum: getrlimit(resource).maximum };
        match prlimit(Some(pid), resource, limit) {
            Ok(before) => Ok(Some(Limit { pid, resource, before })),
            Err(Errno::SRCH) => Ok(None),
            Err(error) => Err(error).with_context(|| format!("let a process have no more {resource:?}")),
        }
    }

    /// Lets it have as much as before.
    pub(crate) fn give_back(self) -> Result<()> {
        match prlimit(Some(self.pid), self.resource, self.before) {
            Ok(_) | Err(Errno::SRCH) => Ok(()),
            Err(error) => Err(error).with_context(|| format!("let a process have more {:?} again", self.resource)),
        }
    }
}

/// What a process has of this: the number that its next descriptor would have, or the bytes of its address space.
fn has(pid: u32, resource: Resource) -> Option<u64> {
    if resource == Resource::Nofile {
        let open = std::fs::read_dir(format!("/proc/{pid}/fd")).ok()?.flatten();
        let open: Vec<u64> = open.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect();
        return (0..).find(|number| !open.contains(number));
    }
    let pages = std::fs::read_to_string(format!("/proc/{pid}/statm")).ok()?;
    Some(pages.split(' ').next()?.parse::<u64>().ok()? * rustix::param::page_size() as u64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::opener::Opener;

    #[test]
    fn a_process_has_no_more_descriptors_until_they_are_given_back() {
        let mut process = Opener::new();
        assert!(process.opens());
        let limit = Limit::at_what_it_has(process.pid(), Resource::Nofile).unwrap().unwrap();
        assert!(!process.opens());
        limit.give_back().unwrap();
        assert!(process.opens());
    }
}
