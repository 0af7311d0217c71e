//! What a leader asks for, step by step, over records as a store would return them. The simulation plays whole
//! histories.

mod admission;
mod cost;
mod doubt;
mod exclusion;
mod growth;
mod history;
mod losses;
mod pause;
mod replicas;
mod rules;

use serde_json::{Value, json};

use super::*;
use crate::job::{JobId, RoundRecord, Tombstone};
use crate::kv::{Event, KeyValue, OpResult, WatchUpdate};

const NOW: Time = Time::from_millis(1_000_000);

/// A job whose round 1 runs with the nodes a and b.
struct Scene {
    keys: Keys,
    desired: Value,
    round: Value,
    nodes: Vec<(&'static str, Value)>,
    /// Whose rank keys of round 1 are there.
    ranks: Vec<&'static str>,
    fewest: usize,
    most: usize,
    last_call_ms: u64,
    min_round_time_ms: u64,
    policy: &'static str,
    exclude_after: u32,
    nodes_per_replica: u32,
}

impl Scene {
    fn new() -> Scene {
        let job: JobId = "J".parse().unwrap();
        let running = json!({ "phase": "running", "round": 1 });
        let nodes = vec![("a", running.clone()), ("b", running)];
        let round = json!({
            "number": 1, "generation": 1, "state": "running", "sealed": { "number": 1, "plan": 2 },
            "group_world_size": 2, "world_size": 2, "reason": "r",
        });
        let (keys, ranks) = (Keys::new("/elastic", &job), vec!["a", "b"]);
        let policy = "failures";
        Scene {
            keys,
            desired: json!({}),
            round,
            nodes,
            ranks,
            fewest: 1,
            most: 3,
            last_call_ms: 0,
            min_round_time_ms: 0,
            policy,
            exclude_after: 0,
            nodes_per_replica: 1,
        }
    }

    /// Round 2 is forming instead, and these nodes say this.
    fn forming(a: Value, b: Value) -> Scene {
        let mut scene = Scene::new().node("a", a).node("b", b);
        scene.round = json!({
            "number": 2, "generation": 1, "state": "forming", "sealed": { "number": 1, "plan": 2 }, "reason": "r",
        });
        scene
    }

    fn node(mut self, name: &'static str, says: Value) -> Scene {
        self.nodes.retain(|(other, _)| *other != name);
        self.nodes.push((name, says));
        self
    }

    /// The record of a node, as the store has it at this revision.
    fn record(&self, name: &'static str, revision: i64) -> KeyValue {
        let came = self.nodes.iter().position(|(other, _)| *other == name).unwrap();
        let says = &self.nodes[came].1;
        let own = json!({ "incarnation": "1", "host": name, "role": "default" });
        let key = self.keys.node(&id(name));
        KeyValue {
            create_revision: Revision(1 + came as i64),
            ..kv(key, merged(merged(about(name), &own), says), revision)
        }
    }

    /// A leader that has read the job, and what it wants then.
    fn leader(&self) -> (Leader, Vec<LeaderOutput>) {
        self.led(self.store())
    }

    /// What the store holds, as the leader reads it.
    fn store(&self) -> [Vec<KeyValue>; 8] {
        let kv = |key: String, value: Value| kv(key, value, 4);
        let spec = json!({
            "protocol": 1, "min_nodes": self.fewest, "max_nodes": self.most, "max_restarts": 3, "lease_ttl_ms": 10_000,
            "last_call_ms": self.last_call_ms, "join_timeout_ms": 60_000, "start_timeout_ms": 60_000,
            "stop_grace_ms": 1000, "drain_grace_ms": 30_000, "margin_ms": 1000, "takeover_delay_ms": 60_000,
            "min_round_time_ms": self.min_round_time_ms, "restart_policy": self.policy,
            "exclude_after": self.exclude_after, "nodes_per_replica": self.nodes_per_replica,
        });
        let ranks = self.ranks.iter().enumerate().map(|(rank, name)| {
            let place = json!({
                "group_rank": rank, "first_rank": rank, "role_rank_base": rank, "role_world_size": 2, "replica_since": 1,
            });
            kv(self.keys.rank(1, Revision(2), &id(name)), merged(about(name), &place))
        });
        [
            vec![kv(self.keys.spec(), spec)],
            vec![kv(self.keys.round(), self.round.clone())],
            vec![kv(self.keys.desired(), self.desired.clone())],
            vec![],
            self.nodes.iter().map(|(name, _)| self.record(name, 4)).collect(),
            vec![],
            ranks.collect(),
            vec![],
        ]
    }

