//! The flags for checks of this machine before the node joins, for hangs of the workers and for the health port, and
//! PyTorch's variables for the same.

use std::ffi::OsStr;
use std::net::SocketAddr;
use std::time::Duration;

use super::error::{Refusal, UsageError};
use super::flags::Settings;
use super::values;
use crate::machine::preflight::{PreflightOptions, TIMEOUT};
use crate::output::logs::LogOptions;
use crate::workers::watchdog::{HangLimits, TIMER_FILE, Timers, WatchOptions};

/// A number of seconds, with or without a fraction. A number that is not positive switches the check off.
const UNINTERRUPTIBLE: &str = "TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT";
const HEALTH_PORT: &str = "TORCHELASTIC_HEALTH_CHECK_PORT";
const ENABLE_TIMERS: &str = "TORCHELASTIC_ENABLE_FILE_TIMER";

pub(super) fn preflight(settings: &Settings<'_>) -> Result<PreflightOptions, UsageError> {
    let named = |text: &str| match text.trim() {
        "" => Err(Refusal::new("it is empty", "name a command for the shell, or leave it out")),
        command => Ok(command.to_owned()),
    };
    let some_time = |text: &str| values::some_time(text, "the checks need some time", "give a time");
    Ok(PreflightOptions {
        built_in: settings.switch("preflight")?,
        command: settings.parsed("preflight-command", named)?,
        peer_bandwidth: settings.parsed("preflight-peer-bandwidth", values::bit_rate)?,
        timeout: settings.parsed("preflight-timeout", some_time)?.unwrap_or(TIMEOUT),
    })
}

/// A variable whose value is passed over.
fn refused(variable: &str, value: &OsStr, what: &str) -> String {
    format!("{variable}={}: {what}; it has no effect", value.display())
}

pub(super) fn watch(
    settings: &Settings<'_>,
    logs: &LogOptions,
    warnings: &mut Vec<String>,
) -> Result<WatchOptions, UsageError> {
    let progress = settings.parsed("progress-timeout", values::duration)?.filter(|timeout| !timeout.is_zero());
    let timers = match settings.env(ENABLE_TIMERS) {
        Some(on) if on == "1" => settings.env(TIMER_FILE).map_or(Timers::Fresh, |path| Timers::At(path.into())),
        _ => Timers::Off,
    };
    let unseen = LogOptions { dir: logs.dir.clone(), ..LogOptions::default() };
    if progress.is_some() && *logs == unseen && timers == Timers::Off {
        warnings.push(
            "--progress-timeout: output that goes to neither --redirects nor --tee is not seen, so a worker must tell its \
             progress over its socket or it is taken for hung"
                .into(),
        );
    }
    let mut uninterruptible = None;
    if let Some(value) = settings.env(UNINTERRUPTIBLE) {
        match value.to_string_lossy().trim().parse::<f64>() {
            Ok(seconds) if seconds <= 0.0 => {}
            Ok(seconds) if seconds < 1e9 => uninterruptible = Some(Duration::from_secs_f64(seconds)),
            _ => warnings.push(refused(UNINTERRUPTIBLE, &value, "not a number of seconds")),
        }
    }
    Ok(WatchOptions { limits: HangLimits { progress, uninterruptible }, timers })
}

/// Where health is served.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct HealthPort {
    pub at: SocketAddr,
    /// Whether the agent ends if it cannot listen there. Jobs of one machine may have inherited torchrun's variable with
    /// one value, so with that the agent continues.
    pub needed: bool,
}

pub(super) fn health(settings: &Settings<'_>, warnings: &mut Vec<String>) -> Result<Option<HealthPort>, UsageError> {
    if let Some(at) = settings.parsed("health-port", values::own_port)? {
        return Ok(Some(HealthPort { at, needed: true }));
    }
    let Some(value) = settings.env(HEALTH_PORT) else { return Ok(None) };
    let read = values::own_port(value.to_string_lossy().trim());
    if read.is_err() {
        warnings.push(refused(HEALTH_PORT, &value, "not a port"));
    }
    Ok(read.ok().map(|at| HealthPort { at, needed: false }))
}
