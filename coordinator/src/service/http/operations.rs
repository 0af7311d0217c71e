//! What the APIs can be asked, as one list with one handler for each operation. `api` and `grpc` read requests and write
//! answers, each in its own encoding; `access` says who calls. What is read comes from memory alone.

use std::ops::Bound;
use std::sync::Arc;
use std::time::Duration;

use serde::Deserialize;
use serde_json::{Value, json};

use super::Site;
use super::access::Caller;
use super::problem::Problem;
use super::users::Role;
use crate::operator::{Granted, Wish};
use crate::service::Shared;
use axum::http::StatusCode;
use elastic_rendezvous::job::overview::{Job, Overview};
use elastic_rendezvous::job::{self, JobId, JobState, Requester};

/// Jobs in one answer unless less is asked for.
const MOST_JOBS: usize = 1_000;

/// One request, whichever API it came by.
pub(super) enum Operation {
    /// Who the caller is: what a page needs to know to show only what works.
    Me,
    Jobs(Listing),
    Job,
    /// The events after one.
    Events {
        /// Only events with higher numbers.
        after: u64,
        limit: Option<usize>,
        /// How long to wait for one where there is none.
        wait: Duration,
    },
    Ask(Wish),
    /// Deletes a job, or says how many keys would go.
    Delete {
        dry_run: bool,
    },
    DropCheckpoint,
}

impl Site {
    /// Does what is asked; the answer of both APIs. `id` is the job, where the operation is about one.
    pub(super) async fn carry(&self, caller: &Caller, id: &str, operation: Operation) -> Result<Value, Problem> {
        match operation {
            Operation::Me => Ok(me(caller)),
            Operation::Jobs(listing) => {
                let (shared, caller) = (Arc::clone(&self.shared), caller.clone());
                aside(move || look(&shared, |overview| Ok(list(overview, &caller, &listing)))).await
            }
            Operation::Job => {
                let (shared, caller, id) = (Arc::clone(&self.shared), caller.clone(), id.to_owned());
                aside(move || {
                    let (id, job) = look(&shared, |overview| find(overview, &id, &caller).map(copied))?;
                    Ok(job::json::job(&id, &job))
                })
                .await
            }
            Operation::Events { after, limit, wait } => self.events(caller, id, (after, limit), wait).await,
            Operation::Ask(wish) => self.ask(id, &wish, &caller.operates(id)?).await,
            Operation::Delete { dry_run } => self.delete(id, dry_run, &caller.operates(id)?).await,
            Operation::DropCheckpoint => self.drop_checkpoint(id, &caller.operates(id)?).await,
        }
    }

    async fn events(
        &self,
        caller: &Caller,
        id: &str,
        (after, limit): (u64, Option<usize>),
        wait: Duration,
    ) -> Result<Value, Problem> {
        let mut changes = self.shared.changes.subscribe();
        let until = tokio::time::Instant::now() + wait;
        loop {
            changes.mark_unchanged();
            let (value, anything) =
                look(&self.shared, |overview| Ok(since(find(overview, id, caller)?.1, after, limit)))?;
            if anything || tokio::time::timeout_at(until, changes.changed()).await.is_err() {
                return Ok(value);
            }
        }
    }

    async fn ask(&self, id: &str, wish: &Wish, by: &Requester) -> Result<Value, Problem> {
        let Granted { desired, advice } = self.operator.ask(id, wish, by).await?;
        tracing::info!(job = %id, "asked by {by}: {wish}");
        Ok(json!({ "job": id, "desired": desired, "advice": advice }))
    }

    async fn delete(&self, id: &str, dry_run: bool, by: &Requester) -> Result<Value, Problem> {
        let job: JobId = id.parse().map_err(|_| Problem::no_such_job(id))?;
        let keys = self.operator.delete(&job, None, dry_run).await?;
        if !dry_run {
            tracing::info!(job = %id, keys, "deleted, as asked by {by}; its checkpoint files stay");
        }
        Ok(json!({ "job": id, "keys": keys, "deleted": !dry_run }))
    }

    async fn drop_checkpoint(&self, id: &str, by: &Requester) -> Result<Value, Problem> {
        let dropped = self.operator.drop_checkpoint(id, by).await?;
        if let Some(checkpoint) = &dropped {
            tracing::info!(job = %id, "asked by {by}: drop the checkpoint of step {}", checkpoint.step);
        }
        Ok(json!({ "job": id, "dropped": dropped }))
    }
}

pub(super) fn me(caller: &Caller) -> Value {
    match caller {
        Caller::Anybody => json!({ "name": null, "role": Role::Read, "jobs": null }),
        Caller::User(user) => json!({ "name": user.name, "role": user.role, "jobs": user.jobs }),
    }
}

pub(super) fn look<T>(shared: &Shared, look: impl FnOnce(&Overview) -> Result<T, Problem>) -> Result<T, Problem> {
    let overview = shared.overview();
    let unread = || Problem(StatusCode::SERVICE_UNAVAILABLE, "the jobs were not read yet: is the store there?".into());
    look(overview.as_ref().ok_or_else(unread)?)
}

/// Does this on a thread of its own. The answer about a large job takes long, and this thread leads jobs.
pub(super) async fn aside<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, Problem> + Send + 'static,
) -> Result<T, Problem> {
    let ended = |error| Problem(StatusCode::INTERNAL_SERVER_ERROR, format!("the answer could not be made: {error}"));
    tokio::task::spawn_blocking(work).await.unwrap_or_else(|error| Err(ended(error)))
}

