//! The gRPC API's messages: out of the JSON that tells the same, and into it; and how large they become.

use axum::http::StatusCode;
use prost::Message;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::problem::Problem;

/// Most bytes of a gRPC message that is taken, or of a JSON body.
pub(super) const LONGEST: usize = 16 * 1024;

/// About how many bytes of jobs go into one message: clients take 4 MiB unless they are set otherwise.
pub(super) const MESSAGE: usize = 1 << 20;

/// A message, of the JSON that tells the same.
pub(super) fn message<T: DeserializeOwned>(told: Value) -> Result<T, Problem> {
    let wrong = |error| Problem(StatusCode::INTERNAL_SERVER_ERROR, format!("this has no form in gRPC: {error}"));
    serde_json::from_value(told).map_err(wrong)
}

/// The JSON that tells the same as a message.
pub(super) fn json<T: Serialize>(value: &T) -> Result<Value, Problem> {
    let wrong = |error| Problem(StatusCode::BAD_REQUEST, format!("the request cannot be read: {error}"));
    serde_json::to_value(value).map_err(wrong)
}

/// How many of these go into one message.
pub(super) fn fitting<T: Message>(messages: &[T]) -> usize {
    let mut bytes = 0;
    let fits = messages.iter().take_while(|message| {
        bytes += message.encoded_len();
        bytes <= MESSAGE
    });
    fits.count().max(1)
}
