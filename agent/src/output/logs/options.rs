//! What the command line asks for about the workers' output.

use std::collections::BTreeSet;
use std::path::PathBuf;

use super::{Needles, Rotation, StreamsByRank};

/// Where logs and error files go.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum LogDir {
    /// A fresh directory under the system's temporary one.
    #[default]
    Temporary,
    /// Here.
    At(PathBuf),
    /// Nowhere: no files at all, error files included.
    Disabled,
}

/// The workers' output.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct LogOptions {
    /// Where files go.
    pub dir: LogDir,
    /// Streams that go to files.
    pub redirects: StreamsByRank,
    /// Streams that go to files and the console.
    pub tee: StreamsByRank,
    /// Local ranks that reach the console; none: all.
    pub console_ranks: Option<BTreeSet<u32>>,
    /// What stands before each line of a tee'd stream on the console; none: torchrun's.
    pub prefix: Option<String>,
    /// Words whose lines are copied from tee'd standard outputs to a file of their own.
    pub duplicate_stdout: Option<Needles>,
    /// The same for standard errors.
    pub duplicate_stderr: Option<Needles>,
    /// When log files are begun anew; none: never.
    pub rotation: Option<Rotation>,
}
