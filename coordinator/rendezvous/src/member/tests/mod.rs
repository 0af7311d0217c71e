//! What a node does about records and stores that are not as they should be. The simulation plays whole histories.

mod campaigns;
mod joining;
mod rules;

use serde_json::{Value, json};

use super::*;
use crate::job::{JobId, JobSecret, Keys, NodeRecord};
use crate::kv::{Event, KeyValue, LeaseId, OpResult, Revision, StoreError, Txn, TxnResult, WatchUpdate};
use crate::member::timers::Timer;
use crate::time::Time;

const NOW: Time = Time::from_millis(100_000);

fn keys() -> Keys {
    let job: JobId = "J".parse().unwrap();
    Keys::new("/elastic", &job)
}

fn spec() -> Value {
    json!({
        "protocol": 1, "min_nodes": 1, "max_nodes": 3, "max_restarts": 3, "exclude_after": 0, "lease_ttl_ms": 10_000,
        "last_call_ms": 0,
        "join_timeout_ms": 60_000, "start_timeout_ms": 60_000, "stop_grace_ms": 1000, "drain_grace_ms": 30_000,
        "margin_ms": 1000, "takeover_delay_ms": 60_000, "min_round_time_ms": 0,
    })
}

fn kv(key: String, value: &str, created: i64, modified: i64, lease: Option<LeaseId>) -> KeyValue {
    let (create_revision, mod_revision) = (Revision(created), Revision(modified));
    KeyValue { key, value: value.as_bytes().to_vec(), create_revision, mod_revision, lease }
}

fn round(created: i64, modified: i64, record: Value) -> KeyValue {
    kv(keys().round(), &record.to_string(), created, modified, None)
}

fn forming() -> Value {
    json!({ "number": 1, "generation": 1, "state": "forming", "reason": "r" })
}

/// Its answer to a call: what was read there.
fn answer(call: Call, succeeded: bool, at: i64, read: Vec<Option<KeyValue>>) -> MemberInput {
    let results = read.into_iter().map(|value| OpResult::Values(value.into_iter().collect())).collect();
    let result = TxnResult { succeeded, revision: Revision(at), results };
    MemberInput::Answered { call, sent: NOW, result: Ok(result) }
}

fn setup() -> MemberSetup {
    let record: NodeRecord = serde_json::from_value(json!({
        "name": "a", "incarnation": "1", "machine": "a", "boot": "b", "host": "a", "slots": 1, "role": "default",
        "peer": { "host": "h", "port": 1 }, "phase": "waiting",
    }))
    .unwrap();
    MemberSetup {
        record,
        spec: serde_json::from_value(spec()).unwrap(),
        keys: keys(),
        secret: JobSecret::of([7; 32]),
        may_lead: true,
        seed: 1,
    }
}

/// A node that has joined, found this under `leader`, and has a lease; what it wanted meanwhile.
fn joined(leader: Option<KeyValue>) -> (Member, Vec<MemberOutput>) {
    joined_to(setup(), forming(), None, leader)
}

/// The same, of this node, where the round was this, and `desired` this.
fn joined_to(
    setup: MemberSetup,
    record: Value,
    desired: Option<KeyValue>,
    leader: Option<KeyValue>,
) -> (Member, Vec<MemberOutput>) {
    let mut member = Member::new(setup);
    let mut out = member.step(NOW, MemberInput::Tick);
    let spec = kv(keys().spec(), &spec().to_string(), 2, 2, None);
    let read = vec![Some(spec), Some(round(3, 3, record)), desired, leader];
    out.extend(member.step(NOW, answer(Call::Join, true, 10, read)));
    out.extend(member.step(NOW, MemberInput::Leased { sent: NOW, result: Ok(LeaseId(7)) }));
    (member, out)
}

fn campaign(out: &[MemberOutput]) -> Option<&Txn> {
    out.iter().find_map(|output| match output {
        MemberOutput::Txn(Call::Campaign, txn) => Some(txn),
        _ => None,
    })
}

