//! Which processes of a worker are spared the stop signal: helpers of a program that saves when it gets the signal.
//! DataLoader's and ProcessPoolExecutor's are such. If they died of the signal, the save would fail.
//!
//! A process is a helper if its parent handles the signal and both run the same program, in one of two ways:
//!
//! - It is a fork of its parent that executed nothing. A shell's fork is none: a subshell runs others' programs.
//! - Its command line is that of Python's multiprocessing, or of joblib's loky.
//!
//! What a helper started is spared with it. All others get the signal, so that it reaches a script below a launch
//! script, a pipe or a Python that starts Python.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::PathBuf;

use rustix::process::Signal;

use super::tree::{self, Process};

/// Programs whose forks are no helpers.
const SHELLS: [&str; 9] = ["ash", "bash", "busybox", "dash", "fish", "ksh", "mksh", "sh", "zsh"];

/// What /proc tells of a process, apart from its place in the tree.
#[derive(Debug, Clone, Default)]
struct About {
    /// The signals that it catches or blocks: bit n is signal n + 1.
    handled: u64,
    /// The file that it executes. `None` if this process may not know.
    program: Option<PathBuf>,
}

impl About {
    fn read(process: &Process) -> About {
        let pid = process.pid.as_raw_pid();
        let status = tree::text(format!("/proc/{pid}/status")).unwrap_or_default();
        About { handled: handled(&status), program: fs::read_link(format!("/proc/{pid}/exe")).ok() }
    }

    fn handles(&self, signal: Signal) -> bool {
        self.handled >> (signal.as_raw() - 1) & 1 == 1
    }

    fn is_shell(&self) -> bool {
        let name = self.program.as_deref().and_then(|program| program.file_name());
        name.is_some_and(|name| SHELLS.iter().any(|shell| name == *shell))
    }
}

/// The signals that a process catches or blocks, by its `/proc/<pid>/status`.
fn handled(status: &str) -> u64 {
    let mask = |line: &str| {
        let mask = line.strip_prefix("SigCgt:").or_else(|| line.strip_prefix("SigBlk:"))?;
        u64::from_str_radix(mask.trim(), 16).ok()
    };
    status.lines().filter_map(mask).fold(0, |all, mask| all | mask)
}

/// A process's command line, each argument ended by NUL.
fn command(process: &Process) -> Vec<u8> {
    // Reading waits for a lock that a process may hold while it waits for a disk. The guard must not wait.
    let waits = process.state == 'D';
    if waits { Vec::new() } else { fs::read(format!("/proc/{}/cmdline", process.pid.as_raw_pid())).unwrap_or_default() }
}

/// Whether a command line is that of a process which a library started to compute for the process that started it.
fn is_of_a_pool(command: &[u8]) -> bool {
    command.split(|byte| *byte == 0).any(|argument| {
        argument == b"--multiprocessing-fork"
            || argument.starts_with(b"from multiprocessing.")
            || argument.starts_with(b"from joblib.externals.loky.")
            || argument.starts_with(b"joblib.externals.loky.")
    })
}

/// The processes that are spared `signal`, of those below the guard. Each parent is listed before its children.
pub(super) fn spared(below: &[Process], signal: Signal) -> BTreeSet<i32> {
    choose(below, signal, About::read, command)
}

fn choose(
    below: &[Process],
    signal: Signal,
    about: impl Fn(&Process) -> About,
    command: impl Fn(&Process) -> Vec<u8>,
) -> BTreeSet<i32> {
    let mut spared = BTreeSet::new();
    let mut known: BTreeMap<i32, (&Process, Option<About>)> = BTreeMap::new();
    for child in below {
        if let Some((parent, of_parent)) = known.get_mut(&child.parent) {
            let of_parent = of_parent.get_or_insert_with(|| about(parent));
            let is_helper = || {
                let forked = child.stack == parent.stack && child.stack != 0 && !of_parent.is_shell();
                let same = of_parent.program.is_some() && about(child).program == of_parent.program;
                same && (forked || is_of_a_pool(&command(child)))
            };
            if spared.contains(&child.parent) || of_parent.handles(signal) && is_helper() {
                spared.insert(child.pid.as_raw_pid());
            }
        }
        known.insert(child.pid.as_raw_pid(), (child, None));
    }
    spared
}

#[cfg(test)]
mod tests {
    use rustix::process::Pid;

    use super::*;

    /// A process: its id, its parent's, its stack, whether it catches SIGTERM, its program, its command line.
    type Row = (i32, i32, u64, bool, &'static str, &'static str);

