//! One node's part in a job, from its first read of the store to its exit code.
//!
//! | file | what it does |
//! |---|---|
//! | `setup.rs` | makes what a node needs, out of the command line and this machine |
//! | `rounds.rs` | takes part: from one round to the next, until the node's part is over |
//! | `command_lines.rs` | warns where nodes run different programs |
//! | `ending.rs` | leaves, and reports how it ended |
//! | [`health`] | tells over HTTP how the agent is |
//! | [`metrics`] | what Prometheus reads there |
//! | [`progress`] | writes to the store how far the job has come |

mod command_lines;
mod ending;
pub(crate) mod health;
pub(crate) mod metrics;
pub(crate) mod progress;
mod rounds;
mod setup;

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use elastic_node::logs::READERS;
use elastic_node::trust;
use elastic_rendezvous::End;
use elastic_rendezvous::job::{Keys, NodeRecord, Spec};
use elastic_store::Store;
use elastic_store::tls::MutualTls;
use tokio::sync::mpsc;

use crate::cli::{Dialect, HealthPort, Options};
use crate::guard::Guard;
use crate::machine::address::Advertised;
use crate::machine::gpu_watch::GpuWatch;
use crate::machine::identity::{self, NodeIdentity};
use crate::machine::preflight;
use crate::machine::preflight::Joining;
use crate::output::logs::{self, Console, LogDir, LogReaders, Logs};
use crate::output::outcome::report::Report;
use crate::run::progress::JobProgress;
use crate::store::backend::{self, Backend};
use crate::store::participation::JobPaths;
use crate::workers::gpu_holders::GpuHolders;
use crate::workers::group::LocalGroup;
use crate::workers::lifecycle::WorkersLifecycle;
use crate::workers::signals::{self, Signals};
use crate::workers::socket::WorkerSocket;
use crate::workers::warm_up::{WarmedUp, warm_up};
use crate::workers::watchdog::{TIMER_FILE, TimerFile, Watchdog};
use ending::FLUSH;
use health::{Health, Joined};
use metrics::Metrics;
use setup::{Variables, WorkersPlan};

/// Takes part in the job that `options` describe, reports how it ended, and returns the process's exit code.
pub(crate) async fn run_to_end(options: Options, guard: Guard, console: Console) -> u8 {
    let (job, form, dialect) = (options.job.to_string(), options.output.report, options.dialect);
    let alone = options.spec.max_nodes == 1;
    let report = match run(options, guard, &console).await {
        Ok(end) => Report::of_end(&job, &end, alone),
        Err(error) => Report::of_error(&job, &error),
    };
    let report = if dialect == Dialect::Own { report } else { report.into_torchrun() };
    ending::tell(&report, form, &console);
    console.flush(FLUSH);
    report.exit_code()
}

/// What a node needs to join its job.
struct Ready {
    plan: WorkersPlan,
    logs: Logs,
    identity: NodeIdentity,
    paths: JobPaths,
    backend: Backend,
    metrics: Option<Arc<Metrics>>,
    /// The job's spec where workers warm up before the node joins, else the spec of its own flags.
    known: Spec,
    address: Advertised,
    env: Variables,
}

/// Takes part in the job, and returns how that ended. The error is a chain of causes that kept this node from taking
/// part.
async fn run(mut options: Options, guard: Guard, console: &Console) -> anyhow::Result<End> {
    // This comes first, so that none of these signals ever has its default action.
    let mut signals = Signals::watch(options.signals.get_or_insert_with(signals::usual))?;
    // This comes before all that may take a while: who waits lives.
    let tls = options.network.tls.clone().map(MutualTls::follow).transpose().map_err(anyhow::Error::msg)?;
    let health = Health::of(options.job.to_string());
    if let Some(HealthPort { at, needed }) = options.health {
        match health.tell(at, tls.clone()) {
            Err(error) if !needed => tracing::warn!("TORCHELASTIC_HEALTH_CHECK_PORT has no effect: {error:#}"),
            told => told?,
        }
    }
    let ready = tokio::select! {
        ready = prepare(&options, &health, tls.as_ref(), console) => ready?,
        caught = signals.next() => {
            tracing::warn!("{caught}: leaving before the job was joined");
            return Ok(End::Drained);
        }
    };
    join(&options, ready, guard, &health, tls, &mut signals, console).await
}

/// Does in another thread what a driver or a disk may keep for ever: signals and the health port are answered meanwhile.
async fn apart<T: Send + 'static>(what: &'static str, work: impl FnOnce() -> T + Send + 'static) -> anyhow::Result<T> {
    tokio::task::spawn_blocking(work).await.with_context(|| format!("cannot {what}"))
}

