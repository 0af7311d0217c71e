//! Rules of a leader, each with the case that needs it.

use super::*;
use crate::job::Fate;

const SECOND: Duration = Duration::from_secs(1);

/// A watch tells it that history was lost up to this revision; it reads what the scene holds, with the round of that one.
fn reads_again(leader: &mut Leader, scene: &Scene, now: Time, told: i64, round: i64) -> Vec<LeaderOutput> {
    let lost = WatchUpdate::Snapshot { revision: Revision(told), values: vec![] };
    let mut wants = leader.step(now, LeaderInput::Watched(lost));
    if !leader.is_busy() {
        wants = leader.step(now, LeaderInput::Tick);
    }
    assert!(txn(&wants).is_some_and(|txn| !txn.is_write()), "it reads: {wants:?}");
    let mut store = scene.store();
    store[1][0].mod_revision = Revision(round);
    let results = store.into_iter().map(OpResult::Values).collect();
    let result = TxnResult { succeeded: true, revision: Revision(20), results };
    leader.step(now, LeaderInput::Answered { sent: now, result: Ok(result) })
}

#[test]
fn a_read_that_is_older_than_the_watch_is_not_believed() {
    let scene = Scene::new().node("b", failed("own", "boom"));
    let (leader, _) = Scene::new().leader();
    for (told, decides) in [(20, true), (21, false)] {
        let wants = reads_again(&mut leader.clone(), &scene, NOW, told, 4);
        assert_eq!(round(&scene, &wants).is_some(), decides, "{told}: {wants:?}");
    }
}

#[test]
fn a_plan_of_another_record_is_not_this_leader_s() {
    let scene = Scene::forming(waits(2), running(1));
    for (modified, plans) in [(7, false), (9, true)] {
        let (mut leader, _) = scene.leader();
        written(&mut leader, NOW, 7);
        let wants = reads_again(&mut leader, &scene, NOW, 20, modified);
        assert_eq!(round(&scene, &wants).is_some(), plans, "{modified}: {wants:?}");
    }
}

#[test]
fn a_read_does_not_begin_a_grace_again() {
    let scene = Scene::forming(waits(2), running(1));
    let (mut leader, _) = scene.leader();
    opened(&mut leader);
    written(&mut leader, NOW, 7);
    // The grace and the margin are over after two seconds.
    reads_again(&mut leader, &scene, NOW + Duration::from_millis(1900), 20, 7);
    let wants = leader.step(NOW + SECOND * 2, LeaderInput::Tick);
    assert!(tombstone(&scene, &wants, "b").is_some(), "{wants:?}");
}

#[test]
fn whom_the_first_round_of_a_generation_waits_for_follows_from_its_field_and_not_from_its_reason() {
    for (begins, reason) in [(true, "r"), (false, RoundRecord::BEGINS_AGAIN)] {
        let mut scene = Scene::forming(waits(2), running(1));
        (scene.round["begins_generation"], scene.round["reason"]) = (json!(begins), json!(reason));
        let (mut leader, _) = scene.leader();
        written(&mut leader, NOW, 7);
        // The loss of b is no reason for a round of another generation.
        let wants = leader.step(NOW + SECOND * 2, LeaderInput::Tick);
        let record = round(&scene, &wants).expect("a plan without b");
        assert_eq!(record.reason == RoundRecord::BEGINS_AGAIN, begins, "{}", record.reason);
        assert_eq!(record.begins_generation, begins);

        // Nor is it that all have left.
        let stopped = || json!({ "phase": "stopped", "round": 2 });
        let mut scene = Scene::forming(stopped(), stopped());
        (scene.round["begins_generation"], scene.round["reason"]) = (json!(begins), json!(reason));
        let (mut leader, _) = scene.leader();
        let wants = written(&mut leader, NOW, 7);
        let record = round(&scene, &wants).expect("a plan without both");
        assert_eq!(record.reason == RoundRecord::BEGINS_AGAIN, begins, "{}", record.reason);
    }
}

