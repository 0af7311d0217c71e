//! The nodes as a leader knows them: their keys, places and contacts, indexed by what is asked about them. Each change
//! files one node again, so the cost of a question depends on the length of its answer, not on the size of the job.

mod entries;
mod index;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};

use self::index::{Index, file};
use crate::job::{Fate, NodeId, Phase};
use crate::kv::Revision;
use crate::time::Time;

pub use self::entries::{Contact, Evicted, Present, SealedMember};

/// What a member says: a phase, of a round; nothing without a key, or as a newcomer.
pub(super) type Says = Option<(u64, Phase)>;

/// All nodes that a leader knows of.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Roster {
    /// The leader's own node: its echo is always fresh.
    own: NodeId,
    nodes: BTreeMap<NodeId, Present>,
    members: BTreeMap<NodeId, SealedMember>,
    contacts: BTreeMap<NodeId, Contact>,
    /// Nodes and members, by name.
    names: Index<String>,
    /// Nodes by the place that each must have.
    places: Index<u32>,
    /// Members by what they say.
    says: Index<Says>,
    /// Those of them that are neither gone nor out.
    there: Index<Says>,
    /// Members that are dead or without a key.
    gone: BTreeSet<NodeId>,
    /// Those of them that are not out: that were neither evicted nor left.
    missing: BTreeSet<NodeId>,
    /// Members that are out, and have a key: it is older than that, and its deletion under way.
    late: BTreeSet<NodeId>,
    /// Members that wait without some of their workers, and could start new ones ahead.
    lacking: BTreeSet<NodeId>,
    /// Nodes whose workers cannot start ahead.
    cold: Index<()>,
    /// Members that were evicted and may be at work until their fence point, by when they were.
    settling: Index<Time>,
    /// Members that are neither dead nor left, by when they were evicted, if they were, and what they say.
    doubtful: Index<(Option<Time>, Says)>,
    /// Members by the newest probe that they answered.
    answered: Index<u64>,
    /// Members that live and stay, by when they opened their stream.
    opened: Index<Option<Time>>,
    /// Members that were not evicted, except the own node, by the newest word that they have seen.
    echoed: Index<Option<Time>>,
    /// Nodes that could take a place in any round, by when their keys came into being.
    newcomers: Index<Revision>,
    /// The same, by when the leader saw them first.
    arrivals: Index<Time>,
}

/// Where a node is filed.
struct Marks {
    names: Vec<String>,
    place: Option<u32>,
    cold: bool,
    newcomer: Option<(Revision, Time)>,
    member: Option<MemberMarks>,
}

struct MemberMarks {
    says: Says,
    gone: bool,
    out: bool,
    late: bool,
    lacking: bool,
    settling: Option<Time>,
    doubtful: Option<Option<Time>>,
    answered: u64,
    opened: Option<Option<Time>>,
    echoed: Option<Option<Time>>,
}

impl Roster {
    /// No one yet; `own` is the leader's own node.
    pub fn new(own: NodeId) -> Roster {
        Roster {
            own,
            nodes: BTreeMap::new(),
            members: BTreeMap::new(),
            contacts: BTreeMap::new(),
            names: Index::default(),
            places: Index::default(),
            says: Index::default(),
            there: Index::default(),
            gone: BTreeSet::new(),
            missing: BTreeSet::new(),
            late: BTreeSet::new(),
            lacking: BTreeSet::new(),
            cold: Index::default(),
            settling: Index::default(),
            doubtful: Index::default(),
            answered: Index::default(),
            opened: Index::default(),
            echoed: Index::default(),
            newcomers: Index::default(),
            arrivals: Index::default(),
        }
    }

    /// A node whose key is there.
    pub fn node(&self, node: &NodeId) -> Option<&Present> {
        looks::count();
        self.nodes.get(node)
    }

    /// A member of the last sealed round.
    pub fn member(&self, node: &NodeId) -> Option<&SealedMember> {
        looks::count();
        self.members.get(node)
    }

    /// What the pulses told of a node.
    pub fn contact(&self, node: &NodeId) -> Option<&Contact> {
        looks::count();
        self.contacts.get(node)
    }

