//! One term on a store, and the streams that come to it.

use serde_json::json;

use super::*;
use crate::pulse_proof::NONCE;
use crate::pulse_proof::{Meeting, Nonces, Side};
use elastic_rendezvous::job::{JobId, JobSecret, Keys};
use elastic_store::embedded::MemoryStore;
use elastic_store::embedded::mvcc::Limits;
use elastic_store::{Op, Txn};

type Notes = mpsc::UnboundedReceiver<LeaderNote>;

/// A term on a store that holds a job whose first round is forming, before its leader has read it.
async fn elected() -> (LeaderDrive, Notes) {
    elected_with(None).await
}

async fn elected_with(secret: Option<&JobSecret>) -> (LeaderDrive, Notes) {
    let job: JobId = "J".parse().unwrap();
    let keys = Keys::new("/elastic", &job);
    let spec = json!({
        "protocol": 1, "min_nodes": 2, "max_nodes": 3, "max_restarts": 3, "exclude_after": 0, "lease_ttl_ms": 10_000,
        "last_call_ms": 0, "join_timeout_ms": 60_000, "start_timeout_ms": 60_000, "stop_grace_ms": 1000,
        "drain_grace_ms": 30_000, "margin_ms": 1000, "takeover_delay_ms": 60_000, "min_round_time_ms": 0,
    });
    let round = json!({ "number": 1, "generation": 1, "state": "forming", "reason": "r" });
    let put = |key: String, value: serde_json::Value| Op::put(key, value.to_string());
    let store = MemoryStore::start(Limits::default());
    let node = json!({
        "name": "b", "incarnation": "1", "machine": "b", "boot": "b", "host": "b", "slots": 1, "role": "default",
        "peer": { "host": "b", "port": 1 }, "phase": "waiting",
    });
    let secret = secret.map(|secret| put(keys.secret(), json!(secret)));
    let mut begun = vec![
        put(keys.spec(), spec),
        put(keys.round(), round),
        put(keys.leader(), json!({})),
        put(keys.node(&NodeId::new("b", "1")), node),
    ];
    begun.extend(secret);
    let term = store.txn(Txn::of(begun)).await.unwrap().revision;
    let leader = Leader::new(NodeId::from_text("coordinator:1"), keys, term, elastic_store::clock::now(), 0);
    let (inbox, notes) = mpsc::unbounded_channel();
    (LeaderDrive::new(leader, Arc::new(store), inbox, None, Box::new(drop), None), notes)
}

async fn read(drive: &mut LeaderDrive, notes: &mut Notes) {
    while drive.word(elastic_store::clock::now(), &NodeId::from_text("b:1")).is_none() {
        let note = tokio::time::timeout(Duration::from_secs(10), notes.recv()).await.expect("it reads the job");
        drive.note(note.unwrap());
    }
}

fn told(drive: &mut LeaderDrive, stream: u64, event: PulseEvent) {
    let turn = Arc::new(tokio::sync::Semaphore::new(1)).try_acquire_owned().unwrap();
    drive.note(LeaderNote::Pulse { stream, event, turn });
}

/// Opens a stream in the name of the job's node.
fn open(drive: &mut LeaderDrive, stream: u64) -> watch::Receiver<LeaderMessage> {
    open_showing(drive, stream, None)
}

fn open_showing(drive: &mut LeaderDrive, stream: u64, shown: Option<Shown>) -> watch::Receiver<LeaderMessage> {
    let (answers, received) = watch::channel(LeaderMessage::default());
    told(drive, stream, PulseEvent::Opened { node: NodeId::new("b", "1"), shown, answers });
    received
}

fn nonces() -> Nonces {
    Nonces::of(&[1; NONCE], &[2; NONCE]).unwrap()
}

/// What the job's node shows who knows this secret.
fn shown(secret: &JobSecret) -> Shown {
    let (leader, member, nonces) = (NodeId::from_text("coordinator:1"), NodeId::new("b", "1"), nonces());
    let meeting = Meeting { job: "J", leader: &leader, member: &member, nonces: &nonces };
    Shown { job: "J".into(), proof: meeting.prove(Side::Member, secret), nonces }
}

fn opened(drive: &LeaderDrive) -> bool {
    let contact = drive.leader.view().and_then(|view| view.roster.contact(&NodeId::new("b", "1")).copied());
    contact.is_some_and(|contact| contact.opened.is_some())
}

fn beat(drive: &mut LeaderDrive, stream: u64, echo_ms: Option<u64>) {
    told(drive, stream, PulseEvent::Beat(Beat { seq: 1, probe: 0, echo_ms }));
}

#[tokio::test]
async fn a_beat_that_comes_before_the_job_is_read_is_answered_as_soon_as_it_is() {
    let (mut drive, mut notes) = elected().await;
    let received = open(&mut drive, 1);
    beat(&mut drive, 1, None);
    assert_eq!(received.borrow().answer, None);
    read(&mut drive, &mut notes).await;
    let contact = drive.leader.view().unwrap().roster.contact(&NodeId::new("b", "1")).copied();
    assert!(contact.is_some_and(|contact| contact.opened.is_some()));
    assert!(received.borrow().answer.is_some(), "the member waits for its next beat");
}

