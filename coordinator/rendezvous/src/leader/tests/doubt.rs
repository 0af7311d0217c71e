//! What a leader does where it knows too little, or hears what cannot be.

use std::collections::BTreeSet;

use super::*;
use crate::job::Fate;

fn waiting() -> Value {
    json!({ "phase": "waiting" })
}

/// A record that is not one of ours.
fn rubbish(key: &str) -> KeyValue {
    KeyValue { value: b"rubbish".to_vec(), ..kv(key.to_owned(), json!({}), 4) }
}

#[test]
fn a_member_that_was_just_sealed_is_not_refused_by_a_drain() {
    for phase in ["running", "forming"] {
        // Given a round whose member b was a newcomer, and has not spoken since
        let mut scene = match phase {
            "running" => Scene::new(),
            _ => Scene::forming(json!({ "phase": "waiting", "round": 2 }), waiting()),
        };
        scene = scene.node("b", waiting());
        // when the operator drains it
        scene.desired = json!({ "drain": ["b"] });
        let (mut leader, wants) = scene.leader();
        // then it is not turned away: it may be at work
        assert_eq!(tombstone(&scene, &wants, "b"), None, "{phase}");
        if phase == "forming" {
            let wants = written(&mut leader, NOW, 7);
            assert_eq!(tombstone(&scene, &wants, "b"), None, "{phase}");
            continue;
        }
        // and it leaves as a member does once it has said that it works
        let (scene, wants) = says(&mut leader, scene, NOW, 7, "b", running(1));
        assert_eq!(round(&scene, &wants).expect("a round").leaving, ["b"]);
    }
}

#[test]
fn a_silent_former_leader_is_lost_one_lease_after_its_successor_has_heard_it() {
    let seconds = |seconds| Duration::from_secs(seconds);
    let former = |name: &str, silent_since| Some(Former { node: id(name), dead: false, silent_since });
    for (what, own, former, after, fate) in [
        ("long silent", "b", former("a", NOW.minus(seconds(10))), 0, Fate::Fenced),
        ("heard four seconds ago", "b", former("a", NOW.minus(seconds(4))), 6, Fate::Fenced),
        ("never heard", "b", former("a", Time::ZERO), 0, Fate::Fenced),
        ("another led", "b", former("x", NOW.minus(seconds(10))), 10, Fate::Unknown),
        ("no node is known to have led", "b", None, 10, Fate::Unknown),
        ("the successor is no member", "x", former("a", NOW.minus(seconds(10))), 10, Fate::Unknown),
    ] {
        // Given a round of a and b, and no key of a's
        let mut scene = Scene::new();
        scene.nodes.retain(|(name, _)| *name != "a");
        let leader = Leader::new(id(own), scene.keys.clone(), Revision(5), NOW, 0).after(former);
        let (mut leader, mut wants) = scene.led_by(leader, scene.store());
        leader.step(NOW, LeaderInput::Opened(id("b")));
        // then a is evicted after so long
        let mut now = NOW;
        while round(&scene, &wants).is_none() {
            now = leader.deadline().expect(what);
            assert!(now <= NOW + seconds(20), "{what}");
            wants = leader.step(now, LeaderInput::Tick);
            while leader.is_busy() && round(&scene, &wants).is_none() {
                wants = written(&mut leader, now, 6);
            }
        }
        assert_eq!(now.since(NOW), seconds(after), "{what}");
        assert_eq!(tombstone(&scene, &wants, "a").map(|stone| stone.fate), Some(fate), "{what}");
    }
    // One that is heard again stays.
    let mut scene = Scene::new();
    scene.nodes.retain(|(name, _)| *name != "a");
    let mut leader = Leader::new(id("b"), scene.keys.clone(), Revision(5), NOW, 0);
    leader = leader.after(former("a", NOW.minus(seconds(10))));
    leader.step(NOW, LeaderInput::Opened(id("a")));
    let (_, wants) = scene.led_by(leader, scene.store());
    assert_eq!(round(&scene, &wants), None);
}

