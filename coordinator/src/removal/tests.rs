//! Who may still be there, and whether that keeps a job: tables over records.

use super::*;
use elastic_rendezvous::job::samples;

const SPEC: &str = r#"{"protocol":1,"min_nodes":1,"max_nodes":2,"max_restarts":0,"exclude_after":0,"lease_ttl_ms":10000,
    "last_call_ms":1,"join_timeout_ms":1,"start_timeout_ms":1,"stop_grace_ms":1,"drain_grace_ms":1,"margin_ms":1,
    "takeover_delay_ms":600000,"min_round_time_ms":1}"#;
const ENDED: u64 = 50_000_000;
const RANK: &str = r#"{"group_rank":0,"first_rank":0,"slots":1,"role_rank_base":0,"role_world_size":1,"name":"a",
    "machine":"m","boot":"b","peer":{"host":"h","port":1}}"#;

fn node(phase: &str) -> String {
    format!(
        r#"{{"name":"d","incarnation":"1","machine":"m","boot":"b","host":"h","peer":{{"host":"h","port":9}},
            "slots":1,"role":"default","phase":"{phase}","round":2}}"#
    )
}

fn leader(coordinator: bool) -> String {
    format!(r#"{{"node":"x:1","peer":{{"host":"h","port":2}},"coordinator":{coordinator}}}"#)
}

fn tombstone(fate: &str) -> String {
    format!(r#"{{"round":2,"fate":"{fate}","reason":"r"}}"#)
}

fn id() -> JobId {
    "J".parse().unwrap()
}

/// A job whose last round, 2 of plan 7, had the nodes a:1 and b:1, with more keys, or others in the same place.
fn job(more: &[(&str, &str)]) -> (Job, Vec<KeyValue>) {
    let round = r#"{"number":2,"generation":1,"state":"failed","reason":"r","sealed":{"number":2,"plan":7,"nodes":2}}"#;
    let event = format!(r#"{{"at_ms":{ENDED},"round":2,"state":"failed","reason":"r"}}"#);
    let mut keys = BTreeMap::from([
        ("spec", SPEC),
        ("round", round),
        ("rounds/2/7/a:1", RANK),
        ("rounds/2/7/b:1", RANK),
        // An earlier plan's, and an earlier round's.
        ("rounds/2/6/old:1", RANK),
        ("rounds/1/3/older:1", RANK),
        ("events/000000000001", &event),
    ]);
    keys.extend(more.iter().copied());
    let stored = |(key, value): (&str, &str)| samples::stored(&format!("J/{key}"), value);
    let values: Vec<KeyValue> = keys.into_iter().filter(|(_, value)| !value.is_empty()).map(stored).collect();
    (Overview::of("/elastic", &values).jobs.remove(&id()).unwrap(), values)
}

/// Who is asked, or the error.
fn asked(more: &[(&str, &str)]) -> Result<(Vec<String>, u32), String> {
    let (job, values) = job(more);
    let suspects = suspects(&id(), &job, &values).map_err(|error| error.to_string())?;
    Ok((suspects.ask.keys().map(ToString::to_string).collect(), suspects.nameless))
}

#[test]
fn members_of_the_last_round_are_asked_and_one_that_lives_keeps_the_job() {
    let names = |names: &[&str], nameless| Ok((names.iter().map(ToString::to_string).collect(), nameless));
    assert_eq!(asked(&[]), names(&["a:1", "b:1"], 0));
    assert_eq!(asked(&[("nodes/d:1", &node("done"))]), names(&["a:1", "b:1", "d:1"], 0));
    assert_eq!(asked(&[("evicted/b:1", &tombstone("dead"))]), names(&["a:1"], 0));
    assert_eq!(asked(&[("evicted/b:1", &tombstone("unknown"))]), names(&["a:1", "b:1"], 0));
    assert_eq!(asked(&[("evicted/b:1", &tombstone("fenced"))]), names(&["a:1", "b:1"], 0), "a group may be cut off");
    assert_eq!(asked(&[("rounds/2/7/b:1", "")]), names(&["a:1"], 1), "a lost key is a member that no record names");
    assert_eq!(asked(&[("leader", &leader(true))]), names(&["a:1", "b:1"], 0), "a coordinator is no agent");
    assert_eq!(asked(&[("spec", "")]), names(&["a:1", "b:1"], 0));

    let refused = |more: &[(&str, &str)], wanted: &str| {
        let error = asked(more).unwrap_err();
        assert!(error.contains(wanted), "{more:?}: {error}");
    };
    for phase in ["waiting", "running", "failed", "draining", "stopped"] {
        refused(&[("nodes/d:1", &node(phase))], "agents of it are still there: d:1");
    }
    refused(&[("nodes/d:1", "no record of ours")], "still there: d:1");
    refused(&[("leader", &leader(false))], "still there: x:1");
    refused(&[("round", r#"{"number":2,"generation":1,"state":"running","reason":"r"}"#)], "J is running");
    refused(&[("round", r#"{"number":2,"generation":1,"state":"forming","reason":"r"}"#)], "J is forming");
    refused(&[("spec", &SPEC.replace(r#""protocol":1"#, r#""protocol":9"#))], "protocol version 9");
}

#[test]
fn ports_that_do_not_answer_are_waited_for() {
    const MINUTE: u64 = 60_000;
    let confirmed = |more: &[(&str, &str)], answers: &[(&str, Found)], nameless, minutes: u64| {
        let answers = answers.iter().map(|(node, found)| (NodeId::from_text(node), *found)).collect();
        let result = confirm(&id(), &job(more).0, answers, nameless, ENDED + minutes * MINUTE);
        result.map_err(|error| error.to_string())
    };
    let (gone, silent, here) = (("a:1", Found::Another), ("b:1", Found::Nobody), ("b:1", Found::Here));
    assert_eq!(confirmed(&[], &[gone], 0, 0), Ok(()), "a port that refuses needs no time");
    // takeover_delay is ten minutes, and clocks may differ by an hour.
    let error = confirmed(&[], &[gone, silent], 0, 69).unwrap_err();
    assert!(error.contains("on: b:1.") && error.contains("in 1 minutes"), "{error}");
    assert_eq!(confirmed(&[], &[gone, silent], 0, 70), Ok(()));
    let error = confirmed(&[], &[gone], 1, 69).unwrap_err();
    assert!(error.contains("1 nodes whose records are lost"), "{error}");
    assert_eq!(confirmed(&[], &[gone], 1, 70), Ok(()));
    let error = confirmed(&[], &[gone, here], 0, 1_000_000).unwrap_err();
    assert!(error.contains("agents of it are still there: b:1"), "no time helps: {error}");
    for lost in ["spec", "events/000000000001"] {
        let error = confirmed(&[(lost, "")], &[silent], 0, 1_000_000).unwrap_err();
        assert!(error.contains("is missing"), "{lost}: {error}");
    }
}
