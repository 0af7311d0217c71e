//! Carries out what the machines ask for.

use elastic_rendezvous::job::{Keys, NodeId};
use elastic_rendezvous::time::Time;
use elastic_rendezvous::{
    Command, Former, Leader, LeaderInput, LeaderOutput, Member, MemberInput, MemberOutput, Verdict, decide,
};
use elastic_store::{Event, Revision, Scope, WatchUpdate};

use crate::faults::Fault;
use crate::process::{Input, setup};
use crate::service::{Asker, Request};
use crate::world::{Happening, World};

/// Ticks without effect, one after the other, that make a busy loop.
const SPINS: u32 = 50;

impl World {
    pub(crate) fn local(&self, p: usize) -> Time {
        self.hosts[self.processes[p].host].clock.reads(self.now)
    }

    /// A process takes an input that has reached it.
    pub(crate) fn take(&mut self, p: usize, input: Input) {
        self.tell(|| format!("p{p} ← {input:?}"));
        match input {
            Input::Member(input) => self.member(p, input),
            Input::Leader(term, input) => {
                if self.processes[p].leader.as_ref().is_some_and(|leader| leader.term() == term) {
                    self.lead(p, input);
                }
            }
            other => self.heard(p, other),
        }
        self.plan_tick(p);
    }

    pub(crate) fn tick(&mut self, p: usize) {
        let now = self.local(p);
        if self.processes[p].leader.as_ref().and_then(Leader::deadline).is_some_and(|at| now >= at) {
            self.lead(p, LeaderInput::Tick);
            if self.processes[p].frozen {
                return;
            }
        }
        self.member(p, MemberInput::Tick);
        self.plan_tick(p);
    }

    /// When the machines want to be called next.
    pub(crate) fn plan_tick(&mut self, p: usize) {
        let process = &self.processes[p];
        if !process.alive || process.frozen {
            return;
        }
        let leader = process.leader.as_ref().and_then(Leader::deadline);
        let Some(deadline) = [process.member.deadline(), leader].into_iter().flatten().min() else { return };
        let when = self.hosts[process.host].clock.when(deadline);
        let overdue = when <= self.now;
        // The driver pauses for a millisecond at least.
        let when = when.max(self.now + crate::dice::MS);
        let process = &mut self.processes[p];
        if process.tick_at > when || process.tick_at <= self.now {
            process.tick_at = when;
            process.spins = if overdue { process.spins + 1 } else { 0 };
            if process.spins > SPINS {
                process.spins = 0;
                let mode = process.member.mode_name();
                let line = format!("p{p} spins in {mode}: its deadline {deadline:?} passed and nothing is done");
                self.promises.breach("no busy loops", line);
            }
            self.queue(when, Happening::Tick { p });
        }
    }

    pub(crate) fn member(&mut self, p: usize, input: MemberInput) {
        let now = self.local(p);
        let process = &mut self.processes[p];
        if process.end.is_some() {
            return;
        }
        self.coverage.member(process.member.mode_name(), &input);
        let outputs = process.member.step(now, input);
        if process.member.is_stuck() {
            let line = format!("p{p} is {} and waits for nothing", process.member.mode_name());
            self.promises.breach("no member waits for ever", line);
        }
        if let Some(while_) = process.trips.take_if(|_| !outputs.is_empty()) {
            process.frozen = true;
            process.held = outputs;
            self.schedule(|| format!("p{p} freezes before it does what it meant to"));
            return self.at(while_, Happening::Fault(Fault::Thaw(p)));
        }
        for output in outputs {
            self.carry(p, output);
        }
        self.commit_perhaps(p);
    }

