//! What the readings of a machine mean for training on it. Nothing is read here. Every threshold is here.

use std::fmt;
use std::time::Duration;

use crate::machine::nvml::GpuHealth;

/// Less free space than this in the folder for logs or for temporary files is unfit: checkpoints of small models and a
/// day's logs fit.
pub(crate) const LEAST_FREE: u64 = 1 << 30;

/// Less shared memory than this is unfit: NCCL and data loaders end with "bus error". It is what containers get by
/// default.
pub(crate) const LEAST_SHARED: u64 = 64 << 20;

/// Less than this is a warning.
pub(crate) const USUAL_SHARED: u64 = 1 << 30;

/// Fewer descriptors than this for a process are unfit; fewer than the second a warning.
pub(crate) const LEAST_FILES: u64 = 1024;
/// See [`LEAST_FILES`].
pub(crate) const USUAL_FILES: u64 = 4096;

/// A GPU of this temperature before any work, in degrees Celsius, is a warning.
pub(crate) const HOT: u32 = 85;

/// Xids of a GPU that cannot be trusted before it is reset (NVIDIA's Xid catalogue): 48 and 95 uncontained memory
/// errors, 64 a row that could not be remapped, 79 fallen off the bus, 119 and 120 its system processor does not answer.
pub(crate) const FATAL_XIDS: &[u32] = &[48, 64, 79, 95, 119, 120];

/// The driver's reasons to slow a GPU down that tell of trouble: hardware slowdown, heat (the software's, the
/// hardware's), and the power brake.
const THROTTLED: u64 = 0x8 | 0x20 | 0x40 | 0x80;

/// What a finding means for the node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum State {
    Fit,
    /// The node may join; somebody should look.
    Warning,
    Unfit,
    Unknown,
}

/// One line: what was found, and what to do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Finding {
    pub state: State,
    pub seen: String,
    /// What to do; empty where nothing is to be done.
    pub advice: String,
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.seen)?;
        if self.advice.is_empty() { Ok(()) } else { write!(f, ": {}", self.advice) }
    }
}

/// A number, or why it could not be read.
pub(crate) type Reading<T> = Result<T, String>;

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct GpuReading {
    pub index: u32,
    pub health: Reading<GpuHealth>,
    /// Its Xids that the kernel's log holds; an error where the log cannot be read.
    pub xids: Reading<Vec<u32>>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Readings {
    /// Folders for logs and for temporary files, and their free bytes.
    pub folders: Vec<(String, Reading<u64>)>,
    pub shared: Reading<u64>,
    /// Descriptors that a process may have: its hard limit, `u64::MAX` for no limit.
    pub files: u64,
    pub needed_gpus: u32,
    /// How many there are, or why the driver does not tell.
    pub gpus: Reading<Vec<GpuReading>>,
}

/// How a command of the user's own ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Ended {
    /// With this exit code, after these last lines.
    Exited(i32, Vec<String>),
    Killed(i32),
    Late(Duration),
    NotStarted(String),
}

pub(crate) fn all(readings: &Readings) -> Vec<Finding> {
    let folders = readings.folders.iter().map(|(folder, free)| folder_space(folder, free));
    let mut findings: Vec<Finding> = folders.collect();
    findings.push(shared_memory(&readings.shared));
    findings.push(open_files(readings.files));
    findings.extend(gpus(readings.needed_gpus, &readings.gpus));
    findings
}

pub(super) fn finding(state: State, seen: String, advice: &str) -> Finding {
    let advice = if matches!(state, State::Fit | State::Unknown) { String::new() } else { advice.to_owned() };
    Finding { state, seen, advice }
}

pub(super) fn unknown(what: &str, why: &str) -> Finding {
    finding(State::Unknown, format!("{what}: {why}"), "")
}

fn of_amount(there: u64, least: u64, usual: u64) -> State {
    match there {
        _ if there < least => State::Unfit,
        _ if there < usual => State::Warning,
        _ => State::Fit,
    }
}

fn mib(bytes: u64) -> String {
    format!("{} MiB", bytes >> 20)
}

fn folder_space(folder: &str, free: &Reading<u64>) -> Finding {
    let free = match free {
        Ok(free) => *free,
        Err(why) => return unknown(&format!("free space in {folder}"), why),
    };
    let state = of_amount(free, LEAST_FREE, LEAST_FREE);
    let seen = format!("{} free in {folder}, of {} needed", mib(free), mib(LEAST_FREE));
    finding(state, seen, "make room there, or name another folder with --log-dir or TMPDIR")
}

fn shared_memory(free: &Reading<u64>) -> Finding {
    let free = match free {
        Ok(free) => *free,
        Err(why) => return unknown("free shared memory in /dev/shm", why),
    };
    let state = of_amount(free, LEAST_SHARED, USUAL_SHARED);
    let seen = format!("{} free in /dev/shm, of {} needed", mib(free), mib(LEAST_SHARED));
    finding(state, seen, "remove what dead processes left there, or give the container more (docker run --shm-size)")
}

