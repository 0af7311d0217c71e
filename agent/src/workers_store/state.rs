//! The store's content and the clients that wait for it. This is a state machine that takes one request at a time, and
//! returns the answers and their addressees. Connections are in `server.rs`.
//!
//! It answers as torch's server does (compared side by side, see `tests/tests/torch_store`). It differs where torch's
//! server harms its clients:
//! - A compare-and-set that stored nothing wakes no client.
//! - A wait for several keys counts a queue as present if the queue holds something.
//! - A push wakes the client that has waited longest.

use std::collections::{BTreeMap, HashMap, VecDeque};

use super::budget::{Account, Full, Value};
use super::wire::{Malformed, Request, Strings};

/// Answer to CHECK: all keys exist. Answer to WAIT and BARRIER: the client may continue.
pub(crate) const READY: u8 = 0;
/// Answer to CHECK: some key does not exist.
pub(crate) const NOT_READY: u8 = 1;
/// Answer to CANCEL_WAIT.
pub(crate) const CANCELED: u8 = 1;

/// What an entry costs in addition to its bytes: table, headers, allocator.
const ENTRY: usize = 128;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Client(pub u32);

/// A part of an answer. One request may have several parts.
#[derive(Debug, Clone)]
pub(crate) enum Reply {
    Byte(u8),
    U32(u32),
    I64(i64),
    /// A length of 8 bytes and that many bytes.
    Value(Value),
    /// As `Value`, for a key.
    Key(Box<[u8]>),
}

