//! What the model's world consists of: the store's keys, the nodes, the transactions under way, and a few ghosts.
//! `steps` says what can happen, `txn` what the store does with a transaction.

use std::fmt;

/// Nodes in the model: A, B and C. Configurations with fewer never let the others join.
pub(crate) const NODES: usize = 3;

/// A revision of the store. Only order and equality count, so states are renumbered densely after each step
/// ([`State::renumber`]); zero is "never".
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default, Debug)]
pub(crate) struct Rev(pub(crate) u8);

impl Rev {
    pub(crate) const NONE: Rev = Rev(0);
}

/// A node, as an index.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub(crate) struct Id(pub(crate) u8);

impl Id {
    pub(crate) fn all() -> impl Iterator<Item = Id> {
        (0..NODES as u8).map(Id)
    }

    pub(crate) fn at(self) -> usize {
        usize::from(self.0)
    }
}

impl fmt::Display for Id {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", char::from(b'A' + self.0))
    }
}

/// Members of a round in the order of their ranks.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default, Debug)]
pub(crate) struct Order {
    ids: [u8; NODES],
    len: u8,
}

impl Order {
    pub(crate) fn iter(&self) -> impl Iterator<Item = Id> + '_ {
        self.ids[..self.len()].iter().map(|&id| Id(id))
    }

    pub(crate) fn len(&self) -> usize {
        usize::from(self.len)
    }

    pub(crate) fn push(&mut self, id: Id) {
        self.ids[self.len()] = id.0;
        self.len += 1;
    }

    pub(crate) fn contains(&self, id: Id) -> bool {
        self.iter().any(|member| member == id)
    }
}

impl FromIterator<Id> for Order {
    fn from_iter<I: IntoIterator<Item = Id>>(ids: I) -> Order {
        let mut order = Order::default();
        ids.into_iter().for_each(|id| order.push(id));
        order
    }
}

impl fmt::Display for Order {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names: Vec<String> = self.iter().enumerate().map(|(rank, id)| format!("{id}={rank}")).collect();
        write!(f, "{{{}}}", names.join(" "))
    }
}

/// The `leader` key. A put over it keeps `create`; `modified` is the term.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) struct LeaderKey {
    pub(crate) holder: Id,
    pub(crate) create: Rev,
    pub(crate) modified: Rev,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) enum Phase {
    Forming,
    Running,
    Failed,
}

/// The `round` key. `members` are those of `number` once it runs, and while it forms those of the last round that ran:
/// in the store they are read from the rank keys of the plan that the record names.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) struct Round {
    pub(crate) number: u8,
    pub(crate) phase: Phase,
    pub(crate) modified: Rev,
    pub(crate) plan: Rev,
    pub(crate) members: Order,
    pub(crate) resume: u8,
    /// The members are another generation's: they will answer nothing any more.
    pub(crate) inherited: bool,
}

/// What a node's own key says. A node at work still shows its last `Waiting`: the report `running` serves progress
/// alone, and without it the model is the stricter.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) enum Record {
    /// Waiting as a newcomer: it names no round.
    Joining,
    /// Stopped, and waiting for exactly this round.
    Waiting(u8),
    /// At work when the model begins.
    Running,
}

/// A tombstone `evicted/<node>`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) struct Tombstone {
    pub(crate) confirmed: bool,
    /// Written under a leader in office by a transaction of its predecessor. No guard of the protocol lets that
    /// happen; where a mutation does, the wait that the leader began on taking office does not cover this eviction.
    pub(crate) late: bool,
}

/// A key `rounds/<number>/<plan>/<node>`, for the number that `round` is at.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub(crate) struct RankKey {
    pub(crate) plan: Rev,
    pub(crate) node: Id,
    pub(crate) rank: u8,
}

/// The `checkpoint` key.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) struct Pointer {
    pub(crate) modified: Rev,
    pub(crate) step: u8,
}

/// A place in a running round, as a node read it: `run` is the running record's mod revision.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) struct Place {
    pub(crate) number: u8,
    pub(crate) run: Rev,
    pub(crate) rank: u8,
    pub(crate) world: u8,
    pub(crate) resume: u8,
}

/// What the leader in office remembers.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default, Debug)]
pub(crate) struct Office {
    /// The plan of the `forming` it wrote in this term.
    pub(crate) plan: Rev,
    /// The members whose rank keys it sent under that plan. Once sent they are the plan's: a batch whose outcome is
    /// unknown may still arrive, so another membership takes another plan.
    pub(crate) planned: Order,
    /// The batch has arrived.
    pub(crate) landed: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) struct Node {
    /// The agent runs. A freeze needs no state: it is an agent that takes no step for as long as the checker likes.
    pub(crate) alive: bool,
    /// Create revision of its own key as it knows it.
    pub(crate) key: Rev,
    pub(crate) record: Record,
    /// Read from the store, not started yet.
    pub(crate) permit: Option<Place>,
    /// Its workers, at work.
    pub(crate) work: Option<Place>,
    /// The newest round it took a place in.
    pub(crate) newest: u8,
}

impl Node {
    pub(crate) const NEW: Node =
        Node { alive: true, key: Rev::NONE, record: Record::Joining, permit: None, work: None, newest: 0 };
}

/// What a leader's transaction is guarded by.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub(crate) struct Term {
    pub(crate) create: Rev,
    pub(crate) modified: Rev,
}