#[test]
fn a_refusal_claims_nothing_about_workers_and_only_the_nodes_known_place() {
    let drained = |mut scene: Scene| {
        scene.desired = json!({ "drain": ["c"] });
        scene
    };
    for (why, scene) in [
        ("the operator drains it", drained(Scene::new().node("c", waiting()))),
        ("its name is taken", Scene::new().node("c", json!({ "phase": "waiting", "name": "a", "machine": "x" }))),
        (
            "its place is taken",
            Scene::new()
                .node("a", json!({ "phase": "running", "round": 1, "place": 0 }))
                .node("c", json!({ "phase": "waiting", "place": 0 })),
        ),
    ] {
        let (_, wants) = scene.leader();
        let stone = tombstone(&scene, &wants, "c").expect(why);
        assert_eq!((stone.refused, stone.fate), (true, Fate::Unknown), "{why}");
        let as_known = Guard::modified(scene.keys.node(&id("c")), Revision(4));
        assert!(txn(&wants).expect(why).when.contains(&as_known), "{why}");
    }
}

#[test]
fn a_round_without_the_rank_keys_that_it_should_have_is_damage_and_no_success() {
    let done = json!({ "phase": "done", "round": 1 });
    let stopped = json!({ "phase": "stopped", "round": 2 });
    for (ranks, size) in [(vec![], Some(2)), (vec!["a"], Some(2)), (vec![], None)] {
        for (what, mut scene) in [
            ("at work", Scene::new()),
            ("some done", Scene::new().node("a", done.clone())),
            ("forming", Scene::forming(waits(2), running(1))),
            ("all have left", Scene::forming(stopped.clone(), stopped.clone())),
        ] {
            // Given a record that names more members than there are rank keys
            scene.ranks = ranks.clone();
            match size {
                Some(size) => scene.round["sealed"]["nodes"] = json!(size),
                // Even where the record says none, a sealed round has a member.
                None => scene.round["group_world_size"] = json!(0),
            }
            let (mut leader, wants) = scene.leader();
            // then nothing is concluded, sealed or ended, now or later
            let said = wants.iter().any(|want| matches!(want, LeaderOutput::Warn(line) if line.contains("rank keys")));
            assert!(said, "{what}, {ranks:?}: {wants:?}");
            assert_eq!(round(&scene, &wants), None, "{what}, {ranks:?}");
            let later = leader.step(NOW + Duration::from_secs(3600), LeaderInput::Tick);
            assert_eq!(round(&scene, &later), None, "{what}, {ranks:?}");
            // and no node hears that all members were heard
            written(&mut leader, NOW, 6);
            assert_eq!(leader.word(NOW, &id("a")).and_then(|word| word.all_heard), None, "{what}, {ranks:?}");
        }
    }
    // An operator can still close the job.
    let mut scene = Scene::new();
    scene.ranks = vec![];
    scene.desired = json!({ "closed": true });
    let (_, wants) = scene.leader();
    assert_eq!(round(&scene, &wants).expect("a result").state, RoundState::Closed);
}

#[test]
fn a_beat_that_claims_what_was_not_said_yet_proves_nothing() {
    let later = NOW + Duration::from_secs(20);
    for echo in [Time::from_millis(u64::MAX), later + Duration::from_millis(1)] {
        // Given a member that was heard, and is silent since
        let (mut leader, _) = Scene::new().leader();
        written(&mut leader, NOW, 7);
        opened(&mut leader);
        heard(&mut leader, ["a", "b"], NOW);
        leader.step(later, LeaderInput::Heard { node: id("a"), probe: 0, echo: Some(later) });
        // when somebody speaks in its name
        leader.step(later, LeaderInput::Heard { node: id("b"), probe: u64::MAX, echo: Some(echo) });
        // then it counts as heard when it was
        let age = leader.word(later, &id("a")).expect("a word").all_heard;
        assert_eq!(age, Some(Duration::from_secs(20)), "{echo:?}");
        // and has answered no probe that was not sent
        assert_eq!(leader.view().expect("a view").roster.contact(&id("b")).expect("a contact").probe, 0);
    }
}

