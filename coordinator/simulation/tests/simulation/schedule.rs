//! One seed's life: faults, then healing, then the demand that all comes right.

use std::time::Duration;

use elastic_rendezvous::job::{NodeRecord, Phase, RoundRecord, RoundState, Versioned};
use elastic_store::Scope;

use crate::coverage::Coverage;
use crate::dice::{MS, SECOND};
use crate::faults::Fault;
use crate::process::Process;
use crate::promises::Breach;
use crate::scenario::FaultKind;
use crate::shrink::{Edit, Injected};
use crate::world::{Happening, Mutation, World};

/// The result of a seed.
pub(crate) struct Ran {
    pub(crate) breach: Option<Breach>,
    pub(crate) coverage: Coverage,
    pub(crate) story: String,
    /// What went wrong, line by line.
    pub(crate) schedule: Vec<String>,
    pub(crate) injected: Vec<Injected>,
    /// When it ended.
    pub(crate) ended: u64,
    pub(crate) scenario: String,
}

/// Whether a seed's story is kept or printed.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Telling {
    Silent,
    Kept,
    Aloud,
}

pub(crate) fn run(seed: u64, mutation: Option<Mutation>, telling: Telling) -> Ran {
    run_edited(seed, mutation, None, telling)
}

/// Runs those parts of a seed's schedule that an edit keeps.
pub(crate) fn run_edited(seed: u64, mutation: Option<Mutation>, edit: Option<Edit>, telling: Telling) -> Ran {
    let mut world = World::new(seed, mutation);
    world.edit = edit;
    world.story.told = telling != Telling::Silent;
    world.story.aloud = telling == Telling::Aloud;
    world.live();
    Ran {
        breach: world.promises.breach.clone(),
        story: world.story.end(),
        scenario: format!("{:?}", world.scenario),
        schedule: world.story.schedule,
        injected: world.injected,
        ended: world.now,
        coverage: world.coverage,
    }
}

impl World {
    pub(crate) fn live(&mut self) {
        let delaying = [
            FaultKind::Slow,
            FaultKind::Split,
            FaultKind::Outage,
            FaultKind::CutStore,
            FaultKind::Compact,
            FaultKind::Freeze,
            FaultKind::Refuse,
            FaultKind::Restore,
        ];
        if !delaying.into_iter().any(|kind| self.scenario.has(kind)) {
            self.promises.failures_are_seen_promptly();
        }
        for host in 0..self.scenario.first {
            let after = self.dice.mostly(SECOND, 10 * SECOND);
            self.at(after, Happening::Enter { host });
        }
        self.at(self.scenario.pace, Happening::Fault(Fault::Strike));
        if let Some(at) = self.scenario.finish_at {
            self.at(at, Happening::Fault(Fault::Finish));
        }
        self.run_until(self.scenario.heal_at);
        if self.promises.broken() {
            return;
        }
        self.heal();
        self.promises.healed = Some(self.now);
        self.converge();
        if let Some(line) = self.overwritten() {
            self.promises
                .breach("history", format!("line {line} told of what the operator asked, and is written over"));
        }
    }

    /// With enough nodes alive, and nothing failing, a round runs in time; when the work is done, the job ends.
    fn converge(&mut self) {
        let mut generation = self.generation();
        let mut by = self.now + self.patience();
        let mut ran = self.finishing;
        while !self.promises.broken() {
            self.run_until(self.now + if self.blow.is_some() { SECOND / 10 } else { SECOND });
            if self.generation() != generation {
                generation = self.generation();
                by = self.now + self.patience();
            }
            let round = self.store_round().map(|round| round.value);
            self.check_blow(round.as_ref());
            self.check_work(round.as_ref());
            match round.as_ref().map(|round| round.state) {
                Some(RoundState::Succeeded | RoundState::Closed) => return self.all_leave(),
                _ => self.top_up(),
            }
            let is_calm = !ran && self.blow.is_none() && self.store.has_sent_all_news(self.now);
            if let Some(round) = round.as_ref().filter(|round| is_calm && self.runs_fully(round)) {
                if self.blows > 0 {
                    self.last_blow(round);
                } else {
                    ran = true;
                    self.finish();
                }
                by = self.now + self.patience();
            }
            if self.now > by {
                let state = self.standing();
                self.promises.breach("progress", format!("no progress since everything works again: {state}"));
            }
        }
    }