    /// A leader that has read these results.
    fn led(&self, results: [Vec<KeyValue>; 8]) -> (Leader, Vec<LeaderOutput>) {
        let leader = Leader::new(NodeId::from_text("coordinator:1"), self.keys.clone(), Revision(5), NOW, 0);
        self.led_by(leader, results)
    }

    /// This leader, which has read these results, perhaps instead of what it read before.
    fn led_by(
        &self,
        mut leader: Leader,
        results: impl IntoIterator<Item = Vec<KeyValue>>,
    ) -> (Leader, Vec<LeaderOutput>) {
        if !leader.is_busy() {
            assert!(matches!(&leader.step(NOW, LeaderInput::Tick)[..], [LeaderOutput::Txn(_)]), "it reads the job");
        }
        let results = results.into_iter().map(OpResult::Values).collect();
        let result = TxnResult { succeeded: true, revision: Revision(6), results };
        let wants = leader.step(NOW, LeaderInput::Answered { sent: NOW, result: Ok(result) });
        (leader, wants)
    }
}

fn kv(key: String, value: Value, revision: i64) -> KeyValue {
    let (create_revision, mod_revision) = (Revision(3), Revision(revision));
    KeyValue { key, value: value.to_string().into_bytes(), create_revision, mod_revision, lease: None }
}

/// What all records of a node hold.
fn about(name: &str) -> Value {
    json!({ "name": name, "machine": name, "boot": "b", "lock": name, "slots": 1, "peer": { "host": "h", "port": 1 } })
}

fn merged(mut value: Value, with: &Value) -> Value {
    value.as_object_mut().unwrap().extend(with.as_object().unwrap().clone());
    value
}

fn id(name: &str) -> NodeId {
    NodeId::new(name, "1")
}

fn txn(wants: &[LeaderOutput]) -> Option<&Txn> {
    wants.iter().find_map(|output| match output {
        LeaderOutput::Txn(txn) => Some(txn),
        _ => None,
    })
}

/// The `round` record that it wants written.
fn round(scene: &Scene, wants: &[LeaderOutput]) -> Option<RoundRecord> {
    txn(wants)?.then.iter().find_map(|op| match op {
        Op::Put { key, value, .. } if *key == scene.keys.round() => serde_json::from_slice(value).ok(),
        _ => None,
    })
}

/// The tombstone that it wants written for a node.
fn tombstone(scene: &Scene, wants: &[LeaderOutput], name: &str) -> Option<Tombstone> {
    txn(wants)?.then.iter().find_map(|op| match op {
        Op::Put { key, value, .. } if *key == scene.keys.evicted(&id(name)) => serde_json::from_slice(value).ok(),
        _ => None,
    })
}

/// A member of round 1 that failed.
fn failed(class: &str, message: &str) -> Value {
    json!({ "phase": "failed", "round": 1, "failure": { "class": class, "message": message } })
}

fn running(round: u64) -> Value {
    json!({ "phase": "running", "round": round })
}

/// A member that waits for this round.
fn waits(round: u64) -> Value {
    json!({ "phase": "waiting", "round": round, "master": { "host": "h", "port": 2 } })
}

/// A key is written.
fn put(leader: &mut Leader, now: Time, kv: KeyValue) -> Vec<LeaderOutput> {
    leader.step(now, LeaderInput::Watched(WatchUpdate::Events(vec![Event::Put(kv)])))
}

/// What the operator desires arrives.
fn desired(leader: &mut Leader, scene: &Scene, now: Time, revision: i64, desired: Value) -> Vec<LeaderOutput> {
    put(leader, now, kv(scene.keys.desired(), desired, revision))
}

/// A node says this.
fn says(
    leader: &mut Leader,
    scene: Scene,
    now: Time,
    revision: i64,
    name: &'static str,
    says: Value,
) -> (Scene, Vec<LeaderOutput>) {
    let scene = scene.node(name, says);
    let wants = put(leader, now, scene.record(name, revision));
    (scene, wants)
}

/// a and b open their streams.
fn opened(leader: &mut Leader) {
    for node in ["a", "b"] {
        leader.step(NOW, LeaderInput::Opened(id(node)));
    }
}

/// These members beat, and have seen the leader's word of the same time.
fn heard(leader: &mut Leader, names: [&str; 2], at: Time) {
    for node in names {
        leader.step(at, LeaderInput::Heard { node: id(node), probe: 0, echo: Some(at) });
    }
}

/// Its transaction succeeds; what it wants then.
fn written(leader: &mut Leader, now: Time, revision: i64) -> Vec<LeaderOutput> {
    let result = TxnResult { succeeded: true, revision: Revision(revision), results: Vec::new() };
    leader.step(now, LeaderInput::Answered { sent: now, result: Ok(result) })
}

#[test]
fn when_everybody_has_left_no_later_leader_waits_for_them() {
    let stopped = json!({ "phase": "stopped", "round": 2 });
    let scene = Scene::forming(stopped.clone(), stopped.clone());
    let (mut leader, wants) = scene.leader();
    assert!(round(&scene, &wants).unwrap().sealed.is_some(), "found, it is written again first");
    let wants = written(&mut leader, NOW, 7);
    let record = round(&scene, &wants).unwrap();
    assert_eq!((record.number, record.state, record.sealed), (2, RoundState::Forming, None));
    let wants = written(&mut leader, NOW, 8);
    assert!(round(&scene, &wants).is_none(), "once is enough: {wants:?}");
    assert!(leader.view().unwrap().roster.size() == 0);

    // Given one that stays, the round is its
    let scene = Scene::forming(stopped, waits(2));
    let (mut leader, _) = scene.leader();
    let record = round(&scene, &written(&mut leader, NOW, 7)).unwrap();
    assert_eq!((record.state, record.group_world_size), (RoundState::Running, 1));
}

#[test]
fn a_round_s_store_is_for_its_members_alone_where_each_of_them_introduces_itself() {
    let says = |facts: Value| merged(waits(2), &facts);
    let introduces = json!({ "introduces": true });
    for (of_b, alone) in [(introduces.clone(), true), (json!({}), false)] {
        let scene = Scene::forming(says(introduces.clone()), says(of_b.clone()));
        let (mut leader, _) = scene.leader();
        let record = round(&scene, &written(&mut leader, NOW, 7)).unwrap();
        assert_eq!((record.state, record.members_only), (RoundState::Running, alone), "{of_b}");
    }
}

#[test]
fn a_leaving_node_has_its_own_grace() {
    let scene = Scene::forming(json!({ "phase": "draining", "round": 1 }), json!({ "phase": "running", "round": 1 }));
    let (mut leader, _) = scene.leader();
    opened(&mut leader);
    written(&mut leader, NOW, 7);
    let evicted = |wants: &[LeaderOutput]| -> Vec<&'static str> {
        let stones = txn(wants).map_or(&[][..], |txn| &txn.then);
        let has = |node: &str| stones.contains(&Op::delete(scene.keys.node(&id(node))));
        ["a", "b"].into_iter().filter(|node| has(node)).collect()
    };
    let late = NOW + Duration::from_millis(2500);
    assert_eq!(evicted(&leader.step(late, LeaderInput::Tick)), ["b"], "who restarts has stop_grace and margin");
    written(&mut leader, late, 8);
    let later = NOW + Duration::from_millis(31_500);
    assert_eq!(evicted(&leader.step(later, LeaderInput::Tick)), ["a"], "who leaves has drain_grace and margin");
}

