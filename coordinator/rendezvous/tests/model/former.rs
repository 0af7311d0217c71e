//! The former leader in discrete time: whether it has surely stopped as soon as its lease is over and its successor has
//! not heard it for one TTL.
//!
//! L leads, and is a member. K is another member, hears L's pulses, and leads once L's lease, on which the keys of L
//! hang, is over. L may work on while the store tells it that its lease and its round are good, or while K, as all
//! members, has answered it. Every message may take any time.

use stateright::{Model, Property};

use crate::search;

/// Ticks in a TTL.
const TTL: u8 = 4;
/// Ticks from a proof to the fence point.
const FENCE: u8 = 3;

const FENCED: &str = "L has stopped when the next round starts";
const SEALED: &str = "the next round starts";
const HELD: &str = "L's lease is over, and L continues since K answers";

/// One rule taken away.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Mutation {
    /// K seals though it has heard L a moment ago.
    SealAtOnce,
    /// A lease that L's key does not hang on counts as one that it does.
    LeaseWithoutKey,
    /// L counts K as heard from the receipt of its answer, not from the sending of what that answers.
    HeardFromReceipt,
    /// K is no member of L's round: L does not need its answers.
    NoMember,
    /// K counts silence from before it got its lease.
    OldSilence,
    /// The store renews a lease whose end it has yet to apply, as a new leader of etcd may with `FastLeaseKeepAlive`.
    RenewalOvertakes,
}

/// L's question to the store, and whether that has renewed the lease.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
struct Renewal {
    age: u8,
    renewed: bool,
}

/// L's pulse to K, and whether K has answered it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
struct Pulse {
    age: u8,
    answered: bool,
}

#[derive(Clone, PartialEq, Eq, Hash, Debug)]
struct Clocks {
    /// At the store: since the lease was renewed; [`TTL`]: it is over.
    lease: u8,
    /// Since L sent what has renewed its lease last.
    leased: u8,
    /// Since L sent the read that has shown its round last.
    round: u8,
    /// Since L sent what K has answered last.
    held: u8,
    /// Since K has heard a pulse of L.
    heard: u8,
    /// Since K got its lease.
    granted: u8,
    renewal: Option<Renewal>,
    pulse: Option<Pulse>,
    works: bool,
    elected: bool,
    sealed: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Event {
    Tick,
    FormerRenews,
    StoreRenews,
    FormerHearsStore,
    FormerReads,
    FormerGetsAnotherLease,
    StoreLosesLeases,
    FormerPulses,
    KeptAnswers,
    FormerHearsKept,
    KeptIsElected,
    KeptSeals,
}

#[derive(Clone)]
struct FormerLeader {
    mutation: Option<Mutation>,
}

impl FormerLeader {
    fn broken(&self, mutation: Mutation) -> bool {
        self.mutation == Some(mutation)
    }
}

impl Model for FormerLeader {
    type State = Clocks;
    type Action = Event;

    fn init_states(&self) -> Vec<Clocks> {
        vec![Clocks {
            lease: 0,
            leased: 0,
            round: 0,
            held: FENCE,
            heard: TTL,
            granted: TTL,
            renewal: None,
            pulse: None,
            works: true,
            elected: false,
            sealed: false,
        }]
    }

    fn actions(&self, clocks: &Clocks, events: &mut Vec<Event>) {
        let over = clocks.lease == TTL;
        let counted = if self.broken(Mutation::OldSilence) { clocks.heard } else { clocks.heard.min(clocks.granted) };
        let unrenewed = clocks.renewal.is_some_and(|renewal| !renewal.renewed);
        let silent = counted == TTL || self.broken(Mutation::SealAtOnce);
        let possible = [
            (Event::Tick, !clocks.sealed),
            (Event::FormerRenews, clocks.renewal.is_none()),
            (Event::StoreRenews, unrenewed && (!over || self.broken(Mutation::RenewalOvertakes))),
            (Event::FormerHearsStore, clocks.renewal.is_some_and(|renewal| renewal.renewed)),
            // Until the next round is forming, any read shows this one.
            (Event::FormerReads, !clocks.sealed),
            (Event::FormerGetsAnotherLease, over),
            (Event::StoreLosesLeases, !over),
            (Event::FormerPulses, clocks.pulse.is_none()),
            // A node that campaigns has left its leader's stream.
            (Event::KeptAnswers, !clocks.elected && clocks.pulse.is_some_and(|pulse| !pulse.answered)),
            (Event::FormerHearsKept, clocks.pulse.is_some_and(|pulse| pulse.answered)),
            (Event::KeptIsElected, over && !clocks.elected),
            (Event::KeptSeals, clocks.elected && silent && !clocks.sealed),
        ];
        events.extend(possible.into_iter().filter(|(_, possible)| *possible).map(|(event, _)| event));
    }

