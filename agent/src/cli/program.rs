//! The words after the flags, and how the workers run them.

use std::ffi::{OsStr, OsString};
use std::time::Duration;

use super::dialect::Dialect;
use super::error::{Refusal, UsageError};
use super::flags::Settings;
use super::values;
use crate::output::logs::LogOptions;
use crate::output::template;
use crate::workers::command::{Program, ProgramKind};

/// `--warm-up`: how long the agent waits for workers that start before the node joins.
pub(super) fn warm_up(
    settings: &Settings<'_>,
    logs: &LogOptions,
    program: &Program,
) -> Result<Option<Duration>, UsageError> {
    let limit = settings.parsed("warm-up", values::duration)?.filter(|limit| !limit.is_zero());
    let knows_rank = |text: &OsStr| template::mentions(text, "rank");
    let prefix = logs.prefix.as_deref().map(OsStr::new);
    if limit.is_some() && program.args.iter().map(OsString::as_os_str).chain(prefix).any(knows_rank) {
        let cause = "a worker that starts before its round has no rank yet, and ${rank} is asked for";
        return Err(Refusal::new(cause, "use ${local_rank}, or leave one of them out").of("--warm-up"));
    }
    Ok(limit)
}

/// The program that the workers run, and its arguments.
pub(super) fn read(settings: &Settings<'_>) -> Result<Program, UsageError> {
    let kind = match (settings.switch("module")?, settings.switch("no-python")?) {
        // As with torchrun, this flag takes precedence over both others.
        _ if settings.switch("run-path")? => ProgramKind::RunPath,
        (false, false) => ProgramKind::Script,
        (true, false) => ProgramKind::Module,
        (false, true) => ProgramKind::Executable,
        (true, true) => {
            let cause = "it cannot be used with --module, which needs Python";
            return Err(Refusal::new(cause, "keep one of them").of("--no-python"));
        }
    };
    let tells_rank = settings.dialect == Dialect::Launch && !settings.switch("use-env")?;
    if tells_rank && kind == ProgramKind::Executable {
        let cause = "the agent would pass --local-rank, which only a Python script is expected to read";
        return Err(Refusal::new(cause, "add --use-env").of("--no-python"));
    }
    let local_rank = tells_rank.then(|| OsString::from("--local-rank=${local_rank}"));
    let mut words = settings.program().into_iter();
    match words.next().filter(|name| !name.is_empty()) {
        Some(name) => Ok(Program { kind, name, args: local_rank.into_iter().chain(words).collect() }),
        None => Err(Refusal::new(
            "no program is named",
            "put the script after the flags, for example elastic-agent --standalone train.py; see --help",
        )
        .syntax()
        .of("PROGRAM")),
    }
}
