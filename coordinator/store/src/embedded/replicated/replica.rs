//! One of the three, as a pure machine: letters and the time come in, letters and agreed commands go out. How it leads is
//! in `leading`.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use elastic_proto::replication::entry::What;
use elastic_proto::replication::letter::Body;
use elastic_proto::replication::{Append, Ask, Command, Entry, Hello, Letter, Place, Snapshot, Took, Vote, Voters};
use elastic_rendezvous::time::Time;

use super::leading::Peer;
use super::leaving::Leave;
use super::log::Log;

/// Between two letters of a leader to each, and of one without a vote.
pub(super) const BEAT: Duration = Duration::from_millis(100);

/// A follower that hears no leader for this long, and up to twice as long, asks for votes. A leader that hears no
/// majority for this long leads no more.
pub(super) const ELECTION: Duration = Duration::from_secs(1);

/// Who was heard this recently is there. Each greets twice as often: those that follow hear of each other only so.
pub(super) const RECENT: Duration = Duration::from_secs(1);

/// No index or term is higher, so that one more is always possible.
const MOST: u64 = u64::MAX / 2;

/// What the driver is to do.
#[derive(Debug, Clone, PartialEq)]
pub enum Output {
    /// Send a letter to a seat; it may be lost. A snapshot's state is added by the driver: all that was carried out.
    Send(usize, Letter),
    /// Carry out a command: it is agreed on.
    Apply(Place, Command),
    /// Begin with this state.
    Restore(Vec<u8>),
    /// Begin with an empty state.
    Reset,
}

/// What a replica is to clients.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Standing {
    /// It serves them.
    Serves,
    /// Another one does: its seat.
    Follows(usize),
    /// None does as far as it knows. These seats have been heard, this one among them.
    Waits(Vec<usize>),
}

#[derive(Debug)]
pub(super) enum Role {
    /// Without a cluster.
    Fresh,
    Follower {
        leader: Option<usize>,
        heard: Time,
    },
    Candidate {
        /// It only asks whether it would be voted for.
        pre: bool,
        votes: BTreeSet<u64>,
    },
    Leader {
        /// By seat. One whose life has no vote is about to get it.
        peers: BTreeMap<usize, Peer>,
        /// Its first entry: once that is agreed on, it serves.
        first: u64,
        since: Time,
        /// The others have heard that the entry on voters here is agreed on.
        told: u64,
    },
}

/// What was last heard from a seat.
#[derive(Debug, Clone, Copy)]
pub(super) struct Heard {
    pub(super) life: u64,
    pub(super) cluster: u64,
    pub(super) at: Time,
    /// It needs the store no more.
    pub(super) leaves: bool,
}

/// One of the agents that hold the store.
#[derive(Debug)]
pub struct Replica {
    pub(super) seat: usize,
    pub(super) seats: usize,
    /// Checksum of the endpoints.
    endpoints: u64,
    seed: u64,
    pub(super) life: u64,
    /// When this life began.
    pub(super) begun: Time,
    pub(super) cluster: u64,
    pub(super) term: u64,
    /// The life that has this one's vote in this term.
    pub(super) voted: u64,
    pub(super) log: Log,
    pub(super) commit: u64,
    pub(super) applied: u64,
    pub(super) role: Role,
    /// When to ask for votes, or to say hello again.
    due: Time,
    greeted: Time,
    /// When a leader was last heard.
    pub(super) led: Time,
    pub(super) heard: Vec<Option<Heard>>,
    /// Lives that have certainly ended.
    pub(super) ended: BTreeSet<u64>,
    /// Its process needs the store no more.
    pub(super) leaves: Option<Leave>,
    pub(super) out: Vec<Output>,
}

impl Replica {
    /// A fresh life. The endpoints are all that may serve, in one order on all of them; `seat` is this one's place among
    /// them. `seed` gives its lives and pauses.
    pub fn new(endpoints: &[String], seat: usize, seed: u64, now: Time) -> Replica {
        let checksum = endpoints.iter().flat_map(|endpoint| endpoint.bytes().chain([0]));
        let mut replica = Replica {
            seat,
            seats: endpoints.len(),
            endpoints: checksum
                .fold(0xcbf2_9ce4_8422_2325, |sum, byte| (sum ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3)),
            seed,
            life: 0,
            begun: now,
            cluster: 0,
            term: 0,
            voted: 0,
            log: Log::default(),
            commit: 0,
            applied: 0,
            role: Role::Fresh,
            due: now,
            greeted: Time::ZERO,
            led: now,
            heard: vec![None; endpoints.len()],
            ended: BTreeSet::new(),
            leaves: None,
            out: Vec::new(),
        };
        replica.life = replica.draw();
        replica
    }

