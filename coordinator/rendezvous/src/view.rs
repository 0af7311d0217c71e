//! What a leader knows when it decides: the store's records and its own observations. [`super::Leader`] keeps it up to
//! date.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use super::exclusion::KnownFaults;
use super::roster::{Roster, SealedMember};
use crate::job::{Desired, Fate, NodeId, OnStoreLoss, Phase, RestartPolicy, RoundRecord, Spec, Versioned};
use crate::kv::Revision;
use crate::time::Time;

/// The leader before, as a node knew it that was a member next to it and leads now.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Former {
    /// Its node.
    pub node: NodeId,
    /// Whether its death is confirmed.
    pub dead: bool,
    /// When the node that leads now last heard a leader's word, from whichever leader; not before it had its lease.
    pub silent_since: Time,
}

/// Everything [`super::decide()`] looks at. All times are the leader's own clock's.
#[derive(Debug, Clone)]
pub struct View {
    /// What all agreed on.
    pub spec: Spec,
    /// The operator's overrides.
    pub desired: Desired,
    /// The current round.
    pub round: Versioned<RoundRecord>,
    /// While forming: whether this leader wrote the record in this term. A leader that found it makes a new plan first.
    pub planned_here: bool,
    /// When this term began.
    pub elected: Time,
    /// Since when this leader has had its turns without a pause as long as a lease.
    pub awake: Time,
    /// The leader before, where that is known.
    pub former: Option<Former>,
    /// When this leader first saw the round's number in its state.
    pub since: Time,
    /// The same, where the leader's node saw it begin, perhaps before it led.
    pub begun: Option<Time>,
    /// The step of the newest checkpoint.
    pub committed: Option<u64>,
    /// What is held against nodes, and since when.
    pub faults: KnownFaults,
    /// Keys under `nodes/`, members of the last sealed round, and what pulses told.
    pub roster: Roster,
    /// When growth may be quick next, though the round is young.
    pub quick: GrowthTokens,
    /// The last probe: its number, and the failure report it was sent after.
    pub probe: Option<(u64, Revision)>,
    /// Rounds before the current one that still have keys.
    pub stale_rounds: BTreeSet<u64>,
    /// Nodes that have a tombstone, and since when this leader knows of it.
    pub tombstones: BTreeMap<NodeId, Time>,
    /// Nodes whose keys hold no record of ours, by when these were written.
    pub strays: BTreeMap<NodeId, Revision>,
    /// Why no one knows where training resumes, while no round is sealed, and so no one is at work.
    pub unreadable_checkpoint: Option<String>,
}

/// Growth that need not wait until the round is `min_round_time` old: what is frequent is damped, not what is first.
/// There are two at once, and one more after each `growth_refill`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct GrowthTokens {
    /// When all of them are there again.
    full: Time,
}

impl GrowthTokens {
    const MOST: u32 = 2;
    /// Where growth is not cheap.
    const REFILL: Duration = Duration::from_secs(60);

    /// From when on one is there.
    pub(super) fn ready(self, refill: Duration) -> Time {
        self.full.minus(refill * (GrowthTokens::MOST - 1))
    }

    /// One less.
    pub(super) fn spend(&mut self, now: Time, refill: Duration) {
        self.full = self.full.max(now) + refill;
    }
}

/// Whether a member can still be at work.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Liveness {
    /// Nothing speaks against it.
    Alive,
    /// Its key is gone; it counts as lost at this time unless it is heard.
    Missing(Time),
    /// It is lost: how surely, and the reason for people.
    Lost(Fate, &'static str),
}

impl View {
    /// Nodes that hold one replica.
    pub(super) fn replica_size(&self) -> usize {
        self.spec.nodes_per_replica.max(1) as usize
    }

    /// Fewest nodes of a round, in whole replicas.
    pub(super) fn min_nodes(&self) -> usize {
        let nodes = self.desired.min_nodes.unwrap_or(self.spec.min_nodes).max(1) as usize;
        nodes.next_multiple_of(self.replica_size())
    }

    /// Most nodes of a round, in whole replicas.
    pub(super) fn max_nodes(&self) -> usize {
        let nodes = self.desired.max_nodes.unwrap_or(self.spec.max_nodes) as usize;
        (nodes - nodes % self.replica_size()).max(self.min_nodes())
    }

    /// A present node's phase, if it speaks of round `round`.
    pub(super) fn phase_for(&self, node: &NodeId, round: u64) -> Option<Phase> {
        self.roster.node(node).filter(|n| n.record.round == Some(round)).map(|n| n.record.phase)
    }

