//! The command line: argv and environment become one validated [`Options`]. Nothing here reads files or the network,
//! and only [`from_process`] reads this process.

mod completion;
mod conf;
mod dialect;
mod endpoint;
mod error;
mod flags;
mod help;
mod logs;
mod peers;
mod preflight;
mod program;
mod rendezvous;
mod spare;
#[cfg(test)]
mod tests;
mod values;
mod watch;

use std::ffi::OsString;
use std::time::Duration;

use elastic_rendezvous::job::{JobId, OnStoreLoss, Protocols, Release, RestartPolicy, Spec, Timings};
use tracing::Level;
use uuid::Uuid;

use crate::machine::numa::Affinity;
use crate::machine::preflight::PreflightOptions;
use crate::output::events::EventHandler;
use crate::output::logs::LogOptions;
use crate::output::outcome::report::ReportForm;
use crate::store::choice::StoreChoice;
use crate::workers::command::Program;
use crate::workers::signals::{self, Handled};
use crate::workers::slots::WorkerCount;
use crate::workers_store::rank0_port::StoreHost;

pub use dialect::Dialect;
pub use error::Stop;
pub(crate) use error::UsageError;
pub(crate) use peers::PeerOptions;
pub(crate) use spare::SpareOptions;
pub(crate) use values::NodeRange;
pub(crate) use watch::WatchOptions;

use error::Refusal;
use flags::Settings;
use rendezvous::ResolvedRendezvous;

/// The longest `--rdzv-id`, in bytes. This is the limit of a file name.
const LONGEST_JOB: usize = 255;
/// The longest `--node-name`, in bytes. It leaves room for a suffix within a file name.
const LONGEST_NODE: usize = 200;
/// torchrun's job id if none is given.
const NO_JOB: &str = "none";
/// `--exclude-after` unless given.
const EXCLUDE_AFTER: u32 = 3;
/// The lease of a node whose store is its own. No other node can take this node's place. So it may be frozen for
/// any time (a closed lid, Ctrl-Z), and continues after that.
const ALONE: Duration = Duration::from_secs(365 * 24 * 3600);

/// Everything the command line says, validated.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Options {
    /// The launcher that this program replaces.
    pub dialect: Dialect,
    /// The job's id.
    pub job: JobId,
    /// The fewest and the most nodes.
    pub nodes: NodeRange,
    /// How the number of workers on this node is given. [`crate::workers::slots::count`] turns it into a number.
    pub workers: WorkerCount,
    /// The store that nodes meet through.
    pub rendezvous: StoreChoice,
    /// The key prefix in the store, `/a/b`. None: the protocol's own.
    pub prefix: Option<String>,
    /// The protocol version that a new job begins with.
    pub protocol: u32,
    /// Durations that all agents of the job share: those that were given, else the protocol's defaults.
    pub timings: Timings,
    /// How long workers that know about rounds may take to quiesce. This is part of `stop_grace`.
    pub quiesce_timeout: Duration,
    /// How many failures the job forgives.
    pub max_restarts: u32,
    /// How many restarts in a row may bring no new step.
    pub restarts_without_progress: Option<u32>,
    /// How many restarts in a row may follow the same failure of programs that have just begun; none: all.
    pub failed_starts: Option<u32>,
    /// After how many failures a node is left out for a time; zero: never.
    pub exclude_after: u32,
    /// Whether only failures use up `max_restarts`, or all changes.
    pub restart_policy: RestartPolicy,
    /// What to do while the store is away.
    pub on_store_loss: OnStoreLoss,
    /// Whether an agent or worker rank 0 serves the store that workers find each other through.
    pub store_host: StoreHost,
    /// Whether this store serves every host that reaches it, not only hosts of its round's nodes.
    pub open_store: bool,
    /// `--node-name`.
    pub node_name: Option<String>,
    /// With `static`, the place that this node must have.
    pub place: Option<u32>,
    /// The workers' role.
    pub role: String,
    /// How workers are bound to CPUs near their GPUs, if at all.
    pub numa: Option<Affinity>,
    /// Whether each worker sees only its own GPU.
    pub virtual_local_rank: bool,
    /// Signals that make the agent leave.
    pub signals: Vec<Handled>,
    /// Whether the user named the signals. Named signals are handled even if this process was started to ignore them.
    pub signals_named: bool,
    /// Where torchrun's events go.
    pub events: EventHandler,
    /// The program that workers run.
    pub program: Program,
    /// Where the workers' output goes.
    pub logs: LogOptions,
    /// The form of the report at the agent's end.
    pub report: ReportForm,
    /// If set, workers start before the node joins, and the agent waits this long until they are ready.
    pub warm_up: Option<Duration>,
    /// What the agent checks before the node joins.
    pub preflight: PreflightOptions,
    /// The hangs to watch for, and the health port.
    pub watch: WatchOptions,
    /// `--local-addr`.
    pub local_addr: Option<String>,
    /// Whether gloo and NCCL are to use the interface whose address peers use.
    pub pin_interface: bool,
    /// How other agents are reached, and reach this one.
    pub peers: PeerOptions,
    /// The agent's own log level.
    pub log_level: Level,
    /// Whether the agent's own log is JSON.
    pub json_logs: bool,
    /// Warnings for the user, to be logged once logging is set up. Each is one line.
    pub warnings: Vec<String>,
}