    pub(crate) fn lead(&mut self, p: usize, input: LeaderInput) {
        let now = self.local(p);
        self.tell_news(p, &input);
        let Some(leader) = &mut self.processes[p].leader else { return };
        let answered = matches!(input, LeaderInput::Answered { .. });
        let outputs = leader.step(now, input);
        if answered {
            self.check_news(p);
        }
        let Some(leader) = &self.processes[p].leader else { return };
        if let Some(view) = leader.view() {
            let decision = decide(now, view);
            let verdict = match decision.verdict {
                Verdict::Wait => "wait",
                Verdict::Probe { .. } => "probe",
                Verdict::Form(_) => "form",
                Verdict::Seal(_) => "seal",
                Verdict::Finish { .. } => "finish",
                Verdict::Refuse(_) => "refuse",
                Verdict::Prune(_) => "prune",
            };
            self.coverage.verdict(view.round.value.state, verdict);
        }
        let writes = |output: &LeaderOutput| matches!(output, LeaderOutput::Txn(txn) if txn.is_write());
        if let Some(while_) = self.processes[p].stalls.take_if(|_| outputs.iter().any(writes)) {
            self.schedule(|| format!("p{p} freezes between its decision and the write"));
            self.processes[p].frozen = true;
            self.processes[p].held_by_leader = outputs;
            return self.at(while_, Happening::Fault(Fault::Thaw(p)));
        }
        for output in outputs {
            self.carry_leader(p, output);
        }
    }

    /// Remembers what the watch tells a leader about nodes' keys.
    fn tell_news(&mut self, p: usize, input: &LeaderInput) {
        let LeaderInput::Watched(WatchUpdate::Events(events)) = input else { return };
        for event in events {
            if let (Event::Put(kv), Some(node)) = (event, Keys::node_of(&self.keys.nodes(), event.key())) {
                self.processes[p].told.insert(node, kv.mod_revision);
            }
        }
    }

    /// After an answer a leader may have read the job again. It still knows what its watch has told it and is still true.
    fn check_news(&mut self, p: usize) {
        let Some(leader) = self.processes[p].leader.as_ref().filter(|leader| !leader.is_over()) else { return };
        let stands = |(node, told): (&NodeId, &Revision)| {
            let kv = self.store.mvcc.snapshot(&Scope::Key(self.keys.node(node))).pop()?;
            (kv.mod_revision == *told).then(|| (node.clone(), *told))
        };
        self.promises.leader_knows(leader, self.processes[p].told.iter().filter_map(stands));
    }

    fn order(&mut self, p: usize, command: Command) {
        match command {
            Command::Start(start) => self.start_workers(p, *start),
            Command::Quiesce(grace) => self.quiesce_workers(p, grace),
            Command::WarmUp { grace, .. } => self.warm_up_workers(p, grace),
            Command::Stop(grace) => self.stop_workers(p, grace),
            Command::Kill => self.kill_workers(p),
            Command::Fence(at) => self.fence(p, at),
            Command::Forming(..) => self.forming_told(p),
            Command::Leaving(_) | Command::Say(_) | Command::Conclude(..) => {}
        }
    }

    pub(crate) fn carry(&mut self, p: usize, output: MemberOutput) {
        self.tell(|| format!("    p{p} → {output:?}"));
        match output {
            MemberOutput::Txn(call, txn) => self.send(p, Asker::Member(call), Request::Txn(txn)),
            MemberOutput::Grant(ttl) => self.send(p, Asker::Operator, Request::Grant(ttl)),
            MemberOutput::Renew(lease) => self.send(p, Asker::Operator, Request::Renew(lease)),
            MemberOutput::Revoke(lease) => self.send(p, Asker::Operator, Request::Revoke(lease)),
            MemberOutput::Watch(scope, from) => self.watch(p, None, scope, from),
            MemberOutput::Pulse(target) => self.open_pulse(p, target),
            MemberOutput::Lead(term, former) => self.begin_term(p, term, former),
            // At its end the leader still finishes what is under way.
            MemberOutput::StopLeading if self.processes[p].member.is_over() => {}
            MemberOutput::StopLeading => self.stop_leading(p),
            MemberOutput::Agent(command) => self.order(p, command),
            MemberOutput::Secret(_) | MemberOutput::Warn(_) => {}
            MemberOutput::Rejoin(_) => self.rejoin(p),
            MemberOutput::End(end) => {
                self.promises.ended(self.now, &self.processes[p], &end);
                self.processes[p].end = Some(end);
                self.leave_when_tidy(p);
            }
        }
    }

