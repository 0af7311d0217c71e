//! What a seed decides: how many nodes, which timings, which faults.

use std::ops::RangeInclusive;
use std::time::Duration;

use elastic_rendezvous::job::{OnStoreLoss, RestartPolicy, Spec, Timings, samples};

use crate::dice::{Dice, SECOND};

/// Kinds of faults; a seed switches some of them on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum FaultKind {
    /// Workers fail by themselves.
    Worker,
    /// An agent is killed; its guard ends the workers.
    Kill,
    /// A host is lost with all that runs on it.
    Host,
    /// An agent is stopped for a while; its guard is not.
    Freeze,
    /// A host cannot reach the store.
    CutStore,
    /// Two hosts cannot reach each other.
    CutPeers,
    /// Some hosts can reach neither the store nor the other hosts.
    Split,
    /// The store is away.
    Outage,
    /// Store calls take long, or their answers are lost.
    Slow,
    /// The store forgets its history.
    Compact,
    /// Pulse streams break.
    Streams,
    /// Nodes join.
    Join,
    /// Nodes are drained.
    Drain,
    /// The operator changes the job.
    Operator,
    /// All agents of the job are killed, and later started again.
    Everything,
    /// Nothing of what a host watches in the store reaches it, while its calls do.
    Deaf,
    /// Members are cut off from the store together, and reach each other: their leader still vouches for them.
    Island,
    /// The leader is cut off from the store, and some of its members hear nothing of a successor.
    Stale,
    /// A member hears nothing, neither of the store nor of the leader, while its own calls reach the store.
    Unheard,
    /// A worker blames a peer, and no peer has failed.
    Blame,
    /// A worker fails by itself, and another blames it.
    Ruin,
    /// The operator pauses the job, or resumes it.
    Pause,
    /// The operator excludes a node, takes one back, or evicts one.
    Exclude,
    /// The store refuses a kind of request, for a while or for ever.
    Refuse,
    /// An agent is stopped between a decision of its leader and the write.
    Stall,
    /// The store is restored from a backup.
    Restore,
    /// Somebody writes an old record again.
    WriteAgain,
}

impl FaultKind {
    /// Those of any seed. Another one would change every seed's story, so those after them are for families of
    /// their own.
    pub(crate) const ANY: [FaultKind; 15] = [
        FaultKind::Worker,
        FaultKind::Kill,
        FaultKind::Host,
        FaultKind::Freeze,
        FaultKind::CutStore,
        FaultKind::CutPeers,
        FaultKind::Split,
        FaultKind::Outage,
        FaultKind::Slow,
        FaultKind::Compact,
        FaultKind::Streams,
        FaultKind::Join,
        FaultKind::Drain,
        FaultKind::Operator,
        FaultKind::Everything,
    ];
}

#[derive(Clone, Debug)]
pub(crate) struct Scenario {
    pub(crate) spec: Spec,
    pub(crate) hosts: usize,
    pub(crate) slots: Vec<u32>,
    /// The second host was given the first one's node name.
    pub(crate) clash: bool,
    /// Whether each host's workers know about rounds.
    pub(crate) aware: Vec<bool>,
    /// Agents at the beginning.
    pub(crate) first: usize,
    pub(crate) faults: Vec<FaultKind>,
    /// Mean time between two faults.
    pub(crate) pace: u64,
    /// When faults end.
    pub(crate) heal_at: u64,
    /// When workers end by themselves although faults continue.
    pub(crate) finish_at: Option<u64>,
    /// Chance of a worker to fail by itself, for each start.
    pub(crate) failing: f64,
    /// Chance that a store call goes wrong.
    pub(crate) losing: f64,
    /// Parts per million by which clocks differ at most.
    pub(crate) skew: u64,
    /// Chance that what one machine sends another takes seconds, while faults continue.
    pub(crate) late: f64,
    /// Two hosts that never reach each other, not even when all else works again.
    pub(crate) apart: Option<(usize, usize)>,
    /// When all else works again, so many hosts are gone for good that those excluded for their failures are needed.
    pub(crate) loses_the_rest: bool,
    /// When all works again and a round runs fully, something fails once more.
    pub(crate) last_blow: bool,
}

