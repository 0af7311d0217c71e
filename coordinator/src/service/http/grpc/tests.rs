//! The messages against JSON. Records are written out in full here, so that one with a new field does not compile, and
//! with nothing that is a default: what either side does not tell is seen.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use elastic_proto::jobs as told;
use serde::Serialize;

use super::*;
use crate::service::http::messages::MESSAGE;
use crate::service::http::users::{Fingerprint, Role, User};
use elastic_rendezvous::job::overview::Job;
use elastic_rendezvous::job::{
    self, Advance, Asked, Checkpoint, Desired, Endpoint, EventRecord, Exclusion, FailedStart, Failure, FailureClass,
    Fate, Faults, JobId, JobProtocol, JobState, Keys, Killer, Killing, LeaderRecord, LostSoon, NodeId, NodeRecord,
    OnStoreLoss, Phase, ProgressRecord, Protocols, RankRecord, Release, Requester, RestartPolicy, RoundRecord,
    RoundState, Sealed, Spec, TakenBack, Timings, Tombstone, Versioned, Via,
};
use elastic_store::Revision;

fn endpoint() -> Endpoint {
    Endpoint { host: "h".into(), port: 7 }
}

fn release() -> Release {
    Release { version: "0.2".into(), protocols: Protocols { oldest: 1, newest: 2 } }
}

fn checkpoint() -> Checkpoint {
    Checkpoint { step: 9, path: "/c".into(), digest: "d:1".into(), round: 2 }
}

fn failure() -> Failure {
    Failure {
        class: FailureClass::Own,
        message: "boom".into(),
        rank: Some(1),
        local_rank: Some(2),
        pid: Some(3),
        exit_code: Some(-9),
        step: Some(4),
        core_dumped: true,
        killed_by: Some(Box::new(Killing { by: Killer::OomKillerBeside, evidence: "e".into() })),
        traceback: Some("t".into()),
        stderr: vec!["one".into(), "two".into()],
        at_start: true,
        permanent: true,
        at_ms: Some(5),
        host: Some("h".into()),
        node: Some(NodeId::from_text("a:1")),
    }
}

fn requester() -> Requester {
    Requester { name: "anna".into(), via: Via::Api }
}

fn spec() -> Spec {
    let time = Duration::from_secs;
    Spec {
        protocol: 1,
        release: Some(release()),
        min_nodes: 2,
        max_nodes: 3,
        nodes_per_replica: 8,
        max_restarts: 4,
        restarts_without_progress: Some(5),
        failed_starts: Some(7),
        exclude_after: 6,
        restart_policy: RestartPolicy::All,
        on_store_loss: OnStoreLoss::Fence,
        peer_tls: true,
        timings: Timings {
            lease_ttl: time(1),
            last_call: time(2),
            join_timeout: time(3),
            start_timeout: time(4),
            stop_grace: time(5),
            drain_grace: time(6),
            margin: time(7),
            takeover_delay: time(8),
            min_round_time: time(9),
        },
    }
}

fn round() -> RoundRecord {
    RoundRecord {
        number: 3,
        generation: 2,
        state: RoundState::Running,
        sealed: Some(Sealed { number: 3, plan: Revision(8), nodes: 1 }),
        group_world_size: 1,
        world_size: 2,
        master: Some(endpoint()),
        members_only: true,
        restarts: 1,
        advance: Advance {
            furthest_step: Some(9),
            stalled_restarts: 1,
            failed_start: Some(FailedStart { message: "m".into(), restarts: 2 }),
            lost: vec![LostSoon { node: "e".into(), rounds: 2 }],
        },
        faults: vec![Faults {
            node: "d".into(),
            failures: 1,
            exclusions: 2,
            excluded: Some(Exclusion { round: 3, lasts: Duration::from_secs(4) }),
        }],
        checkpoint: Some(checkpoint()),
        leaving: vec!["b".into()],
        paused: true,
        begins_generation: true,
        reason: "why".into(),
        cause: Some(failure()),
    }
}

/// A node that waits, though it has a place.
fn node() -> NodeRecord {
    NodeRecord {
        name: "a".into(),
        incarnation: "1".into(),
        machine: "m".into(),
        boot: "b".into(),
        host: "h".into(),
        peer: endpoint(),
        slots: 2,
        role: "default".into(),
        phase: Phase::Waiting,
        round: Some(3),
        failure: Some(failure()),
        master: Some(endpoint()),
        place: Some(4),
        warms_up: true,
        lacks_workers: true,
        keeps_workers: true,
        finished: true,
        introduces: true,
        release: Some(release()),
        command: None,
    }
}

