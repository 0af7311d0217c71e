//! Random requests of several clients, compared with a model that is as simple as possible: it keeps everything in
//! lists and searches them from the front. The answers must be the same, and in the end no byte of the budget may be
//! lost.

use std::collections::BTreeMap;

use proptest::prelude::*;

use crate::workers_store::budget::Account;
use crate::workers_store::state::{Client, Reply, State, Violation};
use crate::workers_store::wire::{Decoder, Request};

use super::{HELLO, request, string};

#[derive(Debug, Clone)]
enum Step {
    Say(u32, Vec<u8>),
    Leave(u32),
}

/// Few keys and few clients, so that they often collide.
fn step() -> impl Strategy<Value = Step> {
    let key = prop::sample::select(vec!["", "/a", "/b", "/c"]).prop_map(string);
    let keys = prop::collection::vec(prop::sample::select(vec!["", "/a", "/b", "/c"]), 0..4)
        .prop_map(|keys| [(keys.len() as u64).to_le_bytes().to_vec(), keys.iter().flat_map(string).collect()].concat());
    let value = prop_oneof![Just(Vec::new()), Just(b"3".to_vec()), Just(b" -4x".to_vec()), Just(vec![b'9'; 600])];
    let value = value.prop_map(string);
    let number = (-3_i64..4).prop_map(|n| n.to_le_bytes().to_vec());
    let one = (prop::sample::select(vec![3, 8, 15, 16]), key.clone()).prop_map(|(op, key)| request(op, &[&key]));
    let two = (prop::sample::select(vec![1, 9, 14]), key.clone(), value.clone())
        .prop_map(|(op, key, value)| request(op, &[&key, &value]));
    let compare = (key.clone(), value.clone(), value).prop_map(|(key, a, b)| request(2, &[&key, &a, &b]));
    let add = (prop::sample::select(vec![4, 18]), key, number).prop_map(|(op, key, n)| request(op, &[&key, &n]));
    let many = (prop::sample::select(vec![5, 6, 6, 10]), keys).prop_map(|(op, keys)| request(op, &[&keys]));
    let none = prop::sample::select(vec![7, 12]).prop_map(|op| request(op, &[]));
    let said = prop_oneof![one, two, compare, add, many, none];
    prop_oneof![
        20 => (0_u32..4, said).prop_map(|(client, said)| Step::Say(client, said)),
        1 => (0_u32..4).prop_map(Step::Leave),
    ]
}

#[derive(Default)]
struct Model {
    entries: BTreeMap<Vec<u8>, Vec<u8>>,
    queues: BTreeMap<Vec<u8>, Vec<Vec<u8>>>,
    /// Clients that wait, in order of arrival, and the keys they wait for.
    waits: Vec<(u32, Vec<Vec<u8>>)>,
}

/// The client that an answer goes to, and the answer's bytes.
type Said = (u32, Vec<u8>);

impl Model {
    fn has(&self, key: &[u8]) -> bool {
        self.entries.contains_key(key) || self.queues.get(key).is_some_and(|queue| !queue.is_empty())
    }

    fn set(&mut self, key: &[u8], value: Vec<u8>, said: &mut Vec<Said>) {
        self.entries.insert(key.to_vec(), value);
        self.wake(key, usize::MAX, said);
    }

    /// Removes the key from the waits until `most` clients may continue.
    fn wake(&mut self, key: &[u8], most: usize, said: &mut Vec<Said>) {
        let mut woken = 0;
        for (client, keys) in &mut self.waits {
            if woken == most || !keys.iter().any(|awaited| awaited == key) {
                continue;
            }
            keys.retain(|awaited| awaited != key);
            if keys.is_empty() {
                woken += 1;
                said.push((*client, vec![0]));
            }
        }
        self.waits.retain(|(_, keys)| !keys.is_empty());
    }

    fn wait(&mut self, client: u32, keys: Vec<Vec<u8>>) {
        self.waits.retain(|(other, _)| *other != client);
        self.waits.push((client, keys));
    }

    /// Reads a number as C does. `None` if there is none.
    fn number(&self, key: &[u8]) -> Option<i64> {
        match self.entries.get(key).map(Vec::as_slice) {
            None => Some(0),
            Some(b"") => None,
            Some(text) => {
                let text = String::from_utf8_lossy(text).replace(['x', ' '], " ");
                text.split_whitespace().next()?.parse().ok()
            }
        }
    }