    /// Its life.
    pub fn life(&self) -> u64 {
        self.life
    }

    /// Its cluster; 0 for none.
    pub fn cluster(&self) -> u64 {
        self.cluster
    }

    /// The term that it is in.
    pub fn term(&self) -> u64 {
        self.term
    }

    /// The lives that vote, by seat.
    pub fn voters(&self) -> &[u64] {
        &self.log.voters().1.lives
    }

    /// Whether letters from one with these endpoints can be meant for this one.
    pub fn knows(&self, letter: &Letter) -> bool {
        letter.endpoints == self.endpoints
    }

    /// What it is to clients.
    pub fn standing(&self, now: Time) -> Standing {
        match &self.role {
            Role::Leader { first, .. } if self.commit >= *first && !self.is_alone() => Standing::Serves,
            Role::Follower { leader: Some(leader), heard } if now.since(*heard) < ELECTION => {
                Standing::Follows(*leader)
            }
            _ => Standing::Waits((0..self.seats).filter(|&at| at == self.seat || self.is_there(at, now)).collect()),
        }
    }

    pub(super) fn is_there(&self, seat: usize, now: Time) -> bool {
        self.heard[seat].is_some_and(|heard| now.since(heard.at) <= RECENT)
    }

    /// A number that is not zero.
    pub(super) fn draw(&mut self) -> u64 {
        self.seed = self.seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.seed ^ (self.seed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ (mixed >> 31)).max(1)
    }

    pub(super) fn put_off(&mut self, now: Time) {
        let more = self.draw() % (ELECTION.as_millis() as u64);
        self.due = now + ELECTION + Duration::from_millis(more);
    }

    pub(super) fn send(&mut self, seat: usize, to: u64, body: Body) {
        self.send_in(self.term, seat, to, body);
    }

    fn send_in(&mut self, term: u64, seat: usize, to: u64, body: Body) {
        let letter = Letter {
            seat: self.seat as u32,
            life: self.life,
            to,
            cluster: self.cluster,
            term,
            to_seat: seat as u32,
            endpoints: self.endpoints,
            leaves: self.leaves.is_some(),
            body: Some(body),
        };
        self.out.push(Output::Send(seat, letter));
    }

    pub(super) fn greet(&mut self, now: Time) {
        self.greeted = now;
        for seat in self.others() {
            self.send(seat, 0, Body::Hello(Hello { ended: 0 }));
        }
    }

    pub(super) fn others(&self) -> impl Iterator<Item = usize> + use<> {
        let own = self.seat;
        (0..self.seats).filter(move |&seat| seat != own)
    }

    /// Whether this life has a vote, as far as it knows.
    pub(super) fn votes(&self) -> bool {
        self.voters().get(self.seat) == Some(&self.life)
    }

    /// The lives that may decide something, by seat: those that vote, and the third that is about to.
    pub(super) fn deciders(&self) -> Vec<u64> {
        let (_, Voters { lives, third_comes }) = self.log.voters();
        lives.iter().map(|&life| if life == 0 { *third_comes } else { life }).collect()
    }

    pub(super) fn decides(&self, life: u64) -> bool {
        self.deciders().contains(&life)
    }

    /// Whether enough voters do something to decide it: a majority. Of two that is both, so each has all that was agreed
    /// on while at most two voted: where one has certainly ended, the other decides alone, or with the third that is
    /// about to get its vote. So any two of the three that will vote include one of those that decided before.
    pub(super) fn suffice(&self, does: impl Fn(u64) -> bool) -> bool {
        let (since, Voters { lives, third_comes }) = self.log.voters();
        let voters: Vec<u64> = lives.iter().copied().filter(|&life| life != 0).collect();
        let are_few = voters.len() <= 2 && (since <= self.commit || self.log.were_few());
        let left: Vec<u64> = voters.iter().copied().filter(|life| !self.ended.contains(life)).collect();
        match (left.len(), *third_comes) {
            _ if voters.is_empty() => true,
            (1, third) if third != 0 => does(left[0]) && does(third),
            (1 | 2, third) if third != 0 || are_few => left.into_iter().all(does),
            _ => voters.iter().filter(|&&life| does(life)).count() > voters.len() / 2,
        }
    }

    /// Whether no other is left that decides: it serves no one then, as the others could begin a cluster without it.
    pub(super) fn is_alone(&self) -> bool {
        self.deciders().iter().filter(|life| **life != 0 && !self.ended.contains(life)).count() < 2
    }

