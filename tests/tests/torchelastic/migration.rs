//! The rolling move of `docs/migrate-from-torchrun.md`, step by step: a job that trains under torchrun comes to train
//! under elastic-agent, node by node, without ever ending.

use elastic_tests::prelude::*;

use crate::torchelastic::scene::{Agent, LIMIT, Ours, Scene, Torchrun};

/// Epochs told so far, and from how many workers the newest was.
fn newest(scene: &Scene) -> Option<(u64, u64)> {
    let lines = json_lines(&scene.path("trace"));
    let newest = lines.iter().filter(|line| line["event"] == "epoch").max_by_key(|line| line["epoch"].as_u64())?;
    Some((newest["epoch"].as_u64()?, newest["size"].as_u64()?))
}

/// Waits until a later epoch than `after` is trained by so many workers.
async fn trains(scene: &Scene, size: u64, after: u64) -> u64 {
    eventually(&format!("{size} workers train on after epoch {after}"), LIMIT, async || {
        newest(scene).filter(|(epoch, workers)| *epoch > after && *workers == size).map(|(epoch, _)| epoch)
    })
    .await
}

#[tokio::test]
#[ignore = "takes minutes: make chaos"]
async fn a_job_moves_from_torchrun_node_by_node() {
    let Some(torch) = Torch::find() else { return };
    let scene = Scene::new(Some(&torch), "1:2").await.flag("--max-restarts=10").script("train_ddp.py");
    let mut nodes: Vec<Agent> = ["node0", "node1"].map(|name| scene.start(Torchrun, name)).into();
    let mut epoch = trains(&scene, 2, 0).await;

    for (at, name) in ["node0", "node1"].into_iter().enumerate() {
        // Step 1: ask the node's torchrun to leave
        nodes[at].signal(Signal::TERM);
        assert_ne!(nodes[at].exit(LIMIT).await, 0, "torchrun says that it was interrupted");
        // Step 2: start elastic-agent in its place, with the same flags
        nodes[at] = scene.start(Ours, name);
        // Step 3: wait until the group is whole again before the next node
        epoch = trains(&scene, 2, epoch).await;
    }

    std::fs::write(scene.path("finish"), "").expect("say so");
    for node in &mut nodes {
        assert_eq!(node.exit(LIMIT).await, 0, "{}", node.output());
    }
    // Nothing that was saved was trained again
    let saved: Vec<u64> = json_lines(&scene.path("trace"))
        .iter()
        .filter(|line| line["event"] == "saved")
        .filter_map(|line| line["epoch"].as_u64())
        .collect();
    assert!(saved.windows(2).all(|pair| pair[1] == pair[0] + 1), "{saved:?}");
}