/// Makes what a node needs to join its job, and checks that it may join.
async fn prepare(
    options: &Options,
    health: &Health,
    tls: Option<&MutualTls>,
    console: &Console,
) -> anyhow::Result<Ready> {
    health.before("looking for the workers' program, GPUs and CPUs");
    let workers = options.workers.clone();
    let plan = apart("find the workers' program and GPUs", move || setup::plan(&workers)).await??;
    let slots = plan.slots;
    health.before("looking at this machine (--preflight)");
    preflight::pass(&options.preflight, setup::preflight(options, slots)).await?;
    let hostname = identity::hostname();
    health.before("making the log folder");
    let (log_options, names, shown) =
        (options.output.logs.clone(), setup::log_names(options, &hostname), console.clone());
    let logs = apart("make the log folder", move || Logs::open(log_options, names, shown)).await??;

    health.before("taking the node's name");
    let identity = setup::claim_name(options).await?;
    let paths = setup::job_paths(options.store.prefix.as_deref(), &options.job);
    health.before(setup::waits_for(&options.store.choice));
    let way = backend::Way { tls, network: &options.network, store: &options.store };
    let mut backend = backend::open(&paths, way, options.spec.timings.join_timeout).await?;
    // Without a port, no one can read metrics.
    let metrics = options.health.map(|_| Metrics::new(options.job.as_ref(), &identity.name, tls.cloned()));
    if let Some(metrics) = &metrics {
        backend.observed_by(metrics.observer());
    }
    let known = match backend.store() {
        Some(store) => look_at_job(options, store, &paths.keys, &identity, tls, health).await?,
        None => options.spec.clone(),
    };
    health.before("joining");
    // This comes after the store was found: a name that can be resolved now may not have been resolvable before.
    let (address, env) = setup::address(options, &hostname).await?;
    tracing::info!(node = %identity, %address, slots, "this node");
    Ok(Ready { plan, logs, identity, paths, backend, metrics, known, address, env })
}

/// Checks what would keep this node out of the job: the certificates, the bandwidth to the job's nodes. Returns the
/// job's spec if workers warm up before the node joins, and otherwise the spec of these options.
async fn look_at_job(
    options: &Options,
    store: &Arc<dyn Store>,
    keys: &Keys,
    identity: &NodeIdentity,
    tls: Option<&MutualTls>,
    health: &Health,
) -> anyhow::Result<Spec> {
    if let Some(tls) = tls
        && let Some(why) = trust::distrust(store.as_ref(), keys, tls).await?
    {
        return Err(anyhow::Error::msg(why));
    }
    if options.preflight.peer_bandwidth.is_some() {
        health.before("measuring the bandwidth to the job's nodes (--preflight-peer-bandwidth)");
        let (job, node) = (&options.job, identity.to_string());
        let joining = Joining { store, job, keys, node, boot: &identity.boot_id, tls };
        preflight::pass_peers(&options.preflight, &joining).await?;
    }
    if options.workers.warm_up.is_none() {
        return Ok(options.spec.clone());
    }
    // What warms up may take a minute: better to end before it than after.
    setup::job_spec(store.as_ref(), keys, options.spec.clone()).await.map_err(anyhow::Error::msg)
}

