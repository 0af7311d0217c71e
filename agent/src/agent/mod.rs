//! One node's part in a job, from its first read of the store to its exit code. Not for parsing flags, nor for the
//! protocol's decisions.

pub mod health;

use std::cell::LazyCell;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use elastic_coordinator::job::{Endpoint, Keys, NodeRecord, Phase, Spec};
use elastic_coordinator::node::torchelastic::TorchElastic;
use elastic_coordinator::node::{Command, Node, Parting, Report};
use elastic_coordinator::rendezvous::{End, Setup};
use elastic_coordinator::store::Store;
use elastic_coordinator::torchelastic::{DEFAULT_PREFIX, Paths};
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use uuid::Uuid;

use self::health::Health;
use crate::cli::{Dialect, Options};
use crate::guard::Guard;
use crate::machine::address;
use crate::machine::cpus::{self, CpuSet};
use crate::machine::devices::{self, Gpus};
use crate::machine::identity::{self, Claim, NodeIdentity};
use crate::machine::interfaces;
use crate::machine::numa;
use crate::meeting::backend::{self, Backend};
use crate::meeting::participation::{JobPaths, Meeting, Participation};
use crate::meeting::ports;
use crate::meeting::rendezvous::Rendezvous;
use crate::output::events::{self, EventHandler};
use crate::output::logs::{self, Console, ConsoleStream, LogDir, LogSpec, Logs};
use crate::output::outcome::recorded;
use crate::output::outcome::report::{Report as FinalReport, ReportForm};
use crate::workers::command::WorkerCommand;
use crate::workers::environment::{own_device, threads_warning};
use crate::workers::final_save;
use crate::workers::gpu_holders::GpuHolders;
use crate::workers::group::{Group, GroupSetup, Moved};
use crate::workers::local_workers::{Local, lost, wait};
use crate::workers::signals::{self, Handled, Signals};
use crate::workers::slots;
use crate::workers::socket::WorkerSocket;
use crate::workers::supervisor::Event;
use crate::workers::warm_up::warm_up;
use crate::workers::watchdog::{TIMER_FILE, TimerFile, Watchdog};

/// Longest that an agent which serves the store waits for the others to leave, if none of them may still save.
const LEAVE_LAST: Duration = Duration::from_secs(10);

/// Longest that the console may take for the last lines.
const FLUSH: Duration = Duration::from_secs(2);

/// Takes part in the job that `options` describe, reports how it ended, and returns the process's exit code.
pub async fn run_to_end(options: Options, guard: Guard, console: Console) -> u8 {
    let (job, form, dialect) = (options.job.to_string(), options.report, options.dialect);
    let report = match run(options, guard, &console).await {
        Ok(end) => FinalReport::of_end(&job, &end),
        Err(error) => FinalReport::of_error(&job, &error),
    };
    let report = if dialect == Dialect::Own { report } else { report.as_torchrun() };
    conclude(&report, form, &console);
    console.flush(FLUSH);
    report.exit_code()
}

