//! Whether what a store's clients saw could have come from one store that does one thing at a time.
//!
//! The search is that of Wing and Gong ("Testing and Verifying Concurrent Objects", 1993) with Lowe's memo ("Testing for
//! linearizability", 2017), as Knossos and Porcupine have it. The unit is the whole store, not a key: its revision counts
//! the writes of all keys, and each answer names it. So an answered call fits in few places, and only calls whose outcome
//! no one knows make the search branch.

use std::collections::{BTreeMap, HashSet};

/// What a client asked of a key.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Action {
    /// Its value.
    Read,
    /// To write the value, or with `None` to delete the key: if it was last written at the revision of the guard, where
    /// zero says that it is not there.
    Write {
        /// The guard, if there is one.
        guard: Option<i64>,
        /// The value. No two writes of a history have the same.
        value: Option<u64>,
    },
}

/// The answer that it got.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Outcome {
    /// The store's revision, and the key's value with the revision of its last write.
    Found(i64, Option<(u64, i64)>),
    /// It was written at this revision. A delete of what is not there leaves the revision unchanged.
    Written(i64),
    /// The guard did not hold, at this revision.
    Refused(i64),
    /// Nothing that can be relied on. The write may be done at any later time, or never.
    Unknown,
}

/// A call of one client. Calls that certainly did nothing are in no history.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Call {
    /// The key.
    pub key: u8,
    /// What was asked.
    pub action: Action,
    /// What was answered.
    pub outcome: Outcome,
    /// When it was sent, by one clock for all clients.
    pub begun: u64,
    /// When the answer was there.
    pub ended: u64,
}

/// The store, as the model has it.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
struct Model {
    revision: i64,
    /// Value, and revision of the last write.
    keys: BTreeMap<u8, (u64, i64)>,
}

impl Model {
    /// The store after the call, if it could have answered like that.
    fn after(&self, call: &Call) -> Option<Model> {
        let held = self.keys.get(&call.key).copied();
        let Action::Write { guard, value } = call.action else {
            return (call.outcome == Outcome::Found(self.revision, held)).then(|| self.clone());
        };
        if guard.is_some_and(|guard| guard != held.map_or(0, |(_, modified)| modified)) {
            return (call.outcome == Outcome::Refused(self.revision)).then(|| self.clone());
        }
        let mut next = self.clone();
        if value.is_some() || held.is_some() {
            next.revision += 1;
        }
        match value {
            Some(value) => next.keys.insert(call.key, (value, next.revision)),
            None => next.keys.remove(&call.key),
        };
        match call.outcome {
            Outcome::Written(revision) => (revision == next.revision).then_some(next),
            // One that changes nothing is as good as one that is never done.
            Outcome::Unknown => (next != *self).then_some(next),
            _ => None,
        }
    }
}

/// Which calls are done.
#[derive(Clone, PartialEq, Eq, Hash)]
struct Done(Vec<u64>);

impl Done {
    fn has(&self, at: usize) -> bool {
        self.0[at / 64] >> (at % 64) & 1 == 1
    }

    fn flip(&mut self, at: usize) {
        self.0[at / 64] ^= 1 << (at % 64);
    }
}

/// A call that was put in order, and what else could have been in its place.
struct Step {
    before: Model,
    chosen: usize,
    others: Vec<usize>,
}

