//! The flags about the workers' output: logs, torchrun's events, the report.

use std::collections::BTreeSet;

use super::error::{Refusal, UsageError};
use super::flags::Settings;
use super::values;
use crate::output::OutputOptions;
use crate::output::events::EventHandler;
use crate::output::logs::{LogDir, LogOptions, Needles};
use crate::output::outcome::report::ReportForm;

/// torchrun's variable for the prefix template. It is used if neither the flag nor `PET_LOG_LINE_PREFIX_TEMPLATE` is
/// given.
const PREFIX_VARIABLE: &str = "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE";

pub(super) fn read(settings: &Settings<'_>) -> Result<OutputOptions, UsageError> {
    Ok(OutputOptions {
        logs: logs(settings)?,
        events: settings.parsed("event-log-handler", events)?.unwrap_or_default(),
        report: settings.parsed("report", report)?.unwrap_or_default(),
    })
}

fn logs(settings: &Settings<'_>) -> Result<LogOptions, UsageError> {
    let dir = match settings.path("log-dir") {
        None => LogDir::Temporary,
        // torchrun's way to say "no logs".
        Some(path) if path == "/dev/null" => LogDir::Disabled,
        Some(path) => LogDir::At(path.into()),
    };
    let prefix = settings.text("log-line-prefix-template")?.map(|setting| setting.value);
    let inherited = || settings.env(PREFIX_VARIABLE).map(|value| value.to_string_lossy().into_owned());
    Ok(LogOptions {
        dir,
        redirects: settings.parsed("redirects", values::streams)?.unwrap_or_default(),
        tee: settings.parsed("tee", values::streams)?.unwrap_or_default(),
        console_ranks: settings.parsed("local-ranks-filter", ranks)?,
        prefix: prefix.or_else(inherited),
        duplicate_stdout: settings.parsed("duplicate-stdout-filters", needles)?,
        duplicate_stderr: settings.parsed("duplicate-stderr-filters", needles)?,
        rotation: settings.parsed("log-rotate", |text| {
            const ADVICE: &str = "write SIZE or SIZE:KEEP, for example 500M or 1G:10";
            text.parse().map_err(|cause: String| Refusal::new(cause, ADVICE))
        })?,
        attempts: settings.parsed("log-attempts", |text| values::count(text, 1))?,
    })
}

fn report(text: &str) -> Result<ReportForm, Refusal> {
    values::one_of(text, "is not known", &[("text", ReportForm::Text), ("json", ReportForm::Json)])
}

fn events(text: &str) -> Result<EventHandler, Refusal> {
    match text {
        // torchrun's handler of this name writes nothing either, unless a Python package gives it an output.
        "null" | "dynamic_rendezvous" => Ok(EventHandler::Null),
        "console" => Ok(EventHandler::Console),
        other => Err(Refusal::new(
            format!("`{other}` is not a handler of the agent; it cannot load one from a Python package"),
            "give `null` or `console`",
        )),
    }
}

fn ranks(text: &str) -> Result<BTreeSet<u32>, Refusal> {
    let rank = |part: &str| {
        let refuse = || Refusal::new(format!("`{part}` is no local rank"), "write local ranks as in 0,3");
        part.trim().parse().map_err(|_| refuse())
    };
    text.split(',').map(rank).collect()
}

fn needles(text: &str) -> Result<Needles, Refusal> {
    let advice = "write words between commas; two commas are one comma within a word";
    text.parse().map_err(|cause: String| Refusal::new(cause, advice))
}
