//! Three replicas on a simulated network: letters are late, lost and twice there, ways are cut, processes end and begin
//! again without what they knew. Everything follows from a seed.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use elastic_proto::replication::letter::Body;
use elastic_proto::replication::{Command, Letter, Place, Voters};
use elastic_rendezvous::time::Time;
use proptest::prelude::*;
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};

use super::{Output, Replica, Standing};
use crate::embedded::command;
use crate::embedded::hub::FIRST_LEASE;
use crate::embedded::mvcc::{Limits, Mvcc};

mod letters;
mod of_two;

const TICK: u64 = 50;

/// One that is silent for this long is not waited for by one that leaves.
const GONE: Duration = Duration::from_secs(3);

/// A process, and the store that it holds.
struct Process {
    replica: Replica,
    store: Mvcc,
    /// Its clock is ahead of the world's by this.
    ahead: u64,
}

struct World {
    now: u64,
    choices: SmallRng,
    seats: Vec<Option<Process>>,
    /// By the time at which they arrive.
    letters: BTreeMap<(u64, u64), (usize, Letter)>,
    sent: u64,
    /// Of them, those with a whole state.
    states: u64,
    /// No letter passes from the one to the other.
    cut: BTreeSet<(usize, usize)>,
    /// Of 100 letters, so many are lost, and as many come twice.
    lossy: u32,
    /// What each cluster agreed on, by index.
    agreed: BTreeMap<u64, BTreeMap<u64, (u64, Command)>>,
    /// Which life leads in a cluster's term.
    leaders: BTreeMap<(u64, u64), u64>,
    /// Commands whose proposer waits for them: cluster, place, and how many were done in that cluster before.
    waiting: Vec<(u64, Place, u64)>,
    /// The highest index that a client had an answer for, by cluster; and the cluster that answered last.
    answered: BTreeMap<u64, u64>,
    last_to_answer: u64,
}

fn endpoints() -> Vec<String> {
    ["a:1", "b:1", "c:1"].map(str::to_owned).to_vec()
}

impl World {
    fn new(seed: u64) -> World {
        World {
            now: 0,
            choices: SmallRng::seed_from_u64(seed),
            seats: vec![None, None, None],
            letters: BTreeMap::new(),
            sent: 0,
            states: 0,
            cut: BTreeSet::new(),
            lossy: 0,
            agreed: BTreeMap::new(),
            leaders: BTreeMap::new(),
            waiting: Vec::new(),
            answered: BTreeMap::new(),
            last_to_answer: 0,
        }
    }

    fn start(&mut self, seat: usize) {
        let (ahead, seed) = (self.choices.random_range(0..1_000_000), self.choices.random());
        let now = Time::from_millis(self.now + ahead);
        let replica = Replica::new(&endpoints(), seat, seed, now);
        self.seats[seat] = Some(Process { replica, store: empty(), ahead });
    }

    /// It ends, with all that it knew. Letters to it may still arrive, at the next life.
    fn end(&mut self, seat: usize) {
        self.seats[seat] = None;
    }

    fn carry_out(&mut self, seat: usize, outputs: Vec<Output>) {
        for output in outputs {
            let Some(process) = &mut self.seats[seat] else { return };
            match output {
                Output::Send(to, mut letter) => {
                    if let Some(Body::Snapshot(snapshot)) = &mut letter.body {
                        snapshot.state = process.store.saved();
                        self.states += 1;
                    }
                    self.post(seat, to, letter);
                }
                Output::Apply(place, command) => {
                    command::carry_out(&mut process.store, &command);
                    let cluster = process.replica.cluster();
                    self.check_agreed(cluster, place, command);
                    self.answer(seat, cluster, place);
                }
                Output::Restore(state) => process.store = Mvcc::restored(Limits::default(), &state).unwrap(),
                Output::Reset => process.store = empty(),
            }
        }
        self.check_leader(seat);
    }

    fn post(&mut self, from: usize, to: usize, letter: Letter) {
        let copies = match self.choices.random_range(0..100) {
            roll if roll < self.lossy => 0,
            roll if roll < 2 * self.lossy => 2,
            _ => 1,
        };
        for _ in 0..copies {
            // Some letters are so late that all may have changed meanwhile.
            let late = if self.choices.random_range(0..100) < self.lossy { 4_000 } else { 30 };
            let at = self.now + 1 + self.choices.random_range(0..late);
            self.sent += 1;
            if !self.cut.contains(&(from, to)) {
                self.letters.insert((at, self.sent), (to, letter.clone()));
            }
        }
    }