    /// All nodes whose keys are there.
    pub fn nodes(&self) -> impl Iterator<Item = (&NodeId, &Present)> {
        self.nodes.iter().inspect(|_| looks::count())
    }

    /// All members of the last sealed round.
    pub fn members(&self) -> impl Iterator<Item = (&NodeId, &SealedMember)> {
        self.members.iter().inspect(|_| looks::count())
    }

    /// Whether the leader's own node is a member, and stays one.
    pub(super) fn has_own(&self) -> bool {
        self.members.get(&self.own).is_some_and(|own| own.evicted.is_none())
    }

    /// How many members the last sealed round has.
    pub fn size(&self) -> usize {
        self.members.len()
    }

    /// All that pulses told.
    pub(super) fn contacts(&self) -> &BTreeMap<NodeId, Contact> {
        &self.contacts
    }

    /// A node's key is there, and says this.
    pub(super) fn put(&mut self, node: &NodeId, present: Present) {
        self.change(node, |roster| drop(roster.nodes.insert(node.clone(), present)));
    }

    /// A node's key is gone.
    pub(super) fn remove(&mut self, node: &NodeId) {
        self.change(node, |roster| drop(roster.nodes.remove(node)));
    }

    /// A node has a place.
    pub(super) fn seat(&mut self, node: &NodeId, member: SealedMember) {
        self.change(node, |roster| drop(roster.members.insert(node.clone(), member)));
    }

    /// No one has a place any more.
    pub(super) fn dissolve(&mut self) {
        for node in self.members.keys().cloned().collect::<Vec<_>>() {
            self.change(&node, |roster| drop(roster.members.remove(&node)));
        }
    }

    /// Something is new about a member, if the node is one.
    pub(super) fn change_member(&mut self, node: &NodeId, change: impl Fn(&mut SealedMember)) {
        if self.members.contains_key(node) {
            self.change(node, |roster| roster.members.get_mut(node).into_iter().for_each(change));
        }
    }

    /// Something is new about the contact to a node.
    pub(super) fn change_contact(&mut self, node: &NodeId, change: impl FnOnce(&mut Contact)) {
        self.change(node, |roster| change(roster.contacts.entry(node.clone()).or_default()));
    }

    /// A node was heard; whether it answered a newer probe by it. By far the most frequent change: it moves the node in
    /// one index, or in two.
    pub(super) fn heard(&mut self, node: &NodeId, now: Time, probe: u64, echo: Option<Time>) -> bool {
        looks::count();
        let Some(contact) = self.contacts.get_mut(node) else {
            self.change_contact(node, |contact| {
                *contact = Contact { heard: Some(now), probe, echoed: echo, ..Contact::default() };
            });
            return probe > 0;
        };
        let old = *contact;
        contact.heard = Some(now);
        contact.probe = old.probe.max(probe);
        // mutant heard_from_receipt: old.echoed.max(echo) => old.echoed.max(Some(now))
        contact.echoed = old.echoed.max(echo);
        let new = *contact;
        if let Some(member) = self.members.get(node) {
            if member.evicted.is_none() && *node != self.own && new.echoed != old.echoed {
                self.echoed.file(old.echoed, node, false);
                self.echoed.file(new.echoed, node, true);
            }
            if new.probe != old.probe {
                self.answered.file(old.probe, node, false);
                self.answered.file(new.probe, node, true);
            }
        }
        new.probe != old.probe
    }

    /// Members that say this.
    pub(super) fn saying(&self, says: Says) -> impl Iterator<Item = &NodeId> {
        self.says.entries.get(&says).into_iter().flatten().inspect(|_| looks::count())
    }

    /// How many members say this.
    pub(super) fn count_saying(&self, says: Says) -> usize {
        self.says.entries.get(&says).map_or(0, BTreeSet::len)
    }

    /// Members that are neither gone nor out, and say anything that `besides` does not hold for.
    pub(super) fn saying_not(&self, besides: impl Fn(Says) -> bool) -> impl Iterator<Item = &NodeId> {
        let entries = self.there.entries.iter().filter(move |(says, _)| !besides(**says));
        entries.flat_map(|(_, nodes)| nodes).inspect(|_| looks::count())
    }

