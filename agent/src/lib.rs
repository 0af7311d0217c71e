//! The library behind `elastic-agent`: what one node does to take part in a job. The rendezvous protocol is in
//! `elastic-rendezvous`, and its drivers are in `elastic-node`.
//!
//! | module | what it is |
//! |---|---|
//! | `cli` | flags and `PET_*` variables, parsed into one `cli::Options` |
//! | `guard` | the small process that starts the workers, and ends them whenever the agent ends |
//! | `machine` | this machine: processors, accelerators, interfaces, the node's name |
//! | `output` | the workers' output, what a dead worker left behind, the final report |
//! | `run` | one node's part in a job, from its first read of the store to its exit code; its health |
//! | `spare` | a host that goes to whichever of several jobs lacks a node |
//! | `start` | the process: command line, guard, log, runtime |
//! | `store` | the store that nodes meet through, the protocol on it, the ports |
//! | `workers_store` | the store that workers find each other through, in torch's wire protocol |
//! | `workers` | the local workers: start, talk to, watch, stop |
//!
//! `cli` depends on the option types of the others, and only `run`, `spare` and `main` depend on `cli`. Of the rest,
//! each depends on those before it in this order: `guard`, `machine`, `output`, `store`, `workers_store`, `workers`,
//! `run`.

mod cli;
mod guard;
mod machine;
mod output;
mod run;
mod spare;
mod start;
mod store;
mod workers;
mod workers_store;

pub use cli::{command, completion};
pub use start::main;

/// A log whose lines a test receives.
#[cfg(test)]
fn log_to(lines: std::sync::mpsc::Sender<String>) -> impl tracing::Subscriber + Send + Sync {
    struct Log(std::sync::mpsc::Sender<String>);
    impl std::io::Write for Log {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            // A test that has read enough has dropped its receiver.
            let _ = self.0.send(String::from_utf8_lossy(bytes).into_owned());
            Ok(bytes.len())
        }
        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }
    tracing_subscriber::fmt().with_writer(move || Log(lines.clone())).finish()
}

/// What tests outside of this crate's source name. Nothing else may use it.
#[doc(hidden)]
pub mod for_tests {
    pub use crate::cli::{Dialect, Stop, check as check_command_line};
    pub use crate::guard::{Exit, serve as serve_as_guard, start as start_guard};
    pub use crate::machine::cpus::{CpuSet, allowed as allowed_cpus};
    pub use crate::machine::identity::hostname;
    pub use crate::output::logs::{Console, LogDir, LogNames, LogOptions, Logs, Stdio, WorkerLogs};
    pub use crate::store::participation::{JobPaths, JobStore};
    pub use crate::workers::final_save::LIMIT as FINAL_SAVE_LIMIT;
    pub use crate::workers::guard_client::{Event, Exited, GuardClient, GuardClientError, SpawnError, WorkerSpec};
    pub use crate::workers::socket::WorkerSocket;
    pub use crate::workers_store::fence::{ADMITTED, INTRODUCTION, Known, NONCE};
    pub use crate::workers_store::{TcpStore, WorkersStoreLimits};
}
