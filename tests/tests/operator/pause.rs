//! Jobs that are paused and resumed by `elasticctl`, on real etcd.

use super::*;

impl Scene {
    /// Waits until the job is in this state, for people and programs.
    async fn stands(&self, state: &str) -> serde_json::Value {
        eventually(&format!("the job is {state}"), WITHIN, async || {
            let job = self.ctl_json(&["describe", "train"]).await;
            (job["state"] == state).then_some(job)
        })
        .await
    }
}

/// The nodes of a job whose reason to wait says this.
fn waiting<'a>(job: &'a serde_json::Value, why: &str) -> Vec<&'a str> {
    let nodes = job["nodes"].as_array().unwrap().iter();
    let waiting = nodes.filter(|node| node["waits"].as_str().is_some_and(|waits| waits.contains(why)));
    let mut names: Vec<&str> = waiting.map(|node| node["record"]["name"].as_str().unwrap()).collect();
    names.sort_unstable();
    names
}

#[tokio::test]
async fn a_paused_job_waits_through_restarts_of_etcd_and_of_its_leader_and_continues_unchanged() {
    let mut scene = Scene::on_etcd(2, 4).await;
    let mut nodes = scene.nodes(["a", "b", "c"]).await;
    let coordinator = scene.coordinator_with(&["--http", "127.0.0.1:0", "--http-jobs"]);
    let page = coordinator.says("http://", WITHIN).await;
    scene.led("the coordinator leads", |leader| leader.coordinator).await;
    let ranks = |nodes: &[InProcessNode]| -> Vec<u32> {
        nodes.iter().map(|node| node.place.borrow().as_ref().unwrap().0.rank.group_rank).collect()
    };
    let before = ranks(&nodes);
    // The last of them may have come after the first round.
    let next = nodes[0].place.borrow().as_ref().unwrap().0.round.number + 1;

    // When it is paused, then no worker is left, and everyone can read why
    let said = scene.ctl_ok(&["pause", "train"]).await;
    assert!(said.contains("; paused"), "{said}");
    for node in &mut nodes {
        tokio::time::timeout(WITHIN, node.place.wait_for(Option::is_none)).await.unwrap().unwrap();
    }
    let job = scene.stands("paused").await;
    assert_eq!((&job["round"]["state"], &job["round"]["paused"]), (&"forming".into(), &true.into()));
    eventually("all wait for its resume", WITHIN, async || {
        (waiting(&scene.ctl_json(&["describe", "train"]).await, "paused") == ["a", "b", "c"]).then_some(())
    })
    .await;
    let table = scene.ctl_ok(&["jobs"]).await;
    assert!(table.lines().nth(1).unwrap().split_whitespace().any(|word| word == "paused"), "{table}");
    assert!(scene.ctl_ok(&["events", "train"]).await.contains("the operator paused the job"));
    let seen = scene.ctl_ok(&["doctor", "train"]).await;
    assert!(seen.contains("elasticctl resume train"), "{seen}");

    eventually("metrics say so", WITHIN, async || {
        http(&page, "/metrics").await.contains("elastic_jobs{state=\"paused\"} 1").then_some(())
    })
    .await;
    assert!(http(&page, "/v1/jobs?state=paused").await.contains("\"train\""));

    // when etcd is started again, another leads, one more node joins and one leaves, then it stays so
    scene._etcd.as_mut().unwrap().restart().await;
    drop(coordinator);
    scene.led("an agent leads", |leader| !leader.coordinator).await;
    let mut d = scene.node("d").await;
    nodes[2].drain();
    let job = eventually("d waits instead of c", WITHIN, async || {
        let job = scene.ctl_json(&["describe", "train"]).await;
        let fits = waiting(&job, "paused") == ["a", "b", "d"];
        fits.then_some(job)
    })
    .await;
    assert_eq!((&job["state"], &job["round"]["restarts"]), (&"paused".into(), &0.into()));

    // A coordinator that is started in the pause leads again.
    let _coordinator = scene.coordinator();
    scene.led("the coordinator leads", |leader| leader.coordinator).await;

    // When it is resumed, then the next round runs with the ranks that they had, and the newcomer behind them
    scene.ctl_ok(&["resume", "train"]).await;
    let d_rank = d.runs(next, 3, WITHIN).await.unwrap().rank.group_rank;
    let [mut a, mut b, c] = nodes;
    for node in [&mut a, &mut b] {
        let start = node.runs(next, 3, WITHIN).await.unwrap();
        assert_eq!((start.round.number, start.round.restarts), (next, 0));
    }
    assert_eq!(c.parting(WITHIN).await.unwrap(), Parting::End(End::Drained));
    let kept = [a, b];
    let order = |ranks: &[u32]| ranks[0] < ranks[1];
    assert_eq!(order(&ranks(&kept)), order(&before[..2]));
    assert_eq!(d_rank, 2);
    assert!(!scene.ctl_ok(&["describe", "train"]).await.contains("paused"));
    let [a, b] = kept;
    succeed([a, b, d]).await;
}

#[tokio::test]
async fn a_job_can_be_paused_before_its_first_round_and_closed_while_it_is_paused() {
    let scene = Scene::on_etcd(2, 2).await;
    let mut a = scene.node("a").await;
    eventually("a waits", WITHIN, async || {
        let (nodes, _) = scene.store.range(&scene.keys.nodes()).await.unwrap();
        (nodes.len() == 1).then_some(())
    })
    .await;
    scene.ctl_ok(&["pause", "train"]).await;
    scene.stands("paused").await;
    // Asked twice, nothing changes.
    scene.ctl_ok(&["pause", "train"]).await;
    let mut b = scene.node("b").await;
    eventually("both wait", WITHIN, async || {
        (waiting(&scene.ctl_json(&["describe", "train"]).await, "paused") == ["a", "b"]).then_some(())
    })
    .await;
    assert!(a.place.borrow().is_none() && b.place.borrow().is_none());
    scene.ctl_ok(&["resume", "train"]).await;
    for node in [&mut a, &mut b] {
        assert_eq!(node.runs(1, 2, WITHIN).await.unwrap().round.number, 1);
    }
    scene.ctl_ok(&["pause", "train"]).await;
    scene.stands("paused").await;
    scene.ctl_ok(&["close", "train"]).await;
    for node in [a, b] {
        assert_eq!(node.parting(WITHIN).await.unwrap(), Parting::End(End::Closed));
    }
    let (ok, said) = scene.ctl(&["resume", "train"]).await;
    assert!(!ok && said.contains("has closed already"), "{said}");
}