#[test]
fn a_failure_that_blames_a_peer_is_judged_after_one_lease_even_if_nodes_have_not_answered() {
    // Given a failure that blames a peer, and a member that no probe reaches
    let scene = Scene::new().node("b", failed("peer", "connection reset"));
    let (mut leader, wants) = scene.leader();
    assert!(wants.contains(&LeaderOutput::Probe(1)));
    // then the leader wants to be called again when a lease has passed
    let judged = NOW + Duration::from_secs(10);
    let before = judged.minus(Duration::from_millis(1));
    assert!(leader.deadline().is_some_and(|at| at <= judged), "{:?}", leader.deadline());
    let wants = leader.step(before, LeaderInput::Tick);
    assert_eq!(round(&scene, &wants), None, "not before: {wants:?}");
    if txn(&wants).is_some() {
        // It only proves that it still leads.
        written(&mut leader, before, 6);
    }
    assert!(leader.deadline().is_some_and(|at| at <= judged), "{:?}", leader.deadline());
    let wants = leader.step(judged, LeaderInput::Tick);
    let record = round(&scene, &wants).expect("a round");
    assert_eq!((record.number, record.restarts), (2, 1), "{}", record.reason);
}

#[test]
fn an_answer_to_an_earlier_rounds_probe_answers_no_later_one() {
    // Given members that answered a probe in round 1
    let scene = Scene::new().node("b", failed("peer", "connection reset"));
    let (mut leader, _) = scene.leader();
    for node in ["a", "b"] {
        leader.step(NOW, LeaderInput::Opened(id(node)));
        leader.step(NOW, LeaderInput::Heard { node: id(node), probe: 1, echo: None });
    }
    written(&mut leader, NOW, 7);
    let mut revision = 7;
    let mut says = |leader: &mut Leader, name, value: Value| {
        revision += 1;
        put(leader, NOW, Scene::new().node(name, value).record(name, revision))
    };
    for node in ["a", "b"] {
        says(&mut leader, node, waits(2));
    }
    written(&mut leader, NOW, 20);
    assert_eq!(leader.view().expect("a view").round.value.state, RoundState::Running);
    // when another failure in round 2 blames a peer
    says(&mut leader, "a", running(2));
    let again = merged(failed("peer", "connection reset"), &json!({ "round": 2 }));
    let mut wants = says(&mut leader, "b", again);
    if txn(&wants).is_some() {
        wants.extend(written(&mut leader, NOW, 30));
    }
    // then everybody is asked once more
    assert!(wants.iter().any(|want| matches!(want, LeaderOutput::Probe(number) if *number > 1)), "{wants:?}");
    assert_eq!(round(&scene, &wants), None);
}

#[test]
fn a_record_that_is_not_ours_is_warned_of_and_does_not_stop_a_leader() {
    // Given rubbish where a newcomer's record, and a member's tombstone, should be
    let scene = Scene::new().node("b", failed("own", "ValueError: boom"));
    let mut store = scene.store();
    store[4].push(rubbish(&scene.keys.node(&id("x"))));
    store[5].push(rubbish(&scene.keys.evicted(&id("a"))));
    let (leader, wants) = scene.led(store);
    // then a worker's failure is handled
    assert_eq!(round(&scene, &wants).map(|record| record.number), Some(2), "{wants:?}");
    // and each of them is named, in a warning that says what to do
    for key in [scene.keys.node(&id("x")), scene.keys.evicted(&id("a"))] {
        let about = |line: &str| line.contains(&key) && line.contains("delete it");
        let warned = |want: &LeaderOutput| matches!(want, LeaderOutput::Warn(line) if about(line));
        assert_eq!(wants.iter().filter(|want| warned(want)).count(), 1, "{key}: {wants:?}");
    }
    // and the tombstone still means what it is
    assert_eq!(leader.view().unwrap().roster.member(&id("a")).unwrap().evicted.unwrap().fate, Fate::Unknown);

    // Given rubbish where a member's rank should be, then that is damage
    let mut store = scene.store();
    store[6][1].value = b"rubbish".to_vec();
    let (_, wants) = scene.led(store);
    assert_eq!(round(&scene, &wants), None);
}

