//! What the agent does when its guard dies: it ends and reaps the orphaned processes that reparent to it. While the
//! guard lives, this is the guard's task.

use std::time::Duration;

use rustix::process::{Pid, PidfdFlags, Signal, WaitOptions};
use tokio::time::{Instant, timeout_at};

use crate::guard::Exit;
use crate::guard::tree::{self, Process};

use super::watch;

/// How long to wait for processes that survive SIGKILL.
pub(super) const PATIENCE: Duration = Duration::from_secs(5);

/// How often to look at a process that the kernel gives no handle of.
const LOOK: Duration = Duration::from_millis(10);

/// Waits for the guard's end until this time, and returns how it ended.
pub(super) async fn end_of(guard: Pid, until: Instant) -> String {
    let pid = guard.as_raw_pid();
    match timeout_at(until, wait_for(guard)).await {
        Ok(Some(exit)) => format!("the guard process (pid {pid}) ended by {exit}"),
        Ok(None) => format!("the guard process (pid {pid}) is gone"),
        Err(_) => format!("the guard process (pid {pid}) is broken, and lives after SIGKILL"),
    }
}

/// Ends all processes that the workers left. Returns those that live at `until`.
pub(super) async fn clear(until: Instant) -> Vec<String> {
    if timeout_at(until, end_all()).await.is_ok() { Vec::new() } else { describe(&strays()) }
}

/// Ends all processes that the workers left, however long this takes.
pub(super) async fn end_all() {
    loop {
        let strays = strays();
        if strays.is_empty() {
            return;
        }
        for stray in &strays {
            // A process that may not be signalled is found again and named in the end.
            let _ = stray.signal(Signal::KILL);
        }
        for stray in &strays {
            wait_for(stray.pid).await;
        }
        // A dead process whose parent is also dying stays listed until this agent inherits it.
        tokio::task::yield_now().await;
    }
}

/// Processes that workers started and that are now below the agent. Workers have sessions of their own, and a process
/// cannot return to a session that it left. Processes that the agent started for other purposes are in the agent's
/// session.
fn strays() -> Vec<Process> {
    let me = rustix::process::getpid();
    let mine = tree::session(me);
    let below = tree::descendants(me).unwrap_or_default();
    below.into_iter().filter(|process| Some(process.session) != mine).collect()
}

/// Waits until a process is dead, and reaps it if it is our child. `None` if it is not our child, or if it was already
/// gone.
pub(super) async fn wait_for(pid: Pid) -> Option<Exit> {
    match rustix::process::pidfd_open(pid, PidfdFlags::NONBLOCK).map(watch::readable) {
        Ok(Ok(handle)) => drop(handle.readable().await),
        // An old kernel or a sandbox has no pidfds.
        _ => {
            while tree::process(pid).is_some_and(|process| !process.is_zombie()) {
                tokio::time::sleep(LOOK).await;
            }
        }
    }
    match rustix::process::waitpid(Some(pid), WaitOptions::NOHANG) {
        Ok(Some((_, status))) => Exit::from_wait(status),
        _ => None,
    }
}

/// Describes each process in one phrase, for people.
pub(super) fn describe(processes: &[Process]) -> Vec<String> {
    let living = processes.iter().filter(|process| !process.is_zombie());
    living.map(|p| format!("pid {} ({}, state {})", p.pid.as_raw_pid(), p.name, p.state)).collect()
}
