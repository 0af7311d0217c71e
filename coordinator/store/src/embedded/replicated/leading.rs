//! What a replica does while it leads: it sends the others its log, counts who has it, and changes who votes.

use std::collections::BTreeMap;
use std::time::Duration;

use elastic_proto::replication::entry::What;
use elastic_proto::replication::letter::Body;
use elastic_proto::replication::{Append, Command, Entry, Letter, Place, Snapshot, Took, Voters};
use elastic_rendezvous::time::Time;

use super::replica::{BEAT, ELECTION, Output, Replica, Role};
use crate::embedded::command;

/// Entries without an answer are sent again after this, and a whole state after that.
const AGAIN: Duration = Duration::from_secs(1);
const STATE_AGAIN: Duration = Duration::from_secs(5);

/// Who lacks no more entries than these may vote.
const CAUGHT_UP: u64 = 16;

/// One that is led.
#[derive(Debug)]
pub(super) struct Peer {
    pub(super) life: u64,
    /// The next entry to send.
    next: u64,
    /// Up to here its log is known to be the leader's.
    matched: u64,
    heard: Time,
    /// When it was last sent anything.
    sent: Time,
    /// Until when the answer to what it was sent is waited for.
    busy: Option<Time>,
}

impl Peer {
    fn new(life: u64, next: u64, now: Time) -> Peer {
        Peer { life, next, matched: 0, heard: now, sent: Time::ZERO, busy: None }
    }
}

impl Replica {
    /// Leads from now on, in its term.
    pub(super) fn lead(&mut self, now: Time) {
        let next = if self.commit == 0 && self.term == 1 { 1 } else { self.log.last().index + 1 };
        let deciders = self.deciders();
        let others = self.others().filter(|&seat| deciders[seat] != 0);
        let peers: BTreeMap<usize, Peer> = others.map(|seat| (seat, Peer::new(deciders[seat], next, now))).collect();
        self.role = Role::Leader { peers, first: self.log.last().index + 1, since: now, told: 0 };
        self.add(now, What::Command(command::at(now, command::new_leader())));
    }

    /// Has a command agreed on: where it will be in the log, if this one serves. [`Output::Apply`] with the same place
    /// says that it is done; another one at that index, that it never will be.
    pub fn propose(&mut self, now: Time, command: Command) -> (Option<Place>, Vec<Output>) {
        let place = match &self.role {
            Role::Leader { first, .. } if self.commit >= *first && !self.is_alone() => {
                self.add(now, What::Command(command))
            }
            _ => None,
        };
        (place, std::mem::take(&mut self.out))
    }

    fn add(&mut self, now: Time, what: What) -> Option<Place> {
        let place = self.log.push(Entry { term: self.term, what: Some(what) });
        for seat in self.others() {
            self.send_more(now, seat);
        }
        self.agree();
        Some(place)
    }

    /// Sends what a peer lacks, unless it is busy with what it was sent. One that decides nothing gets only what is
    /// agreed on: with an entry more than those that do decide it would refuse them its vote, which they may need.
    fn send_more(&mut self, now: Time, seat: usize) {
        let (base, applied, commit) = (self.log.base().index, self.applied, self.commit);
        let deciders = self.deciders();
        let Role::Leader { peers, .. } = &mut self.role else { return };
        let Some(peer) = peers.get_mut(&seat) else { return };
        let last = if deciders[seat] == peer.life { self.log.last().index } else { commit };
        let is_gone = now.since(peer.heard) >= ELECTION;
        if peer.busy.is_some_and(|until| now < until) || peer.next > last || (is_gone && peer.next <= base) {
            return;
        }
        peer.sent = now;
        let (life, next) = (peer.life, peer.next);
        let prev = Place { index: next - 1, term: self.log.term(next - 1).unwrap_or(0) };
        let body = if next <= base {
            peer.busy = Some(now + STATE_AGAIN);
            let place = Place { index: applied, term: self.log.term(applied).unwrap_or(0) };
            let voters = Some(self.log.voters_at(applied));
            Body::Snapshot(Snapshot { place: Some(place), voters, state: Vec::new() })
        } else {
            peer.busy = Some(now + AGAIN);
            let mut entries = self.log.from(next);
            entries.truncate(usize::try_from(last + 1 - next).unwrap_or(usize::MAX));
            let commit = commit.min(prev.index + entries.len() as u64);
            Body::Append(Append { prev: Some(prev), entries, commit })
        };
        self.send(seat, life, body);
    }

    /// Keeps the others from voting, and leads no more where it does not hear a majority.
    pub(super) fn beat(&mut self, now: Time) {
        let commit = self.commit;
        let mut quiet = Vec::new();
        if let Role::Leader { peers, .. } = &mut self.role {
            for (&seat, peer) in peers.iter_mut().filter(|(_, peer)| now.since(peer.sent) >= BEAT) {
                peer.sent = now;
                quiet.push((seat, peer.life, commit.min(peer.matched)));
            }
        }
        for (seat, life, commit) in quiet {
            self.send(seat, life, Body::Append(Append { prev: None, entries: Vec::new(), commit }));
        }
        for seat in self.others() {
            self.send_more(now, seat);
        }
        self.agree();
        self.change_voters(now);
        if !self.enough(|peer| now.since(peer.heard) < ELECTION) {
            self.follow(now, self.term, None);
        }
    }

