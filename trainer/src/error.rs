//! Errors of the models and the data that people bring.

use std::fmt::Write;

use crate::data::SampleError;

/// Any error: `?` makes it of one that a library returns, and `.into()` of words.
pub type Error = Box<dyn std::error::Error + Send + Sync>;

/// A result of a model's methods.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// A model or its data has failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TaskError {
    /// A method of the model.
    #[error("the model cannot {what}: {cause}; correct the model: each restart would meet this again")]
    Model {
        /// What it was asked for.
        what: String,
        /// Why.
        cause: String,
    },
    /// A sample.
    #[error(transparent)]
    Sample(#[from] SampleError),
}

impl TaskError {
    /// For `map_err` on what a method of a model returns.
    pub(crate) fn model(what: impl Into<String>) -> impl FnOnce(Error) -> TaskError {
        let what = what.into();
        |error| TaskError::Model { what, cause: with_causes(&*error) }
    }

    /// Whether a restart may pass it.
    pub(crate) fn may_pass(&self) -> bool {
        matches!(self, TaskError::Sample(error) if error.may_pass())
    }
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
    fn a_cause_is_said_once() {
        let outer = |said: &str| Outer { said: said.to_owned(), source: std::io::Error::other("no such row") };
        assert_eq!(with_causes(&outer("cannot read the table")), "cannot read the table: no such row");
        assert_eq!(with_causes(&outer("cannot read: no such row")), "cannot read: no such row");
    }
}
