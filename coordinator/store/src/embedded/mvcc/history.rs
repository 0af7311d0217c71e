//! The log of events: what watches read and what historical ranges undo.

use std::collections::VecDeque;

use super::{Error, Limits, Mvcc, MvccEvent, Span};
use crate::Revision;

/// The history asked for is gone.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("revision {requested} was compacted away; the oldest left is {oldest}")]
pub struct Compacted {
    /// What was asked for.
    pub requested: Revision,
    /// The oldest revision left.
    pub oldest: Revision,
}

impl From<Compacted> for Error {
    fn from(Compacted { requested, oldest }: Compacted) -> Error {
        Error::Compacted { requested, oldest }
    }
}

#[derive(Clone, PartialEq, Eq, Hash, Debug, Default)]
pub(super) struct History {
    /// In order of revision, none older than `oldest`.
    events: VecDeque<MvccEvent>,
    oldest: Revision,
    bytes: usize,
}

impl History {
    pub(super) fn oldest(&self) -> Revision {
        self.oldest
    }

    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    pub(super) fn newest(&self) -> Option<Revision> {
        self.events.back().map(|event| event.revision)
    }

    pub(super) fn push(&mut self, event: MvccEvent) {
        self.bytes += event.size();
        self.events.push_back(event);
    }

    /// Fails for a revision whose events are not all kept any more.
    pub(super) fn check(&self, requested: Revision) -> Result<(), Compacted> {
        if requested < self.oldest { Err(Compacted { requested, oldest: self.oldest }) } else { Ok(()) }
    }

    /// Events at or after a revision, in order.
    pub(super) fn since(&self, from: Revision) -> impl Iterator<Item = &MvccEvent> {
        let start = self.events.partition_point(|event| event.revision < from);
        self.events.range(start..)
    }

    pub(super) fn compact(&mut self, oldest: Revision) {
        self.oldest = self.oldest.max(oldest);
        while self.events.front().is_some_and(|event| event.revision < self.oldest) {
            if let Some(event) = self.events.pop_front() {
                self.bytes -= event.size();
            }
        }
    }

    /// Compacts as far as the bounds want it, but never the newest revision.
    pub(super) fn trim(&mut self, limits: &Limits, current: Revision) {
        let kept = limits.history_revisions.max(1);
        // Zero says that all of history is there, as in a store younger than the bound.
        if current.0 - kept > 0 {
            self.compact(Revision(current.0 - kept + 1));
        }
        while self.bytes > limits.history_bytes {
            match self.events.front() {
                Some(event) if event.revision < current => self.compact(event.revision.next()),
                _ => break,
            }
        }
    }
}

impl Mvcc {
    /// The changes in a span from a revision on, in order. A revision that lies ahead has none yet.
    pub fn events(&self, span: &Span, from: Revision) -> Result<impl Iterator<Item = &MvccEvent>, Compacted> {
        self.history.check(from)?;
        Ok(self.history.since(from).filter(move |event| span.contains(&event.key)))
    }

    /// Forgets all states before `oldest`. An error: that was done already, or `oldest` lies ahead.
    pub fn compact(&mut self, oldest: Revision) -> Result<(), Error> {
        if oldest <= self.history.oldest() {
            return Err(Error::Compacted { requested: oldest, oldest: self.history.oldest() });
        }
        if oldest > self.revision {
            return Err(Error::FutureRevision { requested: oldest, current: self.revision });
        }
        self.history.compact(oldest);
        Ok(())
    }
}
