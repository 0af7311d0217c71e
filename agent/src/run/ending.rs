//! How a node leaves, and how it reports its end. A node that serves the store of the others leaves after them.

use std::path::PathBuf;
use std::time::Duration;

use elastic_rendezvous::End;
use elastic_rendezvous::job::Keys;

use crate::cli::{Dialect, Options};
use crate::output::logs::{Console, ConsoleStream};
use crate::output::outcome::recorded;
use crate::output::outcome::report::{Report, ReportForm};
use crate::store::backend::Backend;
use crate::workers::final_save;

/// The longest time that an agent which serves the store waits for the other nodes to leave, if none of them may still
/// save.
const LEAVE_LAST: Duration = Duration::from_secs(10);

/// The longest time that the console may take for the last lines.
pub(super) const FLUSH: Duration = Duration::from_secs(2);

/// Why a node's part did not end well.
pub(super) fn reason(end: &End) -> Option<&str> {
    match end {
        End::Succeeded => None,
        End::Failed(_, reason) | End::Refused(reason) | End::StoreLost(reason) => Some(reason),
        End::Closed => Some("the job was closed by its operator"),
        End::Drained => Some("this node has left the job"),
    }
}

/// How a node ends that ran no worker of a job that succeeded. It says so. Of several nodes, a spare shares the job's
/// result. A run of one node under another launcher's name has not done what it was started for, so it fails, as with
/// torchrun.
pub(super) fn without_work(options: &Options) -> anyhow::Result<End> {
    let job = &options.job;
    let why = format!("no worker ran here: job `{job}` had ended already, or ended while this node was a spare");
    if options.dialect == Dialect::Own || options.spec.max_nodes > 1 {
        tracing::warn!("{why}");
        return Ok(End::Succeeded);
    }
    anyhow::bail!("{why}; give this run an --rdzv-id of its own, or delete the old job with `elasticctl delete {job}`")
}

/// Tells the parent process how the agent ended. People read the console, and programs read the JSON report. Like
/// torchrun, the agent also writes the error file that it was itself started with.
pub(super) fn tell(report: &Report, form: ReportForm, console: &Console) {
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

/// An agent that serves the store stays until the other nodes have read the result and left.
pub(super) async fn leave_last(backend: &Backend, keys: &Keys, end: &End) {
    let gone = async {
        let Some(store) = backend.store() else { return };
        while store.range(&keys.nodes()).await.is_ok_and(|(nodes, _)| !nodes.is_empty()) {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        // The watches of the other nodes deliver the result before the nodes' keys go. Answers that are under way get a
        // moment.
        tokio::time::sleep(Duration::from_millis(100)).await;
    };
    let longest = if final_save::may_matter(end) { LEAVE_LAST + final_save::LIMIT } else { LEAVE_LAST };
    if tokio::time::timeout(longest, gone).await.is_err() {
        tracing::warn!("some nodes have not left; their store ends with this agent");
    }
}
