//! Data still to be sent on a connection.

use std::collections::VecDeque;
use std::io::{self, IoSlice, Write};

use super::budget::{Account, Full, Value};
use super::state::Reply;

/// A value of at least this size is sent without copying it. A smaller value is copied.
const SHARED: usize = 512;
/// Most pieces passed to one system call.
const PIECES: usize = 16;

#[derive(Debug)]
enum Piece {
    Copied(Vec<u8>),
    Shared(Value),
}

impl Piece {
    fn bytes(&self) -> &[u8] {
        match self {
            Piece::Copied(bytes) => bytes,
            Piece::Shared(value) => value.bytes(),
        }
    }
}

/// Replies in order, not yet sent.
#[derive(Debug)]
pub(super) struct Output {
    account: Account,
    /// Bytes charged for the pieces, apart from what shared values cost.
    charged: usize,
    pieces: VecDeque<Piece>,
    /// Bytes of the first piece that were sent.
    sent: usize,
    /// Bytes of all pieces.
    length: usize,
}

impl Output {
    pub(super) fn new(account: Account) -> Output {
        Output { account, charged: 0, pieces: VecDeque::new(), sent: 0, length: 0 }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.pieces.is_empty()
    }

    /// Bytes still to be sent.
    pub(super) fn len(&self) -> usize {
        self.length - self.sent
    }

    pub(super) fn push(&mut self, reply: Reply) -> Result<(), Full> {
        match reply {
            Reply::Byte(byte) => self.copy(&[byte]),
            Reply::U32(number) => self.copy(&number.to_le_bytes()),
            Reply::I64(number) => self.copy(&number.to_le_bytes()),
            Reply::Key(key) => {
                self.copy(&(key.len() as u64).to_le_bytes())?;
                self.copy(&key)
            }
            Reply::Value(value) => {
                let bytes = value.bytes();
                self.copy(&(bytes.len() as u64).to_le_bytes())?;
                if bytes.len() < SHARED {
                    return self.copy(bytes);
                }
                self.charge(size_of::<Piece>())?;
                self.length += bytes.len();
                self.pieces.push_back(Piece::Shared(value));
                Ok(())
            }
        }
    }

    fn charge(&mut self, bytes: usize) -> Result<(), Full> {
        self.account.take(bytes)?;
        self.charged += bytes;
        Ok(())
    }

    fn copy(&mut self, bytes: &[u8]) -> Result<(), Full> {
        self.charge(bytes.len())?;
        self.length += bytes.len();
        match self.pieces.back_mut() {
            Some(Piece::Copied(piece)) => piece.extend_from_slice(bytes),
            _ => self.pieces.push_back(Piece::Copied(bytes.to_vec())),
        }
        Ok(())
    }

    /// Sends as much as the connection takes at once, without waiting.
    pub(super) fn send(&mut self, mut to: impl Write) -> io::Result<()> {
        while !self.pieces.is_empty() {
            let sent = if let [Piece::Copied(only)] = self.pieces.make_contiguous() {
                to.write(&only[self.sent..])
            } else {
                let mut slices = [IoSlice::new(&[]); PIECES];
                let mut count = 0;
                for (slice, piece) in slices.iter_mut().zip(&self.pieces) {
                    let skip = if count == 0 { self.sent } else { 0 };
                    *slice = IoSlice::new(&piece.bytes()[skip..]);
                    count += 1;
                }
                to.write_vectored(&slices[..count])
            };
            match sent {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(sent) => self.gone(sent),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    fn gone(&mut self, sent: usize) {
        self.sent += sent;
        while let Some(length) = self.pieces.front().map(|piece| piece.bytes().len())
            && length <= self.sent
        {
            self.sent -= length;
            self.length -= length;
            self.pieces.pop_front();
        }
        if self.pieces.is_empty() {
            self.account.give(std::mem::take(&mut self.charged));
            // An idle connection holds no memory.
            self.pieces = VecDeque::new();
        }
    }
}

impl Drop for Output {
    fn drop(&mut self) {
        self.account.give(self.charged);
    }
}