/// Joins the job, takes part until the node's part is over, and leaves.
async fn join(
    options: &Options,
    ready: Ready,
    guard: Guard,
    health: &Arc<Health>,
    tls: Option<MutualTls>,
    signals: &mut Signals,
    console: &Console,
) -> anyhow::Result<End> {
    let Ready { plan, logs, identity, paths, backend, metrics, known, address, mut env } = ready;
    let slots = plan.slots;
    let timers = TimerFile::as_asked(&options.watch.timers)?;
    env.extend(timers.as_ref().map(|timers| (TIMER_FILE, timers.path().into())));
    let grace = known.timings.stop_grace;
    let group = setup::group(options, plan, &identity, address.address.clone(), env, known, console)?;
    let mut group = LocalGroup::new(group, guard, logs)?;
    if let Some(directory) = group.log_directory() {
        tracing::info!(directory = %directory.display(), "logs");
    }
    group.guard().hold(identity.lock_fd())?;
    let listener = setup::listen(&options.network, &address.address)?;
    group.guard().hold(&listener)?;
    let peer = setup::reached(options, address.address, &listener).await?;

    tracing::info!(job = %options.job, store = %backend.name, "joining");
    let (logs, requests) = mpsc::channel(READERS);
    let readers = LogReaders::start(group.output_history(), requests);
    let part = setup::participation(&backend, &paths, options.job.clone(), listener, logs, tls.clone());
    let job = (backend.rendezvous.clone(), paths.clone());
    let socket = WorkerSocket::open(&identity.fresh_socket(), job, part.status(), options.workers.fresh)?;
    let watchdog = Watchdog::start(options.watch.limits, timers, socket.steps());
    let goodput = metrics.as_ref().map(Metrics::goodput_observer);
    if let Some(metrics) = metrics {
        let (node, status, group) = (identity.name.clone(), part.status(), group.state());
        let gpus = GpuWatch::of(setup::visible_gpus());
        health.joined(Joined { node, status, group, steps: socket.steps(), metrics, gpus });
    }
    let mut progress = JobProgress::new(backend.store(), &paths.keys, part.status(), socket.furthest(), goodput);
    let mut record = setup::record(options, &identity, peer, slots);
    let alone = setup::alone(options, &paths.keys, record.id(), tls);
    let gpus = GpuHolders::of(options.job.as_ref(), &identity.name);
    let status = part.status();
    let job_timings = || status.borrow().timings.unwrap_or(options.spec.timings);
    let (quiesce, warm_up_limit) = (options.workers.quiesce_timeout, options.workers.warm_up.unwrap_or_default());
    let mut local = WorkersLifecycle::new(identity, group, socket, watchdog, gpus, quiesce, warm_up_limit);

    let end = tokio::select! {
        end = async {
            if options.workers.warm_up.is_some() && !warmed(&mut local, &mut record, grace, signals).await? {
                return Ok(End::Drained);
            }
            rounds::take_part(part, record, options.spec.clone(), backend.store(), &paths.keys, &mut local, signals).await
        } => end?,
        () = backend.host_gone(job_timings) => {
            End::StoreLost(format!("store lost: {} is gone with the agent that served it", backend.name))
        }
        never = progress.follow() => match never {},
        never = alone.watch(&backend) => match never {},
    };

    if !matches!(end, End::StoreLost(_)) {
        // The last steps are only for people to read, so the agent does not wait long here.
        let _ = tokio::time::timeout(FLUSH, progress.tell()).await;
    }
    leave(options, backend, &paths.keys, local, readers, signals, end).await
}

/// Ends what is left of the node's part, which ended like this. An agent that serves the store leaves last.
async fn leave(
    options: &Options,
    backend: Backend,
    keys: &Keys,
    local: WorkersLifecycle,
    readers: LogReaders,
    signals: &mut Signals,
    end: End,
) -> anyhow::Result<End> {
    let idle = local.group.state().borrow().round == 0;
    local.group.conclude(ending::reason(&end));
    tokio::select! {
        biased;
        () = ending::leave_store(&backend, keys, &local.identity.name, &end) => {}
        caught = signals.next() => tracing::warn!("{caught}: not waiting for the others to leave"),
    }
    let WorkersLifecycle { identity, group, socket, watchdog, .. } = local;
    drop((socket, watchdog));
    tokio::select! {
        () = close(group, readers, &options.output.logs.dir, &end) => {}
        caught = signals.next() => tracing::warn!("{caught}: not waiting for processes that do not end, nor for output"),
    }
    if !matches!(end, End::StoreLost(_)) {
        identity.retire();
    }
    if idle && matches!(end, End::Succeeded) { ending::without_work(options) } else { Ok(end) }
}

/// Warms the workers up before the node joins, and writes to the node's record whether they are warm. Returns false if a
/// signal told the agent to leave.
async fn warmed(
    local: &mut WorkersLifecycle,
    record: &mut NodeRecord,
    grace: Duration,
    signals: &mut Signals,
) -> anyhow::Result<bool> {
    match warm_up(local, grace, signals).await? {
        WarmedUp::Warm => record.warms_up = true,
        WarmedUp::Cold => {}
        WarmedUp::Told(caught) => {
            tracing::warn!("{caught}: leaving before the job was joined");
            return Ok(false);
        }
    }
    Ok(true)
}

/// Ends what is left of the workers, and waits until their output is written and read.
async fn close(group: LocalGroup, readers: LogReaders, dir: &LogDir, end: &End) {
    let log_directory = group.log_directory().map(Path::to_owned);
    group.close(FLUSH).await;
    readers.finish(FLUSH).await;
    if let (End::Succeeded, LogDir::Temporary, Some(directory)) = (end, dir, log_directory) {
        logs::remove_if_empty(&directory);
    }
}
