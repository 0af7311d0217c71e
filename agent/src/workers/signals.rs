//! The signals that make an agent leave its job: `--signals-to-handle`.

use std::fmt;
use std::task::Poll;
use std::time::Duration;

use anyhow::Context;
use rustix::process::Signal;
use tokio::signal::unix::{SignalKind, signal};
use tokio::time::Instant;

use crate::guard::{Exit, signal_name, tree};
use crate::machine::field;

/// torchrun's default.
const DEFAULT: &str = "SIGTERM,SIGINT,SIGHUP,SIGQUIT";

/// Signals that a process must not handle, although they have a name: the kernel's own, a child's end, and errors of
/// this program itself.
const NOT_TO_HANDLE: [i32; 8] = [
    libc::SIGKILL,
    libc::SIGSTOP,
    libc::SIGCHLD,
    libc::SIGILL,
    libc::SIGTRAP,
    libc::SIGBUS,
    libc::SIGFPE,
    libc::SIGSEGV,
];

/// Signals that `nohup`, and shells for commands started with `&`, set to be ignored, so that the command survives
/// them.
const LEFT_ALONE: [i32; 3] = [libc::SIGHUP, libc::SIGINT, libc::SIGQUIT];

/// How long signals that make the agent leave are one request. `uv run`, a batch script that forwards its signal, and
/// systemd's `SendSIGHUP` send two for one stop.
const ONE_REQUEST: Duration = Duration::from_secs(3);

/// Signals that are for workers. Slurm's `--signal=USR1@60` sends one to all processes of a step. The agent neither dies
/// of it nor passes it on, because the workers have it already.
const FOR_WORKERS: [Signal; 2] = [Signal::USR1, Signal::USR2];

/// The kernel sends this where a write would pass `ulimit -f`. Handled, the write fails instead, and the agent lives.
const LIMIT: Signal = Signal::XFSZ;

/// A signal that makes the agent leave. Its workers are stopped with the same signal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Handled(pub Signal);

impl fmt::Display for Handled {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(signal_name(self.0.as_raw()).unwrap_or("a signal"))
    }
}

/// Parses a list of names, `SIGTERM,SIGUSR1`. Like torchrun, this skips each signal that it cannot handle, with a
/// warning.
pub(crate) fn parse(list: &str) -> (Vec<Handled>, Vec<String>) {
    let (mut handled, mut warnings) = (Vec::new(), Vec::new());
    for name in list.split(',').map(str::trim).filter(|name| !name.is_empty()) {
        let number = (1..32).find(|number| signal_name(*number) == Some(name));
        let named = number.filter(|number| !NOT_TO_HANDLE.contains(number)).and_then(Signal::from_named_raw);
        match named.map(Handled) {
            Some(signal) if handled.contains(&signal) => {}
            Some(signal) => handled.push(signal),
            None => {
                let why = if number.is_some() { "no program can handle it" } else { "there is no such signal" };
                warnings.push(format!("--signals-to-handle: ignoring {}: {why}", name.escape_default()));
            }
        }
    }
    (handled, warnings)
}

/// The signals to handle if the user named none: torchrun's, without those that this process was started to ignore.
pub(crate) fn usual() -> Vec<Handled> {
    // Without /proc no signal counts as ignored. The agent then ends a little later, and says why.
    let status = tree::text("/proc/self/status").unwrap_or_default();
    let ignored = ignored(&status);
    parse(DEFAULT).0.into_iter().filter(|signal| !ignored.contains(&signal.0.as_raw())).collect()
}

/// The signals among [`LEFT_ALONE`] that a process ignores, by its `/proc/<pid>/status`.
fn ignored(status: &str) -> Vec<i32> {
    let mask = field(status, "SigIgn").and_then(|mask| u64::from_str_radix(mask, 16).ok()).unwrap_or(0);
    LEFT_ALONE.into_iter().filter(|signal| mask >> (signal - 1) & 1 == 1).collect()
}

/// Whether a process other than the agent asked a worker to stop. This is so if the worker was ended by a signal that
/// would make the agent leave, or that asks most programs to stop.
pub(crate) fn asks_to_stop(exit: Exit, handled: &[Handled]) -> bool {
    let usual = [libc::SIGTERM, libc::SIGINT, libc::SIGHUP, libc::SIGQUIT];
    let asks = |signal| usual.contains(&signal) || handled.iter().any(|handled| handled.0.as_raw() == signal);
    matches!(exit, Exit::Signal { signal, .. } if asks(signal))
}

