//! Parses a connection's bytes into the store's requests, in both of torch's dialects. What a request does is in
//! `state.rs`.
//!
//! A query is one byte for the operation, and then its fields. Integers are little-endian. A string is a `u64` length
//! and that many bytes. Several keys are a `u64` count and the keys. torch 2.1 and later open with VALIDATE. torch up
//! to 2.0 does not, and numbers the operations from SET = 0. No memory is reserved for an announced length before the
//! bytes arrive.
//!
//! Source: the bytes that torch 1.13 and 2.15 send, and the limits of torch's server (`TCPStoreLibUvBackend.cpp`).
#![deny(clippy::disallowed_methods, clippy::disallowed_types)]

/// The number that follows a VALIDATE.
pub(crate) const MAGIC: u32 = 0x3C85_F7CE;

/// The longest key, including torch's own prefix.
pub(crate) const MAX_KEY: u64 = 8 * 1024;
pub(crate) const MAX_VALUE: u64 = 8 * 1024 * 1024;
pub(crate) const MAX_KEYS: u64 = 128 * 1024;

#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Malformed {
    #[error("operation {0} is unknown")]
    Operation(u8),
    #[error("a key of {0} bytes: {MAX_KEY} is the most")]
    Key(u64),
    #[error("a value of {0} bytes: {MAX_VALUE} is the most")]
    Value(u64),
    #[error("a request of {0} keys: {MAX_KEYS} is the most")]
    Keys(u64),
}

