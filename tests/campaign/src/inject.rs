//! Injecting a fault, and undoing it.

use elastic_tests::prelude::*;
use std::sync::mpsc::{self, TryRecvError};

use anyhow::{Context, Result, anyhow, ensure};
use elastic_rendezvous::job::{NodeRecord, Phase, RoundState};

use super::fault::{A_NODE, Action, Direction, MANY, Place, Side, Told, Who};
use super::held::Held;
use super::hosts::{self, Cut, send};
use super::limit::Limit;
use super::memory::Cage;
use super::names::Answers;
use super::nodes::Process;
use super::scene::{Missed, Scene};
use super::setting::Setting;
use super::tracer::{Tracer, has_ended};

/// What has to be undone when the fault ends.
#[derive(Default)]
pub(crate) struct Injected(Vec<Undo>);

type Undo = Box<dyn FnOnce(&mut Scene) -> Result<()>>;

impl Injected {
    fn then(&mut self, undo: impl FnOnce(&mut Scene) -> Result<()> + 'static) {
        self.0.push(Box::new(undo));
    }

    /// What undoes itself when it is dropped.
    fn keep(&mut self, guard: impl Sized + 'static) {
        self.then(|_| {
            drop(guard);
            Ok(())
        });
    }

    fn resume(&mut self, pid: u32) {
        self.then(move |_| {
            send(pid, Signal::CONT);
            Ok(())
        });
    }

    /// Does something again and again.
    fn repeat(&mut self, mut turn: impl FnMut() + Send + 'static) {
        let (over, ends) = mpsc::channel::<()>();
        let thread = std::thread::spawn(move || {
            while ends.try_recv() == Err(TryRecvError::Empty) {
                turn();
            }
        });
        self.then(|_| {
            drop(over);
            thread.join().map_err(|_| anyhow!("a thread has panicked"))
        });
    }

    /// Undoes it all, in its order.
    pub(crate) fn undo(self, scene: &mut Scene) -> Result<()> {
        self.0.into_iter().try_for_each(|undo| undo(scene))
    }
}

impl Scene {
    pub(crate) async fn inject(&mut self, action: &Action, injected: &mut Injected) -> Result<()> {
        self.look_who_serves().await?;
        match *action {
            Action::Kill(process, who) => {
                match process {
                    Process::Member => injected.then(|scene| scene.cluster.revive()),
                    Process::Coordinator => injected.then(|scene| scene.coordinator().revive().map(drop)),
                    _ => {}
                }
                self.struck(process, who).await?.into_iter().for_each(|pid| send(pid, Signal::KILL));
            }
            Action::Hold(who) => self.hold(who, injected).await?,
            Action::Freeze(process, who) => {
                for pid in self.struck(process, who).await? {
                    send(pid, Signal::STOP);
                    injected.resume(pid);
                }
            }
            Action::Starve(process, who) => {
                let pids = self.struck(process, who).await?;
                let stopped = pids.clone();
                injected.repeat(move || {
                    pids.iter().for_each(|&pid| send(pid, Signal::STOP));
                    std::thread::sleep(Duration::from_millis(95));
                    pids.iter().for_each(|&pid| send(pid, Signal::CONT));
                    std::thread::sleep(Duration::from_millis(5));
                });
                stopped.into_iter().for_each(|pid| injected.resume(pid));
            }
            Action::Reset(who) => {
                self.targets(who).into_iter().try_for_each(|at| self.nodes[at].host.reset())?;
            }
            Action::Lose(who) => {
                for at in self.targets(who) {
                    self.nodes[at].forget();
                    self.nodes[at].host.link(false)?;
                    self.nodes[at].host.signal(Signal::STOP);
                    self.lost.push(at);
                }
            }
            Action::ResetEachRound(who, rounds) => self.reset_each_round(who, rounds).await?,
            Action::Drain(who, told) => self.drain(who, told, injected).await?,
            Action::Inject(process, who, what) => {
                for pid in self.struck(process, who).await? {
                    injected.keep(Tracer::attach(pid, what).await?);
                }
            }
            Action::Exhaust(process, who, resource) => {
                for pid in self.struck(process, who).await? {
                    let limit = Limit::at_what_it_has(pid, resource)?;
                    injected.then(|_| limit.map_or(Ok(()), Limit::give_back));
                }
            }
            Action::OutOfMemory(process, who) => {
                for pid in self.struck(process, who).await? {
                    injected.keep(Cage::around(pid)?);
                }
            }
            Action::Wait(time) => self.pass(time).await?,
            Action::Await(..) => {}
            _ => return self.inject_around(action, injected).await,
        }
        Ok(())
    }