#[test]
fn a_stream_that_opens_late_is_asked_the_probe_that_it_missed() {
    // Given a failure that blames a peer, at a leader whose members' streams are not there yet
    let scene = Scene::new().node("b", failed("peer", "connection reset"));
    let (mut leader, wants) = scene.leader();
    assert!(wants.contains(&LeaderOutput::Probe(1)));
    // when a's opens
    let wants = leader.step(NOW, LeaderInput::Opened(id("a")));
    // then it is asked again, and its answer settles the matter
    assert_eq!(wants, [LeaderOutput::Probe(1)]);
    let wants = leader.step(NOW, LeaderInput::Heard { node: id("a"), probe: 1, echo: None });
    let wrote = txn(&wants)
        .map(|txn| txn.then.iter().any(|op| matches!(op, Op::Put { key, .. } if *key == scene.keys.round())));
    assert_eq!(wrote, Some(true), "{wants:?}");
    // and one that opens after its answer is not
    assert!(!leader.step(NOW, LeaderInput::Opened(id("a"))).contains(&LeaderOutput::Probe(1)));
}

#[test]
fn a_node_asked_to_stop_with_its_worker_leaves_and_does_not_fail() {
    // Given a worker that a signal asked to stop, and one that lost it
    let signalled = failed("signalled", "signal 15 (SIGTERM)");
    let scene = Scene::new().node("b", signalled.clone()).node("a", failed("peer", "connection reset"));
    let (mut leader, wants) = scene.leader();
    assert_eq!((txn(&wants), leader.deadline()), (None, Some(NOW + Duration::from_millis(300))));

    // when its agent says within the pause that it leaves, then nothing is charged
    let scene = scene.node("b", json!({ "phase": "draining", "round": 1 }));
    let soon = NOW + Duration::from_millis(200);
    let wants = put(&mut leader, soon, scene.record("b", 7));
    let record = round(&scene, &wants).unwrap();
    assert_eq!((record.number, record.restarts, record.reason.as_str()), (2, 0, "b leaves"));

    // When it says nothing, then it is a failure, and the one that counts
    let scene = Scene::new().node("b", signalled);
    let (mut leader, _) = scene.leader();
    let wants = leader.step(NOW + Duration::from_millis(300), LeaderInput::Tick);
    let record = round(&scene, &wants).unwrap();
    assert_eq!((record.number, record.restarts), (2, 1));
}

