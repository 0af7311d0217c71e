//! What an event costs a leader of many nodes, counted in records that it looks at. Times are not measured, since they
//! differ between machines.

use super::*;
use crate::roster::looks;

const NODES: usize = 2000;

/// Far less than the nodes there are.
const FEW: u64 = 40;

fn name(index: usize) -> String {
    format!("n{index:04}")
}

/// Node `index` says this, at this revision.
fn says(keys: &Keys, index: usize, revision: i64, value: Value) -> LeaderInput {
    let own = json!({ "incarnation": "1", "host": "h", "role": "default" });
    let record = merged(merged(about(&name(index)), &own), &value);
    let mut kv = kv(keys.node(&id(&name(index))), record, revision);
    kv.create_revision = Revision(10 + index as i64);
    LeaderInput::Watched(WatchUpdate::Events(vec![Event::Put(kv)]))
}

/// What an input costs, with the decision that it leads to, and what is wanted then.
fn cost(leader: &mut Leader, now: Time, input: LeaderInput) -> (u64, Vec<LeaderOutput>) {
    looks::take();
    let wants = leader.step(now, input);
    (looks::take(), wants)
}

/// Every transaction that it wants succeeds, until it wants none.
fn settle(leader: &mut Leader, now: Time, revision: &mut i64) {
    while leader.is_busy() {
        *revision += 1;
        written(leader, now, *revision);
    }
}

#[test]
fn an_event_costs_the_same_whether_nodes_are_few_or_many() {
    // Given a job of many nodes whose first round is forming
    let mut scene = Scene::new();
    scene.round = json!({ "number": 1, "generation": 1, "state": "forming", "reason": "r" });
    scene.nodes.clear();
    scene.ranks.clear();
    scene.most = NODES;
    scene.fewest = NODES;
    let (mut leader, _) = scene.leader();
    let mut revision = 10_000;
    settle(&mut leader, NOW, &mut revision);
    let mut now = NOW;
    let mut dearest: BTreeMap<&str, u64> = BTreeMap::new();
    let mut note = |what, cost: u64| {
        let dearest = dearest.entry(what).or_default();
        *dearest = cost.max(*dearest);
    };
    // when they come one by one,
    for index in 0..NODES {
        now = now + Duration::from_micros(100);
        revision += 1;
        let waits = json!({ "phase": "waiting", "master": { "host": "h", "port": 2 } });
        let (cost, wants) = cost(&mut leader, now, says(&scene.keys, index, revision, waits));
        match txn(&wants) {
            // The seal names them all.
            Some(_) => settle(&mut leader, now, &mut revision),
            None => note("a node comes", cost),
        }
    }
    assert_eq!(leader.view().expect("a view").round.value.state, RoundState::Running);
    // open their streams,
    for index in 0..NODES {
        let (cost, _) = cost(&mut leader, now, LeaderInput::Opened(id(&name(index))));
        note("a stream opens", cost);
    }
    // start their workers,
    for index in 0..NODES {
        revision += 1;
        let (cost, _) = cost(&mut leader, now, says(&scene.keys, index, revision, super::running(1)));
        note("a node runs", cost);
    }
    // beat,
    for index in 0..NODES {
        now = now + Duration::from_micros(100);
        let heard = LeaderInput::Heard { node: id(&name(index)), probe: 0, echo: Some(now) };
        let (cost, wants) = cost(&mut leader, now, heard);
        assert_eq!(wants, []);
        note("a beat", cost);
        looks::take();
        assert!(leader.word(now, &id(&name(index))).is_some());
        note("a word", looks::take());
    }
    // and stop for the next round after one of them failed
    revision += 1;
    let (cost_of_failure, wants) = cost(&mut leader, now, says(&scene.keys, 7, revision, failed("own", "m")));
    note("a node fails", cost_of_failure);
    assert!(txn(&wants).is_some());
    settle(&mut leader, now, &mut revision);
    for index in 0..NODES {
        revision += 1;
        let (cost, wants) = cost(&mut leader, now, says(&scene.keys, index, revision, waits(2)));
        match txn(&wants) {
            Some(_) => settle(&mut leader, now, &mut revision),
            None => note("a node stops", cost),
        }
    }
    let round = &leader.view().expect("a view").round.value;
    assert_eq!((round.number, round.state), (2, RoundState::Running));
    // then none of it checked more than a few of them
    assert!(dearest.values().all(|cost| *cost <= FEW), "{dearest:?}");
    assert_eq!(dearest["a word"], 2, "of the node that it is for: {dearest:?}");
    assert_eq!(dearest["a beat"], 1, "{dearest:?}");
}