/// Takes part, and returns how that ended, or what kept this node from it, as a chain of causes.
async fn run(mut options: Options, guard: Guard, console: &Console) -> anyhow::Result<End> {
    if !options.signals_named {
        options.signals = signals::unless_ignored(options.signals);
    }
    // First of all: at no time may one of these signals have its default action.
    let mut signals = Signals::watch(&options.signals)?;
    for warning in &options.warnings {
        tracing::warn!("{warning}");
    }
    let env = |name: &str| std::env::var_os(name);
    let text = |name: &str| std::env::var(name).ok();
    let spec = options.spec();
    spec.check()?;
    let job = options.job.clone();
    let command = WorkerCommand::resolve(&options.program, &env, std::env::current_exe().ok().as_deref())?;
    tracing::info!("workers run {}", command.program.display());
    let gpus = LazyCell::new(Gpus::detect);
    let slots = slots::count(options.workers, || &*gpus, &text)?;
    let cpus = bound_cpus(&options, slots, || &*gpus, text("CUDA_VISIBLE_DEVICES").as_deref())?;
    if options.virtual_local_rank {
        // All of them, before anything is joined.
        (0..slots).try_for_each(|local_rank| own_device(local_rank, &env).map(drop))?;
    }
    if let Some(warning) = threads_warning(slots, &env) {
        tracing::warn!("{warning}");
    }
    let hostname = identity::hostname();
    let logs = Logs::open(log_spec(&options, &hostname), console.clone())?;
    let node_name = options.node_name.clone();
    let claim_job = options.job.clone();
    let claim = tokio::task::spawn_blocking(move || {
        NodeIdentity::claim(&Claim {
            job: claim_job.as_ref(),
            node_name: node_name.as_deref(),
            runtime: identity::process_runtime_dir(),
            patience: identity::PATIENCE,
        })
    });
    let identity = tokio::select! {
        claimed = claim => claimed.context("claim a node name")??,
        caught = signals.next() => return Ok(left_early(caught)),
    };

    let job_paths = JobPaths {
        keys: Keys::new(options.prefix.as_deref().unwrap_or(Keys::DEFAULT_PREFIX), &job),
        paths: Paths::new(options.prefix.as_deref().unwrap_or(DEFAULT_PREFIX), job.as_ref()),
    };
    let backend = tokio::select! {
        backend = backend::open(&options.rendezvous, &job_paths, spec.timings.join_timeout) => backend?,
        caught = signals.next() => return Ok(left_early(caught)),
    };
    // After the store was found: what resolves by then need not have before.
    let address = {
        let (flag, rendezvous, hostname) = (options.local_addr.clone(), options.rendezvous.clone(), hostname.clone());
        let pinned = options.pin_interface;
        tokio::task::spawn_blocking(move || {
            let address = address::advertised(flag.as_deref(), rendezvous.endpoints(), &hostname);
            let env = interfaces::variables(&address.address, &hostname, pinned, &|name| std::env::var_os(name));
            (address, env)
        })
    };
    let (address, mut env) = tokio::select! {
        address = address => address.context("find this node's address")?,
        caught = signals.next() => return Ok(left_early(caught)),
    };
    tracing::info!(node = %identity, %address, slots, "this node");

    let timers = TimerFile::as_asked(&options.watch.timers, identity.runtime_dir())?;
    env.extend(timers.as_ref().map(|timers| (TIMER_FILE, timers.path().into())));

    let directory = std::env::current_dir().context("find the working directory")?;
    let group_setup = GroupSetup {
        job: options.job.to_string(),
        node: identity.name.clone(),
        host: identity.host.clone(),
        slots,
        role: options.role.clone(),
        max_restarts: options.max_restarts,
        command,
        directory,
        address: address.address.clone(),
        // The others wait for this node's workers no longer than that either.
        shortage_patience: spec.timings.start_timeout / 2,
        store_host: options.store_host,
        virtual_local_rank: options.virtual_local_rank,
        cpus,
        signals: options.signals.clone(),
        events: event_source(&options, &hostname, console),
        env,
    };
    let mut group = Group::new(group_setup, guard, logs)?;
    if let Some(directory) = group.log_directory() {
        tracing::info!(directory = %directory.display(), "logs");
    }
    group.supervisor().hold(identity.lock_fd())?;

    // All interfaces: which of them a peer comes in by is not known here.
    let listener = listen(&options, &address.address).await?;
    group.supervisor().hold(&listener)?;
    let peer = Endpoint { host: address.address, port: listener.local_addr()?.port() };

    tracing::info!(job = %job, store = %backend.name, "joining");
    let part = match &backend.meeting {
        Meeting::Store(store) => Participation::Own(Node::new(Arc::clone(store), job, listener).concluding()),
        Meeting::TorchElastic(etcd) => {
            let identical = text("TORCH_ELASTIC_WORKER_IDENTICAL").is_some_and(|set| set == "1");
            Participation::TorchElastic(TorchElastic::new(etcd.clone(), job_paths.paths.clone(), identical))
        }
    };
    let path = identity.runtime_dir().join(format!("{}.sock", &Uuid::new_v4().simple().to_string()[..12]));
    let barrier_timeout = spec.timings.join_timeout;
    let socket = WorkerSocket::open(&path, backend.meeting.clone(), job_paths.clone(), part.status(), barrier_timeout)?;
    let JobPaths { keys, .. } = job_paths;

    let watchdog = Watchdog::start(options.watch.limits, timers, socket.steps());
    if let Some(at) = options.watch.health {
        let health = Health {
            job: options.job.to_string(),
            node: identity.name.clone(),
            status: part.status(),
            group: group.state(),
            steps: socket.steps(),
        };
        health.tell(at).await?;
    }

    let record = NodeRecord {
        name: identity.name.clone(),
        incarnation: identity.incarnation.to_string(),
        machine: identity.machine_id.clone(),
        boot: identity.boot_id.clone(),
        host: identity.host.clone(),
        peer,
        slots,
        role: options.role.clone(),
        phase: Phase::Waiting,
        round: None,
        failure: None,
        master: None,
        place: options.place,
    };
    let (every, lease_ttl, start_timeout) =
        (spec.timings.renewal(), spec.timings.lease_ttl, spec.timings.start_timeout);
    let gpus = GpuHolders::of(options.job.as_ref(), &identity.name, start_timeout);
    let mut local = Local::new(group, socket, watchdog, gpus, options.quiesce_timeout);
    let end = tokio::select! {
        end = async {
            if let Some(limit) = options.warm_up
                && let Some(caught) = warm_up(&mut local, slots, limit, spec.timings.stop_grace, &mut signals).await?
            {
                return Ok(left_early(caught));
            }
            take_part(part, record, spec, backend.store(), &keys, &mut local, &mut signals).await
        } => end?,
        () = backend.host_gone(every, lease_ttl) => End::StoreLost(format!("store lost: {} is gone with the agent that served it", backend.name)),
    };
    local.group.conclude(reason(&end));
    if backend.serves {
        tokio::select! {
            () = leave_last(&backend, &keys, &end) => {}
            caught = signals.next() => tracing::warn!("{caught}: not waiting for the others to leave"),
        }
    }
    let Local { group, socket, watchdog, .. } = local;
    drop((socket, watchdog));
    let log_directory = group.log_directory().map(Path::to_owned);
    group.close(FLUSH).await;
    if let (End::Succeeded, LogDir::Temporary, Some(directory)) = (&end, &options.logs.dir, log_directory) {
        logs::remove_if_empty(&directory);
    }
    if options.rendezvous == Rendezvous::Standalone {
        identity.retire();
    }
    Ok(end)
}

