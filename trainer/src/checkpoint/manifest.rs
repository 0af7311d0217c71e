//! What a checkpoint's manifest says, and how a flipped bit in it is found.

use serde::{Deserialize, Serialize};

use crate::model::optimizer::PREFIXES;

/// The newest format this program writes, and the only one it reads.
pub const FORMAT: u32 = 1;

/// Most bytes under one checksum: as many are held while they are compared.
const LARGEST_CHUNK: u64 = 64 << 20;

/// The file that makes a folder a checkpoint. Its JSON is documented by these fields.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Manifest {
    /// Version of this format.
    pub format: u32,
    /// The job.
    pub job: String,
    /// The round that wrote it.
    pub round: u64,
    /// Ranks in that round; nothing depends on it.
    pub world_size: u32,
    /// Optimizer steps in the state.
    pub step: u64,
    /// The flags that fix what a step computes, in words. Training continues only with the same.
    pub settings: String,
    /// The place in the data.
    pub data: Position,
    /// Bytes of the flat state: parameters, then the optimizer's.
    pub state_bytes: u64,
    /// Names for pieces of the flat state.
    pub tensors: Vec<Entry>,
    /// Where its bytes lie. Together they cover the state once, in order.
    pub extents: Vec<Extent>,
    /// CRC-32C of this manifest, written with this field empty.
    pub crc32c: String,
}

/// The place in the data: the next sample is at `cursor` in `epoch`'s order.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Position {
    /// Counted from 0.
    pub epoch: u64,
    /// Samples of the epoch that are in committed steps.
    pub cursor: u64,
    /// Samples in an epoch.
    pub samples: u64,
    /// Seed of the order.
    pub seed: u64,
    /// Samples in a step.
    pub global_batch: u64,
    /// Logical shards in a step.
    pub shards: u32,
}

/// A named piece of the flat state.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Entry {
    /// The name, unique in the state.
    pub name: String,
    /// `F32`, as safetensors spells it.
    pub dtype: String,
    /// Rows and columns, or elements.
    pub shape: Vec<usize>,
    /// First byte in the flat state.
    pub offset: u64,
    /// Bytes.
    pub len: u64,
}

impl Entry {
    /// Whether it is one of the model's parameters, and not of the optimizer's numbers.
    pub fn is_parameter(&self) -> bool {
        !PREFIXES.iter().any(|prefix| self.name.starts_with(prefix))
    }
}

/// The tensor that a number of the flat state belongs to.
pub(crate) fn name_at(tensors: &[Entry], number: usize) -> String {
    let byte = (number * size_of::<f32>()) as u64;
    let at = |entry: &&Entry| (entry.offset..entry.offset + entry.len).contains(&byte);
    tensors.iter().find(at).map_or(String::new(), |entry| entry.name.clone())
}

/// A piece of the flat state in a file of the checkpoint's folder.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Extent {
    /// The file's name. It is a safetensors file.
    pub file: String,
    /// Its length in bytes.
    pub file_len: u64,
    /// Where the piece starts in the file.
    pub file_offset: u64,
    /// Where the piece starts in the flat state.
    pub offset: u64,
    /// Bytes of the piece.
    pub len: u64,
    /// The file is checked in chunks of this many bytes, from its start.
    pub chunk: u64,
    /// CRC-32C of each chunk, in hexadecimal.
    pub crc32c: Vec<String>,
}

impl Manifest {
    /// The file's bytes, with the checksum filled in.
    pub fn encode(&self) -> Vec<u8> {
        let blank = Manifest { crc32c: String::new(), ..self.clone() };
        let sealed = Manifest { crc32c: hex(crc32c::crc32c(&blank.to_json())), ..blank };
        sealed.to_json()
    }

    /// Reads the file's bytes. Anything but what [`encode`](Self::encode) wrote is refused, with a reason.
    pub fn decode(bytes: &[u8]) -> Result<Manifest, String> {
        let manifest: Manifest = serde_json::from_slice(bytes).map_err(|error| format!("not a manifest: {error}"))?;
        if manifest.format != FORMAT {
            return Err(format!("format {} is not known, only {FORMAT}", manifest.format));
        }
        // Compared as bytes: so spaces and unknown fields cannot hide a change either.
        if manifest.encode() != bytes {
            return Err("its checksum does not match its contents".to_owned());
        }
        let mut end: u64 = 0;
        for extent in &manifest.extents {
            let whole = extent.len.is_multiple_of(size_of::<f32>() as u64)
                && extent.file_offset.checked_add(extent.len).is_some_and(|end| end <= extent.file_len)
                && (1..=LARGEST_CHUNK).contains(&extent.chunk)
                && extent.crc32c.len() as u64 == extent.file_len.div_ceil(extent.chunk);
            if extent.offset != end || extent.file.contains('/') || !whole {
                return Err(format!("extent {} is out of place", extent.file));
            }
            end = end.checked_add(extent.len).ok_or_else(|| format!("extent {} is out of place", extent.file))?;
        }
        if end != manifest.state_bytes {
            return Err(format!("its extents hold {end} of {} bytes", manifest.state_bytes));
        }
        Ok(manifest)
    }

    fn to_json(&self) -> Vec<u8> {
        // Strings, numbers and lists of them: there is nothing that could fail.
        serde_json::to_vec_pretty(self).unwrap_or_default()
    }
}

/// How checksums are spelled.
pub(super) fn hex(checksum: u32) -> String {
    format!("{checksum:08x}")
}

/// The digest by which a manifest is committed.
pub fn digest(manifest: &[u8]) -> String {
    format!("crc32c:{}", hex(crc32c::crc32c(manifest)))
}
