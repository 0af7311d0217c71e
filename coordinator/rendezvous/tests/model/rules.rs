//! What is checked: the protocol's guards, the first state, and the bounds. A mutation removes one of the guards.

use crate::state::{
    Id, LeaderKey, NODES, Node, Office, Order, Phase, Place, Pointer, RankKey, Record, Rev, Round, State, Troubles,
};

/// A guard or rule of the protocol that is removed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Mutation {
    /// Rank keys are `rounds/<n>/<node>`, and the running record names no plan.
    NoPlan,
    /// A new leader continues with the plan that it finds instead of writing `forming` again.
    PlanInherited,
    /// A leader composes the membership again under a plan whose rank keys it has already sent.
    PlanRecomposed,
    /// A leader's transactions are guarded by the `leader` key's create revision.
    CreateRevisionGuard,
    /// `running` does not wait for the fence point of a member whose eviction was not confirmed.
    SealAtOnce,
    /// Members that wait for n+1 and newcomers are counted in one set.
    OneWaitingSet,
    /// A member whose key is gone is not waited for, evicted or not.
    AbsentIsGone,
    /// `running` is not guarded by `round`'s mod revision.
    SealWithoutRoundGuard,
    /// `running` is not guarded by the checkpoint pointer's mod revision.
    SealWithoutPointerGuard,
    /// Evictions leave no tombstone, so nothing refuses a reclaim.
    NoTombstone,
    /// A checkpoint commit is not guarded by the writer's own key.
    CommitWithoutKeyGuard,
    /// A checkpoint commit is not guarded by `round`.
    CommitWithoutRoundGuard,
    /// A checkpoint commit is not guarded by the pointer's mod revision.
    CommitWithoutPointerGuard,
    /// Workers are started on a place read before the fence point, after it.
    StartPastFence,
    /// The first round of a new generation does not wait for the fence points of the failed generation's last members.
    GenerationAtOnce,
}

/// Where the model begins.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Start {
    /// An empty store.
    Nothing,
    /// Round 1 runs on A and B, A leads, both are at work.
    Running,
}

/// A protocol and its bounds.
#[derive(Clone, Debug)]
pub(crate) struct Rules {
    pub(crate) mutation: Option<Mutation>,
    pub(crate) start: Start,
    /// Nodes that take part: the first so many.
    pub(crate) nodes: u8,
    /// The job's max nodes.
    pub(crate) max_nodes: usize,
    /// The newest round that may be begun.
    pub(crate) last_round: u8,
    /// How many transactions of one sender may be under way together. Two mean that it gave one up without knowing its
    /// outcome.
    pub(crate) in_flight: usize,
    pub(crate) troubles: Troubles,
}

impl Rules {
    /// Round 1 runs on A and B of three nodes; nothing goes wrong.
    pub(crate) const RUNNING: Rules = Rules {
        mutation: None,
        start: Start::Running,
        nodes: NODES as u8,
        max_nodes: NODES,
        last_round: 2,
        in_flight: 1,
        troubles: Troubles { crashes: 0, lapses: 0, evictions: 0, handovers: 0, commits: 0, failures: 0 },
    };

    pub(crate) fn broken(&self, mutation: Mutation) -> bool {
        self.mutation == Some(mutation)
    }

    pub(crate) fn nodes(&self) -> impl Iterator<Item = Id> {
        Id::all().take(usize::from(self.nodes))
    }

    pub(crate) fn initial(&self) -> State {
        let empty = State {
            leader: None,
            round: None,
            keys: [None; NODES],
            tombstones: [None; NODES],
            ranks: Vec::new(),
            pointer: Pointer { modified: Rev::NONE, step: 0 },
            nodes: [Node::NEW; NODES],
            office: Office::default(),
            flight: Vec::new(),
            troubles: self.troubles,
            evicted: [false; NODES],
            newest_run: 0,
            flaws: 0,
        };
        match self.start {
            Start::Nothing => empty,
            Start::Running => self.running(empty),
        }
    }

    fn running(&self, mut state: State) -> State {
        let members: Order = [Id(0), Id(1)].into_iter().collect();
        let (plan, run) = (Rev(4), Rev(5));
        for (rank, id) in members.iter().enumerate() {
            let rank = rank as u8;
            let key = Rev(2 + id.0);
            state.keys[id.at()] = Some(key);
            let place = Place { number: 1, run, rank, world: 2, resume: 0 };
            *state.node_mut(id) = Node { key, record: Record::Running, work: Some(place), newest: 1, ..Node::NEW };
            let plan = if self.broken(Mutation::NoPlan) { Rev::NONE } else { plan };
            state.ranks.push(RankKey { plan, node: id, rank });
        }
        state.leader = Some(LeaderKey { holder: Id(0), create: Rev(1), modified: Rev(1) });
        state.round =
            Some(Round { number: 1, phase: Phase::Running, modified: run, plan, members, resume: 0, inherited: false });
        state.newest_run = 1;
        state.renumber();
        state
    }
}