/// Whether a signal at `now` is a request of its own, and not part of the last one, which came at `last`.
fn is_new(last: Option<Instant>, now: Instant) -> bool {
    last.is_none_or(|last| now.saturating_duration_since(last) >= ONE_REQUEST)
}

/// The signals that this process handles.
pub(crate) struct Signals {
    leave: Vec<(Handled, tokio::signal::unix::Signal)>,
    /// Those of [`FOR_WORKERS`] that do not make the agent leave, and [`LIMIT`].
    passed_over: Vec<(Handled, tokio::signal::unix::Signal)>,
    /// When the last request to leave came.
    last: Option<Instant>,
}

impl Signals {
    /// Replaces the default action of `leave`, and of the signals that are for workers. Must be called within a tokio
    /// runtime. Fails if the system refuses a handler.
    pub(crate) fn watch(leave: &[Handled]) -> anyhow::Result<Signals> {
        let stream = |handled: Handled| {
            let stream = signal(SignalKind::from_raw(handled.0.as_raw()));
            Ok((handled, stream.with_context(|| format!("watch for {handled}"))?))
        };
        let passed_over = FOR_WORKERS.into_iter().chain([LIMIT]).map(Handled).filter(|signal| !leave.contains(signal));
        Ok(Signals {
            passed_over: passed_over.map(stream).collect::<anyhow::Result<_>>()?,
            leave: leave.iter().copied().map(stream).collect::<anyhow::Result<_>>()?,
            last: None,
        })
    }

    /// Waits for the next request to leave. Signals within [`ONE_REQUEST`] are one. The wait may be cancelled.
    pub(crate) async fn next(&mut self) -> Handled {
        std::future::poll_fn(|context| {
            for (signal, stream) in &mut self.passed_over {
                while stream.poll_recv(context).is_ready() {
                    if signal.0 == LIMIT {
                        tracing::warn!("a file has reached the largest size that ulimit -f allows: its text is cut");
                    } else {
                        tracing::info!(
                            "{signal} is for the workers: this node stays, unless --signals-to-handle names it"
                        );
                    }
                }
            }
            for (handled, stream) in &mut self.leave {
                while stream.poll_recv(context).is_ready() {
                    let now = Instant::now();
                    if is_new(self.last, now) {
                        self.last = Some(now);
                        return Poll::Ready(*handled);
                    }
                    tracing::info!("{handled} too, within {ONE_REQUEST:?}: the same request");
                }
            }
            Poll::Pending
        })
        .await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_signals_within_three_seconds_are_one_request() {
        let first = Instant::now();
        assert!(is_new(None, first));
        for (later, new) in [(0, false), (5, false), (2999, false), (3000, true), (60_000, true)] {
            assert_eq!(is_new(Some(first), first + Duration::from_millis(later)), new, "{later} ms");
        }
    }

    #[test]
    fn of_what_is_ignored_only_what_nohup_and_shells_ignore_counts() {
        let status = |mask: &str| format!("Name:\tx\nSigBlk:\tffffffffffffffff\nSigIgn:\t{mask}\nSigCgt:\t0\n");
        assert_eq!(ignored(&status("0000000000001000")), [0; 0], "SIGPIPE, as in every program of Rust");
        assert_eq!(ignored(&status("0000000000005007")), [libc::SIGHUP, libc::SIGINT, libc::SIGQUIT], "and SIGTERM");
        assert_eq!(ignored(""), [0; 0]);
    }

    #[test]
    fn names_that_cannot_be_handled_are_passed_over_with_a_word() {
        let (handled, warnings) = parse("SIGTERM, SIGUSR1,SIGBOGUS,SIGKILL,SIGUSR1,,");
        assert_eq!(handled, [Handled(Signal::TERM), Handled(Signal::USR1)]);
        assert_eq!(warnings.len(), 2, "{warnings:?}");
        assert!(warnings[0].contains("ignoring SIGBOGUS: there is no such signal"), "{warnings:?}");
        assert!(warnings[1].contains("ignoring SIGKILL: no program can handle it"), "{warnings:?}");
        let asked = |signal| asks_to_stop(Exit::Signal { signal, core_dumped: false }, &handled);
        assert!(asked(libc::SIGUSR1) && asked(libc::SIGQUIT), "what makes the agent leave, and what usually would");
        assert!(!asked(libc::SIGUSR2) && !asked(libc::SIGKILL) && !asks_to_stop(Exit::Code(143), &handled));
        let (usual, none) = parse(DEFAULT);
        assert_eq!(usual.iter().map(ToString::to_string).collect::<Vec<_>>().join(","), DEFAULT);
        assert_eq!(none, [""; 0]);
    }
}
