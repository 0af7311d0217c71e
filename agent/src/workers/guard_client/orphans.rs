//! What the agent does when its guard dies: it ends and reaps the orphaned processes that reparent to it. While the
//! guard lives, this is the guard's task.

use std::time::Duration;

use rustix::process::{Pid, PidfdFlags, Signal, WaitOptions};

use crate::guard::Exit;
use crate::guard::tree::{self, Process};

use super::watch;

/// How long to wait for processes that survive SIGKILL.
const PATIENCE: Duration = Duration::from_secs(5);

/// Reaps the guard, then ends all processes that its workers left. Returns how the guard ended, and which processes
/// survive.
pub(super) async fn clear(guard: Pid) -> (String, Vec<String>) {
    let cause = match wait_for(guard).await {
        Some(exit) => format!("the guard process (pid {}) ended by {exit}", guard.as_raw_pid()),
        None => format!("the guard process (pid {}) is gone", guard.as_raw_pid()),
    };
    let cleared = tokio::time::timeout(PATIENCE, async {
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
    });
    let survivors = if cleared.await.is_ok() { Vec::new() } else { describe(&strays()) };
    (cause, survivors)
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
    if let Ok(handle) = rustix::process::pidfd_open(pid, PidfdFlags::NONBLOCK)
        && let Ok(handle) = watch::readable(handle)
    {
        let _ = handle.readable().await;
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