impl Options {
    /// The part of these options that all agents of the job must share.
    pub(crate) fn spec(&self) -> Spec {
        Spec {
            protocol: self.protocol,
            release: Some(Release::ours()),
            min_nodes: self.nodes.min,
            max_nodes: self.nodes.max,
            max_restarts: self.max_restarts,
            restarts_without_progress: self.restarts_without_progress,
            failed_starts: self.failed_starts,
            exclude_after: self.exclude_after,
            restart_policy: self.restart_policy,
            on_store_loss: self.on_store_loss,
            peer_tls: self.peers.tls.is_some(),
            timings: self.timings,
        }
    }
}

/// What this process was started to do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Task {
    /// Take part in one job.
    Agent(Box<Options>),
    /// Go to whichever of several jobs lacks a node.
    Spare(SpareOptions),
}

/// Reads this process's arguments and environment.
///
/// # Errors
/// Says why there are no options. The dialect decides the exit code.
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
///
/// # Errors
/// Says why it is not, or what is shown instead.
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
    let conf = settings.text("rdzv-conf")?.map(|setting| conf::parse(&setting)).transpose()?.unwrap_or_default();
    let mut warnings = conf.warnings.clone();
    let peers = peers::read(settings)?;
    let ResolvedRendezvous { rendezvous, place } = rendezvous::resolve(settings, nodes, &conf, &peers, &mut warnings)?;
    let nodes = fitting(nodes, &rendezvous, place, &mut warnings);
    let local_addr = local_addr(settings, &rendezvous, place, &peers)?;
    let handled = handled(settings, &mut warnings)?;
    let job = job(settings, &rendezvous, fresh, &mut warnings)?;
    let timings = timings(settings, &conf, &rendezvous)?;
    // By default, half of the time is left for workers that must be stopped after all.
    let quiesce_timeout = conf.quiesce_timeout.unwrap_or(timings.stop_grace / 2).min(timings.stop_grace);
    without_effect(settings)?;
    let logs = logs::logs(settings)?;
    let watch = watch::read(settings, &logs, &mut warnings)?;
    let program = program::read(settings)?;
    let restarts_without_progress = settings.parsed("restarts-without-progress", |text| values::count(text, 1))?;
    let exclude_after = settings.parsed("exclude-after", |text| values::count(text, 0))?;
    let preflight = preflight::read(settings)?;
    let counts = [("restarts-without-progress", restarts_without_progress), ("exclude-after", exclude_after)];
    if matches!(rendezvous, StoreChoice::Etcd { v2: true, .. }) {
        warn_of_v2(&preflight, &peers, &counts, &mut warnings);
    }
    let options = Options {
        dialect: settings.dialect,
        job,
        nodes,
        workers: settings.parsed("nproc-per-node", values::workers)?.unwrap_or(settings.dialect.workers()),
        rendezvous,
        prefix: conf.prefix.clone(),
        protocol: conf.job_protocol.unwrap_or(Protocols::OURS.newest),
        timings,
        quiesce_timeout,
        max_restarts: settings
            .parsed("max-restarts", |text| values::count(text, 0))?
            .unwrap_or(settings.dialect.max_restarts()),
        restarts_without_progress,
        failed_starts: settings.dialect.failed_starts().filter(|_| restarts_without_progress.is_none()),
        exclude_after: exclude_after.unwrap_or(EXCLUDE_AFTER),
        restart_policy: settings.parsed("restart-policy", restart_policy)?.unwrap_or_default(),
        on_store_loss: settings
            .parsed("on-store-loss", conf::on_store_loss)?
            .or(conf.on_store_loss)
            .unwrap_or_default(),
        open_store: conf.open_store,
        store_host: conf.store_host(settings.env("TORCH_DISABLE_SHARE_RDZV_TCP_STORE").is_some_and(|set| set == "1")),
        node_name: settings.parsed("node-name", |text| values::id(text, LONGEST_NODE))?,
        place,
        role: settings.parsed("role", role)?.unwrap_or_else(|| "default".into()),
        numa: settings.parsed("numa-binding", numa)?,
        virtual_local_rank: settings.switch("virtual-local-rank")?,
        signals: handled,
        signals_named: settings.text("signals-to-handle")?.is_some(),
        events: settings.parsed("event-log-handler", events)?.unwrap_or_default(),
        warm_up: program::warm_up(settings, &logs, &program)?,
        logs,
        preflight,
        watch,
        report: logs::report(settings)?,
        local_addr,
        pin_interface: settings.switch("pin-interface")?,
        peers,
        log_level: log_level(settings, &mut warnings)?,
        json_logs: settings.switch("json-logs")?,
        program,
        warnings,
    };
    let checked = options.spec().check();
    checked.map_err(|error| Refusal::new(error.to_string(), "see elastic-agent --help").of("--rdzv-conf"))?;
    Ok(options)
}

