//! Nodes that are excluded for their failures, and those that an operator excludes, takes back or evicts.

use super::*;
use crate::job::{Exclusion, Fate, Faults};

const MINUTE: Duration = Duration::from_secs(60);

/// b of a, b and c has failed, for the second time of two; round 2 forms.
fn failing_twice(fewest: usize) -> Scene {
    let mut scene = Scene { fewest, exclude_after: 2, ..Scene::new() };
    scene = scene.node("c", running(1)).node("b", failed("own", "boom"));
    scene.nodes.sort_by_key(|(name, _)| *name);
    scene.ranks.push("c");
    scene.round["group_world_size"] = json!(3);
    scene.round["world_size"] = json!(3);
    scene.round["faults"] = json!([{ "node": "b", "failures": 1 }]);
    scene
}

/// All three stop and wait; the round that is sealed then.
fn sealed(leader: &mut Leader, mut scene: Scene, mut wants: Vec<LeaderOutput>) -> (Scene, RoundRecord) {
    for (revision, name) in (20..).zip(["a", "b", "c"]) {
        assert_eq!(round(&scene, &wants).filter(|record| record.state == RoundState::Running), None);
        (scene, wants) = says(leader, scene, NOW, revision, name, waits(2));
    }
    let record = round(&scene, &wants).unwrap();
    assert_eq!(record.state, RoundState::Running, "{record:?}");
    (scene, record)
}

fn has_a_place(scene: &Scene, wants: &[LeaderOutput], plan: i64, name: &str) -> bool {
    let key = scene.keys.rank(2, Revision(plan), &id(name));
    txn(wants).unwrap().then.iter().any(|op| matches!(op, Op::Put { key: put, .. } if *put == key))
}

#[test]
fn who_fails_again_and_again_sits_out_and_comes_back() {
    // Given that b has failed as often as is agreed on, then the next round tells that it is excluded
    let (mut leader, wants) = failing_twice(2).leader();
    let scene = failing_twice(2);
    let record = round(&scene, &wants).unwrap();
    assert_eq!((record.number, record.restarts), (2, 1));
    let told = "; b is excluded for 5 min, since it failed 2 times";
    assert!(record.reason.contains(told), "{}", record.reason);
    let excluded = Some(Exclusion { round: 2, lasts: MINUTE * 5 });
    assert_eq!(record.faults, [Faults { node: "b".into(), failures: 0, exclusions: 1, excluded }]);
    written(&mut leader, NOW, 7);

    // when all wait, then a and c alone get places
    let (mut scene, record) = sealed(&mut leader, scene, Vec::new());
    assert_eq!((record.group_world_size, &record.faults[0].excluded), (2, &excluded));
    written(&mut leader, NOW, 30);
    let saying = [(31, "b", json!({ "phase": "waiting" })), (32, "a", running(2)), (33, "c", running(2))];
    for (revision, name, said) in saying {
        let wants;
        (scene, wants) = says(&mut leader, scene, NOW, revision, name, said);
        assert_eq!(round(&scene, &wants), None);
    }
    // (It prunes what the round before has left.)
    written(&mut leader, NOW, 40);
    // and it stays out until its time is over, for which the leader wakes
    let over = NOW + MINUTE * 5;
    let almost = NOW + (MINUTE * 5 - Duration::from_millis(1));
    heard(&mut leader, ["a", "c"], almost);
    assert_eq!(round(&scene, &leader.step(almost, LeaderInput::Tick)), None);
    assert_eq!(round(&scene, &written(&mut leader, almost, 41)), None);
    assert!(leader.deadline().is_some_and(|at| at <= over), "{:?}", leader.deadline());
    let wants = leader.step(over, LeaderInput::Tick);
    let record = round(&scene, &wants).unwrap();
    assert_eq!((record.number, record.reason.as_str()), (3, "b joins"));
    let rests = Faults { node: "b".into(), failures: 0, exclusions: 1, excluded: None };
    assert_eq!(record.faults, [rests], "it is excluded for longer the next time");
}

