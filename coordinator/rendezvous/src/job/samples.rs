//! Records for tests: each with usual values. A test sets only the values that it is about.

use super::{
    Endpoint, NodeRecord, OnStoreLoss, Phase, Protocols, RestartPolicy, RoundRecord, RoundState, Spec, Timings,
};
use crate::job::overview::Overview;
use crate::kv::{KeyValue, LeaseId, Revision};

/// A key below [`Keys::jobs`](super::Keys::jobs) of `/elastic`, written once and under a lease.
pub fn stored(key: &str, value: impl ToString) -> KeyValue {
    let (value, at) = (value.to_string().into_bytes(), Revision(1));
    let key = format!("/elastic/v1/jobs/{key}");
    KeyValue { key, value, create_revision: at, mod_revision: at, lease: Some(LeaseId(1)) }
}

/// What such keys tell.
pub fn overview<T: ToString>(records: &[(&str, T)]) -> Overview {
    let values: Vec<_> = records.iter().map(|(key, value)| stored(key, value.to_string())).collect();
    Overview::of("/elastic", &values)
}

/// A node that waits for a place, with one worker. Its peer address is port 1 of a host of its name.
pub fn node(name: &str) -> NodeRecord {
    NodeRecord {
        name: name.to_owned(),
        incarnation: "1".into(),
        machine: "m".into(),
        boot: "b".into(),
        host: name.to_owned(),
        peer: Endpoint { host: name.to_owned(), port: 1 },
        slots: 1,
        role: "default".into(),
        phase: Phase::Waiting,
        round: None,
        failure: None,
        master: None,
        place: None,
        warms_up: false,
        lacks_workers: false,
        keeps_workers: false,
        finished: false,
        introduces: false,
        release: None,
        command: None,
    }
}

/// A round of the first generation with two nodes of one worker each.
pub fn round(number: u64, state: RoundState) -> RoundRecord {
    RoundRecord { state, group_world_size: 2, world_size: 2, ..RoundRecord::forming(number, 1, "") }
}

/// A job of so many nodes, without restarts.
pub fn spec(min_nodes: u32, max_nodes: u32) -> Spec {
    Spec {
        protocol: Protocols::OURS.newest,
        release: None,
        min_nodes,
        max_nodes,
        nodes_per_replica: 1,
        max_restarts: 0,
        restarts_without_progress: None,
        failed_starts: None,
        exclude_after: 0,
        restart_policy: RestartPolicy::Failures,
        on_store_loss: OnStoreLoss::Wait,
        peer_tls: false,
        timings: Timings::default(),
    }
}