    fn spared_of(rows: &[Row]) -> Vec<i32> {
        let process = |&(pid, parent, stack, ..): &Row| Process {
            pid: Pid::from_raw(pid).unwrap(),
            parent,
            group: 2,
            session: 2,
            state: 'S',
            name: String::new(),
            started: 0,
            stack,
        };
        let row = |process: &Process| rows.iter().find(|row| row.0 == process.pid.as_raw_pid()).unwrap();
        let about = |process: &Process| {
            let row = row(process);
            About { handled: u64::from(row.3) << 14, program: Some(row.4.into()).filter(|_| row.4 != "?") }
        };
        let command = |process: &Process| row(process).5.replace(' ', "\0").into_bytes();
        let below: Vec<Process> = rows.iter().map(process).collect();
        choose(&below, Signal::TERM, about, command).into_iter().collect()
    }

    const PYTHON: &str = "/usr/bin/python3.11";
    const BASH: &str = "/usr/bin/bash";

    #[test]
    fn forks_of_a_program_that_handles_the_signal_are_spared_with_all_below_them() {
        let loaders = [
            (2, 1, 70, true, PYTHON, "python s.py"),
            (3, 2, 70, true, PYTHON, "python s.py"),
            (4, 2, 70, false, PYTHON, "python s.py"),
            (5, 4, 81, false, "/usr/bin/ffmpeg", "ffmpeg in"),
        ];
        assert_eq!(spared_of(&loaders), [3, 4, 5]);
        let unaware = [(2, 1, 70, false, PYTHON, "python s.py"), (3, 2, 70, false, PYTHON, "python s.py")];
        assert_eq!(spared_of(&unaware), [0; 0], "it dies of the signal, and needs no helpers");
        let hidden = [(2, 1, 0, true, PYTHON, "python s.py"), (3, 2, 0, true, PYTHON, "python s.py")];
        assert_eq!(spared_of(&hidden), [0; 0], "the kernel tells no stacks");
        let foreign = [(2, 1, 70, true, "?", "python s.py"), (3, 2, 70, true, "?", "python s.py")];
        assert_eq!(spared_of(&foreign), [0; 0], "the kernel tells no programs");
    }

    #[test]
    fn processes_that_multiprocessing_starts_are_spared() {
        let spawned = "python -c from\u{a0}x --multiprocessing-fork";
        let pool = [
            (2, 1, 70, true, PYTHON, "python s.py"),
            (3, 2, 71, false, PYTHON, spawned),
            (4, 2, 72, true, "/usr/bin/python3.12", spawned),
            (5, 2, 73, false, PYTHON, "python -m joblib.externals.loky.backend.popen_loky_posix"),
        ];
        assert_eq!(spared_of(&pool), [3, 5], "and not what another program started so");
        assert!(is_of_a_pool(b"python\0-c\0from multiprocessing.resource_tracker import main;main(5)\0"));
        assert!(is_of_a_pool(b"python\0-c\0from multiprocessing.forkserver import main; main(9)\0"));
        assert!(!is_of_a_pool(b"python\0train.py\0--note\0not from multiprocessing.\0"));
    }

    #[test]
    fn the_signal_reaches_the_script_below_whatever_started_it() {
        let pipe = [
            (2, 1, 60, false, BASH, "bash -c"),
            (3, 2, 70, true, PYTHON, "python s.py"),
            (4, 2, 90, false, "/usr/bin/tee", "tee log"),
            (5, 3, 70, true, PYTHON, "python s.py"),
        ];
        assert_eq!(spared_of(&pipe), [5]);
        let traps = [
            (2, 1, 60, true, BASH, "bash run.sh"),
            (3, 2, 60, false, BASH, "bash run.sh"),
            (4, 3, 70, true, PYTHON, "python s.py"),
        ];
        assert_eq!(spared_of(&traps), [0; 0], "a subshell passes it on, whether or not it has a trap");
        let launcher = [
            (2, 1, 69, true, PYTHON, "python launch.py"),
            (3, 2, 70, true, PYTHON, "python s.py"),
            (4, 3, 70, true, PYTHON, "python s.py"),
        ];
        assert_eq!(spared_of(&launcher), [4]);
    }

    #[test]
    fn what_is_caught_or_blocked_is_handled() {
        let status = "Name:\tx\nSigBlk:\t0000000000004000\nSigIgn:\t0000000000000001\nSigCgt:\t0000000000000002\n";
        let about = About { handled: handled(status), program: None };
        assert!(about.handles(Signal::TERM) && about.handles(Signal::INT) && !about.handles(Signal::HUP));
        assert!(!About { handled: handled(""), program: None }.handles(Signal::TERM));
    }
}
