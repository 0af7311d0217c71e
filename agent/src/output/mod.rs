//! The workers' output, what they leave behind, and the reports of both.
//!
//! | module | what it is |
//! |---|---|
//! | [`events`] | torchrun's events, as lines of JSON |
//! | [`logs`] | where the workers' output goes: files, console, both |
//! | [`outcome`] | what a dead worker left behind, what it means, and the final report |
//! | [`template`] | `${local_rank}` and its like in arguments and prefixes |

pub(crate) mod events;
pub(crate) mod logs;
pub(crate) mod outcome;
pub(crate) mod template;

use events::EventHandler;
use logs::LogOptions;
use outcome::report::ReportForm;

/// What is printed and written of the workers, as the command line says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct OutputOptions {
    /// Where their output goes.
    pub logs: LogOptions,
    /// Where torchrun's events go.
    pub events: EventHandler,
    /// The form of the report at the agent's end.
    pub report: ReportForm,
}
