//! Our agents and real torchrun in one job.

use elastic_tests::prelude::*;

use crate::torchelastic::scene::{Agent, Kind, Ours, Scene, Torchrun};

/// Nodes by their kinds, in the order in which they join.
async fn meets(torch: &Torch, kinds: &[Kind]) {
    let size = kinds.len();
    let scene = Scene::new(Some(torch), &size.to_string()).await;
    let mut agents = Vec::new();
    for (at, kind) in kinds.iter().enumerate() {
        let name = format!("{kind:?}{at}").to_lowercase();
        let agent = scene.start(*kind, &name);
        // The next one finds it there.
        joined(&scene, at + 1, size).await;
        agents.push(agent);
    }
    let group = scene.works(size as u32, None).await;
    for (at, agent) in agents.iter().enumerate() {
        assert_eq!(group.of(&agent.name).group_rank, at as u32, "ranks follow the order of joining: {group:?}");
    }
    scene.ends_well(&mut agents).await;
}

/// Waits until so many have joined the version that is being formed.
async fn joined(scene: &Scene, count: usize, size: usize) {
    let key = "/torchelastic/p2p/run_job/rdzv/active_version";
    let what = format!("{count} of {size} nodes have joined");
    elastic_tests::wait::eventually(&what, crate::torchelastic::scene::LIMIT, async || {
        let state: serde_json::Value = serde_json::from_str(&scene.read(key).await?).ok()?;
        (state["participants"].as_array()?.len() >= count).then_some(())
    })
    .await;
}

#[tokio::test]
async fn two_nodes_meet_in_either_order() {
    let Some(torch) = Torch::find() else { return };
    meets(&torch, &[Ours, Torchrun]).await;
    meets(&torch, &[Torchrun, Ours]).await;
}

/// Every proportion and order of two, three and four nodes: minutes.
#[tokio::test]
#[ignore = "takes minutes: make chaos"]
async fn nodes_meet_in_every_proportion_and_order() {
    let Some(torch) = Torch::find() else { return };
    for size in 2..=4u32 {
        for mix in 1..(1u32 << size) - 1 {
            let kinds: Vec<Kind> = (0..size).map(|at| if mix & (1 << at) == 0 { Ours } else { Torchrun }).collect();
            meets(&torch, &kinds).await;
        }
    }
}

async fn pair(torch: &Torch, nnodes: &str) -> (Scene, Agent, Agent) {
    let scene = Scene::new(Some(torch), nnodes).await;
    let theirs = scene.start(Torchrun, "torchrun");
    let ours = scene.start(Ours, "ours");
    (scene, ours, theirs)
}

#[tokio::test]
async fn a_killed_worker_of_either_kind_restarts_both() {
    let Some(torch) = Torch::find() else { return };
    let (scene, mut ours, mut theirs) = pair(&torch, "2").await;
    let first = scene.works(2, None).await;
    first.of("ours").kill();
    let second = scene.works(2, Some(&first)).await;
    second.of("torchrun").kill();
    let third = scene.works(2, Some(&second)).await;
    assert_eq!((third.of("ours").restarts, third.of("torchrun").restarts), (1, 1), "each counts its own");
    scene.ends_well([&mut ours, &mut theirs]).await;
}

#[tokio::test]
#[ignore = "takes a minute: make chaos"]
async fn a_killed_agent_of_either_kind_is_replaced() {
    let Some(torch) = Torch::find() else { return };
    let (scene, mut ours, mut theirs) = pair(&torch, "1:2").await;
    let first = scene.works(2, None).await;

    // When torchrun's agent dies, then ours notices by itself, and continues alone
    theirs.kill(&scene);
    let alone = scene.works(1, Some(&first)).await;
    theirs = scene.start(Torchrun, "torchrun");
    let second = scene.works(2, Some(&alone)).await;

    // When ours dies, then torchrun continues, and comes back to a new one of ours
    ours.kill(&scene);
    ours = scene.start(Ours, "ours");
    scene.works(2, Some(&second)).await;
    scene.ends_well([&mut ours, &mut theirs]).await;
}

#[tokio::test]
async fn either_kind_joins_and_leaves() {
    let Some(torch) = Torch::find() else { return };
    let scene = Scene::new(Some(&torch), "1:3").await;
    let mut theirs = scene.start(Torchrun, "torchrun");
    let one = scene.works(1, None).await;
    let mut ours = scene.start(Ours, "ours");
    let two = scene.works(2, Some(&one)).await;
    let mut third = scene.start(Torchrun, "third");
    let three = scene.works(3, Some(&two)).await;

    // When ours is asked to leave, then torchrun's continue without it
    ours.signal(Signal::TERM);
    assert_eq!(ours.exit(crate::torchelastic::scene::LIMIT).await, 3);
    let without = scene.works(2, Some(&three)).await;
    let mut ours = scene.start(Ours, "ours");
    let again = scene.works(3, Some(&without)).await;

    // When one of torchrun's is, then the others notice
    third.signal(Signal::TERM);
    assert_ne!(third.exit(crate::torchelastic::scene::LIMIT).await, 0);
    scene.works(2, Some(&again)).await;
    scene.ends_well([&mut ours, &mut theirs]).await;
}
