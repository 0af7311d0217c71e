//! What processes and threads cost the machine.

use std::time::Duration;

use anyhow::{Context, Result};

/// How long a thread, by its folder in `/proc`, has been on a processor.
fn on_a_processor(task: &str) -> Result<Duration> {
    let stat = std::fs::read_to_string(format!("{task}/schedstat"))?;
    let nanos = stat.split_whitespace().next().context("a number")?.parse()?;
    Ok(Duration::from_nanos(nanos))
}

/// How long a thread of this process has been on a processor.
///
/// # Errors
/// There is no such thread.
pub fn thread(id: i32) -> Result<Duration> {
    on_a_processor(&format!("/proc/self/task/{id}"))
}

/// How long the threads of a process that are still there have been on a processor. `pid`: a number, or `self`.
///
/// # Errors
/// There is no such process.
pub fn process(pid: &str) -> Result<Duration> {
    let mut sum = Duration::ZERO;
    for task in std::fs::read_dir(format!("/proc/{pid}/task"))? {
        // One that has just ended counts no more.
        sum += on_a_processor(&task?.path().to_string_lossy()).unwrap_or_default();
    }
    Ok(sum)
}

/// Kilobytes that a process has in memory, its part of what it shares with others among them. `pid`: as above.
///
/// # Errors
/// There is no such process.
pub fn memory_kb(pid: &str) -> Result<u64> {
    let memory = std::fs::read_to_string(format!("/proc/{pid}/smaps_rollup"))?;
    let memory = memory.lines().find_map(|line| line.strip_prefix("Pss:")).context("Pss")?;
    Ok(memory.trim().trim_end_matches(" kB").parse()?)
}
