//! `--init`: first parameters from a safetensors file instead of the model's own.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use safetensors::{Dtype, SafeTensors, tensor::TensorView};

use super::TrainError;
use crate::model::Tensor;
use crate::model::optimizer::PREFIXES;
use crate::vectors::first_not_finite;

/// A file that was read, and fits the model.
pub(crate) struct InitFile {
    path: PathBuf,
    /// CRC-32C of the parameters in it.
    checksum: u32,
}

impl InitFile {
    /// Reads and checks the file.
    pub(super) fn open(path: &Path, tensors: &[Tensor]) -> Result<InitFile, TrainError> {
        let checksum = crc32c::crc32c(bytemuck::cast_slice(&read(path, tensors)?));
        Ok(InitFile { path: path.to_owned(), checksum })
    }

    /// What it is, for the run's identity: the same parameters in another file are the same.
    pub(super) fn words(&self) -> String {
        format!("--init crc32c:{:08x}", self.checksum)
    }

    /// The parameters. They are not kept, since most starts resume from a later step.
    pub(super) fn parameters(&self, tensors: &[Tensor]) -> Result<Vec<f32>, TrainError> {
        let parameters = read(&self.path, tensors)?;
        if crc32c::crc32c(bytemuck::cast_slice(&parameters)) != self.checksum {
            return Err(unfit(&self.path, "it has changed since this worker started"));
        }
        Ok(parameters)
    }
}

fn unfit(path: &Path, cause: impl Into<String>) -> TrainError {
    TrainError::InitUnfit { path: path.to_owned(), cause: cause.into() }
}

fn read(path: &Path, tensors: &[Tensor]) -> Result<Vec<f32>, TrainError> {
    let bytes = fs::read(path).map_err(|cause| TrainError::Init { path: path.to_owned(), cause })?;
    let file =
        SafeTensors::deserialize(&bytes).map_err(|error| unfit(path, format!("it is no safetensors file: {error}")))?;
    ordered(&file, tensors).map_err(|cause| unfit(path, cause))
}

/// The model's parameters, in its order. What an optimizer keeps, as in a checkpoint's own file, is left out.
fn ordered(file: &SafeTensors<'_>, tensors: &[Tensor]) -> Result<Vec<f32>, String> {
    let mut theirs: BTreeMap<String, TensorView<'_>> = file.tensors().into_iter().collect();
    theirs.retain(|name, _| !PREFIXES.iter().any(|prefix| name.starts_with(prefix)));
    let mut parameters = Vec::with_capacity(tensors.last().map_or(0, |tensor| tensor.range.end));
    for Tensor { name, shape, .. } in tensors {
        let Some(tensor) = theirs.remove(name) else {
            let near = theirs.keys().next().map_or(String::new(), |other| format!(", but has {other}"));
            return Err(format!("it has no tensor {name}{near}"));
        };
        if tensor.shape() != shape.as_slice() {
            return Err(format!("its tensor {name} has shape {:?} instead of {shape:?}", tensor.shape()));
        }
        if tensor.dtype() != Dtype::F32 {
            return Err(format!("its tensor {name} is of {:?} instead of F32", tensor.dtype()));
        }
        let first = parameters.len();
        parameters.extend(tensor.data().as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)));
        if first_not_finite(&parameters[first..]).is_some() {
            return Err(format!("its tensor {name} has numbers that are not finite"));
        }
    }
    match theirs.keys().next() {
        Some(name) => Err(format!("it has a tensor {name}, which the model has not")),
        None => Ok(parameters),
    }
}
