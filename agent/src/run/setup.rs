//! Builds what a node needs to join a job, from the command line and this machine. It joins nothing.

use std::cell::LazyCell;
use std::ffi::OsString;
use std::io::ErrorKind;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use elastic_node::Node;
use elastic_node::logs::LogRequest;
use elastic_rendezvous::job::{
    Endpoint, JobId, Keys, NodeId, NodeRecord, Phase, Release, RoundRecord, Spec, Versioned,
};
use elastic_store::tls::MutualTls;
use elastic_store::{Op, OpResult, Store, Txn};
use elastic_torchelastic::{DEFAULT_PREFIX, Paths, TorchElastic};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;

use crate::cli::Options;
use crate::machine::address::{Advertised, NetworkOptions, advertised, foreign};
use crate::machine::cpus::{self, CpuSet};
use crate::machine::devices::{self, Gpus};
use crate::machine::identity::{self, NodeIdentity};
use crate::machine::{interfaces, numa, preflight};
use crate::output::events::{self, EventHandler};
use crate::output::logs::{Console, LogDir, LogNames};
use crate::store::alone::Alone;
use crate::store::backend::Backend;
use crate::store::choice::StoreChoice;
use crate::store::participation::{JobPaths, JobStore, Participation};
use crate::store::ports;
use crate::workers::WorkersOptions;
use crate::workers::command::{AgentProgram, Program, WorkerCommand};
use crate::workers::environment::{own_device, threads_warning};
use crate::workers::group::GroupSetup;
use crate::workers::slots::{self, WorkerCount};
use crate::workers_store::rank0_port::StoreHost;

/// How long a connection from this agent to itself may take.
const SELF: Duration = Duration::from_secs(1);

/// Tells workers that the agent made up the job's id: the next start has another.
const UNNAMED_ENV: &str = "ELASTIC_JOB_UNNAMED";