async fn listen(options: &Options, address: &str) -> anyhow::Result<TcpListener> {
    let port = options.peer_port;
    let loopback = address.parse::<std::net::IpAddr>().is_ok_and(|ip| ip.is_loopback());
    let hosts: &[&str] = if loopback { &[address] } else { &["::", "0.0.0.0"] };
    ports::listen(hosts, port).await.map_err(|error| {
        anyhow::anyhow!(
            "cannot listen for other agents on port {port}: {error}; choose another with --peer-port, or 0 for any"
        )
    })
}

/// Runs incarnation after incarnation until the node's part is over.
async fn take_part(
    part: Participation,
    mut record: NodeRecord,
    spec: Spec,
    store: Option<&Arc<dyn Store>>,
    keys: &Keys,
    local: &mut Local,
    signals: &mut Signals,
) -> anyhow::Result<End> {
    let (reports, mut inbox) = mpsc::unbounded_channel();
    let (commands, mut orders) = mpsc::unbounded_channel();
    let (partings, mut parted) = mpsc::unbounded_channel();
    record.master = local.group.master().offer();
    let offers = local.group.master().latest();
    let (first, drivers_keys) = (record.clone(), keys.clone());
    let driver = tokio::spawn(async move {
        let mut record = first;
        loop {
            let seed = Uuid::new_v4().as_u64_pair().0;
            let setup =
                Setup { record: record.clone(), spec: spec.clone(), keys: drivers_keys.clone(), may_lead: true, seed };
            match part.run(setup, &commands, &mut inbox).await {
                Parting::Rejoin(reason) => {
                    record.incarnation = Uuid::new_v4().to_string();
                    // The one before may have been used.
                    record.master = offers.borrow().clone();
                    tracing::warn!(node = %record.id(), "evicted: {reason}; joining again as a new incarnation");
                }
                Parting::End(end) => {
                    let _ = partings.send(end);
                    return;
                }
            }
        }
    });

    let mut leaving = Leaving::No;
    // Why nothing can be started here any more.
    let mut unfit: Option<String> = None;
    loop {
        let report = tokio::select! {
            end = parted.recv() => {
                driver.abort();
                let end = end.context("the node's driver ended")?;
                return Ok(unfit.map_or(end, End::Refused));
            }
            Some(command) = orders.recv() => match command {
                Command::Start(start) => {
                    announce(&start);
                    local.start(start)
                }
                Command::Quiesce(grace) => {
                    local.quiesce(grace);
                    None
                }
                Command::Stop(grace) => local.stop(grace).err().map(lost),
                Command::Kill => local.stop(Duration::ZERO).err().map(lost),
                Command::Fence(until) => local.group.fence(until).err().map(lost),
                Command::Leaving(grace) => {
                    local.socket.draining(grace);
                    None
                }
                Command::Forming(round, reason) => {
                    tracing::info!(round, "forming: {reason}");
                    local.forming(round, &reason);
                    None
                }
                Command::Say(line) => {
                    tracing::info!("{line}");
                    None
                }
                Command::Conclude(node, end) => {
                    local.conclude(store, keys, node, &end, leaving == Leaving::AtOnce)
                }
            },
            moved = local.group.next() => {
                let lost = matches!(moved, Moved::Workers(Event::GuardLost { .. }));
                let report = local.moved(moved).await;
                if lost {
                    unfit = Some("the guard process was lost".to_owned());
                    reports.send(Report::Drain).ok();
                }
                report
            }
            verdict = local.watchdog.verdict() => local.group.condemn(verdict),
            waited = wait(&mut local.phase, local.forming, &local.socket) => local.waited(waited),
            caught = signals.next() => {
                leaving = leaving.told_again();
                if leaving == Leaving::AtOnce {
                    tracing::warn!("{caught} again: killing the workers and leaving at once");
                    if let Some(concluded) = local.give_up_saving() {
                        reports.send(concluded).ok();
                    }
                } else {
                    tracing::warn!("{caught}: leaving the job; once more kills the workers and leaves at once");
                    local.group.leave(caught.0);
                }
                Some(Report::Drain)
            }
        };
        if let Some(why) = local.group.starved() {
            tracing::error!("{why}; this node leaves the job: make room, and start its agent again");
            unfit = Some(why);
            reports.send(Report::Drain).ok();
        }
        for report in report.into_iter().chain(local.settle()) {
            // The driver is gone only after it sent its parting, which is read above.
            reports.send(report).ok();
        }
    }
}