#[test]
fn a_refusal_by_the_store_is_logged_once_and_not_asked_for_five_times_a_second() {
    let (mut leader, _) = Scene::new().leader();
    written(&mut leader, NOW, 6);
    let (mut now, mut asked, mut warned) = (NOW, 0, 0);
    while let Some(at) = leader.deadline().filter(|at| *at < NOW + Duration::from_secs(20)) {
        now = now.max(at);
        let mut wants = leader.step(now, LeaderInput::Tick);
        if txn(&wants).is_some() {
            asked += 1;
            let refused = Err(StoreError::Denied { endpoints: "e".into(), cause: "permission denied".into() });
            wants.extend(leader.step(now, LeaderInput::Answered { sent: now, result: refused }));
        }
        warned += wants.iter().filter(|want| matches!(want, LeaderOutput::Warn(_))).count();
    }
    assert_eq!(warned, 1);
    assert!((2..=11).contains(&asked), "{asked}");
}

#[test]
fn pruning_ends_with_the_last_stale_round() {
    // Given the keys of more rounds than one transaction takes
    let mut scene = Scene::new();
    scene = scene.node("a", running(130)).node("b", running(130));
    scene.round["number"] = json!(130);
    scene.round["sealed"] = json!({ "number": 130, "plan": 2, "nodes": 2 });
    let mut store = scene.store();
    for key in &mut store[6] {
        key.key = key.key.replace("rounds/1/", "rounds/130/");
    }
    for number in 1..130 {
        store[6].push(kv(scene.keys.rank(number, Revision(2), &id("a")), json!({}), 3));
    }
    let (mut leader, mut wants) = scene.led(store);
    // when it prunes
    let mut pruned = BTreeSet::new();
    for revision in 10..20 {
        let Some(txn) = txn(&wants).filter(|txn| matches!(txn.then[..], [Op::DeletePrefix(..), ..])) else { break };
        assert!(txn.then.len() <= 128);
        pruned.extend(txn.then.iter().filter_map(|op| match op {
            Op::DeletePrefix(prefix) => Some(prefix.clone()),
            _ => None,
        }));
        wants = written(&mut leader, NOW, revision);
    }
    // then nothing is forgotten
    let all = (1..130).flat_map(|number| [scene.keys.ranks_of_round(number), scene.keys.barriers(number)]);
    assert_eq!(pruned, all.collect());
}

#[test]
fn tombstones_go_some_time_after_a_leader_first_saw_them() {
    // (twice the lease and the takeover delay)
    const STAYS: Duration = Duration::from_secs(2 * (10 + 60));
    // Given a round that runs fully, and tombstones of nodes that are no members, more than one transaction takes
    let scene = Scene::new();
    let mut store = scene.store();
    let stone = json!({ "round": 1, "fate": "dead", "reason": "it is gone" });
    let evicted = |number| scene.keys.evicted(&id(&format!("x{number}")));
    store[5] = (0..130).map(|number| kv(evicted(number), stone.clone(), 4)).collect();
    let (mut leader, wants) = scene.led(store);
    assert_eq!(txn(&wants), None);
    assert!(matches!(leader.stage, Stage::Idle { wake: Some(at) } if at <= NOW + STAYS), "{:?}", leader.stage);

    // then none goes before its time, and all go then
    let before = leader.step(NOW + (STAYS - Duration::from_secs(1)), LeaderInput::Tick);
    assert!(!deletes(&before).iter().any(|key| key.contains("/evicted/")), "{before:?}");
    let mut pruned = BTreeSet::new();
    let late = NOW + STAYS;
    let mut wants = leader.step(late, LeaderInput::Tick);
    for revision in 10..20 {
        if let Some(txn) = txn(&wants) {
            assert!(txn.then.len() <= 128);
        }
        pruned.extend(deletes(&wants).into_iter().filter(|key| key.contains("/evicted/")));
        wants = written(&mut leader, late, revision);
    }
    assert_eq!(pruned, (0..130).map(evicted).collect());
}

/// The keys that it wants deleted.
fn deletes(wants: &[LeaderOutput]) -> Vec<String> {
    let ops = txn(wants).into_iter().flat_map(|txn| &txn.then);
    ops.filter_map(|op| match op {
        Op::Delete(key) => Some(key.clone()),
        _ => None,
    })
    .collect()
}

