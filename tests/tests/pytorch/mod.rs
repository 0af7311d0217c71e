//! PyTorch's own scripts, with a real PyTorch, under the built agent: training that continues when workers and agents
//! die, and when nodes come and go. Skipped, with a line that says so, where there is no PyTorch.

mod checkpoints;
mod checks;
mod matrix;
mod models;
mod optimizers;
mod readme;
mod session;
mod snapshots;
mod trace;
mod training;

use elastic_tests::prelude::*;

#[test]
fn pytorchs_launch_config_is_read() {
    let Some(torch) = Torch::find() else { return };
    let tests = Path::new(env!("CARGO_MANIFEST_DIR")).join("../agent/python/tests/test_launch.py");
    let ended = torch.run(&tests).output().unwrap();
    let said = String::from_utf8_lossy(&ended.stderr);
    assert!(ended.status.success() && said.contains("\nOK\n"), "none may be skipped: {said}");
}

#[tokio::test]
async fn loader_processes_outlive_the_stop_signal_while_their_worker_saves() {
    let Some(torch) = Torch::find() else { return };
    let job = Job::met_by(&["--standalone"], "1").flag("--nproc-per-node=2").flag("--shutdown-timeout=60");
    let job = job.env("OMP_NUM_THREADS", "1").script(&torch, "loads_and_saves.py", &[]);
    let mut agent = job.start("a");
    for loads in ["loads-0", "loads-1"] {
        job.appears(loads).await;
    }
    agent.signal(Signal::TERM);
    assert_eq!(agent.exit(LIMIT).await, LEFT, "{}", agent.output());
    assert!(job.path("saved-0").exists() && job.path("saved-1").exists(), "{}", agent.output());
    assert!(!agent.output().contains("killing what"), "{}", agent.output());
}