/// Whether a signal told this node to leave.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Leaving {
    No,
    /// As planned: the workers may save.
    AsPlanned,
    /// Told again: nothing is waited for.
    AtOnce,
}

impl Leaving {
    fn told_again(self) -> Leaving {
        match self {
            Leaving::No => Leaving::AsPlanned,
            Leaving::AsPlanned | Leaving::AtOnce => Leaving::AtOnce,
        }
    }
}

fn announce(start: &elastic_coordinator::rendezvous::Start) {
    let round = &start.round;
    tracing::info!(
        round = round.number,
        nodes = round.group_world_size,
        world_size = round.world_size,
        group_rank = start.rank.group_rank,
        first_rank = start.rank.first_rank,
        restarts = round.restarts,
        "running: {}",
        round.reason
    );
}

/// The CPUs of each worker, if they are to be bound.
fn bound_cpus<'a>(
    options: &Options,
    slots: u32,
    gpus: impl FnOnce() -> &'a Gpus,
    list: Option<&str>,
) -> anyhow::Result<Vec<CpuSet>> {
    let Some(affinity) = options.numa else { return Ok(Vec::new()) };
    let allowed = cpus::allowed().context("read which CPUs this process may use: is /proc mounted?")?;
    let gpus = gpus();
    let visible = devices::visible(list, gpus);
    let cpus = numa::bind(affinity, slots, gpus, &visible, &allowed, Path::new("/sys"))?;
    for (local_rank, cpus) in cpus.iter().enumerate() {
        tracing::info!(local_rank, %cpus, "bound to CPUs");
    }
    Ok(cpus)
}

