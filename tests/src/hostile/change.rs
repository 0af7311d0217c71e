//! Changes of JSON that keep it JSON: numbers at their ends, values of another type, members gone. A change of bytes
//! seldom gets past the parser.

use serde_json::{Value, json};

/// What a value may be replaced with.
fn others() -> Vec<Value> {
    vec![
        json!(null),
        json!(0),
        json!(1),
        json!(-1),
        json!(u64::MAX),
        json!(i64::MIN),
        json!(u64::MAX / 2 + 1),
        json!(u32::MAX),
        json!(u32::MAX - 1),
        json!(1e300),
        json!(0.5),
        json!(""),
        json!("a:1"),
        json!("\u{0}\u{feff}/../"),
        json!("x".repeat(70_000)),
        json!("running"),
        json!("forming"),
        json!(true),
        json!([]),
        json!([null, {}, "a"]),
        json!({}),
        json!({ "number": u64::MAX, "plan": i64::MAX, "nodes": u32::MAX }),
    ]
}

/// The JSON after the changes that `choices` name: each byte a place, the next the change there.
pub fn of(mut value: Value, choices: &[u8]) -> Value {
    let others = others();
    for choice in choices.chunks_exact(2).take(8) {
        let places = count(&value);
        let mut place = usize::from(choice[0]) % places;
        let other = usize::from(choice[1]) % (others.len() + 1);
        change(&mut value, &mut place, others.get(other));
    }
    value
}

fn count(value: &Value) -> usize {
    1 + match value {
        Value::Array(values) => values.iter().map(count).sum::<usize>(),
        Value::Object(members) => members.values().map(count).sum::<usize>(),
        _ => 0,
    }
}

/// Replaces the value at this place, or removes it from what holds it.
fn change(value: &mut Value, place: &mut usize, other: Option<&Value>) -> bool {
    if *place == 0 {
        *value = other.cloned().unwrap_or_default();
        return true;
    }
    *place -= 1;
    match value {
        Value::Array(values) => values.iter_mut().any(|value| step(value, place, other)),
        Value::Object(members) => {
            let found = members.iter().position(|(_, member)| {
                let here = count(member);
                let inside = *place < here;
                if !inside {
                    *place -= here;
                }
                inside
            });
            let Some(name) = found.and_then(|at| members.keys().nth(at)).cloned() else { return false };
            if *place == 0 && other.is_none() {
                members.remove(&name);
                return true;
            }
            members.get_mut(&name).is_some_and(|member| change(member, place, other))
        }
        _ => false,
    }
}

fn step(value: &mut Value, place: &mut usize, other: Option<&Value>) -> bool {
    let here = count(value);
    if *place < here {
        return change(value, place, other);
    }
    *place -= here;
    false
}
