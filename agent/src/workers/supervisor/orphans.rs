//! What is left to the agent when its guard dies: the strays that reparent to it, to be ended and reaped.
//! Not for a living guard's tree, which is the guard's.

use std::time::Duration;

use rustix::process::{Pid, PidfdFlags, Signal, WaitOptions};

use crate::guard::Exit;
use crate::guard::tree::{self, Process};

use super::watch;

/// How long to wait for processes that do not die of SIGKILL.
const PATIENCE: Duration = Duration::from_secs(5);

/// Reaps the guard, then ends all that its workers left. Returns how the guard ended, and what lives on.
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
                // What may not be signalled is found again and named in the end.
                let _ = stray.signal(Signal::KILL);
            }
            for stray in &strays {
                wait_for(stray.pid).await;
            }
            // A dead process whose parent is dying too stays listed until we inherit it.
            tokio::task::yield_now().await;
        }
    });
    let survivors = if cleared.await.is_ok() { Vec::new() } else { describe(&strays()) };
    (cause, survivors)
}

/// What workers started, now below the agent. Workers have sessions of their own, and no process returns to a session
/// that it left; what the agent itself started for other ends shares its session.
fn strays() -> Vec<Process> {
    let me = rustix::process::getpid();
    let mine = tree::session(me);
    let below = tree::descendants(me).unwrap_or_default();
    below.into_iter().filter(|process| Some(process.session) != mine).collect()
}

/// Waits until a process is dead and, if it is our child, reaps it. `None` if it is not, or was gone.
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

/// One phrase for each process, for people.
pub(super) fn describe(processes: &[Process]) -> Vec<String> {
    let living = processes.iter().filter(|process| !process.is_zombie());
    living.map(|p| format!("pid {} ({}, state {})", p.pid.as_raw_pid(), p.name, p.state)).collect()
}
