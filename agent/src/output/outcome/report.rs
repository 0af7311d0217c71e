//! The report of a job's end, for people and for programs. It is made from what the store says, so every agent gives
//! the same report.

use std::fmt::{self, Write};

use elastic_rendezvous::End;
use elastic_rendezvous::job::Failure;
use elastic_rendezvous::time::date::utc;
use serde::Serialize;

use crate::guard::signal_name;

/// The version of the shape of [`Report::json`].
const VERSION: u32 = 1;

/// What the agent prints at its end: `--report`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum ReportForm {
    #[default]
    Text,
    /// As `Text`, and in addition one line of JSON on standard output, as the last line there.
    Json,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
enum Outcome {
    Succeeded,
    Failed,
    Closed,
    Drained,
    Refused,
    StoreLost,
    Error,
}

/// Exit code of an agent that left as planned while its job was not over. A signal or its operator asked it to leave.
pub(crate) const LEFT: u8 = 3;

/// Exit code if the operator closed the job.
pub(crate) const CLOSED: u8 = 4;

/// Exit code if the job has failed. The result is final: an agent that is started again would begin the job again, with
/// a new budget. An agent that could not take part, or that met an unexpected error, exits with 1 and may be
/// started again.
pub(crate) const JOB_FAILED: u8 = 5;

#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct Report {
    report: u32,
    job: String,
    result: Outcome,
    /// One sentence. The job's history has the same.
    reason: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    cause: Option<Failure>,
    exit_code: u8,
}

impl Report {
    /// The report of how the job, or this node's part in it, ended. `alone`: the job has no other nodes.
    pub(crate) fn of_end(job: &str, end: &End, alone: bool) -> Report {
        let (result, cause, reason) = match end {
            End::Succeeded => (Outcome::Succeeded, None, "the job has succeeded"),
            End::Failed(cause, reason) => (Outcome::Failed, cause.clone(), reason.as_str()),
            End::Closed => (Outcome::Closed, None, "the job was closed by its operator"),
            End::Drained if alone => (Outcome::Drained, None, "this node has left the job, which has no other"),
            End::Drained => {
                (Outcome::Drained, None, "this node has left the job; the others continue if they are enough")
            }
            End::Refused(reason) => (Outcome::Refused, None, reason.as_str()),
            End::StoreLost(reason) => (Outcome::StoreLost, None, reason.as_str()),
        };
        Report::new(job, result, reason, cause)
    }

    /// The report of an error that kept this node from taking part at all.
    pub(crate) fn of_error(job: &str, error: &anyhow::Error) -> Report {
        Report::new(job, Outcome::Error, &format!("{error:#}"), None)
    }

    fn new(job: &str, result: Outcome, reason: &str, cause: Option<Failure>) -> Report {
        let exit_code = match result {
            Outcome::Succeeded => 0,
            Outcome::Drained => LEFT,
            Outcome::Closed => CLOSED,
            Outcome::Failed => JOB_FAILED,
            _ => 1,
        };
        Report { report: VERSION, job: job.to_owned(), result, reason: reason.to_owned(), cause, exit_code }
    }

    pub(crate) fn cause(&self) -> Option<&Failure> {
        self.cause.as_ref()
    }

    /// The same report with torchrun's exit codes: 0 for success and 1 for everything else.
    #[must_use]
    pub(crate) fn into_torchrun(self) -> Report {
        Report { exit_code: u8::from(!self.success()), ..self }
    }

    /// The process's exit code: 0 if the job succeeded, [`LEFT`], [`CLOSED`], [`JOB_FAILED`], else 1.
    pub(crate) fn exit_code(&self) -> u8 {
        self.exit_code
    }

    pub(crate) fn success(&self) -> bool {
        self.result == Outcome::Succeeded
    }

    /// The report for programs: one line, described in `docs/logs-and-errors.md`.
    pub(crate) fn json(&self) -> String {
        // The report holds only strings and numbers, so this cannot fail.
        serde_json::to_string(self).unwrap_or_default()
    }
}