    /// Longest that anything may take that is to come about.
    fn patience(&self) -> u64 {
        let timings = &self.scenario.spec.timings;
        let all = timings.takeover_delay
            + timings.last_call * 6
            + timings.start_timeout * 2
            + (timings.stop_grace + timings.margin) * 2
            + timings.drain_grace
            + timings.lease_ttl * 6
            + timings.min_round_time
            + Duration::from_secs(40);
        all.as_nanos() as u64
    }

    /// Who cannot have seen what the store holds works on only while nothing tells it so: for one lease.
    fn check_work(&mut self, round: Option<&RoundRecord>) {
        let timings = &self.scenario.spec.timings;
        let noticed = timings.lease_ttl + timings.margin + Duration::from_secs(5);
        let healed = self.promises.healed.unwrap_or(self.now);
        if self.now < healed + noticed.as_nanos() as u64 {
            return;
        }
        let sealed = round.and_then(|round| round.sealed);
        let strays = |process: &&Process| {
            let own = process.start.as_ref().and_then(|start| start.round.sealed);
            process.alive && process.at_work().is_some() && own != sealed
        };
        if let Some(process) = self.processes.iter().find(strays) {
            let what = format!("{} works in {:?}, the store holds {sealed:?}", process.id(), process.start);
            self.promises.breach("no one works in a round that the store does not hold", what);
        }
    }

    fn generation(&self) -> u64 {
        self.store_round().map_or(0, |round| round.value.generation)
    }

    /// There are always enough nodes that want to take part.
    fn top_up(&mut self) {
        let willing = self.processes.iter().filter(|process| process.alive && !process.drained).count();
        let wanted = self.scenario.spec.min_nodes as usize;
        for host in 0..self.hosts.len() {
            if willing < wanted {
                self.enter(host);
            }
        }
    }

    /// Whether all members of a round run, as the store knows. A restored store may not know.
    fn runs_fully(&self, round: &RoundRecord) -> bool {
        let running = if self.scenario.has(FaultKind::Restore) {
            let works = |process: &&Process| process.alive && process.at_work() == Some(round.number);
            self.processes.iter().filter(works).count()
        } else {
            let nodes = self.store.mvcc.snapshot(&Scope::Prefix(self.keys.nodes()));
            let records = nodes.iter().filter_map(|kv| Versioned::<NodeRecord>::parse(kv).ok());
            let runs = |record: &NodeRecord| record.round == Some(round.number) && record.phase == Phase::Running;
            records.filter(|record| runs(&record.value)).count()
        };
        round.state == RoundState::Running && running == round.group_world_size as usize
    }

    /// Every agent ends, one that comes late too.
    fn all_leave(&mut self) {
        let host = self.processes.iter().position(|process| process.alive).map_or(0, |p| self.processes[p].host);
        self.enter((host + 1) % self.hosts.len());
        let by = self.now + self.patience();
        while !self.promises.broken() && self.processes.iter().any(|process| process.alive) {
            self.run_until(self.now + 500 * MS);
            if self.now > by {
                let state = self.standing();
                self.promises.breach("one result", format!("agents stay although the job is over: {state}"));
            }
        }
    }

    pub(crate) fn standing(&self) -> String {
        let agents: Vec<String> = self
            .processes
            .iter()
            .enumerate()
            .filter(|(_, process)| process.alive)
            .map(|(p, process)| {
                let leads = if process.leader.is_some() { " leads" } else { "" };
                format!("p{p} {}{leads} at work {:?}", process.member.mode_name(), process.at_work())
            })
            .collect();
        let nodes = self.store.mvcc.snapshot(&Scope::Prefix(self.keys.nodes()));
        let nodes: Vec<String> = nodes
            .iter()
            .filter_map(|kv| Versioned::<NodeRecord>::parse(kv).ok())
            .map(|it| format!("{} {:?} {:?} since {}", it.value.id(), it.value.phase, it.value.round, it.modified))
            .collect();
        let round = self.store_round().map(|round| round.value);
        format!("agents {}; keys {}; round {round:?}", agents.join(", "), nodes.join(", "))
    }
}
