//! The flags about the workers, and the words after the flags: the program that they run.

use std::ffi::{OsStr, OsString};
use std::time::Duration;

use elastic_rendezvous::job::Timings;

use super::conf::Conf;
use super::dialect::Dialect;
use super::error::{Refusal, UsageError};
use super::flags::Settings;
use super::values;
use crate::machine::numa::Affinity;
use crate::output::logs::LogOptions;
use crate::output::template;
use crate::workers::WorkersOptions;
use crate::workers::command::{Program, ProgramKind};

pub(super) fn workers(
    settings: &Settings<'_>,
    conf: &Conf,
    timings: &Timings,
    logs: &LogOptions,
) -> Result<WorkersOptions, UsageError> {
    let program = read(settings)?;
    Ok(WorkersOptions {
        count: settings.parsed("nproc-per-node", values::workers)?.unwrap_or(settings.dialect.workers()),
        role: settings.parsed("role", |text| role(text, settings.dialect))?.unwrap_or_else(|| "default".into()),
        numa: settings.parsed("numa-binding", numa)?,
        virtual_local_rank: settings.switch("virtual-local-rank")?,
        warm_up: warm_up(settings, logs, &program)?,
        preload: settings.parsed("preload", |text| preload(text, &program))?.unwrap_or_default(),
        fresh: settings.switch("fresh")?,
        program,
        // By default, half of the time is left for workers that must be stopped after all.
        quiesce_timeout: conf.quiesce_timeout.unwrap_or(timings.stop_grace / 2).min(timings.stop_grace),
        store_host: conf.store_host(settings.env("TORCH_DISABLE_SHARE_RDZV_TCP_STORE").is_some_and(|set| set == "1")),
        open_store: conf.open_store,
    })
}

/// Reads a role's name. It may be empty, as TorchX gives it. torchrun takes any name.
fn role(text: &str, dialect: Dialect) -> Result<String, Refusal> {
    const ADVICE: &str = "give a short name, for example `trainer`";
    if dialect == Dialect::Own && (text.chars().any(char::is_control) || text.len() > 128) {
        return Err(Refusal::new("it is too long, or holds control characters", ADVICE));
    }
    Ok(text.to_owned())
}

fn numa(text: &str) -> Result<Affinity, Refusal> {
    use Affinity::{CoreComplex, Exclusive, Node, Socket};
    let modes = [("node", Node), ("socket", Socket), ("exclusive", Exclusive), ("core-complex", CoreComplex)];
    values::one_of(text, "is not a binding mode", &modes)
}

/// `--warm-up`: how long the agent waits for workers that start before the node joins.
fn warm_up(settings: &Settings<'_>, logs: &LogOptions, program: &Program) -> Result<Option<Duration>, UsageError> {
    let limit = settings.parsed("warm-up", values::duration)?.filter(|limit| !limit.is_zero());
    let knows_rank = |text: &OsStr| template::mentions(text, "rank");
    let prefix = logs.prefix.as_deref().map(OsStr::new);
    if limit.is_some() && program.args.iter().map(OsString::as_os_str).chain(prefix).any(knows_rank) {
        let cause = "a worker that starts before its round has no rank yet, and ${rank} is asked for";
        return Err(Refusal::new(cause, "use ${local_rank}, or leave one of them out").of("--warm-up"));
    }
    Ok(limit)
}

/// `--preload`: the modules that workers find imported.
fn preload(text: &str, program: &Program) -> Result<Vec<String>, Refusal> {
    if program.kind == ProgramKind::Executable || program.name == "-" {
        return Err(Refusal::new("the workers run no Python script or module", "leave one of them out"));
    }
    let modules: Vec<String> = text.split(',').map(|name| name.trim().to_owned()).collect();
    let is_word = |word: &str| !word.is_empty() && word.chars().all(|letter| letter.is_alphanumeric() || letter == '_');
    match modules.iter().find(|name| !name.split('.').all(is_word)) {
        Some(name) => Err(Refusal::new(format!("`{name}` is no module's name"), "write, for example, torch,numpy")),
        None => Ok(modules),
    }
}

fn read(settings: &Settings<'_>) -> Result<Program, UsageError> {
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
