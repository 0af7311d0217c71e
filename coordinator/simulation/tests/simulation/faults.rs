//! What breaks, and what an operator does. The schedule says when.

use std::collections::BTreeMap;

use elastic_rendezvous::GroupReport;
use elastic_rendezvous::job::{
    Asked, Desired, EventRecord, FailureClass, Requester, RoundState, TakenBack, Versioned, Via, history,
};
use elastic_store::{KeyValue, Op, Scope, Txn};

use crate::dice::{MS, SECOND};
use crate::process::{Input, Process, Rest};
use crate::scenario::FaultKind;
use crate::service::Request;
use crate::shrink::{Injected, Part};
use crate::world::{Happening, World};

#[derive(Debug, Clone)]
pub(crate) enum Fault {
    /// One of the scenario's faults, and later another.
    Strike,
    Thaw(usize),
    Reconnect(usize),
    Mend(usize, usize),
    StoreBack {
        leases_lost: bool,
    },
    Boot(usize),
    Finish,
}

impl World {
    pub(crate) fn fault(&mut self, fault: Fault) {
        match fault {
            Fault::Strike if self.healed => {}
            Fault::Strike => self.inject(),
            Fault::Thaw(p) => self.thaw(p),
            Fault::Reconnect(host) => {
                self.schedule(|| format!("host {host} reaches the store again"));
                self.hosts[host].cut_off = false;
            }
            Fault::Mend(a, b) => {
                if self.scenario.apart != Some((a, b)) {
                    self.schedule(|| format!("hosts {a} and {b} reach each other again"));
                    self.cuts.remove(&(a, b));
                }
            }
            Fault::StoreBack { leases_lost } => {
                self.schedule(|| format!("the store is back; leases lost: {leases_lost}"));
                self.store.come_up(self.now, leases_lost);
                self.changed();
            }
            Fault::Boot(host) => {
                if !self.hosts[host].up {
                    self.schedule(|| format!("host {host} boots"));
                    self.hosts[host].up = true;
                    self.hosts[host].boot += 1;
                }
            }
            Fault::Finish => self.finish(),
        }
    }

    /// Injects one of the scenario's faults, and later another. In a schedule that was shrunk, the faults are those of
    /// the whole schedule, without what is left out.
    fn inject(&mut self) {
        let number = self.injected.len();
        let original = match &self.edit {
            None => None,
            Some(edit) => {
                let Some(this) = edit.injected.get(number).cloned() else { return };
                Some((this, edit.injected.get(number + 1).map(|next| next.at)))
            }
        };
        if let Some((this, _)) = &original {
            self.dice = this.before.clone();
        }
        if self.scenario.has(FaultKind::Restore) {
            self.store.back_up(self.now);
        }
        let before = self.dice.clone();
        if self.keeps(Part::Fault(number))
            && let Some(kind) = self.dice.pick(&self.scenario.faults.clone())
        {
            self.strike(kind);
        }
        let pause = self.dice.between(0, self.scenario.pace * 2);
        let mut next = Some(self.now + pause);
        if let Some((this, at)) = original {
            (self.dice, next) = (this.after, at);
        }
        self.injected.push(Injected { at: self.now, before, after: self.dice.clone() });
        if let Some(at) = next {
            self.queue(at, Happening::Fault(Fault::Strike));
        }
    }

    fn some_process(&mut self) -> Option<usize> {
        let alive: Vec<usize> = (0..self.processes.len()).filter(|p| self.processes[*p].alive).collect();
        self.dice.pick(&alive)
    }

