//! What the JSON API, version 1, reads: from memory alone. Its shapes are in `docs/coordinator.md`; what it changes is in
//! [`super::changes`]. The gRPC API reads by the same functions.

use std::ops::Bound;
use std::sync::Arc;
use std::time::Duration;

use axum::extract::rejection::QueryRejection;
use axum::extract::{Extension, Path, Query, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::{Router, middleware};
use serde::Deserialize;
use serde_json::{Value, json};

use super::access::{Caller, Refuse, admit};
use super::problem::{Problem, answer};
use super::users::Role;
use super::{Site, changes};
use crate::job::overview::{Job, Overview};
use crate::job::{self, JobId, JobState};
use crate::service::Shared;

/// Jobs in one answer unless less is asked for.
const MOST_JOBS: usize = 1_000;

/// Longest `wait`, in seconds. It is less than a port leaves an old connection for its last answer.
const LONGEST_WAIT: u64 = 8;

pub(super) fn router(site: &Arc<Site>) -> Router<Arc<Site>> {
    Router::new()
        .route("/me", get(me))
        .route("/jobs", get(jobs))
        .route("/jobs/{job}", get(job))
        .route("/jobs/{job}/events", get(events))
        .merge(changes::router())
        .fallback(async || {
            Problem(StatusCode::NOT_FOUND, "there are /v1/jobs, /v1/jobs/JOB, /v1/jobs/JOB/events and /v1/me".into())
        })
        .method_not_allowed_fallback(async || {
            Problem(StatusCode::METHOD_NOT_ALLOWED, "what is read takes GET, and what is changed POST".into())
        })
        .layer(middleware::from_fn_with_state((Arc::clone(site), refuse as Refuse), admit))
}

fn refuse(problem: Problem) -> Response {
    problem.into_response()
}

/// Who the caller is: what a page needs to know to show only what works.
async fn me(Extension(caller): Extension<Caller>) -> Response {
    answer(&match caller {
        Caller::Anybody => json!({ "name": null, "role": Role::Read, "jobs": null }),
        Caller::User(user) => json!({ "name": user.name, "role": user.role, "jobs": user.jobs }),
    })
}

/// Looks at the jobs.
pub(super) fn look<T>(shared: &Shared, look: impl FnOnce(&Overview) -> Result<T, Problem>) -> Result<T, Problem> {
    let overview = shared.overview();
    let unread = || Problem(StatusCode::SERVICE_UNAVAILABLE, "the jobs were not read yet: is the store there?".into());
    look(overview.as_ref().ok_or_else(unread)?)
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
    /// Only jobs in this state.
    pub(super) state: Option<JobState>,
    /// Only jobs whose ids come after this.
    pub(super) after: Option<String>,
    pub(super) limit: Option<usize>,
}

async fn jobs(
    State(site): State<Arc<Site>>,
    Extension(caller): Extension<Caller>,
    listing: Result<Query<Listing>, QueryRejection>,
) -> Result<Response, Problem> {
    let Query(listing) = listing?;
    look(&site.shared, |overview| Ok(answer(&list(overview, &caller, &listing))))
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

async fn job(
    State(site): State<Arc<Site>>,
    Extension(caller): Extension<Caller>,
    Path(id): Path<String>,
) -> Result<Response, Problem> {
    look(&site.shared, |overview| {
        let (id, job) = find(overview, &id, &caller)?;
        Ok(answer(&job::json::job(id, job)))
    })
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct History {
    /// Only events with higher numbers.
    #[serde(default)]
    after: u64,
    limit: Option<usize>,
    /// Seconds to wait for one where there is none.
    #[serde(default)]
    wait: u64,
}

async fn events(
    State(site): State<Arc<Site>>,
    Extension(caller): Extension<Caller>,
    Path(id): Path<String>,
    history: Result<Query<History>, QueryRejection>,
) -> Result<Response, Problem> {
    let Query(History { after, limit, wait }) = history?;
    if wait > LONGEST_WAIT {
        return Err(Problem(
            StatusCode::BAD_REQUEST,
            format!("wait is at most {LONGEST_WAIT} seconds, ask again then"),
        ));
    }
    let mut changes = site.shared.changes.subscribe();
    let until = tokio::time::Instant::now() + Duration::from_secs(wait);
    loop {
        changes.mark_unchanged();
        let (value, anything) =
            look(&site.shared, |overview| Ok(since(find(overview, &id, &caller)?.1, after, limit)))?;
        if anything || tokio::time::timeout_at(until, changes.changed()).await.is_err() {
            return Ok(answer(&value));
        }
    }
}

/// The events after one, and where to go on; whether that is anything new. Where the history has begun again (its job
/// was deleted), `next` is lower than what was asked for.
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
    use crate::store::{KeyValue, Revision};

    fn overview(records: &[(&str, Value)]) -> Overview {
        let values: Vec<KeyValue> = records
            .iter()
            .map(|(key, value)| KeyValue {
                key: format!("/elastic/v1/jobs/{key}"),
                value: value.to_string().into_bytes(),
                create_revision: Revision(5),
                mod_revision: Revision(7),
                lease: None,
            })
            .collect();
        Overview::of("/elastic", &values)
    }

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
    fn history_goes_on_where_one_left_off() {
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
