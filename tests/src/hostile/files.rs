//! What is on disks and in scripts: checkpoints, command lines.

use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;

use elastic_agent::for_tests::{Dialect, Stop, check_command_line};
use elastic_trainer::checkpoint::Checkpoints;
use elastic_trainer::checkpoint::disk::Host;
use elastic_trainer::checkpoint::manifest::Manifest;
use serde_json::{Value, json};

use super::change;

/// The state of the checkpoint that is changed, and its file.
const STATE: [f32; 4] = [1.0, -2.0, 0.5, 8.0];
const FILE: &str = "rank0-of-1.safetensors";

/// Loads a checkpoint whose manifest and file are changed. The first byte says which and how; a manifest's own checksum
/// is right.
pub fn checkpoint(bytes: &[u8]) {
    let [how, rest @ ..] = bytes else { return };
    let folder = tempfile::tempdir().expect("a folder");
    let of_step = folder.path().join("step-00000003-r1");
    std::fs::create_dir(&of_step).expect("a folder");
    let mut data = bytes_of(&STATE);
    let mut manifest = valid(&data);
    let written = match how % 4 {
        0 => rest.to_vec(),
        1 => {
            data = rest.to_vec();
            encode(manifest)
        }
        2 => {
            data.truncate(usize::from(*how) / 4);
            manifest["extents"][0]["file_len"] = json!(data.len());
            encode(change::of(manifest, rest))
        }
        _ => encode(change::of(manifest, rest)),
    };
    let path = of_step.join("manifest.json");
    std::fs::write(&path, written).expect("a manifest");
    std::fs::write(of_step.join(FILE), &data).expect("a file");
    let checkpoints = Checkpoints::new(Host, folder.path());
    if let Ok(loaded) = checkpoints.load(&path, None) {
        assert!(loaded.state.len() * 4 <= data.len(), "no more is loaded than there is");
    }
    let _told = (checkpoints.about(&path, Some("crc32c:00000000")), checkpoints.newest());
}

fn bytes_of(state: &[f32]) -> Vec<u8> {
    state.iter().flat_map(|number| number.to_le_bytes()).collect()
}

fn valid(data: &[u8]) -> Value {
    json!({
        "format": 1, "job": "J", "round": 1, "world_size": 2, "step": 3, "settings": "s",
        "data": { "epoch": 0, "cursor": 30, "samples": 100, "seed": 7, "global_batch": 10, "shards": 2 },
        "state_bytes": data.len(),
        "tensors": [{ "name": "a.weight", "dtype": "F32", "shape": [2, 2], "offset": 0, "len": 16 }],
        "extents": [{
            "file": FILE, "file_len": data.len(), "file_offset": 0, "offset": 0, "len": data.len(), "chunk": 8,
            "crc32c": data.chunks(8).map(|chunk| format!("{:08x}", crc32c::crc32c(chunk))).collect::<Vec<_>>(),
        }],
        "crc32c": "",
    })
}

/// As the trainer writes it, if it still is a manifest.
fn encode(manifest: Value) -> Vec<u8> {
    match serde_json::from_value::<Manifest>(manifest.clone()) {
        Ok(manifest) => manifest.encode(),
        Err(_) => manifest.to_string().into_bytes(),
    }
}

/// Reads a command line, whose words end with zero bytes, by each launcher's rules. A refusal is one line.
pub fn command_line(bytes: &[u8]) {
    let words: Vec<OsString> = bytes.split(|byte| *byte == 0).map(|word| OsString::from_vec(word.to_vec())).collect();
    for dialect in [Dialect::Own, Dialect::Torchrun] {
        if let Err(stop @ Stop::Usage(_)) = check_command_line(dialect, words.clone()) {
            let line = stop.to_string();
            assert_eq!(line.lines().count(), 1, "one line, not {line:?}");
        }
    }
}
