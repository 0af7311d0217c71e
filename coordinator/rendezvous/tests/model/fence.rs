//! The fence point in discrete time: whether a member that was evicted has surely stopped one TTL later, whatever it
//! still hears. The main model takes this one's result as its rule `past_fence`.
//!
//! M is a member. It hears from the store through keep-alives and linearizable reads, and from L, the old leader,
//! through pulses. K is the member that L's successor keeps: it has its stream to L until it opens one to the
//! successor. At some moment the successor evicts M and starts its count; M and L may be cut off from whatever would
//! tell them, though not from each other. One TTL later the next round starts without M. Every message may take any
//! time.

use stateright::{Model, Property};

use crate::search;

/// Ticks in a TTL.
const TTL: u8 = 4;
/// Ticks from a proof to the fence point. Ages beyond it differ in nothing.
const FENCE: u8 = 3;

const FENCED: &str = "M has stopped when the next round starts";
const SEALED: &str = "the next round starts";
const AWAY: &str = "M and L do not reach the store, and M continues";

/// One rule of the fence point taken away.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Mutation {
    /// A pulse proves the round as of now, however long ago its sender made sure that it leads.
    PulseWithoutAge,
    /// A proof counts from the answer's receipt, not from the question's sending.
    ProofFromReceipt,
    /// L counts K as heard from the receipt of its pulse, not from the sending of what that pulse answers.
    HeardFromReceipt,
    /// The successor starts its count though K still has its stream to L.
    CountBeforeStreams,
    /// Successful keep-alives alone move the fence point.
    KeepAliveAlone,
}

/// What an answer proves, as ages at the moment it was given.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
struct Told {
    /// Since a linearizable read that showed the round to be the newest.
    read: u8,
    /// Since L surely had K's stream.
    heard: u8,
}

/// A question and perhaps its answer, on the way.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
struct Question<A> {
    age: u8,
    answer: Option<A>,
}

#[derive(Clone, PartialEq, Eq, Hash, Debug)]
struct Clocks {
    /// What L could tell now.
    leader: Told,
    /// What M has proof of.
    member: Told,
    /// Since M sent its last successful keep-alive.
    keep_alive: u8,
    /// M's question to L or to the store.
    asked: Option<Question<Told>>,
    /// L's question to K.
    pulse: Option<Question<()>>,
    kept_by_leader: bool,
    works: bool,
    /// Since the successor started its count for M.
    counted: Option<u8>,
    sealed: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Event {
    Tick,
    MemberKeepsAlive,
    LeaderReads,
    LeaderAsksKept,
    KeptAnswers,
    LeaderHearsKept,
    KeptGoesToSuccessor,
    MemberAsks,
    LeaderAnswers,
    StoreAnswers,
    MemberHears,
    SuccessorEvicts,
    SuccessorSeals,
}

#[derive(Clone)]
struct FencePoint {
    mutation: Option<Mutation>,
}

impl FencePoint {
    fn broken(&self, mutation: Mutation) -> bool {
        self.mutation == Some(mutation)
    }

    /// M's workers may continue while this is under [`FENCE`]: either it proves its round through the store, or L has
    /// all members, so that no successor counts.
    fn age(&self, clocks: &Clocks) -> u8 {
        let through_store = match self.broken(Mutation::KeepAliveAlone) {
            true => clocks.keep_alive,
            false => clocks.keep_alive.max(clocks.member.read),
        };
        through_store.min(clocks.member.heard)
    }

    fn tick(&self, clocks: &mut Clocks) {
        let ages =
            [&mut clocks.leader, &mut clocks.member].into_iter().flat_map(|told| [&mut told.read, &mut told.heard]);
        let asked = clocks.asked.iter_mut().map(|question| &mut question.age);
        let pulse = clocks.pulse.iter_mut().map(|question| &mut question.age);
        ages.chain([&mut clocks.keep_alive]).chain(asked).chain(pulse).for_each(|age| *age = FENCE.min(*age + 1));
        clocks.counted = clocks.counted.map(|age| TTL.min(age + 1));
        // The guard kills at the deadline, whatever the agent does.
        clocks.works &= self.age(clocks) < FENCE;
    }

    fn hear(&self, member: Told, question: Question<Told>) -> Option<Told> {
        let asked = if self.broken(Mutation::ProofFromReceipt) { 0 } else { question.age };
        let told = question.answer?;
        let read = if self.broken(Mutation::PulseWithoutAge) && told.read < FENCE { 0 } else { told.read };
        Some(Told { read: member.read.min(asked + read), heard: member.heard.min(asked + told.heard) })
    }
}

impl Model for FencePoint {
    type State = Clocks;
    type Action = Event;

    fn init_states(&self) -> Vec<Clocks> {
        vec![Clocks {
            leader: Told { read: 0, heard: 0 },
            member: Told { read: 0, heard: FENCE },
            keep_alive: 0,
            asked: None,
            pulse: None,
            kept_by_leader: true,
            works: true,
            counted: None,
            sealed: false,
        }]
    }