/// The report for people.
impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.result {
            Outcome::Failed => writeln!(f, "elastic-agent: the job has failed: {}", self.reason)?,
            _ => writeln!(f, "elastic-agent: {}", self.reason)?,
        }
        match &self.cause {
            Some(cause) => root_cause(f, cause),
            None => Ok(()),
        }
    }
}

fn root_cause(f: &mut fmt::Formatter<'_>, cause: &Failure) -> fmt::Result {
    writeln!(f, "  root cause")?;
    let mut line = |name: &str, value: Option<String>| match value {
        Some(value) => writeln!(f, "    {name:<10} {value}"),
        None => Ok(()),
    };
    line("message", Some(cause.message.clone()))?;
    let local = cause.local_rank.map(|local| format!(" (local rank {local})")).unwrap_or_default();
    line("rank", cause.rank.map(|rank| format!("{rank}{local}")))?;
    line("node", cause.node.as_ref().map(ToString::to_string))?;
    line("host", cause.host.clone())?;
    line("pid", cause.pid.map(|pid| pid.to_string()))?;
    let code = cause.exit_code;
    line("exit code", code.filter(|code| *code >= 0).map(|code| format!("{code}{}", shells_word(code))))?;
    line("signal", code.filter(|code| *code < 0).map(|code| signal(-code, cause.core_dumped)))?;
    line("killed by", cause.killed_by.as_ref().map(ToString::to_string))?;
    line("time", cause.at_ms.map(|at| format!("{} UTC, by its host's clock", utc(at))))?;
    let mut block = |name: &str, text: &str| {
        writeln!(f, "    {name}")?;
        text.lines().try_for_each(|line| writeln!(f, "      {line}"))
    };
    if let Some(traceback) = &cause.traceback {
        block("traceback", traceback)?;
    }
    // Python also prints an exception that it recorded. Once is enough for people.
    let ends = |line: &str| {
        cause.traceback.as_deref().and_then(|text| text.lines().last()).is_some_and(|last| line.ends_with(last))
    };
    if !cause.stderr.iter().any(|line| ends(line)) && !cause.stderr.is_empty() {
        block("last lines of its standard error", &cause.stderr.join("\n"))?;
    }
    Ok(())
}

fn signal(number: i32, core_dumped: bool) -> String {
    let mut text = number.to_string();
    if let Some(name) = signal_name(number) {
        let _ = write!(text, " ({name})");
    }
    if core_dumped {
        text.push_str(", core dumped");
    }
    text
}