/// What the scenarios of a seed are about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Family {
    /// Anything.
    Any,
    /// Short leases, and messages, answers and processes that are as late as a lease is long.
    Late,
    /// A hundred hosts and more.
    Crowd,
    /// Faults that strike by role: who leads, who works, who waits in vain.
    Role,
    /// Anything, of a job that its operator pauses and resumes.
    Paused,
    /// Anything, of a job that excludes nodes, by itself and by its operator.
    Excluding,
    /// The same of a job that cannot do without the nodes that it has excluded.
    Needing,
    /// Anything, at a store that refuses requests; and writes come long after their decisions.
    Refused,
    /// Anything, at a store that goes back to what it was, as a whole or in a record.
    Restored,
    /// Anything, of a job whose replicas have several nodes.
    Replicated,
}

impl Family {
    /// The first seed of the scenarios about lateness.
    pub(crate) const LATE: u64 = 1 << 40;
    /// The first seed of crowds.
    pub(crate) const CROWDS: u64 = 1 << 41;
    /// The first seed of faults by role.
    pub(crate) const ROLES: u64 = 1 << 42;
    /// The first seed of jobs that an operator pauses and resumes.
    pub(crate) const PAUSES: u64 = 1 << 43;
    /// The first seed of jobs that exclude nodes.
    pub(crate) const EXCLUSIONS: u64 = 1 << 44;
    /// The first seed of jobs that exclude nodes and then need them.
    pub(crate) const NEEDS: u64 = 1 << 45;
    /// The first seed of stores that refuse requests.
    pub(crate) const REFUSALS: u64 = 1 << 46;
    /// The first seed of stores that go back.
    pub(crate) const RESTORES: u64 = 1 << 47;
    /// The first seed of jobs whose replicas have several nodes.
    pub(crate) const REPLICAS: u64 = 1 << 48;

    /// The first seed of each, crowds excepted.
    pub(crate) const FIRST: [u64; 9] = [
        0,
        Family::LATE,
        Family::ROLES,
        Family::PAUSES,
        Family::EXCLUSIONS,
        Family::NEEDS,
        Family::REFUSALS,
        Family::RESTORES,
        Family::REPLICAS,
    ];

    pub(crate) fn of(seed: u64) -> Family {
        match seed {
            Family::REPLICAS.. => Family::Replicated,
            Family::RESTORES.. => Family::Restored,
            Family::REFUSALS.. => Family::Refused,
            Family::NEEDS.. => Family::Needing,
            Family::EXCLUSIONS.. => Family::Excluding,
            Family::PAUSES.. => Family::Paused,
            Family::ROLES.. => Family::Role,
            Family::CROWDS.. => Family::Crowd,
            Family::LATE.. => Family::Late,
            _ => Family::Any,
        }
    }
}

impl Scenario {
    pub(crate) fn of(seed: u64, dice: &mut Dice) -> Scenario {
        let any = Scenario::any(dice);
        match Family::of(seed) {
            Family::Any => any,
            Family::Late => any.late(dice),
            Family::Crowd => any.crowd(dice),
            Family::Role => any.late(dice).role(dice),
            Family::Paused => any.paused(dice),
            Family::Excluding => any.excluding(dice),
            Family::Needing => any.excluding(dice).needing(dice),
            Family::Refused => any.doubted(dice, [FaultKind::Refuse, FaultKind::Stall]),
            Family::Replicated => any.replicated(dice),
            Family::Restored => any.doubted(dice, [FaultKind::Restore, FaultKind::WriteAgain]),
        }
    }