fn rank() -> RankRecord {
    RankRecord {
        group_rank: 1,
        first_rank: 2,
        slots: 2,
        role_rank_base: 3,
        role_world_size: 4,
        name: "a".into(),
        machine: "m".into(),
        boot: "b".into(),
        peer: endpoint(),
        before: Some(NodeId::from_text("z:1")),
        replica_since: Some(2),
    }
}

fn event() -> EventRecord {
    EventRecord {
        at_ms: 1,
        round: 3,
        state: RoundState::Forming,
        reason: "r".into(),
        evicted: vec![NodeId::from_text("b:1")],
        asked_by: Some(requester()),
    }
}

fn versioned<T>(value: T) -> Versioned<T> {
    Versioned { value, created: Revision(5), modified: Revision(7) }
}

fn job(id: &JobId) -> Job {
    let (a, spare) = (NodeId::from_text("a:1"), NodeId::from_text("s:1"));
    let unplaced = NodeRecord { round: None, ..node() };
    Job {
        keys: Keys::new("/elastic", id),
        protocol: Some(JobProtocol { version: 1, release: Some(release()) }),
        spec: Some(spec()),
        desired: Some(versioned(Desired {
            min_nodes: Some(1),
            max_nodes: Some(8),
            closed: true,
            drain: vec!["b".into()],
            exclude: vec!["x".into()],
            include: vec![TakenBack { node: "d".into(), round: 2 }],
            evict: vec![NodeId::from_text("e:1")],
            paused: true,
            priority: -1,
            asked: Some(Asked { by: requester(), at_ms: 1, event: 2 }),
            // What a later release asks for has no message here.
            rest: serde_json::Map::new(),
        })),
        leader: Some(versioned(LeaderRecord {
            node: a.clone(),
            peer: endpoint(),
            coordinator: true,
            release: Some(release()),
        })),
        vacant: Revision::NONE,
        round: Some(versioned(round())),
        checkpoint: Some(versioned(checkpoint())),
        progress: Some(ProgressRecord {
            generation: 2,
            round: 3,
            step: 4,
            total_steps: Some(5),
            epoch: Some(6),
            loss: Some(0.7),
            steps_per_second: Some(0.8),
            furthest_step: 9,
            since_ms: 100,
            at_ms: 200,
            productive_ms: 70,
        }),
        nodes: BTreeMap::from([(a.clone(), versioned(node())), (spare, versioned(unplaced))]),
        ranks: BTreeMap::from([((3, Revision(8), a), rank())]),
        evicted: BTreeMap::from([(
            NodeId::from_text("e:1"),
            Tombstone { round: 1, fate: Fate::Dead, reason: "r".into(), refused: true, drained: true },
        )]),
        events: BTreeMap::from([(2, event())]),
        coming: BTreeMap::new(),
        changed: Revision(7),
    }
}

/// JSON, by way of the message, stays the same.
fn same<T: DeserializeOwned + Serialize>(before: Value) {
    let told: T = message(before.clone()).unwrap();
    assert_eq!(serde_json::to_value(&told).unwrap(), before);
}

#[test]
fn messages_tell_all_that_json_tells_and_json_all_that_they_do() {
    let id: JobId = "J".parse().unwrap();
    let job = job(&id);
    let mut whole = job::json::job(&id, &job);
    // The spare has no place.
    let spare = whole["nodes"].as_array_mut().unwrap().pop().unwrap();
    assert!(spare["record"]["failure"].is_object() && spare["rank"].is_null());
    same::<told::Job>(whole);
    same::<told::JobSummary>(job::json::summary(&id, &job));
    same::<told::Event>(job::json::event(2, &event()));
}

/// Each of an enum's values has one of the same name in the messages; a new one does not compile here.
macro_rules! same_names {
    ($name:ident: $($value:ident),+) => {
        let _ = |value: $name| match value { $($name::$value => ()),+ };
        for value in [$($name::$value),+] {
            let name = serde_json::to_value(value).unwrap();
            assert!(serde_json::from_value::<told::$name>(name.clone()).is_ok(), "{}: {name}", stringify!($name));
        }
    };
}

