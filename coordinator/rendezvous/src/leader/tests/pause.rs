//! A job that its operator pauses and resumes.

use super::*;
use crate::job::Fate;

#[test]
fn a_paused_job_waits_for_its_resume_and_keeps_its_ranks() {
    for policy in ["failures", "all"] {
        // Given a job at work, when its operator pauses it
        let mut scene = Scene { policy, ..Scene::new() };
        scene.desired = json!({ "paused": true });
        let (mut leader, wants) = scene.leader();
        // then the next round tells its members, which costs nothing
        let record = round(&scene, &wants).unwrap();
        assert_eq!((record.number, record.state, record.paused, record.restarts), (2, RoundState::Forming, true, 0));
        assert_eq!(record.reason, "the operator paused the job");
        written(&mut leader, NOW, 7);

        // when all have stopped, a newcomer too is there, and any time passes, then nothing is written
        let (scene, wants) = says(&mut leader, scene, NOW, 8, "a", waits(2));
        assert_eq!(round(&scene, &wants), None);
        let (scene, wants) = says(&mut leader, scene, NOW, 9, "b", waits(2));
        assert_eq!(round(&scene, &wants), None);
        let (scene, wants) = says(&mut leader, scene, NOW, 10, "c", json!({ "phase": "waiting" }));
        assert_eq!(round(&scene, &wants), None);
        let later = NOW + Duration::from_secs(100_000);
        heard(&mut leader, ["a", "b"], later);
        assert_eq!(round(&scene, &leader.step(later, LeaderInput::Tick)), None, "long after join_timeout");
        written(&mut leader, later, 11);

        // when it is resumed, then the next round runs at once, members in their old order, then the newcomer
        let wants = desired(&mut leader, &scene, later, 12, json!({}));
        let record = round(&scene, &wants).unwrap();
        assert_eq!((record.number, record.state, record.paused), (2, RoundState::Forming, false));
        let wants = written(&mut leader, later, 13);
        let record = round(&scene, &wants).unwrap();
        assert_eq!((record.state, record.group_world_size, record.restarts), (RoundState::Running, 3, 0));
        assert_eq!((record.reason.as_str(), record.paused), ("the operator resumed the job", false));
        let ranks: Vec<bool> = ["a", "b", "c"]
            .iter()
            .enumerate()
            .map(|(rank, name)| {
                let key = scene.keys.rank(2, Revision(13), &id(name));
                txn(&wants).unwrap().then.iter().any(|op| {
                    matches!(op, Op::Put { key: put, value, .. }
                        if *put == key && serde_json::from_slice::<Value>(value).unwrap()["group_rank"] == rank)
                })
            })
            .collect();
        assert_eq!(ranks, [true; 3], "{wants:?}");
    }
}

#[test]
fn a_resumed_job_has_its_whole_join_timeout_and_a_paused_one_has_none() {
    // Given a job paused before its first round, with fewer nodes than it needs
    let mut scene = Scene { fewest: 3, ..Scene::new() };
    (scene.nodes, scene.ranks) = (vec![("a", json!({ "phase": "waiting" }))], vec![]);
    scene.round = json!({ "number": 1, "generation": 1, "state": "forming", "reason": "the job begins" });
    scene.desired = json!({ "paused": true });
    let (mut leader, wants) = scene.leader();
    assert!(round(&scene, &wants).unwrap().paused);
    written(&mut leader, NOW, 7);
    let later = NOW + Duration::from_secs(1000);
    assert_eq!(round(&scene, &leader.step(later, LeaderInput::Tick)), None);
    written(&mut leader, later, 7);
    // when it is resumed, then the time counts from then
    let wants = desired(&mut leader, &scene, later, 8, json!({}));
    assert!(!round(&scene, &wants).unwrap().paused);
    assert_eq!(round(&scene, &written(&mut leader, later, 9)), None);
    let almost = later + Duration::from_secs(59);
    assert_eq!(round(&scene, &leader.step(almost, LeaderInput::Tick)), None);
    written(&mut leader, almost, 9);
    let wants = leader.step(later + Duration::from_secs(60), LeaderInput::Tick);
    assert_eq!(round(&scene, &wants).unwrap().state, RoundState::Failed);
}

#[test]
fn members_have_the_time_of_a_leave_to_stop_for_a_pause_even_if_it_is_resumed_meanwhile() {
    // Given a job paused while a round forms, and b has not stopped for it yet
    let mut scene = Scene::forming(waits(2), running(1));
    let (mut leader, _) = scene.leader();
    opened(&mut leader);
    written(&mut leader, NOW, 7);
    let paused_at = NOW + Duration::from_millis(1500);
    let wants = desired(&mut leader, &scene, paused_at, 8, json!({ "paused": true }));
    let record = round(&scene, &wants).unwrap();
    assert_eq!((record.number, record.paused), (2, true));
    written(&mut leader, paused_at, 9);
    // when it is resumed, then nothing is written before b has stopped, and b is not evicted for its stop_grace
    let wants = desired(&mut leader, &scene, paused_at, 10, json!({}));
    assert_eq!(round(&scene, &wants), None);
    let late = paused_at + Duration::from_secs(30);
    assert_eq!(round(&scene, &leader.step(late, LeaderInput::Tick)), None, "drain_grace and margin are not over");
    written(&mut leader, late, 10);
    let wants;
    (scene, wants) = says(&mut leader, scene, late, 11, "b", waits(2));
    assert!(!round(&scene, &wants).unwrap().paused, "{wants:?}");

    // Given one that does not stop at all, it is evicted when that time is over, in the pause
    let mut scene = Scene::forming(waits(2), running(1));
    scene.desired = json!({ "paused": true });
    let (mut leader, _) = scene.leader();
    written(&mut leader, NOW, 7);
    let wants = leader.step(NOW + Duration::from_secs(31), LeaderInput::Tick);
    assert_eq!(tombstone(&scene, &wants, "b").unwrap().fate, Fate::Unknown);
    assert!(round(&scene, &wants).unwrap().paused);
}

#[test]
fn what_has_come_before_a_pause_counts_and_a_close_ends_it() {
    let done = json!({ "phase": "done", "round": 1 });
    let paused = json!({ "paused": true });
    // A failure that is known is charged, and pauses the job as well.
    let scene = Scene { desired: paused.clone(), ..Scene::new().node("b", failed("own", "boom")) };
    let record = round(&scene, &scene.leader().1).unwrap();
    assert_eq!((record.restarts, record.paused), (1, true));
    // A job whose members are all done has succeeded.
    let scene = Scene { desired: paused.clone(), ..Scene::new().node("a", done.clone()).node("b", done) };
    assert_eq!(round(&scene, &scene.leader().1).unwrap().state, RoundState::Succeeded);
    // A new leader finds the pause, and keeps it.
    let mut scene = Scene::forming(waits(2), waits(2));
    (scene.round["paused"], scene.desired) = (json!(true), paused);
    let (mut leader, wants) = scene.leader();
    assert!(round(&scene, &wants).unwrap().paused);
    assert_eq!(round(&scene, &written(&mut leader, NOW, 7)), None);
    let wants = desired(&mut leader, &scene, NOW, 8, json!({ "paused": true, "closed": true }));
    let record = round(&scene, &wants).unwrap();
    assert_eq!((record.state, record.paused), (RoundState::Closed, false));
}
