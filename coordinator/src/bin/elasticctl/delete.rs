//! `elasticctl delete`: what it says. What it does is in [`elastic_coordinator::operator`].

use std::time::Duration;

use elastic_coordinator::operator::Operator;
use elastic_coordinator::removal::RemovalError;
use elastic_coordinator::service::retention::{Policy, expired};
use elastic_rendezvous::job::{JobId, Keys};
use serde_json::json;

use crate::{print, print_json};

/// Deletes one job, or says what would be deleted.
pub(crate) async fn one(operator: &Operator, job: &str, dry_run: bool, json: bool) -> anyhow::Result<()> {
    let (id, _, _) = operator.job(job).await?;
    let keys = operator.delete(&id, None, dry_run).await?;
    if json { print_json(&record(&id, keys, dry_run)) } else { print(&line(&id, keys, dry_run)) }
}

/// Deletes all jobs that ended longer ago than `older_than`. What cannot be deleted is said, and the others continue.
#[allow(clippy::print_stderr)]
pub(crate) async fn finished(
    operator: &Operator,
    older_than: Duration,
    dry_run: bool,
    json: bool,
) -> anyhow::Result<()> {
    let (overview, _) = operator.jobs().await?;
    let policy = Policy { keep: Some(older_than), count: None };
    let (mut records, mut left) = (Vec::new(), 0);
    for id in expired(&overview.jobs, elastic_store::clock::epoch_ms(), policy) {
        let chosen = overview.jobs[&id].round.as_ref().map(|round| round.modified);
        match operator.delete(&id, chosen, dry_run).await {
            Ok(keys) if json => records.push(record(&id, keys, dry_run)),
            Ok(keys) => {
                records.push(json!(null));
                print(&line(&id, keys, dry_run))?;
            }
            // The store is away: the others would fail as well.
            Err(RemovalError::Store(error)) => return Err(error.into()),
            Err(error) => {
                eprintln!("elasticctl: {error}");
                left += 1;
            }
        }
    }
    if json {
        print_json(&records.into())?;
    } else if records.is_empty() && left == 0 {
        let jobs = Keys::jobs(&operator.prefix);
        print(&format!("no job under {jobs} ended that long ago\n"))?;
    }
    anyhow::ensure!(left == 0, "jobs that could not be deleted: {left}");
    Ok(())
}

fn line(job: &JobId, keys: i64, dry_run: bool) -> String {
    if dry_run {
        format!("would delete job {job}: {keys} keys\n")
    } else {
        format!("deleted job {job}: {keys} keys; its checkpoint files stay\n")
    }
}

fn record(job: &JobId, keys: i64, dry_run: bool) -> serde_json::Value {
    json!({ "job": job, "keys": keys, "deleted": !dry_run })
}
