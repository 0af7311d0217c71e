//! What all agents of a job must share, and what an operator may override.

use std::fmt;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::{NodeId, Protocols, Release, Requester, TakenBack, millis};

/// What is charged to `max_restarts`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RestartPolicy {
    /// Failures of workers only, as torchrun's code does.
    #[default]
    Failures,
    /// Membership changes too, as torchrun's quickstart says.
    All,
}

/// What a node does when the store has been away for longer than its lease.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OnStoreLoss {
    /// Trains on while the leader hears every member of the round.
    #[default]
    Wait,
    /// Stops its workers at the end of its lease.
    Fence,
}

/// Durations that all nodes must share.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Timings {
    /// Time to live of a node's lease: how long a silent host stays a member.
    #[serde(rename = "lease_ttl_ms", with = "millis")]
    pub lease_ttl: Duration,
    /// How long the first round waits for more nodes once it has the minimum.
    #[serde(rename = "last_call_ms", with = "millis")]
    pub last_call: Duration,
    /// How long a job may stay below its minimum before it fails.
    #[serde(rename = "join_timeout_ms", with = "millis")]
    pub join_timeout: Duration,
    /// How long a member may take to report that its workers run.
    #[serde(rename = "start_timeout_ms", with = "millis")]
    pub start_timeout: Duration,
    /// How long workers may take to stop before they are killed.
    #[serde(rename = "stop_grace_ms", with = "millis")]
    pub stop_grace: Duration,
    /// How long workers of a node that leaves may take instead: they may want to save more than for a restart.
    #[serde(rename = "drain_grace_ms", with = "millis")]
    pub drain_grace: Duration,
    /// Allowance for killing, for scheduling and for clocks of different rates.
    #[serde(rename = "margin_ms", with = "millis")]
    pub margin: Duration,
    /// How long a round that keeps no member of the one before waits, unless every death is confirmed.
    #[serde(rename = "takeover_delay_ms", with = "millis")]
    pub takeover_delay: Duration,
    /// How long a round runs before it may be ended for growth.
    #[serde(rename = "min_round_time_ms", with = "millis")]
    pub min_round_time: Duration,
}

impl Default for Timings {
    fn default() -> Timings {
        Timings {
            lease_ttl: Duration::from_secs(10),
            last_call: Duration::from_secs(5),
            join_timeout: Duration::from_secs(900),
            start_timeout: Duration::from_secs(60),
            stop_grace: Duration::from_secs(30),
            drain_grace: Duration::from_secs(30),
            margin: Duration::from_secs(1),
            takeover_delay: Duration::from_secs(600),
            min_round_time: Duration::from_secs(5),
        }
    }
}

impl Timings {
    /// How often a node renews its lease and asks for proof of the round.
    pub fn renewal(&self) -> Duration {
        self.lease_ttl / 5
    }

    /// How often a member beats on its pulse stream.
    pub fn beat(&self) -> Duration {
        self.lease_ttl / 10
    }
}

/// What all agents of a job must share: the record under `spec`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Spec {
    /// The version of the protocol that the job speaks: one of the writer's.
    pub protocol: u32,
    /// Who wrote it; none: the record names none. In an agent's own spec: the agent's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub release: Option<Release>,
    /// Fewest nodes of a round.
    pub min_nodes: u32,
    /// Most nodes of a round.
    pub max_nodes: u32,
    /// Nodes that hold one replica of the model together.
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub nodes_per_replica: u32,
    /// Failures forgiven, counted for the job.
    pub max_restarts: u32,
    /// How many of these in a row may bring no new step; `None`: all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub restarts_without_progress: Option<u32>,
    /// How many of these in a row may follow the same failure of programs that have just begun; `None`: all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failed_starts: Option<u32>,
    /// How many failures that count exclude the node whose workers they were; zero: none ever do.
    pub exclude_after: u32,
    /// What counts as a failure.
    #[serde(default)]
    pub restart_policy: RestartPolicy,
    /// What nodes do without the store.
    #[serde(default)]
    pub on_store_loss: OnStoreLoss,
    /// Whether peers speak mutual TLS with each other.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub peer_tls: bool,
    /// Shared durations.
    #[serde(flatten)]
    pub timings: Timings,
}

/// The shortest time to live of a lease. It is renewed and proved several times in that.
const SHORTEST_LEASE: Duration = Duration::from_millis(100);