/// A request. It borrows the connection's bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs)]
pub(crate) enum Request<'a> {
    /// Answered by its nonce.
    Ping { nonce: u32 },
    /// No answer.
    Set { key: &'a [u8], value: &'a [u8] },
    /// Answered by a value.
    CompareSet { key: &'a [u8], expected: &'a [u8], desired: &'a [u8] },
    /// Answered by a value, an empty one for a missing key.
    Get { key: &'a [u8] },
    /// Answered by the sum.
    Add { key: &'a [u8], amount: i64 },
    /// Answered by [`super::state::READY`] or [`super::state::NOT_READY`].
    Check { keys: Strings<'a> },
    /// Answered once all keys are there.
    Wait { keys: Strings<'a> },
    /// Answered by [`super::state::CANCELED`].
    CancelWait,
    /// Answered by a number.
    NumKeys,
    /// Answered by the number of deleted keys.
    Delete { key: &'a [u8] },
    /// No answer.
    Append { key: &'a [u8], value: &'a [u8] },
    /// Answered by a value for each.
    MultiGet { keys: Strings<'a> },
    /// No answer. Keys and values alternate.
    MultiSet { pairs: Strings<'a> },
    /// No answer.
    QueuePush { key: &'a [u8], value: &'a [u8] },
    /// Answered by the length before the pop, and the value if there was one.
    QueuePop { key: &'a [u8] },
    /// Answered by the length.
    QueueLen { key: &'a [u8] },
    /// Answered by the number of keys and all keys.
    ListKeys,
    /// Answered once `world` clients have come.
    Barrier { key: &'a [u8], world: i64 },
}

/// Several strings, one after the other, with their length prefixes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Strings<'a> {
    framed: &'a [u8],
}

impl<'a> Strings<'a> {
    pub(crate) fn iter(self) -> impl Iterator<Item = &'a [u8]> {
        let mut fields = Fields { rest: self.framed };
        std::iter::from_fn(move || (!fields.rest.is_empty()).then(|| fields.string()))
    }
}

#[derive(Debug, Clone, Copy)]
enum Field {
    Key,
    Value,
    Int32,
    Int64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Dialect {
    /// torch 2.1 and later.
    Validated,
    /// torch up to 2.0. No script could reach its WATCH_KEY (7).
    Old,
}

/// What follows the first byte of a message, and the request that it makes.
#[derive(Debug)]
struct Op {
    fields: &'static [Field],
    /// Whether a count comes first, and the fields repeat as often as it says.
    is_counted: bool,
    request: for<'a> fn(&mut Fields<'a>) -> Request<'a>,
}

const fn one(fields: &'static [Field], request: for<'a> fn(&mut Fields<'a>) -> Request<'a>) -> Op {
    Op { fields, is_counted: false, request }
}

const fn many(fields: &'static [Field], request: for<'a> fn(&mut Fields<'a>) -> Request<'a>) -> Op {
    Op { fields, is_counted: true, request }
}

use Field::{Int32, Int64, Key, Value};

/// All operations, by their numbers since torch 2.1, which begin with 1.
static OPS: [Op; 18] = [
    one(&[Key, Value], |f| Request::Set { key: f.string(), value: f.string() }),
    one(&[Key, Value, Value], |f| Request::CompareSet { key: f.string(), expected: f.string(), desired: f.string() }),
    one(&[Key], |f| Request::Get { key: f.string() }),
    one(&[Key, Int64], |f| Request::Add { key: f.string(), amount: i64::from_le_bytes(f.array()) }),
    many(&[Key], |f| Request::Check { keys: f.strings() }),
    many(&[Key], |f| Request::Wait { keys: f.strings() }),
    one(&[], |_| Request::NumKeys),
    one(&[Key], |f| Request::Delete { key: f.string() }),
    one(&[Key, Value], |f| Request::Append { key: f.string(), value: f.string() }),
    many(&[Key], |f| Request::MultiGet { keys: f.strings() }),
    many(&[Key, Value], |f| Request::MultiSet { pairs: f.strings() }),
    one(&[], |_| Request::CancelWait),
    one(&[Int32], |f| Request::Ping { nonce: u32::from_le_bytes(f.array()) }),
    one(&[Key, Value], |f| Request::QueuePush { key: f.string(), value: f.string() }),
    one(&[Key], |f| Request::QueuePop { key: f.string() }),
    one(&[Key], |f| Request::QueueLen { key: f.string() }),
    one(&[], |_| Request::ListKeys),
    one(&[Key, Int64], |f| Request::Barrier { key: f.string(), world: i64::from_le_bytes(f.array()) }),
];

impl Op {
    fn read(dialect: Dialect, byte: u8) -> Result<&'static Op, Malformed> {
        let place = match (dialect, byte) {
            // The old dialect numbers these from 0. It has DELETE as number 8, and nothing after it.
            (Dialect::Old, 0..=6) => byte,
            (Dialect::Validated, 1..) | (Dialect::Old, 8) => byte - 1,
            _ => return Err(Malformed::Operation(byte)),
        };
        OPS.get(usize::from(place)).ok_or(Malformed::Operation(byte))
    }
}

/// Reads fields that [`Scan`] has found complete.
struct Fields<'a> {
    rest: &'a [u8],
}

impl<'a> Fields<'a> {
    fn array<const N: usize>(&mut self) -> [u8; N] {
        let Some((array, rest)) = self.rest.split_first_chunk() else { return [0; N] };
        self.rest = rest;
        *array
    }

    fn string(&mut self) -> &'a [u8] {
        let length = u64::from_le_bytes(self.array()) as usize;
        let (string, rest) = self.rest.split_at(length.min(self.rest.len()));
        self.rest = rest;
        string
    }

    /// The strings of an operation with a count.
    fn strings(&mut self) -> Strings<'a> {
        Strings { framed: self.rest.get(8..).unwrap_or_default() }
    }
}

/// How far the current message was scanned. No byte is scanned twice, however the bytes arrive.
#[derive(Debug, Clone, Copy)]
struct Scan {
    op: &'static Op,
    /// The offset at which the next field begins.
    at: usize,
    /// Index of that field.
    field: usize,
    /// How often the fields still repeat. `None` until the count has arrived.
    groups: Option<u64>,
}

impl Scan {
    fn new(op: &'static Op) -> Scan {
        Scan { op, at: 1, field: 0, groups: (!op.is_counted).then_some(1) }
    }

    /// The message's length, once the whole message has arrived.
    fn end(&mut self, bytes: &[u8]) -> Result<Option<usize>, Malformed> {
        let int64 = |at: usize| {
            let array = bytes.get(at..)?.first_chunk()?;
            Some(u64::from_le_bytes(*array))
        };
        let mut groups = match self.groups {
            Some(groups) => groups,
            None => {
                let Some(count) = int64(self.at) else { return Ok(None) };
                if count > MAX_KEYS {
                    return Err(Malformed::Keys(count));
                }
                self.at += 8;
                count
            }
        };
        let fields = self.op.fields;
        while groups > 0 {
            self.groups = Some(groups);
            while let Some(field) = fields.get(self.field) {
                let length = match field {
                    Field::Int32 => 4,
                    Field::Int64 => 8,
                    Field::Key | Field::Value => {
                        let Some(length) = int64(self.at) else { return Ok(None) };
                        match field {
                            Field::Key if length > MAX_KEY => return Err(Malformed::Key(length)),
                            _ if length > MAX_VALUE => return Err(Malformed::Value(length)),
                            _ => 8 + length as usize,
                        }
                    }
                };
                if bytes.len() - self.at < length {
                    return Ok(None);
                }
                self.at += length;
                self.field += 1;
            }
            self.field = 0;
            groups -= 1;
        }
        Ok(Some(self.at))
    }
}

/// Cuts a connection's bytes into requests. Holds only the beginning of a request that is not complete yet.
#[derive(Debug, Default)]
pub(crate) struct Decoder {
    dialect: Option<Dialect>,
    held: Vec<u8>,
    scan: Option<Scan>,
}

impl Decoder {
    /// Takes the next bytes and hands every request that they complete to `each`. After an error the connection cannot
    /// be used any more.
    pub(crate) fn feed<E: From<Malformed>>(
        &mut self,
        bytes: &[u8],
        mut each: impl FnMut(Request<'_>) -> Result<(), E>,
    ) -> Result<(), E> {
        if self.held.is_empty() {
            let used = self.cut(bytes, &mut each)?;
            self.held.extend_from_slice(&bytes[used..]);
        } else {
            let mut held = std::mem::take(&mut self.held);
            held.extend_from_slice(bytes);
            let used = self.cut(&held, &mut each)?;
            // An idle connection holds no memory.
            if used < held.len() {
                held.drain(..used);
                self.held = held;
            }
        }
        Ok(())
    }

    pub(crate) fn held(&self) -> usize {
        self.held.capacity()
    }

    /// Hands out all complete requests and returns how many bytes they took.
    fn cut<E: From<Malformed>>(
        &mut self,
        bytes: &[u8],
        each: &mut impl FnMut(Request<'_>) -> Result<(), E>,
    ) -> Result<usize, E> {
        let mut used = 0;
        let dialect = match self.dialect {
            Some(dialect) => dialect,
            None => {
                let Some((dialect, greeting)) = sniff(bytes) else { return Ok(0) };
                self.dialect = Some(dialect);
                used = greeting;
                dialect
            }
        };
        while let Some(&first) = bytes.get(used) {
            let mut scan = match self.scan.take() {
                Some(scan) => scan,
                None => Scan::new(Op::read(dialect, first)?),
            };
            let message = &bytes[used..];
            let Some(end) = scan.end(message)? else {
                self.scan = Some(scan);
                break;
            };
            each((scan.op.request)(&mut Fields { rest: &message[1..end] }))?;
            used += end;
        }
        Ok(used)
    }
}

/// The dialect, and how many bytes it took to tell it. `None` if more bytes are needed. In the old dialect a 0 begins a
/// SET. If VALIDATE's number followed it, the key would be a gigabyte long.
fn sniff(bytes: &[u8]) -> Option<(Dialect, usize)> {
    match bytes {
        [] => None,
        [0, rest @ ..] => {
            let number = rest.first_chunk()?;
            Some(if u32::from_le_bytes(*number) == MAGIC { (Dialect::Validated, 5) } else { (Dialect::Old, 0) })
        }
        _ => Some((Dialect::Old, 0)),
    }
}