    fn strike(&mut self, kind: FaultKind) {
        let host = self.dice.between(0, self.hosts.len() as u64) as usize;
        let while_ = self.dice.mostly(15 * SECOND, 80 * SECOND);
        match kind {
            FaultKind::Worker | FaultKind::Slow => {}
            FaultKind::Kill => {
                let Some(p) = self.some_process() else { return };
                self.schedule(|| format!("p{p} is killed"));
                self.die(p);
                self.maybe_enter(self.processes[p].host);
            }
            FaultKind::Host => {
                self.crash_host(host);
                self.at(while_, Happening::Fault(Fault::Boot(host)));
                let after = self.dice.between(0, 10 * SECOND);
                self.at(while_ + after, Happening::Enter { host });
            }
            FaultKind::Freeze => self.freeze(while_),
            FaultKind::CutStore => {
                self.schedule(|| format!("host {host} cannot reach the store"));
                self.hosts[host].cut_off = true;
                self.at(while_, Happening::Fault(Fault::Reconnect(host)));
            }
            FaultKind::Split => self.split(while_),
            FaultKind::CutPeers => self.cut_peers(host, while_),
            FaultKind::Outage => {
                self.schedule(|| "the store is away".into());
                self.store.go_down(self.now);
                let leases_lost = self.dice.chance(0.3);
                self.at(while_, Happening::Fault(Fault::StoreBack { leases_lost }));
            }
            FaultKind::Compact => self.compact(while_),
            FaultKind::Deaf => self.deafen(host, while_),
            FaultKind::Island | FaultKind::Stale | FaultKind::Unheard | FaultKind::Blame | FaultKind::Ruin => {
                self.strike_by_role(kind);
            }
            FaultKind::Streams => {
                let Some(p) = self.some_process() else { return };
                self.schedule(|| format!("the stream of p{p} to its leader breaks"));
                self.stream_broke(p);
            }
            FaultKind::Join => self.enter(host),
            FaultKind::Drain => self.drain(),
            FaultKind::Operator => self.operate(),
            FaultKind::Pause => self.pause(),
            FaultKind::Exclude => self.exclude(host),
            FaultKind::Refuse => self.refuse_from_now(host, while_),
            FaultKind::Stall => {
                let leads = |p: &usize| self.processes[*p].alive && self.processes[*p].leader.is_some();
                let Some(p) = (0..self.processes.len()).find(leads) else { return };
                self.processes[p].stalls = Some(while_);
            }
            FaultKind::Restore => self.restore(),
            FaultKind::WriteAgain => {
                let of_round = self.dice.chance(0.2);
                self.write_again(of_round);
            }
            FaultKind::Everything => self.kill_all(),
        }
    }

    /// A process is stopped at once, or before it next does something.
    fn freeze(&mut self, while_: u64) {
        let Some(p) = self.some_process() else { return };
        if self.dice.chance(0.3) {
            self.processes[p].trips = Some(while_);
            return;
        }
        self.schedule(|| format!("p{p} freezes"));
        self.processes[p].frozen = true;
        self.at(while_, Happening::Fault(Fault::Thaw(p)));
    }

    /// The store forgets its history, and some watches break.
    fn compact(&mut self, while_: u64) {
        self.schedule(|| "the store forgets its history".into());
        self.store.forget_history();
        for watch in 0..self.store.watches.len() {
            if self.dice.chance(0.3) {
                let until = self.now + while_;
                self.break_watch(watch, until);
            }
        }
    }

    /// Splits the hosts into two sides that cannot reach each other. Only one side reaches the store.
    fn split(&mut self, while_: u64) {
        let away: Vec<bool> = self.hosts.iter().map(|_| self.dice.chance(0.5)).collect();
        self.schedule(|| format!("hosts are split: {away:?}"));
        for a in 0..away.len() {
            if away[a] {
                self.hosts[a].cut_off = true;
                self.at(while_, Happening::Fault(Fault::Reconnect(a)));
            }
            for b in (a + 1..away.len()).filter(|b| away[*b] != away[a]) {
                self.cuts.insert((a, b));
                self.at(while_, Happening::Fault(Fault::Mend(a, b)));
            }
        }
    }

    /// Cuts a host off from one other host or from all.
    fn cut_peers(&mut self, host: usize, while_: u64) {
        let only = self.dice.between(0, self.hosts.len() as u64) as usize;
        let all = self.dice.chance(0.5);
        for other in (0..self.hosts.len()).filter(|other| *other != host && (all || *other == only)) {
            let (a, b) = (host.min(other), host.max(other));
            self.schedule(|| format!("hosts {a} and {b} cannot reach each other"));
            self.cuts.insert((a, b));
            self.at(while_, Happening::Fault(Fault::Mend(a, b)));
        }
    }

    fn kill_all(&mut self) {
        self.schedule(|| "every agent is killed".into());
        for p in 0..self.processes.len() {
            self.die(p);
        }
        for host in 0..self.hosts.len() {
            self.maybe_enter(host);
        }
    }

    fn drain(&mut self) {
        // Seldom enough that one warms up just then.
        let warming = |process: &Process| process.alive && process.rest == Rest::WarmingUp;
        let Some(p) = self.processes.iter().position(warming).or_else(|| self.some_process()) else { return };
        self.processes[p].drained = true;
        self.schedule(|| format!("p{p} is drained"));
        let tree = self.processes[p].tree.as_ref().map(|tree| tree.id);
        if let Some(tree) = tree.filter(|_| self.dice.chance(0.5)) {
            // Told together with its workers, which are quicker to hear.
            self.tree_fails(p, tree, FailureClass::Signalled);
        }
        let after = self.dice.between(0, 100 * MS);
        self.input_after(after, p, Input::Member(GroupReport::Drain.into()));
        self.maybe_enter(self.processes[p].host);
    }

