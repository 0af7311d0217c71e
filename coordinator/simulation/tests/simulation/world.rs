//! The world: virtual time, one queue of what happens, and everything that exists.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use elastic_rendezvous::job::{FailureClass, Keys, NodeId, RoundRecord, Versioned};
use elastic_rendezvous::time::Time;
use elastic_rendezvous::{Credentials, Member, MemberInput};
use elastic_store::{Revision, Scope};

use crate::blow::Blow;
use crate::clock::Clock;
use crate::coverage::Coverage;
use crate::dice::{Dice, SECOND};
use crate::faults::Fault;
use crate::process::{Host, Input, Process, Rest, setup};
use crate::promises::Promises;
use crate::refusals::Refusal;
use crate::scenario::Scenario;
use crate::service::{Answer, Asker, Request, Service};
use crate::shrink::{Edit, Injected, Part};
use crate::story::Story;

/// A fault of the checker's own making: each must be found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mutation {
    /// The guard ignores its deadline, and lets workers start beyond it.
    GuardSleeps,
    /// Leaders' writes are guarded by the term alone, not by the round as last read.
    NoRound,
    /// Leaders' writes are not guarded at all.
    NoGuards,
    /// A hint confirms a death.
    HintsConfirm,
    /// A leader vouches for members that it does not hear.
    WordVouchesForAll,
    /// Commits are not guarded by the round.
    CommitUnfenced,
    /// The agent says that workers have quiesced while they continue.
    QuiescedTooSoon,
}

pub(crate) enum Happening {
    Input { p: usize, life: u32, input: Input },
    Answered { p: usize, life: u32, ticket: u64, asker: Asker, sent: Time, answer: Answer },
    Tick { p: usize },
    AtStore { p: usize, life: u32, ticket: u64, asker: Asker, sent: Time, request: Request },
    Expire,
    News { watch: usize },
    Connect { p: usize, stream: u64 },
    Beat { p: usize, stream: u64 },
    OwnBeat { p: usize, life: u32, term: Revision },
    Suspect { p: usize, term: Revision, node: NodeId, port: u16, until: u64 },
    TreeStarted { p: usize, tree: u64, round: u64 },
    TreeDone { p: usize, tree: u64 },
    TreeFails { p: usize, tree: u64, class: FailureClass },
    TreeGone { p: usize, tree: u64 },
    TreeRests { p: usize, tree: u64 },
    TreeOverdue { p: usize, tree: u64, grace: Duration },
    Guard { p: usize },
    Fault(Fault),
    Enter { host: usize },
    CommitSent { p: usize, life: u32, credentials: Box<Credentials>, pointer: Revision, step: u64 },
}

pub(crate) struct World {
    pub(crate) now: u64,
    queue: BTreeMap<(u64, u64), Happening>,
    seq: u64,
    pub(crate) dice: Dice,
    pub(crate) scenario: Scenario,
    pub(crate) keys: Keys,
    pub(crate) hosts: Vec<Host>,
    pub(crate) processes: Vec<Process>,
    pub(crate) store: Service,
    pub(crate) cuts: BTreeSet<(usize, usize)>,
    pub(crate) promises: Promises,
    pub(crate) coverage: Coverage,
    pub(crate) story: Story,
    pub(crate) healed: bool,
    /// Names that the operator ever asked to leave.
    pub(crate) unwanted: BTreeSet<String>,
    /// Lines of history that tell of what the operator asked.
    pub(crate) asked: Vec<u64>,
    /// What the store refuses.
    pub(crate) refusals: Vec<Refusal>,
    /// How many last failures are to come, and one that no one has acted on yet.
    pub(crate) blows: u32,
    pub(crate) blow: Option<Blow>,
    /// Workers end well from now on.
    pub(crate) finishing: bool,
    pub(crate) mutation: Option<Mutation>,
    /// The faults so far.
    pub(crate) injected: Vec<Injected>,
    /// The parts of the seed's schedule that are kept; all, if there is none.
    pub(crate) edit: Option<Edit>,
}