    /// `None`: the connection must be closed.
    fn apply(&mut self, client: u32, request: Request<'_>) -> Option<Vec<Said>> {
        let mut said = Vec::new();
        let int = |n: i64| (client, n.to_le_bytes().to_vec());
        match request {
            Request::Set { key, value } => self.set(key, value.to_vec(), &mut said),
            Request::CompareSet { key, expected, desired } => {
                if self.entries.get(key).map_or(&[][..], |value| value) == expected {
                    self.set(key, desired.to_vec(), &mut said);
                }
                said.push((client, string(self.entries.get(key).map_or(expected, |value| value))));
            }
            Request::Get { key } => said.push((client, string(self.entries.get(key).cloned().unwrap_or_default()))),
            Request::Add { key, amount } => {
                let sum = self.number(key)?.checked_add(amount)?;
                said.push(int(sum));
                self.set(key, sum.to_string().into_bytes(), &mut said);
            }
            Request::Check { keys } => {
                said.push((client, vec![u8::from(!keys.iter().all(|key| self.has(key)))]));
            }
            Request::Wait { keys } => {
                let mut missing: Vec<Vec<u8>> = keys.iter().filter(|key| !self.has(key)).map(<[u8]>::to_vec).collect();
                missing.dedup();
                if missing.is_empty() { said.push((client, vec![0])) } else { self.wait(client, missing) }
            }
            Request::CancelWait => {
                self.waits.retain(|(other, _)| *other != client);
                said.push((client, vec![1]));
            }
            Request::NumKeys => said.push(int(self.entries.len() as i64)),
            Request::Delete { key } => said.push(int(self.entries.remove(key).is_some().into())),
            Request::Append { key, value } => {
                let mut whole = self.entries.get(key).cloned().unwrap_or_default();
                whole.extend_from_slice(value);
                self.set(key, whole, &mut said);
            }
            Request::MultiGet { keys } => {
                let all = keys.iter().flat_map(|key| string(self.entries.get(key).cloned().unwrap_or_default()));
                said.push((client, all.collect()));
            }
            Request::QueuePush { key, value } => {
                self.queues.entry(key.to_vec()).or_default().push(value.to_vec());
                self.wake(key, 1, &mut said);
            }
            Request::QueuePop { key } => {
                let queue = self.queues.entry(key.to_vec()).or_default();
                said.push(int(queue.len() as i64));
                if !queue.is_empty() {
                    said.push((client, string(queue.remove(0))));
                }
            }
            Request::QueueLen { key } => said.push(int(self.queues.get(key).map_or(0, Vec::len) as i64)),
            Request::Barrier { key, world } => {
                let count = self.number(key)?.checked_add(1)?;
                self.entries.insert(key.to_vec(), count.to_string().into_bytes());
                if count >= world {
                    said.push((client, vec![0]));
                    self.wake(key, usize::MAX, &mut said);
                } else {
                    self.wait(client, vec![key.to_vec()]);
                }
            }
            Request::Ping { .. } | Request::MultiSet { .. } | Request::ListKeys => unreachable!("not among the steps"),
        }
        Some(said)
    }
}

fn bytes(reply: Reply) -> Vec<u8> {
    match reply {
        Reply::Byte(byte) => vec![byte],
        Reply::U32(number) => number.to_le_bytes().to_vec(),
        Reply::I64(number) => number.to_le_bytes().to_vec(),
        Reply::Value(value) => string(value.bytes()),
        Reply::Key(key) => string(&key),
    }
}

/// What each client receives, in order.
fn by_client(said: impl IntoIterator<Item = Said>) -> BTreeMap<u32, Vec<u8>> {
    let mut heard: BTreeMap<u32, Vec<u8>> = BTreeMap::new();
    for (client, bytes) in said.into_iter().filter(|(_, bytes)| !bytes.is_empty()) {
        heard.entry(client).or_default().extend(bytes);
    }
    heard
}

/// Decodes one request from its bytes.
fn with_request<T>(said: &[u8], mut act: impl FnMut(Request<'_>) -> T) -> T {
    let mut result = None;
    let whole = [&HELLO[..], said].concat();
    Decoder::default()
        .feed::<Violation>(&whole, |request| {
            result = Some(act(request));
            Ok(())
        })
        .unwrap();
    result.unwrap()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]
    #[test]
    fn the_store_answers_as_the_model_does(steps in prop::collection::vec(step(), 1..60)) {
        let account = Account::new(1 << 20);
        let mut state = State::new(account.clone());
        let mut model = Model::default();
        for step in &steps {
            match step {
                Step::Leave(client) => {
                    state.cancel(Client(*client));
                    model.waits.retain(|(other, _)| other != client);
                }
                Step::Say(client, said) => {
                    let mut heard = Vec::new();
                    let result = with_request(said, |request| {
                        state.apply(Client(*client), request, &mut |to, reply| heard.push((to.0, bytes(reply))))
                    });
                    let expected = with_request(said, |request| model.apply(*client, request));
                    prop_assert_eq!(result.is_ok(), expected.is_some(), "{:?}", result);
                    prop_assert_eq!(by_client(heard), by_client(expected.unwrap_or_default()));
                }
            }
        }
        for key in model.entries.keys() {
            state.apply(Client(9), Request::Delete { key }, &mut |_, _| {}).unwrap();
        }
        for (key, values) in &model.queues {
            for _ in values {
                state.apply(Client(9), Request::QueuePop { key }, &mut |_, _| {}).unwrap();
            }
        }
        for client in 0..4 {
            state.cancel(Client(client));
        }
        prop_assert_eq!(account.used(), 0);
    }
}
