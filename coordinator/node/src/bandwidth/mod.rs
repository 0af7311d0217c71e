//! Measures how fast bytes come from a node of a job, through its agent's peer port.
//!
//! The client has no place in the job yet, so the proof is that of [`logs`](super::logs).
//!
//! ```text
//!  client                                    agent
//!    │ ── Measure ─────────────────────────▶ │
//!    │ ◀──────────── nonce, 32 random bytes ─ │
//!    │ ── job, node, client, proof ────────▶ │  proof = HMAC(secret; purpose, nonce, job, node, client)
//!    │ ◀──────────── bytes, for one second ─ │
//! ```
//!
//! A job's training continues meanwhile, so an agent serves one client at once, and none for long.

mod client;
mod server;
#[cfg(test)]
mod tests;

pub use client::{BandwidthError, Poured, measure};
pub(super) use server::service;

use std::time::Duration;

use elastic_proto::bandwidth::{MeasureReply, MeasureRequest};

use super::proven::{ProvenReply, ProvenRequest};
use elastic_rendezvous::job::Claim;

/// How long a client takes bytes.
pub const TAKEN: Duration = Duration::from_secs(1);

/// The longest that an agent pours, whatever the client does.
const POURED: Duration = Duration::from_secs(2);

/// Bytes of filler in one message.
const CHUNK: usize = 32 << 10;

impl ProvenRequest for MeasureRequest {
    fn claim<'a>(&'a self, nonce: &'a [u8]) -> Claim<'a> {
        Claim { purpose: "elastic bandwidth 1", nonce, job: &self.job, node: &self.node, client: &self.client }
    }
    fn proof(&mut self) -> &mut Vec<u8> {
        &mut self.proof
    }
}

impl ProvenReply for MeasureReply {
    fn first(nonce: Vec<u8>) -> MeasureReply {
        MeasureReply { nonce, ..MeasureReply::default() }
    }
    fn nonce(self) -> Vec<u8> {
        self.nonce
    }
}
