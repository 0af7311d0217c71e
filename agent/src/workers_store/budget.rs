//! The memory budget of a store, and values that are charged to it. Kernel memory is not counted: sockets have their
//! own limits.

use std::cell::Cell;
use std::rc::Rc;

#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the store's memory budget of {limit} bytes is used up")]
pub(crate) struct Full {
    pub limit: usize,
}

/// Counts bytes against a limit. Clones share the count.
#[derive(Debug, Clone)]
pub(crate) struct Account {
    used: Rc<Cell<usize>>,
    limit: usize,
}

impl Account {
    /// Nothing used yet of `limit` bytes.
    pub(crate) fn new(limit: usize) -> Account {
        Account { used: Rc::default(), limit }
    }

    /// The same account with an eighth more to take from, so that a store full of data still answers.
    pub(crate) fn with_reserve(&self) -> Account {
        Account { used: Rc::clone(&self.used), limit: self.limit.saturating_add(self.limit / 8) }
    }

    pub(crate) fn used(&self) -> usize {
        self.used.get()
    }

    /// Takes this many bytes. If there are fewer left, none are taken.
    pub(crate) fn take(&self, bytes: usize) -> Result<(), Full> {
        let after = self.used().saturating_add(bytes);
        if after > self.limit {
            return Err(Full { limit: self.limit });
        }
        self.used.set(after);
        Ok(())
    }

    /// Gives back this many bytes that were taken.
    pub(crate) fn give(&self, bytes: usize) {
        self.used.set(self.used().saturating_sub(bytes));
    }
}

/// A value, shared between the store and the answers not yet sent. It is charged once for all of them, until the last
/// one is dropped.
#[derive(Debug, Clone)]
pub(crate) struct Value {
    data: Rc<Data>,
}

#[derive(Debug)]
struct Data {
    bytes: Vec<u8>,
    charged: usize,
    account: Account,
}

impl Drop for Data {
    fn drop(&mut self) {
        self.account.give(self.charged);
    }
}

impl Value {
    pub(crate) fn new(bytes: &[u8], account: &Account) -> Result<Value, Full> {
        account.take(bytes.len())?;
        Ok(Value { data: Rc::new(Data { bytes: bytes.to_vec(), charged: bytes.len(), account: account.clone() }) })
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        &self.data.bytes
    }

    /// Becomes a copy of `bytes`. Answers that are not sent yet keep the old value. If there is no room, the value
    /// stays unchanged.
    pub(crate) fn replace(&mut self, bytes: &[u8]) -> Result<(), Full> {
        match Rc::get_mut(&mut self.data) {
            // The bytes are replaced in place, because the new value is no larger than the room that is charged.
            Some(data) if bytes.len() <= data.charged => {
                data.bytes.clear();
                data.bytes.extend_from_slice(bytes);
            }
            _ => *self = Value::new(bytes, &self.data.account)?,
        }
        Ok(())
    }

    /// Appends `bytes`. Answers that are not sent yet keep the old value. If there is no room, the value stays
    /// unchanged.
    pub(crate) fn append(&mut self, bytes: &[u8]) -> Result<(), Full> {
        let whole = self.data.bytes.len() + bytes.len();
        if Rc::get_mut(&mut self.data).is_none() {
            *self = Value::new(self.bytes(), &self.data.account)?;
        }
        let Some(data) = Rc::get_mut(&mut self.data) else { return Ok(()) };
        if whole > data.charged {
            // Room grows by doubling, so that many small pieces are not copied over and over.
            let room = whole.max(data.charged * 2);
            data.account.take(room - data.charged)?;
            data.charged = room;
            data.bytes.reserve_exact(room - data.bytes.len());
        }
        data.bytes.extend_from_slice(bytes);
        Ok(())
    }
}