#[test]
fn one_bad_record_does_not_stop_a_leader() {
    let failed = Scene::new().node("b", failed("own", "ValueError: boom"));
    let saved = json!({ "step": 7, "path": "/c/7", "digest": "d", "round": 1 });
    for (at, key, gone) in [
        (0, failed.keys.spec(), true),
        (0, failed.keys.spec(), false),
        (2, failed.keys.desired(), false),
        (3, failed.keys.checkpoint(), false),
    ] {
        // Given a bad record, and a leader that has read the job before, or not
        for read_before in [false, true] {
            let mut scene = Scene { round: failed.round.clone(), nodes: failed.nodes.clone(), ..Scene::new() };
            scene.round["checkpoint"] = saved.clone();
            let mut store = scene.store();
            store[at] = if gone { vec![] } else { vec![rubbish(&key)] };
            let (leader, mut wants) = match read_before {
                false => {
                    let leader = Leader::new(id("x"), scene.keys.clone(), Revision(5), NOW, 0);
                    let spec = serde_json::from_slice(&scene.store()[0][0].value).unwrap();
                    scene.led_by(leader.knowing(spec), store)
                }
                true => {
                    let (mut leader, _) = Scene::new().leader();
                    leader.step(
                        NOW,
                        LeaderInput::Watched(WatchUpdate::Snapshot { revision: Revision(6), values: vec![] }),
                    );
                    scene.led_by(leader, store)
                }
            };
            let mut leader = leader;
            // then it says so, and what to do
            let warned = |want: &LeaderOutput| matches!(want, LeaderOutput::Warn(line) if line.contains(&key));
            assert_eq!(wants.iter().filter(|want| warned(want)).count(), 1, "{key}, {read_before}: {wants:?}");
            // and writes the spec again, which newcomers need
            if at == 0 {
                let put = txn(&wants).unwrap().then.clone();
                assert_eq!(put, [Op::put(&key, scene.store()[0][0].value.clone())].map(|op| respelt(&op)), "{key}");
                wants = written(&mut leader, NOW, 7);
            }
            // and handles the failure
            assert_eq!(round(&scene, &wants).map(|record| record.number), Some(2), "{key}, {read_before}: {wants:?}");
        }
    }
    // Where no one knows from where training resumes, no round is sealed while workers may be at work
    let mut store = failed.store();
    store[3] = vec![rubbish(&failed.keys.checkpoint())];
    let (_, wants) = failed.led(store);
    assert!(matches!(&wants[..], [LeaderOutput::Warn(_)]), "{wants:?}");
}

#[test]
fn a_generation_without_rounds_ends_if_no_node_knows_where_training_resumes() {
    // Given nodes that wait for the first round, and rubbish where the checkpoint should be
    let mut scene = Scene::new();
    scene.round = json!({ "number": 1, "generation": 1, "state": "forming", "group_world_size": 0, "world_size": 0,
        "restarts": 0, "reason": "the job begins" });
    scene.nodes.iter_mut().for_each(|(_, says)| *says = json!({ "phase": "waiting" }));
    scene.ranks.clear();
    let mut store = scene.store();
    store[3] = vec![rubbish(&scene.keys.checkpoint())];

    // then the job fails with that as its cause, which names the key and what to do
    let (mut leader, wants) = scene.led(store.clone());
    assert_eq!(round(&scene, &wants).map(|record| record.state), Some(RoundState::Forming), "its own plan: {wants:?}");
    let ended = round(&scene, &written(&mut leader, NOW, 7)).expect("a result");
    assert_eq!(ended.state, RoundState::Failed);
    let cause = ended.cause.expect("a cause").message;
    assert!(cause.contains(&scene.keys.checkpoint()) && cause.contains("delete it to begin from nothing"), "{cause}");

    // but while an operator has paused it, it waits, and continues with what is written again
    scene.desired = json!({ "paused": true });
    store[2] = scene.store()[2].clone();
    let (mut leader, wants) = scene.led(store);
    assert!(round(&scene, &wants).is_none_or(|record| record.state == RoundState::Forming), "{wants:?}");
    let wants = written(&mut leader, NOW, 7);
    assert_eq!(round(&scene, &wants), None, "{wants:?}");
    let saved = json!({ "step": 7, "path": "/c/7", "digest": "d", "round": 1 });
    put(&mut leader, NOW, kv(scene.keys.checkpoint(), saved, 8));
    let wants = desired(&mut leader, &scene, NOW, 9, json!({}));
    assert_eq!(round(&scene, &wants).map(|record| record.state), Some(RoundState::Forming), "resumed: {wants:?}");
    let sealed = round(&scene, &written(&mut leader, NOW, 10)).expect("it continues");
    assert_eq!((sealed.state, sealed.checkpoint.map(|it| it.step)), (RoundState::Running, Some(7)));
}