    fn next_state(&self, clocks: &Clocks, event: Event) -> Option<Clocks> {
        let mut next = clocks.clone();
        match event {
            Event::Tick => {
                let renewal = next.renewal.iter_mut().map(|renewal| &mut renewal.age);
                let pulse = next.pulse.iter_mut().map(|pulse| &mut pulse.age);
                let proofs = [&mut next.leased, &mut next.round, &mut next.held];
                proofs.into_iter().chain(renewal).chain(pulse).for_each(|age| *age = FENCE.min(*age + 1));
                [&mut next.lease, &mut next.heard, &mut next.granted]
                    .into_iter()
                    .for_each(|age| *age = TTL.min(*age + 1));
                if self.broken(Mutation::NoMember) {
                    next.held = 0;
                }
                next.works &= next.leased.max(next.round).min(next.held) < FENCE;
            }
            Event::FormerRenews => next.renewal = Some(Renewal { age: 0, renewed: false }),
            Event::StoreRenews => {
                next.renewal.as_mut()?.renewed = true;
                next.lease = if clocks.lease == TTL { TTL } else { 0 };
            }
            Event::FormerHearsStore => next.leased = clocks.leased.min(next.renewal.take()?.age),
            Event::FormerReads => next.round = 0,
            Event::FormerGetsAnotherLease => {
                if self.broken(Mutation::LeaseWithoutKey) {
                    next.leased = 0;
                }
            }
            Event::StoreLosesLeases => (next.lease, next.granted) = (TTL, 0),
            Event::FormerPulses => next.pulse = Some(Pulse { age: 0, answered: false }),
            Event::KeptAnswers => {
                next.pulse.as_mut()?.answered = true;
                next.heard = 0;
            }
            Event::FormerHearsKept => {
                let age = next.pulse.take()?.age;
                next.held = clocks.held.min(if self.broken(Mutation::HeardFromReceipt) { 0 } else { age });
            }
            Event::KeptIsElected => next.elected = true,
            Event::KeptSeals => next.sealed = true,
        }
        Some(next)
    }

    fn format_action(&self, event: &Event) -> String {
        let sentence = match event {
            Event::Tick => "time passes",
            Event::FormerRenews => "L sends a keep-alive",
            Event::StoreRenews => "the store renews L's lease",
            Event::FormerHearsStore => "L hears of it",
            Event::FormerReads => "L reads that its round is the newest",
            Event::FormerGetsAnotherLease => "L gets another lease, and its key is not on it yet",
            Event::StoreLosesLeases => "the store loses all leases, and K gets another",
            Event::FormerPulses => "L sends a pulse to K",
            Event::KeptAnswers => "K hears it and answers",
            Event::FormerHearsKept => "L hears K's answer",
            Event::KeptIsElected => "L's lease is over, and K is elected",
            Event::KeptSeals => "K has not heard L for one TTL, and seals without it",
        };
        sentence.to_owned()
    }

    fn properties(&self) -> Vec<Property<FormerLeader>> {
        vec![
            Property::always(FENCED, |_, clocks: &Clocks| !(clocks.sealed && clocks.works)),
            Property::sometimes(SEALED, |_, clocks: &Clocks| clocks.sealed),
            Property::sometimes(HELD, |_, clocks: &Clocks| clocks.lease == TTL && clocks.works && clocks.elected),
        ]
    }
}

#[test]
fn a_former_leader_that_was_not_heard_for_one_ttl_has_stopped() {
    search::holds("former leader", FormerLeader { mutation: None }, &[SEALED, HELD]);
}

#[test]
fn without_one_rule_it_has_not() {
    use Mutation::{HeardFromReceipt, LeaseWithoutKey, NoMember, OldSilence, RenewalOvertakes, SealAtOnce};
    for mutation in [SealAtOnce, LeaseWithoutKey, HeardFromReceipt, NoMember, OldSilence, RenewalOvertakes] {
        search::breaks(&format!("{mutation:?}"), FormerLeader { mutation: Some(mutation) }, FENCED);
    }
}
