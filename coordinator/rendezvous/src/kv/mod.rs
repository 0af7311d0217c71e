//! The vocabulary of a key-value store: revisions, guards, transactions, events, errors. The service behind them is the
//! trait `elastic_store::Store`.
//!
//! Semantics are etcd v3's: every write has a revision that only grows, a key has a create and a mod revision, and a
//! transaction is atomic and guarded.

mod error;

pub use error::StoreError;

use std::fmt;

/// What store calls return.
pub type Result<T, E = StoreError> = std::result::Result<T, E>;

/// A point in the store's history. Zero means "never": as a guard it means that the key is absent.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, serde::Serialize, serde::Deserialize)]
#[serde(transparent)]
pub struct Revision(pub i64);

impl Revision {
    /// Before all history; as a guard, "the key does not exist".
    pub const NONE: Revision = Revision(0);

    /// The revision after this one.
    pub const fn next(self) -> Revision {
        Revision(self.0 + 1)
    }
}

impl fmt::Debug for Revision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "r{}", self.0)
    }
}

impl fmt::Display for Revision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.0, f)
    }
}

/// An etcd lease. Keys put with it vanish when it expires or is revoked.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct LeaseId(pub i64);

impl fmt::Display for LeaseId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:x}", self.0)
    }
}

/// One key as stored.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct KeyValue {
    /// The key. Ours are UTF-8; a foreign one that is not is shown lossily.
    pub key: String,
    /// The value, by convention JSON.
    pub value: Vec<u8>,
    /// Revision at which the key came into being.
    pub create_revision: Revision,
    /// Revision of the last write.
    pub mod_revision: Revision,
    /// Lease the key hangs on.
    pub lease: Option<LeaseId>,
}

/// A condition of a transaction. All must hold.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Guard {
    /// The key's create revision is this; [`Revision::NONE`]: the key is absent.
    Created {
        /// The key.
        key: String,
        /// Its create revision.
        revision: Revision,
    },
    /// The key's mod revision is this; [`Revision::NONE`]: the key is absent.
    Modified {
        /// The key.
        key: String,
        /// Its mod revision.
        revision: Revision,
    },
    /// No key begins with this prefix.
    Empty(String),
}

impl Guard {
    /// The key exists since exactly `revision`.
    pub fn created(key: impl Into<String>, revision: Revision) -> Guard {
        Guard::Created { key: key.into(), revision }
    }

    /// The key was last written at exactly `revision`.
    pub fn modified(key: impl Into<String>, revision: Revision) -> Guard {
        Guard::Modified { key: key.into(), revision }
    }

    /// The key does not exist.
    pub fn absent(key: impl Into<String>) -> Guard {
        Guard::Created { key: key.into(), revision: Revision::NONE }
    }

    /// No key begins with `prefix`.
    pub fn empty(prefix: impl Into<String>) -> Guard {
        Guard::Empty(prefix.into())
    }
}

/// One operation of a transaction.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Op {
    /// Read one key. Result: [`OpResult::Values`] with at most one entry.
    Get(String),
    /// Read all keys with a prefix, in key order.
    Range(String),
    /// Read the last key with a prefix, in key order. Result: [`OpResult::Values`] with at most one entry.
    Last(String),
    /// Count the keys with a prefix.
    Count(String),
    /// Write a key.
    Put {
        /// The key.
        key: String,
        /// The value.
        value: Vec<u8>,
        /// Lease to hang it on; a put without one takes the key off its lease.
        lease: Option<LeaseId>,
    },
    /// Delete one key.
    Delete(String),
    /// Delete all keys with a prefix.
    DeletePrefix(String),
}

impl Op {
    /// Read one key.
    pub fn get(key: impl Into<String>) -> Op {
        Op::Get(key.into())
    }

    /// Read all keys with a prefix.
    pub fn range(prefix: impl Into<String>) -> Op {
        Op::Range(prefix.into())
    }

    /// Read the last key with a prefix, in key order.
    pub fn last(prefix: impl Into<String>) -> Op {
        Op::Last(prefix.into())
    }

    /// Count the keys with a prefix.
    pub fn count(prefix: impl Into<String>) -> Op {
        Op::Count(prefix.into())
    }

    /// Write a key that no lease holds.
    pub fn put(key: impl Into<String>, value: impl Into<Vec<u8>>) -> Op {
        Op::Put { key: key.into(), value: value.into(), lease: None }
    }

    /// Write a key that vanishes with `lease`.
    pub fn put_leased(key: impl Into<String>, value: impl Into<Vec<u8>>, lease: LeaseId) -> Op {
        Op::Put { key: key.into(), value: value.into(), lease: Some(lease) }
    }

    /// Delete one key.
    pub fn delete(key: impl Into<String>) -> Op {
        Op::Delete(key.into())
    }