    fn late(mut self, dice: &mut Dice) -> Scenario {
        const KINDS: [FaultKind; 10] = [
            FaultKind::Deaf,
            FaultKind::Kill,
            FaultKind::Freeze,
            FaultKind::CutStore,
            FaultKind::CutPeers,
            FaultKind::Split,
            FaultKind::Outage,
            FaultKind::Streams,
            FaultKind::Compact,
            FaultKind::Join,
        ];
        self.hosts = dice.between(3, 6) as usize;
        self.first = dice.between(1, self.hosts as u64 + 1) as usize;
        self.clash = false;
        self.slots = vec![1; self.hosts];
        self.aware = (0..self.hosts).map(|_| dice.chance(0.3)).collect();
        self.spec.min_nodes = dice.between(1, 3) as u32;
        self.spec.max_nodes = self.hosts as u32 - dice.between(0, 2) as u32;
        // Rounds end often, and the job continues.
        self.spec.max_restarts = 1000;
        let timings = &mut self.spec.timings;
        timings.lease_ttl = Duration::from_secs(dice.between(4, 6));
        timings.margin = timings.lease_ttl / 10;
        timings.stop_grace = Duration::from_secs(dice.between(1, 4));
        timings.start_timeout = Duration::from_secs(dice.between(2, 8));
        timings.last_call = Duration::from_secs(dice.between(0, 2));
        timings.takeover_delay = Duration::from_secs(dice.between(8, 30));
        timings.min_round_time = Duration::from_secs(dice.between(0, 2));
        self.faults = KINDS.into_iter().filter(|_| dice.chance(0.5)).chain([FaultKind::Slow]).collect();
        self.pace = dice.between(SECOND, 5 * SECOND);
        self.heal_at = dice.between(60, 200) * SECOND;
        self.finish_at = None;
        self.failing = dice.between(0, 4) as f64 / 10.0;
        self.losing = dice.between(5, 70) as f64 / 100.0;
        self.late = dice.between(0, 40) as f64 / 100.0;
        self.apart = dice.chance(0.3).then_some((0, 1));
        self
    }

    fn role(mut self, dice: &mut Dice) -> Scenario {
        const KINDS: [FaultKind; 9] = [
            FaultKind::Island,
            FaultKind::Island,
            FaultKind::Stale,
            FaultKind::Unheard,
            FaultKind::Blame,
            FaultKind::Ruin,
            FaultKind::Kill,
            FaultKind::Join,
            FaultKind::Compact,
        ];
        self.first = self.hosts;
        self.spec.min_nodes = 1;
        self.spec.max_nodes = self.hosts as u32 - dice.between(0, 3) as u32;
        self.spec.on_store_loss = OnStoreLoss::Wait;
        if dice.chance(0.6) {
            self.spec.max_restarts = dice.between(0, 4).saturating_sub(1) as u32;
        }
        self.faults = KINDS.into_iter().filter(|_| dice.chance(0.6)).chain([FaultKind::Slow]).collect();
        self.pace = dice.between(SECOND, 6 * SECOND);
        self.heal_at = dice.between(100, 300) * SECOND;
        self.failing = 0.0;
        self.losing = if dice.chance(0.5) { dice.between(0, 40) } else { 0 } as f64 / 100.0;
        self.late = if dice.chance(0.4) { dice.between(0, 60) } else { 0 } as f64 / 100.0;
        self
    }

    fn paused(mut self, dice: &mut Dice) -> Scenario {
        // As often as all other faults together, or now and then.
        let times = if dice.chance(0.5) { self.faults.len().max(1) } else { 1 };
        self.faults.extend(std::iter::repeat_n(FaultKind::Pause, times));
        self.heal_at = self.heal_at.max(dice.between(30, 200) * SECOND);
        self
    }

    fn excluding(mut self, dice: &mut Dice) -> Scenario {
        // The operator of `operate` forgets all that was desired before.
        self.faults.retain(|kind| *kind != FaultKind::Operator);
        let times = if dice.chance(0.5) { self.faults.len().max(1) } else { 1 };
        self.faults.extend(std::iter::repeat_n(FaultKind::Exclude, times));
        self.spec.exclude_after = dice.between(0, 4) as u32;
        if dice.chance(0.5) {
            // One can be excluded, and is needed as soon as another is gone.
            let most = self.spec.max_nodes.min(self.hosts as u32 - u32::from(self.clash));
            self.spec.min_nodes = most.saturating_sub(1).max(1);
        }
        // Rounds fail often, and the job continues.
        self.spec.max_restarts = dice.between(3, 30) as u32;
        self.failing = dice.between(0, 6) as f64 / 10.0;
        self.heal_at = self.heal_at.max(dice.between(30, 200) * SECOND);
        self
    }

