use std::time::Duration;

use serde_json::json;

use super::*;

fn line(event: Value) -> Line {
    Line { at: Duration::ZERO, event }
}

fn begin(round: u64, step: u64) -> Line {
    line(json!({"event": "begin", "round": round, "step": step}))
}

fn step(round: u64, step: u64, samples: [u64; 3], loss: f64) -> Line {
    let [epoch, first, end] = samples;
    line(
        json!({"event": "step", "round": round, "step": step, "epoch": epoch, "first": first, "end": end, "loss": loss}),
    )
}

fn good() -> Vec<Line> {
    vec![
        begin(1, 0),
        step(1, 1, [0, 0, 5], 3.0),
        step(1, 2, [0, 5, 9], 2.0),
        line(json!({"event": "committed", "round": 1, "step": 2})),
        begin(2, 2),
        step(2, 3, [1, 0, 5], 1.0),
    ]
}

fn reference() -> Results {
    results(&good()).unwrap()
}

#[test]
fn a_run_that_continues_is_sound() {
    assert_eq!(training(&good(), &reference(), true, Keeps::Committed), []);
    // A step that was done again counts once.
    let mut again = good();
    again.push(begin(3, 2));
    again.push(step(3, 3, [1, 0, 5], 1.0));
    assert_eq!(training(&again, &reference(), true, Keeps::Committed), []);
}

#[test]
fn a_planned_stop_keeps_what_was_not_committed_too() {
    let mut again = good();
    again.push(begin(3, 2));
    assert_eq!(training(&again, &reference(), true, Keeps::Committed), []);
    let wrong = training(&again, &reference(), true, Keeps::All);
    assert!(matches!(&wrong[..], [Broken(text)] if text.contains("after step 2, and 3 was to be kept")), "{wrong:?}");
}

#[test]
fn each_fault_of_a_training_is_seen() {
    type Spoil = fn(&mut Vec<Line>);
    let spoils: [(&str, Spoil); 6] = [
        ("2 was to be kept", |lines| lines[4] = begin(2, 1)),
        ("another result", |lines| lines.extend([begin(3, 2), step(3, 3, [1, 0, 5], 1.5)])),
        ("not the undisturbed", |lines| lines[1] = step(1, 1, [0, 0, 5], 3.5)),
        ("begins with sample 6", |lines| lines[2] = step(1, 2, [0, 6, 9], 2.0)),
        ("begins after round", |lines| lines.extend([begin(1, 3)])),
        ("of round 1 after step", |lines| lines.push(step(1, 4, [1, 5, 9], 1.0))),
    ];
    for (expected, spoil) in spoils {
        let mut lines = good();
        spoil(&mut lines);
        let wrong = training(&lines, &reference(), true, Keeps::Committed);
        assert!(wrong.iter().any(|Broken(text)| text.contains(expected)), "{expected}: {wrong:?}");
    }
}

fn round(number: u64, state: &str, sealed: Option<(u64, i64)>, restarts: u32, nodes: u32) -> String {
    let sealed = sealed.map(|(number, plan)| json!({"number": number, "plan": plan, "nodes": nodes}));
    let mut value = json!({
        "number": number, "generation": 1, "state": state, "restarts": restarts, "reason": "",
        "group_world_size": nodes, "world_size": nodes,
    });
    if let Some(sealed) = sealed {
        value["sealed"] = sealed;
    }
    value.to_string()
}

fn rank(at: u32) -> String {
    json!({"group_rank": at, "first_rank": at, "slots": 1, "role_rank_base": at, "role_world_size": 2, "name": "a",
        "machine": "m", "boot": "b", "peer": {"host": "h", "port": 1}})
    .to_string()
}

fn node(phase: &str, round: u64) -> String {
    json!({"name": "a", "incarnation": "1", "machine": "m", "boot": "b", "host": "h",
        "peer": {"host": "h", "port": 1}, "slots": 1, "role": "default", "phase": phase, "round": round})
    .to_string()
}

/// Two nodes that train, and form a second round.
fn two_rounds() -> Vec<(i64, String, String)> {
    let key = |text: &str| text.to_owned();
    vec![
        (1, key("round"), round(1, "forming", None, 0, 0)),
        (2, key("rounds/1/1/a:1"), rank(0)),
        (2, key("rounds/1/1/b:1"), rank(1)),
        (2, key("round"), round(1, "running", Some((1, 1)), 0, 2)),
        (3, key("nodes/a:1"), node("running", 1)),
        (3, key("nodes/b:1"), node("running", 1)),
        (4, key("round"), round(2, "forming", Some((1, 1)), 1, 0)),
        (5, key("nodes/a:1"), node("waiting", 2)),
        (6, key("nodes/b:1"), node("waiting", 2)),
        (7, key("rounds/2/4/a:1"), rank(0)),
        (7, key("rounds/2/4/b:1"), rank(1)),
        (7, key("round"), round(2, "running", Some((2, 4)), 1, 2)),
    ]
}

fn judged(changes: &[(i64, String, String)]) -> Vec<Broken> {
    let change = |(revision, key, value): &(i64, String, String)| Change {
        at: Duration::ZERO,
        revision: *revision,
        key: key.clone(),
        value: Some(value.clone()),
    };
    rounds(&changes.iter().map(change).collect::<Vec<_>>())
}

#[test]
fn rounds_that_follow_each_other_are_sound() {
    assert_eq!(judged(&two_rounds()), []);
}

#[test]
fn each_fault_of_a_round_is_seen() {
    type Spoil = fn(&mut Vec<(i64, String, String)>);
    let spoils: [(&str, Spoil); 7] = [
        ("was at work", |changes| drop(changes.remove(8))),
        ("is left out", |changes| {
            let left_out = r#""faults":[{"node":"a","excluded":{"round":2,"lasts_ms":1}}],"generation""#;
            changes[11].2 = changes[11].2.replace(r#""generation""#, left_out);
        }),
        ("a hole", |changes| changes[10].2 = rank(2)),
        ("says 2 workers", |changes| drop(changes.remove(10))),
        ("a number falls", |changes| changes.push((8, "round".into(), round(1, "running", Some((1, 1)), 1, 2)))),
        ("sealed twice", |changes| changes.push((8, "round".into(), round(2, "running", Some((2, 4)), 1, 2)))),
        ("one by one", |changes| changes[6].2 = round(2, "forming", Some((1, 1)), 2, 0)),
    ];
    for (expected, spoil) in spoils {
        let mut changes = two_rounds();
        spoil(&mut changes);
        let wrong = judged(&changes);
        assert!(wrong.iter().any(|Broken(text)| text.contains(expected)), "{expected}: {wrong:?}");
    }
}

#[test]
fn a_result_that_is_written_over_is_seen() {
    let mut changes = two_rounds();
    changes.push((8, "round".into(), round(2, "succeeded", Some((2, 4)), 1, 2)));
    assert_eq!(judged(&changes), []);
    changes.push((9, "round".into(), round(2, "failed", Some((2, 4)), 1, 2)));
    assert!(judged(&changes)[0].0.contains("written over"));
}

#[test]
fn a_committed_step_that_falls_is_seen() {
    let commit = |revision, step: u64| Change {
        at: Duration::ZERO,
        revision,
        key: "checkpoint".into(),
        value: Some(json!({"step": step}).to_string()),
    };
    assert_eq!(commits(&[commit(1, 5), commit(2, 6)]), None);
    assert!(commits(&[commit(1, 5), commit(2, 5)]).is_some());
}