#[test]
fn no_node_that_the_job_needs_is_excluded() {
    // Given that all three are needed, then the failure is counted, and that is all
    let scene = failing_twice(3);
    let (_, wants) = scene.leader();
    let record = round(&scene, &wants).unwrap();
    assert!(!record.reason.contains("excluded"), "{}", record.reason);
    assert_eq!(record.faults, [Faults { node: "b".into(), failures: 2, exclusions: 0, excluded: None }]);

    // Given that b is excluded already, and c leaves, so that node a is too few, then b takes part all the same
    let mut scene = Scene::forming(waits(2), waits(2)).node("c", json!({ "phase": "stopped", "round": 2 }));
    scene.fewest = 2;
    scene.ranks.push("c");
    scene.round["faults"] = json!([{ "node": "b", "exclusions": 1, "excluded": { "round": 2, "lasts_ms": 300_000 } }]);
    let (mut leader, _) = scene.leader();
    let wants = written(&mut leader, NOW, 7);
    let record = round(&scene, &wants).unwrap();
    assert_eq!((record.state, record.group_world_size), (RoundState::Running, 2));
    assert!(has_a_place(&scene, &wants, 7, "b"));
}

#[test]
fn only_what_counts_against_the_job_counts_against_a_node() {
    for (class, counts) in [("own", true), ("lost", false), ("peer", true)] {
        let scene = failing_twice(2).node("b", failed(class, "m"));
        let (mut leader, mut wants) = scene.leader();
        if class == "peer" {
            // No one else had failed, so the failure is charged; but whose it was no one knows.
            wants = leader.step(NOW + MINUTE, LeaderInput::Tick);
        }
        let Some(record) = round(&scene, &wants) else { panic!("{class}: {wants:?}") };
        let excluded = record.faults.first().is_some_and(|faults| faults.excluded.is_some());
        assert_eq!((record.restarts == 1, excluded), (counts, class == "own"), "{class}: {record:?}");
    }
}

#[test]
fn an_operator_excludes_a_node_and_takes_it_back() {
    // Given a job at work, when its operator excludes b, then the next round forms at no charge
    let scene = Scene { desired: json!({ "exclude": ["b"] }), ..Scene::new() };
    let (mut leader, wants) = scene.leader();
    let record = round(&scene, &wants).unwrap();
    assert_eq!((record.number, record.restarts, record.reason.as_str()), (2, 0, "the operator excludes b"));
    written(&mut leader, NOW, 7);
    // and b, which waits as the others do, gets no place in it
    let (scene, _) = says(&mut leader, scene, NOW, 8, "b", waits(2));
    let (scene, wants) = says(&mut leader, scene, NOW, 9, "a", waits(2));
    assert_eq!(round(&scene, &wants).unwrap().group_world_size, 1);
    assert!(has_a_place(&scene, &wants, 7, "a") && !has_a_place(&scene, &wants, 7, "b"));
    written(&mut leader, NOW, 10);
    let (scene, _) = says(&mut leader, scene, NOW, 11, "b", json!({ "phase": "waiting" }));
    let (scene, wants) = says(&mut leader, scene, NOW, 11, "a", running(2));
    assert_eq!(round(&scene, &wants), None, "it stays out");
    written(&mut leader, NOW, 12);
    // when it is taken back, then it joins
    let wants = desired(&mut leader, &scene, NOW, 13, json!({}));
    assert_eq!(round(&scene, &wants).unwrap().reason, "b joins");
}

#[test]
fn an_operator_takes_back_what_the_job_has_excluded() {
    let mut scene = Scene::new().node("c", json!({ "phase": "waiting" }));
    scene.round["faults"] = json!([{ "node": "c", "exclusions": 1, "excluded": { "round": 1, "lasts_ms": 300_000 } }]);
    let (mut leader, wants) = scene.leader();
    assert_eq!(round(&scene, &wants), None, "it is excluded");
    let back = |round: u64| json!({ "include": [{ "node": "c", "round": round }] });
    // Another exclusion of its is not meant.
    assert_eq!(round(&scene, &desired(&mut leader, &scene, NOW, 7, back(2))), None);
    let wants = desired(&mut leader, &scene, NOW, 8, back(1));
    assert_eq!(round(&scene, &wants).unwrap().reason, "c joins");
}

