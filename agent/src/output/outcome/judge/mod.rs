//! What a worker's end means: the failure's class, its message, and what killed the worker. Pure: the caller gathers
//! what the worker left behind.

use elastic_proto::worker::FailureClass as Blame;
use elastic_rendezvous::job::{Failure, FailureClass, Killer, Killing};

use crate::guard::{Exit, signal_name};

use super::recorded::Recorded;
use crate::machine::out_of_memory::Victims;

#[derive(Debug, Clone)]
pub(crate) struct Evidence {
    /// How it ended. It did not succeed, and the agent did not stop it.
    pub exit: Exit,
    /// The class and message that it told the agent over the socket.
    pub told: Option<(Blame, String)>,
    pub recorded: Option<Recorded>,
    pub stderr: Vec<String>,
    /// The out-of-memory killer's victims when the round began.
    pub before: Victims,
    /// The same at the worker's end.
    pub after: Victims,
    /// Whether it was ended by a signal that asks programs to stop:
    /// [`asks_to_stop`](crate::workers::signals::asks_to_stop).
    pub asked_to_stop: bool,
}

/// The failure that follows from the evidence: class, message, exit, killer, traceback and last lines, within bounds.
/// The caller adds where it happened.
pub(crate) fn judge(evidence: &Evidence) -> Failure {
    let Evidence { exit, told, recorded, stderr, before, after, asked_to_stop } = evidence;
    let stderr: Vec<String> = stderr.iter().map(|line| printable(last_drawn(line))).collect();
    let killed_by = killing(*exit, before, after);
    let by = killed_by.as_ref().map(|killing| killing.by);
    // If a signal ended the program by surprise, the program's last line says what it was doing, not what happened.
    let surprised = matches!(exit, Exit::Signal { signal, .. } if *signal != libc::SIGABRT);
    let said = match (told, recorded) {
        (Some((_, message)), _) if !message.is_empty() => Some(message.clone()),
        (_, Some(recorded)) => Some(recorded.message.clone()),
        (_, None) if surprised => None,
        (_, None) => thrown(&stderr).or_else(|| last_word(&stderr, *exit)),
    };
    let message = match (&said, by) {
        (Some(said), _) => format!("{} ({exit})", first_line(&printable(said))),
        (None, Some(Killer::OomKiller)) => format!("killed by the kernel's out-of-memory killer ({exit})"),
        (None, Some(Killer::MaybeOomKiller)) => format!("perhaps killed by the kernel's out-of-memory killer ({exit})"),
        (None, Some(Killer::Outside)) => format!("{exit} from outside"),
        (None, _) => exit.to_string(),
    };
    let class = match (told, said) {
        (Some((Blame::Peer, _)), _) => FailureClass::Peer,
        (Some((Blame::Own | Blame::Permanent, _)), _) => FailureClass::Own,
        (None, Some(said)) if blames_a_peer(&said) => FailureClass::Peer,
        (None, _) if *asked_to_stop => FailureClass::Signalled,
        (None, _) => FailureClass::Own,
    };
    Failure {
        permanent: matches!(told, Some((Blame::Permanent, _))),
        exit_code: Some(exit.number()),
        core_dumped: matches!(exit, Exit::Signal { core_dumped: true, .. }),
        killed_by: killed_by.map(Box::new),
        traceback: recorded.as_ref().and_then(|recorded| recorded.traceback.as_deref()).map(printable_text),
        stderr,
        ..Failure::new(class, message)
    }
    .bounded()
}

/// Messages of gloo, NCCL and torch's store about a peer that is gone, for whatever reason. If a failure matches by
/// mistake, it is still judged, once every other member has given a sign of life.
const PEERS: &[&str] = &[
    "Connection closed by peer",
    "Connection reset by peer",
    "Application timeout caused pair closure",
    "ncclRemoteError",
    "remote process exited",
    "NCCL communicator was aborted",
    "failed to recv, got 0 bytes",
    "Watchdog caught collective operation timeout",
    "for recv operation to complete",
    "for send operation to complete",
];

fn blames_a_peer(message: &str) -> bool {
    PEERS.iter().any(|phrase| message.contains(phrase))
}

/// The cause of a worker's end, where its exit status does not say it.
fn killing(exit: Exit, before: &Victims, after: &Victims) -> Option<Killing> {
    let grown = match (&before.cgroup, &after.cgroup) {
        (Some((before, _)), Some((after, file))) => Some((after.saturating_sub(*before), file)),
        _ => None,
    };
    let signal = match exit {
        Exit::Signal { signal, .. } => signal,
        Exit::Code(_) => {
            let (more, file) = grown.filter(|(more, _)| *more > 0)?;
            let evidence = format!(
                "the kernel's out-of-memory killer took {more} other processes of this cgroup since the round began, \
                 perhaps children of this worker (oom_kill in {})",
                file.display()
            );
            return Some(Killing { by: Killer::OomKillerBeside, evidence });
        }
    };
    let name = signal_name(signal).unwrap_or("the signal");
    let (by, evidence) = match (signal, grown) {
        (libc::SIGKILL, Some((more @ 1.., file))) => (
            Killer::OomKiller,
            format!(
                "the kernel's out-of-memory killer: oom_kill in {} has grown by {more} since the round began",
                file.display()
            ),
        ),
        (libc::SIGKILL, None) if after.host > before.host => (
            Killer::MaybeOomKiller,
            "SIGKILL, not from the agent; perhaps the kernel's out-of-memory killer, which has taken processes on this \
             host since the round began (oom_kill in /proc/vmstat); the count of this cgroup cannot be read"
                .to_owned(),
        ),
        (libc::SIGKILL, counted) => {
            let killer = match counted {
                Some((_, file)) => format!("nor from the out-of-memory killer (oom_kill in {})", file.display()),
                None => "nor, it seems, from the out-of-memory killer".to_owned(),
            };
            (Killer::Outside, format!("SIGKILL, not from the agent, {killer}: from another process, or its own"))
        }
        (libc::SIGSEGV | libc::SIGBUS, _) => (Killer::Fault, format!("{name}: a bad memory access")),
        (libc::SIGILL | libc::SIGTRAP, _) => (Killer::Fault, format!("{name}: a bad instruction")),
        (libc::SIGFPE, _) => (Killer::Fault, format!("{name}: an arithmetic error")),
        (libc::SIGSYS, _) => (Killer::Fault, format!("{name}: a system call that is forbidden here")),
        (libc::SIGABRT, _) => (Killer::Fault, format!("{name}: the program gave up, by abort()")),
        (libc::SIGXCPU | libc::SIGXFSZ, _) => (Killer::Outside, format!("{name}: a limit set by ulimit was reached")),
        _ => (Killer::Outside, format!("{name}, not from the agent: from another process, or its own")),
    };
    Some(Killing { by, evidence })
}

