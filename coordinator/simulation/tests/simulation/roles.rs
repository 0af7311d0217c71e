//! Faults that strike by role: what a takeover must survive.

use elastic_rendezvous::job::FailureClass;

use crate::dice::SECOND;
use crate::faults::Fault;
use crate::scenario::FaultKind;
use crate::world::{Happening, World};

impl World {
    pub(crate) fn strike_by_role(&mut self, kind: FaultKind) {
        // Agents that have ended come back, so that there is always a group for the faults.
        for host in 0..self.hosts.len() {
            self.maybe_enter(host);
        }
        let mut members: Vec<usize> = (0..self.processes.len()).filter(|p| self.works(*p)).collect();
        let leader =
            (0..self.processes.len()).find(|p| self.processes[*p].alive && self.processes[*p].leader.is_some());
        let timings = &self.scenario.spec.timings;
        let lease = timings.lease_ttl.as_nanos() as u64;
        // Long enough for all that a takeover may take, now and then.
        let longest = 2 * timings.takeover_delay.as_nanos() as u64 + 4 * lease;
        let longest = if self.dice.chance(0.7) { 3 * lease } else { longest };
        let while_ = self.dice.between(lease, longest);
        let Some(some) = self.dice.pick(&members) else { return };
        match kind {
            FaultKind::Island => {
                match self.dice.between(0, 4) {
                    0 => {}
                    1 => members.retain(|p| *p != some),
                    2 => members.retain(|p| *p == some || Some(*p) == leader),
                    _ => members = vec![some],
                }
                members.extend(leader.filter(|_| self.dice.chance(0.3)));
                let island: Vec<usize> = members.iter().map(|p| self.processes[*p].host).collect();
                self.isolate(&island, while_);
            }
            FaultKind::Stale => {
                let Some(leader) = leader else { return };
                members.retain(|p| *p != leader);
                let with_it = members.iter().position(|p| *p == some && self.dice.chance(0.5));
                let held = with_it.map(|at| members.remove(at));
                let island: Vec<usize> = [leader].into_iter().chain(held).map(|p| self.processes[p].host).collect();
                self.isolate(&island, while_);
                for p in members {
                    if self.dice.chance(0.7) {
                        self.deafen(self.processes[p].host, while_);
                    }
                }
            }
            FaultKind::Unheard => {
                let (Some(leader), host) = (leader, self.processes[some].host) else { return };
                self.deafen(host, while_);
                self.part(host, self.processes[leader].host, while_);
                if self.dice.chance(0.3) {
                    // Long enough for its lease to lapse, and back before it counts as lost.
                    self.hosts[host].cut_off = true;
                    let back = self.dice.between(lease, 2 * lease);
                    self.at(back, Happening::Fault(Fault::Reconnect(host)));
                }
            }
            FaultKind::Blame => self.one_fails(some, FailureClass::Peer),
            FaultKind::Ruin => {
                self.one_fails(some, FailureClass::Own);
                if let Some(other) = self.dice.pick(&members).filter(|_| self.dice.chance(0.3)) {
                    self.one_fails(other, FailureClass::Peer);
                }
            }
            _ => unreachable!("{kind:?} strikes anybody"),
        }
    }

    fn works(&self, p: usize) -> bool {
        self.processes[p].alive && self.processes[p].at_work().is_some()
    }

    fn one_fails(&mut self, p: usize, class: FailureClass) {
        let Some(tree) = self.processes[p].tree.as_ref().map(|tree| tree.id) else { return };
        let after = self.dice.between(0, SECOND);
        self.at(after, Happening::TreeFails { p, tree, class });
    }

    /// Cuts hosts off from the store, and perhaps from all other hosts; they reach each other.
    fn isolate(&mut self, island: &[usize], while_: u64) {
        self.schedule(|| format!("hosts {island:?} cannot reach the store"));
        for host in island {
            self.hosts[*host].cut_off = true;
            self.at(while_, Happening::Fault(Fault::Reconnect(*host)));
        }
        if self.dice.chance(0.5) {
            for other in (0..self.hosts.len()).filter(|other| !island.contains(other)) {
                island.iter().for_each(|host| self.part(*host, other, while_));
            }
        }
    }

    fn part(&mut self, one: usize, other: usize, while_: u64) {
        let (a, b) = (one.min(other), one.max(other));
        if a != b {
            self.schedule(|| format!("hosts {a} and {b} cannot reach each other"));
            self.cuts.insert((a, b));
            self.at(while_, Happening::Fault(Fault::Mend(a, b)));
        }
    }
}
