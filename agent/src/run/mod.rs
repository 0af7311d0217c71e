//! One node's part in a job, from its first read of the store to its exit code.
//!
//! | file | what it does |
//! |---|---|
//! | `setup.rs` | makes what a node needs, out of the command line and this machine |
//! | `rounds.rs` | takes part: from one round to the next, until the node's part is over |
//! | `ending.rs` | leaves, and reports how it ended |
//! | [`health`] | tells over HTTP how the agent is |
//! | [`metrics`] | what Prometheus reads there |
//! | [`progress`] | writes to the store how far the job has come |

mod ending;
pub(crate) mod health;
pub(crate) mod metrics;
pub(crate) mod progress;
mod rounds;
mod setup;

use std::path::Path;

use elastic_node::logs::READERS;
use elastic_node::trust;
use elastic_rendezvous::End;
use elastic_rendezvous::job::Endpoint;
use elastic_store::tls::MutualTls;
use tokio::sync::mpsc;

use crate::cli::{Dialect, Options};
use crate::guard::Guard;
use crate::machine::gpu_watch::GpuWatch;
use crate::machine::preflight::Joining;
use crate::machine::{identity, preflight};
use crate::output::logs::{self, Console, LogDir, LogReaders, Logs};
use crate::output::outcome::report::Report;
use crate::run::progress::JobProgress;
use crate::store::backend;
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

/// Takes part in the job that `options` describe, reports how it ended, and returns the process's exit code.
pub(crate) async fn run_to_end(options: Options, guard: Guard, console: Console) -> u8 {
    let (job, form, dialect) = (options.job.to_string(), options.report, options.dialect);
    let alone = options.nodes.max == 1;
    let report = match run(options, guard, &console).await {
        Ok(end) => Report::of_end(&job, &end, alone),
        Err(error) => Report::of_error(&job, &error),
    };
    let report = if dialect == Dialect::Own { report } else { report.into_torchrun() };
    ending::tell(&report, form, &console);
    console.flush(FLUSH);
    report.exit_code()
}

/// Does one step before the job is joined. Returns none if a signal told the agent to leave meanwhile.
async fn unless_told<T>(
    signals: &mut Signals,
    step: impl Future<Output = anyhow::Result<T>>,
) -> anyhow::Result<Option<T>> {
    tokio::select! {
        done = step => done.map(Some),
        caught = signals.next() => {
            tracing::warn!("{caught}: leaving before the job was joined");
            Ok(None)
        }
    }
}