    /// What is missing of the last sealed round's rank keys, for people. Without them no one knows who may still be at
    /// work: nothing follows from what the other members say, not even that all have said it.
    pub(super) fn damage(&self) -> Option<String> {
        let sealed = self.round.value.sealed?;
        // Where the record does not say how many there are, there is at least one.
        let members = sealed.nodes.max(self.round.value.group_world_size).max(1) as usize;
        let there = self.roster.size();
        (there < members).then(|| {
            format!(
                "the store is damaged: of the {members} rank keys under rounds/{}/{}/ there are {there}. Workers go on, but \
                 no failure is handled and no round formed: restore these keys, or end the job with `elasticctl close`",
                sealed.number, sealed.plan.0
            )
        })
    }

    /// Tombstones that tell no one anything any more, and those that will be so, with the time from which on: all but
    /// of members, of whom they say how surely they are lost.
    pub(super) fn old_tombstones(&self) -> impl Iterator<Item = (Time, &NodeId)> {
        // Its node's workers end by their fence point, and so does any write of its agent that is under way: in half of
        // this time. A node that comes back later finds the group gone on without it, and comes as a newcomer.
        let stays = 2 * (self.spec.timings.lease_ttl + self.spec.timings.takeover_delay);
        let others = self.tombstones.iter().filter(|(node, _)| self.roster.member(node).is_none());
        others.map(move |(node, since)| (*since + stays, node))
    }

    pub(super) fn confirmed_dead(&self, node: &NodeId) -> bool {
        self.roster.contact(node).is_some_and(|c| c.dead)
    }

    /// Other nodes of the same name on the same machine. At most one of them is alive, but their keys do not tell which:
    /// a dead one's last write may arrive after its successor's first. Their ports can tell.
    pub(super) fn namesakes(&self, node: &NodeId) -> Vec<NodeId> {
        let Some(own) = self.roster.node(node).map(|present| &present.record) else { return Vec::new() };
        let same = |other: &&NodeId| {
            let present = self.roster.node(other).map(|it| &it.record.machine);
            let member = self.roster.member(other).map(|it| &it.rank.machine);
            *other != node && present.into_iter().chain(member).any(|machine| *machine == own.machine)
        };
        self.roster.named(&own.name).filter(same).cloned().collect()
    }

    /// Where a member's loss of contact is counted from: the moment when every member that stays has opened its stream
    /// to this leader. Until then a deposed leader may still hear them all and vouch for the missing one.
    pub(super) fn counting_since(&self) -> Option<Time> {
        if self.spec.on_store_loss == OnStoreLoss::Fence {
            return Some(self.elected);
        }
        Some(self.roster.all_opened()?.unwrap_or(Time::ZERO).max(self.elected))
    }

    /// [`View::counting_since`], or its bound: no one is vouched for longer than the takeover delay.
    pub(super) fn counting_or_bound(&self) -> Time {
        let bound = self.elected + self.spec.timings.takeover_delay;
        self.counting_since().map_or(bound, |since| since.min(bound))
    }

    /// Whether a deposed leader may still vouch for members that are silent here: while no other member follows this
    /// leader, it may be hearing them all, and may itself come back before they are past their fence point.
    fn may_be_vouched_for(&self) -> bool {
        self.spec.on_store_loss == OnStoreLoss::Wait && !matches!(self.roster.all_opened(), Some(Some(_)))
    }

    /// Since when the former leader is silent to the node that leads now, if that is a member. No one has vouched for
    /// the former leader since, not even it itself: for that each member must have answered. And what else keeps its
    /// workers alive ended with its lease, on which its key hung.
    fn former_silent_since(&self, node: &NodeId) -> Option<Time> {
        // mutant a_successor_is_always_a_member: self.roster.has_own() => true
        let former = self.former.as_ref().filter(|former| former.node == *node && self.roster.has_own())?;
        // mutant a_former_leader_is_past_its_fence: former.silent_since => Time::ZERO
        Some(former.silent_since)
    }

    /// Whether a member of the sealed round lives, as far as is known.
    pub(super) fn liveness(&self, now: Time, node: &NodeId) -> Liveness {
        if self.confirmed_dead(node) {
            return Liveness::Lost(Fate::Dead, "its agent is gone: its port refuses or is another's");
        }
        let Some(member) = self.roster.member(node) else { return Liveness::Alive };
        if let Some(evicted) = member.evicted {
            return Liveness::Lost(evicted.fate, "it was evicted");
        }
        let Some(absent) = member.absent else { return Liveness::Alive };
        let heard = self.roster.contact(node).and_then(|contact| contact.heard).unwrap_or(Time::ZERO);
        let former = self.former_silent_since(node);
        let silent_from = former.unwrap_or_else(|| self.counting_or_bound()).max(heard);
        let lost_at = (silent_from + self.spec.timings.lease_ttl).max(absent);
        // mutant absent_is_gone: now >= lost_at => true
        if now >= lost_at {
            let past = former.is_some() || (member.started && !self.may_be_vouched_for());
            let fate = if past { Fate::Fenced } else { Fate::Unknown };
            Liveness::Lost(fate, "its lease lapsed and it is silent")
        } else {
            Liveness::Missing(lost_at)
        }
    }

