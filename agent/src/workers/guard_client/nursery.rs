//! The nursery, as the agent sees it: see [`crate::guard`].

use std::ffi::OsString;

use super::{Event, GuardClient, SpawnError, WorkerSpec, body_of};
use crate::guard::wire::{GuardRequest, Notice};

impl GuardClient {
    /// Asks the guard for a nursery: a process that workers are forked from. [`Event::Preloaded`] or
    /// [`Event::NotPreloaded`] follows. Its output is the agent's standard error.
    pub fn begin_nursery(&mut self, spec: WorkerSpec) -> Result<(), SpawnError> {
        let (arguments, cpus) = (spec.argv.len(), spec.cpus.mask());
        let body = body_of(spec.cwd, spec.argv, spec.env)?;
        self.send(GuardRequest::Nursery { arguments, cpus }, vec![body]);
        Ok(())
    }

    pub(super) fn hear_of_nursery(&mut self, notice: Notice) {
        match notice {
            Notice::NurseryRuns { pid } => self.nursery = rustix::process::Pid::from_raw(pid),
            Notice::NurseryReady { pid } => self.events.push_back(Event::Preloaded { pid }),
            Notice::NurseryGone { why } => {
                self.nursery = None;
                self.events.push_back(Event::NotPreloaded { why });
            }
            _ => {}
        }
    }
}

/// The command line of a nursery that imports `modules`, for workers with this command line. `ps` shows a worker's in the
/// same place, so it needs the room.
pub(crate) fn command_line(python: OsString, modules: &[String], worker: Vec<OsString>) -> Vec<OsString> {
    let before = ["-u", "-m", "elastic_agent.nursery"].map(OsString::from);
    [python].into_iter().chain(before).chain([modules.join(",").into()]).chain(worker).collect()
}