#[test]
fn an_operator_evicts_a_node_whatever_it_says() {
    // A member that runs, or stops for a round that forms, and a node without a place.
    let forming = Scene::forming(waits(2), running(1));
    let mut newcomer = Scene::new().node("b", json!({ "phase": "waiting" }));
    newcomer.ranks = vec!["a"];
    newcomer.round["group_world_size"] = json!(1);
    for mut scene in [Scene::new(), forming, newcomer] {
        scene.desired = json!({ "evict": [id("b"), id("gone")] });
        let (mut leader, mut wants) = scene.leader();
        if scene.round["state"] == "forming" {
            // Found, it is written again first.
            wants = written(&mut leader, NOW, 7);
        }
        let stone = tombstone(&scene, &wants, "b").unwrap_or_else(|| panic!("{wants:?}"));
        assert_eq!((stone.fate, stone.refused, stone.drained), (Fate::Unknown, true, false));
        assert!(stone.reason.contains("the operator evicted this node"), "{}", stone.reason);
    }
    // Who is done is needed no more, and its result counts.
    let done = json!({ "phase": "done", "round": 1 });
    let mut scene = Scene::new().node("b", done);
    scene.desired = json!({ "evict": [id("b")] });
    assert!(tombstone(&scene, &scene.leader().1, "b").is_none());
}

/// The keys that a transaction writes.
fn puts(wants: &[LeaderOutput]) -> Vec<&String> {
    let then = txn(wants).map_or(&[][..], |txn| &txn.then);
    then.iter().filter_map(|op| if let Op::Put { key, .. } = op { Some(key) } else { None }).collect()
}

#[test]
fn a_node_that_is_out_for_two_reasons_is_evicted_once() {
    let late = NOW + MINUTE * 2;
    let silent = json!({ "phase": "waiting", "round": 1 });
    for (what, scene, desired) in [
        ("it is late to start", Scene::new().node("b", silent), json!({ "evict": [id("b")] })),
        ("it is late to stop", Scene::forming(waits(2), running(1)), json!({ "evict": [id("b")] })),
        ("it is named twice", Scene::new(), json!({ "evict": [id("b"), id("b")] })),
        (
            "as a newcomer",
            Scene::new().node("c", json!({ "phase": "waiting" })),
            json!({ "evict": [id("c"), id("c")] }),
        ),
        ("drained twice", Scene::new().node("c", json!({ "phase": "waiting" })), json!({ "drain": ["c", "c"] })),
    ] {
        let scene = Scene { most: 2, ..scene };
        let (mut leader, _) = scene.leader();
        opened(&mut leader);
        while leader.is_busy() {
            written(&mut leader, NOW, 7);
        }
        // when the operator evicts a node that is late anyway
        for node in ["a", "b"] {
            leader.take(late, LeaderInput::Heard { node: id(node), probe: 0, echo: Some(late) });
        }
        let wants = self::desired(&mut leader, &scene, late, 30, desired);
        // then etcd takes the transaction
        let all = puts(&wants);
        let each: std::collections::BTreeSet<_> = all.iter().collect();
        assert!(!all.is_empty() && all.len() == each.len(), "{what}: {all:?}");
    }
}

#[test]
fn a_leader_whose_writes_are_refused_for_good_lets_another_one_lead() {
    // Given a leader whose writes the store refuses
    let scene = Scene::new().node("b", failed("own", "boom"));
    let (mut leader, mut wants) = scene.leader();
    let refused = StoreError::Invalid("duplicate key given in txn request".into());
    let mut now = NOW;
    let own = Op::delete(scene.keys.leader());
    for tries in 0.. {
        assert!(tries < 10, "it never lets go: {wants:?}");
        let asked = txn(&wants).unwrap_or_else(|| panic!("{tries}: {wants:?}"));
        if asked.then == [own.clone()] {
            break;
        }
        // when it has read the job again and tried again, some times
        let refuse = asked.then.iter().any(Op::is_write);
        wants = if refuse {
            leader.step(now, LeaderInput::Answered { sent: now, result: Err(refused.clone()) })
        } else {
            let (read, wants) = scene.led_by(leader, scene.store());
            leader = read;
            wants
        };
        if !leader.is_busy() {
            now = leader.deadline().unwrap();
            wants = leader.step(now, LeaderInput::Tick);
        }
    }
    // then it gives its key back, and its term is over
    let wants = written(&mut leader, now, 40);
    assert!(leader.is_over() && wants.contains(&LeaderOutput::Deposed), "{wants:?}");
}
