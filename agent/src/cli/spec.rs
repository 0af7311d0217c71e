//! The flags and keys that all agents of a job must share: the job's spec.

use std::time::Duration;

use elastic_rendezvous::job::{Protocols, Release, RestartPolicy, Spec, SpecError, Timings};

use super::conf::{self, Conf};
use super::error::{Refusal, UsageError};
use super::flags::Settings;
use super::values::{self, NodeRange};
use crate::store::choice::{StoreChoice, StoreOptions};

/// `--exclude-after` unless given.
const EXCLUDE_AFTER: u32 = 3;
/// The lease of a node whose store is its own. No other node can take this node's place. So it may be frozen for
/// any time (a closed lid, Ctrl-Z), and continues after that.
const ALONE: Duration = Duration::from_secs(365 * 24 * 3600);

/// The number of nodes that this way to meet allows.
pub(super) fn fitting(mut nodes: NodeRange, store: &StoreOptions, warnings: &mut Vec<String>) -> NodeRange {
    if store.choice == StoreChoice::Standalone && nodes.max > 1 {
        warnings.push(format!("--standalone runs one node: --nnodes={nodes} is taken as 1"));
        nodes.max = 1;
    }
    if store.place.is_some() && nodes.min < nodes.max {
        warnings.push(format!("--rdzv-backend=static is of a fixed size: --nnodes={nodes} is taken as {}", nodes.max));
        nodes.min = nodes.max;
    }
    nodes
}

pub(super) fn read(
    settings: &Settings<'_>,
    conf: &Conf,
    nodes: NodeRange,
    store: &StoreOptions,
    peer_tls: bool,
) -> Result<Spec, UsageError> {
    let count = |flag, least| settings.parsed(flag, |text| values::count(text, least));
    let restarts_without_progress = count("restarts-without-progress", 1)?;
    let nodes_per_replica = count("replica-nodes", 1)?.unwrap_or(1);
    if nodes_per_replica > 1 && matches!(store.choice, StoreChoice::Etcd { v2: true, .. }) {
        let cause = "torchelastic's rendezvous knows no replicas of several nodes";
        return Err(Refusal::new(cause, "use --rdzv-backend=etcd").of("--replica-nodes"));
    }
    let on_store_loss = settings.parsed("on-store-loss", conf::on_store_loss)?;
    let spec = Spec {
        protocol: conf.job_protocol.unwrap_or(Protocols::OURS.newest),
        release: Some(Release::ours()),
        min_nodes: nodes.min,
        max_nodes: nodes.max,
        nodes_per_replica,
        max_restarts: count("max-restarts", 0)?.unwrap_or(settings.dialect.max_restarts()),
        restarts_without_progress,
        failed_starts: settings.dialect.failed_starts().filter(|_| restarts_without_progress.is_none()),
        exclude_after: count("exclude-after", 0)?.unwrap_or(EXCLUDE_AFTER),
        restart_policy: settings.parsed("restart-policy", restart_policy)?.unwrap_or_default(),
        on_store_loss: on_store_loss.or(conf.on_store_loss).unwrap_or_default(),
        peer_tls,
        timings: timings(settings, conf, &store.choice)?,
    };
    if let Err(error) = spec.check() {
        let flag = if matches!(error, SpecError::Replicas { .. }) { "--nnodes" } else { "--rdzv-conf" };
        return Err(Refusal::new(error.to_string(), "see elastic-agent --help").of(flag));
    }
    Ok(spec)
}

fn restart_policy(text: &str) -> Result<RestartPolicy, Refusal> {
    values::one_of(text, "is not known", &[("failures", RestartPolicy::Failures), ("all", RestartPolicy::All)])
}

fn timings(settings: &Settings<'_>, conf: &Conf, store: &StoreChoice) -> Result<Timings, UsageError> {
    let mut timings = conf.timings;
    timings.stop_grace = stop_grace(settings)?.unwrap_or(timings.stop_grace);
    timings.drain_grace =
        settings.parsed("drain-grace", values::duration)?.or(conf.drain_grace).unwrap_or(timings.stop_grace);
    if *store == StoreChoice::Standalone {
        timings.lease_ttl = ALONE;
    }
    Ok(timings)
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