/// Why a request ends its connection. torch's server ends it, too.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Violation {
    #[error(transparent)]
    Malformed(#[from] Malformed),
    #[error(transparent)]
    Full(#[from] Full),
    #[error("the key holds no number that this one can be added to")]
    NotANumber,
}

type Key = Box<[u8]>;

#[derive(Debug)]
struct Wait {
    /// Orders the clients that wait for one key.
    ticket: u64,
    /// Keys that were missing when the wait began.
    keys: Vec<Key>,
    /// How many of them are still missing.
    missing: usize,
}

/// The store of one round.
#[derive(Debug)]
pub(crate) struct State {
    account: Account,
    entries: HashMap<Key, Value>,
    queues: HashMap<Key, VecDeque<Value>>,
    waiters: HashMap<Key, BTreeMap<u64, Client>>,
    waits: HashMap<Client, Wait>,
    tickets: u64,
}

impl State {
    /// An empty store whose memory is charged to `account`.
    pub(crate) fn new(account: Account) -> State {
        State {
            account,
            entries: HashMap::new(),
            queues: HashMap::new(),
            waiters: HashMap::new(),
            waits: HashMap::new(),
            tickets: 0,
        }
    }

    /// Carries out a request. `reply` gets the answers in order, including those to other clients that the request
    /// wakes. After an error the connection must be closed; some pairs of a MULTI_SET may have been set.
    pub(crate) fn apply(
        &mut self,
        client: Client,
        request: Request<'_>,
        reply: &mut impl FnMut(Client, Reply),
    ) -> Result<(), Violation> {
        match request {
            Request::Ping { nonce } => reply(client, Reply::U32(nonce)),
            Request::Set { key, value } => self.set(key, value, reply)?,
            Request::CompareSet { key, expected, desired } => {
                let answer = self.compare_set(key, expected, desired, reply)?;
                reply(client, Reply::Value(answer));
            }
            Request::Get { key } => reply(client, self.value(key)),
            Request::Add { key, amount } => {
                let sum = self.add(key, amount)?;
                reply(client, Reply::I64(sum));
                self.arrived(key, reply);
            }
            Request::Check { keys } => {
                let all = keys.iter().all(|key| self.is_there(key));
                reply(client, Reply::Byte(if all { READY } else { NOT_READY }));
            }
            Request::Wait { keys } => {
                if !self.wait(client, keys)? {
                    reply(client, Reply::Byte(READY));
                }
            }
            Request::CancelWait => {
                self.cancel(client);
                reply(client, Reply::Byte(CANCELED));
            }
            Request::NumKeys => reply(client, Reply::I64(self.entries.len() as i64)),
            Request::Delete { key } => reply(client, Reply::I64(self.delete(key).into())),
            Request::Append { key, value } => self.append(key, value, reply)?,
            Request::MultiGet { keys } => {
                for key in keys.iter() {
                    reply(client, self.value(key));
                }
            }
            Request::MultiSet { pairs } => {
                let mut strings = pairs.iter();
                while let (Some(key), Some(value)) = (strings.next(), strings.next()) {
                    self.set(key, value, reply)?;
                }
            }
            Request::QueuePush { key, value } => self.push(key, value, reply)?,
            Request::QueuePop { key } => self.pop(client, key, reply),
            Request::QueueLen { key } => {
                let length = self.queues.get(key).map_or(0, VecDeque::len);
                reply(client, Reply::I64(length as i64));
            }
            Request::ListKeys => {
                reply(client, Reply::I64(self.entries.len() as i64));
                for key in self.entries.keys() {
                    reply(client, Reply::Key(key.clone()));
                }
            }
            Request::Barrier { key, world } => {
                if self.add(key, 1)? >= world {
                    reply(client, Reply::Byte(READY));
                    self.arrived(key, reply);
                } else {
                    self.await_keys(client, vec![key.into()])?;
                }
            }
        }
        Ok(())
    }

    /// Ends the client's wait: the client is gone or has cancelled it.
    pub(crate) fn cancel(&mut self, client: Client) {
        let Some(wait) = self.waits.remove(&client) else { return };
        for key in &wait.keys {
            self.account.give(ENTRY + key.len());
            if let Some(waiters) = self.waiters.get_mut(key) {
                waiters.remove(&wait.ticket);
                if waiters.is_empty() {
                    self.waiters.remove(key);
                }
            }
        }
    }

    fn is_there(&self, key: &[u8]) -> bool {
        self.entries.contains_key(key) || self.queues.contains_key(key)
    }

    fn value(&self, key: &[u8]) -> Reply {
        // On the wire an empty value is just a length of 0.
        self.entries.get(key).map_or(Reply::I64(0), |value| Reply::Value(value.clone()))
    }

    fn set(&mut self, key: &[u8], value: &[u8], reply: &mut impl FnMut(Client, Reply)) -> Result<(), Full> {
        match self.entries.get_mut(key) {
            Some(entry) => entry.replace(value)?,
            None => self.put(key, value)?,
        }
        self.arrived(key, reply);
        Ok(())
    }

    /// Sets a key that has the expected value. Returns the answer.
    fn compare_set(
        &mut self,
        key: &[u8],
        expected: &[u8],
        desired: &[u8],
        reply: &mut impl FnMut(Client, Reply),
    ) -> Result<Value, Full> {
        let current = self.entries.get(key);
        if current.map_or(&[][..], Value::bytes) == expected {
            self.set(key, desired, reply)?;
        }
        match self.entries.get(key) {
            Some(value) => Ok(value.clone()),
            // torch answers the expected value, although nothing was stored.
            None => Value::new(expected, &self.account),
        }
    }

    fn append(&mut self, key: &[u8], value: &[u8], reply: &mut impl FnMut(Client, Reply)) -> Result<(), Full> {
        match self.entries.get_mut(key) {
            Some(entry) => entry.append(value)?,
            None => self.put(key, value)?,
        }
        self.arrived(key, reply);
        Ok(())
    }

    /// Returns whether the key existed.
    fn delete(&mut self, key: &[u8]) -> bool {
        let found = self.entries.remove(key).is_some();
        if found {
            self.account.give(ENTRY + key.len());
        }
        found
    }

    /// Stores a key that does not exist yet.
    fn put(&mut self, key: &[u8], value: &[u8]) -> Result<(), Full> {
        let value = Value::new(value, &self.account)?;
        self.account.take(ENTRY + key.len())?;
        self.entries.insert(key.into(), value);
        Ok(())
    }

    fn add(&mut self, key: &[u8], amount: i64) -> Result<i64, Violation> {
        let before = match self.entries.get(key) {
            Some(value) => leading_number(value.bytes()).ok_or(Violation::NotANumber)?,
            None => 0,
        };
        let sum = before.checked_add(amount).ok_or(Violation::NotANumber)?;
        let text = sum.to_string();
        match self.entries.get_mut(key) {
            Some(entry) => entry.replace(text.as_bytes())?,
            None => self.put(key, text.as_bytes())?,
        }
        Ok(sum)
    }

    fn push(&mut self, key: &[u8], value: &[u8], reply: &mut impl FnMut(Client, Reply)) -> Result<(), Full> {
        let value = Value::new(value, &self.account)?;
        self.account.take(ENTRY)?;
        match self.queues.get_mut(key) {
            Some(queue) => queue.push_back(value),
            None => {
                self.account.take(ENTRY + key.len()).inspect_err(|_| self.account.give(ENTRY))?;
                self.queues.insert(key.into(), VecDeque::from([value]));
            }
        }
        // Only one waiting client can take the value: the first one that waits for nothing else.
        let waiting: Vec<Client> = self.waiters.get(key).into_iter().flat_map(BTreeMap::values).copied().collect();
        for client in waiting {
            if self.came(client, key, reply) {
                break;
            }
        }
        Ok(())
    }

    fn pop(&mut self, client: Client, key: &[u8], reply: &mut impl FnMut(Client, Reply)) {
        let Some(queue) = self.queues.get_mut(key) else { return reply(client, Reply::I64(0)) };
        reply(client, Reply::I64(queue.len() as i64));
        if let Some(value) = queue.pop_front() {
            self.account.give(ENTRY);
            reply(client, Reply::Value(value));
        }
        // An empty queue is removed, so that a queue in the table always counts as present.
        if queue.is_empty() {
            self.queues.remove(key);
            self.account.give(ENTRY + key.len());
        }
    }

    /// Begins a wait if some key is missing. Returns whether the client has to wait.
    fn wait(&mut self, client: Client, keys: Strings<'_>) -> Result<bool, Full> {
        let mut missing: Vec<Key> = keys.iter().filter(|key| !self.is_there(key)).map(Into::into).collect();
        missing.sort_unstable();
        missing.dedup();
        if missing.is_empty() {
            return Ok(false);
        }
        self.await_keys(client, missing)?;
        Ok(true)
    }

    /// Begins a wait. It replaces an earlier wait of the client: torch 1.13 gives up on a wait without saying so.
    fn await_keys(&mut self, client: Client, keys: Vec<Key>) -> Result<(), Full> {
        self.cancel(client);
        self.account.take(keys.iter().map(|key| ENTRY + key.len()).sum())?;
        self.tickets += 1;
        let ticket = self.tickets;
        for key in &keys {
            self.waiters.entry(key.clone()).or_default().insert(ticket, client);
        }
        self.waits.insert(client, Wait { ticket, missing: keys.len(), keys });
        Ok(())
    }

    /// Tells all clients that wait for the key.
    fn arrived(&mut self, key: &[u8], reply: &mut impl FnMut(Client, Reply)) {
        let Some(waiters) = self.waiters.remove(key) else { return };
        for client in waiters.into_values() {
            self.came(client, key, reply);
        }
    }

    /// Tells one client that the key exists. Returns whether the client may continue.
    fn came(&mut self, client: Client, key: &[u8], reply: &mut impl FnMut(Client, Reply)) -> bool {
        let Some(wait) = self.waits.get_mut(&client) else { return false };
        wait.missing -= 1;
        let (ticket, goes_on) = (wait.ticket, wait.missing == 0);
        if goes_on {
            self.cancel(client);
            reply(client, Reply::Byte(READY));
        } else if let Some(waiters) = self.waiters.get_mut(key) {
            waiters.remove(&ticket);
            if waiters.is_empty() {
                self.waiters.remove(key);
            }
        }
        goes_on
    }
}

/// Reads a number as C's `strtoll` does, and so as torch does: blanks, a sign, digits. The rest is ignored.
fn leading_number(text: &[u8]) -> Option<i64> {
    let text = text.trim_ascii_start();
    let signed = usize::from(matches!(text.first(), Some(b'+' | b'-')));
    let digits = text[signed..].iter().take_while(|byte| byte.is_ascii_digit()).count();
    std::str::from_utf8(&text[..signed + digits]).ok()?.parse().ok()
}