impl World {
    pub(crate) fn new(seed: u64, mutation: Option<Mutation>) -> World {
        let mut dice = Dice::new(seed);
        let scenario = Scenario::of(seed, &mut dice);
        World::of(scenario, dice, mutation)
    }

    pub(crate) fn of(scenario: Scenario, mut dice: Dice, mutation: Option<Mutation>) -> World {
        let skew = scenario.skew;
        let mut clock =
            || Clock { zero: dice.between(1, 1000) * SECOND, fast: dice.between(0, 2 * skew + 1) as i64 - skew as i64 };
        let hosts = (0..scenario.hosts).map(|_| Host { clock: clock(), up: true, boot: 1, cut_off: false }).collect();
        let store = Service::new(clock());
        World {
            now: 0,
            queue: BTreeMap::new(),
            seq: 0,
            keys: Keys::new(Keys::DEFAULT_PREFIX, &"J".parse().expect("a job id")),
            hosts,
            processes: Vec::new(),
            store,
            cuts: scenario.apart.into_iter().collect(),
            promises: Promises::new(&scenario),
            coverage: Coverage::default(),
            story: Story::default(),
            healed: false,
            unwanted: BTreeSet::new(),
            asked: Vec::new(),
            refusals: Vec::new(),
            blows: u32::from(scenario.last_blow),
            blow: None,
            finishing: false,
            mutation,
            injected: Vec::new(),
            edit: None,
            scenario,
            dice,
        }
    }

    pub(crate) fn tell(&mut self, line: impl FnOnce() -> String) {
        self.story.tell(self.now, line);
    }

    /// Tells a line that belongs to the schedule: what breaks, and what comes back.
    pub(crate) fn schedule(&mut self, line: impl FnOnce() -> String) {
        self.story.schedule(self.now, line);
    }

    pub(crate) fn keeps(&self, part: Part) -> bool {
        self.edit.as_ref().is_none_or(|edit| edit.keeps(part))
    }

    /// Whether something goes wrong that does so with this chance while faults continue.
    pub(crate) fn goes_wrong(&mut self, chance: f64) -> bool {
        !self.healed && self.dice.chance(chance) && self.keeps(Part::Second(self.now / SECOND))
    }

    pub(crate) fn fresh(&mut self) -> u64 {
        self.seq += 1;
        self.seq
    }

    pub(crate) fn queue(&mut self, when: u64, what: Happening) {
        let seq = self.fresh();
        self.queue.insert((when.max(self.now), seq), what);
    }

    pub(crate) fn at(&mut self, after: u64, what: Happening) {
        self.queue(self.now + after, what);
    }

    pub(crate) fn input_after(&mut self, after: u64, p: usize, input: Input) {
        let life = self.processes[p].life;
        self.at(after, Happening::Input { p, life, input });
    }

    /// Within one machine.
    pub(crate) fn soon(&mut self, p: usize, input: Input) {
        let after = self.dice.between(10_000, 2_000_000);
        self.input_after(after, p, input);
    }

    /// Runs until a moment, or until a promise is broken.
    pub(crate) fn run_until(&mut self, until: u64) {
        while !self.promises.broken() {
            match self.queue.first_key_value() {
                Some((&(when, _), _)) if when <= until => {}
                _ => break,
            }
            let Some(((when, _), what)) = self.queue.pop_first() else { break };
            self.now = when;
            self.happen(what);
            self.promises.check(self.now, &self.processes);
        }
        if !self.promises.broken() {
            self.now = self.now.max(until);
        }
    }

