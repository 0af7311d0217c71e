//! Rank 0's port, published in the agent's TCPStore: one key is set and read.
//!
//! The wire format is PyTorch's (torch 2.1 and later): a byte for the operation, little-endian integers, and strings
//! after a `u64` of their length.

use std::io::{self, ErrorKind, Read};
use std::net::{SocketAddr, TcpStream};

use rustix::event::PollFlags;

use super::{Bootstrap, CONNECT_TIME, prepare};
use crate::CollectiveError;
use crate::stop::GLANCE;

/// VALIDATE and its number, which each client sends first.
const HELLO: [u8; 5] = [0, 0xce, 0xf7, 0x85, 0x3c];
const SET: u8 = 1;
const GET: u8 = 3;
const WAIT: u8 = 6;
const PING: u8 = 13;
/// The answer to a WAIT for a key that exists.
const THERE: [u8; 1] = [0];

fn string(bytes: &[u8]) -> Vec<u8> {
    [&(bytes.len() as u64).to_le_bytes(), bytes].concat()
}

impl Bootstrap<'_> {
    /// The key of this round. torchrun's store outlives a restart, so the round is part of the key.
    fn key(&self) -> Vec<u8> {
        string(format!("/elastic-trainer/{}/rank-0", self.config.round).as_bytes())
    }

    /// Publishes the port on which rank 0 listens.
    pub(super) fn publish(&self, store: &TcpStream, port: u16) -> Result<(), CollectiveError> {
        let set = [&[SET][..], &self.key(), &string(port.to_string().as_bytes())].concat();
        // A SET has no answer. The answer to the PING after it shows that the SET was done.
        self.write(store, 0, &[&HELLO[..], &set, &[PING, 1, 2, 3, 4]].concat(), failed)?;
        self.hear::<4>(store).map(drop)
    }

    /// Waits until rank 0 has published its port, and returns its address.
    pub(super) fn look_up(&self, master: SocketAddr) -> Result<SocketAddr, CollectiveError> {
        let lost = |cause: io::Error| failed(cause.to_string());
        let store = TcpStream::connect_timeout(&master, CONNECT_TIME.min(self.left().max(GLANCE))).map_err(lost)?;
        prepare(&store).map_err(lost)?;
        self.write(&store, 0, &[&HELLO[..], &[WAIT], &1_u64.to_le_bytes(), &self.key()].concat(), failed)?;
        if self.hear(&store)? != THERE {
            return Err(failed("it does not answer as TCPStore does"));
        }
        self.write(&store, 0, &[&[GET][..], &self.key()].concat(), failed)?;
        let length = u64::from_le_bytes(self.hear(&store)?);
        let mut text = Vec::new();
        while text.len() as u64 != length.min(5) {
            text.extend(self.hear::<1>(&store)?);
        }
        let port = std::str::from_utf8(&text).ok().and_then(|text| text.parse().ok());
        port.map(|port| SocketAddr::new(master.ip(), port)).ok_or_else(|| failed("it holds no port for rank 0"))
    }

    fn hear<const N: usize>(&self, mut store: &TcpStream) -> Result<[u8; N], CollectiveError> {
        let (mut bytes, mut have) = ([0; N], 0);
        while have < N {
            match store.read(&mut bytes[have..]) {
                Ok(0) => return Err(failed("it closed the connection")),
                Ok(count) => have += count,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => self.wait(&[(store, PollFlags::IN)], &[0])?,
                Err(error) => return Err(failed(error.to_string())),
            }
        }
        Ok(bytes)
    }
}

fn failed(cause: impl Into<String>) -> CollectiveError {
    CollectiveError::Address { address: "rank 0, in the store at MASTER_PORT".to_owned(), cause: cause.into() }
}