/// A job of this many nodes whose first round runs, and that has none to spare.
fn running(nodes: usize) -> (Scene, Leader, i64) {
    running_of(nodes, nodes)
}

/// The same, where so many of them are enough.
fn running_of(nodes: usize, fewest: usize) -> (Scene, Leader, i64) {
    let (scene, mut leader, mut revision) = forming_of(nodes, fewest);
    for phase in ["waiting", "running"] {
        all_say(&scene, &mut leader, phase, nodes, &mut revision);
        leader.act(NOW);
        settle(&mut leader, NOW, &mut revision);
    }
    assert_eq!(leader.view().expect("a view").round.value.state, RoundState::Running);
    (scene, leader, revision)
}

/// All nodes say this, of the first round.
fn all_say(scene: &Scene, leader: &mut Leader, phase: &str, nodes: usize, revision: &mut i64) {
    for index in 0..nodes {
        *revision += 1;
        let round = (phase == "running").then_some(1);
        let says_so = json!({ "phase": phase, "round": round, "master": { "host": "h", "port": 2 } });
        leader.take(NOW, says(&scene.keys, index, *revision, says_so));
    }
}

/// A job for this many nodes, none of which is there yet.
fn forming_of(nodes: usize, fewest: usize) -> (Scene, Leader, i64) {
    let mut scene = Scene::new();
    scene.nodes.clear();
    scene.ranks.clear();
    scene.round = json!({ "number": 1, "generation": 1, "state": "forming", "reason": "r" });
    (scene.fewest, scene.most) = (fewest, nodes);
    let (mut leader, _) = scene.leader();
    let mut revision = 10_000;
    settle(&mut leader, NOW, &mut revision);
    (scene, leader, revision)
}

#[test]
fn a_round_is_sealed_only_while_the_rank_keys_written_before_are_there() {
    const NODES: usize = 250;
    let (scene, mut leader, mut revision) = forming_of(NODES, NODES);
    all_say(&scene, &mut leader, "waiting", NODES, &mut revision);
    let first_rank = |wants: &[LeaderOutput]| {
        let key = |op: &Op| if let Op::Put { key, .. } = op { key.clone() } else { panic!("{op:?}") };
        txn(wants).map(|txn| key(&txn.then[0])).expect("rank keys")
    };
    let first = leader.act(NOW);
    let second = written(&mut leader, NOW, 50_001);
    let last = written(&mut leader, NOW, 50_002);
    for (before, at, next) in [(&first, 50_001, &second), (&second, 50_002, &last)] {
        let guard = Guard::modified(first_rank(before), Revision(at));
        let next = txn(next).expect("rank keys, and the round with the last");
        assert!(next.when.contains(&guard), "{guard:?}: {:?}", next.when);
    }
    // Where the store has lost some, the job is read again and the plan is given up.
    let result = TxnResult { succeeded: false, revision: Revision(50_003), results: Vec::new() };
    let wants = leader.step(NOW, LeaderInput::Answered { sent: NOW, result: Ok(result) });
    assert!(txn(&wants).is_some_and(|txn| !txn.is_write()), "{wants:?}");
    assert!(!leader.view().expect("a view").planned_here);
}

#[test]
fn many_losses_write_the_round_once() {
    const LOST: usize = 120;
    // Given a job that runs, most of whose nodes die at once
    let (_, mut leader, mut revision) = running(LOST + 5);
    for index in 0..LOST {
        leader.take(NOW, LeaderInput::Dead(id(&name(index))));
    }
    // then they are evicted in as many transactions as that takes, and the round is written with the last
    let mut wants = leader.act(NOW);
    let (mut stones, mut written_at, mut count) = (0, Vec::new(), 0);
    while let Some(next) = txn(&wants) {
        let puts = |part: &str| {
            let put = |op: &&Op| matches!(op, Op::Put { key, .. } if key.contains(part));
            next.then.iter().filter(put).count()
        };
        assert!(next.then.len() <= 128 && next.when.len() <= 128, "etcd takes no more");
        stones += puts("/evicted/");
        written_at.extend((puts("/round") > 0).then_some(count));
        count += 1;
        revision += 1;
        wants = written(&mut leader, NOW, revision);
    }
    assert_eq!((stones, count, written_at), (LOST, 3, vec![2]));
    assert_eq!(leader.view().expect("a view").round.value.number, 2);
}

