//! The command line: argv and environment become one validated [`Options`]. Nothing here reads files or the network,
//! and only [`from_process`] reads this process.

mod advice;
mod checks;
mod completion;
mod conf;
mod dialect;
mod endpoint;
mod error;
mod flags;
mod help;
mod list;
mod network;
mod output;
mod program;
mod rendezvous;
mod spare;
mod spec;
#[cfg(test)]
mod tests;
mod values;

use std::ffi::OsString;

use elastic_rendezvous::job::{JobId, Spec};
use tracing::Level;
use uuid::Uuid;

use crate::machine::address::NetworkOptions;
use crate::machine::preflight::PreflightOptions;
use crate::output::OutputOptions;
use crate::store::choice::{StoreChoice, StoreOptions};
use crate::workers::WorkersOptions;
use crate::workers::signals::{self, Handled};
use crate::workers::watchdog::WatchOptions;

pub(crate) use checks::HealthPort;
pub use dialect::Dialect;
pub use error::Stop;
pub(crate) use error::UsageError;
pub(crate) use spare::SpareOptions;
pub(crate) use values::NodeRange;

use error::Refusal;
use flags::Settings;

/// The longest `--rdzv-id`, in bytes. This is the limit of a file name.
const LONGEST_JOB: usize = 255;
/// The longest `--node-name`, in bytes. It leaves room for a suffix within a file name.
const LONGEST_NODE: usize = 200;
/// torchrun's job id if none is given.
const NO_JOB: &str = "none";

/// Everything the command line says, validated. Each part is for one room of the agent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Options {
    /// The launcher that this program replaces.
    pub dialect: Dialect,
    pub job: JobId,
    /// Whether that id was made up for this run.
    pub is_unnamed: bool,
    pub node_name: Option<String>,
    /// What all agents of the job must share.
    pub spec: Spec,
    /// Where the nodes meet.
    pub store: StoreOptions,
    /// How other nodes reach this one.
    pub network: NetworkOptions,
    /// The workers of this node.
    pub workers: WorkersOptions,
    /// What is printed and written of them.
    pub output: OutputOptions,
    /// What the agent checks before the node joins.
    pub preflight: PreflightOptions,
    /// The hangs to watch for.
    pub watch: WatchOptions,
    /// Where health is served over HTTP.
    pub health: Option<HealthPort>,
    /// Signals that make the agent leave, if the user named them.
    pub signals: Option<Vec<Handled>>,
    pub log: AgentLog,
}

/// The agent's own log.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct AgentLog {
    pub level: Level,
    pub json: bool,
    /// Warnings for the user, to be logged once logging is set up. Each is one line.
    pub warnings: Vec<String>,
}

/// What this process was started to do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Task {
    /// Take part in one job.
    Agent(Box<Options>),
    /// Go to whichever of several jobs lacks a node.
    Spare(SpareOptions),
}

/// Reads this process's arguments and environment. The dialect of an error decides the exit code.
pub(crate) fn from_process() -> Result<Task, (Stop, Dialect)> {
    let env = |name: &str| std::env::var_os(name);
    let (dialect, argv) = Dialect::of(std::env::args_os());
    if dialect == Dialect::Own && argv.first().is_some_and(|word| word == spare::WORD) {
        return spare::parse(argv, &env).map(Task::Spare).map_err(|stop| (stop, dialect));
    }
    let options = parse(dialect, argv, &env, Uuid::new_v4()).map_err(|stop| (stop, dialect))?;
    Ok(Task::Agent(Box::new(options)))
}

/// Parses `argv`, which is given without the agent's own name. The defaults come from `env`. A job that is alone gets
/// `fresh` as its id.
pub(crate) fn parse(
    dialect: Dialect,
    argv: impl IntoIterator<Item = OsString>,
    env: &dyn Fn(&str) -> Option<OsString>,
    fresh: Uuid,
) -> Result<Options, Stop> {
    let settings = Settings::read(dialect, argv, env)?;
    if let Some(shell) = settings.text("print-completion")?.filter(|setting| setting.on_command_line) {
        let program = if dialect == Dialect::Torchrun { "torchrun" } else { "elastic-agent" };
        let script = shell.parse(|shell| completion::script(shell, &flags::definition(dialect), program))?;
        return Err(Stop::Show(script));
    }
    Ok(options(&settings, fresh)?)
}

/// Whether a command line is valid without any environment.
pub fn check(dialect: Dialect, argv: impl IntoIterator<Item = OsString>) -> Result<(), Stop> {
    parse(dialect, argv, &|_| None, Uuid::nil()).map(drop)
}

/// The definition of the command line, for its manual page.
pub fn command() -> clap::Command {
    flags::definition(Dialect::Own)
}

/// The script that `--print-completion` prints for `shell`: `bash`, `zsh`, `fish` or `tcsh`. `None` for another shell.
pub fn completion(shell: &str) -> Option<String> {
    completion::script(shell, &command(), "elastic-agent").ok()
}

