//! The settings for the workers' output: where it goes, and which streams `--redirects` and `--tee` choose.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::str::FromStr;

use super::{Needles, Rotation};

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

/// A choice among a worker's two output streams.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Streams {
    /// Standard output.
    pub stdout: bool,
    /// Standard error.
    pub stderr: bool,
}

/// A choice of streams for each worker, written as torchrun writes it. For all workers it is `0` for none, `1` for
/// stdout, `2` for stderr or `3` for both. For some workers it is `rank:value,rank:value`, by local rank; the other
/// workers get none.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum StreamsByRank {
    /// The same choice for all workers.
    All(Streams),
    /// A choice for some workers, by local rank.
    Some(BTreeMap<u32, Streams>),
}

impl StreamsByRank {
    /// The choice for one worker.
    pub fn of(&self, local_rank: u32) -> Streams {
        match self {
            StreamsByRank::All(streams) => *streams,
            StreamsByRank::Some(map) => map.get(&local_rank).copied().unwrap_or_default(),
        }
    }
}

impl Default for StreamsByRank {
    fn default() -> Self {
        StreamsByRank::All(Streams::default())
    }
}

impl FromStr for StreamsByRank {
    type Err = String;

    fn from_str(value: &str) -> Result<Self, String> {
        if !value.contains(':') {
            let streams = streams(value).ok_or_else(|| format!("{value:?} is no choice of streams"))?;
            return Ok(StreamsByRank::All(streams));
        }
        let mut map = BTreeMap::new();
        for part in value.split(',') {
            let (rank, choice) = part.split_once(':').ok_or_else(|| format!("{part:?} has no ':'"))?;
            let rank: u32 = Some(rank)
                .filter(|rank| rank.bytes().all(|byte| byte.is_ascii_digit()))
                .and_then(|rank| rank.parse().ok())
                .ok_or_else(|| format!("{rank:?} is no local rank"))?;
            let streams = streams(choice).ok_or_else(|| format!("{choice:?} is no choice of streams"))?;
            if map.insert(rank, streams).is_some() {
                return Err(format!("local rank {rank} is given twice"));
            }
        }
        Ok(StreamsByRank::Some(map))
    }
}

fn streams(digit: &str) -> Option<Streams> {
    let (stdout, stderr) = match digit.trim() {
        "0" => (false, false),
        "1" => (true, false),
        "2" => (false, true),
        "3" => (true, true),
        _ => return None,
    };
    Some(Streams { stdout, stderr })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(value: &str) -> Result<StreamsByRank, String> {
        value.parse()
    }

    #[test]
    fn one_digit_is_for_all_workers() {
        assert_eq!(parse("2").unwrap().of(17), Streams { stdout: false, stderr: true });
        assert_eq!(parse("0").unwrap(), StreamsByRank::default());
    }

    #[test]
    fn ranks_may_have_several_digits_and_unnamed_ones_get_nothing() {
        let routes = parse("0:3,12:1").unwrap();
        assert_eq!(routes.of(12), Streams { stdout: true, stderr: false });
        assert_eq!(routes.of(0), Streams { stdout: true, stderr: true });
        assert_eq!(routes.of(1), Streams::default());
    }

    #[test]
    fn an_error_names_the_part_that_is_wrong() {
        for (value, problem) in [
            ("4", "\"4\" is no choice of streams"),
            ("", "\"\" is no choice of streams"),
            ("0:1,1", "\"1\" has no ':'"),
            ("a:1", "\"a\" is no local rank"),
            ("+1:1", "\"+1\" is no local rank"),
            (":1", "\"\" is no local rank"),
            ("0:1,0:2", "local rank 0 is given twice"),
        ] {
            assert_eq!(parse(value).unwrap_err(), problem);
        }
    }
}