/// The own record that it wants written.
fn own_record(out: &[MemberOutput]) -> Option<NodeRecord> {
    out.iter().find_map(|output| match output {
        MemberOutput::Txn(Call::Own, txn) => txn.then.iter().find_map(|op| match op {
            crate::kv::Op::Put { value, .. } => serde_json::from_slice(value).ok(),
            _ => None,
        }),
        _ => None,
    })
}

fn news(kv: KeyValue) -> MemberInput {
    MemberInput::Watched(WatchUpdate::Events(vec![Event::Put(kv)]))
}

/// Lets time pass until it campaigns; when that is, and what it has wanted.
fn until_it_campaigns(member: &mut Member, mut out: Vec<MemberOutput>) -> (Time, Vec<MemberOutput>) {
    let mut now = NOW;
    while campaign(&out).is_none() {
        now = member.deadline().expect("it campaigns");
        out.extend(member.step(now, MemberInput::Tick));
    }
    (now, out)
}

/// Round 1, with this node alone.
fn sealed_round() -> Value {
    json!({
        "number": 1, "generation": 1, "state": "running", "sealed": { "number": 1, "plan": 3, "nodes": 1 },
        "group_world_size": 1, "world_size": 1, "reason": "r",
    })
}

/// A node whose workers of round 1 run.
fn running() -> Member {
    running_in(setup(), sealed_round())
}

/// The same, of this node in this round.
fn running_in(setup: MemberSetup, sealed: Value) -> Member {
    placed(setup, sealed, None).0
}

/// The same, and the place that it got, where `desired` was this.
fn placed(setup: MemberSetup, sealed: Value, desired: Option<KeyValue>) -> (Member, Start) {
    let leader = json!({ "node": "b:1", "peer": { "host": "h", "port": 1 } }).to_string();
    let leader = || Some(kv(keys().leader(), &leader, 9, 9, Some(LeaseId(9))));
    let (mut member, _) = joined_to(setup, forming(), desired, leader());
    member.step(NOW, answer(Call::Own, true, 11, vec![Some(round(3, 3, forming())), leader()]));
    let sealed = || round(3, 12, sealed.clone());
    member.step(NOW, MemberInput::Watched(WatchUpdate::Events(vec![Event::Put(sealed())])));
    let rank = json!({
        "group_rank": 0, "first_rank": 0, "slots": 1, "role_rank_base": 0, "role_world_size": 1, "name": "a",
        "machine": "a", "boot": "b", "peer": { "host": "h", "port": 1 },
    });
    let rank = kv(keys().rank(1, Revision(3), &member.id()), &rank.to_string(), 12, 12, None);
    let out = member.step(NOW, answer(Call::Seat, true, 13, vec![Some(sealed()), Some(rank)]));
    let start = out
        .iter()
        .find_map(|output| if let MemberOutput::Agent(Command::Start(start)) = output { Some(start) } else { None });
    let start = start.unwrap_or_else(|| panic!("{out:?}"));
    member.step(NOW, GroupReport::Started(1).into());
    // It says that they run.
    member.step(NOW, answer(Call::Own, true, 14, vec![Some(sealed()), leader()]));
    (member, Start::clone(start))
}

#[test]
fn a_lease_proves_something_once_the_own_key_hangs_on_it() {
    // Given a node whose lease is over, and which has got another
    let mut member = running();
    let later = NOW + Duration::from_secs(4);
    let answers = |call, at, read| match answer(call, true, at, read) {
        MemberInput::Answered { call, result, .. } => MemberInput::Answered { call, sent: later, result },
        other => other,
    };
    let current = || Some(round(3, 12, sealed_round()));
    assert!(member.step(later, MemberInput::Tick).contains(&MemberOutput::Renew(LeaseId(7))));
    member.step(later, answers(Call::Own, 15, vec![current(), None]));
    member.step(later, MemberInput::Renewed { sent: later, lease: LeaseId(7), result: Ok(false) });
    member.step(later, MemberInput::Leased { sent: later, result: Ok(LeaseId(8)) });
    // then anyone who finds its key gone need not reckon with that lease,
    let out = member.step(later, answers(Call::ReadBack, 20, vec![current(), None, None, None]));
    assert!(out.iter().any(|output| matches!(output, MemberOutput::Txn(Call::Own, _))), "{out:?}");
    assert_eq!(member.proofs.leased, NOW);
    // until its key is there again
    member.step(later, answers(Call::Own, 21, vec![current(), None]));
    assert_eq!(member.proofs.leased, later);
}