/// The number of nodes that this way to meet allows.
fn fitting(
    mut nodes: NodeRange,
    rendezvous: &StoreChoice,
    place: Option<u32>,
    warnings: &mut Vec<String>,
) -> NodeRange {
    if *rendezvous == StoreChoice::Standalone && nodes.max > 1 {
        warnings.push(format!("--standalone runs one node: --nnodes={nodes} is taken as 1"));
        nodes.max = 1;
    }
    if place.is_some() && nodes.min < nodes.max {
        warnings.push(format!("--rdzv-backend=static is of a fixed size: --nnodes={nodes} is taken as {}", nodes.max));
        nodes.min = nodes.max;
    }
    nodes
}

fn local_addr(
    settings: &Settings<'_>,
    rendezvous: &StoreChoice,
    place: Option<u32>,
    peers: &PeerOptions,
) -> Result<Option<String>, UsageError> {
    let given = settings.parsed("local-addr", values::address)?;
    // With static, node 0 is reached at the address that --master-addr gives.
    let named = match rendezvous {
        StoreChoice::Hosted { endpoint, .. } if place == Some(0) => Some(endpoint.host.clone()),
        _ => None,
    };
    Ok(given.or(named).or_else(|| peers.advertised()))
}

fn handled(settings: &Settings<'_>, warnings: &mut Vec<String>) -> Result<Vec<Handled>, UsageError> {
    let given = settings.text("signals-to-handle")?;
    let (handled, passed_over) = signals::parse(given.as_ref().map_or(signals::DEFAULT, |setting| &setting.value));
    warnings.extend(passed_over);
    Ok(handled)
}