    /// Time passes: to be called about each 50 ms.
    pub fn tick(&mut self, now: Time) -> Vec<Output> {
        self.reconsider(now);
        let is_new = !matches!(self.role, Role::Leader { .. }) && !self.votes();
        if now.since(self.greeted) >= if is_new || self.leaves.is_some() { BEAT } else { RECENT / 2 } {
            self.greet(now);
        }
        match &self.role {
            Role::Fresh => self.found(now),
            Role::Follower { .. } | Role::Candidate { .. } if self.decides(self.life) && now >= self.due => {
                self.campaign(now, true)
            }
            Role::Follower { .. } | Role::Candidate { .. } => {}
            Role::Leader { .. } => self.beat(now),
        }
        std::mem::take(&mut self.out)
    }

    /// A letter came.
    pub fn receive(&mut self, now: Time, letter: Letter) -> Vec<Output> {
        let seat = letter.seat as usize;
        let astray = letter.to_seat as usize != self.seat || !self.knows(&letter) || !self.is_sound(&letter);
        if astray || seat >= self.seats || seat == self.seat || self.ended.contains(&letter.life) {
            return Vec::new();
        }
        if let Some(Body::Hello(Hello { ended })) = letter.body
            && ended != self.life
            && self.has_known(seat, ended)
        {
            self.ended.insert(ended);
        }
        // A letter that comes late takes nothing back.
        let leaves = letter.leaves || self.heard[seat].is_some_and(|heard| heard.leaves && heard.life == letter.life);
        self.heard[seat] = Some(Heard { life: letter.life, cluster: letter.cluster, at: now, leaves });
        if let Some(body) = letter.body {
            self.read(now, seat, Letter { body: None, ..letter }, body);
        }
        self.reconsider(now);
        std::mem::take(&mut self.out)
    }

    /// Whether what it says can be: one that is not of this program must not end it.
    fn is_sound(&self, letter: &Letter) -> bool {
        let voters = |voters: &Voters| voters.lives.len() == self.seats;
        let place = |place: &Option<Place>| place.is_none_or(|place| place.index <= MOST && place.term <= MOST);
        let entry = |entry: &Entry| !matches!(&entry.what, Some(What::Voters(those)) if !voters(those));
        let body = match &letter.body {
            Some(Body::Append(append)) => place(&append.prev) && append.entries.iter().all(entry),
            Some(Body::Snapshot(snapshot)) => place(&snapshot.place) && snapshot.voters.as_ref().is_some_and(voters),
            Some(Body::Took(took)) => took.index <= MOST,
            _ => true,
        };
        body && letter.life != 0 && letter.term <= MOST
    }

    /// Whether a seat has had this life, as far as that matters here.
    fn has_known(&self, seat: usize, life: u64) -> bool {
        let is_led = matches!(&self.role, Role::Leader { peers, .. }
            if peers.get(&seat).is_some_and(|peer| peer.life == life));
        life != 0
            && (is_led
                || self.deciders().get(seat) == Some(&life)
                || self.heard[seat].is_some_and(|heard| heard.life == life))
    }

    fn read(&mut self, now: Time, seat: usize, from: Letter, body: Body) {
        if let Body::Hello(_) = body {
            if from.to == 0 && self.cluster != 0 {
                self.send(seat, from.life, Body::Hello(Hello { ended: 0 }));
            }
            return self.welcome(now, seat, &from);
        }
        if from.to != self.life {
            return self.send(seat, from.life, Body::Hello(Hello { ended: from.to }));
        }
        let joins = self.cluster == 0 && matches!(body, Body::Append(_) | Body::Snapshot(_));
        if joins {
            self.cluster = from.cluster;
        } else if from.cluster != self.cluster {
            return self.send(seat, from.life, Body::Hello(Hello { ended: 0 }));
        }
        let only_asks =
            matches!(body, Body::Ask(Ask { pre: true, .. }) | Body::Vote(Vote { pre: true, granted: true }));
        if joins || (from.term > self.term && !only_asks && !self.ignores(now, &body)) {
            self.follow(now, from.term, None);
        }
        match body {
            Body::Ask(ask) => self.asked(now, seat, &from, ask),
            Body::Vote(vote) => self.voted_for(now, &from, vote),
            Body::Append(append) => self.append(now, seat, &from, append),
            Body::Snapshot(snapshot) => self.snapshot(now, seat, &from, snapshot),
            Body::Took(took) => self.took(now, seat, &from, took),
            Body::Hello(_) => {}
        }
    }

    /// A candidate is not listened to while a leader is heard: it may only have been cut off.
    fn ignores(&self, now: Time, body: &Body) -> bool {
        matches!(body, Body::Ask(_)) && self.is_led(now)
    }

    fn is_led(&self, now: Time) -> bool {
        match &self.role {
            Role::Leader { .. } => true,
            Role::Follower { leader: Some(_), heard } => now.since(*heard) < ELECTION,
            _ => false,
        }
    }