#[test]
fn messages_know_every_value_of_every_enum() {
    same_names!(JobState: Forming, Paused, Running, Succeeded, Failed, Closed);
    same_names!(RoundState: Forming, Running, Succeeded, Failed, Closed);
    same_names!(Phase: Waiting, Running, Done, Failed, Draining, Stopped);
    same_names!(FailureClass: Peer, Lost, Signalled, Own);
    same_names!(Killer: OomKiller, MaybeOomKiller, OomKillerBeside, Outside, Fault, Other);
    same_names!(RestartPolicy: Failures, All);
    same_names!(OnStoreLoss: Wait, Fence);
    same_names!(Via: Elasticctl, Api, Other);
    same_names!(Fate: Unknown, Fenced, Dead);
    same_names!(Role: Read, Operate);
}

#[test]
fn a_value_that_no_message_knows_does_not_hide_the_rest() {
    let event: told::Event = message(json!({ "number": 1, "state": "levitating", "reason": "r", "new": [1] })).unwrap();
    assert_eq!((event.number, event.state(), &event.reason[..]), (1, told::RoundState::Unspecified, "r"));
}

#[test]
fn every_wish_can_be_asked_for_and_what_is_missing_is_named() {
    let node = || "a".to_owned();
    let all = [
        WishMessage::Drain(told::Drain { node: node() }),
        WishMessage::Undrain(told::Undrain { node: node() }),
        WishMessage::Exclude(told::Exclude { node: node() }),
        WishMessage::Include(told::Include { node: node() }),
        WishMessage::Evict(told::Evict { node: node() }),
        WishMessage::Set(told::Set { min: None, max: Some(3), priority: Some(0) }),
        WishMessage::Pause(told::Pause {}),
        WishMessage::Resume(told::Resume {}),
        WishMessage::Close(told::Close {}),
    ];
    let mut missing =
        BTreeSet::from(["drain", "undrain", "exclude", "include", "evict", "set", "pause", "resume", "close"]);
    for asked in all {
        // A wish that can be asked for in one way alone does not compile here.
        let name = match wish(Some(asked.clone())).unwrap_or_else(|problem| panic!("{asked:?}: {problem:?}")) {
            Wish::Drain { .. } => "drain",
            Wish::Undrain { .. } => "undrain",
            Wish::Exclude { .. } => "exclude",
            Wish::Include { .. } => "include",
            Wish::Evict { .. } => "evict",
            Wish::Set { min: None, max: Some(3), priority: Some(0) } => "set",
            Wish::Set { .. } => panic!("what is not set stays unchanged"),
            Wish::Pause {} => "pause",
            Wish::Resume {} => "resume",
            Wish::Close {} => "close",
        };
        assert!(missing.remove(name), "{name}");
    }
    assert!(missing.is_empty(), "{missing:?}");
    for (asked, says) in
        [(None, "there is no wish"), (Some(WishMessage::Drain(told::Drain::default())), "drain: missing field `node`")]
    {
        let Problem(status, why) = wish(asked).unwrap_err();
        assert!(status == StatusCode::BAD_REQUEST && why.contains(says), "{status} {why}");
    }
}

#[test]
fn a_caller_learns_its_own_name_and_role() {
    let user = |jobs: Option<&[&str]>| {
        let jobs = jobs.map(|jobs| jobs.iter().map(|job| job.parse().unwrap()).collect());
        let sha256 = Fingerprint::of("t");
        Caller::User(User { name: "anna".into(), role: Role::Operate, jobs, sha256, expires_ms: None })
    };
    for (caller, name, role, all, jobs) in [
        (Caller::Anybody, None, told::Role::Read, true, vec![]),
        (user(None), Some("anna"), told::Role::Operate, true, vec![]),
        (user(Some(&["a"])), Some("anna"), told::Role::Operate, false, vec!["a"]),
    ] {
        let me = me(operations::me(&caller)).unwrap();
        assert_eq!(
            (me.name.as_deref(), me.role(), me.all_jobs, me.jobs),
            (name, role, all, jobs.iter().map(|job| (*job).to_owned()).collect())
        );
    }
}

#[test]
fn a_message_is_cut_before_clients_refuse_it() {
    let long = told::JobSummary { job: "j".repeat(MESSAGE / 4), ..told::JobSummary::default() };
    assert_eq!(fitting(&[long.clone(), long.clone(), long.clone(), long.clone(), long.clone()]), 3);
    let huge = told::JobSummary { job: "j".repeat(2 * MESSAGE), ..told::JobSummary::default() };
    assert_eq!((fitting(&[huge.clone(), huge]), fitting(&[long.clone(), long])), (1, 2));
}
