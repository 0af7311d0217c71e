//! How single flags are read: numbers of nodes and workers, durations, ids, streams by rank.

use std::fmt;
use std::net::{Ipv4Addr, SocketAddr};
use std::time::Duration;

use super::error::Refusal;
use crate::machine::preflight::peers::BitRate;
use crate::output::logs::StreamsByRank;
use crate::workers::slots::WorkerCount;

/// How many nodes a round may have: `--nnodes N` or `MIN:MAX`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct NodeRange {
    /// The fewest nodes, at least 1.
    pub min: u32,
    /// The most nodes, at least `min`.
    pub max: u32,
}

impl fmt::Display for NodeRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.min == self.max { write!(f, "{}", self.min) } else { write!(f, "{}:{}", self.min, self.max) }
    }
}

/// A larger number of nodes, workers or restarts is taken for a mistake.
const MOST: u32 = 1_000_000;

pub(super) fn count(text: &str, least: u32) -> Result<u32, Refusal> {
    let advice = || format!("give a whole number from {least} to {MOST}");
    match text.trim().parse::<i128>() {
        Ok(n) if n < i128::from(least) => Err(Refusal::new(format!("{n} is less than {least}"), advice())),
        Ok(n) if n > i128::from(MOST) => Err(Refusal::new(format!("{n} is more than {MOST}"), advice())),
        Ok(n) => Ok(n as u32),
        Err(_) => Err(Refusal::new(format!("`{text}` is not a whole number"), advice())),
    }
}

/// Reads one of these words. `problem` says what any other is, such as `is not known`.
pub(super) fn one_of<T: Copy>(text: &str, problem: &str, words: &[(&str, T)]) -> Result<T, Refusal> {
    if let Some((_, meaning)) = words.iter().find(|(word, _)| *word == text) {
        return Ok(*meaning);
    }
    let names: Vec<String> = words.iter().map(|(word, _)| format!("`{word}`")).collect();
    let advice = match names.split_last() {
        Some((last, others)) => format!("give {} or {last}", others.join(", ")),
        None => String::new(),
    };
    Err(Refusal::new(format!("`{text}` {problem}"), advice))
}

/// Reads a time that is not zero.
pub(super) fn some_time(text: &str, problem: &str, advice: &str) -> Result<Duration, Refusal> {
    match duration(text)? {
        Duration::ZERO => Err(Refusal::new(problem, advice)),
        time => Ok(time),
    }
}

pub(super) fn nodes(text: &str) -> Result<NodeRange, Refusal> {
    const ADVICE: &str = "write N or MIN:MAX with 1 <= MIN <= MAX, for example 2 or 1:4";
    let part = |text: &str| count(text, 1).map_err(|refusal| Refusal::new(refusal.cause, ADVICE));
    match text.split(':').collect::<Vec<_>>()[..] {
        [n] => part(n).map(|n| NodeRange { min: n, max: n }),
        [min, max] => {
            let (min, max) = (part(min)?, part(max)?);
            if min > max {
                return Err(Refusal::new(format!("the minimum {min} is more than the maximum {max}"), ADVICE));
            }
            Ok(NodeRange { min, max })
        }
        ref parts => Err(Refusal::new(format!("it has {} parts", parts.len()), ADVICE)),
    }
}

pub(super) fn workers(text: &str) -> Result<WorkerCount, Refusal> {
    const ADVICE: &str = "give a number from 1 on, or `auto`, `gpu`, `cpu` or `xpu`";
    match text.trim() {
        "auto" => Ok(WorkerCount::Auto),
        "cpu" => Ok(WorkerCount::Cpu),
        "gpu" => Ok(WorkerCount::Gpu),
        "xpu" => Ok(WorkerCount::Xpu),
        number => match count(number, 1) {
            Ok(n) => Ok(WorkerCount::Count(n)),
            Err(refusal) if number.parse::<i128>().is_ok() => Err(Refusal::new(refusal.cause, ADVICE)),
            Err(_) => Err(Refusal::new(format!("unsupported value `{number}`"), ADVICE)),
        },
    }
}

/// Reads a time of a year at most: `30`, `30s`, `0.5`, `500ms`, `10m`, `2h`. As with torchrun, a bare number counts
/// seconds.
pub(super) fn duration(text: &str) -> Result<Duration, Refusal> {
    const LONGEST: Duration = Duration::from_secs(365 * 86_400);
    let time = elastic_flags::duration_or_seconds(text)?;
    if time > LONGEST {
        return Err(Refusal::new(
            format!("`{text}` is longer than a year"),
            "write a shorter time, for example 30 or 10m",
        ));
    }
    Ok(Duration::from_millis((time.as_secs_f64() * 1000.0).round() as u64))
}

