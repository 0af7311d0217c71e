//! The limit on this process's open files: each rank has a connection with every other.

use std::io;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tracing::debug;

use crate::CollectiveError;

/// Descriptors beside the connections: files, libraries, the agent's socket, visitors.
const OTHERS: u64 = 256;

/// The limit that so many ranks need.
fn needed(world_size: u32) -> u64 {
    u64::from(world_size) + OTHERS
}

/// Raises the limit, as far as the system allows, to what so many ranks need.
pub(super) fn raise(world_size: u32) {
    let limit = getrlimit(Resource::Nofile);
    let Some(wanted) = raised(limit, needed(world_size)) else { return };
    if let Err(error) = setrlimit(Resource::Nofile, wanted) {
        debug!(%error, "cannot raise the limit on open files");
    }
}

/// The limit for `needed` descriptors, where it differs from the present one.
fn raised(limit: Rlimit, needed: u64) -> Option<Rlimit> {
    let Rlimit { current: Some(current), maximum } = limit else { return None };
    let wanted = maximum.map_or(needed, |maximum| needed.min(maximum));
    (wanted > current).then_some(Rlimit { current: Some(wanted), maximum })
}

/// The error where there are too few descriptors for so many ranks.
pub(super) fn descriptors(cause: &io::Error, world_size: u32) -> Option<CollectiveError> {
    let too_few = matches!(
        cause.raw_os_error().map(rustix::io::Errno::from_raw_os_error),
        Some(rustix::io::Errno::MFILE | rustix::io::Errno::NFILE)
    );
    let (limit, needed) = (getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX), needed(world_size));
    too_few.then(|| CollectiveError::Descriptors { limit, needed, cause: cause.to_string() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_limit_rises_to_what_is_needed_and_may_be() {
        let limit = |current, maximum| Rlimit { current, maximum };
        for (before, needed, after) in [
            (limit(Some(1024), Some(4096)), 1256, Some(limit(Some(1256), Some(4096)))),
            (limit(Some(1024), Some(1100)), 1256, Some(limit(Some(1100), Some(1100)))),
            (limit(Some(1024), None), 1256, Some(limit(Some(1256), None))),
            (limit(Some(1024), Some(1024)), 1256, None),
            (limit(Some(4096), Some(4096)), 1256, None),
            (limit(None, None), 1256, None),
        ] {
            assert_eq!(raised(before, needed), after);
        }
    }
}