    /// When all else works again, other hosts are gone for good.
    fn needing(mut self, dice: &mut Dice) -> Scenario {
        self.hosts = dice.between(3, 7) as usize;
        self.first = self.hosts;
        self.clash = false;
        self.slots = vec![1; self.hosts];
        self.aware = vec![dice.chance(0.5); self.hosts];
        self.spec.max_nodes = self.hosts as u32;
        self.spec.min_nodes = self.hosts as u32 - 1;
        self.spec.exclude_after = dice.between(1, 3) as u32;
        self.spec.max_restarts = 1000;
        self.failing = dice.between(2, 5) as f64 / 10.0;
        // What it waits for is over before an exclusion ends by itself.
        let timings = &mut self.spec.timings;
        timings.start_timeout = Duration::from_secs(dice.between(8, 12));
        timings.stop_grace = Duration::from_secs(dice.between(1, 3));
        timings.drain_grace = Duration::from_secs(1);
        timings.takeover_delay = Duration::from_secs(20);
        self.loses_the_rest = true;
        self
    }

    /// These faults are as frequent as all others together. There are always nodes enough that one can go without.
    fn doubted(mut self, dice: &mut Dice, kinds: [FaultKind; 2]) -> Scenario {
        self.hosts = dice.between(3, 7) as usize;
        self.first = self.hosts;
        self.clash = false;
        self.slots = vec![1; self.hosts];
        self.aware = (0..self.hosts).map(|_| dice.chance(0.5)).collect();
        self.spec.max_nodes = self.hosts as u32 - dice.between(0, 2) as u32;
        self.spec.min_nodes = dice.between(2, u64::from(self.spec.max_nodes)) as u32;
        // Rounds end often, and the job continues.
        self.spec.max_restarts = 1000;
        // What an operator asked for would be restored too.
        self.faults.retain(|kind| *kind != FaultKind::Operator);
        let times = self.faults.len().div_ceil(2).max(1);
        self.faults.extend(kinds.into_iter().flat_map(|kind| std::iter::repeat_n(kind, times)));
        self.heal_at = self.heal_at.max(dice.between(30, 120) * SECOND);
        self.finish_at = None;
        self.last_blow = true;
        self
    }

    /// There are always spare nodes; some make no replica.
    fn replicated(mut self, dice: &mut Dice) -> Scenario {
        let size = dice.between(2, 4) as u32;
        let (replicas, spares) = (dice.between(1, 4) as u32, dice.between(1, 4) as u32);
        self.spec.nodes_per_replica = size;
        self.spec.max_nodes = size * replicas;
        self.spec.min_nodes = size * dice.between(1, u64::from(replicas) + 1) as u32;
        self.hosts = (self.spec.max_nodes + spares) as usize;
        self.first = self.hosts;
        self.clash = false;
        self.slots = vec![1; self.hosts];
        self.aware = (0..self.hosts).map(|_| dice.chance(0.8)).collect();
        // Rounds end often, and the job continues.
        self.spec.max_restarts = 1000;
        self.faults.extend([FaultKind::Kill, FaultKind::Join]);
        self.failing = dice.between(0, 4) as f64 / 10.0;
        self.heal_at = self.heal_at.max(dice.between(30, 200) * SECOND);
        self
    }

    fn crowd(mut self, dice: &mut Dice) -> Scenario {
        self.hosts = dice.between(100, 151) as usize;
        self.first = self.hosts;
        self.clash = false;
        self.spec.max_nodes = self.hosts as u32 - dice.between(0, 20) as u32;
        self.spec.min_nodes = self.spec.max_nodes / 2;
        self.slots = vec![dice.between(1, 9) as u32; self.hosts];
        self.aware = vec![dice.chance(0.5); self.hosts];
        self.heal_at = dice.between(20, 40) * SECOND;
        // Of so many, some start late in each round. One that grew before that would never run whole.
        self.spec.timings.min_round_time = self.spec.timings.start_timeout;
        self
    }