const TRACEBACK: &str = "Traceback (most recent call last):";
const GROUP: &str = "Exception Group Traceback (most recent call last):";

/// What the program threw last: an exception of Python, a group of them, or a panic of Rust.
fn thrown(stderr: &[String]) -> Option<String> {
    let lines: Vec<&str> = stderr.iter().map(|line| without_ranks(line)).collect();
    lines.iter().enumerate().rev().find_map(|(at, line)| {
        let after = &lines[at + 1..];
        match line.trim_start().strip_prefix("+ ") {
            Some(GROUP) => exception_group(after),
            _ if *line == TRACEBACK => unindented(after.iter().copied()),
            _ => panic(line, after.first()?),
        }
    })
}

/// The first line that is not indented: after a traceback's frames, the exception.
fn unindented<'a>(mut lines: impl Iterator<Item = &'a str>) -> Option<String> {
    lines.find(|line| !line.is_empty() && !line.starts_with(char::is_whitespace)).map(str::to_owned)
}

/// A group of exceptions and the first one in it. Python draws a line at the left of a group's traceback.
fn exception_group(after: &[&str]) -> Option<String> {
    let lines = || after.iter().filter_map(|line| line.trim_start().strip_prefix("| "));
    let group = unindented(lines())?;
    let others = lines().skip_while(|line| *line != group).skip(1).filter(|line| !line.ends_with(TRACEBACK));
    Some(unindented(others).map_or_else(|| group.clone(), |first| format!("{group}, the first: {first}")))
}

/// A panic of Rust, which says where before it says what: `thread 'main' (7) panicked at src/main.rs:2:5:`.
fn panic(line: &str, message: &str) -> Option<String> {
    let place = line.strip_prefix("thread '")?.split_once(" panicked at ")?.1.strip_suffix(':')?;
    Some(format!("{message}, panicked at {place}"))
}

/// The last line, if it tells why the program ended: a line of a program that aborts, `sys.exit("text")`, which prints
/// the text and exits with 1, or a line that speaks of an error. Any other line is what the program was doing.
fn last_word(stderr: &[String], exit: Exit) -> Option<String> {
    let lines = stderr.iter().map(|line| without_ranks(line));
    let line = lines.rev().find(|line| !line.trim().is_empty() && !is_progress(line))?;
    let lower = line.to_lowercase();
    let explains = !matches!(exit, Exit::Code(code) if code != 1)
        || ["error", "fail", "fatal", "cannot", "can't", "not found", "no such", "invalid", "unable", "usage:"]
            .iter()
            .any(|word| lower.contains(word));
    explains.then(|| line.to_owned())
}

/// torch puts `[rank3]: ` before each line of a traceback once a process group exists, once for each that was made.
fn without_ranks(mut line: &str) -> &str {
    while let Some((rank, rest)) = line.strip_prefix("[rank").and_then(|rest| rest.split_once("]: ")) {
        if !rank.bytes().all(|byte| byte.is_ascii_digit()) {
            break;
        }
        line = rest;
    }
    line
}

/// A progress bar as tqdm draws it, which most training loops use: `12%|#  | 3/40 [00:01<00:12, 2.9it/s]`.
fn is_progress(line: &str) -> bool {
    line.contains("%|") || line.contains("it/s]") || line.contains("s/it]") || line.contains("it/s,")
}

/// What a terminal shows of a line that a program has drawn again and again, each time after a carriage return.
fn last_drawn(line: &str) -> &str {
    line.rsplit('\r').find(|part| !part.trim().is_empty()).unwrap_or(line)
}

fn first_line(text: &str) -> &str {
    text.lines().map(str::trim).find(|line| !line.is_empty()).unwrap_or_default()
}

fn printable_text(text: &str) -> String {
    text.lines().map(printable).collect::<Vec<_>>().join("\n")
}

/// The line without characters that would move a terminal's cursor or change its colours.
fn printable(line: &str) -> String {
    let mut clean = String::with_capacity(line.len());
    let mut rest = line.chars().peekable();
    while let Some(c) = rest.next() {
        match c {
            '\u{1b}' if rest.next_if_eq(&'[').is_some() => {
                // A control sequence ends with a byte from @ to ~ (ECMA-48, 5.4).
                while rest.next().is_some_and(|c| !('@'..='~').contains(&c)) {}
            }
            '\t' | '\n' => clean.push(c),
            c if c.is_control() => {}
            c => clean.push(c),
        }
    }
    clean
}

#[cfg(test)]
mod tests;
