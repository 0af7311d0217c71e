//! What the APIs answer: JSON, and for an error `{"error": "..."}` with a status; over gRPC the same sentence with gRPC's
//! own code.

use axum::extract::rejection::{BytesRejection, PathRejection, QueryRejection};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};
use tonic::{Code, Status};

use crate::operator::OperatorError;
use crate::removal::RemovalError;

/// Why there is no other answer.
#[derive(Debug)]
pub(super) struct Problem(pub(super) StatusCode, pub(super) String);

impl Problem {
    /// The same, whether a job is not there or not for this user to see.
    pub(super) fn no_such_job(id: &str) -> Problem {
        Problem(StatusCode::NOT_FOUND, format!("there is no job {id:?}"))
    }
}

impl IntoResponse for Problem {
    fn into_response(self) -> Response {
        let mut response = (self.0, answer(&json!({ "error": self.1 }))).into_response();
        if self.0 == StatusCode::UNAUTHORIZED {
            response.headers_mut().insert(header::WWW_AUTHENTICATE, header::HeaderValue::from_static("Bearer"));
        }
        response
    }
}

impl From<Problem> for Status {
    fn from(Problem(status, why): Problem) -> Status {
        let code = match status {
            StatusCode::BAD_REQUEST => Code::InvalidArgument,
            StatusCode::UNAUTHORIZED => Code::Unauthenticated,
            StatusCode::FORBIDDEN => Code::PermissionDenied,
            StatusCode::NOT_FOUND => Code::NotFound,
            StatusCode::CONFLICT | StatusCode::BAD_GATEWAY => Code::FailedPrecondition,
            StatusCode::TOO_MANY_REQUESTS => Code::ResourceExhausted,
            StatusCode::SERVICE_UNAVAILABLE => Code::Unavailable,
            _ => Code::Internal,
        };
        Status::new(code, why)
    }
}

macro_rules! rejections {
    ($($rejection:ty),*) => {$(
        impl From<$rejection> for Problem {
            fn from(rejection: $rejection) -> Problem {
                Problem(rejection.status(), rejection.body_text())
            }
        }
    )*};
}

rejections!(QueryRejection, PathRejection, BytesRejection);

impl From<OperatorError> for Problem {
    fn from(error: OperatorError) -> Problem {
        let status = match &error {
            // Its own text names the other jobs.
            OperatorError::NoSuchJob { job, .. } => return Problem::no_such_job(job),
            OperatorError::Removal(RemovalError::NoSuchJob { job }) => return Problem::no_such_job(job.as_ref()),
            OperatorError::NoSuchNode { .. } => StatusCode::NOT_FOUND,
            OperatorError::Range { .. } | OperatorError::NothingToSet | OperatorError::BadNode { .. } => {
                StatusCode::BAD_REQUEST
            }
            OperatorError::Store(error) | OperatorError::Removal(RemovalError::Store(error))
                if error.is_transient() =>
            {
                StatusCode::SERVICE_UNAVAILABLE
            }
            // The store refuses, and does so again however often it is asked.
            OperatorError::Store(_) | OperatorError::Removal(RemovalError::Store(_)) => StatusCode::BAD_GATEWAY,
            OperatorError::Ended { .. }
            | OperatorError::NotEnded { .. }
            | OperatorError::OtherProtocol { .. }
            | OperatorError::Contended { .. }
            | OperatorError::Removal(_) => StatusCode::CONFLICT,
        };
        Problem(status, error.to_string())
    }
}

impl From<RemovalError> for Problem {
    fn from(error: RemovalError) -> Problem {
        OperatorError::from(error).into()
    }
}

pub(super) fn answer(value: &Value) -> Response {
    let headers = [
        (header::CONTENT_TYPE, "application/json"),
        (header::CACHE_CONTROL, "no-store"),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
    ];
    (headers, format!("{value}\n")).into_response()
}
