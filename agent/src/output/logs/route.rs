//! The value of `--redirects` and `--tee`: the chosen streams of each worker.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

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

/// The value is not understood.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{value:?}: {problem}; expected 0 (none), 1 (stdout), 2 (stderr), 3 (both), or local ranks as in 0:3,12:1")]
pub struct ParseStreamsError {
    value: String,
    /// What is wrong with it.
    pub problem: String,
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
    type Err = ParseStreamsError;

    fn from_str(value: &str) -> Result<Self, ParseStreamsError> {
        let error = |problem: String| ParseStreamsError { value: value.to_owned(), problem };
        if !value.contains(':') {
            let streams = streams(value).ok_or_else(|| error(format!("{value:?} is no choice of streams")))?;
            return Ok(StreamsByRank::All(streams));
        }
        let mut map = BTreeMap::new();
        for part in value.split(',') {
            let (rank, choice) = part.split_once(':').ok_or_else(|| error(format!("{part:?} has no ':'")))?;
            let rank: u32 = Some(rank)
                .filter(|rank| rank.bytes().all(|byte| byte.is_ascii_digit()))
                .and_then(|rank| rank.parse().ok())
                .ok_or_else(|| error(format!("{rank:?} is no local rank")))?;
            let streams = streams(choice).ok_or_else(|| error(format!("{choice:?} is no choice of streams")))?;
            if map.insert(rank, streams).is_some() {
                return Err(error(format!("local rank {rank} is given twice")));
            }
        }
        Ok(StreamsByRank::Some(map))
    }
}

impl fmt::Display for StreamsByRank {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let digit = |streams: &Streams| u8::from(streams.stdout) + 2 * u8::from(streams.stderr);
        match self {
            StreamsByRank::All(streams) => write!(f, "{}", digit(streams)),
            StreamsByRank::Some(map) => {
                for (n, (rank, streams)) in map.iter().enumerate() {
                    let comma = if n > 0 { "," } else { "" };
                    write!(f, "{comma}{rank}:{}", digit(streams))?;
                }
                Ok(())
            }
        }
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
    use proptest::prelude::*;

    fn parse(value: &str) -> Result<StreamsByRank, String> {
        value.parse().map_err(|e: ParseStreamsError| e.to_string())
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
    fn an_error_names_the_value_the_part_and_what_is_expected() {
        for (value, problem) in [
            ("4", "\"4\" is no choice of streams"),
            ("", "\"\" is no choice of streams"),
            ("0:1,1", "\"1\" has no ':'"),
            ("a:1", "\"a\" is no local rank"),
            ("+1:1", "\"+1\" is no local rank"),
            (":1", "\"\" is no local rank"),
            ("0:1,0:2", "local rank 0 is given twice"),
        ] {
            let error = parse(value).unwrap_err();
            assert!(error.contains(problem) && error.contains("0:3,12:1"), "{error}");
        }
    }

    proptest! {
        #[test]
        fn what_is_shown_can_be_read_again(map in proptest::collection::btree_map(any::<u32>(), 0..4u8, 1..9)) {
            let text: Vec<String> = map.iter().map(|(rank, value)| format!("{rank}:{value}")).collect();
            let text = text.join(",");
            prop_assert_eq!(parse(&text).unwrap().to_string(), text);
        }
    }
}
