//! The nodes as a leader knows them: their keys, places and contacts, indexed by what is asked about them. Each change
//! files one node again, so the cost of a question depends on the length of its answer, not on the size of the job.

mod entries;
mod index;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::time::Duration;

use self::index::{Index, Mark};
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
    index: Index,
}

impl Roster {
    /// No one yet; `own` is the leader's own node.
    pub fn new(own: NodeId) -> Roster {
        Roster {
            own,
            nodes: BTreeMap::new(),
            members: BTreeMap::new(),
            contacts: BTreeMap::new(),
            index: Index::default(),
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

    /// A node is gone for good: what pulses told of it means nothing any more.
    pub(super) fn forget(&mut self, node: &NodeId) {
        if !self.nodes.contains_key(node) && !self.members.contains_key(node) {
            self.contacts.remove(node);
        }
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
        contact.echoed = old.echoed.max(echo);
        let new = *contact;
        if let Some(member) = self.members.get(node) {
            if member.evicted.is_none() && *node != self.own && new.echoed != old.echoed {
                self.index.file(Mark::Echoed(old.echoed), node, false);
                self.index.file(Mark::Echoed(new.echoed), node, true);
            }
            if new.probe != old.probe {
                self.index.file(Mark::Answered(old.probe), node, false);
                self.index.file(Mark::Answered(new.probe), node, true);
            }
        }
        new.probe != old.probe
    }

    /// Members that say this.
    pub(super) fn saying(&self, says: Says) -> impl Iterator<Item = &NodeId> {
        self.filed(&Mark::Says(says))
    }

    /// How many members say this.
    pub(super) fn count_saying(&self, says: Says) -> usize {
        self.index.count(&Mark::Says(says))
    }

    /// Members that are neither gone nor out, and say anything that `besides` does not hold for.
    pub(super) fn saying_not(&self, besides: impl Fn(Says) -> bool) -> impl Iterator<Item = &NodeId> {
        let there = self.index.between(Mark::There(None), Mark::Gone);
        let other = there.filter(move |(mark, _)| matches!(mark, Mark::There(says) if !besides(*says)));
        other.flat_map(|(_, nodes)| nodes).inspect(|_| looks::count())
    }

    /// Members that are dead or without a key.
    pub(super) fn gone(&self) -> impl Iterator<Item = &NodeId> {
        self.filed(&Mark::Gone)
    }

    /// Members that are gone, and not out.
    pub(super) fn missing(&self) -> impl Iterator<Item = &NodeId> {
        self.filed(&Mark::Missing)
    }

    /// Members that are out, though a key of theirs is still there.
    pub(super) fn late(&self) -> impl Iterator<Item = &NodeId> {
        self.filed(&Mark::Late)
    }

    /// Members that wait without some of their workers, and could start new ones ahead.
    pub(super) fn lacking(&self) -> impl Iterator<Item = &NodeId> {
        self.filed(&Mark::Lacking)
    }

    /// Whether the workers of all nodes that are there can start ahead.
    pub(super) fn all_warm_up(&self) -> bool {
        self.index.count(&Mark::Cold) == 0
    }

    /// The last to be evicted of those that may be at work until their fence point: when.
    pub(super) fn last_unsettled(&self) -> Option<Time> {
        let settling = self.index.between(Mark::Settling(Time::ZERO), Mark::Doubtful(None, None));
        settling.map(|(mark, _)| mark).next_back().and_then(Mark::time)
    }

    /// The last to be evicted of those that are neither dead nor left, and have not said that they `stopped`: when;
    /// within, None where none of them was evicted.
    pub(super) fn last_doubtful(&self, stopped: impl Fn(Says) -> bool) -> Option<Option<Time>> {
        let doubtful = self.index.between(Mark::Doubtful(None, None), Mark::Answered(0));
        let mut marks = doubtful.map(|(mark, _)| mark).rev().inspect(|_| looks::count());
        marks.find(|mark| matches!(mark, Mark::Doubtful(_, says) if !stopped(*says))).map(Mark::time)
    }

    /// Members that have not answered this probe.
    pub(super) fn unanswered(&self, probe: u64) -> impl Iterator<Item = &NodeId> {
        let nodes = self.index.between(Mark::Answered(0), Mark::Answered(probe)).flat_map(|(_, nodes)| nodes);
        nodes.inspect(|_| looks::count())
    }

    /// When the last of the members that live and stay opened its stream: None where one has not; within, None where
    /// there is no such member.
    pub fn all_opened(&self) -> Option<Option<Time>> {
        let mut opened = self.index.between(Mark::Opened(None), Mark::Echoed(None)).map(|(mark, _)| mark.time());
        match opened.next() {
            Some(None) => None,
            first => Some(opened.next_back().or(first).flatten()),
        }
    }

    /// The oldest of the words that the members have seen last, except the own node: None where one has seen none;
    /// within, None where there is no such member.
    pub(super) fn all_echoed(&self) -> Option<Option<Time>> {
        let mut echoed = self.index.between(Mark::Echoed(None), Mark::Comes).map(|(mark, _)| mark.time());
        match echoed.next() {
            Some(None) => None,
            oldest => Some(oldest.flatten()),
        }
    }

    /// Members that have seen no word sent after this time, except the own node; and when the next one's was sent.
    pub(super) fn echoed_until(&self, time: Time) -> (impl Iterator<Item = &NodeId>, Option<Time>) {
        let after = Mark::Echoed(Some(time + Duration::from_nanos(1)));
        let late = self.index.between(Mark::Echoed(None), after.clone()).flat_map(|(_, nodes)| nodes);
        let next = self.index.between(after, Mark::Comes).next().and_then(|(mark, _)| mark.time());
        (late.inspect(|_| looks::count()), next)
    }

    /// Nodes that could take a place in any round, in the order in which they came.
    pub(super) fn newcomers(&self) -> impl Iterator<Item = &NodeId> {
        let came = self.index.between(Mark::Came(Revision::NONE), Mark::Arrived(Time::ZERO));
        came.flat_map(|(_, nodes)| nodes).inspect(|_| looks::count())
    }

    /// How many they are.
    pub(super) fn count_newcomers(&self) -> usize {
        self.index.count(&Mark::Comes)
    }

    /// When the first and the last of them came.
    pub(super) fn arrivals(&self) -> Option<(Time, Time)> {
        let mut arrived = self.index.between(Mark::Arrived(Time::ZERO), Mark::End).filter_map(|(mark, _)| mark.time());
        let first = arrived.next()?;
        Some((first, arrived.next_back().unwrap_or(first)))
    }

    /// Nodes and members of this name.
    pub(super) fn named(&self, name: &str) -> impl Iterator<Item = &NodeId> {
        self.filed(&Mark::Name(name.to_owned()))
    }

    /// Names that several bear.
    pub(super) fn shared_names(&self) -> impl Iterator<Item = &String> {
        self.index.shared().filter_map(|mark| if let Mark::Name(name) = mark { Some(name) } else { None })
    }

    /// Nodes that claim this place.
    pub(super) fn claiming(&self, place: u32) -> impl Iterator<Item = &NodeId> {
        self.filed(&Mark::Place(place))
    }

    /// Places that several claim.
    pub(super) fn contested(&self) -> impl Iterator<Item = u32> {
        self.index.shared().filter_map(|mark| if let Mark::Place(place) = mark { Some(*place) } else { None })
    }

    fn filed<'a>(&'a self, mark: &Mark) -> impl Iterator<Item = &'a NodeId> + use<'a> {
        self.index.under(mark).inspect(|_| looks::count())
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
        change(self);
        let after = self.marks(node);
        // Most changes leave most marks unchanged, and filing a node costs more than comparing its marks.
        for mark in before.iter().filter(|mark| !after.contains(mark)) {
            self.index.file(mark.clone(), node, false);
        }
        for mark in after.into_iter().filter(|mark| !before.contains(mark)) {
            self.index.file(mark, node, true);
        }
    }

    /// What a node is filed under.
    fn marks(&self, node: &NodeId) -> Vec<Mark> {
        let contact = self.contacts.get(node).copied().unwrap_or_default();
        let present = self.nodes.get(node);
        let member = self.members.get(node);
        let names = present.map(|it| &it.record.name).into_iter().chain(member.map(|it| &it.rank.name));
        let mut marks: Vec<Mark> = names.cloned().map(Mark::Name).collect();
        if let Some(present) = present {
            marks.extend(present.record.place.map(Mark::Place));
            marks.extend((!present.record.warms_up).then_some(Mark::Cold));
            if !contact.dead && self.is_placeless(node) {
                marks.extend([Mark::Comes, Mark::Came(present.created), Mark::Arrived(present.arrived)]);
            }
        }
        let Some(member) = member else { return marks };
        let evicted = member.evicted.is_some();
        let (gone, out) = (contact.dead || member.absent.is_some(), evicted || member.left);
        let dead = contact.dead || member.evicted.is_some_and(|evicted| evicted.fate == Fate::Dead);
        // mutant eviction_is_a_death: evicted.fate == Fate::Unknown => false
        let unknown = member.evicted.filter(|evicted| evicted.fate == Fate::Unknown && !contact.dead);
        let says = present.and_then(|it| Some((it.record.round?, it.record.phase)));
        let lacks = present.is_some_and(|it| it.record.lacks_workers);
        marks.extend([Mark::Says(says), Mark::Answered(contact.probe)]);
        marks.extend(gone.then_some(Mark::Gone));
        marks.extend((!out).then_some(if gone { Mark::Missing } else { Mark::There(says) }));
        marks.extend((out && present.is_some()).then_some(Mark::Late));
        marks.extend(lacks.then_some(Mark::Lacking));
        marks.extend(unknown.map(|evicted| Mark::Settling(evicted.at)));
        marks.extend((!dead && !member.left).then_some(Mark::Doubtful(member.evicted.map(|it| it.at), says)));
        marks.extend((!evicted && present.is_some() && !contact.dead).then_some(Mark::Opened(contact.opened)));
        marks.extend((!evicted && *node != self.own).then_some(Mark::Echoed(contact.echoed)));
        marks
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
