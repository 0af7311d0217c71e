//! What failed: the record by which every agent of a job tells the same story. Which of several failures is the job's
//! cause is decided in `rendezvous`.
//!
//! A failure travels through the store, in a node's key and then in the round's, so each of its parts is bounded:
//! [`Failure::bounded`] keeps the whole below about 16 KiB, whatever a worker wrote.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::NodeId;

/// Most bytes of [`Failure::message`]. It goes into each reason and into the history too.
const MESSAGE: usize = 512;
/// Most bytes of [`Failure::traceback`].
const TRACEBACK: usize = 8 * 1024;
/// Of these, as many for its beginning: where the program came from. The rest is for its end: what it came to.
const TRACEBACK_HEAD: usize = 1024;
/// Most bytes of one line of [`Failure::stderr`], of all of them, and most lines.
const STDERR_LINE: usize = 512;
const STDERR: usize = 4 * 1024;
const STDERR_LINES: usize = 30;
/// Most bytes of a [`Killing`]'s evidence, and of a host's name.
const PHRASE: usize = 512;

/// How a failure is judged. Stronger classes are later; the strongest is the root cause.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FailureClass {
    /// An error about a peer.
    Peer,
    /// The node had to stop its workers, as its lease lapsed or its guard was killed, or had no room to start them. A
    /// membership change, not a failure; it explains what the node's peers say.
    Lost,
    /// A worker ended by a signal that asks programs to stop, and that its agent did not send: anyone who sent it knew
    /// of something before.
    Signalled,
    /// The worker's own exception, exit code or fatal signal; also a class of a later release, so that it is counted.
    #[serde(other)]
    Own,
}

/// Who or what sent a worker the signal that ended it, as far as can be known.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Killer {
    /// The kernel's out-of-memory killer: the count of its victims in the worker's own cgroup grew.
    OomKiller,
    /// Perhaps the out-of-memory killer: its victims on the whole host grew in number, the cgroup's are not known.
    MaybeOomKiller,
    /// The worker ended by itself after the out-of-memory killer took another process of its cgroup.
    OomKillerBeside,
    /// A process that is not the agent, or the worker itself.
    Outside,
    /// The worker's own fault: a bad memory access, an abort.
    Fault,
    /// What a later release knows of. Its evidence says what that is.
    #[serde(other)]
    Other,
}

/// What ended a worker, and how that is known.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Killing {
    /// Who.
    pub by: Killer,
    /// What says so, for people.
    pub evidence: String,
}

impl fmt::Display for Killing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.evidence)
    }
}

/// What failed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failure {
    /// How it is judged.
    pub class: FailureClass,
    /// One line for people.
    pub message: String,
    /// Global rank of the worker, if it was one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rank: Option<u32>,
    /// Its local rank.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub local_rank: Option<u32>,
    /// Its process id on its host.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pid: Option<u32>,
    /// Its exit code; negative: killed by that signal.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub exit_code: Option<i32>,
    /// The furthest step that a worker of its node had reported in the round.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub step: Option<u64>,
    /// Whether the worker's program had begun less than a minute before, by its agent's clock: it has hardly got beyond
    /// what each start does, which is imports, data, a checkpoint.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub at_start: bool,
    /// Whether the worker said that each restart would meet the same error: the job ends with it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub permanent: bool,
    /// Whether it left a core dump.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub core_dumped: bool,
    /// What ended it, if that is not plain from the exit code.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub killed_by: Option<Box<Killing>>,
    /// The traceback that the worker recorded.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub traceback: Option<String>,
    /// The last lines of its standard error.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub stderr: Vec<String>,
    /// When its agent heard of its end, in milliseconds since the Unix epoch on its host's clock. For people: nothing is
    /// decided by it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub at_ms: Option<u64>,
    /// The name of the host it happened on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host: Option<String>,
    /// The node it happened on; filled in by the leader when it becomes a job's cause.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub node: Option<NodeId>,
}

/// Why a job ends with a permanent failure.
pub const PERMANENT: &str = "the worker says that a restart cannot help";

impl Failure {
    /// A failure with a class and a message, and nothing else.
    pub fn new(class: FailureClass, message: impl Into<String>) -> Failure {
        Failure {
            class,
            message: message.into(),
            rank: None,
            local_rank: None,
            pid: None,
            exit_code: None,
            step: None,
            at_start: false,
            permanent: false,
            core_dumped: false,
            killed_by: None,
            traceback: None,
            stderr: Vec::new(),
            at_ms: None,
            host: None,
            node: None,
        }
    }

    /// The same failure, cut down to what may go into the store: the beginnings of single lines, the beginning and the
    /// end of the traceback, the last lines of standard error. What was left out is marked with an ellipsis.
    #[must_use]
    pub fn bounded(mut self) -> Failure {
        let line = self.message.lines().find(|line| !line.trim().is_empty()).unwrap_or_default();
        self.message = beginning(line.trim_end(), MESSAGE);
        self.host = self.host.map(|host| beginning(&host, PHRASE));
        if let Some(killing) = &mut self.killed_by {
            killing.evidence = beginning(&killing.evidence, PHRASE);
        }
        self.traceback = self.traceback.map(|text| middle_cut(text.trim_end(), TRACEBACK_HEAD, TRACEBACK));
        let mut room = STDERR;
        let mut kept: Vec<String> = self
            .stderr
            .iter()
            .rev()
            .take(STDERR_LINES)
            .map(|line| beginning(line.trim_end(), STDERR_LINE))
            .take_while(|line| {
                let fits = line.len() < room;
                room = room.saturating_sub(line.len() + 1);
                fits
            })
            .collect();
        kept.reverse();
        self.stderr = kept;
        self
    }
}

