//! The guard: a tiny process that starts the workers for the agent and outlives it just long enough to end them.
//! Rounds, graces and logs are the agent's.
//!
//! ```text
//! elastic-agent ─────────────── subreaper of last resort; starts the guard: this program, executed again
//!  └─ elastic-guard ─────────── own session, every signal blocked, subreaper
//!      ├─ worker 0 ──────────── own session; PR_SET_PDEATHSIG = SIGKILL, so it dies with the guard
//!      │   └─ loader
//!      ├─ worker 1
//!      ├─ nursery ─────────── with `--preload`: has imported modules, and forks later workers, which become the guard's
//!      └─ stray ─────────────── left by a worker that died, in whatever session: reparents to the guard
//! ```
//!
//! | what ends | what follows |
//! |---|---|
//! | a worker | SIGCHLD wakes the guard, which tells the agent at once |
//! | the agent, in any way | the socket ends, and the guard sends SIGKILL to the whole tree |
//! | the agent's time (frozen, store lost) | the deadline passes on CLOCK_BOOTTIME: SIGKILL to the whole tree |
//! | the nursery, or its time | the guard starts workers itself, as without it |
//! | the guard's time (frozen) | it confirms no kill for a second, so the agent kills it and all that is below it |
//! | the guard | PDEATHSIG ends the workers; the agent adopts and ends what they started, and reports the loss |
//! | both at once | PDEATHSIG ends the workers; a stray in its own session survives |
//!
//! When the guard has reaped the last process, the held descriptors (listening socket, lock files) close. So a refused
//! connection proves that the tree is gone. CLOCK_BOOTTIME counts the time in suspend too. Only a cgroup or a container
//! can end a stray that outlived both.
//!
//! The guard forks the workers itself, for two reasons. Only descendants of the subreaper reparent to it. And PDEATHSIG
//! follows the *thread* that forked: the guard's first thread, which never ends before the guard. (A preloaded library
//! may start others.)
//!
//! To know that nothing is left, the guard needs no list of processes. A subreaper without children has no descendants,
//! so ECHILD from `waitpid` is the proof. Only processes that remain after their group was signalled are searched for
//! in /proc. A stop passes the nursery over. While it lives, the proof is that the guard has no other child and the
//! nursery has none, with no order open: see `nursery.rs`. A kill ends it too, and its proof is ECHILD.
//!
//! The stop signal reaches each process of the workers' groups, except helpers that a worker needs to save: see
//! `helpers.rs`. A signal to one worker reaches its process group, even after the worker itself has died. Processes that
//! a worker put into other groups or sessions look like another worker's. So they are ended only when all workers are
//! stopped.
//!
//! A process may be impossible to end: the kernel does not let it die (an unresponsive device or file system), or it
//! changed to a user whom the guard may not signal. Such a process keeps the guard waiting, and the guard keeps the
//! held descriptors. The process is *not* gone, and saying that it is would let a second group run at the same time.

mod deadline;
mod exit;
mod helpers;
mod keeper;
mod kernel;
mod nursery;
pub(crate) mod tree;
pub(crate) mod wire;

use std::ffi::OsString;
use std::io::{self, Write};
use std::os::fd::AsRawFd;
use std::os::unix::process::CommandExt;
use std::process::{Command, ExitCode};

use rustix::io::FdFlags;
use rustix::process::Pid;

pub use exit::Exit;
pub(crate) use exit::signal_name;

use wire::Channel;

/// The guard's name in lists of processes. This program is a guard if it is started under it.
const NAME: &str = "elastic-guard";

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

/// Starts the guard: this program again, which must call [`serve`] first. Call it before anything that the workers
/// should not inherit, such as a raised limit.
///
/// The agent becomes a subreaper too, and SIGCHLD gets its default action. Fails when /proc is not mounted, or the
/// system has no room for a process.
pub fn start() -> Result<Guard, GuardError> {
    let failed = |step| move |cause: io::Error| GuardError { step, cause };
    kernel::reset_child_disposition();
    rustix::process::set_child_subreaper(Some(rustix::process::getpid()))
        .map_err(|e| failed("becoming a subreaper")(e.into()))?;
    let (channel, guards_end) = Channel::pair().map_err(failed("making its socket"))?;
    rustix::io::fcntl_setfd(&guards_end, FdFlags::empty()).map_err(|e| failed("handing down its socket")(e.into()))?;
    let mut command = Command::new("/proc/self/exe");
    command.arg0(NAME).arg(guards_end.as_raw_fd().to_string());
    // No signal may end the guard before it can block them.
    let guard = kernel::with_signals_blocked(|| command.spawn()).map_err(failed("executing this program again"))?;
    let pid = i32::try_from(guard.id()).ok().and_then(Pid::from_raw);
    let pid = pid.ok_or_else(|| failed("executing this program again")(io::ErrorKind::InvalidData.into()))?;
    Ok(Guard { pid, channel })
}

/// Serves the agent if this process was started as a guard, and returns its exit code. Call it first in `main`.
#[must_use]
pub fn serve() -> Option<ExitCode> {
    let mut arguments = std::env::args_os();
    if arguments.next()? != NAME {
        return None;
    }
    // However the guard ends, PDEATHSIG ends the workers, and the agent sees that the guard is gone.
    Some(match be_the_guard(arguments.next()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let _ = writeln!(io::stderr(), "{NAME}: {error}");
            ExitCode::FAILURE
        }
    })
}

fn be_the_guard(socket: Option<OsString>) -> io::Result<()> {
    let number = socket.and_then(|number| number.to_str()?.parse().ok());
    let number =
        number.ok_or_else(|| io::Error::other("elastic-agent starts this; there is nothing to start by hand"))?;
    let channel = Channel::from(kernel::inherited(number)?);
    kernel::close_others(number);
    kernel::reset_dispositions();
    // The guard leaves the terminal, because Ctrl-C there is for the agent to act on.
    rustix::process::setsid()?;
    rustix::process::set_child_subreaper(Some(rustix::process::getpid()))?;
    rustix::thread::set_name(c"elastic-guard")?;
    keeper::run(channel)
}