    fn actions(&self, clocks: &Clocks, events: &mut Vec<Event>) {
        let may_seal = clocks.counted == Some(TTL) && !clocks.sealed;
        if !clocks.works {
            // Nothing but the successor's count matters any more.
            events.extend(clocks.counted.is_some().then_some(Event::Tick));
            events.extend(may_seal.then_some(Event::SuccessorSeals));
            return;
        }
        let in_office = clocks.counted.is_none();
        let asked = clocks.asked.map(|question| question.answer.is_some());
        let pulse = clocks.pulse.map(|question| question.answer.is_some());
        let may_count = !clocks.kept_by_leader || self.broken(Mutation::CountBeforeStreams);
        let possible = [
            (Event::Tick, true),
            // A lease outlives the key that hung on it, so an evicted node's renewals succeed.
            (Event::MemberKeepsAlive, true),
            (Event::LeaderReads, in_office),
            (Event::LeaderAsksKept, pulse.is_none() && clocks.kept_by_leader),
            (Event::KeptAnswers, pulse == Some(false) && clocks.kept_by_leader),
            (Event::LeaderHearsKept, pulse == Some(true)),
            (Event::KeptGoesToSuccessor, clocks.kept_by_leader),
            (Event::MemberAsks, asked.is_none()),
            (Event::LeaderAnswers, asked == Some(false)),
            (Event::StoreAnswers, asked == Some(false) && in_office),
            (Event::MemberHears, asked == Some(true)),
            (Event::SuccessorEvicts, in_office && may_count),
            (Event::SuccessorSeals, may_seal),
        ];
        events.extend(possible.into_iter().filter(|(_, possible)| *possible).map(|(event, _)| event));
    }

    fn next_state(&self, clocks: &Clocks, event: Event) -> Option<Clocks> {
        let mut next = clocks.clone();
        match event {
            Event::Tick => self.tick(&mut next),
            Event::MemberKeepsAlive => next.keep_alive = 0,
            Event::LeaderReads => next.leader.read = 0,
            Event::LeaderAsksKept => next.pulse = Some(Question { age: 0, answer: None }),
            Event::KeptAnswers => next.pulse.as_mut()?.answer = Some(()),
            Event::LeaderHearsKept => {
                let age = next.pulse.take()?.age;
                let age = if self.broken(Mutation::HeardFromReceipt) { 0 } else { age };
                next.leader.heard = clocks.leader.heard.min(age);
            }
            Event::KeptGoesToSuccessor => next.kept_by_leader = false,
            Event::MemberAsks => next.asked = Some(Question { age: 0, answer: None }),
            Event::LeaderAnswers => next.asked.as_mut()?.answer = Some(clocks.leader),
            Event::StoreAnswers => next.asked.as_mut()?.answer = Some(Told { read: 0, heard: FENCE }),
            Event::MemberHears => next.member = self.hear(clocks.member, next.asked.take()?)?,
            Event::SuccessorEvicts => next.counted = Some(0),
            Event::SuccessorSeals => next.sealed = true,
        }
        Some(next)
    }

    fn format_action(&self, event: &Event) -> String {
        let sentence = match event {
            Event::Tick => "time passes",
            Event::MemberKeepsAlive => "M's lease is renewed",
            Event::LeaderReads => "L reads the store and still leads",
            Event::LeaderAsksKept => "L sends a pulse to K",
            Event::KeptAnswers => "K answers L",
            Event::LeaderHearsKept => "L hears K's answer",
            Event::KeptGoesToSuccessor => "K ends its stream to L and opens one to L's successor",
            Event::MemberAsks => "M asks whether its round is the newest",
            Event::LeaderAnswers => "L answers M",
            Event::StoreAnswers => "the store answers M",
            Event::MemberHears => "M hears the answer",
            Event::SuccessorEvicts => "the successor evicts M and starts its count",
            Event::SuccessorSeals => "one TTL is over: the successor seals without M",
        };
        sentence.to_owned()
    }

    fn properties(&self) -> Vec<Property<FencePoint>> {
        vec![
            Property::always(FENCED, |_, clocks: &Clocks| !(clocks.sealed && clocks.works)),
            Property::sometimes(SEALED, |_, clocks: &Clocks| clocks.sealed),
            Property::sometimes(AWAY, |_, clocks: &Clocks| {
                clocks.works && clocks.keep_alive.min(clocks.member.read).min(clocks.leader.read) == FENCE
            }),
        ]
    }
}

#[test]
fn one_ttl_after_the_eviction_the_evicted_have_stopped() {
    search::holds("fence point", FencePoint { mutation: None }, &[SEALED, AWAY]);
}

#[test]
fn without_one_rule_it_has_not() {
    for mutation in [
        Mutation::PulseWithoutAge,
        Mutation::ProofFromReceipt,
        Mutation::HeardFromReceipt,
        Mutation::CountBeforeStreams,
        Mutation::KeepAliveAlone,
    ] {
        search::breaks(&format!("{mutation:?}"), FencePoint { mutation: Some(mutation) }, FENCED);
    }
}