    /// Nothing of what the host watches in the store reaches it for a while.
    pub(crate) fn deafen(&mut self, host: usize, while_: u64) {
        self.schedule(|| format!("host {host} hears nothing of the store"));
        let until = self.now + while_;
        for watch in 0..self.store.watches.len() {
            if self.processes[self.store.watches[watch].process].host == host {
                self.break_watch(watch, until);
            }
        }
    }

    pub(crate) fn maybe_enter(&mut self, host: usize) {
        if self.dice.chance(0.7) {
            let after = self.dice.mostly(4 * SECOND, 30 * SECOND);
            self.at(after, Happening::Enter { host });
        }
    }

    fn operate(&mut self) {
        let hosts = self.hosts.len() as u64;
        let min = self.dice.chance(0.4).then(|| self.dice.between(1, hosts + 1) as u32);
        let max = self.dice.chance(0.5).then(|| self.dice.between(1, hosts + 2) as u32);
        let mut drain = Vec::new();
        for host in 0..self.hosts.len() {
            if self.dice.chance(0.15) {
                drain.push(format!("n{host}"));
            }
        }
        let closed = self.dice.chance(0.02);
        self.desire(Desired { min_nodes: min, max_nodes: max, closed, drain, ..Desired::default() });
    }

    /// Pauses the job, or resumes it; all else that is desired stays.
    fn pause(&mut self) {
        let desired = self.desired();
        let paused = !desired.paused;
        self.desire(Desired { paused, ..desired });
    }

    /// Excludes a host's node, takes it back, or evicts one; all else that is desired stays.
    fn exclude(&mut self, host: usize) {
        let (mut desired, name) = (self.desired(), format!("n{host}"));
        let faults = self.store_round().map_or_else(Vec::new, |round| round.value.faults);
        let stands = faults.iter().find(|faults| faults.node == name).and_then(|faults| faults.excluded);
        if self.dice.chance(0.3) {
            let Some(p) = self.some_process() else { return };
            let node = self.processes[p].member.id().clone();
            self.processes[p].evicted_by_operator = true;
            desired.evict.push(node);
            self.maybe_enter(self.processes[p].host);
        } else if let Some(exclusion) = stands {
            desired.include.push(TakenBack { node: name, round: exclusion.round });
        } else if desired.exclude.contains(&name) {
            desired.exclude.retain(|excluded| *excluded != name);
        } else {
            desired.exclude.push(name);
        }
        self.desire(desired);
    }

    pub(crate) fn desired(&self) -> Desired {
        let record = self.store.mvcc.snapshot(&Scope::Key(self.keys.desired())).pop();
        record.and_then(|kv| Versioned::parse(&kv).ok()).map_or_else(Desired::default, |desired| desired.value)
    }

    /// Asks as `elasticctl` does: with a line of history of its own, which a leader must not write over.
    pub(crate) fn desire(&mut self, mut desired: Desired) {
        if self.store.up {
            self.schedule(|| format!("the operator wants {desired:?}"));
            let by = Requester { name: "operator".into(), via: Via::Elasticctl };
            let event = self.next_line();
            desired.asked = Some(Asked { by: by.clone(), at_ms: 0, event });
            let (reason, evicted, asked_by) = ("asked".into(), Vec::new(), Some(by));
            let line = EventRecord { at_ms: 0, round: 0, state: RoundState::Running, reason, evicted, asked_by };
            let record = serde_json::to_vec(&desired).unwrap_or_default();
            let mut ops = vec![Op::put(self.keys.desired(), record)];
            ops.extend(history::write(&self.keys, event, &line));
            self.store.apply(self.now, &Request::Txn(Txn::of(ops)));
            self.asked.push(event);
            self.unwanted.extend(desired.drain);
            self.send_away();
            self.changed();
        }
    }

    /// The history, by number.
    fn lines(&self) -> BTreeMap<u64, EventRecord> {
        let lines = self.store.mvcc.snapshot(&Scope::Prefix(self.keys.events()));
        let read =
            |kv: &KeyValue| Some((history::number(&self.keys, &kv.key)?, serde_json::from_slice(&kv.value).ok()?));
        lines.iter().filter_map(read).collect()
    }

    /// The number of the next line of history.
    fn next_line(&self) -> u64 {
        self.lines().keys().next_back().map_or(0, |last| last + 1)
    }

    /// A line of history that told of what the operator asked, and that another has written over.
    pub(crate) fn overwritten(&self) -> Option<u64> {
        let (lines, next) = (self.lines(), self.next_line());
        let stands =
            |event: &u64| event + history::KEPT < next || lines.get(event).is_some_and(|it| it.asked_by.is_some());
        self.asked.iter().copied().find(|event| !stands(event))
    }