/// Explains an exit code of 128 and a signal's number. Shells and similar programs exit so when that signal ended the
/// program that they ran.
fn shells_word(code: i32) -> String {
    match signal_name(code - 128) {
        Some(name) => format!(" (as a shell says it: what it ran was ended by {name})"),
        None => String::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use elastic_rendezvous::job::{FailureClass, Killer, Killing, NodeId};

    fn failed(cause: Failure) -> Report {
        let reason = format!("b: {}; no restarts left of 3", cause.message);
        Report::of_end("digits", &End::Failed(Some(cause), reason), false)
    }

    fn exception() -> Failure {
        Failure {
            rank: Some(3),
            local_rank: Some(1),
            pid: Some(4711),
            exit_code: Some(1),
            node: Some(NodeId::new("b", "35e0c4bd")),
            host: Some("node-b".into()),
            at_ms: Some(1_798_761_599_001),
            traceback: Some("Traceback (most recent call last):\n  File \"train.py\", line 7\nValueError: boom".into()),
            stderr: vec!["epoch 1".into(), "[W] destroyed without shutdown".into()],
            ..Failure::new(FailureClass::Own, "ValueError: boom (exit code 1)")
        }
    }

    #[test]
    fn a_failed_job_for_people() {
        let expected = r#"elastic-agent: the job has failed: b: ValueError: boom (exit code 1); no restarts left of 3
  root cause
    message    ValueError: boom (exit code 1)
    rank       3 (local rank 1)
    node       b:35e0c4bd
    host       node-b
    pid        4711
    exit code  1
    time       2026-12-31 23:59:59.001 UTC, by its host's clock
    traceback
      Traceback (most recent call last):
        File "train.py", line 7
      ValueError: boom
    last lines of its standard error
      epoch 1
      [W] destroyed without shutdown
"#;
        assert_eq!(failed(exception()).to_string(), expected);
        let twice = Failure { stderr: vec!["[rank3]: ValueError: boom".into()], ..exception() };
        let (once, _) = expected.split_once("    last lines").unwrap();
        assert_eq!(failed(twice).to_string(), once, "what the traceback says is not said again");
    }

    #[test]
    fn a_signal_has_a_name_and_a_sender() {
        let killed = Failure {
            exit_code: Some(-11),
            core_dumped: true,
            killed_by: Some(Box::new(Killing { by: Killer::Fault, evidence: "SIGSEGV: a bad memory access".into() })),
            ..Failure::new(FailureClass::Own, "signal 11 (SIGSEGV), core dumped")
        };
        let text = failed(killed).to_string();
        assert!(text.contains("    signal     11 (SIGSEGV), core dumped\n"), "{text}");
        assert!(text.contains("    killed by  SIGSEGV: a bad memory access\n"), "{text}");
        assert!(!text.contains("exit code"), "{text}");
        let shell = Failure { exit_code: Some(137), ..Failure::new(FailureClass::Own, "exit code 137") };
        assert!(
            failed(shell).to_string().contains("exit code  137 (as a shell says it: what it ran was ended by SIGKILL)")
        );
    }

    #[test]
    fn a_failed_job_for_programs() {
        let json: serde_json::Value = serde_json::from_str(&failed(exception()).json()).unwrap();
        let expected = serde_json::json!({
            "report": 1,
            "job": "digits",
            "result": "failed",
            "reason": "b: ValueError: boom (exit code 1); no restarts left of 3",
            "exit_code": JOB_FAILED,
            "cause": {
                "class": "own",
                "message": "ValueError: boom (exit code 1)",
                "rank": 3,
                "local_rank": 1,
                "pid": 4711,
                "exit_code": 1,
                "traceback": "Traceback (most recent call last):\n  File \"train.py\", line 7\nValueError: boom",
                "stderr": ["epoch 1", "[W] destroyed without shutdown"],
                "at_ms": 1_798_761_599_001_u64,
                "host": "node-b",
                "node": "b:35e0c4bd",
            },
        });
        assert_eq!(json, expected);
        assert_eq!(failed(exception()).json().lines().count(), 1);
    }

    #[test]
    fn every_end_has_a_result_and_a_code() {
        let ends = [
            (End::Succeeded, "succeeded", 0),
            (End::Failed(None, "no more".into()), "failed", JOB_FAILED),
            (End::Closed, "closed", CLOSED),
            (End::Drained, "drained", LEFT),
            (End::Refused("taken".into()), "refused", 1),
            (End::StoreLost("gone".into()), "store_lost", 1),
        ];
        for (end, result, code) in ends {
            let report = Report::of_end("j", &end, false);
            let json: serde_json::Value = serde_json::from_str(&report.json()).unwrap();
            assert_eq!((json["result"].as_str(), report.exit_code()), (Some(result), code));
            assert_eq!(json["exit_code"], code);
            assert_eq!(report.into_torchrun().exit_code(), u8::from(code != 0));
        }
        let alone = Report::of_end("j", &End::Drained, true);
        assert_eq!(alone.to_string(), "elastic-agent: this node has left the job, which has no other\n");
        let error = anyhow::anyhow!("no such host").context("reach the store");
        let report = Report::of_error("j", &error);
        assert_eq!(report.to_string(), "elastic-agent: reach the store: no such host\n");
        assert!(report.json().contains(r#""result":"error""#));
    }
}