fn options(settings: &Settings<'_>, fresh: Uuid) -> Result<Options, UsageError> {
    refuse_logs_specs(settings)?;
    let nodes = settings.parsed("nnodes", values::nodes)?.unwrap_or(NodeRange { min: 1, max: 1 });
    let conf = settings.text("rdzv-conf")?.map(|setting| conf::parse(&setting, settings.dialect)).transpose()?;
    let conf = conf.unwrap_or_default();
    let mut warnings = conf.warnings.clone();
    let mut network = network::read(settings)?;
    let store = rendezvous::resolve(settings, nodes, &conf, &mut warnings)?;
    network::check_tls(settings, &network, &store.choice)?;
    let nodes = spec::fitting(nodes, &store, &mut warnings);
    network.local_addr = network::local_addr(&network, &store);
    let signals = settings.text("signals-to-handle")?.map(|setting| {
        let (handled, passed_over) = signals::parse(&setting.value);
        warnings.extend(passed_over);
        handled
    });
    let is_unnamed = settings.switch("standalone")? || rendezvous::is_unaddressed(settings, nodes)?;
    let job = if is_unnamed {
        job_id(&fresh.to_string()).map_err(|refusal| refusal.of("--standalone"))?
    } else {
        job(settings, &store.choice, &mut warnings)?
    };
    let spec = spec::read(settings, &conf, nodes, &store, network.tls.is_some())?;
    without_effect(settings)?;
    let output = output::read(settings)?;
    let watch = checks::watch(settings, &output.logs, &mut warnings)?;
    let preflight = checks::preflight(settings)?;
    if matches!(store.choice, StoreChoice::Etcd { v2: true, .. }) {
        warn_of_v2(settings, &preflight, &network, &mut warnings)?;
    }
    Ok(Options {
        dialect: settings.dialect,
        job,
        is_unnamed,
        node_name: settings.parsed("node-name", |text| values::id(text, LONGEST_NODE))?,
        workers: program::workers(settings, &conf, &spec.timings, &output.logs)?,
        spec,
        store,
        network,
        output,
        preflight,
        watch,
        health: checks::health(settings, &mut warnings)?,
        signals,
        log: AgentLog { level: log_level(settings, &mut warnings)?, json: settings.switch("json-logs")?, warnings },
    })
}

/// Warns of flags that have no effect, or less, on etcd's v2 API.
fn warn_of_v2(
    settings: &Settings<'_>,
    preflight: &PreflightOptions,
    network: &NetworkOptions,
    warnings: &mut Vec<String>,
) -> Result<(), UsageError> {
    if preflight.peer_bandwidth.is_some() {
        let why = "where a node cannot check who asks it to send";
        warnings.push(format!("--preflight-peer-bandwidth has no effect on etcd's v2 API, {why}"));
    }
    if network.tls.is_some() {
        let why = "where agents do not speak with each other";
        warnings.push(format!("--peer-cert protects only the health port on etcd's v2 API, {why}"));
    }
    for flag in ["restarts-without-progress", "exclude-after"] {
        if settings.text(flag)?.is_some() {
            warnings.push(format!("--{flag} has no effect on etcd's v2 API, where each agent counts for itself"));
        }
    }
    Ok(())
}

/// The id of a job that other runs may meet.
fn job(settings: &Settings<'_>, rendezvous: &StoreChoice, warnings: &mut Vec<String>) -> Result<JobId, UsageError> {
    if let Some(job) = settings.parsed("rdzv-id", job_id)? {
        return Ok(job);
    }
    if matches!(rendezvous, StoreChoice::Etcd { .. }) {
        warnings.push(format!(
            "--rdzv-id is not given, so the job's id is `{NO_JOB}`: two such jobs on one etcd become one; name each"
        ));
    }
    job_id(NO_JOB).map_err(|refusal| refusal.of("--rdzv-id"))
}

fn job_id(text: &str) -> Result<JobId, Refusal> {
    let text = values::id(text, LONGEST_JOB)?;
    text.parse().map_err(|error| Refusal::new(format!("{error}"), "give another"))
}

fn start_method(text: &str) -> Result<(), Refusal> {
    values::one_of(text, "is not known", &[("spawn", ()), ("fork", ()), ("forkserver", ())])
}

fn log_level(settings: &Settings<'_>, warnings: &mut Vec<String>) -> Result<Level, UsageError> {
    let usual = settings.dialect.log_level();
    Ok(level(settings.occurrences("verbose")?, settings.env("LOGLEVEL"), usual, warnings))
}

/// The log level: how often `--verbose` was given, else what `LOGLEVEL` names.
fn level(verbose: u8, named: Option<OsString>, usual: Level, warnings: &mut Vec<String>) -> Level {
    match verbose {
        0 => {}
        1 => return Level::DEBUG,
        _ => return Level::TRACE,
    }
    let Some(value) = named else { return usual };
    // The names are Python's, because torchrun reads the same variable.
    match value.to_string_lossy().to_ascii_uppercase().as_str() {
        "NOTSET" | "TRACE" => Level::TRACE,
        "DEBUG" => Level::DEBUG,
        "INFO" => Level::INFO,
        "WARN" | "WARNING" => Level::WARN,
        "ERROR" | "CRITICAL" | "FATAL" => Level::ERROR,
        other => {
            warnings.push(format!(
                "LOGLEVEL={}: no such level, {usual} is used; the levels are DEBUG, INFO, WARNING, ERROR",
                other.escape_default()
            ));
            usual
        }
    }
}

/// Refuses torchrun's flag that cannot exist here. With torchrun this flag has no variable.
fn refuse_logs_specs(settings: &Settings<'_>) -> Result<(), UsageError> {
    if settings.on_command_line(list::LOGS_SPECS) && settings.text(list::LOGS_SPECS)?.is_some() {
        let cause = "it names a class of a Python package, and no Python runs in the agent";
        let advice = "leave it out; --log-dir, --redirects and --tee say where output goes";
        return Err(Refusal::new(cause, advice).of("--logs-specs"));
    }
    Ok(())
}

/// Checks the values of torchrun's flags for mechanisms that do not exist here.
fn without_effect(settings: &Settings<'_>) -> Result<(), UsageError> {
    settings.parsed("monitor-interval", values::duration)?;
    settings.parsed("start-method", start_method)?;
    settings.parsed("node-rank", |text| values::count(text, 0))?;
    settings.parsed("master-port", values::port)?;
    Ok(())
}
