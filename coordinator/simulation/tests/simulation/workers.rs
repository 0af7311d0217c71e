//! Workers and the guard: they start, end, quiesce, stop and are killed in their own time.

use std::time::Duration;

use elastic_rendezvous::job::{Endpoint, Failure, FailureClass};
use elastic_rendezvous::{GroupReport, Outcome, Start};

use crate::dice::{MS, SECOND};
use crate::process::{Input, Rest, Tree};
use crate::world::{Happening, Mutation, World};

impl World {
    /// How long a kill takes: well within the margin, which exists for that.
    pub(crate) fn killing(&mut self) -> u64 {
        let most = self.scenario.spec.timings.margin.as_nanos() as u64 / 4;
        if self.dice.chance(0.5) { self.dice.between(MS, 20 * MS) } else { self.dice.between(MS, most) }
    }

    pub(crate) fn start_workers(&mut self, p: usize, start: Start) {
        self.promises.started(self.now, p, &self.processes, &start);
        let late = self.processes[p].fence.is_some_and(|fence| self.local(p) >= fence);
        let id = self.fresh();
        let round = start.round.number;
        let process = &mut self.processes[p];
        process.stopped_told = false;
        process.stop_asked = false;
        process.rest = Rest::No;
        process.forming_told = false;
        process.start = Some(start);
        if late && self.mutation != Some(Mutation::GuardSleeps) {
            // The guard lets nothing start beyond the deadline.
            let outcome = Outcome::Failed(Failure::new(FailureClass::Lost, "the deadline had passed"));
            return self.soon(p, Input::Member(GroupReport::Ended { round, outcome }.into()));
        }
        // Workers at rest continue unchanged, unless their replica has changed. What was planned for them may still
        // happen.
        let new = process.start.as_ref().is_some_and(|start| start.rank.replica_since == Some(round));
        let id = process.tree.as_ref().filter(|_| !new).map_or(id, |tree| tree.id);
        process.tree = Some(Tree { id, round, quiet: false, at_rest: false, short: false });
        let started = self.dice.mostly(2 * SECOND, 12 * SECOND);
        self.at(started, Happening::TreeStarted { p, tree: id, round });
        if self.goes_wrong(self.scenario.failing) {
            let after = if self.dice.chance(0.3) { self.dice.between(0, started) } else { started };
            let after = after + self.dice.mostly(5 * SECOND, 40 * SECOND);
            self.at(after, Happening::TreeFails { p, tree: id, class: FailureClass::Own });
        }
        if self.finishing {
            self.finish_soon(p);
        }
    }

    /// The workers of one node end well, soon.
    pub(crate) fn finish_soon(&mut self, p: usize) {
        if let Some(tree) = self.processes[p].tree.as_ref().map(|tree| tree.id) {
            let after = self.dice.between(100 * MS, 4 * SECOND);
            self.at(after, Happening::TreeDone { p, tree });
        }
    }

    fn has_tree(&self, p: usize, tree: u64) -> bool {
        self.processes[p].tree.as_ref().is_some_and(|own| own.id == tree && !own.quiet)
    }

    pub(crate) fn tree_started(&mut self, p: usize, tree: u64, round: u64) {
        // Workers that quiesced are started again. Each start is reported once.
        let of_round = self.processes[p].tree.as_ref().is_some_and(|tree| tree.round == round);
        if of_round && self.has_tree(p, tree) && !self.processes[p].stop_asked {
            self.soon(p, Input::Member(GroupReport::Started(round).into()));
        }
    }

    pub(crate) fn tree_done(&mut self, p: usize, tree: u64) {
        if !self.has_tree(p, tree) || self.processes[p].stop_asked || !self.processes[p].alive {
            return;
        }
        if self.is_resting(p) {
            return;
        }
        let round = self.quieten(p);
        self.tell(|| format!("p{p}: workers of round {round} are done"));
        self.soon(p, Input::Member(GroupReport::Ended { round, outcome: Outcome::Done }.into()));
    }

    fn quieten(&mut self, p: usize) -> u64 {
        let tree = self.processes[p].tree.as_mut().expect("a tree");
        tree.quiet = true;
        tree.round
    }