    /// Freezes guards and their workers, once these work.
    async fn hold(&mut self, who: Who, injected: &mut Injected) -> Result<()> {
        injected.then(|scene| {
            for held in std::mem::take(&mut scene.held) {
                scene.wrong.extend(held.let_go()?);
            }
            Ok(())
        });
        for at in self.targets(who) {
            let name = [self.nodes[at].host.name.clone()];
            self.until("its workers run", |scene| scene.is_over() || scene.starts(&name) > 0).await?;
            let round = self.starts(&name);
            ensure!(round > 0, Missed);
            self.held.push(Held::new(&self.nodes[at], round, self.observer.elapsed()));
        }
        Ok(())
    }

    /// Ends agents with SIGTERM.
    async fn drain(&mut self, who: Who, told: Told, injected: &mut Injected) -> Result<()> {
        let all = self.targets(who);
        let hear = |scene: &mut Scene| all.iter().all(|&at| scene.nodes[at].hears_sigterm());
        self.until("the agents can be asked to leave", hear).await?;
        for &at in &all {
            self.nodes[at].forget();
            injected.then(move |scene| {
                scene.again.push(at);
                Ok(())
            });
            match told {
                Told::WithAll => self.nodes[at].host.signal(Signal::TERM),
                Told::Once | Told::Again => self.nodes[at].signal(Process::Agent, Signal::TERM),
            }
        }
        if told == Told::Again {
            let mut heard = false;
            for wait in [5; 20].into_iter().chain([100; 8]) {
                self.pass(Duration::from_millis(wait)).await?;
                heard |= all.iter().any(|&at| self.nodes[at].is_up());
                all.iter().for_each(|&at| self.nodes[at].signal(Process::Agent, Signal::TERM));
            }
            ensure!(heard, Missed);
        }
        Ok(())
    }

    /// Resets these hosts once they have started workers in a round, and again in the next, until one is left out or the
    /// job is over. Then they do not come back.
    async fn reset_each_round(&mut self, who: Who, rounds: usize) -> Result<()> {
        self.start_missing()?;
        let hosts = self.targets(who);
        let names: Vec<String> = hosts.iter().map(|&at| self.nodes[at].host.name.clone()).collect();
        let mut last = 0;
        for _ in 0..rounds {
            let over = |scene: &Scene| scene.is_over() || scene.left_out();
            self.until("a node to reset runs", |scene| over(scene) || scene.starts(&names) > last).await?;
            if self.left_out() {
                return Ok(());
            }
            ensure!(last > 0 || !self.is_over(), Missed);
            last = self.starts(&names);
            for &at in &hosts {
                self.nodes[at].forget();
                self.nodes[at].host.reset()?;
            }
            let number = |scene: &Scene| scene.observer.events().round().map_or(0, |round| round.number);
            self.until("its loss is seen", |scene| scene.is_over() || number(scene) > last).await?;
            if self.is_over() {
                self.lost.extend(hosts);
                return Ok(());
            }
            hosts.iter().try_for_each(|&at| self.nodes[at].start())?;
        }
        if rounds == MANY {
            self.wrong
                .push(format!("{names:?} were reset in {MANY} rounds: none is left out, and the job has not ended"));
        }
        Ok(())
    }

    fn left_out(&self) -> bool {
        self.observer.events().leaves_out()
    }

    /// The round in which one of these nodes has just started its workers.
    fn starts(&self, names: &[String]) -> u64 {
        let events = self.observer.events();
        let Some(round) = events.round().filter(|round| round.state == RoundState::Running) else { return 0 };
        let runs = |node: &NodeRecord| node.phase == Phase::Running && node.round == Some(round.number);
        if events.nodes().iter().any(|node| names.contains(&node.name) && runs(node)) { round.number } else { 0 }
    }