/// Puts all answered calls in an order that respects the times and gives the answers, beginning with no keys at
/// `revision`. The error shows the calls that fit nowhere; or that the search was given up after `most` steps, which
/// decides nothing.
pub fn check(mut history: Vec<Call>, revision: i64, most: usize) -> Result<(), String> {
    history.sort_by_key(|call| call.begun);
    let mut model = Model { revision, keys: BTreeMap::new() };
    let mut done = Done(vec![0; history.len().div_ceil(64)]);
    let mut left = history.iter().filter(|call| call.outcome != Outcome::Unknown).count();
    let mut seen: HashSet<(Done, Model)> = HashSet::new();
    let mut steps: Vec<Step> = Vec::new();
    let mut farthest = (left, done.clone(), model.clone());
    let mut candidates = next(&history, &done, &model);
    for _ in 0..most {
        if left == 0 {
            return Ok(());
        }
        if left < farthest.0 {
            farthest = (left, done.clone(), model.clone());
        }
        if let Some(chosen) = candidates.pop() {
            let after = model.after(&history[chosen]).expect("a candidate fits");
            done.flip(chosen);
            if seen.insert((done.clone(), after.clone())) {
                left -= usize::from(history[chosen].outcome != Outcome::Unknown);
                let others = std::mem::take(&mut candidates);
                steps.push(Step { before: std::mem::replace(&mut model, after), chosen, others });
                candidates = next(&history, &done, &model);
            } else {
                done.flip(chosen);
            }
        } else if let Some(step) = steps.pop() {
            done.flip(step.chosen);
            left += usize::from(history[step.chosen].outcome != Outcome::Unknown);
            (model, candidates) = (step.before, step.others);
        } else {
            let (left, done, model) = farthest;
            let open: Vec<_> = candidates_in_time(&history, &done).map(|at| &history[at]).collect();
            return Err(format!("{left} calls are left. The store is {model:?}, and of these none fits: {open:?}"));
        }
    }
    Err(format!("undecided after {most} steps"))
}

/// The calls that may come next and fit, the most likely last: one that was answered, and had its answer first.
fn next(history: &[Call], done: &Done, model: &Model) -> Vec<usize> {
    let mut fit: Vec<usize> =
        candidates_in_time(history, done).filter(|&at| model.after(&history[at]).is_some()).collect();
    fit.sort_by_key(|&at| {
        let unknown = history[at].outcome == Outcome::Unknown;
        std::cmp::Reverse((unknown, history[at].ended))
    });
    fit
}