    pub(crate) fn tree_fails(&mut self, p: usize, tree: u64, class: FailureClass) {
        let over = self.healed && self.blow.is_none();
        if !self.has_tree(p, tree) || self.processes[p].stop_asked || !self.processes[p].alive || over {
            return;
        }
        // A worker that blames a peer may have asked for a round, and live.
        if class != FailureClass::Peer || self.dice.chance(0.5) {
            self.processes[p].tree.iter_mut().for_each(|tree| tree.short = true);
        }
        if self.is_resting(p) {
            return;
        }
        let round = self.processes[p].tree.as_ref().map_or(0, |tree| tree.round);
        self.schedule(|| format!("p{p}: a worker of round {round} failed ({class:?})"));
        let outcome = Outcome::Failed(Failure::new(class, format!("worker of p{p} in round {round} failed")));
        self.promises.failed(round, class);
        self.soon(p, Input::Member(GroupReport::Ended { round, outcome }.into()));
        if class != FailureClass::Peer {
            self.peers_notice(p, round);
        }
    }

    /// Workers whose peer is gone fail with an error about it, some of them.
    pub(crate) fn peers_notice(&mut self, p: usize, round: u64) {
        for other in 0..self.processes.len() {
            if other != p && self.processes[other].at_work() == Some(round) && self.dice.chance(0.3) {
                let tree = self.processes[other].tree.as_ref().map_or(0, |tree| tree.id);
                let after = self.dice.mostly(500 * MS, 4 * SECOND);
                self.at(after, Happening::TreeFails { p: other, tree, class: FailureClass::Peer });
            }
        }
    }

    /// Whether its workers are to quiesce, or have. Exits are no failures then; workers that live end unreported.
    fn is_resting(&self, p: usize) -> bool {
        let process = &self.processes[p];
        process.rest != Rest::No || process.tree.as_ref().is_some_and(|tree| tree.at_rest)
    }

    pub(crate) fn quiesce_workers(&mut self, p: usize, grace: Duration) {
        let process = &self.processes[p];
        let living = process.tree.as_ref().is_some_and(|tree| !tree.quiet);
        // Some have not said yet that they know about rounds.
        if !living || !self.scenario.aware[process.host] || self.dice.chance(0.1) {
            return self.stop_workers(p, grace);
        }
        self.processes[p].rest = Rest::Asked(grace);
        self.quiesce_if_asked(p);
    }

    pub(crate) fn forming_told(&mut self, p: usize) {
        self.processes[p].forming_told = true;
        self.quiesce_if_asked(p);
    }

    fn quiesce_if_asked(&mut self, p: usize) {
        let process = &mut self.processes[p];
        let Rest::Asked(grace) = process.rest else { return };
        let (Some(tree), true) = (process.tree.as_ref().map(|tree| tree.id), process.forming_told) else { return };
        process.rest = Rest::Begun;
        let grace = self.hosts[process.host].clock.lasts(grace);
        if self.dice.chance(0.9) {
            let takes = self.dice.between(MS, SECOND).min(grace / 2);
            self.at(takes, Happening::TreeRests { p, tree });
        } else {
            self.at(grace / 2, Happening::TreeOverdue { p, tree, grace: Duration::from_nanos(grace / 2) });
        }
    }

    pub(crate) fn tree_rests(&mut self, p: usize, tree: u64) {
        if !self.has_tree(p, tree) || self.processes[p].stop_asked || !self.processes[p].alive {
            return;
        }
        self.tell(|| format!("p{p}: its workers have quiesced"));
        let warm = std::mem::replace(&mut self.processes[p].rest, Rest::Begun) == Rest::WarmingUp;
        let lies = self.mutation == Some(Mutation::QuiescedTooSoon);
        let mut whole = true;
        if let Some(tree) = self.processes[p].tree.as_mut() {
            tree.at_rest = !lies;
            tree.short &= !warm;
            whole = !tree.short;
        }
        let master = self.fresh_master(p);
        self.soon(p, Input::Member(GroupReport::Quiesced { master, whole }.into()));
    }

