//! The guard: a tiny process that starts the workers for the agent and outlives it just long enough to end them.
//! Rounds, graces and logs are the agent's.
//!
//! ```text
//! elastic-agent ─────────────── subreaper of last resort; forks the guard before its first thread
//!  └─ elastic-guard ─────────── own session, every signal blocked, subreaper, one thread
//!      ├─ worker 0 ──────────── own session; PR_SET_PDEATHSIG = SIGKILL, so it dies with the guard
//!      │   └─ loader
//!      ├─ worker 1
//!      └─ stray ─────────────── left by a worker that died, in whatever session: reparents to the guard
//! ```
//!
//! | what ends | what follows |
//! |---|---|
//! | a worker | SIGCHLD wakes the guard, which tells the agent at once |
//! | the agent, in any way | the socket ends, and the guard sends SIGKILL to the whole tree |
//! | the agent's time (frozen, store lost) | the deadline passes on CLOCK_BOOTTIME: SIGKILL to the whole tree |
//! | the guard | PDEATHSIG ends the workers; the agent adopts and ends what they started, and reports the loss |
//! | both at once | PDEATHSIG ends the workers; a stray in its own session survives |
//!
//! When the guard has reaped the last process, the held descriptors (listening socket, lock files) close. So a refused
//! connection proves that the tree is gone. CLOCK_BOOTTIME counts the time in suspend too. Only a cgroup or a container
//! can end a stray that outlived both.
//!
//! The guard forks the workers itself, for two reasons. Only descendants of the subreaper reparent to it. And PDEATHSIG
//! follows the *thread* that forked: the guard has one thread, which never ends before the guard.
//!
//! To know that nothing is left, the guard needs no list of processes. A subreaper without children has no descendants,
//! so ECHILD from `waitpid` is the proof. Only processes that remain after their group was signalled are searched for
//! in /proc.
//!
//! A signal to one worker reaches its process group, even after the worker itself has died. Processes that a worker put
//! into other groups or sessions look like another worker's. So they are ended only when all workers
//! are stopped.
//!
//! A process may be impossible to end: the kernel does not let it die (an unresponsive device or file system), or it
//! changed to a user whom the guard may not signal. Such a process keeps the guard waiting, and the guard keeps the
//! held descriptors. The process is *not* gone, and saying that it is would let a second group run at the same time.

mod deadline;
mod exit;
mod keeper;
mod kernel;
pub(crate) mod tree;
pub(crate) mod wire;

use std::io;
use std::os::fd::AsRawFd;
use std::panic::AssertUnwindSafe;

use rustix::process::Pid;

pub use exit::Exit;
pub(crate) use exit::signal_name;

use wire::Channel;

/// The guard could not be started.
#[derive(Debug, thiserror::Error)]
#[error("cannot start the guard process: {step}: {cause}")]
pub struct GuardError {
    step: &'static str,
    cause: io::Error,
}

/// The agent's handle of its guard. Dropping it ends the guard, and with it everything that the guard started.
#[derive(Debug)]
pub struct Guard {
    pub(crate) pid: Pid,
    pub(crate) channel: Channel,
}

/// Forks the guard. Call it first in `main`: before any thread, runtime or descriptor that the guard should not have.
///
/// The agent becomes a subreaper too, and SIGCHLD gets its default action. Fails when threads run already, /proc is not
/// mounted, or the system has no room for a process.
pub fn start() -> Result<Guard, GuardError> {
    let failed = |step| move |cause: io::Error| GuardError { step, cause };
    kernel::reset_child_disposition();
    rustix::process::set_child_subreaper(Some(rustix::process::getpid()))
        .map_err(|e| failed("becoming a subreaper")(e.into()))?;
    let (channel, guards_end) = Channel::pair().map_err(failed("making its socket"))?;
    match kernel::fork_alone().map_err(failed("forking"))? {
        Some(pid) => Ok(Guard { pid, channel }),
        None => {
            drop(channel);
            // A panic must not unwind into the agent's code, of which this process is a copy. However the guard ends,
            // PDEATHSIG ends the workers, and the agent sees that the guard is gone.
            let outcome = std::panic::catch_unwind(AssertUnwindSafe(|| be_the_guard(guards_end)));
            kernel::exit_now(if matches!(outcome, Ok(Ok(()))) { 0 } else { 1 })
        }
    }
}

fn be_the_guard(channel: Channel) -> io::Result<()> {
    kernel::close_others(channel.as_raw_fd());
    kernel::block_signals(true)?;
    kernel::reset_dispositions();
    // The guard leaves the terminal, because Ctrl-C there is for the agent to act on.
    rustix::process::setsid()?;
    rustix::process::set_child_subreaper(Some(rustix::process::getpid()))?;
    rustix::thread::set_name(c"elastic-guard")?;
    keeper::run(channel)
}