/// Environment variables for the workers, in addition to those that tell a worker its place.
pub(super) type Variables = Vec<(&'static str, OsString)>;

/// The program that this node's workers run, the number of workers, and their CPUs.
pub(super) struct WorkersPlan {
    command: WorkerCommand,
    pub(super) slots: u32,
    cpus: Vec<CpuSet>,
}

/// Finds the workers' program, the number of workers, and their CPUs.
pub(super) fn plan(options: &WorkersOptions) -> anyhow::Result<WorkersPlan> {
    let env = |name: &str| std::env::var_os(name);
    let text = |name: &str| std::env::var(name).ok();
    let command = WorkerCommand::resolve(&options.program, &env, AgentProgram::this().as_ref())?;
    command.announce();
    let gpus = LazyCell::new(Gpus::detect);
    let slots = slots::count(options.count, || &*gpus, &text)?;
    let cpus = bound_cpus(options, slots, || &*gpus, text("CUDA_VISIBLE_DEVICES").as_deref())?;
    if options.virtual_local_rank {
        // Checks all workers before the node joins anything.
        (0..slots).try_for_each(|local_rank| own_device(local_rank, &env).map(drop))?;
    }
    if let Some(warning) = threads_warning(slots, &env) {
        tracing::warn!("{warning}");
    }
    Ok(WorkersPlan { command, slots, cpus })
}

/// The CPUs of each worker. Empty if workers are not to be bound.
fn bound_cpus<'a>(
    options: &WorkersOptions,
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

/// The names that torchrun's events carry: the job, the role, the host, the program.
fn events(options: &Options, hostname: &str, console: &Console) -> events::Source {
    events::Source {
        console: (options.output.events == EventHandler::Console).then(|| console.clone()),
        run_id: options.job.to_string(),
        role: options.workers.role.clone(),
        hostname: hostname.to_owned(),
        backend: match &options.store.choice {
            StoreChoice::Etcd { .. } => "etcd",
            StoreChoice::Hosted { .. } if options.store.place.is_some() => "static",
            StoreChoice::Hosted { .. } | StoreChoice::Replicated { .. } | StoreChoice::Standalone => "c10d",
        },
        entry_point: options.workers.program.name.to_string_lossy().into_owned(),
    }
}

/// Takes the node's name. Only one agent at a time can have it.
pub(super) async fn claim_name(options: &Options) -> anyhow::Result<NodeIdentity> {
    let (job, node_name) = (options.job.clone(), options.node_name.clone());
    let claim = tokio::task::spawn_blocking(move || {
        let runtime = identity::process_runtime_dir();
        NodeIdentity::claim(job.as_ref(), node_name.as_deref(), &runtime, identity::PATIENCE)
    });
    Ok(claim.await.context("claim a node name")??)
}

/// Where the store keeps the job's records.
pub(super) fn job_paths(prefix: Option<&str>, job: &JobId) -> JobPaths {
    JobPaths {
        job: job.clone(),
        keys: Keys::new(prefix.unwrap_or(Keys::DEFAULT_PREFIX), job),
        paths: Paths::new(prefix.unwrap_or(DEFAULT_PREFIX), job.as_ref()),
    }
}

/// The message of an agent that waits for its store.
pub(super) fn waits_for(rendezvous: &StoreChoice) -> String {
    let endpoints: Vec<String> = rendezvous.endpoints().iter().map(ToString::to_string).collect();
    format!("waiting for the store at {}", endpoints.join(", "))
}

/// The address that other nodes use for this one, and the variables that tell workers the interface of this address.
pub(super) async fn address(options: &Options, hostname: &str) -> anyhow::Result<(Advertised, Variables)> {
    let (network, store, hostname) = (options.network.clone(), options.store.choice.clone(), hostname.to_owned());
    let found = tokio::task::spawn_blocking(move || {
        let address = advertised(network.local_addr.as_deref(), store.endpoints(), &hostname);
        let foreign = network.local_addr.as_deref().and_then(foreign);
        let inherited = |name: &str| std::env::var_os(name);
        let env = interfaces::variables(&address.address, &hostname, network.pin_interface, &inherited);
        (address, env, foreign)
    });
    let (address, env, foreign) = found.await.context("find this node's address")?;
    if let Some(why) = foreign {
        tracing::warn!("{}", options.store.in_form(why));
    }
    Ok((address, env))
}

/// Explains why no other node joins this one.
pub(super) fn alone(options: &Options, keys: &Keys, node: NodeId, tls: Option<MutualTls>) -> Alone {
    let (store, nodes) = (options.store.clone(), options.spec.max_nodes);
    Alone { options: store, nodes, keys: keys.clone(), node, tls }
}

/// The settings that are the same for every group of workers.
pub(super) fn group(
    options: &Options,
    plan: WorkersPlan,
    identity: &NodeIdentity,
    address: String,
    mut env: Variables,
    spec: Spec,
    console: &Console,
) -> anyhow::Result<GroupSetup> {
    let WorkersPlan { command, slots, cpus } = plan;
    if options.is_unnamed {
        env.push((UNNAMED_ENV, "1".into()));
    }
    Ok(GroupSetup {
        job: options.job.to_string(),
        node: identity.name.clone(),
        host: identity.host.clone(),
        slots,
        options: options.workers.clone(),
        spec,
        command,
        directory: std::env::current_dir().context("find the working directory")?,
        address,
        bind: options.network.bind,
        cpus,
        signals: options.signals.clone().unwrap_or_default(),
        events: events(options, &identity.host, console),
        env,
    })
}

pub(super) fn listen(network: &NetworkOptions, address: &str) -> anyhow::Result<TcpListener> {
    let port = network.port;
    ports::listen(network.bind, address, port).map_err(|error| {
        anyhow::anyhow!(
            "cannot listen for other agents on port {port}: {error}; choose another with --peer-port, or 0 for any"
        )
    })
}

/// Where other nodes reach this one. Checks that a node which was given an address is there: a port that refuses proves
/// to the other nodes that this node is dead, so a node that is elsewhere must not join.
pub(super) async fn reached(options: &Options, host: String, listener: &TcpListener) -> anyhow::Result<Endpoint> {
    let peer = Endpoint { host, port: listener.local_addr()?.port() };
    if options.network.local_addr.is_none() {
        return Ok(peer);
    }
    let connected = tokio::time::timeout(SELF, TcpStream::connect((peer.host.as_str(), peer.port))).await;
    // Whether a silent or translated address leads here, only another machine can find out.
    let Ok(Err(error)) = connected else { return Ok(peer) };
    if error.kind() != ErrorKind::ConnectionRefused {
        return Ok(peer);
    }
    let advice = format!(
        "--local-addr (or --peer-port, --master-addr): {peer} refuses connections, so other nodes would take this node \
         for dead; this agent listens on {}: leave the flag out, or give an address of this machine",
        listener.local_addr()?
    );
    Err(anyhow::Error::msg(options.store.in_form(advice)))
}

/// The node's driver, in the protocol that the store speaks. Requests to read the workers' output go to `logs`.
/// TorchElastic's protocol cannot prove who may read it, so there are none.
pub(super) fn participation(
    backend: &Backend,
    paths: &JobPaths,
    job: JobId,
    listener: TcpListener,
    logs: mpsc::Sender<LogRequest>,
    tls: Option<MutualTls>,
) -> Participation {
    match &backend.rendezvous {
        JobStore::Store(store) => {
            Participation::Own(Node::new(Arc::clone(store), job, listener, Some(logs), tls).concluding())
        }
        JobStore::TorchElastic(etcd) => {
            let identical = std::env::var("TORCH_ELASTIC_WORKER_IDENTICAL").is_ok_and(|set| set == "1");
            Participation::TorchElastic(TorchElastic::new(etcd.clone(), paths.paths.clone(), identical))
        }
    }
}

/// The spec of the job that this node is about to join: `own` if the node begins the job or its next generation. A
/// store that does not answer tells nothing. It is an error if the job's `round` is not one of ours: no node can join a
/// job without it.
pub(super) async fn job_spec(store: &dyn Store, keys: &Keys, own: Spec) -> Result<Spec, String> {
    let read = Txn::of([Op::get(keys.spec()), Op::get(keys.round()), Op::count(keys.nodes())]);
    let Ok(read) = store.txn(read).await else { return Ok(own) };
    let value = |at: usize| read.results.get(at).and_then(OpResult::value);
    let Some(round) = value(1).map(Versioned::<RoundRecord>::parse).transpose()? else { return Ok(own) };
    let deserted = matches!(read.results.get(2), Some(OpResult::Count(0)));
    let joined = value(0).filter(|_| !deserted && !round.value.state.is_final());
    Ok(joined.and_then(|spec| Versioned::parse_spec(spec).ok()).map_or(own, |spec| spec.value))
}

/// The node's record in the store when it joins.
pub(super) fn record(options: &Options, identity: &NodeIdentity, peer: Endpoint, slots: u32) -> NodeRecord {
    NodeRecord {
        name: identity.name.clone(),
        incarnation: identity.incarnation.to_string(),
        machine: identity.machine_id.clone(),
        boot: identity.boot_id.clone(),
        host: identity.host.clone(),
        peer,
        slots,
        role: options.workers.role.clone(),
        phase: Phase::Waiting,
        round: None,
        failure: None,
        master: None,
        place: options.store.place,
        // Known once workers have registered.
        warms_up: false,
        lacks_workers: false,
        keeps_workers: false,
        finished: false,
        introduces: matches!(options.workers.store_host, StoreHost::Agent(_)) && !options.workers.open_store,
        release: Some(Release::ours()),
        command: Some(digest(&options.workers.program)),
    }
}

/// A digest of the program and its arguments, as written.
fn digest(program: &Program) -> String {
    let words = [&program.name].into_iter().chain(&program.args).map(|word| word.as_bytes());
    let kind = format!("{:?}", program.kind);
    let text = [kind.as_bytes()].into_iter().chain(words).collect::<Vec<_>>().join(&0);
    format!("{:016x}", identity::fnv1a(&text))
}

/// What the check of this machine needs to know about the node.
pub(super) fn preflight(options: &Options, workers: u32) -> preflight::Node {
    let logs = if let LogDir::At(folder) = &options.output.logs.dir { Some(folder.clone()) } else { None };
    preflight::Node {
        folders: [std::env::temp_dir()].into_iter().chain(logs).collect(),
        workers,
        counts_gpus: options.workers.count == WorkerCount::Gpu,
        visible: visible_gpus(),
    }
}

/// The GPUs that workers are shown.
pub(super) fn visible_gpus() -> Option<String> {
    std::env::var("CUDA_VISIBLE_DEVICES").ok()
}

/// The names in the workers' log directory and in the text before a line.
pub(super) fn log_names(options: &Options, hostname: &str) -> LogNames {
    LogNames { run_id: options.job.to_string(), role: options.workers.role.clone(), hostname: hostname.to_owned() }
}