/// Why a spec cannot work.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SpecError {
    /// No such range of nodes.
    #[error("{min}:{max} is no range of nodes: it takes 1 <= MIN <= MAX")]
    Nodes {
        /// Fewest.
        min: u32,
        /// Most.
        max: u32,
    },
    /// Some nodes would make no whole replica.
    #[error(
        "{min}:{max} nodes make no whole replicas of {size} nodes each (--replica-nodes): give --nnodes multiples of \
         {size}"
    )]
    Replicas {
        /// Fewest.
        min: u32,
        /// Most.
        max: u32,
        /// Nodes of a replica.
        size: u32,
    },
    /// The store would be asked all the time.
    #[error("a lease of {lease:?} is too short: it takes at least {SHORTEST_LEASE:?}, so raise lease_ttl")]
    Lease {
        /// The lease's time to live.
        lease: Duration,
    },
    /// The margins leave no time to train in.
    #[error(
        "a lease of {lease:?} is too short for a margin of {margin:?}: it takes at least four times the margin, so \
         raise lease_ttl or lower margin"
    )]
    Margin {
        /// The lease's time to live.
        lease: Duration,
        /// The margin.
        margin: Duration,
    },
}

/// Two agents of one job that were started differently.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Disagreement {
    /// What differs, by the name of its flag or `rdzv_conf` key.
    pub field: &'static str,
    /// Our value.
    pub ours: String,
    /// The job's value.
    pub theirs: String,
}

impl fmt::Display for Disagreement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} is {} here but {} in the job", self.field, self.ours, self.theirs)
    }
}

impl Spec {
    /// Checks that the values fit together.
    pub fn check(&self) -> Result<(), SpecError> {
        if self.min_nodes == 0 || self.min_nodes > self.max_nodes {
            return Err(SpecError::Nodes { min: self.min_nodes, max: self.max_nodes });
        }
        let size = self.nodes_per_replica;
        // No number but 0 is a multiple of 0.
        if !self.min_nodes.is_multiple_of(size) || !self.max_nodes.is_multiple_of(size) {
            return Err(SpecError::Replicas { min: self.min_nodes, max: self.max_nodes, size });
        }
        if self.timings.lease_ttl < SHORTEST_LEASE {
            return Err(SpecError::Lease { lease: self.timings.lease_ttl });
        }
        if self.timings.lease_ttl < self.timings.margin * 4 {
            return Err(SpecError::Margin { lease: self.timings.lease_ttl, margin: self.timings.margin });
        }
        Ok(())
    }

    /// What a program started with this spec is.
    pub fn own_release(&self) -> Release {
        let alone = Protocols { oldest: self.protocol, newest: self.protocol };
        let unnamed = || Release { version: "an unnamed release".to_owned(), protocols: alone };
        self.release.clone().unwrap_or_else(unnamed)
    }

    /// The first thing in which this agent and the job differ. Whether the agent speaks the job's protocol is another
    /// matter, which nothing excuses: see
    /// [`JobProtocol::refuses`](super::JobProtocol::refuses).
    pub fn disagreement(&self, job: &Spec) -> Option<Disagreement> {
        // The record counts in milliseconds: finer differences are none.
        let span = |time: Duration| format!("{:?}", Duration::from_millis(time.as_millis() as u64));
        let given = |given: bool| if given { "given" } else { "not given" }.to_owned();
        let values = |spec: &Spec| {
            let (limit, timings) = (spec.restarts_without_progress, &spec.timings);
            [
                ("--peer-cert", given(spec.peer_tls)),
                ("--nnodes", format!("{}:{}", spec.min_nodes, spec.max_nodes)),
                ("--replica-nodes", spec.nodes_per_replica.to_string()),
                ("--max-restarts", spec.max_restarts.to_string()),
                ("--restarts-without-progress", limit.map_or_else(|| "not set".to_owned(), |limit| limit.to_string())),
                ("--exclude-after", spec.exclude_after.to_string()),
                ("--restart-policy", format!("{:?}", spec.restart_policy)),
                ("--on-store-loss", format!("{:?}", spec.on_store_loss)),
                ("lease_ttl", span(timings.lease_ttl)),
                ("last_call_timeout", span(timings.last_call)),
                ("join_timeout", span(timings.join_timeout)),
                ("start_timeout", span(timings.start_timeout)),
                ("stop_grace", span(timings.stop_grace)),
                ("drain_grace", span(timings.drain_grace)),
                ("margin", span(timings.margin)),
                ("takeover_delay", span(timings.takeover_delay)),
                ("min_round_time", span(timings.min_round_time)),
            ]
        };
        let mut both = values(self).into_iter().zip(values(job));
        both.find_map(|((field, ours), (_, theirs))| (ours != theirs).then_some(Disagreement { field, ours, theirs }))
    }
}