/// A transaction sent and not yet arrived. It may arrive at any later time, or never.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub(crate) struct Txn {
    pub(crate) from: Id,
    /// `round`'s mod revision as the sender read it.
    pub(crate) round: Rev,
    pub(crate) body: Body,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub(crate) enum Body {
    /// `round` forming, with at most one eviction in the same transaction; `confirmed`: its death is known.
    Form { term: Term, number: u8, evict: Option<Id>, confirmed: bool },
    /// The batch of rank keys under the plan that `round` is at.
    Ranks { term: Term, order: Order },
    /// `round` running, naming the plan, guarded by the checkpoint pointer and copying it.
    Run { term: Term, number: u8, plan: Rev, order: Order, pointer: Rev, step: u8 },
    /// `round` failed.
    Fail { term: Term },
    /// The checkpoint pointer.
    Commit { key: Rev, pointer: Rev, step: u8, number: u8 },
}

/// Breaches that only a transition shows; the state keeps them as ghosts.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Flaw {
    NumberNotNew,
    RunningRewritten,
    DeposedDecided,
    EvictedCommitted,
    OutsiderCommitted,
    StepNotGrown,
    ResumeNotNewest,
}

/// What the world may still throw at the protocol.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) struct Troubles {
    /// Agents that may yet crash.
    pub(crate) crashes: u8,
    /// Leases that may yet be lost under a living node.
    pub(crate) lapses: u8,
    /// Evictions that leaders may yet decide on.
    pub(crate) evictions: u8,
    /// Times that a leader may yet hand over.
    pub(crate) handovers: u8,
    /// Checkpoints that may yet be sent.
    pub(crate) commits: u8,
    /// Times that a job may yet fail for good.
    pub(crate) failures: u8,
}

#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub(crate) struct State {
    pub(crate) leader: Option<LeaderKey>,
    pub(crate) round: Option<Round>,
    /// Create revisions of the keys `nodes/<node>` that exist. What they say is the node's `record`.
    pub(crate) keys: [Option<Rev>; NODES],
    pub(crate) tombstones: [Option<Tombstone>; NODES],
    pub(crate) ranks: Vec<RankKey>,
    pub(crate) pointer: Pointer,
    pub(crate) nodes: [Node; NODES],
    pub(crate) office: Office,
    pub(crate) flight: Vec<Txn>,
    pub(crate) troubles: Troubles,
    /// Ghost: who was ever evicted, whatever the store still says of it.
    pub(crate) evicted: [bool; NODES],
    /// Ghost: the newest round that ran.
    pub(crate) newest_run: u8,
    /// Ghost: the flaws seen, a bit each.
    pub(crate) flaws: u8,
}

impl State {
    pub(crate) fn node(&self, id: Id) -> &Node {
        &self.nodes[id.at()]
    }

    pub(crate) fn node_mut(&mut self, id: Id) -> &mut Node {
        &mut self.nodes[id.at()]
    }

    /// The agent lives and its own key exists as it knows it.
    pub(crate) fn holds_key(&self, id: Id) -> bool {
        let node = self.node(id);
        node.alive && node.key != Rev::NONE && self.keys[id.at()] == Some(node.key)
    }

    /// Nothing of this node works or is about to.
    pub(crate) fn idle(&self, id: Id) -> bool {
        self.node(id).work.is_none() && self.node(id).permit.is_none()
    }

    pub(crate) fn places(&self) -> impl Iterator<Item = &Place> {
        self.nodes.iter().filter_map(|node| node.work.as_ref())
    }

    pub(crate) fn mark(&mut self, flaw: Flaw) {
        self.flaws |= 1 << flaw as u8;
    }

    pub(crate) fn has(&self, flaw: Flaw) -> bool {
        self.flaws & (1 << flaw as u8) != 0
    }

    /// A revision newer than all.
    pub(crate) fn next_rev(&mut self) -> Rev {
        let mut newest = Rev::NONE;
        self.each_rev(&mut |rev| newest = newest.max(*rev));
        Rev(newest.0 + 1)
    }

    /// Renumbers all revisions to 1, 2, 3 … in their order, so that histories which differ in nothing that a guard
    /// can see meet in one state.
    pub(crate) fn renumber(&mut self) {
        let mut used = [0u8; 256];
        self.each_rev(&mut |rev| used[usize::from(rev.0)] = 1);
        used[0] = 0;
        let mut last = 0;
        for slot in used.iter_mut().filter(|slot| **slot == 1) {
            last += 1;
            *slot = last;
        }
        self.each_rev(&mut |rev| rev.0 = used[usize::from(rev.0)]);
        self.ranks.sort_unstable();
        self.flight.sort_unstable();
    }

    fn each_rev(&mut self, see: &mut impl FnMut(&mut Rev)) {
        if let Some(leader) = &mut self.leader {
            see(&mut leader.create);
            see(&mut leader.modified);
        }
        if let Some(round) = &mut self.round {
            see(&mut round.modified);
            see(&mut round.plan);
        }
        self.keys.iter_mut().flatten().for_each(&mut *see);
        self.ranks.iter_mut().for_each(|key| see(&mut key.plan));
        see(&mut self.pointer.modified);
        for node in &mut self.nodes {
            see(&mut node.key);
            node.permit.iter_mut().for_each(|place| see(&mut place.run));
            node.work.iter_mut().for_each(|place| see(&mut place.run));
        }
        see(&mut self.office.plan);
        for txn in &mut self.flight {
            see(&mut txn.round);
            match &mut txn.body {
                Body::Form { term, .. } | Body::Ranks { term, .. } | Body::Fail { term } => {
                    see(&mut term.create);
                    see(&mut term.modified);
                }
                Body::Run { term, plan, pointer, .. } => {
                    see(&mut term.create);
                    see(&mut term.modified);
                    see(plan);
                    see(pointer);
                }
                Body::Commit { key, pointer, .. } => {
                    see(key);
                    see(pointer);
                }
            }
        }
    }
}
