//! What `elasticctl doctor` finds, a line each, and how it is printed. What it means is judged in `etcd` and `job`.

use std::fmt::Display;

use serde_json::{Value, json};

use crate::table::{printable, table};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum State {
    Ok,
    /// It works, and will cost something some day.
    Warning,
    Failed,
    /// It could not be asked for, or was not answered.
    Unknown,
}

impl State {
    fn word(self) -> &'static str {
        match self {
            State::Ok => "ok",
            State::Warning => "warning",
            State::Failed => "failed",
            State::Unknown => "unknown",
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Finding {
    pub(super) state: State,
    /// What was checked: one word.
    pub(super) check: &'static str,
    /// Of what: an endpoint, a node, the cluster.
    pub(super) of: String,
    pub(super) seen: String,
    pub(super) advice: Option<String>,
}

impl Finding {
    pub(super) fn new(state: State, check: &'static str, of: impl Into<String>, seen: impl Into<String>) -> Finding {
        Finding { state, check, of: of.into(), seen: seen.into(), advice: None }
    }

    pub(super) fn ok(check: &'static str, of: impl Into<String>, seen: impl Into<String>) -> Finding {
        Finding::new(State::Ok, check, of, seen)
    }

    pub(super) fn warning(check: &'static str, of: impl Into<String>, seen: impl Into<String>) -> Finding {
        Finding::new(State::Warning, check, of, seen)
    }

    pub(super) fn failed(check: &'static str, of: impl Into<String>, seen: impl Into<String>) -> Finding {
        Finding::new(State::Failed, check, of, seen)
    }

    pub(super) fn unknown(check: &'static str, of: impl Into<String>, seen: impl Into<String>) -> Finding {
        Finding::new(State::Unknown, check, of, seen)
    }

    pub(super) fn not_told(check: &'static str, of: impl Into<String>, why: &impl Display) -> Finding {
        Finding::unknown(check, of, format!("not told: {why}"))
    }

    pub(super) fn advise(mut self, advice: impl Into<String>) -> Finding {
        self.advice = Some(advice.into());
        self
    }
}

/// Whether anything failed: it decides the exit code.
pub(crate) fn any_failed(findings: &[Finding]) -> bool {
    findings.iter().any(|finding| finding.state == State::Failed)
}

/// For people: a line each, what to do under it, and a count at the end.
pub(crate) fn text(findings: &[Finding]) -> String {
    let cell = |finding: &Finding| {
        vec![finding.state.word().to_owned(), finding.check.to_owned(), finding.of.clone(), finding.seen.clone()]
    };
    let rows: Vec<_> = findings.iter().map(cell).collect();
    let lines = table(&["STATE", "CHECK", "OF", "SEEN"], &rows);
    let mut text = String::new();
    let advice = std::iter::once(None).chain(findings.iter().map(|finding| finding.advice.as_ref()));
    for (line, advice) in lines.lines().zip(advice) {
        text.push_str(line);
        text.push('\n');
        if let Some(advice) = advice {
            text.push_str(&format!("         what to do: {}\n", printable(advice)));
        }
    }
    let count = |state: State| findings.iter().filter(|finding| finding.state == state).count();
    let (ok, warnings) = (count(State::Ok), count(State::Warning));
    let (failed, unknown) = (count(State::Failed), count(State::Unknown));
    text.push_str(&format!("\n{failed} failed, {warnings} warnings, {unknown} unknown, {ok} ok\n"));
    text
}

/// For programs.
pub(crate) fn json(findings: &[Finding]) -> Value {
    let one = |finding: &Finding| {
        json!({
            "state": finding.state.word(),
            "check": finding.check,
            "of": finding.of,
            "seen": finding.seen,
            "advice": finding.advice,
        })
    };
    json!({ "failed": any_failed(findings), "findings": findings.iter().map(one).collect::<Vec<_>>() })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn some() -> Vec<Finding> {
        vec![
            Finding::ok("name", "etcd0:2379", "10.0.0.1"),
            Finding::new(State::Failed, "alarm", "the cluster", "NOSPACE").advise("etcdctl\u{1b} defrag"),
            Finding::new(State::Warning, "members", "the cluster", "1"),
            Finding::new(State::Unknown, "size", "etcd0:2379", "?"),
        ]
    }

    #[test]
    fn people_read_a_line_each_and_below_it_what_to_do() {
        let wanted = "\
STATE    CHECK    OF           SEEN
ok       name     etcd0:2379   10.0.0.1
failed   alarm    the cluster  NOSPACE
         what to do: etcdctl\\u{1b} defrag
warning  members  the cluster  1
unknown  size     etcd0:2379   ?

1 failed, 1 warnings, 1 unknown, 1 ok
";
        assert_eq!(text(&some()), wanted);
    }

    #[test]
    fn programs_read_the_same_and_only_failures_fail() {
        let printed = json(&some());
        assert_eq!(printed["failed"], true);
        assert_eq!(printed["findings"][1]["state"], "failed");
        assert_eq!(printed["findings"][1]["advice"], "etcdctl\u{1b} defrag");
        assert_eq!(
            printed["findings"][3],
            json!({"state": "unknown", "check": "size", "of": "etcd0:2379", "seen": "?", "advice": null})
        );
        let rest: Vec<_> = some().into_iter().filter(|finding| finding.state != State::Failed).collect();
        assert!(!any_failed(&rest));
        assert_eq!(json(&rest)["failed"], false);
    }
}
