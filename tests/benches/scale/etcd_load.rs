//! What an etcd has done and what it costs, by its own metrics.

use elastic_tests::prelude::*;
use std::ops::Sub;

use anyhow::{Context, Result};
use elastic_tests::cost_model::Load;
use elastic_tests::http::get;

/// Its counters at one moment, or what they grew by between two.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct EtcdLoad {
    /// Calls that were answered with what was asked for.
    pub(crate) requests: f64,
    /// Calls that were not.
    pub(crate) refused: f64,
    pub(crate) renewals: f64,
    pub(crate) events: f64,
    /// Leases that were granted, and that ended.
    pub(crate) granted: f64,
    pub(crate) ended: f64,
    /// Bytes of all messages, without what gRPC and HTTP add.
    pub(crate) received: f64,
    pub(crate) sent: f64,
    /// Seconds on a processor.
    pub(crate) processor: f64,
    /// Bytes in memory, connections and watches, at the later moment.
    pub(crate) memory: f64,
    pub(crate) watches: f64,
}

impl EtcdLoad {
    pub(crate) async fn of(address: &str) -> Result<EtcdLoad> {
        let text = String::from_utf8(get(address, "/metrics").await?)?;
        Ok(parse(&text))
    }

    pub(crate) fn each(&self, nodes: u32) -> Load {
        let nodes = f64::from(nodes);
        Load {
            requests: self.requests / nodes,
            renewals: self.renewals / nodes,
            events: self.events / nodes,
            received: self.received / nodes,
            sent: self.sent / nodes,
        }
    }
}

impl Sub for EtcdLoad {
    type Output = EtcdLoad;

    fn sub(self, before: EtcdLoad) -> EtcdLoad {
        EtcdLoad {
            requests: self.requests - before.requests,
            refused: self.refused - before.refused,
            renewals: self.renewals - before.renewals,
            events: self.events - before.events,
            granted: self.granted - before.granted,
            ended: self.ended - before.ended,
            received: self.received - before.received,
            sent: self.sent - before.sent,
            processor: self.processor - before.processor,
            ..self
        }
    }
}

fn parse(text: &str) -> EtcdLoad {
    let mut sums: BTreeMap<&str, f64> = BTreeMap::new();
    let mut load = EtcdLoad::default();
    for line in text.lines().filter(|line| !line.starts_with('#')) {
        let Some((name, value)) = line.rsplit_once(' ') else { continue };
        let Ok(value) = value.parse::<f64>() else { continue };
        let (family, labels) = name.split_once('{').unwrap_or((name, ""));
        match family {
            "grpc_server_handled_total" if labels.contains("grpc_type=\"unary\"") => {
                let answered = labels.contains("grpc_code=\"OK\"");
                *if answered { &mut load.requests } else { &mut load.refused } += value;
            }
            "grpc_server_msg_received_total" if labels.contains("LeaseKeepAlive") => load.renewals += value,
            _ => *sums.entry(family).or_default() += value,
        }
    }
    let sum = |family| sums.get(family).copied().unwrap_or_default();
    EtcdLoad {
        events: sum("etcd_debugging_mvcc_events_total"),
        granted: sum("etcd_debugging_lease_granted_total"),
        ended: sum("etcd_debugging_lease_revoked_total"),
        received: sum("etcd_network_client_grpc_received_bytes_total"),
        sent: sum("etcd_network_client_grpc_sent_bytes_total"),
        processor: sum("process_cpu_seconds_total"),
        memory: sum("process_resident_memory_bytes"),
        watches: sum("etcd_debugging_mvcc_watcher_total"),
        ..load
    }
}

pub(crate) async fn version(address: &str) -> Result<String> {
    let answer: serde_json::Value = serde_json::from_slice(&get(address, "/version").await?)?;
    Ok(answer["etcdserver"].as_str().context("a version")?.to_owned())
}