    /// No index of a cluster has two commands.
    fn check_agreed(&mut self, cluster: u64, place: Place, command: Command) {
        let of = self.agreed.entry(cluster).or_default();
        let known = of.entry(place.index).or_insert_with(|| (place.term, command.clone()));
        assert_eq!(*known, (place.term, command), "two commands at {} of {cluster:x}", place.index);
    }

    /// No term of a cluster has two leaders.
    fn check_leader(&mut self, seat: usize) {
        let Some(Process { replica, ahead, .. }) = &self.seats[seat] else { return };
        if replica.standing(Time::from_millis(self.now + ahead)) == Standing::Serves {
            let leader = *self.leaders.entry((replica.cluster(), replica.term())).or_insert(replica.life());
            assert_eq!(leader, replica.life(), "two leaders in term {}", replica.term());
        }
    }

    /// A client gets its answer: nothing that was asked after an earlier answer comes before that in the log.
    fn answer(&mut self, seat: usize, cluster: u64, place: Place) {
        let Some(Process { replica, ahead, .. }) = &self.seats[seat] else { return };
        if replica.standing(Time::from_millis(self.now + ahead)) != Standing::Serves || place.term != replica.term() {
            return;
        }
        let waited = self.waiting.iter().position(|(of, at, _)| (*of, *at) == (cluster, place));
        let Some((_, _, before)) = waited.map(|at| self.waiting.swap_remove(at)) else { return };
        assert!(place.index > before, "{} was answered before {} was asked for", before, place.index);
        let answered = self.answered.entry(cluster).or_default();
        *answered = (*answered).max(place.index);
        self.last_to_answer = cluster;
    }

    /// A client asks every one of them; those that serve take it.
    fn ask(&mut self) {
        for seat in 0..3 {
            let now = self.now;
            let Some(Process { replica, ahead, .. }) = &mut self.seats[seat] else { continue };
            let now = Time::from_millis(now + *ahead);
            let (place, outputs) = replica.propose(now, command::at(now, command::grant(0, 2 + self.sent as i64 % 9)));
            let cluster = replica.cluster();
            if let Some(place) = place {
                let before = self.answered.get(&cluster).copied().unwrap_or(0);
                self.waiting.push((cluster, place, before));
            }
            self.carry_out(seat, outputs);
        }
    }

    /// It needs the store no more, and ends once it may.
    fn leave(&mut self, seat: usize) {
        let now = self.now;
        let Some(Process { replica, ahead, .. }) = &mut self.seats[seat] else { panic!("{seat} has ended") };
        let outputs = replica.leave(Time::from_millis(now + *ahead), GONE);
        self.carry_out(seat, outputs);
    }

    fn voters(&self, seat: usize) -> &Voters {
        let Some(Process { replica, .. }) = &self.seats[seat] else { panic!("{seat} has ended") };
        replica.log.voters().1
    }

    /// What is under way to a seat and has entries is lost.
    fn lose_entries(&mut self, to: usize) {
        let has_some =
            |letter: &Letter| matches!(&letter.body, Some(Body::Append(append)) if !append.entries.is_empty());
        self.letters.retain(|_, (seat, letter)| *seat != to || !has_some(letter));
    }

    fn standing(&self, seat: usize) -> Standing {
        let Some(Process { replica, ahead, .. }) = &self.seats[seat] else { panic!("{seat} has ended") };
        replica.standing(Time::from_millis(self.now + ahead))
    }

    fn run(&mut self, time: u64) {
        let until = self.now + time;
        while self.now < until {
            self.now += 1;
            while let Some(first) = self.letters.first_entry()
                && first.key().0 <= self.now
            {
                let (to, letter) = first.remove();
                if let Some(Process { replica, ahead, .. }) = &mut self.seats[to] {
                    let outputs = replica.receive(Time::from_millis(self.now + *ahead), letter);
                    self.carry_out(to, outputs);
                }
            }
            for seat in 0..3 {
                if self.now % TICK == seat as u64 * 7
                    && let Some(Process { replica, ahead, .. }) = &mut self.seats[seat]
                {
                    let now = Time::from_millis(self.now + *ahead);
                    let may_leave = replica.leaves.is_some() && replica.needed_by(now).is_empty();
                    let outputs = replica.tick(now);
                    self.carry_out(seat, outputs);
                    if may_leave {
                        self.end(seat);
                    }
                }
            }
            if self.now.is_multiple_of(97) {
                self.ask();
            }
        }
    }

