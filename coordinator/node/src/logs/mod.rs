//! Reads the workers' output through the agents' peer ports. The agent knows what is read, and from which files.
//!
//! Logs may hold anything, so an agent sends them only to clients that prove that they know [the job's
//! secret](elastic_rendezvous::job::JobSecret), which etcd's roles guard:
//!
//! ```text
//!  client                                    agent
//!    │ ── Read ────────────────────────────▶ │
//!    │ ◀──────────── nonce, 32 random bytes ─ │
//!    │ ── job, node, client, proof, query ─▶ │  proof = HMAC(secret; purpose, nonce, job, node, client)
//!    │ ◀───────────────────────────── text ─ │
//! ```
//!
//! The proof keeps strangers out. It does not hide the text from somebody who can read the network.

mod client;
mod server;

pub use client::{LogStream, LogsError, open};
pub use server::LogRequest;
pub(super) use server::service;

use elastic_proto::logs::{LogsReply, LogsRequest};

use super::proven::{ProvenReply, ProvenRequest};
use elastic_rendezvous::job::Claim;

/// What a client wants to read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LogQuery {
    /// Only this rank's output. `None`: all of the node's.
    pub rank: Option<u32>,
    /// Only that of workers that were in this round. `None`: of those that are there now, or were last.
    pub round: Option<u64>,
    /// How many of the last lines of each stream to begin with.
    pub lines: u32,
    /// Continue with what comes.
    pub follow: bool,
}

/// Readers that one agent serves at once.
pub const READERS: usize = 8;

/// Bytes of text in one message.
pub const CHUNK: usize = 32 * 1024;

impl ProvenRequest for LogsRequest {
    fn claim<'a>(&'a self, nonce: &'a [u8]) -> Claim<'a> {
        Claim { purpose: "elastic logs 1", nonce, job: &self.job, node: &self.node, client: &self.client }
    }
    fn proof(&mut self) -> &mut Vec<u8> {
        &mut self.proof
    }
}

impl ProvenReply for LogsReply {
    fn first(nonce: Vec<u8>) -> LogsReply {
        LogsReply { nonce, ..LogsReply::default() }
    }
    fn nonce(self) -> Vec<u8> {
        self.nonce
    }
}
