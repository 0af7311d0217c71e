//! The log of one replica: what was agreed on, and what is about to be. Its front is dropped once it was carried out.

use std::collections::VecDeque;

use elastic_proto::replication::entry::What;
use elastic_proto::replication::{Entry, Place, Voters};
use prost::Message;

/// What is kept of what was carried out, for replicas that lag: entries, and their bytes. Others get the whole state.
/// Few in tests, so that states are sent there often.
const KEPT: usize = if cfg!(test) { 8 } else { 1024 };
const KEPT_BYTES: usize = 8 << 20;

/// The most of one letter. One entry is always sent.
const LETTER: usize = 256;
const LETTER_BYTES: usize = 1 << 20;

#[derive(Debug, Default)]
pub(super) struct Log {
    /// The last entry that was dropped.
    base: Place,
    entries: VecDeque<Entry>,
    bytes: usize,
    /// Who votes from which entry on; the last one counts. One of them is at or before `base`, unless that is zero.
    voters: Vec<(u64, Voters)>,
}

impl Log {
    /// What follows a state that came as a whole.
    pub(super) fn after(base: Place, voters: Voters) -> Log {
        Log { base, entries: VecDeque::new(), bytes: 0, voters: vec![(base.index, voters)] }
    }

    pub(super) fn base(&self) -> Place {
        self.base
    }

    pub(super) fn last(&self) -> Place {
        let term = self.entries.back().map_or(self.base.term, |entry| entry.term);
        Place { index: self.base.index + self.entries.len() as u64, term }
    }

    fn offset(&self, index: u64) -> Option<usize> {
        usize::try_from(index.checked_sub(self.base.index + 1)?).ok()
    }

    pub(super) fn get(&self, index: u64) -> Option<&Entry> {
        self.entries.get(self.offset(index)?)
    }

    /// The term of an entry, where it is known.
    pub(super) fn term(&self, index: u64) -> Option<u64> {
        if index == self.base.index { Some(self.base.term) } else { self.get(index).map(|entry| entry.term) }
    }

    /// Who votes, and the entry that says so.
    pub(super) fn voters(&self) -> (u64, &Voters) {
        const NONE: &Voters = &Voters { lives: Vec::new(), third_comes: 0 };
        self.voters.last().map_or((0, NONE), |(index, voters)| (*index, voters))
    }

    /// Whether at most two voted before that entry.
    pub(super) fn were_few(&self) -> bool {
        let before = self.voters.iter().rev().nth(1);
        before.is_some_and(|(_, voters)| voters.lives.iter().filter(|&&life| life != 0).count() <= 2)
    }

    /// Who voted as of an entry.
    pub(super) fn voters_at(&self, index: u64) -> Voters {
        let found = self.voters.iter().rev().find(|(since, _)| *since <= index);
        found.map(|(_, voters)| voters.clone()).unwrap_or_default()
    }

    pub(super) fn push(&mut self, entry: Entry) -> Place {
        let place = Place { index: self.last().index + 1, term: entry.term };
        if let Some(What::Voters(voters)) = &entry.what {
            self.voters.push((place.index, voters.clone()));
        }
        self.bytes += entry.encoded_len();
        self.entries.push_back(entry);
        place
    }

    /// Takes what a leader sends from its entry after `prev` on, where that fits.
    pub(super) fn take(&mut self, prev: u64, entries: Vec<Entry>) {
        for (index, entry) in (prev + 1..).zip(entries) {
            match self.term(index) {
                _ if index <= self.base.index => {}
                Some(term) if term == entry.term => {}
                Some(_) => {
                    self.cut(index);
                    self.push(entry);
                }
                None => {
                    self.push(entry);
                }
            }
        }
    }

    /// Forgets an entry that was never agreed on, and all after it.
    fn cut(&mut self, index: u64) {
        while self.last().index >= index
            && let Some(entry) = self.entries.pop_back()
        {
            self.bytes -= entry.encoded_len();
        }
        self.voters.retain(|(since, _)| *since < index);
    }

    /// Entries from one on, as many as fit into a letter.
    pub(super) fn from(&self, index: u64) -> Vec<Entry> {
        let Some(start) = self.offset(index) else { return Vec::new() };
        let mut bytes = 0;
        let fits = |entry: &&Entry| {
            let first = bytes == 0;
            bytes += entry.encoded_len().max(1);
            first || bytes <= LETTER_BYTES
        };
        self.entries.iter().skip(start).take(LETTER).take_while(fits).cloned().collect()
    }

    /// Drops from the front what was carried out and is more than what is kept.
    pub(super) fn trim(&mut self, applied: u64) {
        while self.base.index < applied
            && (self.entries.len() > KEPT || self.bytes > KEPT_BYTES)
            && let Some(entry) = self.entries.pop_front()
        {
            self.bytes -= entry.encoded_len();
            self.base = Place { index: self.base.index + 1, term: entry.term };
        }
        let old = self.voters.iter().filter(|(since, _)| *since <= self.base.index).count();
        self.voters.drain(..old.saturating_sub(1));
    }
}