#[test]
fn a_node_that_finds_another_life_of_its_job_kills_its_workers_at_once() {
    for (what, found) in [
        ("the job started again", Some(round(30, 30, forming()))),
        (
            "one that looks like its own",
            Some(round(
                30,
                31,
                json!({
                    "number": 1, "generation": 1, "state": "running", "sealed": { "number": 1, "plan": 30, "nodes": 1 },
                    "group_world_size": 1, "world_size": 1, "reason": "r",
                }),
            )),
        ),
        ("nothing", None),
    ] {
        // Given a node at work that was frozen, while its job's records were removed and history was compacted
        let mut member = running();
        let woken = NOW + Duration::from_secs(1);
        let snapshot = WatchUpdate::Snapshot { revision: Revision(40), values: vec![] };
        let out = member.step(woken, MemberInput::Watched(snapshot));
        assert!(out.iter().any(|output| matches!(output, MemberOutput::Txn(Call::ReadBack, _))), "{what}: {out:?}");
        // when it finds another life of the job, or none
        let out = member.step(woken, answer(Call::ReadBack, true, 40, vec![found, None, None, None]));
        // then its workers die, long before its fence point
        assert!(out.contains(&Command::Kill.into()), "{what}: {out:?}");
        let out = member.step(woken, GroupReport::Stopped { master: None }.into());
        let ends = |output: &MemberOutput| matches!(output, MemberOutput::End(End::StoreLost(_)));
        assert!(out.iter().any(ends), "{what}: {out:?}");
    }
}

#[test]
fn a_job_whose_records_go_back_in_time_is_of_a_restored_store() {
    let sealed = |number: u64| json!({ "number": number, "plan": 3, "nodes": 1 });
    let record = |number: u64, generation: u64, state: &str, of: u64| {
        let (state, sealed) = (json!(state), sealed(of));
        json!({ "number": number, "generation": generation, "state": state, "sealed": sealed, "reason": "r" })
    };
    let lost = |out: &[MemberOutput]| out.contains(&Command::Kill.into());
    for (what, event, is_lost) in [
        ("the next round", record(2, 1, "forming", 1), false),
        ("its own round forms once more", record(1, 1, "forming", 1), true),
        ("an earlier generation", record(2, 0, "forming", 1), true),
    ] {
        let out = running().step(NOW, news(round(3, 50, event)));
        assert_eq!(lost(&out), is_lost, "{what}: {out:?}");
    }
    // Given a watch that has told of a record at revision 20, when a read at a later one finds an older record
    for (at, is_lost) in [(19, false), (40, true)] {
        let mut member = running();
        member.step(NOW, news(round(3, 20, record(2, 1, "forming", 1))));
        member.step(NOW, MemberInput::Watched(WatchUpdate::Snapshot { revision: Revision(21), values: vec![] }));
        let old = round(3, 12, record(1, 1, "running", 1));
        let out = member.step(NOW, answer(Call::ReadBack, true, at, vec![Some(old), None, None, None]));
        assert_eq!(lost(&out), is_lost, "{at}: {out:?}");
    }
}

