//! Finding every process that descends from an agent, whichever process is its parent by now.

use std::fs;

/// The variable that tells whose descendant a process is: children inherit it, orphans keep it.
pub(crate) const MARK: &str = "ELASTIC_DEMO";

/// The ids of all live processes whose mark begins with `mark`.
pub(crate) fn marked(mark: &str) -> Vec<u32> {
    let wanted = format!("{MARK}={mark}");
    let is_marked = |pid: &u32| {
        // Another user's environment cannot be read, and a zombie has none.
        let environment = fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
        environment.split(|&byte| byte == 0).any(|variable| variable.starts_with(wanted.as_bytes()))
    };
    let processes = fs::read_dir("/proc").into_iter().flatten().flatten();
    processes.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).filter(is_marked).collect()
}

/// Whether `pid` is an agent's guard. It ends last: a moment after it let go of the agent's port.
pub(crate) fn is_guard(pid: u32) -> bool {
    fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|name| name.trim_end() == "elastic-guard")
}
