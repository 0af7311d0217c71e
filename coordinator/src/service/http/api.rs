//! The JSON API, version 1: which path and which body or query is which [`Operation`], and the answer as JSON. Its shapes
//! are in `docs/coordinator.md`.

use std::sync::Arc;
use std::time::Duration;

use axum::body::Bytes;
use axum::extract::rejection::{BytesRejection, PathRejection, QueryRejection};
use axum::extract::{DefaultBodyLimit, Extension, Path, Query, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Router, middleware};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::Site;
use super::access::{Caller, Refuse, admit};
use super::messages::LONGEST;
use super::operations::{Listing, Operation, aside, wish};
use super::problem::{Problem, answer};

/// Longest `wait`, in seconds. It is less than a port leaves an old connection for its last answer.
const LONGEST_WAIT: u64 = 8;

pub(super) fn router(site: &Arc<Site>) -> Router<Arc<Site>> {
    Router::new()
        .route("/me", get(me))
        .route("/jobs", get(jobs))
        .route("/jobs/{job}", get(job))
        .route("/jobs/{job}/events", get(events))
        .route("/jobs/{job}/{call}", post(change))
        .layer(DefaultBodyLimit::max(LONGEST))
        .fallback(async || {
            Problem(StatusCode::NOT_FOUND, "there are /v1/jobs, /v1/jobs/JOB, /v1/jobs/JOB/events and /v1/me".into())
        })
        .method_not_allowed_fallback(async || {
            Problem(StatusCode::METHOD_NOT_ALLOWED, "what is read takes GET, and what is changed POST".into())
        })
        .layer(middleware::from_fn_with_state((Arc::clone(site), Problem::into_response as Refuse), admit))
}

type Answer = Result<Response, Problem>;

async fn me(State(site): State<Arc<Site>>, Extension(caller): Extension<Caller>) -> Answer {
    Ok(answer(&site.carry(&caller, "", Operation::Me).await?))
}

async fn jobs(
    State(site): State<Arc<Site>>,
    Extension(caller): Extension<Caller>,
    listing: Result<Query<Listing>, QueryRejection>,
) -> Answer {
    Ok(answer(&site.carry(&caller, "", Operation::Jobs(listing?.0)).await?))
}

async fn job(
    State(site): State<Arc<Site>>,
    Extension(caller): Extension<Caller>,
    id: Result<Path<String>, PathRejection>,
) -> Answer {
    let Path(id) = id?;
    let told = site.carry(&caller, &id, Operation::Job).await?;
    aside(move || Ok(answer(&told))).await
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
    id: Result<Path<String>, PathRejection>,
    history: Result<Query<History>, QueryRejection>,
) -> Answer {
    let Path(id) = id?;
    let Query(History { after, limit, wait }) = history?;
    if wait > LONGEST_WAIT {
        return Err(Problem(
            StatusCode::BAD_REQUEST,
            format!("wait is at most {LONGEST_WAIT} seconds, ask again then"),
        ));
    }
    let wait = Duration::from_secs(wait);
    Ok(answer(&site.carry(&caller, &id, Operation::Events { after, limit, wait }).await?))
}

/// Every change is a POST, and is named by the last part of its path.
async fn change(
    State(site): State<Arc<Site>>,
    Extension(caller): Extension<Caller>,
    path: Result<Path<(String, String)>, PathRejection>,
    body: Result<Bytes, BytesRejection>,
) -> Answer {
    let Path((id, call)) = path?;
    // Who may not change the job hears of that first, whatever the body is.
    caller.operates(&id)?;
    Ok(answer(&site.carry(&caller, &id, operation(&call, &body?)?).await?))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Deletion {
    /// Only say how many keys would go.
    #[serde(default)]
    dry_run: bool,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Nothing {}

fn operation(call: &str, body: &[u8]) -> Result<Operation, Problem> {
    let object = object(body)?;
    match call {
        "delete" => fields(object).map(|Deletion { dry_run }| Operation::Delete { dry_run }),
        "drop-checkpoint" => fields(object).map(|Nothing {}| Operation::DropCheckpoint),
        name => wish(name, object).map(Operation::Ask),
    }
}

/// A body's JSON object; nothing is an empty one.
fn object(body: &[u8]) -> Result<Value, Problem> {
    let body = if body.is_empty() { b"{}" } else { body };
    let wrong = |why: String| Problem(StatusCode::BAD_REQUEST, format!("the body is no JSON object: {why}"));
    match serde_json::from_slice(body) {
        Ok(value @ Value::Object(_)) => Ok(value),
        Ok(other) => Err(wrong(format!("it is {other}"))),
        Err(error) => Err(wrong(error.to_string())),
    }
}

fn fields<T: DeserializeOwned>(value: Value) -> Result<T, Problem> {
    serde_json::from_value(value).map_err(|error| Problem(StatusCode::BAD_REQUEST, format!("the body: {error}")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::operator::Wish;

    #[test]
    fn calls_are_named_after_wishes_and_take_their_fields_alone() {
        let said = |name: &str, body: &str| {
            let wish = object(body.as_bytes()).and_then(|fields| wish(name, fields));
            wish.map_err(|Problem(status, why)| (status.as_u16(), why))
        };
        assert_eq!(said("drain", r#"{"node":"a"}"#), Ok(Wish::Drain { node: "a".into() }));
        assert_eq!(said("set", r#"{"max":3}"#), Ok(Wish::Set { min: None, max: Some(3), priority: None }));
        assert_eq!(said("close", ""), Ok(Wish::Close {}));
        assert_eq!(said("close", "{}"), Ok(Wish::Close {}));
        for (name, body, status, says) in [
            ("drian", "{}", 404, "`drain`, `undrain`"),
            ("drain", "{}", 400, "missing field `node`"),
            ("drain", r#"{"node":7}"#, 400, "string"),
            ("set", r#"{"mx":3}"#, 400, "mx"),
            ("set", r#"{"max":-1}"#, 400, "u32"),
            ("close", r#"{"now":true}"#, 400, "now"),
            ("close", "[]", 400, "no JSON object"),
            ("close", "{", 400, "no JSON object"),
        ] {
            let (found, why) = said(name, body).unwrap_err();
            assert!(found == status && why.contains(says), "{name} {body}: {found} {why}");
        }
    }
}
