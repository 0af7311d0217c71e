//! Members that are lost again and again, and those that are silent though their keys are there.

use super::*;
use crate::job::FailureClass;

const SECOND: Duration = Duration::from_secs(1);

/// A leader whose node saw round 1 begin so long ago, and that has just heard of b's death.
fn after_b_died(scene: &Scene, ran: Duration) -> (Leader, Vec<LeaderOutput>) {
    let began = NOW.minus(ran);
    let leader = Leader::new(id("a"), scene.keys.clone(), Revision(5), NOW, 0);
    let leader = leader.seeing(Some(((1, RoundState::Running, false), began)));
    let (mut leader, _) = scene.led_by(leader, scene.store());
    let wants = leader.step(NOW, LeaderInput::Dead(id("b")));
    (leader, wants)
}

fn lost_before(rounds: u32) -> Scene {
    let mut scene = Scene::new();
    scene.round["advance"] = json!({ "lost": [{ "node": "b", "rounds": rounds }] });
    scene
}

#[test]
fn a_node_that_is_lost_soon_after_each_start_is_charged_from_the_second_time_on() {
    let lost = |record: &RoundRecord| record.advance.lost.first().map(|lost| lost.rounds);
    for (what, scene, ran, restarts, rounds) in [
        ("for the first time", Scene::new(), SECOND, 0, Some(1)),
        ("again", lost_before(1), SECOND, 1, Some(2)),
        ("again, after a while of work", lost_before(1), SECOND * 301, 0, None),
        (
            "another was lost before",
            {
                let mut scene = lost_before(3);
                scene.round["advance"]["lost"][0]["node"] = json!("x");
                scene
            },
            SECOND,
            0,
            Some(3),
        ),
        ("an operator drains it", Scene { desired: json!({ "drain": ["b"] }), ..lost_before(1) }, SECOND, 0, Some(1)),
        (
            "an operator evicts it",
            Scene { desired: json!({ "evict": [id("b")] }), ..lost_before(1) },
            SECOND,
            0,
            Some(1),
        ),
    ] {
        let (_, wants) = after_b_died(&scene, ran);
        let Some(record) = round(&scene, &wants) else {
            assert!(what.starts_with("an operator"), "{what}: {wants:?}");
            continue;
        };
        assert_eq!((record.number, record.restarts, lost(&record)), (2, restarts, rounds), "{what}: {}", record.reason);
    }
    // It said that it would leave, and ended before the leader had looked.
    let scene = lost_before(1);
    let leader = Leader::new(id("a"), scene.keys.clone(), Revision(5), NOW, 0);
    let (mut leader, _) = scene.led_by(leader.seeing(Some(((1, RoundState::Running, false), NOW))), scene.store());
    let leaves = scene.node("b", json!({ "phase": "draining", "round": 1 }));
    let event = Event::Put(leaves.record("b", 8));
    leader.take(NOW, LeaderInput::Watched(WatchUpdate::Events(vec![event])));
    let wants = leader.step(NOW, LeaderInput::Dead(id("b")));
    assert_eq!(round(&leaves, &wants).map(|record| (record.restarts, lost(&record))), Some((0, Some(1))));
    // A leader that does not know when the round began holds nothing against anyone.
    let scene = lost_before(1);
    let (mut leader, _) = scene.leader();
    let wants = leader.step(NOW, LeaderInput::Dead(id("b")));
    assert_eq!(round(&scene, &wants).map(|record| (record.restarts, record.advance.lost.len())), Some((0, 0)));
}

#[test]
fn a_checkpoint_that_was_committed_in_the_round_is_progress() {
    let scene = lost_before(1);
    let leader = Leader::new(id("a"), scene.keys.clone(), Revision(5), NOW, 0);
    let leader = leader.seeing(Some(((1, RoundState::Running, false), NOW)));
    let (mut leader, _) = scene.led_by(leader, scene.store());
    let checkpoint = json!({ "step": 7, "path": "/c/7", "digest": "crc32c:0", "round": 1 });
    put(&mut leader, NOW, kv(scene.keys.checkpoint(), checkpoint, 8));
    let wants = leader.step(NOW, LeaderInput::Dead(id("b")));
    assert_eq!(round(&scene, &wants).map(|record| record.restarts), Some(0));
}