#[tokio::test]
async fn a_stream_that_answers_what_was_not_sent_on_it_is_ended() {
    let (mut drive, mut notes) = elected().await;
    read(&mut drive, &mut notes).await;
    let echoed =
        |drive: &LeaderDrive| drive.leader.view().unwrap().roster.contact(&NodeId::new("b", "1")).unwrap().echoed;
    // Given a member that answers what it is sent
    let mut own = open(&mut drive, 1);
    beat(&mut drive, 1, None);
    let sent_ms = own.borrow_and_update().answer.unwrap().sent_ms;
    beat(&mut drive, 1, Some(sent_ms));
    assert!(own.has_changed().unwrap());
    own.mark_unchanged();
    let known = echoed(&drive);
    assert_eq!(known, Some(Time::from_millis(sent_ms)));
    // when others speak in its name, with what this leader said to it, or will say
    for (stream, echo_ms) in [(2, sent_ms), (3, sent_ms + 1), (4, u64::MAX)] {
        let forged = open(&mut drive, stream);
        beat(&mut drive, stream, Some(echo_ms));
        // then they get no answer but the end
        assert!(forged.has_changed().is_err(), "{echo_ms}");
        assert_eq!(forged.borrow().answer, None, "{echo_ms}");
        assert_eq!(echoed(&drive), known, "{echo_ms}");
    }
    // and the member is answered as before
    beat(&mut drive, 1, Some(sent_ms));
    assert!(own.has_changed().unwrap());
}

#[tokio::test]
async fn a_stream_counts_if_it_shows_what_it_must_whether_it_comes_before_the_job_is_read_or_after() {
    let [secret, another] = [7, 8].map(|byte| JobSecret::of([byte; JobSecret::LENGTH]));
    for (what, of_job, shows, counts, answered) in [
        ("a proof", Some(&secret), Some(&secret), true, true),
        ("none", Some(&secret), None, false, false),
        ("a wrong one", Some(&secret), Some(&another), false, false),
        ("none, in a job without a secret", None, None, true, false),
        ("one, in a job without a secret", None, Some(&secret), true, false),
    ] {
        for early in [true, false] {
            let (mut drive, mut notes) = elected_with(of_job).await;
            let received = if early {
                let received = open_showing(&mut drive, 1, shows.map(shown));
                beat(&mut drive, 1, None);
                assert!(matches!(received.has_changed(), Ok(false)), "{what}: nothing is said before the job is read");
                read(&mut drive, &mut notes).await;
                received
            } else {
                read(&mut drive, &mut notes).await;
                let received = open_showing(&mut drive, 1, shows.map(shown));
                beat(&mut drive, 1, None);
                received
            };
            assert_eq!(opened(&drive), counts, "{what}, early: {early}");
            assert_eq!(received.has_changed().is_ok(), counts, "{what}, early: {early}: it is ended");
            let word = received.borrow().clone();
            assert_eq!(word.answer.is_some(), counts, "{what}, early: {early}");
            assert_eq!(!word.proof.is_empty(), answered, "{what}, early: {early}: the leader's own proof");
        }
    }
}

#[tokio::test]
async fn a_stream_that_is_turned_away_takes_nothing_from_the_node_s_own() {
    let secret = JobSecret::of([7; JobSecret::LENGTH]);
    let (mut drive, mut notes) = elected_with(Some(&secret)).await;
    read(&mut drive, &mut notes).await;
    let mut own = open_showing(&mut drive, 1, Some(shown(&secret)));
    for stream in 2..6 {
        assert!(open(&mut drive, stream).has_changed().is_err());
        beat(&mut drive, stream, None);
        told(&mut drive, stream, PulseEvent::Closed);
    }
    own.mark_unchanged();
    beat(&mut drive, 1, None);
    assert!(own.has_changed().unwrap(), "it is answered as before");
    assert_eq!((drive.streams.len(), drive.newest.len(), drive.strangers.len()), (1, 1, 0));
}

#[tokio::test]
async fn a_node_is_suspected_when_its_newest_stream_ends_whatever_has_become_of_an_older_one() {
    let (mut drive, mut notes) = elected_with(None).await;
    read(&mut drive, &mut notes).await;
    let [_broken_unheard, _replaced, _newest] = [1, 2, 3].map(|stream| open(&mut drive, stream));
    let suspected = |drive: &LeaderDrive| !drive.dialled.lock().unwrap().is_empty();
    told(&mut drive, 2, PulseEvent::Closed);
    assert!(!suspected(&drive));
    told(&mut drive, 3, PulseEvent::Closed);
    assert!(suspected(&drive));
}