    pub(super) fn follow(&mut self, now: Time, term: u64, leader: Option<usize>) {
        if term > self.term {
            self.term = term;
            self.voted = 0;
        }
        self.role = Role::Follower { leader, heard: now };
        self.put_off(now);
    }

    fn campaign(&mut self, now: Time, pre: bool) {
        self.put_off(now);
        if !pre {
            self.term += 1;
            self.voted = self.life;
        }
        self.role = Role::Candidate { pre, votes: BTreeSet::from([self.life]) };
        let (term, ask) = (self.term + u64::from(pre), Ask { pre, last: Some(self.log.last()) });
        for seat in self.others() {
            match self.deciders()[seat] {
                0 => {}
                life => self.send_in(term, seat, life, Body::Ask(ask)),
            }
        }
        self.count_votes(now);
    }

    fn count_votes(&mut self, now: Time) {
        let Role::Candidate { pre, votes } = &self.role else { return };
        if self.suffice(|life| votes.contains(&life)) {
            if *pre { self.campaign(now, false) } else { self.lead(now) }
        }
    }

    fn asked(&mut self, now: Time, seat: usize, from: &Letter, Ask { pre, last }: Ask) {
        let (last, own) = (last.unwrap_or_default(), self.log.last());
        let knows_all = (last.term, last.index) >= (own.term, own.index);
        let free =
            if pre { from.term > self.term } else { from.term == self.term && [0, from.life].contains(&self.voted) };
        let granted = knows_all && free && !self.is_led(now);
        if granted {
            // Who asks needs this one: it must not begin again meanwhile.
            self.led = now;
        }
        if granted && !pre {
            self.voted = from.life;
            self.put_off(now);
        }
        let term = if granted { from.term } else { self.term };
        self.send_in(term, seat, from.life, Body::Vote(Vote { pre, granted }));
    }

    fn voted_for(&mut self, now: Time, from: &Letter, vote: Vote) {
        let decides = self.decides(from.life);
        let Role::Candidate { pre, votes } = &mut self.role else { return };
        if !vote.granted || vote.pre != *pre || from.term != self.term + u64::from(*pre) || !decides {
            return;
        }
        votes.insert(from.life);
        self.count_votes(now);
    }

    /// Whether the letter is from this term's leader, whom it then follows.
    fn is_from_leader(&mut self, now: Time, seat: usize, from: &Letter) -> bool {
        if from.term < self.term {
            self.send(seat, from.life, Body::Took(Took { index: 0, refused: false }));
            return false;
        }
        self.follow(now, from.term, Some(seat));
        self.led = now;
        true
    }

    fn append(&mut self, now: Time, seat: usize, from: &Letter, append: Append) {
        if !self.is_from_leader(now, seat, from) {
            return;
        }
        let prev = append.prev.unwrap_or_default();
        let fits = prev.index <= self.log.base().index || self.log.term(prev.index) == Some(prev.term);
        if !fits {
            let index = self.log.last().index.min(prev.index - 1);
            return self.send(seat, from.life, Body::Took(Took { index, refused: true }));
        }
        // A beat alone proves nothing of the log.
        let index = if append.entries.is_empty() { 0 } else { prev.index + append.entries.len() as u64 };
        self.log.take(prev.index, append.entries);
        self.commit = self.commit.max(append.commit.min(self.log.last().index));
        self.apply();
        self.send(seat, from.life, Body::Took(Took { index, refused: false }));
    }

    fn snapshot(&mut self, now: Time, seat: usize, from: &Letter, snapshot: Snapshot) {
        if !self.is_from_leader(now, seat, from) {
            return;
        }
        let place = snapshot.place.unwrap_or_default();
        if place.index > self.commit && self.log.term(place.index) == Some(place.term) {
            // It has this already. What follows here may be counted on.
            self.commit = place.index;
            self.apply();
        } else if place.index > self.commit {
            self.log = Log::after(place, snapshot.voters.unwrap_or_default());
            (self.commit, self.applied) = (place.index, place.index);
            self.out.push(Output::Restore(snapshot.state));
        }
        self.send(seat, from.life, Body::Took(Took { index: place.index, refused: false }));
    }

    /// Hands out what is agreed on.
    pub(super) fn apply(&mut self) {
        while self.applied < self.commit
            && let Some(entry) = self.log.get(self.applied + 1)
        {
            self.applied += 1;
            if let Some(What::Command(command)) = &entry.what {
                let place = Place { index: self.applied, term: entry.term };
                self.out.push(Output::Apply(place, command.clone()));
            }
        }
        self.log.trim(self.applied);
    }
}
