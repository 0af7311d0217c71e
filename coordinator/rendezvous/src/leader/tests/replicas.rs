//! Jobs whose replicas have two nodes.

use super::*;
use crate::job::RankRecord;

/// Round 2 is forming after one of a, b, c and d, two replicas. These say how it is with them; b has left.
fn after_b_left(others: &[(&'static str, Value)]) -> Scene {
    let mut scene = Scene::forming(waits(2), json!({ "phase": "stopped", "round": 2 }));
    scene.nodes.retain(|(name, _)| *name == "b");
    (scene.fewest, scene.most, scene.nodes_per_replica) = (2, 6, 2);
    scene.ranks = vec!["a", "b", "c", "d"];
    others.iter().fold(scene, |scene, (name, says)| scene.node(name, says.clone()))
}

fn keeps() -> Value {
    merged(waits(2), &json!({ "keeps_workers": true, "warms_up": true }))
}

fn lacks() -> Value {
    merged(waits(2), &json!({ "lacks_workers": true, "warms_up": true }))
}

fn comes() -> Value {
    json!({ "phase": "waiting", "warms_up": true })
}

/// The places of the round that its leader seals: each node, and since when its replica is the same.
fn sealed(scene: &Scene) -> Vec<(String, Option<u64>)> {
    let (mut leader, _) = scene.leader();
    let wants = written(&mut leader, NOW, 7);
    let mut places: Vec<(u32, String, Option<u64>)> = Vec::new();
    for op in txn(&wants).map_or(&[][..], |txn| &txn.then) {
        if let Op::Put { key, value, .. } = op
            && key.starts_with(&scene.keys.ranks_of_round(2))
        {
            let rank: RankRecord = serde_json::from_slice(value).unwrap();
            places.push((rank.group_rank, rank.name, rank.replica_since));
        }
    }
    places.sort();
    places.into_iter().map(|(_, name, since)| (name, since)).collect()
}

fn places(expected: &[(&str, u64)]) -> Vec<(String, Option<u64>)> {
    expected.iter().map(|(name, since)| ((*name).to_owned(), Some(*since))).collect()
}

#[test]
fn a_replica_that_lost_a_node_waits_or_takes_a_spare_and_the_other_stays_what_it_is() {
    let members = [("a", keeps()), ("c", keeps()), ("d", keeps())];
    assert_eq!(sealed(&after_b_left(&members)), places(&[("c", 1), ("d", 1)]));

    let with_spare = after_b_left(&members).node("e", comes());
    assert_eq!(sealed(&with_spare), places(&[("c", 1), ("d", 1), ("a", 2), ("e", 2)]));

    let needed = Scene { fewest: 4, ..after_b_left(&members) };
    assert_eq!(sealed(&needed), [], "fewer than min nodes are in whole replicas");
    let needed = Scene { desired: json!({ "min_nodes": 3 }), ..after_b_left(&members).node("e", comes()) };
    assert_eq!(sealed(&needed).len(), 4, "an operator's minimum counts in whole replicas");
    let less_room = Scene { desired: json!({ "max_nodes": 3 }), ..with_spare };
    assert_eq!(sealed(&less_room), places(&[("c", 1), ("d", 1)]));
}

#[test]
fn a_replica_one_of_whose_nodes_has_lost_a_worker_begins_in_this_round() {
    let one = after_b_left(&[("a", keeps()), ("c", keeps()), ("d", waits(2))]);
    assert_eq!(sealed(&one), places(&[("c", 2), ("d", 2)]));
}

#[test]
fn nodes_that_lack_workers_sit_out_where_whole_replicas_stay_that_are_enough() {
    let spare = |c: Value, d: Value| after_b_left(&[("a", lacks()), ("c", c), ("d", d)]).node("e", comes());
    assert_eq!(sealed(&spare(keeps(), keeps())), places(&[("c", 1), ("d", 1)]));
    // Of {c, d} no whole replica would stay, only a part of it.
    let mut both = spare(keeps(), lacks());
    assert_eq!(sealed(&both), places(&[("c", 2), ("d", 2), ("a", 2), ("e", 2)]));
    both.fewest = 4;
    assert_eq!(sealed(&both).len(), 4);
}

#[test]
fn a_round_grows_by_whole_replicas() {
    let scene = |newcomers: &[&'static str]| {
        let scene = Scene { most: 6, fewest: 2, nodes_per_replica: 2, ..Scene::new() };
        newcomers.iter().fold(scene, |scene, name| scene.node(name, comes()))
    };
    for (newcomers, told) in [
        (&["c"][..], "1 waiting as spare, of 2 that make a replica"),
        (&["c", "d"], "c, d joins"),
        (&["c", "d", "e"], "c, d joins"),
    ] {
        let (_, wants) = scene(newcomers).leader();
        assert!(wants.contains(&LeaderOutput::Say(told.to_owned())), "{newcomers:?}: {wants:?}");
    }
}
