//! What a leader keeps, in parts that change together.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use crate::decide::{Eviction, Stale};
use crate::job::{Checkpoint, NodeId, RoundRecord};
use crate::kv::{Event, Revision, Txn};
use crate::roster::Contact;
use crate::seats::Seat;
use crate::time::Time;
use crate::view::View;

/// What it is at.
#[derive(Debug, Clone)]
pub(super) enum Stage {
    /// Nothing is under way. It decides when something comes, or at this time.
    Idle { wake: Option<Time> },
    /// The store failed, or others write again and again. Nothing is tried before this time.
    Pausing { until: Time },
    /// This is under way.
    Busy(Box<Doing>),
    /// The term is over: another leads.
    Over,
}

/// Operation under way.
#[derive(Debug, Clone)]
pub(super) enum Doing {
    /// Reading the whole job.
    Load,
    /// Evicting, then writing the round as forming; `rest` holds what follows, the record last.
    Form { record: RoundRecord, evict: Vec<Eviction>, quick: bool, rest: VecDeque<Txn> },
    /// Writing rank keys; `rest` holds what follows, the `running` record last.
    Seal { record: RoundRecord, seats: Vec<Seat>, rest: VecDeque<Txn> },
    /// Writing the result, and deleting done nodes' keys.
    Finish { record: RoundRecord, swept: Vec<NodeId> },
    /// Turning nodes away.
    Refuse { nodes: Vec<NodeId> },
    /// Deleting keys that no one needs any more.
    Prune(Stale),
    /// Deleting what done nodes left behind a final state.
    Sweep { swept: Vec<NodeId> },
    /// Letting go of the `leader` key.
    Resign,
    /// Proving that it still leads.
    Prove,
    /// Putting a damaged record right.
    Mend,
}

/// What it knows of the job.
#[derive(Debug, Clone)]
pub(super) enum Known {
    /// What pulses told before the job was read.
    Contacts(BTreeMap<NodeId, Contact>),
    /// The job.
    Job(Box<View>),
}

impl Known {
    pub(super) fn view(&self) -> Option<&View> {
        match self {
            Known::Job(view) => Some(view),
            Known::Contacts(_) => None,
        }
    }

    pub(super) fn view_mut(&mut self) -> Option<&mut View> {
        match self {
            Known::Job(view) => Some(view),
            Known::Contacts(_) => None,
        }
    }

    pub(super) fn contacts(&self) -> &BTreeMap<NodeId, Contact> {
        match self {
            Known::Job(view) => view.roster.contacts(),
            Known::Contacts(contacts) => contacts,
        }
    }
}

/// How new what it knows is.
#[derive(Debug, Clone, Default)]
pub(super) struct News {
    /// The job was read, and need not be read again before the next decision.
    pub(super) fresh: bool,
    /// The store's revision at which it was read; older news is no news.
    pub(super) loaded: Revision,
    /// A read older than this tells less than a watch has told already, so the job is read again.
    pub(super) behind: Revision,
    /// The newest write of the round, its own or another's, that the watch told of.
    pub(super) of_round: Revision,
    /// News that came while the job was being read. The read may be older than they are, and no watch repeats them.
    pub(super) meanwhile: Vec<Event>,
}

/// What it writes with, from the records that it read last.
#[derive(Debug, Clone, Default)]
pub(super) struct Read {
    /// Where training resumes.
    pub(super) checkpoint: Option<Checkpoint>,
    /// The mod revision of the record that says so.
    pub(super) pointer: Revision,
    /// The mod revision of the record that says what the operator desires.
    pub(super) desired_at: Revision,
    /// The number of the next line of history.
    pub(super) next_event: u64,
    /// The last line of history was written by hand and has no number, so that the next one's may be taken.
    pub(super) uncounted: bool,
    /// Puts a damaged record right.
    pub(super) mend: Option<Txn>,
}

/// What it said, so that it says it once.
#[derive(Debug, Clone, Default)]
pub(super) struct Told {
    /// The reason of its last decision.
    pub(super) reason: String,
    /// What it warned of.
    pub(super) warnings: BTreeSet<String>,
}