/// A put of a spec in the words of its own record: the order of a test's JSON is another one.
fn respelt(op: &Op) -> Op {
    match op {
        Op::Put { key, value, .. } => {
            let spec: crate::job::Spec = serde_json::from_slice(value).unwrap();
            Op::put(key, serde_json::to_vec(&spec).unwrap())
        }
        op => op.clone(),
    }
}

#[test]
fn a_leader_reads_one_line_of_history_and_not_all() {
    let scene = Scene::new();
    let mut leader = Leader::new(id("x"), scene.keys.clone(), Revision(5), NOW, 0);
    let wants = leader.step(NOW, LeaderInput::Tick);
    let load = txn(&wants).unwrap();
    assert!(load.then.contains(&Op::last(scene.keys.events())));
    assert!(!load.then.contains(&Op::range(scene.keys.events())));
    // and continues after it
    let scene = Scene::new().node("b", failed("own", "ValueError: boom"));
    let mut store = scene.store();
    store[7] = vec![kv(scene.keys.event(41), json!({}), 4)];
    let (_, wants) = scene.led(store);
    let puts = |op: &Op| matches!(op, Op::Put { key, .. } if *key == scene.keys.event(42));
    assert!(txn(&wants).unwrap().then.iter().any(puts), "{wants:?}");
}

#[test]
fn a_member_whose_record_cannot_be_read_is_evicted() {
    // Given a forming round, and rubbish instead of what b said
    let waiting = json!({ "phase": "waiting", "round": 2 });
    let scene = Scene::forming(waiting.clone(), waiting);
    let mut store = scene.store();
    for kv in &mut store[4] {
        if kv.key == scene.keys.node(&id("b")) {
            (kv.value, kv.mod_revision) = (b"rubbish".to_vec(), Revision(6));
        }
    }
    let (mut leader, _) = scene.led(store);
    written(&mut leader, NOW, 7);
    // when b has not said in time that it stopped
    let late = NOW + Duration::from_secs(60);
    let wants = leader.step(late, LeaderInput::Tick);
    // then it is evicted if that is still there: a guard that never holds would keep the round from forming
    assert!(tombstone(&scene, &wants, "b").is_some(), "{wants:?}");
    let guard = Guard::modified(scene.keys.node(&id("b")), Revision(6));
    assert!(txn(&wants).is_some_and(|txn| txn.when.contains(&guard)), "{wants:?}");
}

#[test]
fn writes_that_never_hold_are_tried_with_pauses() {
    let scene = Scene::new().node("b", failed("own", "m"));
    let (mut leader, mut wants) = scene.leader();
    let mut tries = 0;
    while txn(&wants).is_some() && tries < 20 {
        let reads = txn(&wants).is_some_and(|txn| txn.when.len() == 1);
        let values = scene.store().into_iter().map(OpResult::Values).collect();
        let results = if reads { values } else { Vec::new() };
        let result = TxnResult { succeeded: reads, revision: Revision(6), results };
        wants = leader.step(NOW, LeaderInput::Answered { sent: NOW, result: Ok(result) });
        tries += usize::from(!reads);
    }
    // Some in a row may be in the way of others' writes.
    assert_eq!(tries, 4);
    assert_eq!(leader.deadline(), Some(NOW + Duration::from_millis(200)));
}