/// A copy of a job, so that others need not wait while the answer is made.
pub(super) fn copied((id, job): (&JobId, &Job)) -> (JobId, Job) {
    (id.clone(), job.clone())
}

/// A job that the caller sees.
pub(super) fn find<'a>(overview: &'a Overview, id: &str, caller: &Caller) -> Result<(&'a JobId, &'a Job), Problem> {
    let named = id.parse::<JobId>().ok().and_then(|id| overview.jobs.get_key_value(&id));
    let found = named.filter(|(id, job)| job.round.is_some() && caller.sees(id));
    found.ok_or_else(|| Problem::no_such_job(id))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Listing {
    pub(super) state: Option<JobState>,
    /// Only jobs whose ids come after this.
    pub(super) after: Option<String>,
    pub(super) limit: Option<usize>,
}

/// One page of the jobs that the caller sees, and in `next` where the following one begins; null: there is none.
pub(super) fn list(overview: &Overview, caller: &Caller, Listing { state, after, limit }: &Listing) -> Value {
    let limit = limit.unwrap_or(MOST_JOBS).clamp(1, MOST_JOBS);
    let mut found = overview.jobs.iter().filter(|(id, job)| {
        caller.sees(id)
            && after.as_ref().is_none_or(|after| id.to_string() > *after)
            && job.state().is_some_and(|is| state.is_none_or(|state| state == is))
    });
    let page: Vec<Value> = found.by_ref().take(limit).map(|(id, job)| job::json::summary(id, job)).collect();
    let next = found.next().and_then(|_| page.last()).map(|last| last["job"].clone());
    json!({ "jobs": page, "next": next })
}

/// What is asked of a job, by its name and fields. A name that no wish has is no call.
pub(super) fn wish(name: &str, fields: Value) -> Result<Wish, Problem> {
    serde_json::from_value(json!({ name: fields })).map_err(|error| {
        let error = error.to_string();
        match error.strip_prefix("unknown variant ") {
            Some(known) => {
                Problem(StatusCode::NOT_FOUND, format!("there is no call {known}, `delete`, `drop-checkpoint`"))
            }
            None => Problem(StatusCode::BAD_REQUEST, format!("{name}: {error}")),
        }
    })
}

/// The events after one, and where to continue; whether that is anything new. Where the history has begun again (its
/// job was deleted), `next` is lower than what was asked for.
pub(super) fn since(job: &Job, after: u64, limit: Option<usize>) -> (Value, bool) {
    let new = job.events.range((Bound::Excluded(after), Bound::Unbounded)).take(limit.unwrap_or(usize::MAX).max(1));
    let events: Vec<Value> = new.map(|(number, event)| job::json::event(*number, event)).collect();
    let last = job.events.keys().next_back().copied().unwrap_or(0);
    let next = events.last().map_or(json!(last), |event| event["number"].clone());
    let anything = !events.is_empty() || last < after;
    (json!({ "events": events, "next": next }), anything)
}

#[cfg(test)]
mod tests {
    use super::*;
    use elastic_rendezvous::job::samples::overview;

    fn round(state: &str) -> Value {
        json!({ "number": 1, "generation": 1, "state": state, "reason": "r" })
    }

    fn ids(value: &Value) -> Vec<&str> {
        value["jobs"].as_array().unwrap().iter().map(|job| job["job"].as_str().unwrap()).collect()
    }

    #[test]
    fn jobs_come_in_pages() {
        let overview = overview(&[
            ("a/round", round("running")),
            ("b/round", round("failed")),
            ("c/round", round("running")),
            ("d/round", round("running")),
        ]);
        let page = |state, after: Option<&str>, limit| {
            list(&overview, &Caller::Anybody, &Listing { state, after: after.map(str::to_owned), limit })
        };
        let all = page(None, None, None);
        assert_eq!(ids(&all), ["a", "b", "c", "d"]);
        assert_eq!(all["next"], Value::Null);
        let first = page(Some(JobState::Running), None, Some(2));
        assert_eq!((ids(&first), &first["next"]), (vec!["a", "c"], &json!("c")));
        let last = page(Some(JobState::Running), Some("c"), Some(2));
        assert_eq!((ids(&last), &last["next"]), (vec!["d"], &Value::Null));
    }

    #[test]
    fn history_continues_after_the_last_entry_read() {
        let event = |at_ms: u64| json!({ "at_ms": at_ms, "round": 1, "state": "running", "reason": "r" });
        let overview = overview(&[
            ("a/round", round("running")),
            ("a/events/00000000000000000003", event(30)),
            ("a/events/00000000000000000004", event(40)),
        ]);
        let job = overview.jobs.values().next().unwrap();
        let numbers = |after, limit| {
            let (value, anything) = since(job, after, limit);
            let events = value["events"].as_array().unwrap();
            let numbers: Vec<u64> = events.iter().map(|event| event["number"].as_u64().unwrap()).collect();
            (numbers, value["next"].as_u64().unwrap(), anything)
        };
        assert_eq!(numbers(0, None), (vec![3, 4], 4, true));
        assert_eq!(numbers(0, Some(1)), (vec![3], 3, true));
        assert_eq!(numbers(3, None), (vec![4], 4, true));
        assert_eq!(numbers(4, None), (vec![], 4, false));
        assert_eq!(numbers(9, None), (vec![], 4, true), "the history began again");
    }
}