    /// New workers are started instead of those that are gone, and touch nothing.
    pub(crate) fn warm_up_workers(&mut self, p: usize, grace: Duration) {
        let id = self.fresh();
        let process = &mut self.processes[p];
        (process.stopped_told, process.stop_asked, process.rest) = (false, false, Rest::WarmingUp);
        let round = process.start.as_ref().map_or(0, |start| start.round.number);
        let tree = process.tree.get_or_insert(Tree { id, round, quiet: false, at_rest: true, short: true }).id;
        let takes = self.dice.mostly(10 * SECOND, 60 * SECOND);
        if self.dice.chance(0.9) {
            self.at(takes, Happening::TreeRests { p, tree });
        } else {
            // One is not ready in time, or has ended.
            self.at(takes, Happening::TreeOverdue { p, tree, grace });
        }
    }

    /// They did not quiesce in time.
    pub(crate) fn tree_overdue(&mut self, p: usize, tree: u64, grace: Duration) {
        if self.has_tree(p, tree) && !self.processes[p].stop_asked && self.processes[p].alive {
            self.stop_workers(p, grace);
        }
    }

    fn fresh_master(&mut self, p: usize) -> Option<Endpoint> {
        let port = 30_000 + (self.fresh() % 30_000) as u16;
        let host = format!("n{}", self.processes[p].host);
        self.dice.chance(0.9).then_some(Endpoint { host, port })
    }

    pub(crate) fn stop_workers(&mut self, p: usize, grace: Duration) {
        self.processes[p].stop_asked = true;
        let Some(tree) = &self.processes[p].tree else {
            // Asked where there is none, an agent says so each time.
            self.processes[p].stopped_told = false;
            return self.tell_stopped(p);
        };
        let (id, quiet) = (tree.id, tree.quiet);
        let grace = self.hosts[self.processes[p].host].clock.lasts(grace);
        let takes = match self.dice.between(0, 100) {
            _ if quiet => self.dice.between(0, 20 * MS),
            0..80 => self.dice.between(10 * MS, SECOND).min(grace),
            80..95 => self.dice.between(0, grace),
            _ => grace + self.killing(),
        };
        self.at(takes, Happening::TreeGone { p, tree: id });
    }

    pub(crate) fn kill_workers(&mut self, p: usize) {
        self.processes[p].stop_asked = true;
        let Some(tree) = &self.processes[p].tree else { return self.tell_stopped(p) };
        let id = tree.id;
        let takes = self.killing();
        self.at(takes, Happening::TreeGone { p, tree: id });
    }

    fn tell_stopped(&mut self, p: usize) {
        if !std::mem::replace(&mut self.processes[p].stopped_told, true) {
            let master = self.fresh_master(p);
            self.soon(p, Input::Member(GroupReport::Stopped { master }.into()));
        }
    }

    pub(crate) fn tree_gone(&mut self, p: usize, tree: u64) {
        if self.processes[p].tree.as_ref().is_none_or(|own| own.id != tree) {
            return;
        }
        let Some(tree) = self.processes[p].tree.take() else { return };
        self.tell(|| format!("p{p}: no worker of round {} is left", tree.round));
        if !self.processes[p].alive {
            return self.port_closed(p);
        }
        if self.processes[p].stop_asked {
            self.tell_stopped(p);
        } else if self.processes[p].rest == Rest::WarmingUp {
            self.stop_workers(p, Duration::ZERO);
        } else if !tree.at_rest {
            let outcome = Outcome::Failed(Failure::new(FailureClass::Lost, "killed by the guard at the deadline"));
            self.soon(p, Input::Member(GroupReport::Ended { round: tree.round, outcome }.into()));
        }
    }

    /// The guard's deadline moves.
    pub(crate) fn fence(&mut self, p: usize, at: Option<elastic_rendezvous::time::Time>) {
        self.processes[p].fence = at;
        if let Some(at) = at {
            let when = self.hosts[self.processes[p].host].clock.when(at);
            self.at(when.saturating_sub(self.now), Happening::Guard { p });
        }
    }

    pub(crate) fn guard(&mut self, p: usize) {
        let due = self.processes[p].fence.is_some_and(|fence| self.local(p) >= fence);
        if !due || self.mutation == Some(Mutation::GuardSleeps) {
            return;
        }
        if let Some(tree) = self.processes[p].tree.as_ref().filter(|tree| !tree.quiet).map(|tree| tree.id) {
            self.tell(|| format!("p{p}: the guard kills at its deadline"));
            let takes = self.killing();
            self.at(takes, Happening::TreeGone { p, tree });
        }
    }
}
