//! The flags for hangs and for the health port, and PyTorch's variables for the same.

use std::net::SocketAddr;
use std::time::Duration;

use super::error::UsageError;
use super::flags::Settings;
use super::values;
use crate::output::logs::LogOptions;
use crate::workers::watchdog::{HangLimits, TIMER_FILE, Timers};

/// A number of seconds, with or without a fraction. A number that is not positive switches the check off.
const UNINTERRUPTIBLE: &str = "TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT";
const HEALTH_PORT: &str = "TORCHELASTIC_HEALTH_CHECK_PORT";
const ENABLE_TIMERS: &str = "TORCHELASTIC_ENABLE_FILE_TIMER";
/// What to watch for, and the health port. By default, the agent watches nothing and serves no health.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct WatchOptions {
    /// Limits for hangs.
    pub limits: HangLimits,
    /// Whether workers may set PyTorch's timers.
    pub timers: Timers,
    /// The address at which health is served over HTTP.
    pub health: Option<SocketAddr>,
}

pub(super) fn read(
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
    let mut refused = |variable: &str, value: &std::ffi::OsStr, what: &str| {
        warnings.push(format!("{variable}={}: {what}; it has no effect", value.display()));
    };
    let mut uninterruptible = None;
    if let Some(value) = settings.env(UNINTERRUPTIBLE) {
        match value.to_string_lossy().trim().parse::<f64>() {
            Ok(seconds) if seconds <= 0.0 => {}
            Ok(seconds) if seconds < 1e9 => uninterruptible = Some(Duration::from_secs_f64(seconds)),
            _ => refused(UNINTERRUPTIBLE, &value, "not a number of seconds"),
        }
    }
    let mut health = settings.parsed("health-port", values::own_port)?;
    if let (None, Some(value)) = (health, settings.env(HEALTH_PORT)) {
        match values::own_port(value.to_string_lossy().trim()) {
            Ok(address) => health = Some(address),
            Err(_) => refused(HEALTH_PORT, &value, "not a port"),
        }
    }
    Ok(WatchOptions { limits: HangLimits { progress, uninterruptible }, timers, health })
}