const ELLIPSIS: &str = "…";

/// At most `most` bytes of a text's beginning.
fn beginning(text: &str, most: usize) -> String {
    if text.len() <= most {
        return text.to_owned();
    }
    format!("{}{ELLIPSIS}", &text[..boundary(text, most - ELLIPSIS.len())])
}

/// The last character boundary that is not behind `at`.
fn boundary(text: &str, at: usize) -> usize {
    (0..=at.min(text.len())).rev().find(|at| text.is_char_boundary(*at)).unwrap_or(0)
}

/// At most `most` bytes: about `head` of the beginning, in whole lines where that is possible, and the end.
fn middle_cut(text: &str, head: usize, most: usize) -> String {
    if text.len() <= most {
        return text.to_owned();
    }
    let first = &text[..boundary(text, head)];
    let first = &first[..first.rfind('\n').unwrap_or(first.len())];
    // Three bytes of spare: a boundary lies within them.
    let last = &text[boundary(text, text.len() + 3 - (most - head - 2 * ELLIPSIS.len()))..];
    let last = last.split_once('\n').map_or(last, |(_, rest)| rest);
    format!("{first}\n{ELLIPSIS}\n{last}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn what_is_short_stays_as_it_is() {
        let failure = Failure {
            traceback: Some("Traceback (most recent call last):\n  File\nValueError: boom".into()),
            stderr: vec!["one".into(), String::new(), "two".into()],
            ..Failure::new(FailureClass::Own, "ValueError: boom")
        };
        assert_eq!(failure.clone().bounded(), failure);
    }

    #[test]
    fn a_long_traceback_keeps_where_it_began_and_where_it_ended() {
        let frames: Vec<String> = (0..5000).map(|n| format!("  frame {n}")).collect();
        let text = format!("Traceback:\n{}\nRecursionError: too deep", frames.join("\n"));
        let cut = Failure { traceback: Some(text), ..Failure::new(FailureClass::Own, "x") }.bounded();
        let cut = cut.traceback.unwrap();
        assert!(cut.len() <= TRACEBACK && cut.len() > TRACEBACK / 2, "{}", cut.len());
        assert!(cut.starts_with("Traceback:\n  frame 0\n"));
        assert!(cut.ends_with("  frame 4999\nRecursionError: too deep"));
        assert!(cut.contains("\n…\n  frame "), "the cut is marked and lies between lines");
    }

    #[test]
    fn the_newest_lines_of_stderr_stay() {
        let stderr = (0..1000).map(|n| format!("line {n}")).collect();
        let kept = Failure { stderr, ..Failure::new(FailureClass::Own, "x") }.bounded().stderr;
        assert_eq!(kept.len(), STDERR_LINES);
        assert_eq!(kept.last().unwrap(), "line 999");
    }

    #[test]
    fn a_record_of_an_agent_without_these_parts_is_read() {
        let failure: Failure = serde_json::from_str(r#"{"class":"own","message":"m","exit_code":3}"#).unwrap();
        assert_eq!(failure, Failure { exit_code: Some(3), ..Failure::new(FailureClass::Own, "m") });
    }

    #[test]
    fn a_class_and_a_killer_of_a_later_release_do_not_hide_the_failure() {
        let json =
            r#"{"class":"cosmic_ray","message":"m","killed_by":{"by":"gpu_driver","evidence":"Xid 79"},"new":[1]}"#;
        let failure: Failure = serde_json::from_str(json).unwrap();
        assert_eq!(failure.class, FailureClass::Own);
        assert_eq!(failure.killed_by.unwrap().to_string(), "Xid 79");
    }

    proptest! {
        #[test]
        fn nothing_that_a_worker_writes_makes_a_record_large(
            text in "(\\PC|\n){0,300}", times in 1..400usize, lines in 0..100usize,
        ) {
            let huge = text.repeat(times);
            let failure = Failure {
                traceback: Some(huge.clone()),
                stderr: vec![huge.clone(); lines],
                killed_by: Some(Box::new(Killing { by: Killer::Outside, evidence: huge.clone() })),
                host: Some(huge.clone()),
                ..Failure::new(FailureClass::Own, huge)
            };
            let bounded = failure.bounded();
            prop_assert!(!bounded.message.contains('\n'));
            let total = bounded.message.len()
                + bounded.host.as_ref().map_or(0, String::len)
                + bounded.killed_by.as_ref().map_or(0, |killing| killing.evidence.len())
                + bounded.traceback.as_ref().map_or(0, String::len)
                + bounded.stderr.iter().map(|line| line.len() + 1).sum::<usize>();
            prop_assert!(total <= 3 * 512 + 12 * 1024, "{}", total);
        }
    }
}