    /// Members whose keys are there and that are silent for so long that they are past their fence points: neither a
    /// pulse nor a write of theirs has come. Something else than they renews their leases. And when the next could be.
    pub(super) fn silent(&self, now: Time) -> (Vec<&NodeId>, Option<Time>) {
        // A member that does not reach this leader writes its key more often than this.
        let patience = self.spec.timings.lease_ttl * 2;
        let from = self.elected.max(self.awake) + patience;
        if now < from {
            return (Vec::new(), Some(from));
        }
        let before = now.minus(patience);
        let last = |node: &NodeId| self.roster.contact(node).and_then(|contact| contact.heard).unwrap_or(self.elected);
        let there = |node: &&NodeId| self.roster.member(node).is_some_and(|member| member.absent.is_none());
        let (late, next) = self.roster.echoed_until(before);
        let (silent, others): (Vec<_>, Vec<_>) = late.filter(there).partition(|node| last(node) <= before);
        let next = others.into_iter().map(last).chain(next).min().map(|heard| heard + patience);
        (silent, next)
    }

    /// Waiting nodes without a place that the operator asked to leave.
    pub(super) fn drained_newcomers(&self) -> impl Iterator<Item = &NodeId> {
        self.drained_nodes().filter(|node| self.roster.is_placeless(node))
    }

    /// Nodes and members that the operator asked to leave.
    pub(super) fn drained_nodes(&self) -> impl Iterator<Item = &NodeId> {
        self.desired.drain.iter().flat_map(|name| self.roster.named(name))
    }

    /// Names of members that the operator asked to leave.
    pub(super) fn drained_members(&self) -> Vec<String> {
        let stays = |node| self.roster.member(node).is_some_and(|member| member.evicted.is_none());
        let names = self.desired.drain.iter().filter(|name| self.roster.named(name).any(stays));
        names.cloned().collect()
    }

    /// Whether a node could take a place in any round.
    pub(super) fn comes(&self, node: &NodeId) -> bool {
        self.roster.is_placeless(node) && !self.confirmed_dead(node)
    }

    /// Nodes and members that the operator excludes.
    pub(super) fn excluded_by_operator(&self) -> impl Iterator<Item = &NodeId> {
        self.desired.exclude.iter().flat_map(|name| self.roster.named(name))
    }

    /// Nodes and members that are excluded for their failures.
    pub(super) fn excluded_for_failures(&self, now: Time) -> impl Iterator<Item = &NodeId> {
        self.faults.excluded(now, &self.desired).flat_map(|(name, _)| self.roster.named(name))
    }

    /// Nodes that could take a place, and get none while they are excluded.
    pub(super) fn excluded_newcomers(&self, now: Time) -> BTreeSet<&NodeId> {
        let excluded = self.excluded_by_operator().chain(self.excluded_for_failures(now));
        excluded.filter(|node| self.comes(node)).collect()
    }

    /// Members and nodes that the operator evicts, and that are still there.
    pub(super) fn evicted_by_operator(&self) -> impl Iterator<Item = &NodeId> {
        self.desired.evict.iter().filter(|node| match self.roster.member(node) {
            Some(member) => member.evicted.is_none() && !member.left,
            None => self.roster.node(node).is_some(),
        })
    }

    /// How long a member may take to stop its workers for the forming round.
    pub(super) fn grace(&self, node: &NodeId, member: &SealedMember) -> Duration {
        let sealed = self.round.value.sealed.map_or(0, |sealed| sealed.number);
        let leaves = self.phase_for(node, sealed) == Some(Phase::Draining)
            || self.round.value.leaving.contains(&member.rank.name)
            || self.round.value.paused;
        if leaves { self.spec.timings.drain_grace } else { self.spec.timings.stop_grace }
    }

    /// Whether growth costs the members no more than a pause: it stops no process, newcomers are ready to begin, and it
    /// is not counted as a restart.
    pub(super) fn growth_is_cheap(&self) -> bool {
        self.roster.all_warm_up() && self.spec.restart_policy != RestartPolicy::All
    }

    /// After how long a spent token is there again.
    pub(super) fn growth_refill(&self) -> Duration {
        if self.growth_is_cheap() { self.spec.timings.min_round_time } else { GrowthTokens::REFILL }
    }

    /// Whether newcomers have been gathered long enough; if not, when they will have been. Latecomers extend the call,
    /// up to six times its length after the first.
    pub(super) fn last_call(&self, now: Time) -> Option<Time> {
        let call: Duration = self.spec.timings.last_call;
        let (first, last) = self.roster.arrivals()?;
        let until = (last + call).min(first + call * 6);
        (now < until).then_some(until)
    }
}
