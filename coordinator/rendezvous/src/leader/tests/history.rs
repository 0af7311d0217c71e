//! The history, into which operators write too.

use super::*;

const LAST: u64 = 6;

/// A leader of a running round that has read the history's last line, under this key, and the key of the line that it
/// writes when b is to be drained by this record.
fn writes(last: &str, desired: Value) -> (String, Vec<Guard>) {
    let scene = Scene::new();
    let mut results = scene.store();
    results[7] = vec![kv(format!("{}{last}", scene.keys.events()), json!({}), 4)];
    let (mut leader, _) = scene.led(results);
    if leader.is_busy() {
        written(&mut leader, NOW, 7);
    }
    let wants = put(&mut leader, NOW, kv(scene.keys.desired(), desired, 9));
    let forms = txn(&wants).expect("b is drained");
    let line = forms.then.iter().find_map(|op| match op {
        Op::Put { key, .. } if key.starts_with(&scene.keys.events()) => Some(key.clone()),
        _ => None,
    });
    (line.expect("a line"), forms.when.clone())
}

fn drained(event: u64) -> Value {
    let by = json!({ "name": "anna", "via": "api" });
    json!({ "drain": ["b"], "asked": { "by": by, "at_ms": 1, "event": event } })
}

#[test]
fn a_leader_writes_its_line_after_the_operator_s() {
    let keys = Scene::new().keys;
    let last = format!("{LAST:012}");
    // Given a request whose line came with it, the leader's is the next
    let (line, guards) = writes(&last, drained(LAST + 1));
    assert_eq!(line, keys.event(LAST + 2));
    assert!(guards.contains(&Guard::absent(line)), "no line of others is written over");
    // Given a record that tells of an older line, of one far ahead, or of none
    for desired in [drained(LAST), drained(u64::MAX), json!({ "drain": ["b"] })] {
        assert_eq!(writes(&last, desired).0, keys.event(LAST + 1));
    }
}

#[test]
fn a_line_by_hand_does_not_stop_a_leader() {
    let keys = Scene::new().keys;
    let (line, guards) = writes("notes", json!({ "drain": ["b"] }));
    assert_eq!(line, keys.event(0));
    assert!(!guards.contains(&Guard::absent(line)), "it would never hold");
}
