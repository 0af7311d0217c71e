//! Process 1 of a container inherits every orphan there, as those of `docker exec`, and must reap it. An agent may be
//! process 1.

use std::collections::BTreeMap;
use std::time::Duration;

use rustix::process::{Pid, WaitOptions};
use tokio::signal::unix::{SignalKind, signal};

use crate::guard::tree::{self, Process};

/// The pause between looks at dead processes, and how many looks find those that are not waited for. The agent waits for
/// each program that it started, so it reaps these long before.
const LOOK: Duration = Duration::from_millis(50);
const LOOKS: u32 = 5;

/// Reaps the dead children of this process that nothing here waits for, and not the guard. Never ends.
pub(super) async fn reap(guard: Pid) {
    let Ok(mut ended) = signal(SignalKind::child()) else { return };
    loop {
        let mut seen = BTreeMap::new();
        loop {
            seen = look(&seen, guard);
            if seen.is_empty() {
                break;
            }
            tokio::time::sleep(LOOK).await;
        }
        ended.recv().await;
    }
}

/// How often each dead child was seen, this look included. Reaps those that were seen often enough.
fn look(seen: &BTreeMap<i32, u32>, guard: Pid) -> BTreeMap<i32, u32> {
    let me = rustix::process::getpid();
    let below = tree::descendants(me).unwrap_or_default();
    let dead = below.iter().filter(|process| process.parent == me.as_raw_pid() && process.is_zombie());
    let mut left = BTreeMap::new();
    for Process { pid, .. } in dead.filter(|process| process.pid != guard) {
        let looks = seen.get(&pid.as_raw_pid()).map_or(1, |looks| looks + 1);
        if looks < LOOKS {
            left.insert(pid.as_raw_pid(), looks);
        } else {
            // If this fails, it was reaped meanwhile.
            let _ = rustix::process::waitpid(Some(*pid), WaitOptions::NOHANG);
        }
    }
    left
}