#[test]
fn a_node_that_had_to_end_its_workers_explains_what_its_peers_say() {
    let lost = failed("lost", "its workers were killed at the fence point");
    let scene = Scene::new().node("b", lost).node("a", failed("peer", "connection reset"));
    let (_, wants) = scene.leader();
    let record = round(&scene, &wants).unwrap();
    assert_eq!((record.number, record.restarts), (2, 0), "a change of membership is free: {}", record.reason);
    assert!(record.reason.contains("fence point"), "{}", record.reason);
}

#[test]
fn a_drained_node_without_a_place_must_end_and_a_member_need_not() {
    let mut scene = Scene::new().node("c", json!({ "phase": "waiting" }));
    scene.desired = json!({ "drain": ["c"] });
    let (_, wants) = scene.leader();
    assert!(tombstone(&scene, &wants, "c").is_some_and(|stone| stone.drained && stone.refused), "{wants:?}");
    assert!(txn(&wants).expect("a transaction").then.contains(&Op::delete(scene.keys.node(&id("c")))));

    scene.desired = json!({ "drain": ["a"] });
    let (_, wants) = scene.leader();
    let forms = txn(&wants).expect("a transaction");
    assert!(!forms.then.iter().any(|op| matches!(op, Op::Put { key, .. } if key.contains("/evicted/"))), "{wants:?}");
    assert_eq!(round(&scene, &wants).unwrap().leaving, ["a"]);

    // Asked while the round is forming already, a new plan says it
    let mut scene =
        Scene::forming(json!({ "phase": "waiting", "round": 2 }), json!({ "phase": "waiting", "round": 2 }));
    scene.desired = json!({ "drain": ["b"] });
    let (_, wants) = scene.leader();
    assert_eq!(round(&scene, &wants).unwrap().leaving, ["b"]);
}

