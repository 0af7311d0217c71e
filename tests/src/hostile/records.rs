//! Records of a job that a client of the store has changed. A leader, a node and an operator read them.

use std::sync::Arc;

use elastic_coordinator::operator::Operator;
use elastic_rendezvous::job::{JobId, JobSecret, Keys, NodeId};
use elastic_rendezvous::time::Time;
use elastic_rendezvous::{
    Command, GroupReport, Leader, LeaderInput, LeaderOutput, Member, MemberInput, MemberOutput, MemberSetup,
};
use elastic_store::embedded::MemoryStore;
use elastic_store::embedded::mvcc::Limits;
use elastic_store::{Event, KeyValue, LeaseId, Op, Revision, Store, Txn, WatchUpdate};
use serde_json::{Value, json};

use super::change;

const NOW: Time = Time::from_millis(100_000);

/// More steps than any record may cause while the test's clock does not move.
const MOST: usize = 60;

/// Runs a job with one changed record. The first byte chooses the record. The second says whether the other bytes are
/// its value or change a valid value.
pub fn play(bytes: &[u8]) {
    let [which, how, rest @ ..] = bytes else { return };
    let job: JobId = "J".parse().expect("an id");
    let keys = Keys::new("/elastic", &job);
    let mut records = records(&keys);
    let place = usize::from(*which) % records.len();
    let value = match how % 4 {
        0 => rest.to_vec(),
        _ => change::of(records[place].1.clone(), rest).to_string().into_bytes(),
    };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    runtime.block_on(async {
        // The changed record is there from the beginning; then it comes while all is well.
        for comes_late in [false, true] {
            let store: Arc<dyn Store> = Arc::new(MemoryStore::start(Limits::default()));
            let changed = (records[place].0.clone(), value.clone());
            for (key, valid) in &mut records {
                let first =
                    if !comes_late && *key == changed.0 { value.clone() } else { valid.to_string().into_bytes() };
                store.put(Vec::new(), Op::put(key.as_str(), first)).await.expect("a write");
            }
            let late = comes_late.then_some(changed);
            leads(&store, &keys, late.clone()).await;
            takes_part(&store, &keys, late).await;
            look(&store).await;
        }
    });
}

async fn put(store: &Arc<dyn Store>, (key, value): (String, Vec<u8>)) -> Option<KeyValue> {
    store.put(Vec::new(), Op::put(key.as_str(), value)).await.expect("a write");
    store.get(&key).await.expect("a read")
}

async fn leads(store: &Arc<dyn Store>, keys: &Keys, late: Option<(String, Vec<u8>)>) {
    let term = store.get(&keys.leader()).await.expect("a read").map_or(Revision::NONE, |leader| leader.mod_revision);
    let mut leader = Leader::new(NodeId::from_text("a:1"), keys.clone(), term, NOW, 0);
    let mut now = NOW;
    let wants = leader.step(now, LeaderInput::Tick);
    carry(store, &mut leader, now, wants).await;
    if let Some(changed) = late
        && let Some(kv) = put(store, changed).await
    {
        let wants = leader.step(now, LeaderInput::Watched(WatchUpdate::Events(vec![Event::Put(kv)])));
        carry(store, &mut leader, now, wants).await;
    }
    let b = NodeId::from_text("b:1");
    for input in [LeaderInput::Opened(b.clone()), LeaderInput::Closed(b.clone()), LeaderInput::Dead(b)] {
        let wants = leader.step(now, input);
        carry(store, &mut leader, now, wants).await;
    }
    for _ in 0..6 {
        let Some(at) = leader.deadline() else { break };
        now = now.max(at);
        let wants = leader.step(now, LeaderInput::Tick);
        carry(store, &mut leader, now, wants).await;
        let _said = leader.word(now, &NodeId::from_text("b:1"));
    }
}

async fn carry(store: &Arc<dyn Store>, leader: &mut Leader, now: Time, mut wants: Vec<LeaderOutput>) {
    for _ in 0..MOST {
        let Some(txn) =
            wants.into_iter().find_map(|want| if let LeaderOutput::Txn(txn) = want { Some(txn) } else { None })
        else {
            return;
        };
        let result = store.txn(txn).await;
        wants = leader.step(now, LeaderInput::Answered { sent: now, result });
    }
    panic!("the leader writes on and on: {wants:?}");
}

async fn takes_part(store: &Arc<dyn Store>, keys: &Keys, late: Option<(String, Vec<u8>)>) {
    let mut member = Member::new(setup(keys));
    let mut now = NOW;
    let wants = member.step(now, MemberInput::Tick);
    serve(store, &mut member, now, wants).await;
    if let Some(changed) = late
        && let Some(kv) = put(store, changed).await
    {
        let wants = member.step(now, MemberInput::Watched(WatchUpdate::Events(vec![Event::Put(kv)])));
        serve(store, &mut member, now, wants).await;
    }
    for _ in 0..6 {
        let Some(at) = member.deadline() else { break };
        now = now.max(at);
        let wants = member.step(now, MemberInput::Tick);
        serve(store, &mut member, now, wants).await;
    }
}