    /// Whether those voters that fit are enough, this one among them.
    fn enough(&self, fits: impl Fn(&Peer) -> bool) -> bool {
        let Role::Leader { peers, .. } = &self.role else { return false };
        let fit: Vec<u64> = peers.values().filter(|peer| fits(peer)).map(|peer| peer.life).collect();
        self.suffice(|life| life == self.life || fit.contains(&life))
    }

    /// An answer of one that is led.
    pub(super) fn took(&mut self, now: Time, seat: usize, from: &Letter, took: Took) {
        let Role::Leader { peers, .. } = &mut self.role else { return };
        let Some(peer) = peers.get_mut(&seat).filter(|peer| peer.life == from.life) else { return };
        if from.term != self.term {
            return;
        }
        peer.heard = now;
        if took.refused {
            peer.next = (took.index + 1).clamp(peer.matched + 1, peer.next);
            peer.busy = None;
        } else if took.index > 0 {
            peer.matched = peer.matched.max(took.index);
            peer.next = peer.matched + 1;
            peer.busy = None;
        }
        self.agree();
        self.change_voters(now);
        self.send_more(now, seat);
    }

    /// Counts which entries a majority has.
    fn agree(&mut self) {
        let Role::Leader { peers, .. } = &self.role else { return };
        let last = self.log.last().index;
        let mut matched: Vec<u64> = peers.values().map(|peer| peer.matched).chain([last]).collect();
        matched.sort_unstable();
        // Only an entry of its own term shows that no other leader can undo it.
        let agreed =
            |&index: &u64| self.log.term(index) == Some(self.term) && self.enough(|peer| peer.matched >= index);
        if let Some(index) = matched.into_iter().rev().filter(|index| *index > self.commit).find(agreed) {
            self.commit = index;
            self.apply();
            self.hurry();
        }
    }

    /// The others hear soon that it is agreed who votes: they may need to know it without this one.
    fn hurry(&mut self) {
        let Role::Leader { peers, told, .. } = &mut self.role else { return };
        let (since, _) = self.log.voters();
        if *told < since && since <= self.commit {
            *told = since;
            peers.values_mut().for_each(|peer| peer.sent = Time::ZERO);
        }
    }

    /// One without a vote says hello: it is sent the state, once the life before it has certainly ended.
    pub(super) fn welcome(&mut self, now: Time, seat: usize, from: &Letter) {
        let (voter, cluster) = (self.voters().get(seat).copied().unwrap_or(0), self.cluster);
        let is_free = voter == 0 || self.ended.contains(&voter);
        let Role::Leader { peers, .. } = &mut self.role else { return };
        if from.life == voter || !is_free || ![0, cluster].contains(&from.cluster) || self.commit == 0 {
            return;
        }
        if peers.get(&seat).is_none_or(|peer| peer.life != from.life) {
            peers.insert(seat, Peer::new(from.life, 1, now));
        }
        peers.entry(seat).and_modify(|peer| peer.heard = now);
        self.send_more(now, seat);
    }

    /// Takes one voter out whose life has ended, or one in who has the state: one change at a time, once the last is
    /// agreed on, so that those who decide before and after it always meet. Before a third comes, the two agree on that.
    fn change_voters(&mut self, now: Time) {
        let (since, Voters { lives, third_comes }) = self.log.voters();
        let Role::Leader { peers, first, .. } = &self.role else { return };
        if self.commit < *first || self.commit < since {
            return;
        }
        let newcomers: Vec<(usize, &Peer)> =
            peers.iter().map(|(&seat, peer)| (seat, peer)).filter(|(seat, peer)| lives[*seat] != peer.life).collect();
        let ready = |(_, peer): &&(usize, &Peer)| {
            let caught_up = peer.matched > 0 && peer.matched + CAUGHT_UP >= self.commit;
            caught_up && now.since(peer.heard) < ELECTION
        };
        let third = newcomers.iter().filter(ready).find(|(_, peer)| peer.life == *third_comes);
        let ended = lives.iter().position(|life| self.ended.contains(life));
        let are_two = lives.iter().filter(|&&life| life != 0).count() == 2;
        let mut then = Voters { lives: lives.clone(), third_comes: 0 };
        match (third.or_else(|| newcomers.iter().find(ready)), ended) {
            _ if *third_comes == self.life => then.lives[self.seat] = self.life,
            (Some((seat, _)), _) if lives[*seat] != 0 => then.lives[*seat] = 0,
            (Some((seat, peer)), _) if !are_two || peer.life == *third_comes => then.lives[*seat] = peer.life,
            // Of two with an ended one, the other decides alone. Had it to ask the third first, it would have to wait for
            // the ended one.
            (Some(_), Some(ended)) => then.lives[ended] = 0,
            (Some((_, peer)), None) => then.third_comes = peer.life,
            // The third is gone. It must not be given up sooner: one of the two may end.
            (None, None)
                if *third_comes != 0 && newcomers.iter().all(|(_, peer)| now.since(peer.heard) > 2 * ELECTION) => {}
            (None, _) => return,
        }
        self.add(now, What::Voters(then));
    }
}