/// The operator's overrides while the job lives: the record under `desired`.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Desired {
    /// Takes the place of the spec's minimum.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub min_nodes: Option<u32>,
    /// Takes the place of the spec's maximum.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_nodes: Option<u32>,
    /// Ends the job: workers are stopped, agents leave.
    #[serde(default)]
    pub closed: bool,
    /// Node names asked to leave.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub drain: Vec<String>,
    /// Names of nodes that get no place. Their agents stay and wait.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub exclude: Vec<String>,
    /// Nodes that the leader has excluded, and that may take part all the same.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub include: Vec<TakenBack>,
    /// Nodes that are evicted, whatever they say: their agents kill their workers and end.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub evict: Vec<NodeId>,
    /// Workers are stopped, agents stay, and no round is formed.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub paused: bool,
    /// Which jobs get spare hosts first: those with the highest. Decides nothing in the job itself.
    #[serde(default, skip_serializing_if = "is_usual")]
    pub priority: i32,
    /// Who has changed this record last.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub asked: Option<Asked>,
    /// What a newer version asks for. It stays unchanged when this version changes the rest.
    #[serde(flatten)]
    pub rest: Map<String, Value>,
}

/// Who has changed `desired`, and where the history tells it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Asked {
    /// Who.
    pub by: Requester,
    /// Milliseconds since the Unix epoch on the clock of the program that passed it on, for people.
    pub at_ms: u64,
    /// The number of the history's line, written in the same transaction.
    pub event: u64,
}

fn one() -> u32 {
    1
}

fn is_one(count: &u32) -> bool {
    *count == 1
}

fn is_usual(priority: &i32) -> bool {
    *priority == 0
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::job::samples;

    fn spec() -> Spec {
        let release = Some(Release::ours());
        let budget = Spec { max_restarts: 3, failed_starts: Some(3), exclude_after: 3, ..samples::spec(1, 4) };
        Spec { release, ..budget }
    }

    #[test]
    fn a_disagreement_names_both_values() {
        let job = Spec { max_nodes: 2, ..spec() };
        let differs = spec().disagreement(&job).unwrap();
        assert_eq!(differs.to_string(), "--nnodes is 1:4 here but 1:2 in the job");
        assert_eq!(spec().disagreement(&spec()), None);
    }

    #[test]
    fn a_spec_survives_json_in_milliseconds() {
        let json = serde_json::to_value(spec()).unwrap();
        assert_eq!(json["lease_ttl_ms"], 10_000);
        assert_eq!(serde_json::from_value::<Spec>(json).unwrap(), spec());
    }

    #[test]
    fn an_agent_agrees_with_the_spec_it_wrote_itself() {
        let margin = Duration::from_secs(2) / 3;
        let own = Spec { timings: Timings { margin, ..Timings::default() }, ..spec() };
        let job: Spec = serde_json::from_slice(&serde_json::to_vec(&own).unwrap()).unwrap();
        assert_eq!(own.disagreement(&job), None);
    }

    #[test]
    fn what_a_newer_version_desires_is_kept() {
        let newer = r#"{"closed":false,"drain":["a"],"weights":{"a":2}}"#;
        let mut desired: Desired = serde_json::from_str(newer).unwrap();
        desired.max_nodes = Some(4);
        let written: serde_json::Value = serde_json::to_value(&desired).unwrap();
        assert_eq!((&written["weights"]["a"], &written["max_nodes"]), (&2.into(), &4.into()));
        let by = r#"{"asked":{"by":{"name":"a","via":"pigeon"},"at_ms":1,"event":2}}"#;
        assert_eq!(serde_json::from_str::<Desired>(by).unwrap().asked.unwrap().by.via, crate::job::Via::Other);
    }

    #[test]
    fn impossible_specs_are_refused() {
        assert!(Spec { min_nodes: 3, max_nodes: 1, ..spec() }.check().is_err());
        assert!(Spec { min_nodes: 0, ..spec() }.check().is_err());
        for (size, fits) in [(0, false), (1, true), (2, true), (3, false), (4, true)] {
            let spec = Spec { min_nodes: 4, max_nodes: 8, nodes_per_replica: size, ..spec() };
            assert_eq!(spec.check().is_ok(), fits, "{size}");
        }
        assert!(Spec { min_nodes: 2, max_nodes: 5, nodes_per_replica: 2, ..spec() }.check().is_err());
        let margin = Duration::from_secs(4);
        assert!(Spec { timings: Timings { margin, ..Timings::default() }, ..spec() }.check().is_err());
        let timings = Timings { lease_ttl: Duration::ZERO, margin: Duration::ZERO, ..Timings::default() };
        assert!(Spec { timings, ..spec() }.check().is_err());
        assert!(spec().check().is_ok());
    }
}
