//! Who asked is in the job's history, whatever follows from the request.

use elastic_tests::prelude::*;

use super::{Scene, succeed};

/// The lines that tell of requests: who, and what.
async fn asked(scene: &Scene) -> Vec<(String, String)> {
    let lines = scene.ctl_ok(&["events", "train", "-o", "json"]).await;
    let lines = lines.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    let asked = lines.filter(|line| !line["asked_by"].is_null());
    let text = |value: &Value| value.as_str().unwrap().to_owned();
    asked.map(|line| (text(&line["asked_by"]["name"]), text(&line["reason"]))).collect()
}

#[tokio::test]
async fn each_request_is_recorded_once_also_where_no_round_follows() {
    let scene = Scene::on_etcd(2, 3).await;
    let [a, b] = scene.nodes(["a", "b"]).await;
    let round = scene.round().await.modified;
    // An elasticctl of a later version asked for something that this one does not know.
    let later = json!({ "closed": false, "weights": { "a": 2 } }).to_string();
    scene.store.put(vec![], Op::put(scene.keys.desired(), later)).await.unwrap();

    scene.ctl_ok(&["set", "train", "--max", "4", "--as", "anna"]).await;
    scene.ctl_ok(&["set", "train", "--max", "4", "--as", "berta"]).await;
    scene.ctl_ok(&["set", "train", "--max", "5"]).await;
    let told = asked(&scene).await;
    let [(anna, first), (user, second)] = &told[..] else { panic!("two requests changed something: {told:?}") };
    assert_eq!((anna.as_str(), first.as_str()), ("anna", "asked by anna (elasticctl): set max 4"));
    let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
    assert!(user.ends_with(&format!("@{host}")) && second.contains(": set max 5"), "{told:?}");
    assert_eq!(scene.round().await.modified, round, "no round follows from them");

    let desired = scene.ctl_json(&["describe", "train"]).await["desired"].clone();
    assert_eq!((&desired["weights"]["a"], &desired["max_nodes"]), (&json!(2), &json!(5)), "what is unknown is kept");
    assert_eq!(desired["asked"]["by"]["name"], json!(user));
    let (ok, text) = scene.ctl(&["set", "train", "--max", "6", "--as", "a\nb"]).await;
    assert!(!ok && text.contains("control characters"), "{text}");
    succeed([a, b]).await;
}

#[tokio::test]
async fn the_leader_tells_its_rounds_after_what_was_asked() {
    let scene = Scene::on_etcd(1, 2).await;
    let [mut a, b] = scene.nodes(["a", "b"]).await;
    scene.ctl_ok(&["drain", "train", "b", "--as", "anna"]).await;
    a.runs(2, 1, super::WITHIN).await.unwrap();
    let lines = scene.ctl_ok(&["events", "train", "-o", "json"]).await;
    let reasons: Vec<String> = lines
        .lines()
        .map(|line| serde_json::from_str::<Value>(line).unwrap()["reason"].as_str().unwrap().to_owned())
        .collect();
    let at = |says: &str| reasons.iter().position(|reason| reason.contains(says));
    let (asked, left) = (at("asked by anna (elasticctl): drain b"), at("b leaves"));
    assert!(asked.is_some() && asked < left, "{reasons:?}");
    drop(b);
    succeed([a]).await;
}

#[tokio::test]
async fn two_operators_at_once_both_get_their_answer() {
    let scene = Scene::on_etcd(1, 2).await;
    let [a, b] = scene.nodes(["a", "b"]).await;
    // Each may lose the race to others some times, and tries again.
    let ask = async |who: &str, bound: &str, nodes: &str| {
        scene.ctl_ok(&["set", "train", bound, nodes, "--as", who]).await;
    };
    tokio::join!(ask("anna", "--min", "2"), ask("berta", "--max", "7"), ask("carla", "--max", "7"));
    let desired = scene.ctl_json(&["describe", "train"]).await["desired"].clone();
    assert_eq!((&desired["min_nodes"], &desired["max_nodes"]), (&json!(2), &json!(7)));
    let told = asked(&scene).await;
    assert_eq!(told.len(), 2, "who finds it asked already changes nothing: {told:?}");
    succeed([a, b]).await;
}