    /// Runs until something asked from now on is answered; panics where that takes too long. Returns the cluster.
    fn serves_within(&mut self, time: u64) -> u64 {
        self.waiting.clear();
        self.last_to_answer = 0;
        let until = self.now + time;
        while self.last_to_answer == 0 {
            let seats: Vec<_> = self.seats.iter().flatten().map(|process| &process.replica).collect();
            assert!(self.now < until, "nothing is served: {seats:#?}");
            self.run(50);
        }
        self.last_to_answer
    }

    /// Runs until all three vote.
    fn all_vote_within(&mut self, time: u64) {
        let until = self.now + time;
        let votes = |world: &World| {
            let lives: Vec<u64> = world.seats.iter().flatten().map(|process| process.replica.life()).collect();
            world.seats.iter().flatten().all(|process| process.replica.voters() == lives) && lives.len() == 3
        };
        while !votes(self) {
            let seats: Vec<_> = self.seats.iter().flatten().map(|process| &process.replica).collect();
            assert!(self.now < until, "not all vote: {seats:#?}");
            self.run(50);
        }
    }

    /// What all have carried out makes the same store.
    fn check_stores(&mut self) {
        self.run(2_000);
        self.cut.clear();
        let mut stores: BTreeMap<(u64, u64), Vec<&Mvcc>> = BTreeMap::new();
        for process in self.seats.iter().flatten() {
            stores.entry((process.replica.cluster(), process.replica.applied)).or_default().push(&process.store);
        }
        for same in stores.values() {
            assert!(same.iter().all(|store| *store == same[0]), "two stores after the same commands");
        }
    }
}

fn empty() -> Mvcc {
    Mvcc::new(Limits::default(), FIRST_LEASE)
}

#[test]
fn one_alone_serves_nothing_two_serve_and_the_third_comes_to_them() {
    for seed in 0..30 {
        let mut world = World::new(seed);
        world.start(seed as usize % 3);
        world.run(10_000);
        assert!(world.agreed.is_empty(), "one alone agreed on something");
        world.start((seed as usize + 1) % 3);
        let cluster = world.serves_within(5_000);
        world.run(10_000);
        world.start((seed as usize + 2) % 3);
        world.all_vote_within(5_000);
        assert_eq!(world.serves_within(1_000), cluster);
        world.check_stores();
    }
}

#[test]
fn whichever_ends_the_other_two_continue_and_it_comes_back() {
    for seed in 0..100 {
        let mut world = World::new(seed);
        world.lossy = seed as u32 % 10;
        (0..3).for_each(|seat| world.start(seat));
        let cluster = world.serves_within(40_000);
        world.all_vote_within(40_000);
        for turn in 0..6 {
            let seat = (seed as usize + turn) % 3;
            world.end(seat);
            if turn % 2 == 0 {
                assert_eq!(world.serves_within(40_000), cluster, "what was agreed on is lost");
                world.run(500 * turn as u64);
            }
            world.start(seat);
            world.all_vote_within(40_000);
        }
        assert_eq!(world.serves_within(5_000), cluster);
        world.check_stores();
    }
}

#[test]
fn none_leaves_another_that_needs_the_store() {
    for seed in 0..200 {
        let mut world = World::new(seed);
        world.lossy = seed as u32 / 4 % 10;
        (0..3).for_each(|seat| world.start(seat));
        world.all_vote_within(40_000);
        let cluster = world.serves_within(40_000);
        // One of them may have ended a moment ago.
        let lost = seed as usize % 4;
        if lost < 3 {
            world.end(lost);
            let time = world.choices.random_range(0..6_000);
            world.run(time);
        }
        let first = (seed as usize / 4 + 1) % 3;
        let order = (0..3).map(|turn| (first + turn) % 3).filter(|&seat| seat != lost);
        for seat in order {
            let time = world.choices.random_range(0..6_000);
            world.run(time);
            assert_eq!(world.serves_within(40_000), cluster, "{seat} was left, with seed {seed}");
            world.leave(seat);
        }
        // The last word may be lost, and a letter from before it comes late.
        world.run(8_000);
        assert!(world.seats.iter().all(Option::is_none), "one stays, with seed {seed}");
    }
}

#[test]
fn one_that_is_gone_is_sent_no_state() {
    for seed in 0..10 {
        let mut world = World::new(seed);
        (0..3).for_each(|seat| world.start(seat));
        world.all_vote_within(8_000);
        world.end(seed as usize % 3);
        world.run(5_000);
        let states = world.states;
        world.run(20_000);
        assert_eq!(world.states, states);
    }
}

#[test]
fn two_wait_a_moment_for_the_third_before_they_begin() {
    let mut world = World::new(1);
    (0..2).for_each(|seat| world.start(seat));
    world.run(2_500);
    assert!(world.agreed.is_empty(), "a third with a state may not have been heard yet");
    world.serves_within(2_000);
}

