//! The results of parsing other than options.

use std::fmt;

use super::advice;
use super::dialect::Dialect;

/// A value that cannot be used: what it is, why it is refused, and what to do. The text is always one line.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{what}: {cause}; {advice}")]
pub struct UsageError {
    /// The flag or variable, with its value where it has one: `--nnodes=3:1`.
    pub what: String,
    /// Why it is refused.
    pub cause: String,
    /// What to write instead.
    pub advice: String,
    /// Whether the command line itself has the wrong form, which Python's argparse would refuse too. Otherwise a value
    /// is refused.
    pub syntax: bool,
}

/// Why the command line gave no options.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Stop {
    /// `--help` or `--version`: the text belongs on standard output.
    #[error("{0}")]
    Show(String),
    /// A mistake: the text belongs on standard error.
    #[error(transparent)]
    Usage(#[from] UsageError),
}

impl Stop {
    /// The process's exit code: 0 after help, and usually 2 after a mistake. torchrun has 1 for some mistakes.
    pub fn exit_code(&self, dialect: Dialect) -> u8 {
        match self {
            Stop::Show(_) => 0,
            Stop::Usage(error) => dialect.exit_code(error.syntax),
        }
    }
}

/// Why a value is refused. The flag that it came with is not known yet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Refusal {
    pub(super) cause: String,
    pub(super) advice: String,
    pub(super) syntax: bool,
}

impl From<elastic_flags::Refused> for Refusal {
    fn from(refused: elastic_flags::Refused) -> Refusal {
        Refusal::new(refused.cause, refused.advice)
    }
}

impl Refusal {
    pub(super) fn new(cause: impl Into<String>, advice: impl Into<String>) -> Refusal {
        Refusal { cause: cause.into(), advice: advice.into(), syntax: false }
    }

    /// Marks a mistake in the form of the command line.
    pub(super) fn syntax(self) -> Refusal {
        Refusal { syntax: true, ..self }
    }

    /// Adds the name of the flag or variable that the value came with.
    pub(super) fn of(self, what: impl fmt::Display) -> UsageError {
        // A value may hold anything. The message stays one line, and cannot move a terminal's cursor.
        let line = |text: String| text.chars().flat_map(printable).collect();
        let (what, advice) = (what.to_string(), self.advice);
        // Who wrote a pod's spec has no command line to write flags on.
        let advice = if what.contains("PET_") { advice::as_variables(&advice) } else { advice };
        UsageError { what: line(what), cause: line(self.cause), advice: line(advice), syntax: self.syntax }
    }
}

fn printable(c: char) -> Vec<char> {
    if c.is_control() { c.escape_default().collect() } else { vec![c] }
}