/// Reads bits per second: `800Mbit`, `2.5Gbit`. `Mbps` and `MB` are not taken: people mean bits or bytes by them.
pub(super) fn bit_rate(text: &str) -> Result<BitRate, Refusal> {
    const ADVICE: &str = "write bits per second with kbit, Mbit or Gbit, for example 1Gbit or 800Mbit";
    let refuse = |cause: String| Err(Refusal::new(cause, ADVICE));
    let lower = text.trim().to_ascii_lowercase();
    let units = [("kbit", 1e3), ("mbit", 1e6), ("gbit", 1e9)];
    let per_second = lower.strip_suffix("/s").unwrap_or(&lower);
    let found = units.into_iter().find_map(|(unit, bits)| Some((per_second.strip_suffix(unit)?.trim_end(), bits)));
    let Some((number, bits)) = found else { return refuse(format!("`{text}` has no unit that is known")) };
    let plain = !number.is_empty() && number.bytes().all(|b| b.is_ascii_digit() || b == b'.');
    match number.parse::<f64>().map(|number| number * bits) {
        Ok(rate) if plain && (1e3..=1e13).contains(&rate) => Ok(BitRate(rate as u64)),
        Ok(rate) if plain && rate < 1e3 => refuse(format!("`{text}` is too slow to measure")),
        Ok(_) if plain => refuse(format!("`{text}` is faster than any link")),
        _ => refuse(format!("`{text}` is not a rate")),
    }
}

pub(super) fn streams(text: &str) -> Result<StreamsByRank, Refusal> {
    const ADVICE: &str = "write 0 (none), 1 (stdout), 2 (stderr) or 3 (both), or by local rank, for example 0:3,1:2";
    text.parse().map_err(|cause: String| Refusal::new(cause, ADVICE))
}

/// Reads a job's or a node's id. It becomes part of a store key and of file names.
pub(super) fn id(text: &str, longest: usize) -> Result<String, Refusal> {
    let allowed = |c: char| c.is_ascii_alphanumeric() || "._-:@+=".contains(c);
    let example = || {
        let clean: String = text.trim().chars().map(|c| if allowed(c) { c } else { '-' }).take(longest).collect();
        let clean = clean.trim_matches(['-', '.']).to_owned();
        if clean.is_empty() { "give a name such as `job-1`".to_owned() } else { format!("for example `{clean}`") }
    };
    let refuse = |cause: String| Err(Refusal::new(cause, example()));
    if text.is_empty() {
        return refuse("it is empty".into());
    }
    if let Some(c) = text.chars().find(|&c| !allowed(c)) {
        return refuse(format!("{c:?} cannot be part of it: letters, digits and `._-:@+=` can"));
    }
    if text.len() > longest {
        return refuse(format!("it has {} bytes, {longest} are the most", text.len()));
    }
    if text == "." || text == ".." {
        return refuse("it names a directory".into());
    }
    Ok(text.to_owned())
}

/// Reads a host's name or address. An IPv6 address may have brackets.
pub(super) fn address(text: &str) -> Result<String, Refusal> {
    const ADVICE: &str = "give a host name or an address, without a port";
    let host = text.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')).unwrap_or(text);
    let named = host.chars().all(|c| c.is_ascii_alphanumeric() || "._-".contains(c));
    if host.is_empty() || !(named || host.parse::<std::net::IpAddr>().is_ok()) {
        return Err(Refusal::new("it is not a host", ADVICE));
    }
    Ok(host.to_owned())
}

pub(super) fn port(text: &str) -> Result<u16, Refusal> {
    text.trim()
        .parse()
        .map_err(|_| Refusal::new(format!("`{text}` is not a port"), "give 1 to 65535, or 0 for a free one"))
}

/// Reads a port, with or without an address to listen on. Without an address, only this machine can reach the port.
pub(super) fn own_port(text: &str) -> Result<SocketAddr, Refusal> {
    match text.trim().parse() {
        Ok(address) => Ok(address),
        Err(_) => Ok(SocketAddr::new(Ipv4Addr::LOCALHOST.into(), port(text)?)),
    }
}