#[test]
fn one_that_is_cut_off_serves_nothing_and_the_others_do() {
    for seed in 0..30 {
        let mut world = World::new(seed);
        (0..3).for_each(|seat| world.start(seat));
        let cluster = world.serves_within(5_000);
        world.all_vote_within(5_000);
        for seat in 0..3 {
            world.cut = (0..3).flat_map(|other| [(seat, other), (other, seat)]).collect();
            world.run(2_000);
            let standing = world.standing(seat);
            assert!(matches!(standing, Standing::Waits(_)), "{standing:?}");
            assert_eq!(world.serves_within(8_000), cluster);
            world.cut.clear();
            world.all_vote_within(3_000);
        }
    }
}

#[test]
fn a_lost_majority_begins_again_and_the_rest_of_it_joins() {
    for seed in 0..30 {
        let mut world = World::new(seed);
        (0..3).for_each(|seat| world.start(seat));
        let lost = world.serves_within(5_000);
        world.all_vote_within(5_000);
        world.end(0);
        world.end(1);
        world.run(3_000);
        world.start(0);
        world.start(1);
        assert_ne!(world.serves_within(20_000), lost, "a cluster continues that has lost two of three");
        world.all_vote_within(20_000);
    }
}

/// Faults of any kind at any time. What was agreed on stays so within its cluster; in the end the three serve.
fn under_faults(seed: u64) {
    let mut world = World::new(seed);
    world.lossy = world.choices.random_range(0..20);
    for _ in 0..60 {
        let seat = world.choices.random_range(0..3);
        match world.choices.random_range(0..7) {
            0 => world.end(seat),
            6 => world.start(seat),
            1 | 2 => {
                if world.seats[seat].is_none() {
                    world.start(seat);
                }
            }
            3 => {
                let other = world.choices.random_range(0..3);
                world.cut.insert((seat, other));
            }
            4 => world.cut.clear(),
            _ => world.cut = (0..3).flat_map(|other| [(seat, other), (other, seat)]).collect(),
        }
        let time = world.choices.random_range(0..4_000);
        world.run(time);
    }
    world.cut.clear();
    world.lossy = 0;
    for seat in 0..3 {
        if world.seats[seat].is_none() {
            world.start(seat);
        }
    }
    world.run(5_000);
    world.all_vote_within(40_000);
    world.serves_within(5_000);
    world.check_stores();
}

#[test]
fn what_is_agreed_on_stays_so_under_faults() {
    for seed in 0..150 {
        let run = std::panic::catch_unwind(|| under_faults(seed));
        assert!(run.is_ok(), "with seed {seed}");
    }
}

#[test]
#[ignore = "takes minutes: make chaos"]
fn what_is_agreed_on_stays_so_under_many_faults() {
    for seed in 1_000..21_000 {
        let run = std::panic::catch_unwind(|| under_faults(seed));
        assert!(run.is_ok(), "with seed {seed}");
    }
}

proptest! {
    /// A store that was saved and restored is the same store.
    #[test]
    fn a_saved_store_is_the_same(plan in prop::collection::vec((0u8..6, 0u8..5, 1u64..6), 0..80)) {
        let mut store = empty();
        let mut now = Time::from_millis(5);
        for (kind, key, number) in plan {
            now = now + Duration::from_millis(300 * number);
            let put = |lease: i64| etcd_client::proto::PbPutRequest {
                key: vec![b'a' + key],
                value: number.to_le_bytes().to_vec(),
                lease,
                ..Default::default()
            };
            let what = match kind {
                0 => command::grant(i64::from(key) + 1, number as i64),
                1 => command::keep_alive(i64::from(key) + 1),
                2 => command::revoke(i64::from(key) + 1),
                3 => command::compact(number as i64 * 5),
                4 => command::txn(&one_put(put(0))),
                _ => command::txn(&one_put(put(i64::from(key) + 1))),
            };
            command::carry_out(&mut store, &command::at(now, what));
        }
        prop_assert_eq!(Mvcc::restored(Limits::default(), &store.saved()).unwrap(), store);
    }
}

fn one_put(put: etcd_client::proto::PbPutRequest) -> etcd_client::proto::PbTxnRequest {
    let request = Some(etcd_client::proto::PbTxnOpRequest::RequestPut(put));
    let op = etcd_client::proto::PbTxnRequestOp { request };
    etcd_client::proto::PbTxnRequest { success: vec![op], ..Default::default() }
}
