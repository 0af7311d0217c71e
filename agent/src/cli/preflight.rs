//! The flags for the checks before the node joins, for [`crate::machine::preflight`].

use super::error::{Refusal, UsageError};
use super::flags::Settings;
use super::values;
use crate::machine::preflight::{PreflightOptions, TIMEOUT};

pub(super) fn read(settings: &Settings<'_>) -> Result<PreflightOptions, UsageError> {
    let named = |text: &str| match text.trim() {
        "" => Err(Refusal::new("it is empty", "name a command for the shell, or leave it out")),
        command => Ok(command.to_owned()),
    };
    let some_time = |text: &str| {
        let time = values::duration(text)?;
        if time.is_zero() { Err(Refusal::new("the checks need some time", "give a time")) } else { Ok(time) }
    };
    Ok(PreflightOptions {
        built_in: settings.switch("preflight")?,
        command: settings.parsed("preflight-command", named)?,
        peer_bandwidth: settings.parsed("preflight-peer-bandwidth", values::bit_rate)?,
        timeout: settings.parsed("preflight-timeout", some_time)?.unwrap_or(TIMEOUT),
    })
}
