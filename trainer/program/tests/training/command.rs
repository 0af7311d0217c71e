//! `elastic-trainer checkpoint` on what real training has left.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use elastic_models::Mlp;
use elastic_trainer::Settings;
use elastic_trainer::{Model, State};
use serde_json::Value;

use crate::worker::train;

fn checkpoint(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_elastic-trainer")).arg("checkpoint").args(arguments).output().unwrap()
}

fn done(arguments: &[&str]) -> String {
    let output = checkpoint(arguments);
    let (printed, logged) = (String::from_utf8(output.stdout).unwrap(), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{arguments:?}: {printed}{logged}");
    printed
}

/// What a command that fails prints, and its error.
fn refused(arguments: &[&str]) -> (String, String) {
    let output = checkpoint(arguments);
    assert_eq!(output.status.code(), Some(1), "{arguments:?}");
    (String::from_utf8(output.stdout).unwrap(), String::from_utf8(output.stderr).unwrap())
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// Trains for some epochs of 23 steps. Each leaves one checkpoint. There is one more, which was cut short.
fn trained<const EPOCHS: usize>(folder: &Path) -> [PathBuf; EPOCHS] {
    for epoch in 1..=EPOCHS as u64 {
        let flags = format!("--hidden 16 --checkpoint-every 1000000 --keep 50 --epochs {epoch}");
        train(&format!("{flags} --checkpoint-dir {}", folder.display()), 1, epoch);
    }
    std::fs::create_dir(folder.join("step-00000030-r1")).unwrap();
    std::fs::write(folder.join("step-00000030-r1/rank0-of-1.safetensors.tmp"), "x").unwrap();
    std::array::from_fn(|before| folder.join(format!("step-{:08}-r{}", 23 * (before + 1), before + 1)))
}

fn flip(file: &Path, place: usize) {
    let mut bytes = std::fs::read(file).unwrap();
    bytes[place] ^= 1;
    std::fs::write(file, bytes).unwrap();
}

#[test]
fn a_folder_is_listed_verified_and_pruned() {
    let folder = tempfile::tempdir().unwrap();
    let checkpoints: [PathBuf; 4] = trained(folder.path());
    let dir = text(folder.path());

    // Given four whole ones and one that was cut short
    let list: Vec<Value> = serde_json::from_str(&done(&["list", dir, "-o", "json"])).unwrap();
    let steps: Vec<u64> = list.iter().map(|line| line["step"].as_u64().unwrap()).collect();
    assert_eq!(steps, [23, 30, 46, 69, 92]);
    assert!(list.iter().all(|line| line["whole"] == (line["step"] != 30)), "{list:?}");
    assert_eq!((&list[3]["round"], &list[3]["world_size"]), (&3.into(), &1.into()));
    assert!(list[0]["bytes"].as_u64().unwrap() > 4096 && list[0]["age_s"].as_u64().unwrap() < 600);
    let table = done(&["list", dir]);
    assert!(table.contains("STATE") && table.contains("cut short") && table.lines().count() == 6, "{table}");
    let verified = done(&["verify", dir]);
    assert_eq!(verified.matches("whole").count(), 4, "{verified}");

    // When one is damaged, then it is named with its file and chunk, also when it is checked alone
    flip(&checkpoints[1].join("rank0-of-1.safetensors"), 4096);
    let (printed, logged) = refused(&["verify", dir]);
    assert!(printed.contains("step-00000046-r2  bad: rank0-of-1.safetensors is damaged in chunk 0"), "{printed}");
    assert!(logged.contains("1 of 4 checkpoints"), "{logged}");
    let (printed, _) = refused(&["verify", text(&checkpoints[1])]);
    assert!(printed.contains("chunk 0"), "{printed}");
    done(&["verify", text(&checkpoints[0])]);

    // When the newest is damaged too, then pruning keeps it, and the newest whole one
    flip(&checkpoints[3].join("manifest.json"), 100);
    let would = done(&["prune", dir, "--keep", "1", "--dry-run"]);
    assert!(would.contains("2 would stay") && would.contains("would remove step-00000030-r1"), "{would}");
    assert!(checkpoints.iter().all(|path| path.exists()));
    let gone = done(&["prune", dir, "--keep", "1"]);
    assert_eq!(gone.matches("removed").count(), 3, "{gone}");
    assert_eq!(checkpoints.map(|path| path.exists()), [false, false, true, true]);

    // A file of another length is noticed without reading it
    std::fs::write(folder.path().join("step-00000069-r3/rank0-of-1.safetensors"), "x").unwrap();
    assert!(done(&["list", dir]).contains("has 1 bytes instead of"));
}

#[test]
fn a_checkpoint_is_exported_as_plain_safetensors() {
    let folder = tempfile::tempdir().unwrap();
    let checkpoints: [PathBuf; 2] = trained(folder.path());
    let (dir, file) = (text(folder.path()), folder.path().join("parameters.safetensors"));
    let expected = train("--hidden 16 --epochs 2", 1, 0).checksum();

    // The newest, with only what a model needs
    assert!(done(&["export", dir, text(&file)]).contains("step 46"));
    let bytes = std::fs::read(&file).unwrap();
    let tensors = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let model = Mlp::new(&[64, 16, 10]);
    let named: Vec<_> = State::entries(model.tensors(), &Settings::default().optimizer())
        .into_iter()
        .filter(|entry| entry.is_parameter())
        .collect();
    assert_eq!((tensors.len(), named.len()), (model.tensors().len(), model.tensors().len()));
    let flat: Vec<u8> = named.iter().flat_map(|entry| tensors.tensor(&entry.name).unwrap().data().to_vec()).collect();
    assert_eq!(crc32c::crc32c(&flat), expected);
    let (_, header) = safetensors::SafeTensors::read_metadata(&bytes).unwrap();
    assert_eq!(header.metadata().as_ref().unwrap()["step"], "46");

    // An earlier one, with all that it holds
    let whole = folder.path().join("state.safetensors");
    assert!(done(&["export", dir, text(&whole), "--step=23", "--state"]).contains("step 23"));
    let bytes = std::fs::read(&whole).unwrap();
    let tensors = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    assert!(tensors.names().iter().any(|name| name.starts_with("adamw.")), "{:?}", tensors.names());

    // No file is overwritten, and no damaged checkpoint is exported
    let (_, logged) = refused(&["export", dir, text(&file)]);
    assert!(logged.contains("already exists"), "{logged}");
    let (_, logged) = refused(&["export", dir, "/dev/null/x", "--step=24"]);
    assert!(logged.contains("no checkpoint of step 24") && logged.contains("23, 30, 46"), "{logged}");
    flip(&checkpoints[1].join("rank0-of-1.safetensors"), 5000);
    let other = folder.path().join("other");
    let (_, logged) = refused(&["export", text(&checkpoints[1]), text(&other)]);
    assert!(logged.contains("cannot load step-00000046-r2") && logged.contains("chunk 0"), "{logged}");
    assert!(!other.exists());
    assert!(done(&["export", dir, text(&other)]).contains("step 23"), "the newest that is whole");
}

#[test]
fn what_is_no_folder_of_checkpoints_is_said_to_be_none() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("file");
    std::fs::write(&file, "x").unwrap();
    let typo = folder.path().join("typo");
    for command in ["list", "verify", "prune"] {
        for (dir, says) in [
            (typo.as_path(), "No such file or directory"),
            (&file, "Not a directory"),
            (folder.path(), "holds no checkpoints"),
        ] {
            let (_, logged) = refused(&[command, text(dir)]);
            assert!(logged.contains(says) && logged.contains(text(dir)), "{command}: {logged}");
        }
    }
    std::fs::create_dir(folder.path().join("step-00000001-r1")).unwrap();
    for command in ["verify", "prune"] {
        let (_, logged) = refused(&[command, text(folder.path())]);
        assert!(logged.contains("whole") || logged.contains("cannot be loaded"), "{command}: {logged}");
    }
}

#[test]
fn what_is_committed_is_not_pruned_however_many_newer_ones_there_are() {
    let folder = tempfile::tempdir().unwrap();
    let [first, second, third, fourth]: [PathBuf; 4] = trained(folder.path());
    let dir = text(folder.path());
    // Given that the second was the last whose commit was confirmed
    let name = second.file_name().unwrap().to_str().unwrap();
    assert_eq!(std::fs::read_to_string(folder.path().join("committed")).unwrap(), "step-00000092-r4\n");
    std::fs::write(folder.path().join("committed"), format!("{name}\n")).unwrap();
    let printed = done(&["prune", dir, "--keep", "1"]);
    assert!(!first.exists() && [&second, &third, &fourth].into_iter().all(|path| path.exists()), "{printed}");
    // And without the record of a confirmed commit, the newest whole one counts.
    std::fs::remove_file(folder.path().join("committed")).unwrap();
    done(&["prune", dir, "--keep", "1"]);
    assert!(!second.exists() && !third.exists() && fourth.exists());
}
