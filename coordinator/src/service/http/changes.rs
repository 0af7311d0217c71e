//! What the APIs change: each [`Wish`] under its name, and what can be done with a job that has ended, with the caller's
//! name in the job's history. Every call of the JSON API is a POST.

use std::sync::Arc;

use axum::Router;
use axum::body::Bytes;
use axum::extract::{DefaultBodyLimit, Extension, Path, State};
use axum::http::StatusCode;
use axum::response::Response;
use axum::routing::post;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use super::Site;
use super::access::Caller;
use super::problem::{Problem, answer};
use crate::job::{JobId, Requester};
use crate::operator::{Granted, Wish};

/// Most bytes of a body, or of a gRPC message.
pub(super) const LONGEST: usize = 16 * 1024;

pub(super) fn router() -> Router<Arc<Site>> {
    Router::new()
        .route("/jobs/{job}/delete", post(delete))
        .route("/jobs/{job}/drop-checkpoint", post(drop_checkpoint))
        .route("/jobs/{job}/{wish}", post(ask))
        .layer(DefaultBodyLimit::max(LONGEST))
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

/// What is asked. A call that no wish is named after is none.
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

impl Site {
    /// Asks something of a job; what the APIs answer.
    pub(super) async fn ask(&self, id: &str, wish: &Wish, by: &Requester) -> Result<Value, Problem> {
        let Granted { desired, advice } = self.operator.ask(id, wish, by).await?;
        tracing::info!(job = %id, "asked by {by}: {wish}");
        Ok(json!({ "job": id, "desired": desired, "advice": advice }))
    }

    /// Deletes a job, or says how many keys would go; what the APIs answer.
    pub(super) async fn delete(&self, id: &str, dry_run: bool, by: &Requester) -> Result<Value, Problem> {
        let job: JobId = id.parse().map_err(|_| Problem::no_such_job(id))?;
        let keys = if dry_run {
            self.operator.would_delete(&job, None).await?
        } else {
            let keys = self.operator.delete(&job, None).await?;
            tracing::info!(job = %id, keys, "deleted, as asked by {by}; its checkpoint files stay");
            keys
        };
        Ok(json!({ "job": id, "keys": keys, "deleted": !dry_run }))
    }

    /// Drops a job's resume point; what the APIs answer.
    pub(super) async fn drop_checkpoint(&self, id: &str, by: &Requester) -> Result<Value, Problem> {
        let dropped = self.operator.drop_checkpoint(id, by).await?;
        if let Some(checkpoint) = &dropped {
            tracing::info!(job = %id, "asked by {by}: drop the checkpoint of step {}", checkpoint.step);
        }
        Ok(json!({ "job": id, "dropped": dropped }))
    }
}

async fn ask(
    State(site): State<Arc<Site>>,
    Extension(caller): Extension<Caller>,
    Path((id, name)): Path<(String, String)>,
    body: Bytes,
) -> Result<Response, Problem> {
    let by = caller.operates(&id)?;
    let wish = wish(&name, object(&body)?)?;
    Ok(answer(&site.ask(&id, &wish, &by).await?))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Deletion {
    /// Only say how many keys would go.
    #[serde(default)]
    dry_run: bool,
}

async fn delete(
    State(site): State<Arc<Site>>,
    Extension(caller): Extension<Caller>,
    Path(id): Path<String>,
    body: Bytes,
) -> Result<Response, Problem> {
    let by = caller.operates(&id)?;
    let Deletion { dry_run } = fields(object(&body)?)?;
    Ok(answer(&site.delete(&id, dry_run, &by).await?))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Nothing {}

async fn drop_checkpoint(
    State(site): State<Arc<Site>>,
    Extension(caller): Extension<Caller>,
    Path(id): Path<String>,
    body: Bytes,
) -> Result<Response, Problem> {
    let by = caller.operates(&id)?;
    let Nothing {} = fields(object(&body)?)?;
    Ok(answer(&site.drop_checkpoint(&id, &by).await?))
}

#[cfg(test)]
mod tests {
    use super::*;

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