    fn happen(&mut self, what: Happening) {
        match what {
            Happening::Input { p, life, input } => self.arrive(p, life, input),
            Happening::Answered { p, life, ticket, asker, sent, answer } => {
                if self.store.open.remove(&ticket) {
                    self.answered(p, life, asker, sent, answer);
                }
            }
            Happening::Tick { p } => {
                let process = &self.processes[p];
                if process.alive && !process.frozen && process.end.is_none() && process.tick_at <= self.now {
                    self.tick(p);
                }
            }
            Happening::AtStore { p, life, ticket, asker, sent, request } => {
                self.at_store(p, life, ticket, asker, sent, request);
            }
            Happening::Expire => self.expire(),
            Happening::News { watch } => self.news(watch),
            Happening::Connect { p, stream } => self.connect(p, stream),
            Happening::Beat { p, stream } => self.beat(p, stream),
            Happening::OwnBeat { p, life, term } => self.own_beat(p, life, term),
            Happening::Suspect { p, term, node, port, until } => self.suspect(p, term, node, port, until),
            Happening::TreeStarted { p, tree, round } => self.tree_started(p, tree, round),
            Happening::TreeDone { p, tree } => self.tree_done(p, tree),
            Happening::TreeFails { p, tree, class } => self.tree_fails(p, tree, class),
            Happening::TreeGone { p, tree } => self.tree_gone(p, tree),
            Happening::TreeRests { p, tree } => self.tree_rests(p, tree),
            Happening::TreeOverdue { p, tree, grace } => self.tree_overdue(p, tree, grace),
            Happening::Guard { p } => self.guard(p),
            Happening::Fault(fault) => self.fault(fault),
            Happening::Enter { host } => self.enter(host),
            Happening::CommitSent { p, life, credentials, pointer, step } => {
                self.commit(p, life, *credentials, pointer, step);
            }
        }
    }

    fn arrive(&mut self, p: usize, life: u32, input: Input) {
        let process = &mut self.processes[p];
        if !process.alive || process.life != life {
            return;
        }
        if process.frozen {
            process.backlog.push_back(input);
        } else if process.end.is_some() {
            if matches!(input, Input::Leader(..)) {
                self.take(p, input);
                self.leave_when_tidy(p);
            }
        } else {
            self.take(p, input);
        }
    }

    /// An agent starts on a host, if there is none.
    pub(crate) fn enter(&mut self, host: usize) {
        let occupied =
            self.processes.iter().any(|process| process.host == host && (process.alive || process.tree.is_some()));
        if occupied || !self.hosts[host].up {
            return;
        }
        let p = self.processes.len();
        let boot = self.hosts[host].boot;
        let setup = setup(&self.scenario, &self.keys, host, boot, p, 0);
        self.processes.push(Process {
            host,
            alive: true,
            frozen: false,
            trips: None,
            stalls: None,
            before: false,
            held: Vec::new(),
            held_by_leader: Vec::new(),
            backlog: Default::default(),
            life: 0,
            member: Member::new(setup),
            leader: None,
            told: BTreeMap::new(),
            end: None,
            tree: None,
            start: None,
            stopped_told: true,
            stop_asked: false,
            rest: Rest::No,
            forming_told: false,
            fence: None,
            stream: None,
            streams: Vec::new(),
            tick_at: u64::MAX,
            spins: 0,
            drained: false,
            sent_away: false,
            evicted_by_operator: false,
        });
        self.send_away();
        self.schedule(|| format!("p{p} starts on host {host}"));
        self.take(p, Input::Member(MemberInput::Tick));
    }

    pub(crate) fn watch(&mut self, p: usize, term: Option<Revision>, scope: Scope, from: Revision) {
        let life = self.processes[p].life;
        self.store.watch(p, life, term, scope, from);
        let hop = self.hop(p);
        self.at(hop, Happening::News { watch: self.store.watches.len() - 1 });
    }

    /// The round as the store holds it.
    pub(crate) fn store_round(&self) -> Option<Versioned<RoundRecord>> {
        let kv = self.store.mvcc.snapshot(&Scope::Key(self.keys.round())).pop()?;
        Versioned::parse(&kv).ok()
    }
}
