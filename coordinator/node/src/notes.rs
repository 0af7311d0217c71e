//! What the tasks that run next to a leader's driver tell it.

use elastic_proto::pulse::{Beat, LeaderMessage};
use elastic_rendezvous::LeaderInput;
use elastic_rendezvous::job::NodeId;
use elastic_store::Revision;
use tokio::sync::{OwnedSemaphorePermit, mpsc, watch};

use super::pulse_proof::Shown;

/// What runs beside a leader reports through this.
pub enum LeaderNote {
    /// Of this term: a transaction, a watch or a dial.
    Input(Revision, LeaderInput),
    /// From a pulse stream, whose next note waits until this one has had its turn.
    Pulse {
        /// The stream.
        stream: u64,
        /// What happened on it.
        event: PulseEvent,
        /// Given back once the note is handled.
        turn: OwnedSemaphorePermit,
    },
}

/// What happened on a pulse stream.
pub enum PulseEvent {
    /// Somebody opened it.
    Opened {
        /// The member, by its own word.
        node: NodeId,
        /// What proves that; none from one that proves nothing.
        shown: Option<Shown>,
        /// Where the newest answer and probe go; dropped, it ends the stream.
        answers: watch::Sender<LeaderMessage>,
    },
    /// A beat.
    Beat(Beat),
    /// It ended.
    Closed,
}

/// Where notes for a leader go. The queue stays short: one transaction is under way, and pulses take turns.
pub type LeaderInbox = mpsc::UnboundedSender<LeaderNote>;
