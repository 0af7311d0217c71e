//! The trainer's checkpoints in PyTorch's hands. Left out where Python has no safetensors.

use elastic_tests::prelude::*;

/// Says how many numbers the parameters and the whole state have, once it has found the ones in the other.
const SCRIPT: &str = r#"
import sys, torch
try:
    from safetensors.torch import load_file
except ImportError:
    sys.exit("skipped: this Python has no safetensors")
state, parameters = load_file(sys.argv[1]), load_file(sys.argv[2])
assert all(torch.equal(state[name], value) for name, value in parameters.items())
print(*(sum(value.numel() for value in all.values()) for all in (parameters, state)))
"#;

#[test]
fn a_checkpoint_and_what_is_exported_of_it_open_in_pytorch() {
    let Some(torch) = Torch::find() else { return };
    let folder = tempfile::tempdir().unwrap();
    let (dir, file) = (folder.path().join("checkpoints"), folder.path().join("parameters.safetensors"));
    let trainer = |arguments: &[&str]| {
        let status = Command::new(binary("elastic-trainer")).args(arguments).status().unwrap();
        assert!(status.success(), "{arguments:?}");
    };
    let (dir, out) = (dir.to_str().unwrap(), file.to_str().unwrap());
    trainer(&["digits", "--epochs=1", "--hidden=16", "--checkpoint-dir", dir]);
    trainer(&["checkpoint", "export", dir, out]);

    let data = format!("{dir}/step-00000023-r0/rank0-of-1.safetensors");
    let output = torch.command().args(["-c", SCRIPT, &data, out]).output().unwrap();
    let (said, errors) = (String::from_utf8(output.stdout).unwrap(), String::from_utf8_lossy(&output.stderr));
    if errors.starts_with("skipped") {
        return eprintln!("{errors}");
    }
    let parameters = 64 * 16 + 16 + 16 * 10 + 10;
    assert_eq!(said.trim(), format!("{parameters} {}", 3 * parameters), "{errors}");
}