#[test]
fn a_pause_stops_workers_as_a_leave_does_and_the_node_stays() {
    let pauses = |number: u64, at: i64, paused: bool| {
        let forming = json!({
            "number": number, "generation": 1, "state": "forming", "sealed": { "number": 1, "plan": 3, "nodes": 1 },
            "reason": "r", "paused": paused,
        });
        news(round(3, at, forming))
    };
    let grace = Duration::from_secs(30);
    // Given workers at work, they get a signal and have the grace of a leave
    let mut member = running();
    let out = member.step(NOW, pauses(2, 15, true));
    let told =
        [Command::Leaving(grace), Command::Forming(2, "r".into()), Command::Stop(grace)].map(MemberOutput::Agent);
    let orders: Vec<_> = out.iter().filter(|output| told.contains(output)).cloned().collect();
    assert_eq!(orders, told, "{out:?}");
    assert!(!out.iter().any(|output| matches!(output, MemberOutput::Agent(Command::Quiesce(_)))), "{out:?}");
    // A checkpoint committed in the grace counts.
    assert_eq!(member.credentials().map(|by| by.round), Some(1));
    let out = member.step(NOW, GroupReport::Stopped { master: None }.into());
    assert_eq!(own_record(&out).map(|own| (own.phase, own.round)), Some((crate::job::Phase::Waiting, Some(2))));
    assert!(!member.is_over());

    // Given workers that have quiesced for a round, or do so now, when that one is paused, then they end too
    for at_rest in [true, false] {
        let mut member = running();
        let out = member.step(NOW, pauses(2, 15, false));
        assert!(out.iter().any(|output| matches!(output, MemberOutput::Agent(Command::Quiesce(_)))), "{out:?}");
        if at_rest {
            member.step(NOW, GroupReport::Quiesced { master: None, whole: true }.into());
        }
        let out = member.step(NOW, pauses(2, 16, true));
        assert!(out.contains(&Command::Stop(grace).into()), "{at_rest}: {out:?}");
        assert_eq!(out.contains(&Command::Leaving(grace).into()), !at_rest, "{out:?}");
    }
}

#[test]
fn a_newcomer_to_a_paused_job_ends_the_workers_that_it_has_started_ahead() {
    for warms_up in [true, false] {
        let mut setup = setup();
        setup.record.warms_up = warms_up;
        let mut member = Member::new(setup);
        member.step(NOW, MemberInput::Tick);
        let spec = kv(keys().spec(), &spec().to_string(), 2, 2, None);
        let mut paused = forming();
        paused["paused"] = json!(true);
        let out = member.step(NOW, answer(Call::Join, true, 10, vec![Some(spec), Some(round(3, 3, paused))]));
        assert_eq!(out.contains(&Command::Stop(Duration::from_secs(30)).into()), warms_up, "{out:?}");
        assert!(!out.iter().any(|output| matches!(output, MemberOutput::Agent(Command::Fence(Some(_))))), "{out:?}");
        assert_eq!(member.wanted().is_none(), warms_up);
    }
}

#[test]
fn workers_that_were_started_ahead_are_gone_before_their_node_takes_its_place() {
    // Given a node that waits for its first place, with workers, when its job is paused and resumed
    let mut setup = setup();
    setup.record.warms_up = true;
    let (mut member, _) = joined_to(setup, forming(), None, None);
    member.step(NOW, answer(Call::Own, true, 11, vec![Some(round(3, 3, forming())), None]));
    let mut paused = forming();
    paused["paused"] = json!(true);
    let out = member.step(NOW, news(round(3, 12, paused)));
    assert!(out.contains(&Command::Stop(Duration::from_secs(30)).into()), "{out:?}");
    let looks_up = |out: Vec<MemberOutput>| out.iter().any(|output| matches!(output, MemberOutput::Txn(Call::Seat, _)));
    // then it looks for its place once they are gone.
    assert!(!looks_up(member.step(NOW, news(round(3, 13, sealed_round())))));
    assert!(looks_up(member.step(NOW, GroupReport::Stopped { master: None }.into())));
}

#[test]
fn failed_calls_are_repeated_less_and_less_often_and_a_refusal_is_warned_of_once() {
    let away = StoreError::Unavailable { endpoints: "e".into(), cause: "away".into() };
    let denied = StoreError::Denied { endpoints: "e".into(), cause: "authentication failed".into() };
    for (error, asked, warned) in [(away, 10..=25, 0), (denied, 10..=20, 1)] {
        let mut member = running();
        let (mut renewals, mut warnings, mut pauses) = (0, 0, Vec::new());
        let end = NOW + Duration::from_secs(20);
        let mut now = NOW;
        while let Some(at) = member.deadline().filter(|at| *at < end) {
            now = now.max(at);
            for output in member.step(now, MemberInput::Tick) {
                let failed = match output {
                    MemberOutput::Renew(lease) => {
                        renewals += 1;
                        pauses.push(now);
                        MemberInput::Renewed { sent: now, lease, result: Err(error.clone()) }
                    }
                    MemberOutput::Txn(call, _) => MemberInput::Answered { call, sent: now, result: Err(error.clone()) },
                    MemberOutput::Warn(_) => {
                        warnings += 1;
                        continue;
                    }
                    _ => continue,
                };
                let out = member.step(now, failed);
                warnings += out.iter().filter(|output| matches!(output, MemberOutput::Warn(_))).count();
            }
        }
        assert!(asked.contains(&renewals), "{error}: {renewals} at {pauses:?}");
        assert_eq!(warnings, warned, "{error}");
    }
}