    /// Marks whom the operator asked to leave: it may do so at any later time.
    pub(crate) fn send_away(&mut self) {
        for process in &mut self.processes {
            process.sent_away |= self.unwanted.iter().any(|name| process.member.id().name() == name);
        }
    }

    fn thaw(&mut self, p: usize) {
        if !std::mem::replace(&mut self.processes[p].frozen, false) || !self.processes[p].alive {
            return;
        }
        self.schedule(|| format!("p{p} thaws"));
        for output in std::mem::take(&mut self.processes[p].held) {
            self.carry(p, output);
        }
        for output in std::mem::take(&mut self.processes[p].held_by_leader) {
            self.carry_leader(p, output);
        }
        if !self.processes[p].alive {
            return;
        }
        if self.dice.chance(0.5) && self.processes[p].end.is_none() {
            self.tick(p);
        }
        while let Some(input) = self.processes[p].backlog.pop_front() {
            let life = self.processes[p].life;
            self.queue(self.now, Happening::Input { p, life, input });
        }
        self.queue(self.now, Happening::Tick { p });
        self.processes[p].tick_at = self.now;
        self.leave_when_tidy(p);
    }

    /// A process ends, however it came to it: its guard ends what it leaves behind, its connections break.
    pub(crate) fn die(&mut self, p: usize) {
        if !self.processes[p].alive {
            return;
        }
        let takes = self.killing();
        let process = &mut self.processes[p];
        process.alive = false;
        process.leader = None;
        process.frozen = false;
        process.backlog.clear();
        process.held.clear();
        process.held_by_leader.clear();
        if let Some(tree) = process.tree.as_ref().map(|tree| tree.id) {
            self.at(takes, Happening::TreeGone { p, tree });
        }
        let round = self.processes[p].at_work();
        self.drop_watches(p);
        self.end_stream(p);
        self.end_streams_to(p);
        if let Some(round) = round {
            self.peers_notice(p, round);
        }
    }

    /// A host is gone with all on it, and says nothing any more.
    pub(crate) fn crash_host(&mut self, host: usize) {
        self.schedule(|| format!("host {host} is lost"));
        self.hosts[host].up = false;
        for p in 0..self.processes.len() {
            if self.processes[p].host == host {
                let process = &mut self.processes[p];
                process.alive = false;
                process.leader = None;
                process.tree = None;
                process.backlog.clear();
                process.stream = None;
                process.streams.clear();
                self.drop_watches(p);
            }
        }
    }

    /// Everything that was broken works again.
    pub(crate) fn heal(&mut self) {
        self.schedule(|| "everything works again".into());
        self.healed = true;
        self.cuts = self.scenario.apart.into_iter().collect();
        for host in 0..self.hosts.len() {
            self.hosts[host].cut_off = false;
            self.fault(Fault::Boot(host));
        }
        self.fault(Fault::StoreBack { leases_lost: false });
        self.permit();
        for p in 0..self.processes.len() {
            (self.processes[p].trips, self.processes[p].stalls) = (None, None);
            self.thaw(p);
        }
        for watch in 0..self.store.watches.len() {
            let soon = self.now + 200 * MS;
            self.repair_watch(watch, soon);
        }
        if [FaultKind::Operator, FaultKind::Pause, FaultKind::Exclude].into_iter().any(|kind| self.scenario.has(kind)) {
            // Who was taken back stays so.
            let include = self.desired().include;
            self.desire(Desired { include, ..Desired::default() });
        }
        if self.scenario.loses_the_rest {
            self.lose_the_rest();
        }
    }

    /// Loses hosts that are not excluded for failures of theirs, until the others are as few as the job needs.
    fn lose_the_rest(&mut self) {
        let faults = self.store_round().map_or_else(Vec::new, |round| round.value.faults);
        let excluded: Vec<&String> =
            faults.iter().filter(|faults| faults.excluded.is_some()).map(|faults| &faults.node).collect();
        let others = (0..self.hosts.len()).filter(|host| !excluded.contains(&&format!("n{host}")));
        let spare = if excluded.is_empty() { 0 } else { self.hosts.len() - self.scenario.spec.min_nodes as usize };
        for host in others.take(spare).collect::<Vec<usize>>() {
            self.crash_host(host);
        }
    }

    /// Workers end well from now on.
    pub(crate) fn finish(&mut self) {
        self.schedule(|| "the work is done".into());
        self.finishing = true;
        for p in 0..self.processes.len() {
            self.finish_soon(p);
        }
    }
}
