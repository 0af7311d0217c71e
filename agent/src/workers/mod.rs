//! This node's workers: starting them, talking to them, watching them, ending them.
//!
//! | module | what it is |
//! |---|---|
//! | [`checkpoints`] | checkpoints as workers send them and as the job's records hold them |
//! | [`command`] | the workers' command line |
//! | [`environment`] | the workers' environment |
//! | [`final_save`] | saving, at the job's end, the snapshots that workers left in memory |
//! | [`gpu_holders`] | whether this node's GPUs are free of an earlier round's processes |
//! | [`group`] | the local worker group: starting it in a round, judging its end |
//! | [`guard_client`] | the agent's async view of the guard: start workers, hear of exits, stop them |
//! | [`lifecycle`] | what happens to the workers from one round to the next |
//! | [`signals`] | the signals that make the agent leave |
//! | [`slots`] | how many workers this node runs |
//! | [`snapshot_memory`] | memory for snapshots that outlives the workers |
//! | [`socket`] | the Unix socket through which workers speak to the agent |
//! | [`warm_up`] | starting workers before the node joins |
//! | [`watchdog`] | hangs: deadlines, timers, uninterruptible waits, stacks |

pub(crate) mod checkpoints;
pub(crate) mod command;
pub(crate) mod environment;
pub(crate) mod final_save;
pub(crate) mod gpu_holders;
pub(crate) mod group;
pub(crate) mod guard_client;
pub(crate) mod lifecycle;
pub(crate) mod signals;
pub(crate) mod slots;
pub(crate) mod snapshot_memory;
pub(crate) mod socket;
pub(crate) mod warm_up;
pub(crate) mod watchdog;

use std::time::Duration;

use crate::machine::numa::Affinity;
use crate::workers_store::rank0_port::StoreHost;
use command::Program;
use slots::WorkerCount;

/// The workers of this node, as the command line says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct WorkersOptions {
    /// How their number is given. [`slots::count`] turns it into a number.
    pub count: WorkerCount,
    /// The program that they run.
    pub program: Program,
    pub role: String,
    /// How they are bound to CPUs near their GPUs, if at all.
    pub numa: Option<Affinity>,
    /// Whether each sees only its own GPU.
    pub virtual_local_rank: bool,
    /// If set, they start before the node joins, and the agent waits this long until they are ready.
    pub warm_up: Option<Duration>,
    /// Modules that are imported once, in a process that later workers are forked from. None: there is no such process.
    pub preload: Vec<String>,
    /// Whether what the job has done before this agent does not count for a training whose state is lost.
    pub fresh: bool,
    /// How long those that know about rounds may take to quiesce. This is part of `stop_grace`.
    pub quiesce_timeout: Duration,
    /// Whether an agent or worker rank 0 serves the store that they find each other through.
    pub store_host: StoreHost,
    /// Whether this store serves every host that reaches it, not only hosts of its round's nodes.
    pub open_store: bool,
}