/// Takes part in the job, and returns how that ended. The error is a chain of causes that kept this node from taking
/// part.
async fn run(mut options: Options, guard: Guard, console: &Console) -> anyhow::Result<End> {
    if !options.signals_named {
        options.signals = signals::unless_ignored(options.signals);
    }
    // This comes first, so that none of these signals ever has its default action.
    let mut signals = Signals::watch(&options.signals)?;
    for warning in &options.warnings {
        tracing::warn!("{warning}");
    }
    let spec = options.spec();
    spec.check()?;
    // This comes before all that may take a while: who waits lives.
    let tls = options.peers.tls.clone().map(MutualTls::follow).transpose().map_err(anyhow::Error::msg)?;
    let health = Health::of(options.job.to_string());
    if let Some(at) = options.watch.health {
        health.tell(at, tls.clone())?;
    }
    let timings = spec.timings;
    let program = setup::program(&options)?;
    let slots = program.slots;
    health.before("looking at this machine (--preflight)");
    let fit = async { Ok(preflight::pass(&options.preflight, setup::preflight(&options, slots)).await?) };
    let Some(()) = unless_told(&mut signals, fit).await? else { return Ok(End::Drained) };
    let hostname = identity::hostname();
    let logs = Logs::open(options.logs.clone(), setup::log_names(&options, &hostname), console.clone())?;

    health.before("taking the node's name");
    let claim = setup::claim_name(&options);
    let Some(identity) = unless_told(&mut signals, claim).await? else { return Ok(End::Drained) };
    let paths = setup::job_paths(&options);
    health.before(setup::waits_for(&options.rendezvous));
    let way = backend::Way { tls: tls.as_ref(), bind: options.peers.bind };
    let open = async { Ok(backend::open(&options.rendezvous, &paths, way, timings.join_timeout).await?) };
    let Some(mut backend) = unless_told(&mut signals, open).await? else { return Ok(End::Drained) };
    // Without a port, no one can read metrics.
    let metrics = options.watch.health.map(|_| Metrics::new(options.job.as_ref(), &identity.name, tls.clone()));
    if let Some(metrics) = &metrics {
        backend.observed_by(metrics.observer());
    }
    if let (Some(store), Some(tls)) = (backend.store(), &tls) {
        let trusted = async {
            let distrust = trust::distrust(store.as_ref(), &paths.keys, tls).await?;
            distrust.map_or(Ok(()), |why| Err(anyhow::Error::msg(why)))
        };
        let Some(()) = unless_told(&mut signals, trusted).await? else { return Ok(End::Drained) };
    }
    if let (Some(store), Some(_)) = (backend.store(), options.preflight.peer_bandwidth) {
        health.before("measuring the bandwidth to the job's nodes (--preflight-peer-bandwidth)");
        let (job, keys) = (&options.job, &paths.keys);
        let joining =
            Joining { store, job, keys, node: identity.to_string(), boot: &identity.boot_id, tls: tls.as_ref() };
        let fit = async { Ok(preflight::pass_peers(&options.preflight, &joining).await?) };
        let Some(()) = unless_told(&mut signals, fit).await? else { return Ok(End::Drained) };
    }
    let mut known = spec.clone();
    if let (Some(store), Some(_)) = (backend.store(), options.warm_up) {
        // What warms up may take a minute: better to end before it than after.
        let read = async { setup::job_spec(store.as_ref(), &paths.keys, known).await.map_err(anyhow::Error::msg) };
        let Some(read) = unless_told(&mut signals, read).await? else { return Ok(End::Drained) };
        known = read;
    }
    health.before("joining");
    // This comes after the store was found: a name that can be resolved now may not have been resolvable before.
    let address = setup::address(&options, &hostname);
    let Some((address, mut env)) = unless_told(&mut signals, address).await? else { return Ok(End::Drained) };
    tracing::info!(node = %identity, %address, slots, "this node");

    let timers = TimerFile::as_asked(&options.watch.timers, identity.runtime_dir())?;
    env.extend(timers.as_ref().map(|timers| (TIMER_FILE, timers.path().into())));
    let events = setup::events(&options, &hostname, console);
    let grace = known.timings.stop_grace;
    let group = setup::group(&options, program, &identity, address.address.clone(), events, env, known)?;
    let mut group = LocalGroup::new(group, guard, logs)?;
    if let Some(directory) = group.log_directory() {
        tracing::info!(directory = %directory.display(), "logs");
    }
    group.guard().hold(identity.lock_fd())?;
    let listener = setup::listen(&options, &address.address).await?;
    group.guard().hold(&listener)?;
    let peer = Endpoint { host: address.address, port: listener.local_addr()?.port() };

    tracing::info!(job = %options.job, store = %backend.name, "joining");
    let (logs, requests) = mpsc::channel(READERS);
    let readers = LogReaders::start(group.output_history(), requests);
    let part = setup::participation(&backend, &paths, options.job.clone(), listener, logs, tls);
    let socket = identity.fresh_socket();
    let socket = WorkerSocket::open(&socket, backend.rendezvous.clone(), paths.clone(), part.status())?;
    let watchdog = Watchdog::start(options.watch.limits, timers, socket.steps());
    let goodput = metrics.as_ref().map(Metrics::goodput_observer);
    if let Some(metrics) = metrics {
        let (node, status, group) = (identity.name.clone(), part.status(), group.state());
        let gpus = GpuWatch::of(setup::visible_gpus());
        health.joined(Joined { node, status, group, steps: socket.steps(), metrics, gpus });
    }
    let mut progress = JobProgress::new(backend.store(), &paths.keys, part.status(), socket.furthest(), goodput);
    let mut record = setup::record(&options, &identity, peer, slots);
    let gpus = GpuHolders::of(options.job.as_ref(), &identity.name);
    let warm_up_limit = options.warm_up.unwrap_or_default();
    let status = part.status();
    let job_timings = || status.borrow().timings.unwrap_or(timings);
    let mut local = WorkersLifecycle::new(group, socket, watchdog, gpus, options.quiesce_timeout, warm_up_limit);

    let end = tokio::select! {
        end = async {
            if options.warm_up.is_some() {
                match warm_up(&mut local, grace, &mut signals).await? {
                    WarmedUp::Warm => record.warms_up = true,
                    WarmedUp::Cold => {}
                    WarmedUp::Told(caught) => {
                        tracing::warn!("{caught}: leaving before the job was joined");
                        return Ok(End::Drained);
                    }
                }
            }
            rounds::take_part(part, record, spec, backend.store(), &paths.keys, &mut local, &mut signals).await
        } => end?,
        () = backend.host_gone(job_timings) => {
            End::StoreLost(format!("store lost: {} is gone with the agent that served it", backend.name))
        }
        never = progress.follow() => match never {},
    };

    if !matches!(end, End::StoreLost(_)) {
        // The last steps are only for people to read, so the agent does not wait long here.
        let _ = tokio::time::timeout(FLUSH, progress.tell()).await;
    }
    local.group.conclude(ending::reason(&end));
    if backend.serves {
        tokio::select! {
            () = ending::leave_last(&backend, &paths.keys, &end) => {}
            caught = signals.next() => tracing::warn!("{caught}: not waiting for the others to leave"),
        }
    }
    let WorkersLifecycle { group, socket, watchdog, .. } = local;
    drop((socket, watchdog));
    let log_directory = group.log_directory().map(Path::to_owned);
    group.close(FLUSH).await;
    readers.finish(FLUSH).await;
    if let (End::Succeeded, LogDir::Temporary, Some(directory)) = (&end, &options.logs.dir, log_directory) {
        logs::remove_if_empty(&directory);
    }
    if !matches!(end, End::StoreLost(_)) {
        identity.retire();
    }
    Ok(end)
}
