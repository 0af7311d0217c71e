//! The safetensors layout of a checkpoint's data.
//!
//! Written here, since the data must start at a multiple of 4 KiB and must not be copied together first.

use serde_json::{Map, Value, json};

use super::disk::ALIGNMENT;
use super::manifest::Entry;

/// Everything before the data: the length of the JSON, and the JSON, padded with spaces. What `about` says is for
/// people and programs that ask for a file's `__metadata__`.
pub(crate) fn header(tensors: &[Entry], about: Option<Value>) -> Vec<u8> {
    let entry = |tensor: &Entry| {
        let offsets = [tensor.offset, tensor.offset + tensor.len];
        (tensor.name.clone(), json!({"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": offsets}))
    };
    let about = about.map(|about| ("__metadata__".to_owned(), about));
    let json = Value::Object(tensors.iter().map(entry).chain(about).collect::<Map<_, _>>()).to_string();
    let length = (8 + json.len()).next_multiple_of(ALIGNMENT);
    let mut bytes = ((length - 8) as u64).to_le_bytes().to_vec();
    bytes.extend(json.as_bytes());
    bytes.resize(length, b' ');
    bytes
}