#[test]
fn who_comes_right_after_it_was_undrained_is_not_turned_away() {
    // Given that c is drained, and the word that it no longer is comes later than its own record does
    let mut scene = Scene::new();
    scene.desired = json!({ "drain": ["c"] });
    let (mut leader, _) = scene.leader();
    let (scene, wants) = says(&mut leader, scene, NOW, 8, "c", json!({ "phase": "waiting" }));
    let guard = |revision| Guard::modified(scene.keys.desired(), Revision(revision));
    let refusal = txn(&wants).expect("it is turned away by what is known");
    assert!(refusal.when.contains(&guard(4)), "only if that is still so: {refusal:?}");

    // when it is not, then the job is read again, and c takes part
    let vain = TxnResult { succeeded: false, revision: Revision(8), results: Vec::new() };
    leader.step(NOW, LeaderInput::Answered { sent: NOW, result: Ok(vain) });
    let undrained = Scene { desired: json!({}), ..scene };
    let (_, wants) = undrained.led_by(leader, undrained.store());
    assert_eq!(round(&undrained, &wants).unwrap().reason, "c joins");

    // Given that the watch tells of another wish first, then that one counts
    let (mut leader, _) = Scene { desired: json!({}), ..Scene::new() }.leader();
    desired(&mut leader, &undrained, NOW, 7, json!({ "drain": ["c"] }));
    let (scene, wants) = says(&mut leader, Scene::new(), NOW, 8, "c", json!({ "phase": "waiting" }));
    let guard = Guard::modified(scene.keys.desired(), Revision(7));
    assert!(txn(&wants).expect("a transaction").when.contains(&guard), "{wants:?}");
}

#[test]
fn a_node_that_lacks_workers_sits_a_round_out_where_the_others_are_enough() {
    let waits = |lacks: bool| merged(waits(2), &json!({ "warms_up": true, "lacks_workers": lacks }));
    let sealed = |scene: &Scene| {
        let (mut leader, _) = scene.leader();
        let record = round(scene, &written(&mut leader, NOW, 7)).unwrap();
        (record.state == RoundState::Running).then_some(record.group_world_size)
    };
    let with = |a: Value, b: Value| Scene::forming(a, b);
    assert_eq!(sealed(&with(waits(false), waits(true))), Some(1));
    assert_eq!(sealed(&with(waits(false), waits(false))), Some(2));

    assert_eq!(sealed(&with(waits(true), waits(true))), Some(2), "no node would stay");
    let few = Scene { fewest: 2, ..with(waits(false), waits(true)) };
    assert_eq!(sealed(&few), Some(2), "the others cannot continue without it");
    let strict = Scene { policy: "all", ..with(waits(false), waits(true)) };
    assert_eq!(sealed(&strict), Some(2), "its return would cost a restart");
    let newcomer = with(waits(true), waits(true)).node("c", json!({ "phase": "waiting" }));
    assert_eq!(sealed(&newcomer), Some(3), "a newcomer has nothing to continue with");
    let mut drained = with(waits(false), waits(true));
    drained.desired = json!({ "drain": ["a"] });
    drained.round["leaving"] = json!(["a"]);
    assert_eq!(sealed(&drained), Some(1), "the one that would stay leaves, and b is needed");
}