#[test]
fn a_node_of_a_larger_replica_tells_whether_it_keeps_its_workers() {
    for (rests, keeps) in [
        (MemberInput::Agent(GroupReport::Quiesced { master: None, whole: true }), true),
        (MemberInput::Agent(GroupReport::Quiesced { master: None, whole: false }), false),
        (MemberInput::Agent(GroupReport::Stopped { master: None }), false),
    ] {
        let mut member = running();
        member.spec.nodes_per_replica = 2;
        let forms = json!({
            "number": 2, "generation": 1, "state": "forming", "reason": "r",
            "sealed": { "number": 1, "plan": 3, "nodes": 1 },
        });
        member.step(NOW, news(round(3, 15, forms)));
        let out = member.step(NOW, rests.clone());
        assert_eq!(own_record(&out).map(|own| own.keeps_workers), Some(keeps), "{rests:?}");
    }
}

#[test]
fn a_node_whose_workers_died_starts_new_ones_while_the_others_go_on_and_keeps_those_that_live() {
    let record = |number: u64, at: i64, state: &str| {
        let plan = if state == "running" { (number, 20) } else { (1, 3) };
        let record = json!({
            "number": number, "generation": 1, "state": state, "reason": "r",
            "sealed": { "number": plan.0, "plan": plan.1, "nodes": 1 },
        });
        round(3, at, record)
    };
    let quiesced = |whole| MemberInput::Agent(GroupReport::Quiesced { master: None, whole });
    for (warms_up, rests, lacks) in [
        (true, quiesced(false), true),
        (true, MemberInput::Agent(GroupReport::Stopped { master: None }), true),
        (true, quiesced(true), false),
        (false, quiesced(false), false),
        (false, MemberInput::Agent(GroupReport::Stopped { master: None }), false),
    ] {
        // Given workers that come to rest for a round, or have died
        let mut member = running();
        member.setup.record.warms_up = warms_up;
        member.step(NOW, news(record(2, 15, "forming")));
        let has_workers = !matches!(rests, MemberInput::Agent(GroupReport::Stopped { .. }));
        let mut out = member.step(NOW, rests.clone());
        // then the node tells whether it lacks some; that it keeps them, only where replicas have several nodes
        assert_eq!(own_record(&out).map(|own| own.keeps_workers), Some(false));
        assert_eq!(own_record(&out).map(|own| own.lacks_workers), Some(lacks), "{warms_up} {rests:?}");
        member.step(NOW, answer(Call::Own, true, 16, vec![Some(record(2, 15, "forming")), None]));
        // When the round is sealed without it
        member.step(NOW, news(record(2, 21, "running")));
        out = member.step(NOW, answer(Call::Seat, true, 22, vec![Some(record(2, 21, "running")), None]));
        // then it starts new ones beside those that live, or ends these as it does without a place
        let warms = out.iter().any(|output| matches!(output, MemberOutput::Agent(Command::WarmUp { round: 2, .. })));
        let stops = out.iter().any(|output| matches!(output, MemberOutput::Agent(Command::Stop(_))));
        assert_eq!((warms, stops), (lacks, has_workers && !lacks), "{warms_up} {rests:?}: {out:?}");
        if lacks {
            // and wants a place like any newcomer once they are warm.
            member.step(NOW, answer(Call::Own, true, 23, vec![Some(record(2, 21, "running")), None]));
            member.step(NOW, quiesced(true));
            let wanted = member.wanted().map(|own| (own.phase, own.round, own.lacks_workers));
            assert_eq!(wanted, Some((crate::job::Phase::Waiting, None, false)));
        }
    }
}