#[test]
fn a_job_whose_node_is_lost_again_and_again_ends() {
    for (why, set) in [
        ("no restarts left of 3", json!({ "restarts": 3 })),
        ("--restarts-without-progress", json!({ "restarts": 2, "stalled": 1 })),
    ] {
        let mut scene = lost_before(4);
        scene.round["restarts"] = set["restarts"].clone();
        scene.round["advance"]["stalled_restarts"] = set.get("stalled").cloned().unwrap_or(json!(0));
        let mut store = scene.store();
        let mut spec: Value = serde_json::from_slice(&store[0][0].value).unwrap();
        spec["restarts_without_progress"] = if set.get("stalled").is_some() { json!(2) } else { Value::Null };
        store[0][0].value = spec.to_string().into_bytes();
        let leader = Leader::new(id("a"), scene.keys.clone(), Revision(5), NOW, 0);
        let leader = leader.seeing(Some(((1, RoundState::Running, false), NOW)));
        let (mut leader, _) = scene.led_by(leader, store);
        let wants = leader.step(NOW, LeaderInput::Dead(id("b")));
        let record = round(&scene, &wants).unwrap();
        assert_eq!(record.state, RoundState::Failed, "{}", record.reason);
        assert!(record.reason.contains(why) && record.reason.contains("lost b"), "{}", record.reason);
        let cause = record.cause.unwrap();
        assert_eq!((cause.class, cause.node), (FailureClass::Lost, Some(id("b"))));
    }
}

#[test]
fn a_failure_that_no_restart_can_help_ends_the_job() {
    for permanent in [false, true] {
        let mut says = failed("own", "ValueError: boom");
        says["failure"]["permanent"] = json!(permanent);
        let scene = Scene::new().node("b", says);
        let record = round(&scene, &scene.leader().1).unwrap();
        let ended = (record.state == RoundState::Failed, record.reason.contains("a restart cannot help"));
        assert_eq!(ended, (permanent, permanent), "{}", record.reason);
    }
}

#[test]
fn a_member_that_is_silent_is_lost_though_its_key_stays() {
    let scene = Scene::new();
    let (mut leader, _) = scene.leader();
    opened(&mut leader);
    let evicted = |leader: &mut Leader, at: Time, says: bool| {
        if says {
            put(leader, at, scene.record("b", at.as_millis() as i64));
        }
        leader.take(at, LeaderInput::Heard { node: id("a"), probe: 0, echo: Some(at) });
        let mut wants = leader.step(at, LeaderInput::Tick);
        while leader.is_busy() && round(&scene, &wants).is_none() {
            wants = written(leader, at, 6);
        }
        tombstone(&scene, &wants, "b").map(|stone| stone.fate)
    };
    // Who writes its key instead is no stranger to this leader.
    for seconds in (1..=50).step_by(7) {
        assert_eq!(evicted(&mut leader, NOW + SECOND * seconds, true), None);
    }
    for seconds in (57..70).step_by(6) {
        assert_eq!(evicted(&mut leader, NOW + SECOND * seconds, false), None);
    }
    // A leader that was stopped meanwhile has no right to think so.
    assert_eq!(evicted(&mut leader.clone(), NOW + SECOND * 90, false), None);
    // Nothing proves that it is dead, so the next round waits until it is past its fence point.
    assert_eq!(evicted(&mut leader, NOW + SECOND * 70, false), Some(crate::job::Fate::Unknown));
}

#[test]
fn a_record_that_is_older_than_it_was_is_of_a_store_that_went_back() {
    let scene = Scene::new();
    for (what, at, known) in [("the round", 1, scene.keys.round()), ("the checkpoint", 3, scene.keys.checkpoint())] {
        // Given a leader whose watch has told of a record at revision 6,
        let (mut leader, _) = scene.leader();
        let value = match at {
            1 => scene.round.clone(),
            _ => json!({ "step": 7, "path": "/c/7", "digest": "crc32c:0", "round": 1 }),
        };
        leader.take(NOW, LeaderInput::Watched(WatchUpdate::Snapshot { revision: Revision(1), values: vec![] }));
        leader.take(
            NOW,
            LeaderInput::Watched(WatchUpdate::Events(vec![Event::Put(kv(known.clone(), value.clone(), 20))])),
        );
        while leader.is_busy() {
            written(&mut leader, NOW, 6);
        }
        // when it reads that record at an older revision, from a store that has passed the newer one by now,
        leader.step(NOW, LeaderInput::Tick);
        let mut store = scene.store().map(OpResult::Values);
        store[at] = OpResult::Values(vec![kv(known, value, 4)]);
        let read = |revision| TxnResult { succeeded: true, revision: Revision(revision), results: store.to_vec() };
        // (a late read is only read again)
        let mut late = leader.clone();
        let wants = late.step(NOW, LeaderInput::Answered { sent: NOW, result: Ok(read(19)) });
        assert!(!late.is_over(), "{what}: {wants:?}");
        let wants = leader.step(NOW, LeaderInput::Answered { sent: NOW, result: Ok(read(30)) });
        // then nothing follows
        let lost = wants.iter().any(|want| matches!(want, LeaderOutput::Broken(StoreError::Lost { .. })));
        assert!(lost && leader.is_over(), "{what}: {wants:?}");
    }
}
