//! Jobs whose programs are of this release and of the one before, on a real etcd: nothing stops for an upgrade, and
//! nothing for going back. And records that a later release might write.

mod later_release;
mod replacement;
mod wishes;

use elastic_tests::prelude::*;
use elastic_tests::previous_release::PreviousRelease;

/// Exit code of an agent that left as planned.
const LEFT: i32 = 3;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Build {
    Before,
    Now,
}

impl Build {
    fn other(self) -> Build {
        if self == Build::Before { Build::Now } else { Build::Before }
    }

    fn start(self, job: &Job, before: &PreviousRelease, node: &str) -> Agent {
        match self {
            Build::Before => job.start_program(&before.program("elastic-agent"), node),
            Build::Now => job.start(node),
        }
    }
}
