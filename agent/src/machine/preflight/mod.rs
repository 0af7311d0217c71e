//! Looks whether this machine is fit to train on, before its node joins: `--preflight`. It starts no worker, and the
//! store shows nothing of it. The bandwidth to the nodes that have joined is measured last, once the store tells of them.
//!
//! | module | what it is |
//! |---|---|
//! | `look` | reads this machine, and runs the user's own command |
//! | [`judge`] | what the readings mean, purely |
//! | `measure` | has nodes of the job pour bytes to this machine |
//! | [`peers`] | which nodes, and what their rates mean, purely |

pub(crate) mod judge;
mod look;
mod measure;
pub(crate) mod peers;

use std::path::PathBuf;
use std::time::Duration;

use judge::{Finding, State};
pub(crate) use measure::Joining;
use peers::BitRate;

/// What is checked before the node joins. By default nothing is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct PreflightOptions {
    pub built_in: bool,
    /// A command of the user's own, for the shell.
    pub command: Option<String>,
    /// The least bandwidth from a node that has joined.
    pub peer_bandwidth: Option<BitRate>,
    pub timeout: Duration,
}

/// How long the checks may take unless something else is asked for.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(60);

/// What the checks need to know of the node.
#[derive(Debug, Clone)]
pub(crate) struct Node {
    pub folders: Vec<PathBuf>,
    pub workers: u32,
    /// Whether there is to be one for each GPU.
    pub counts_gpus: bool,
    /// `CUDA_VISIBLE_DEVICES`.
    pub visible: Option<String>,
}

impl Node {
    /// How many GPUs its workers need, as far as that is known without a look at the GPUs.
    fn asked_gpus(&self) -> u32 {
        if self.counts_gpus { self.workers } else { 0 }
    }
}

#[derive(Debug, thiserror::Error)]
#[error("this machine is not fit to take part (--preflight): {}", .0.join("; "))]
pub(crate) struct Unfit(Vec<String>);

/// Looks at this machine, and logs each finding.
pub(crate) async fn pass(options: &PreflightOptions, node: Node) -> Result<(), Unfit> {
    let mut findings = Vec::new();
    if options.built_in {
        findings.extend(judge::all(&look::readings(node, options.timeout).await));
    }
    if let Some(command) = &options.command {
        findings.push(judge::command(command, &look::run(command, options.timeout).await));
    }
    conclude(&findings)
}

/// Measures the bandwidth from nodes of the job, where that is asked for, and logs what was found.
pub(crate) async fn pass_peers(options: &PreflightOptions, joining: &Joining<'_>) -> Result<(), Unfit> {
    let Some(needed) = options.peer_bandwidth else { return Ok(()) };
    let tried = joining.try_peers(needed, options.timeout).await;
    conclude(&[peers::verdict(&tried, needed)])
}

fn conclude(findings: &[Finding]) -> Result<(), Unfit> {
    findings.iter().for_each(log);
    let unfit: Vec<String> =
        findings.iter().filter(|finding| finding.state == State::Unfit).map(ToString::to_string).collect();
    if unfit.is_empty() { Ok(()) } else { Err(Unfit(unfit)) }
}

fn log(finding: &Finding) {
    match finding.state {
        State::Fit => tracing::info!("preflight: {finding}"),
        State::Unknown => tracing::info!("preflight, unknown: {finding}"),
        State::Warning | State::Unfit => tracing::warn!("preflight: {finding}"),
    }
}