fn open_files(limit: u64) -> Finding {
    let state = of_amount(limit, LEAST_FILES, USUAL_FILES);
    let seen = if limit == u64::MAX {
        "no limit on open files".to_owned()
    } else {
        format!("{limit} open files for a process, of {LEAST_FILES} needed")
    };
    finding(state, seen, "raise the hard limit (ulimit -Hn, LimitNOFILE= of systemd)")
}

fn gpus(needed: u32, gpus: &Reading<Vec<GpuReading>>) -> Vec<Finding> {
    let gpus = match gpus {
        Ok(gpus) => gpus,
        // Where workers need none, a machine without a driver is as good as another.
        Err(why) if needed == 0 => return vec![unknown("GPUs", why)],
        Err(why) => {
            let seen = format!("{needed} GPUs are needed, and the driver reports none: {why}");
            return vec![finding(State::Unfit, seen, "check nvidia-smi")];
        }
    };
    let mut findings = Vec::new();
    let there = gpus.len();
    if (there as u64) < u64::from(needed) {
        let seen = format!("{needed} workers need a GPU each, and there are {there}");
        let advice = "check nvidia-smi -L for a GPU that has fallen off the bus, or lower --nproc-per-node";
        findings.push(finding(State::Unfit, seen, advice));
    }
    for gpu in gpus {
        let wrong = wrong_with(gpu);
        if wrong.is_empty() {
            findings.push(finding(State::Fit, format!("GPU {} is healthy", gpu.index), ""));
        }
        findings.extend(wrong);
    }
    findings
}

/// What is wrong with a GPU, or is not known of it.
fn wrong_with(gpu: &GpuReading) -> Vec<Finding> {
    const RESET: &str = "reset it (nvidia-smi --gpu-reset) or reboot; if it comes back, replace the GPU";
    let mut findings = Vec::new();
    let mut say = |state, seen: String| {
        findings.push(finding(state, format!("GPU {} {seen}", gpu.index), RESET));
    };
    match &gpu.xids {
        Ok(xids) => {
            let fatal: Vec<String> = xids.iter().filter(|xid| FATAL_XIDS.contains(xid)).map(u32::to_string).collect();
            if !fatal.is_empty() {
                say(State::Unfit, format!("has had Xid {} since the host started", fatal.join(", ")));
            }
        }
        Err(why) => say(State::Unknown, format!("may have had Xids: {why}")),
    }
    let health = match &gpu.health {
        Ok(health) => health,
        Err(why) => {
            say(State::Unfit, format!("does not answer: {why}"));
            return findings;
        }
    };
    match health.uncorrected_errors {
        Some(0) => {}
        Some(count) => say(State::Unfit, format!("has had {count} uncorrected memory errors since the driver started")),
        None => say(State::Unknown, "does not report memory errors".to_owned()),
    }
    if health.retirement_pending == Some(true) {
        say(State::Unfit, "has pages of its memory to retire".to_owned());
    }
    if health.remap_failed == Some(true) {
        say(State::Unfit, "could not remap a row of its memory".to_owned());
    } else if health.remap_pending == Some(true) {
        say(State::Unfit, "has rows of its memory to remap".to_owned());
    }
    if let Some(degrees) = health.temperature.filter(|degrees| *degrees >= HOT) {
        say(State::Warning, format!("is at {degrees} °C before any work"));
    }
    if let Some(reasons) = health.throttle_reasons.filter(|reasons| reasons & THROTTLED != 0) {
        say(State::Warning, format!("is slowed down by heat or power (reasons {:#x})", reasons & THROTTLED));
    }
    findings
}

pub(crate) fn command(command: &str, ended: &Ended) -> Finding {
    const ADVICE: &str = "it is given with --preflight-command";
    let say = |state, what: String| finding(state, format!("`{command}` {what}"), ADVICE);
    match ended {
        Ended::Exited(0, _) => say(State::Fit, "finds this machine fit".to_owned()),
        Ended::Exited(code, lines) if lines.is_empty() => {
            say(State::Unfit, format!("ended with exit code {code} and said nothing"))
        }
        Ended::Exited(code, lines) => say(State::Unfit, format!("ended with exit code {code}: {}", lines.join(" / "))),
        Ended::Killed(signal) => say(State::Unfit, format!("was ended by signal {signal}")),
        Ended::Late(limit) => say(State::Unfit, format!("took longer than --preflight-timeout ({limit:?})")),
        Ended::NotStarted(why) => say(State::Unfit, format!("could not be started: {why}")),
    }
}

/// The Xids of a GPU at this PCI address, such as `0000:3b:00.0`, in a kernel's log. Lines read
/// `NVRM: Xid (PCI:0000:3b:00): 79, pid=…`.
pub(crate) fn xids(log: &str, pci: &str) -> Vec<u32> {
    let place = format!("Xid (PCI:{}): ", pci.rsplit_once('.').map_or(pci, |(device, _)| device));
    let mut found: Vec<u32> = log
        .lines()
        .filter_map(|line| {
            let (_, rest) = line.split_once(&place)?;
            rest.split(|c: char| !c.is_ascii_digit()).next()?.parse().ok()
        })
        .collect();
    found.sort_unstable();
    found.dedup();
    found
}

#[cfg(test)]
mod tests;
