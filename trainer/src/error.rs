//! Errors of the models and the data that people bring.

use std::fmt::Write;
use std::io;

use crate::data::SampleError;

/// Any error: `?` makes it of one that a library returns, and `.into()` of words.
pub type Error = Box<dyn std::error::Error + Send + Sync>;

/// A result of a model's methods.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// A model or its data has failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TaskError {
    /// A method of the model.
    #[error(
        "the model cannot {what}: {cause}{}",
        unless(*may_pass, "; correct the model: each restart would meet this again")
    )]
    Model {
        /// What it was asked for.
        what: String,
        /// Why.
        cause: String,
        /// Whether the system refused something, such as a read of a file: that may pass.
        may_pass: bool,
    },
    /// A sample.
    #[error(transparent)]
    Sample(#[from] SampleError),
}

impl TaskError {
    /// For `map_err` on what a method of a model returns.
    pub(crate) fn model(what: impl Into<String>) -> impl FnOnce(Error) -> TaskError {
        let what = what.into();
        |error| TaskError::Model { what, cause: with_causes(&*error), may_pass: is_of_the_system(&*error) }
    }

    /// Whether a restart may pass it.
    pub(crate) fn may_pass(&self) -> bool {
        match self {
            TaskError::Model { may_pass, .. } => *may_pass,
            TaskError::Sample(error) => error.may_pass(),
        }
    }
}

fn unless(may_pass: bool, advice: &'static str) -> &'static str {
    if may_pass { "" } else { advice }
}

/// Whether the system refused something, in an error or its causes.
fn is_of_the_system(error: &(dyn std::error::Error + 'static)) -> bool {
    let mut causes = std::iter::successors(Some(error), |error| error.source());
    causes.any(|error| error.downcast_ref().and_then(io::Error::raw_os_error).is_some())
}

/// What an error says, with its causes as far as it does not say them itself.
pub(crate) fn with_causes(error: &(dyn std::error::Error + 'static)) -> String {
    let (mut text, mut cause) = (error.to_string(), error.source());
    while let Some(error) = cause {
        let said = error.to_string();
        if !text.contains(&said) {
            // Writing to a string does not fail.
            let _ = write!(text, ": {said}");
        }
        cause = error.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, thiserror::Error)]
    #[error("{said}")]
    struct Outer {
        said: String,
        source: std::io::Error,
    }

    #[test]
    fn what_the_system_refused_may_pass() {
        let may_pass =
            |source| TaskError::model("begin")(Outer { said: "no file".to_owned(), source }.into()).may_pass();
        assert!(may_pass(io::Error::from_raw_os_error(5)));
        assert!(!may_pass(io::Error::other("it is no model")));
        assert!(!TaskError::model("begin")("it is no model".into()).may_pass());
    }

    #[test]
    fn a_cause_is_said_once() {
        let outer = |said: &str| Outer { said: said.to_owned(), source: std::io::Error::other("no such row") };
        assert_eq!(with_causes(&outer("cannot read the table")), "cannot read the table: no such row");
        assert_eq!(with_causes(&outer("cannot read: no such row")), "cannot read: no such row");
    }
}
