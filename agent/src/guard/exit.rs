//! How a process ended.

use std::fmt;

use rustix::process::WaitStatus;
use serde::{Deserialize, Serialize};

/// How a worker ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Exit {
    /// It exited by itself, with this code.
    Code(i32),
    /// A signal ended it.
    Signal {
        /// The signal's number.
        signal: i32,
        /// Whether it left a core dump.
        core_dumped: bool,
    },
}

impl Exit {
    /// Whether it exited with code 0.
    pub fn success(self) -> bool {
        self == Exit::Code(0)
    }

    /// The exit code, or the signal's number negated. This is the number that torchrun's reports show.
    pub fn number(self) -> i32 {
        match self {
            Exit::Code(code) => code,
            Exit::Signal { signal, .. } => -signal,
        }
    }

    pub(crate) fn from_wait(status: WaitStatus) -> Option<Exit> {
        match (status.exit_status(), status.terminating_signal()) {
            (Some(code), _) => Some(Exit::Code(code)),
            // The flag is bit 7 of the number that wait(2) returns. rustix has no name for it.
            (None, Some(signal)) => Some(Exit::Signal { signal, core_dumped: status.as_raw() & 0x80 != 0 }),
            (None, None) => None,
        }
    }
}

impl fmt::Display for Exit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Exit::Code(code) => write!(f, "exit code {code}"),
            Exit::Signal { signal, core_dumped } => {
                match signal_name(signal) {
                    Some(name) => write!(f, "signal {signal} ({name})")?,
                    None => write!(f, "signal {signal}")?,
                }
                if core_dumped { f.write_str(", core dumped") } else { Ok(()) }
            }
        }
    }
}

/// A signal's name, such as `SIGTERM`. `None` for real-time signals and for numbers that are no signals.
pub(crate) fn signal_name(signal: i32) -> Option<&'static str> {
    let name = match signal {
        libc::SIGHUP => "SIGHUP",
        libc::SIGINT => "SIGINT",
        libc::SIGQUIT => "SIGQUIT",
        libc::SIGILL => "SIGILL",
        libc::SIGTRAP => "SIGTRAP",
        libc::SIGABRT => "SIGABRT",
        libc::SIGBUS => "SIGBUS",
        libc::SIGFPE => "SIGFPE",
        libc::SIGKILL => "SIGKILL",
        libc::SIGUSR1 => "SIGUSR1",
        libc::SIGSEGV => "SIGSEGV",
        libc::SIGUSR2 => "SIGUSR2",
        libc::SIGPIPE => "SIGPIPE",
        libc::SIGALRM => "SIGALRM",
        libc::SIGTERM => "SIGTERM",
        libc::SIGSTKFLT => "SIGSTKFLT",
        libc::SIGCHLD => "SIGCHLD",
        libc::SIGCONT => "SIGCONT",
        libc::SIGSTOP => "SIGSTOP",
        libc::SIGTSTP => "SIGTSTP",
        libc::SIGTTIN => "SIGTTIN",
        libc::SIGTTOU => "SIGTTOU",
        libc::SIGURG => "SIGURG",
        libc::SIGXCPU => "SIGXCPU",
        libc::SIGXFSZ => "SIGXFSZ",
        libc::SIGVTALRM => "SIGVTALRM",
        libc::SIGPROF => "SIGPROF",
        libc::SIGWINCH => "SIGWINCH",
        libc::SIGIO => "SIGIO",
        libc::SIGPWR => "SIGPWR",
        libc::SIGSYS => "SIGSYS",
        _ => return None,
    };
    Some(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_exit_reads_like_a_sentence_and_counts_like_torchrun() {
        assert_eq!(Exit::Code(7).to_string(), "exit code 7");
        let killed = Exit::Signal { signal: libc::SIGSEGV, core_dumped: true };
        assert_eq!(killed.to_string(), "signal 11 (SIGSEGV), core dumped");
        assert_eq!((Exit::Code(7).number(), killed.number()), (7, -11));
        assert!(Exit::Code(0).success() && !killed.success());
    }
}