    fn begin_term(&mut self, p: usize, term: Revision, former: Option<Former>) {
        let now = self.local(p);
        let own = self.processes[p].id();
        self.processes[p].told.clear();
        let leader = Leader::new(own.clone(), self.keys.clone(), term, now, 0).after(former);
        self.processes[p].leader = Some(leader.seeing(self.processes[p].member.stage_seen()));
        let life = self.processes[p].life;
        self.at(0, Happening::OwnBeat { p, life, term });
        self.lead(p, LeaderInput::Opened(own));
    }

    /// A leader's own member needs no stream.
    pub(crate) fn own_beat(&mut self, p: usize, life: u32, term: Revision) {
        let process = &self.processes[p];
        let leads = process.leader.as_ref().is_some_and(|leader| leader.term() == term);
        if !process.alive || process.life != life || !leads {
            return;
        }
        let every = process.member.spec().timings.beat();
        let every = self.hosts[process.host].clock.lasts(every);
        if !process.frozen {
            let own = process.id();
            let now = self.local(p);
            self.lead(p, LeaderInput::Heard { node: own.clone(), probe: 0, echo: Some(now) });
            if let Some(leader) = &self.processes[p].leader
                && let Some(word) = leader.word(now, &own)
                && !self.processes[p].frozen
            {
                self.member(p, MemberInput::Word { sent: now, term, word });
            }
            self.plan_tick(p);
        }
        self.at(every, Happening::OwnBeat { p, life, term });
    }

    pub(crate) fn stop_leading(&mut self, p: usize) {
        self.processes[p].leader = None;
        for watch in self.store.watches.iter_mut().filter(|watch| watch.process == p && watch.term.is_some()) {
            watch.over = true;
        }
        self.end_streams_to(p);
    }

    pub(crate) fn carry_leader(&mut self, p: usize, output: LeaderOutput) {
        self.tell(|| format!("    p{p} leads → {output:?}"));
        let Some(term) = self.processes[p].leader.as_ref().map(Leader::term) else { return };
        match output {
            LeaderOutput::Txn(txn) => {
                let now = self.local(p);
                if let Some(leader) = &self.processes[p].leader {
                    self.promises.leader_writes(now, &self.keys, leader, &txn);
                }
                self.send(p, Asker::Leader(term), Request::Txn(txn));
            }
            LeaderOutput::Watch(scope, from) => self.watch(p, Some(term), scope, from),
            LeaderOutput::Probe(number) => self.probe(p, number),
            LeaderOutput::Suspect(node, peer) => {
                let hop = self.hop(p);
                let until = self.now + self.scenario.spec.timings.lease_ttl.as_nanos() as u64;
                self.at(hop, Happening::Suspect { p, term, node, port: peer.port, until });
            }
            LeaderOutput::Deposed => self.stop_leading(p),
            LeaderOutput::Broken(error) => {
                self.stop_leading(p);
                self.member(p, MemberInput::Watched(WatchUpdate::Broken(error)));
            }
            LeaderOutput::Say(_) | LeaderOutput::Warn(_) => {}
        }
    }

    /// The agent ends once its leader, if it has one, has finished what is under way.
    pub(crate) fn leave_when_tidy(&mut self, p: usize) {
        let process = &self.processes[p];
        let Some(end) = process.end.clone() else { return };
        if process.alive && !process.leader.as_ref().is_some_and(Leader::is_busy) {
            self.tell(|| format!("p{p} exits: {end:?}"));
            self.die(p);
        }
    }

    fn rejoin(&mut self, p: usize) {
        self.stop_leading(p);
        self.end_stream(p);
        let process = &mut self.processes[p];
        process.life += 1;
        process.backlog.clear();
        let (host, life) = (process.host, process.life);
        let setup = setup(&self.scenario, &self.keys, host, self.hosts[host].boot, p, life);
        self.processes[p].member = Member::new(setup);
        self.drop_watches(p);
        self.soon(p, Input::Member(MemberInput::Tick));
    }

    pub(crate) fn drop_watches(&mut self, p: usize) {
        let life = self.processes[p].life;
        let alive = self.processes[p].alive;
        for watch in self.store.watches.iter_mut().filter(|watch| watch.process == p) {
            watch.over |= watch.life != life || !alive;
        }
    }
}