    /// Injects a fault of what surrounds a node: the network, disks, names, clocks, the coordinator.
    async fn inject_around(&mut self, action: &Action, injected: &mut Injected) -> Result<()> {
        match *action {
            Action::Cut(who, side, direction, cut) => {
                injected.then(|_| hosts::heal_all());
                for at in self.targets(who) {
                    self.cut(&self.nodes[at].host, side, direction, cut)?;
                }
            }
            Action::Flap(who, side) => {
                let ways: Vec<_> =
                    self.targets(who).into_iter().flat_map(|at| self.ways(&self.nodes[at].host, side)).collect();
                injected.repeat(move || {
                    for (from, to) in &ways {
                        let _ = from.cut_to(to, Cut::Silent);
                        let _ = to.cut_to(from, Cut::Silent);
                    }
                    std::thread::sleep(Duration::from_millis(100));
                    let _ = hosts::heal_all();
                    std::thread::sleep(Duration::from_millis(100));
                });
                injected.then(|_| hosts::heal_all());
            }
            Action::Unplug(who) => {
                for at in self.targets(who) {
                    self.nodes[at].host.link(false)?;
                    injected.then(move |scene| scene.nodes[at].host.link(true));
                }
            }
            Action::Fill(place) => self.disks(place, injected, |disk| disk.fill())?,
            Action::ReadOnly(place) => self.disks(place, injected, |disk| disk.read_only(true))?,
            Action::Stall(place) => self.disks(place, injected, super::disk::Disk::freeze)?,
            Action::Names(answers) => {
                injected.then(|scene| {
                    scene.names.answer(Answers::Right);
                    Ok(())
                });
                self.names.answer(answers);
            }
            Action::Clock(who, ahead) => {
                for at in self.targets(who) {
                    self.nodes[at].set_clock(ahead)?;
                    injected.then(move |scene| scene.nodes[at].set_clock(0));
                }
            }
            Action::CutCoordinator(side) => {
                injected.then(|_| hosts::heal_all());
                let host = self.coordinator().host.clone();
                self.cut(&host, side, Direction::Both, Cut::Silent)?;
            }
            _ => return self.inject_store(action, injected).await,
        }
        Ok(())
    }

    async fn inject_store(&mut self, action: &Action, injected: &mut Injected) -> Result<()> {
        match *action {
            Action::CutMember(who) => {
                injected.then(|_| hosts::heal_all());
                for at in self.members(who).await? {
                    self.cut(&self.cluster.members[at].host, Side::Store, Direction::Both, Cut::Silent)?;
                }
            }
            Action::ReplaceMember(who) => {
                for at in self.members(who).await? {
                    self.cluster.replace(at).await?;
                }
            }
            Action::Upgrade => {
                let newer = self.newer_etcd.clone().context("an etcd 3.5 (scripts/setup.sh fetches it)")?;
                for at in 0..self.cluster.members.len() {
                    self.cluster.upgrade(at, &newer)?;
                    self.cluster.client().await?;
                    tokio::time::sleep(Duration::from_secs(1)).await;
                }
            }
            Action::Expire(holder) => {
                injected.then(move |scene| scene.cluster.renew(holder, false));
                self.cluster.renew(holder, true)?;
            }
            Action::Rights(has) => {
                let (secrets, mut client) = self.cluster.users().await?;
                secrets.rights(&mut client, has).await?;
            }
            Action::ForgetTokens => {
                let (secrets, mut client) = self.cluster.users().await?;
                secrets.forget_tokens(&mut client).await?;
            }
            Action::Compact => self.cluster.compact().await?,
            Action::NoSpace(yes) => self.cluster.no_space(yes).await?,
            Action::MoveLeader => self.cluster.move_leader().await?,
            Action::Defragment => self.cluster.defragment().await?,
            Action::RevokeLeases => self.cluster.revoke_leases().await?,
            Action::Delete(key) => self.write(key, None).await?,
            Action::Overwrite(key, value) => self.write(key, Some(value)).await?,
            _ => {}
        }
        Ok(())
    }

    /// Has a key of the job hold this, or nothing.
    async fn write(&self, key: &str, value: Option<&str>) -> Result<()> {
        let key = if key == A_NODE { self.node_key() } else { Some(format!("{}{key}", self.keys.root())) };
        let key = key.ok_or(Missed)?;
        let revision = match value {
            Some(value) => self.cluster.put(&key, value).await?,
            None => self.cluster.delete(&key).await?,
        };
        self.observer.events().ours.insert(revision);
        Ok(())
    }