#[test]
fn members_lost_while_others_are_waited_for_are_evicted_by_one_plan() {
    const MEMBERS: usize = 60;
    const LOST: usize = 20;
    // Given a job whose next round forms
    let (scene, mut leader, mut revision) = running_of(MEMBERS, MEMBERS - LOST);
    revision += 1;
    leader.step(NOW, says(&scene.keys, MEMBERS - 1, revision, failed("own", "m")));
    settle(&mut leader, NOW, &mut revision);
    // when some die one by one, while the others stop
    for index in 0..LOST {
        assert_eq!(txn(&leader.step(NOW, LeaderInput::Dead(id(&name(index))))), None, "of {index}");
    }
    for index in LOST..MEMBERS - 1 {
        revision += 1;
        assert_eq!(txn(&leader.step(NOW, says(&scene.keys, index, revision, waits(2)))), None, "after {index}");
    }
    // then all of them are evicted by one plan, once the last of the others has stopped,
    revision += 1;
    let wants = leader.step(NOW, says(&scene.keys, MEMBERS - 1, revision, waits(2)));
    let stones = |op: &&Op| matches!(op, Op::Put { key, .. } if key.contains("/evicted/"));
    assert_eq!(txn(&wants).map(|txn| txn.then.iter().filter(stones).count()), Some(LOST));
    // and the round is sealed from that
    settle(&mut leader, NOW, &mut revision);
    let round = &leader.view().expect("a view").round.value;
    let size = (MEMBERS - LOST) as u32;
    assert_eq!((round.number, round.state, round.group_world_size), (2, RoundState::Running, size));
}

#[test]
fn a_leader_that_finds_members_evicted_while_their_round_runs_continues_from_there() {
    // Given a leader that died between two transactions of evictions
    let scene = Scene::new();
    let mut results = scene.store();
    results[4].retain(|kv| !kv.key.contains("/b:"));
    let stone = json!({ "round": 1, "fate": "fenced", "reason": "r", "refused": true });
    results[5].push(kv(scene.keys.evicted(&id("b")), stone, 5));
    // then its successor forms the next round at once, and leaves what the tombstone says
    let (_, wants) = scene.led(results);
    let record = round(&scene, &wants).expect("a round");
    assert_eq!(
        (record.number, record.state, record.reason.as_str()),
        (2, RoundState::Forming, "lost b: it was evicted")
    );
    assert!(
        !txn(&wants).expect("it").then.iter().any(|op| matches!(op, Op::Put { key, .. } if key.contains("/evicted/")))
    );
}

#[test]
fn newcomers_to_an_empty_job_cost_the_same_for_any_number_lost() {
    // Given a job whose next round forms, and whose members do not stop in time
    let (scene, mut leader, mut revision) = running(NODES);
    revision += 1;
    leader.step(NOW, says(&scene.keys, 7, revision, failed("own", "m")));
    settle(&mut leader, NOW, &mut revision);
    let late = NOW + Duration::from_millis(2500);
    leader.step(late, LeaderInput::Tick);
    settle(&mut leader, late, &mut revision);
    assert!(leader.view().expect("a view").roster.members().all(|(_, member)| member.evicted.is_some()));
    // when as many others come, one by one, and some claim a place of another's
    let mut dearest = 0;
    for index in NODES..2 * NODES {
        revision += 1;
        let place = (index % 200 < 2).then_some(index / 200);
        let waits = json!({ "phase": "waiting", "place": place, "master": { "host": "h", "port": 2 } });
        let (cost, _) = cost(&mut leader, late, says(&scene.keys, index, revision, waits));
        dearest = dearest.max(cost);
        settle(&mut leader, late, &mut revision);
    }
    assert!(dearest <= 3 * FEW, "{dearest}");
}

#[test]
fn one_decision_is_enough_for_all_that_came() {
    // Given members whose two failures come at once
    let scene = Scene::new();
    let (mut leader, _) = scene.leader();
    settle(&mut leader, NOW, &mut 10);
    for (at, (node, class)) in [("a", "peer"), ("b", "own")].into_iter().enumerate() {
        let event = Event::Put(Scene::new().node(node, failed(class, "m")).record(node, 20 + at as i64));
        let wants = leader.take(NOW, LeaderInput::Watched(WatchUpdate::Events(vec![event])));
        assert_eq!(wants, [], "nothing is decided yet");
    }
    // then the leader decides on both together, and no second time
    let record = round(&scene, &leader.act(NOW)).expect("a round");
    assert_eq!((record.number, record.reason.starts_with("b: m")), (2, true), "{}", record.reason);
    assert_eq!(leader.act(NOW), []);
}
