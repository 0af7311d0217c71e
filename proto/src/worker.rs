//! The worker socket: JSON lines between an agent and the workers it started, over the Unix socket named in
//! [`SOCKET_ENV`]. One object a line, UTF-8, at most [`MAX_LINE`] bytes.
//!
//! A worker that never connects gets torchrun's behaviour: it is stopped and started again. A worker that registers is
//! told of rounds, and may commit checkpoints and meet barriers. Any language with a JSON parser can use this protocol:
//!
//! ```text
//! worker → {"type":"register","local_rank":0,"pid":4711}
//! agent  → {"type":"welcome","job":"J","round":3,"rank":2,…}
//! worker → {"type":"progress","step":120,"loss":0.31}
//! agent  → {"type":"forming","round":4,"reason":"node b joined"}
//! worker → {"type":"commit","id":7,"checkpoint":{"step":121,"path":"/ckpt/step-121","digest":"crc32c:…"}}
//! agent  → {"type":"committed","id":7,"step":121}
//! ```
//!
//! A worker that registers with `round_aware` keeps its process when the round changes: it answers `forming` with
//! `quiesced`, and continues when it gets its next `assignment`.

use serde::{Deserialize, Serialize};

/// Environment variable that names the socket's path.
pub const SOCKET_ENV: &str = "ELASTIC_AGENT_SOCKET";

/// Environment variable that is `1` for a worker that is started before its place is known. The worker registers once
/// it is ready to work, and waits for its `welcome`, however long that takes.
pub const WARM_UP_ENV: &str = "ELASTIC_WARM_UP";

/// Longest line either side may send, the newline included, in bytes.
pub const MAX_LINE: usize = 64 * 1024;

/// Where a committed checkpoint lies. The store's `checkpoint` key holds this pointer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Checkpoint {
    /// Optimizer steps that the checkpoint contains; training continues with `step + 1`.
    pub step: u64,
    /// Absolute path of the manifest, as the worker that wrote it sees it.
    pub path: String,
    /// Digest of the manifest's bytes, `algorithm:hex`.
    pub digest: String,
    /// The round in which it was committed. Filled in by the agent; a worker may leave it out.
    #[serde(default)]
    pub round: u64,
}

/// Why a worker fails, as far as the worker knows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FailureClass {
    /// An error about a peer: a lost connection, or a collective that a peer left. Seldom the root cause.
    Peer,
    /// The worker's own error, which each restart would meet again, such as a wrong setting: the job ends with it.
    Permanent,
    /// The worker's own exception, exit or signal; also a class of a later release.
    #[serde(other)]
    Own,
}

/// Messages from a worker to its agent. A worker chooses a request's `id`, and the answer repeats it.
#[allow(missing_docs)]
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum FromWorker {
    /// First message on the connection.
    Register {
        /// The worker's `LOCAL_RANK`.
        local_rank: u32,
        /// Its process id, in the agent's pid namespace.
        pid: u32,
        /// Whether the worker quiesces when a round is forming, takes a new rank in the same process, and agrees with
        /// its peers, also with those that have just been started, on the state to continue from. Without this the worker
        /// is stopped and started again on every change.
        #[serde(default)]
        round_aware: bool,
    },
    /// How far the worker is. May be sent at any time: only the newest counts.
    Progress {
        /// Optimizer steps done.
        step: u64,
        /// Epoch, counted from 0.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        epoch: Option<u64>,
        /// Training loss of the last step.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        loss: Option<f64>,
        /// Steps planned in all.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        total_steps: Option<u64>,
    },
    /// Meet the other members of this round at `name`. One worker of each node asks on behalf of its node.
    Barrier {
        id: u64,
        /// Can be used once in a round.
        name: String,
    },
    /// Publish a checkpoint that is complete and durable at its path.
    Commit {
        id: u64,
        /// What to publish.
        checkpoint: Checkpoint,
    },
    /// Ask for memory of this node that outlives the worker. The worker that takes this worker's place on the node, in
    /// any round of the job's generation, gets the same memory if it asks for the same size, with the contents that
    /// were left in it.
    Memory {
        id: u64,
        /// Size in bytes. 0 asks for what was left, whatever its size; `rescue` does not count then.
        bytes: u64,
        /// A command line that saves the contents of the memory. The agent runs it when they would otherwise be lost:
        /// the job ends, and no worker will take them up. The command gets the memory as its standard input and two
        /// more arguments, `--after STEP`, where STEP is the committed step. It prints a [`Checkpoint`] as one line of
        /// JSON once that is durable, or nothing if the memory holds nothing newer.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        rescue: Vec<String>,
    },
    /// Give that memory back: the next worker finds nothing.
    Forget,
    /// The worker has stopped at a step boundary, or given up a step that a peer has left. It touches nothing until it
    /// gets its next assignment.
    Quiesced {
        /// The round that is forming.
        round: u64,
        /// Steps done.
        step: u64,
    },
    /// The worker's group is broken, and no round is forming: a connection failed, and no node has died. Asks for a round
    /// in which all members meet again, in their processes. It counts as a failure of class `peer`, which costs a restart
    /// unless a member turns out to be lost or leaving. The worker quiesces when the round is forming.
    RequestRound {
        id: u64,
        /// The round whose group is broken. If it is over already, nothing follows from the request.
        round: u64,
        /// One line for people.
        reason: String,
    },
    /// How many steps has the job done? For a worker that finds no state to continue from.
    StepsDone { id: u64 },
    /// Which round do the other nodes run? For a worker without a place, which gets the state of those that have one
    /// before it registers.
    RunningRound { id: u64 },
    /// Whether the training is over for all workers: what a worker still does, such as a last test, it does by itself.
    /// Until it says otherwise, no node is admitted to its round.
    Finished {
        /// False as another training of the same script begins.
        finished: bool,
    },
    /// The worker is about to exit with an error, and knows why.
    Failing {
        /// Whether the error is its own or about a peer.
        class: FailureClass,
        /// One line for people. Empty: what the worker writes last to standard error says it.
        message: String,
    },
}

