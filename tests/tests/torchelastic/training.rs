//! Real training over gloo, across both kinds of nodes: it comes to the same as under torchrun alone.

use elastic_tests::prelude::*;

use crate::torchelastic::scene::{Kind, LIMIT, Ours, Scene, Torchrun};

const EPOCHS: u64 = 3;

/// The loss of each epoch, by epoch and rank.
async fn losses(torch: &Torch, kinds: [Kind; 2]) -> BTreeMap<(u64, u64), f64> {
    let scene = Scene::new(Some(torch), "2").await.script("train_ddp.py");
    let mut agents =
        kinds.iter().enumerate().map(|(at, kind)| scene.start(*kind, &format!("{kind:?}{at}"))).collect::<Vec<_>>();
    let told = || {
        let lines = json_lines(&scene.path("trace")).into_iter().filter(|line| line["event"] == "epoch");
        let of = |line: serde_json::Value| {
            let number = |name: &str| line[name].as_u64().expect("a number");
            ((number("epoch"), number("rank")), line["loss"].as_f64().expect("a loss"))
        };
        lines.map(of).filter(|((epoch, _), _)| *epoch < EPOCHS).collect::<BTreeMap<_, _>>()
    };
    let all = eventually("the epochs are trained", LIMIT, async || {
        let told = told();
        (told.len() as u64 == 2 * EPOCHS).then_some(told)
    })
    .await;
    std::fs::write(scene.path("finish"), "").expect("say so");
    for agent in &mut agents {
        assert_eq!(agent.exit(LIMIT).await, 0, "{}", agent.output());
    }
    all
}

#[tokio::test]
#[ignore = "takes minutes: make chaos"]
async fn the_loss_is_the_same_as_under_torchrun_only() {
    let Some(torch) = Torch::find() else { return };
    let expected = losses(&torch, [Torchrun, Torchrun]).await;
    for kinds in [[Ours, Torchrun], [Torchrun, Ours]] {
        let found = losses(&torch, kinds).await;
        assert_eq!(found.keys().collect::<Vec<_>>(), expected.keys().collect::<Vec<_>>());
        for (at, loss) in &expected {
            assert!((found[at] - loss).abs() < 1e-5, "{kinds:?} {at:?}: {} is not {loss}", found[at]);
        }
    }
}