#[test]
fn an_evicted_node_is_waited_for_from_when_the_others_follow_this_leader() {
    let scene = Scene::forming(waits(2), running(1));
    let (mut leader, _) = scene.leader();
    written(&mut leader, NOW, 7);
    // Given that b is evicted after two seconds, and that no one knows whether it is at work,
    let at = |seconds: u32| NOW + SECOND * seconds;
    let wants = leader.step(at(2), LeaderInput::Tick);
    assert_eq!(tombstone(&scene, &wants, "b").map(|stone| stone.fate), Some(Fate::Unknown));
    written(&mut leader, at(2), 8);
    // when a opens its stream only then: until now another leader may have heard them both
    leader.step(at(8), LeaderInput::Opened(id("a")));
    for (seconds, sealed) in [(13, false), (17, false), (18, true)] {
        let mut wants = leader.step(at(seconds), LeaderInput::Tick);
        if leader.is_busy() && round(&scene, &wants).is_none() {
            wants = written(&mut leader, at(seconds), 9);
        }
        let state = round(&scene, &wants).map(|record| record.state);
        assert_eq!(state == Some(RoundState::Running), sealed, "{seconds} s: {wants:?}");
    }
}

#[test]
fn who_is_done_may_leave() {
    let scene = Scene::new().node("b", json!({ "phase": "done", "round": 1 }));
    let (mut leader, _) = scene.leader();
    assert_eq!(round(&scene, &leader.step(NOW, LeaderInput::Dead(id("b")))), None);
}

#[test]
fn a_silent_member_is_past_its_fence_only_where_another_follows_this_leader() {
    for (follows, fate) in [(true, Fate::Fenced), (false, Fate::Unknown)] {
        let scene = Scene::new();
        let (mut leader, _) = scene.leader();
        if follows {
            leader.step(NOW, LeaderInput::Opened(id("b")));
        }
        let gone = Event::Delete { key: scene.keys.node(&id("a")), revision: Revision(8) };
        let mut wants = leader.step(NOW, LeaderInput::Watched(WatchUpdate::Events(vec![gone])));
        while tombstone(&scene, &wants, "a").is_none() {
            let now = leader.deadline().unwrap();
            assert!(now < NOW + SECOND * 100, "{wants:?}");
            // b is there, and writes its key where its pulses do not come.
            leader.take(now, LeaderInput::Heard { node: id("b"), probe: 0, echo: follows.then_some(now) });
            wants = leader.step(now, LeaderInput::Tick);
            while leader.is_busy() && tombstone(&scene, &wants, "a").is_none() {
                wants = written(&mut leader, now, 9);
            }
        }
        assert_eq!(tombstone(&scene, &wants, "a").map(|stone| stone.fate), Some(fate), "{follows}");
    }
}

#[test]
fn a_round_grows_once_all_of_it_runs() {
    let scene = Scene::new().node("b", waits(1)).node("c", json!({ "phase": "waiting" }));
    let (mut leader, wants) = scene.leader();
    assert_eq!(round(&scene, &wants), None);
    let (scene, wants) = says(&mut leader, scene, NOW, 8, "b", running(1));
    assert_eq!(round(&scene, &wants).map(|record| record.reason), Some("c joins".to_owned()));
}

#[test]
fn a_round_that_was_replaced_is_deleted_once_the_next_runs() {
    let scene = Scene::forming(waits(2), waits(2));
    let (mut leader, _) = scene.leader();
    written(&mut leader, NOW, 7);
    written(&mut leader, NOW, 8);
    let (scene, _) = says(&mut leader, scene, NOW, 9, "a", running(2));
    let (scene, wants) = says(&mut leader, scene, NOW, 10, "b", running(2));
    let old = Op::delete_prefix(scene.keys.ranks_of_round(1));
    assert!(txn(&wants).is_some_and(|txn| txn.then.contains(&old)), "{wants:?}");
}

#[test]
fn a_member_whose_key_was_deleted_gets_no_proof() {
    // Given two members that are heard
    let scene = Scene::new();
    let (mut leader, _) = scene.leader();
    written(&mut leader, NOW, 7);
    opened(&mut leader);
    heard(&mut leader, ["a", "b"], NOW);
    let proven = |leader: &Leader, node| NOW.minus(leader.word(NOW, &id(node)).expect("a word").proof_age);
    let since = proven(&leader, "b");
    // when somebody deletes the key of one
    let deleted = Event::Delete { key: scene.keys.node(&id("b")), revision: Revision(8) };
    leader.step(NOW, LeaderInput::Watched(WatchUpdate::Events(vec![deleted])));
    // then it has to look itself
    assert_eq!((proven(&leader, "a"), proven(&leader, "b")), (since, Time::ZERO));
}