/// A worker's place in a round.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Assignment {
    /// The job's id.
    pub job: String,
    /// The round.
    pub round: u64,
    /// Global rank.
    pub rank: u32,
    /// Workers in the round.
    pub world_size: u32,
    /// The node's position in the round.
    pub group_rank: u32,
    /// Nodes in the round.
    pub group_world_size: u32,
    /// Host of rank 0, where the ranks find each other.
    pub master_addr: String,
    /// Port on that host, fresh in every round. Rank 0's agent serves a TCPStore there, or reserves the port for rank 0
    /// to listen on: `TORCHELASTIC_USE_AGENT_STORE` says which.
    pub master_port: u16,
    /// Restarts charged to the job so far.
    pub restart_count: u32,
    /// Nodes that hold one replica of the model together, if several: those of as many group ranks in a row, from a
    /// multiple of it on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub nodes_per_replica: Option<u32>,
    /// The checkpoint from which every member of the round resumes; none at the job's first start.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub checkpoint: Option<Checkpoint>,
}

/// Where the ranks of a running round have met. The store there serves this worker's host, too.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Running {
    /// The round.
    pub round: u64,
    /// As in an [`Assignment`].
    pub master_addr: String,
    /// As in an [`Assignment`].
    pub master_port: u16,
}

/// Messages from an agent to a worker. An `id` is that of the request.
#[allow(missing_docs)]
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum ToWorker {
    /// Answer to `register`: the worker's place.
    Welcome(Assignment),
    /// The place of a worker that quiesced, in a later round.
    Assignment(Assignment),
    /// A round is forming: a round-aware worker quiesces, any other worker will get the stop signal.
    Forming {
        /// The round that is forming.
        round: u64,
        /// Why, for people.
        reason: String,
        /// Milliseconds that a round-aware worker has to quiesce before it is stopped like any other.
        quiesce_ms: u64,
    },
    /// The node is leaving as planned. The stop signal follows as soon as the other nodes know.
    Draining {
        /// Milliseconds from the stop signal to SIGKILL: time for a last checkpoint.
        grace_ms: u64,
    },
    /// All members have reached the barrier.
    BarrierPassed { id: u64 },
    /// The checkpoint is the job's resume point.
    Committed {
        id: u64,
        /// Its step.
        step: u64,
    },
    /// The furthest step that a worker of the job is known to have reported; 0 before the first, and for what was done
    /// before an agent began with `--fresh`.
    StepsDone {
        id: u64,
        /// The step.
        step: u64,
    },
    /// The round that other nodes run.
    RunningRound {
        id: u64,
        /// Milliseconds until the worker must have registered. 0 for one that has its place.
        left_ms: u64,
        /// None if no round runs.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        running: Option<Running>,
    },
    /// The request for a round was passed on.
    RoundRequested { id: u64 },
    /// The memory that was asked for: a file of this size. Its descriptor comes with this line (`SCM_RIGHTS`). New
    /// memory is all zeros.
    Memory {
        id: u64,
        /// Its size.
        bytes: u64,
    },
    /// A request failed, or a line could not be understood.
    Error {
        #[serde(default, skip_serializing_if = "Option::is_none")]
        id: Option<u64>,
        /// What happened and what to do.
        message: String,
        /// Whether the same request may succeed later, as where the store is away.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        again: bool,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_have_the_documented_shape() {
        let line = r#"{"type":"register","local_rank":0,"pid":4711}"#;
        let message: FromWorker = serde_json::from_str(line).unwrap();
        assert_eq!(message, FromWorker::Register { local_rank: 0, pid: 4711, round_aware: false });
        let out = serde_json::to_string(&ToWorker::Committed { id: 7, step: 121 }).unwrap();
        assert_eq!(out, r#"{"type":"committed","id":7,"step":121}"#);
    }
}