    fn any(dice: &mut Dice) -> Scenario {
        let hosts = if dice.chance(0.05) { dice.between(9, 21) } else { dice.between(1, 9) } as usize;
        let max_nodes = dice.between(1, hosts as u64 + 2) as u32;
        let clash = hosts > 2 && dice.chance(0.05);
        let most = max_nodes.min(hosts as u32 - u32::from(clash));
        let min_nodes = dice.between(1, u64::from(most) + 1) as u32;
        let seconds = |dice: &mut Dice, low: u64, high: u64| Duration::from_secs(dice.between(low, high + 1));
        let lease_ttl = seconds(dice, 4, 10);
        let timings = Timings {
            lease_ttl,
            last_call: seconds(dice, 0, 5),
            join_timeout: seconds(dice, 60, 300),
            start_timeout: seconds(dice, 8, 60),
            stop_grace: seconds(dice, 1, 30),
            drain_grace: seconds(dice, 1, 60),
            margin: Duration::from_millis(lease_ttl.as_millis() as u64 / dice.between(5, 11)),
            takeover_delay: seconds(dice, 20, 200),
            min_round_time: seconds(dice, 0, 8),
        };
        let spec = Spec {
            max_restarts: dice.between(0, 6) as u32,
            restart_policy: if dice.chance(0.1) { RestartPolicy::All } else { RestartPolicy::Failures },
            on_store_loss: if dice.chance(0.3) { OnStoreLoss::Fence } else { OnStoreLoss::Wait },
            timings,
            ..samples::spec(min_nodes, max_nodes)
        };
        let share = dice.between(0, 10) as f64 / 10.0;
        let faults: Vec<FaultKind> = FaultKind::ANY.into_iter().filter(|_| dice.chance(share)).collect();
        let has = |kind| faults.contains(&kind);
        let failing = if has(FaultKind::Worker) { dice.between(5, 50) as f64 / 100.0 } else { 0.0 };
        let losing = if has(FaultKind::Slow) { dice.between(1, 20) as f64 / 100.0 } else { 0.0 };
        let share = dice.between(0, 5) as f64 / 4.0;
        let aware = (0..hosts).map(|_| dice.chance(share)).collect();
        let heal_at = if faults.is_empty() { 5 } else { dice.between(20, 150) } * SECOND;
        Scenario {
            first: dice.between(1, hosts as u64 + 1) as usize,
            slots: (0..hosts).map(|_| dice.between(1, 4) as u32).collect(),
            pace: dice.between(1, 12) * SECOND,
            finish_at: dice.chance(0.2).then(|| dice.between(5, 120) * SECOND),
            skew: if dice.chance(0.7) { 10_000 } else { 0 },
            aware,
            spec,
            clash,
            hosts,
            faults,
            heal_at,
            failing,
            losing,
            late: 0.0,
            apart: None,
            loses_the_rest: false,
            last_blow: false,
        }
    }

    /// Whether ranks are fixed: in every job that has as many places as hosts, each with its own name.
    pub(crate) fn fixed(&self) -> bool {
        !self.clash && self.spec.max_nodes as usize == self.hosts
    }

    /// The group rank that a host's node must have: against the order in which hosts are begun with.
    pub(crate) fn place(&self, host: usize) -> Option<u32> {
        self.fixed().then(|| (self.hosts - 1 - host) as u32)
    }

    /// Whether a host's workers can be started without a place. No dice: they would change every seed's story.
    pub(crate) fn warms_up(&self, host: usize) -> bool {
        self.aware[host] && !host.is_multiple_of(4)
    }

    /// Fewest and most nodes of a round, where no operator changes them.
    pub(crate) fn nodes(&self) -> Option<RangeInclusive<u32>> {
        (!self.has(FaultKind::Operator)).then_some(self.spec.min_nodes..=self.spec.max_nodes)
    }

    pub(crate) fn has(&self, kind: FaultKind) -> bool {
        self.faults.contains(&kind)
    }
}