    /// Members that are dead or without a key.
    pub(super) fn gone(&self) -> &BTreeSet<NodeId> {
        &self.gone
    }

    /// Members that are gone, and not out.
    pub(super) fn missing(&self) -> impl Iterator<Item = &NodeId> {
        self.missing.iter().inspect(|_| looks::count())
    }

    /// Members that are out, though a key of theirs is still there.
    pub(super) fn late(&self) -> impl Iterator<Item = &NodeId> {
        self.late.iter().inspect(|_| looks::count())
    }

    /// Members that wait without some of their workers, and could start new ones ahead.
    pub(super) fn lacking(&self) -> impl Iterator<Item = &NodeId> {
        self.lacking.iter().inspect(|_| looks::count())
    }

    /// Whether the workers of all nodes that are there can start ahead.
    pub(super) fn all_warm_up(&self) -> bool {
        self.cold.count == 0
    }

    /// The last to be evicted of those that may be at work until their fence point: when.
    pub(super) fn last_unsettled(&self) -> Option<Time> {
        self.settling.greatest().copied()
    }

    /// The last to be evicted of those that are neither dead nor left, and have not said that they `stopped`: when;
    /// within, None where none of them was evicted.
    pub(super) fn last_doubtful(&self, stopped: impl Fn(Says) -> bool) -> Option<Option<Time>> {
        let keys = self.doubtful.entries.keys().rev().inspect(|_| looks::count());
        keys.copied().find(|(_, says)| !stopped(*says)).map(|(evicted, _)| evicted)
    }

    /// Members that have not answered this probe.
    pub(super) fn unanswered(&self, probe: u64) -> impl Iterator<Item = &NodeId> {
        self.answered.entries.range(..probe).flat_map(|(_, nodes)| nodes).inspect(|_| looks::count())
    }

    /// When the last of the members that live and stay opened its stream: None where one has not; within, None where
    /// there is no such member.
    pub fn all_opened(&self) -> Option<Option<Time>> {
        match self.opened.least() {
            Some(None) => None,
            _ => Some(self.opened.greatest().copied().flatten()),
        }
    }

    /// The oldest of the words that the members have seen last, except the own node: None where one has seen none;
    /// within, None where there is no such member.
    pub(super) fn all_echoed(&self) -> Option<Option<Time>> {
        match self.echoed.least() {
            Some(None) => None,
            oldest => Some(oldest.copied().flatten()),
        }
    }

    /// Nodes that could take a place in any round, in the order in which they came.
    pub(super) fn newcomers(&self) -> impl Iterator<Item = &NodeId> {
        self.newcomers.entries.values().flatten().inspect(|_| looks::count())
    }

    /// How many they are.
    pub(super) fn count_newcomers(&self) -> usize {
        self.newcomers.count
    }

    /// When the first and the last of them came.
    pub(super) fn arrivals(&self) -> Option<(Time, Time)> {
        Some((*self.arrivals.least()?, *self.arrivals.greatest()?))
    }

    /// Nodes and members of this name.
    pub(super) fn named(&self, name: &str) -> impl Iterator<Item = &NodeId> {
        self.names.entries.get(name).into_iter().flatten().inspect(|_| looks::count())
    }

    /// Names that several bear.
    pub(super) fn shared_names(&self) -> &BTreeSet<String> {
        &self.names.shared
    }

    /// Nodes that claim this place.
    pub(super) fn claiming(&self, place: u32) -> impl Iterator<Item = &NodeId> {
        self.places.entries.get(&place).into_iter().flatten().inspect(|_| looks::count())
    }

    /// Places that several claim.
    pub(super) fn contested(&self) -> &BTreeSet<u32> {
        &self.places.shared
    }

    /// Whether a node waits for a place in any round. What it says is not enough: a member that was just given a place
    /// has not spoken again yet.
    pub(super) fn is_placeless(&self, node: &NodeId) -> bool {
        self.nodes.get(node).is_some_and(|it| it.record.phase == Phase::Waiting && it.record.round.is_none())
            && self.members.get(node).is_none_or(|member| member.evicted.is_some())
    }