    fn node_key(&self) -> Option<String> {
        let name = self.targets(Who::Follower).first().map(|&at| self.nodes[at].host.name.clone())?;
        let events = self.observer.events();
        let node = events.nodes().into_iter().find(|node| node.name == name)?;
        Some(self.keys.node(&node.id()))
    }

    /// The living processes of this kind.
    pub(super) async fn processes(&self, process: Process, who: Who) -> Result<Vec<u32>> {
        let pids: Vec<u32> = match process {
            Process::Member => self.members(who).await?.into_iter().filter_map(|at| self.cluster.pid(at)).collect(),
            Process::Coordinator => self.coordinator.iter().filter_map(|leader| leader.pid()).collect(),
            _ => self.targets(who).into_iter().flat_map(|at| self.nodes[at].processes(process)).collect(),
        };
        Ok(pids.into_iter().filter(|&pid| !has_ended(pid)).collect())
    }

    /// The same, where a fault without them would have no effect.
    async fn struck(&self, process: Process, who: Who) -> Result<Vec<u32>> {
        let pids = self.processes(process, who).await?;
        ensure!(!pids.is_empty(), Missed);
        Ok(pids)
    }

    async fn look_who_serves(&mut self) -> Result<()> {
        if self.setting == Setting::Replicated {
            self.serving = self.cluster.serving().await?;
        }
        Ok(())
    }

    /// The nodes of `who` that run.
    fn targets(&self, who: Who) -> Vec<usize> {
        if who == Who::Serving {
            return vec![self.serving];
        }
        let up: Vec<usize> = (0..self.nodes.len()).filter(|&at| self.nodes[at].is_up()).collect();
        let leader = self.observer.events().leader();
        let leads = |at: &usize| leader.as_ref().is_some_and(|leader| *leader == self.nodes[*at].host.name);
        // The node that is spared counts as the leader, whichever node leads now.
        let leads = |at: &usize| if self.spared.is_some() { self.spared == Some(*at) } else { leads(at) };
        let leading: Vec<usize> = up.iter().copied().filter(leads).collect();
        // Without a leader, the first node counts as one.
        let leading = if leading.is_empty() { up.iter().copied().take(1).collect() } else { leading };
        who.of(up, &leading)
    }

    async fn members(&self, who: Who) -> Result<Vec<usize>> {
        let all: Vec<usize> = (0..self.cluster.members.len()).collect();
        // Where none is singled out, none needs to answer.
        let leading = if who == Who::All { vec![] } else { vec![self.cluster.leader().await?] };
        Ok(who.of(all, &leading))
    }

    fn ways(&self, own: &hosts::Host, side: Side) -> Vec<(hosts::Host, hosts::Host)> {
        let store = self.cluster.members.iter().map(|member| &member.host);
        let peers = self.nodes.iter().map(|node| &node.host);
        let to = |host: &&hosts::Host| host.name != own.name;
        let others: Vec<&hosts::Host> = match side {
            Side::Store => store.filter(to).collect(),
            Side::Peers => peers.filter(to).collect(),
            Side::World => store.chain(peers).filter(to).collect(),
        };
        others.into_iter().map(|other| (own.clone(), other.clone())).collect()
    }

    /// Cuts a host's ways.
    fn cut(&self, own: &hosts::Host, side: Side, direction: Direction, cut: Cut) -> Result<()> {
        for (own, other) in self.ways(own, side) {
            if direction != Direction::Received {
                own.cut_to(&other, cut)?;
            }
            if direction != Direction::Sent {
                other.cut_to(&own, cut)?;
            }
        }
        Ok(())
    }

    fn disks(
        &mut self,
        place: Place,
        injected: &mut Injected,
        mut fails: impl FnMut(&mut super::disk::Disk) -> Result<()>,
    ) -> Result<()> {
        match place {
            Place::Checkpoints => {
                injected.then(|scene| scene.checkpoints.repair());
                fails(&mut self.checkpoints)
            }
            Place::Own(who) => {
                for at in self.targets(who) {
                    injected.then(move |scene| scene.nodes[at].disk.repair());
                    fails(&mut self.nodes[at].disk)?;
                }
                Ok(())
            }
        }
    }
}
