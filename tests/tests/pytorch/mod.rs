//! PyTorch's own scripts, with a real PyTorch, under the built agent: training that continues when workers and agents
//! die, and when nodes come and go. Skipped, with a line that says so, where there is no PyTorch.

mod checkpoints;
mod matrix;
mod models;
mod readme;
mod session;
mod snapshots;
mod trace;
mod training;

#[test]
fn pytorchs_launch_config_is_read() {
    let Some(torch) = elastic_tests::torch::Torch::find() else { return };
    let package = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../agent/python");
    let mut tests = torch.run(&package.join("tests/test_launch.py"));
    let ended = tests.env("PYTHONPATH", package).output().unwrap();
    let said = String::from_utf8_lossy(&ended.stderr);
    assert!(ended.status.success() && said.contains("\nOK\n"), "none may be skipped: {said}");
}