    /// Delete all keys with a prefix.
    pub fn delete_prefix(prefix: impl Into<String>) -> Op {
        Op::DeletePrefix(prefix.into())
    }

    /// Whether it changes the store.
    pub fn is_write(&self) -> bool {
        matches!(self, Op::Put { .. } | Op::Delete(..) | Op::DeletePrefix(..))
    }
}

/// A guarded transaction: if all guards hold, `then`, else `otherwise`. Atomic. At most 128 operations a branch
/// (etcd's default limit), and no key written twice in one branch.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Txn {
    /// The guards.
    pub when: Vec<Guard>,
    /// Done if all of them hold.
    pub then: Vec<Op>,
    /// Done if one does not.
    pub otherwise: Vec<Op>,
}

impl Txn {
    /// An unguarded transaction.
    pub fn of(then: impl Into<Vec<Op>>) -> Txn {
        Txn { when: Vec::new(), then: then.into(), otherwise: Vec::new() }
    }

    /// Adds guards.
    #[must_use]
    pub fn guarded(mut self, guards: impl IntoIterator<Item = Guard>) -> Txn {
        self.when.extend(guards);
        self
    }

    /// Sets what is done if a guard fails.
    #[must_use]
    pub fn or_else(mut self, otherwise: impl Into<Vec<Op>>) -> Txn {
        self.otherwise = otherwise.into();
        self
    }

    /// Whether either branch changes the store. A read-only transaction is safe to repeat.
    pub fn is_write(&self) -> bool {
        self.then.iter().chain(&self.otherwise).any(Op::is_write)
    }
}

/// Result of one operation.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum OpResult {
    /// Of a get or range.
    Values(Vec<KeyValue>),
    /// Of a count.
    Count(i64),
    /// Of a put.
    Put,
    /// Of a delete: how many keys.
    Deleted(i64),
}

impl OpResult {
    /// The keys read; empty for other operations.
    pub fn values(&self) -> &[KeyValue] {
        match self {
            OpResult::Values(values) => values,
            _ => &[],
        }
    }

    /// The keys read, taken out; none for other operations.
    pub fn into_values(self) -> Vec<KeyValue> {
        match self {
            OpResult::Values(values) => values,
            _ => Vec::new(),
        }
    }

    /// The one key read, if it was there.
    pub fn value(&self) -> Option<&KeyValue> {
        self.values().first()
    }
}

/// Result of a transaction.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct TxnResult {
    /// Whether the guards held, so `then` was done.
    pub succeeded: bool,
    /// The store's revision after it. If the branch wrote, the mod revision of everything it wrote.
    pub revision: Revision,
    /// One result for each operation of the branch taken.
    pub results: Vec<OpResult>,
}

/// What a watch or a read of one level is about.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Scope {
    /// One key.
    Key(String),
    /// All keys with this prefix.
    Prefix(String),
}

impl Scope {
    /// Whether a key lies inside.
    pub fn contains(&self, key: &str) -> bool {
        match self {
            Scope::Key(own) => own == key,
            Scope::Prefix(prefix) => key.starts_with(prefix.as_str()),
        }
    }
}

/// One change of one key.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Event {
    /// The key was written.
    Put(KeyValue),
    /// The key was deleted, by hand or with its lease.
    Delete {
        /// The key.
        key: String,
        /// When.
        revision: Revision,
    },
}

impl Event {
    /// The key it is about.
    pub fn key(&self) -> &str {
        match self {
            Event::Put(kv) => &kv.key,
            Event::Delete { key, .. } => key,
        }
    }

    /// The revision at which it happened.
    pub fn revision(&self) -> Revision {
        match self {
            Event::Put(kv) => kv.mod_revision,
            Event::Delete { revision, .. } => *revision,
        }
    }
}

/// What a watch delivers.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum WatchUpdate {
    /// Events in order of revision. Those of one revision are never split over two updates.
    Events(Vec<Event>),
    /// History was compacted away while the watch was broken: this is everything in scope as of `revision`, and takes
    /// the place of all that was known. Events follow from `revision + 1`.
    Snapshot {
        /// The state's revision.
        revision: Revision,
        /// Every key in scope, in key order.
        values: Vec<KeyValue>,
    },
    /// The watch cannot continue: the store behind it is another one than before, or refuses us. Nothing follows.
    Broken(StoreError),
}

/// All that is known of a prefix, or changes of it: what a mirror of the prefix delivers.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum News {
    /// Everything under the prefix as of `revision`. It replaces all that was known.
    All {
        /// When.
        revision: Revision,
        /// Every key, in key order.
        values: Vec<KeyValue>,
    },
    /// Changes since, in order.
    Changes(Vec<Event>),
}
