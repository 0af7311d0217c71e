//! Carries the machines of [`elastic_rendezvous`]: runs their transactions, watches, leases, pulses and timers, and
//! hands worker commands to the agent. Nothing is decided here.
//!
//! One task owns a [`Member`](elastic_rendezvous::Member) and, while it leads, a [`Leader`](elastic_rendezvous::Leader).
//! All IO runs next to it and reports back through one queue, so the machines see one event at a time:
//!
//! ```text
//!   store calls ─┐                         ┌─▶ store calls
//!   watches ─────┤                         ├─▶ watches
//!   pulses ──────┼─▶ queue ─▶ step ────────┼─▶ pulses
//!   dials ───────┤                         ├─▶ dials
//!   the agent ───┘                         └─▶ commands to the agent
//! ```

#![deny(unsafe_code)]

pub mod bandwidth;
#[cfg(test)]
#[path = "../../store/src/listener/blackhole_proxy.rs"]
mod blackhole_proxy;
pub mod dial;
mod drive;
mod knock;
pub mod lead;
pub mod logs;
pub mod notes;
pub mod peer_port;
mod proven;
mod pulse_client;
mod pulse_proof;
pub mod pulse_server;
pub mod requests;
pub mod tasks;
pub mod trust;

use std::io;
use std::sync::Arc;

use ring::rand::{SecureRandom, SystemRandom};
use tokio::net::TcpListener;
use tokio::sync::{mpsc, watch};

use elastic_rendezvous::job::{JobId, RoundRecord, Timings, Versioned};
use elastic_rendezvous::time::Time;
pub use elastic_rendezvous::{Command, GroupReport};
use elastic_rendezvous::{Credentials, End, MemberInput, MemberSetup};
use elastic_store::Store;
use elastic_store::tls::MutualTls;

use logs::LogRequest;
use peer_port::PeerPort;

/// How an incarnation's part ends.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Parting {
    /// The agent is finished.
    End(End),
    /// It was evicted, with the reason: it may join again as a new incarnation.
    Rejoin(String),
}

/// A node's place in a final version of TorchElastic's rendezvous.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Membership {
    /// The version.
    pub version: u64,
    /// The node's position in it. No other node ever has it there.
    pub group_rank: u32,
    /// Nodes in it.
    pub group_world_size: u32,
}

/// The state of a node, for the worker socket and for people.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Status {
    /// What lets it commit, while it is a member of a round.
    pub credentials: Option<Credentials>,
    /// Where its workers run in TorchElastic's rendezvous, which knows no credentials.
    pub membership: Option<Membership>,
    /// The round as last seen.
    pub round: Option<Versioned<RoundRecord>>,
    /// Whether it leads.
    pub leading: bool,
    /// The timings of the job that it has joined.
    pub timings: Option<Timings>,
}

/// What runs beside the member reports through this.
type Inbox = mpsc::UnboundedSender<MemberInput>;

/// A node's driver: keeps the peer port over all incarnations of the agent.
pub struct Node {
    store: Arc<dyn Store>,
    job: JobId,
    front: Arc<PeerPort>,
    status: watch::Sender<Status>,
    concludes: bool,
    tls: Option<MutualTls>,
}

impl Node {
    /// A node that takes pulses on `listener`, which serves as long as the tokio runtime. With `logs`, whose other end
    /// gets them, the node takes requests for its workers' output: at most [`logs::READERS`] at once. With `tls` it
    /// speaks only with those who show a certificate.
    pub fn new(
        store: Arc<dyn Store>,
        job: JobId,
        listener: TcpListener,
        logs: Option<mpsc::Sender<LogRequest>>,
        tls: Option<MutualTls>,
    ) -> Node {
        let front = Arc::<PeerPort>::default();
        tokio::spawn(pulse_server::serve(listener, Arc::clone(&front), logs, tls.clone()));
        Node { store, job, front, status: watch::Sender::new(Status::default()), concludes: false, tls }
    }

    /// The same, for an agent that wants a word before the node's key goes: see [`Command::Conclude`].
    #[must_use]
    pub fn concluding(self) -> Node {
        Node { concludes: true, ..self }
    }

    /// The node's state, as it changes.
    pub fn status(&self) -> watch::Receiver<Status> {
        self.status.subscribe()
    }

    /// Runs one incarnation to its end.
    pub async fn run(
        &self,
        setup: MemberSetup,
        commands: &mpsc::UnboundedSender<Command>,
        reports: &mut mpsc::UnboundedReceiver<GroupReport>,
    ) -> Parting {
        let parting = drive::run(self, setup, commands, reports).await;
        self.front.close(&self.job);
        self.status.send_replace(Status::default());
        parting
    }
}

/// Bytes from the system that no one can guess.
pub fn random_bytes<const N: usize>() -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    let filled = SystemRandom::new().fill(&mut bytes);
    filled.map(|()| bytes).map_err(|_| io::Error::other("the system gives no random bytes"))
}

/// What to add to this machine's clock for milliseconds since the Unix epoch, for the history that people read.
pub fn epoch_ms(now: Time) -> u64 {
    elastic_store::clock::epoch_ms().saturating_sub(now.as_millis())
}
