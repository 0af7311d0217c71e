//! The command line's settings for the workers' output.

use std::collections::BTreeSet;
use std::path::PathBuf;

use super::{Needles, Rotation, StreamsByRank};

/// Where logs and error files go.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum LogDir {
    /// A fresh directory under the system's temporary one.
    #[default]
    Temporary,
    /// This directory.
    At(PathBuf),
    /// Nowhere. There are no files at all, not even error files.
    Disabled,
}

/// The names in the log directory and in the text before a line.
#[derive(Debug, Clone, Default)]
pub struct LogNames {
    /// The job's id.
    pub run_id: String,
    /// `--role`.
    pub role: String,
    /// This host's name.
    pub hostname: String,
}

/// Where the workers' output goes.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct LogOptions {
    /// Where log files and error files go.
    pub dir: LogDir,
    /// Streams that go to files.
    pub redirects: StreamsByRank,
    /// Streams that go to files and the console.
    pub tee: StreamsByRank,
    /// The local ranks whose output reaches the console. None: all.
    pub console_ranks: Option<BTreeSet<u32>>,
    /// The text before each line of a tee'd stream on the console, with `${role_name}`, `${local_rank}`, `${rank}` and
    /// `${hostname}`. None: torchrun's `[${role_name}${local_rank}]:`.
    pub prefix: Option<String>,
    /// Lines of tee'd standard outputs with these words are copied to a file of their own.
    pub duplicate_stdout: Option<Needles>,
    /// The same for standard error.
    pub duplicate_stderr: Option<Needles>,
    /// When log files are rotated. None: never.
    pub rotation: Option<Rotation>,
    /// How many attempts' folders stay, besides those that workers still write to. None: all.
    pub attempts: Option<u32>,
}