async fn serve(store: &Arc<dyn Store>, member: &mut Member, now: Time, wants: Vec<MemberOutput>) {
    let mut wants: std::collections::VecDeque<_> = wants.into();
    for _ in 0..MOST {
        let Some(want) = wants.pop_front() else { return };
        let input = match want {
            MemberOutput::Txn(call, txn) => {
                MemberInput::Answered { call, sent: now, result: store.txn(without_leases(txn)).await }
            }
            MemberOutput::Grant(_) => MemberInput::Leased { sent: now, result: Ok(LeaseId(7)) },
            MemberOutput::Renew(lease) => MemberInput::Renewed { sent: now, lease, result: Ok(true) },
            MemberOutput::Agent(Command::Start(start)) => MemberInput::Agent(GroupReport::Started(start.round.number)),
            MemberOutput::Agent(Command::Stop(_) | Command::Kill) => {
                MemberInput::Agent(GroupReport::Stopped { master: None })
            }
            MemberOutput::Agent(Command::Quiesce(_) | Command::WarmUp { .. }) => {
                MemberInput::Agent(GroupReport::Quiesced { master: None, whole: true })
            }
            _ => continue,
        };
        wants.extend(member.step(now, input));
    }
    panic!("the node asks on and on: {wants:?}");
}

/// Removes the leases from a transaction, since the store's leases run on another clock than the test.
fn without_leases(mut txn: Txn) -> Txn {
    for op in txn.then.iter_mut().chain(&mut txn.otherwise) {
        if let Op::Put { lease, .. } = op {
            *lease = None;
        }
    }
    txn
}

async fn look(store: &Arc<dyn Store>) {
    let operator = Operator::new(Arc::clone(store), "/elastic");
    if let Ok((jobs, _)) = operator.jobs().await {
        let _told = format!("{jobs:?}");
    }
    if let Ok((_, job, _)) = operator.job("J").await {
        let _told = format!("{job:?}");
    }
}

/// A node that may lead.
pub(super) fn setup(keys: &Keys) -> MemberSetup {
    MemberSetup {
        record: serde_json::from_value(node("c")).expect("a record"),
        spec: serde_json::from_value(spec()).expect("a spec"),
        keys: keys.clone(),
        secret: JobSecret::of([7; 32]),
        may_lead: true,
        seed: 1,
    }
}

fn spec() -> Value {
    json!({
        "protocol": 1, "min_nodes": 1, "max_nodes": 3, "max_restarts": 3, "lease_ttl_ms": 10_000, "last_call_ms": 0,
        "join_timeout_ms": 60_000, "start_timeout_ms": 60_000, "stop_grace_ms": 1000, "drain_grace_ms": 30_000,
        "margin_ms": 1000, "takeover_delay_ms": 60_000, "min_round_time_ms": 0, "restart_policy": "failures",
        "exclude_after": 2, "restarts_without_progress": 2,
    })
}

pub(super) fn node(name: &str) -> Value {
    json!({
        "name": name, "incarnation": "1", "machine": name, "boot": "b", "host": name, "slots": 2, "role": "default",
        "peer": { "host": "127.0.0.1", "port": 1 }, "phase": "running", "round": 4, "warms_up": true,
        "master": { "host": "127.0.0.1", "port": 2 }, "place": 1,
        "failure": { "class": "own", "message": "exit code 1", "exit_code": 1, "rank": 0, "step": 9, "at_ms": 5 },
    })
}

/// Every kind of record, each valid.
fn records(keys: &Keys) -> Vec<(String, Value)> {
    let round = json!({
        "number": 4, "generation": 1, "state": "running", "sealed": { "number": 4, "plan": 2, "nodes": 2 },
        "group_world_size": 2, "world_size": 4, "restarts": 1, "reason": "r",
        "advance": { "furthest_step": 7, "stalled_restarts": 1 },
        "faults": [{ "node": "b", "failures": 1, "exclusions": 1, "excluded": { "round": 4, "lasts_ms": 60_000 } }],
        "checkpoint": { "step": 5, "path": "/c", "digest": "d" }, "leaving": ["a"],
    });
    let rank = |at: u32, name: &str| {
        json!({
            "group_rank": at, "first_rank": at, "slots": 1, "role_rank_base": at, "role_world_size": 2, "name": name,
            "machine": name, "boot": "b", "peer": { "host": "127.0.0.1", "port": 1 }, "role": "default",
        })
    };
    let id = |name: &str| NodeId::new(name, "1");
    let plan = Revision(2);
    let mut failed = node("b");
    failed["phase"] = json!("failed");
    vec![
        (keys.spec(), spec()),
        (keys.round(), round),
        (keys.node(&id("a")), node("a")),
        (keys.node(&id("b")), failed),
        (keys.rank(4, plan, &id("a")), rank(0, "a")),
        (keys.rank(4, plan, &id("b")), rank(1, "b")),
        (
            keys.desired(),
            json!({ "max_nodes": 2, "drain": ["b"], "exclude": ["c"], "evict": ["b:1"], "paused": false }),
        ),
        (keys.leader(), json!({ "node": "a:1", "peer": { "host": "127.0.0.1", "port": 1 } })),
        (keys.checkpoint(), json!({ "step": 5, "path": "/c", "digest": "d", "round": 4 })),
        (keys.progress(), json!({ "round": 4, "step": 9, "loss": 0.5, "at_ms": 5 })),
        (keys.evicted(&id("b")), json!({ "round": 4, "fate": "dead", "reason": "r" })),
        (keys.secret(), json!(JobSecret::of([7; 32]))),
    ]
}