fn event_source(options: &Options, hostname: &str, console: &Console) -> events::Source {
    events::Source {
        console: (options.events == EventHandler::Console).then(|| console.clone()),
        run_id: options.job.to_string(),
        role: options.role.clone(),
        hostname: hostname.to_owned(),
        backend: match &options.rendezvous {
            Rendezvous::Etcd { .. } => "etcd",
            Rendezvous::Hosted { .. } if options.place.is_some() => "static",
            Rendezvous::Hosted { .. } | Rendezvous::Standalone => "c10d",
        },
        entry_point: options.program.name.to_string_lossy().into_owned(),
    }
}

/// Why a node's part did not end well.
fn reason(end: &End) -> Option<&str> {
    match end {
        End::Succeeded => None,
        End::Failed(_, reason) | End::Refused(reason) | End::StoreLost(reason) => Some(reason),
        End::Closed => Some("the job was closed by its operator"),
        End::Drained => Some("this node has left the job"),
    }
}

/// Tells whoever started the agent how it ended: people, programs, and, as torchrun does, the error file of the agent's
/// own.
fn conclude(report: &FinalReport, form: ReportForm, console: &Console) {
    if report.success() {
        tracing::info!("the job has succeeded");
    } else {
        console.say(ConsoleStream::Stderr, report.to_string().into_bytes());
    }
    let error_file = std::env::var_os("TORCHELASTIC_ERROR_FILE").filter(|path| !path.is_empty());
    if let (Some(cause), Some(path)) = (report.cause(), error_file.map(PathBuf::from))
        && let Err(error) = recorded::hand_up(cause, &path)
    {
        tracing::warn!(file = %path.display(), %error, "cannot write the error file that this agent was started with");
    }
    if form == ReportForm::Json {
        console.say(ConsoleStream::Stdout, format!("{}\n", report.json()).into_bytes());
    }
}

/// Whoever serves the store goes on until the others have read the result and left.
async fn leave_last(backend: &Backend, keys: &Keys, end: &End) {
    let gone = async {
        let Some(store) = backend.store() else { return };
        while store.range(&keys.nodes()).await.is_ok_and(|(nodes, _)| !nodes.is_empty()) {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        // Their watches deliver the result before their keys go; answers under way get a moment.
        tokio::time::sleep(Duration::from_millis(100)).await;
    };
    let longest = if final_save::may_matter(end) { LEAVE_LAST + final_save::LIMIT } else { LEAVE_LAST };
    if tokio::time::timeout(longest, gone).await.is_err() {
        tracing::warn!("some nodes have not left; the store they meet through ends with this agent");
    }
}

fn log_spec(options: &Options, hostname: &str) -> LogSpec {
    LogSpec {
        dir: match &options.logs.dir {
            LogDir::Temporary => None,
            LogDir::At(path) => Some(path.clone()),
            LogDir::Disabled => Some("/dev/null".into()),
        },
        run_id: options.job.to_string(),
        redirects: options.logs.redirects.clone(),
        tee: options.logs.tee.clone(),
        console_ranks: options.logs.console_ranks.clone(),
        prefix: options.logs.prefix.clone(),
        duplicate_stdout: options.logs.duplicate_stdout.clone(),
        duplicate_stderr: options.logs.duplicate_stderr.clone(),
        rotation: options.logs.rotation,
        role: options.role.clone(),
        hostname: hostname.to_owned(),
    }
}
/// A signal to leave, before there is anything to leave.
fn left_early(caught: Handled) -> End {
    tracing::warn!("{caught}: leaving before the job was joined");
    End::Drained
}