    fn change(&mut self, node: &NodeId, change: impl FnOnce(&mut Roster)) {
        looks::count();
        let before = self.marks(node);
        self.file(node, before, false);
        change(self);
        let after = self.marks(node);
        self.file(node, after, true);
    }

    fn marks(&self, node: &NodeId) -> Marks {
        let contact = self.contacts.get(node).copied().unwrap_or_default();
        let present = self.nodes.get(node);
        let member = self.members.get(node);
        let names = present.map(|it| &it.record.name).into_iter().chain(member.map(|it| &it.rank.name));
        Marks {
            names: names.cloned().collect(),
            place: present.and_then(|it| it.record.place),
            cold: present.is_some_and(|it| !it.record.warms_up),
            newcomer: present.filter(|_| !contact.dead && self.is_placeless(node)).map(|it| (it.created, it.arrived)),
            member: member.map(|member| {
                let evicted = member.evicted.is_some();
                let out = evicted || member.left;
                let dead = contact.dead || member.evicted.is_some_and(|evicted| evicted.fate == Fate::Dead);
                // mutant eviction_is_a_death: evicted.fate == Fate::Unknown => false
                let unknown = member.evicted.filter(|evicted| evicted.fate == Fate::Unknown && !contact.dead);
                MemberMarks {
                    says: present.and_then(|it| Some((it.record.round?, it.record.phase))),
                    gone: contact.dead || member.absent.is_some(),
                    out,
                    late: out && present.is_some(),
                    lacking: present.is_some_and(|it| it.record.lacks_workers),
                    settling: unknown.map(|evicted| evicted.at),
                    doubtful: (!dead && !member.left).then_some(member.evicted.map(|evicted| evicted.at)),
                    answered: contact.probe,
                    opened: (!evicted && present.is_some() && !contact.dead).then_some(contact.opened),
                    echoed: (!evicted && *node != self.own).then_some(contact.echoed),
                }
            }),
        }
    }

    /// Adds a node under its marks, or takes it away from there.
    fn file(&mut self, node: &NodeId, marks: Marks, add: bool) {
        for name in marks.names {
            self.names.file(name, node, add);
        }
        if let Some(place) = marks.place {
            self.places.file(place, node, add);
        }
        if marks.cold {
            self.cold.file((), node, add);
        }
        if let Some((created, arrived)) = marks.newcomer {
            self.newcomers.file(created, node, add);
            self.arrivals.file(arrived, node, add);
        }
        let Some(member) = marks.member else { return };
        self.says.file(member.says, node, add);
        self.answered.file(member.answered, node, add);
        match (member.gone, member.out) {
            (false, false) => self.there.file(member.says, node, add),
            (true, false) => file(&mut self.missing, node, add),
            (_, true) => {}
        }
        for (is_in, nodes) in
            [(member.gone, &mut self.gone), (member.late, &mut self.late), (member.lacking, &mut self.lacking)]
        {
            if is_in {
                file(nodes, node, add);
            }
        }
        if let Some(evicted) = member.settling {
            self.settling.file(evicted, node, add);
        }
        if let Some(evicted) = member.doubtful {
            self.doubtful.file((evicted, member.says), node, add);
        }
        if let Some(opened) = member.opened {
            self.opened.file(opened, node, add);
        }
        if let Some(echoed) = member.echoed {
            self.echoed.file(echoed, node, add);
        }
    }
}

#[cfg(not(test))]
mod looks {
    pub(super) fn count() {}
}

/// Counts the records that are checked, for tests of what an event costs.
#[cfg(test)]
pub(super) mod looks {
    use std::cell::Cell;

    thread_local! {
        static LOOKS: Cell<u64> = const { Cell::new(0) };
    }

    pub(in super::super) fn count() {
        LOOKS.set(LOOKS.get() + 1);
    }

    /// How many since the last call.
    pub(in super::super) fn take() -> u64 {
        LOOKS.replace(0)
    }
}