/// The calls that began before any call that is left had its answer.
fn candidates_in_time<'a>(history: &'a [Call], done: &'a Done) -> impl Iterator<Item = usize> + 'a {
    let mut until = u64::MAX;
    for (at, call) in history.iter().enumerate() {
        if call.begun > until {
            break;
        }
        if !done.has(at) && call.outcome != Outcome::Unknown {
            until = until.min(call.ended);
        }
    }
    let in_time = history.iter().enumerate().take_while(move |(_, call)| call.begun <= until);
    in_time.map(|(at, _)| at).filter(|&at| !done.has(at))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn put(guard: Option<i64>, value: u64) -> Action {
        Action::Write { guard, value: Some(value) }
    }

    fn call(action: Action, outcome: Outcome, begun: u64, ended: u64) -> Call {
        Call { key: 0, action, outcome, begun, ended }
    }

    fn checked(history: &[Call]) -> Result<(), String> {
        check(history.to_vec(), 1, 100_000)
    }

    #[test]
    fn what_one_store_could_have_answered_passes() {
        use Action::Read;
        use Outcome::{Found, Refused, Unknown, Written};
        let delete = Action::Write { guard: None, value: None };
        for (what, history) in [
            ("nothing", vec![]),
            (
                "one after the other",
                vec![call(put(None, 7), Written(2), 0, 1), call(Read, Found(2, Some((7, 2))), 2, 3)],
            ),
            (
                "a read beside a write, before it",
                vec![call(put(None, 7), Written(2), 0, 9), call(Read, Found(1, None), 1, 8)],
            ),
            (
                "an unknown write is seen later",
                vec![
                    call(put(None, 7), Unknown, 0, 1),
                    call(Read, Found(1, None), 2, 3),
                    call(Read, Found(2, Some((7, 2))), 4, 5),
                ],
            ),
            (
                "an unknown write is never seen",
                vec![call(put(None, 7), Unknown, 0, 1), call(Read, Found(1, None), 2, 3)],
            ),
            (
                "two race, and one is refused",
                vec![call(put(Some(0), 7), Written(2), 0, 9), call(put(Some(0), 8), Refused(2), 0, 9)],
            ),
            (
                "deletes count if there was something",
                vec![
                    call(delete, Written(1), 0, 1),
                    call(put(None, 7), Written(2), 2, 3),
                    call(delete, Written(3), 4, 5),
                ],
            ),
        ] {
            assert_eq!(checked(&history), Ok(()), "{what}");
        }
    }

    #[test]
    fn what_no_store_could_have_answered_is_found() {
        use Action::Read;
        use Outcome::{Found, Refused, Unknown, Written};
        let written = call(put(None, 7), Written(2), 0, 1);
        for (what, history) in [
            ("a stale read", vec![written.clone(), call(Read, Found(1, None), 2, 3)]),
            ("a value from nowhere", vec![call(Read, Found(2, Some((7, 2))), 0, 1)]),
            (
                "a lost write",
                vec![written.clone(), call(put(None, 8), Written(3), 2, 3), call(Read, Found(3, Some((7, 2))), 4, 5)],
            ),
            (
                "a guard that held twice",
                vec![call(put(Some(0), 7), Written(2), 0, 9), call(put(Some(0), 8), Written(3), 0, 9)],
            ),
            ("a guard that was refused and held", vec![written.clone(), call(put(Some(2), 8), Refused(2), 2, 3)]),
            ("a write that was done twice", vec![written.clone(), call(Read, Found(3, Some((7, 3))), 2, 3)]),
            (
                "a read that goes back",
                vec![
                    call(put(None, 7), Written(2), 0, 9),
                    call(Read, Found(2, Some((7, 2))), 1, 2),
                    call(Read, Found(1, None), 3, 4),
                ],
            ),
            (
                "two writes at one revision",
                vec![call(put(None, 7), Written(2), 0, 9), call(put(None, 8), Written(2), 0, 9)],
            ),
            (
                "an unknown write before it was asked for",
                vec![call(Read, Found(2, Some((7, 2))), 0, 1), call(put(None, 7), Unknown, 2, 3)],
            ),
        ] {
            assert!(checked(&history).unwrap_err().contains("are left"), "{what}");
        }
    }

    proptest! {
        /// Calls of one store, each stretched around the moment in which it was done.
        #[test]
        fn calls_that_overlap_pass(plan in prop::collection::vec((0u8..3, 0u8..4, 1u64..40, 1u64..40, prop::bool::weighted(0.1)), 0..120)) {
            let mut model = Model { revision: 1, keys: BTreeMap::new() };
            let mut history = Vec::new();
            for (at, (key, kind, before, after, lost)) in plan.into_iter().enumerate() {
                let held = model.keys.get(&key).copied();
                let modified = held.map_or(0, |(_, modified)| modified);
                let value = (kind != 3).then_some(at as u64);
                let guard = (kind == 2).then_some(if before % 2 == 0 { modified } else { modified + 1 });
                let action = if kind == 0 { Action::Read } else { Action::Write { guard, value } };
                let moment = 100 + 10 * at as u64;
                let mut call = Call { key, action, outcome: Outcome::Unknown, begun: moment - before, ended: moment + after };
                let next = model.after(&call);
                let revision = next.as_ref().map_or(model.revision, |next| next.revision);
                call.outcome = match (action, guard) {
                    (Action::Read, _) => Outcome::Found(model.revision, held),
                    (_, Some(guard)) if guard != modified => Outcome::Refused(model.revision),
                    _ => Outcome::Written(revision),
                };
                if lost && kind != 0 {
                    call.outcome = Outcome::Unknown;
                }
                model = next.unwrap_or(model);
                history.push(call);
            }
            prop_assert_eq!(checked(&history), Ok(()));
        }
    }
}