fn timings(settings: &Settings<'_>, conf: &conf::Conf, rendezvous: &StoreChoice) -> Result<Timings, UsageError> {
    let mut timings = conf.timings;
    timings.stop_grace = stop_grace(settings)?.unwrap_or(timings.stop_grace);
    timings.drain_grace =
        settings.parsed("drain-grace", values::duration)?.or(conf.drain_grace).unwrap_or(timings.stop_grace);
    if *rendezvous == StoreChoice::Standalone {
        timings.lease_ttl = ALONE;
    }
    Ok(timings)
}

/// Warns of flags that have no effect, or less, on etcd's v2 API.
fn warn_of_v2(
    preflight: &PreflightOptions,
    peers: &PeerOptions,
    counts: &[(&str, Option<u32>)],
    warnings: &mut Vec<String>,
) {
    if preflight.peer_bandwidth.is_some() {
        let why = "where a node cannot check who asks it to send";
        warnings.push(format!("--preflight-peer-bandwidth has no effect on etcd's v2 API, {why}"));
    }
    if peers.tls.is_some() {
        warnings.push(
            "--peer-cert protects only the health port on etcd's v2 API, where agents do not speak with each other"
                .into(),
        );
    }
    let given = counts.iter().filter(|(_, value)| value.is_some());
    warnings.extend(
        given.map(|(flag, _)| format!("--{flag} has no effect on etcd's v2 API, where each agent counts for itself")),
    );
}

fn job(
    settings: &Settings<'_>,
    rendezvous: &StoreChoice,
    fresh: Uuid,
    warnings: &mut Vec<String>,
) -> Result<JobId, UsageError> {
    let told = settings.switch("standalone")? || settings.text("master-port")?.is_none();
    if *rendezvous == StoreChoice::Standalone && told {
        return job_id(&fresh.to_string()).map_err(|refusal| refusal.of("--standalone"));
    }
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

fn stop_grace(settings: &Settings<'_>) -> Result<Option<Duration>, UsageError> {
    if let Some(grace) = settings.parsed("shutdown-timeout", values::duration)? {
        return Ok(Some(grace));
    }
    const VARIABLE: &str = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT";
    let Some(value) = settings.env(VARIABLE) else { return Ok(None) };
    let text = value.to_string_lossy();
    values::duration(&text).map(Some).map_err(|refusal| refusal.of(format_args!("{VARIABLE}={text}")))
}

fn restart_policy(text: &str) -> Result<RestartPolicy, Refusal> {
    match text {
        "failures" => Ok(RestartPolicy::Failures),
        "all" => Ok(RestartPolicy::All),
        other => Err(Refusal::new(format!("`{other}` is not known"), "give `failures` or `all`")),
    }
}

fn role(text: &str) -> Result<String, Refusal> {
    const ADVICE: &str = "give a short name, for example `trainer`";
    if text.is_empty() || text.chars().any(char::is_control) || text.len() > 128 {
        return Err(Refusal::new("it is empty, too long, or holds control characters", ADVICE));
    }
    Ok(text.to_owned())
}

fn numa(text: &str) -> Result<Affinity, Refusal> {
    match text {
        "node" => Ok(Affinity::Node),
        "socket" => Ok(Affinity::Socket),
        "exclusive" => Ok(Affinity::Exclusive),
        "core-complex" => Ok(Affinity::CoreComplex),
        other => Err(Refusal::new(
            format!("`{other}` is not a binding mode"),
            "give `node`, `socket`, `exclusive` or `core-complex`",
        )),
    }
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

fn start_method(text: &str) -> Result<(), Refusal> {
    match text {
        "spawn" | "fork" | "forkserver" => Ok(()),
        other => Err(Refusal::new(format!("`{other}` is not known"), "give `spawn`, `fork` or `forkserver`")),
    }
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
    if settings.given(flags::LOGS_SPECS) && settings.text(flags::LOGS_SPECS)?.is_some_and(|it| !it.value.is_empty()) {
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
    settings.parsed("node-rank", values::place)?;
    settings.parsed("master-port", values::port)?;
    Ok(())
}
