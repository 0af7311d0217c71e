//! Injecting a fault, and undoing it.

use elastic_tests::prelude::*;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

use anyhow::{Context, Result};

use super::coordinator::Coordinator;
use super::fault::{Action, Direction, Place, Side, Which, Who};
use super::hosts::{self, Cut, send};
use super::limit::Limit;
use super::memory::Cage;
use super::names::Answers;
use super::nodes::Process;
use super::scene::Scene;
use super::secrets::Holder;
use super::tracer::Tracer;

/// What has to be undone when the fault ends.
#[derive(Default)]
pub(crate) struct Injected(Vec<Undo>);

enum Undo {
    Continue(u32),
    LetGo(Tracer),
    Limit(Limit),
    Repeat(Repeated),
    Ways,
    Cable(usize),
    Disk(usize),
    Checkpoints,
    Names,
    Clock(usize),
    ContinueMember(usize),
    Members,
    Space,
    Return(usize),
    Coordinator,
    ContinueCoordinator,
    Memory(Cage),
    Renew(Holder),
    Rights,
}

impl Injected {
    fn then(&mut self, undo: Undo) {
        self.0.push(undo);
    }
}

/// Something that is done again and again by a thread.
struct Repeated {
    over: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Repeated {
    fn new(mut turn: impl FnMut() + Send + 'static) -> Repeated {
        let over = Arc::new(AtomicBool::new(false));
        let seen = Arc::clone(&over);
        let thread = std::thread::spawn(move || {
            while !seen.load(Ordering::Relaxed) {
                turn();
            }
        });
        Repeated { over, thread: Some(thread) }
    }
}

impl Drop for Repeated {
    fn drop(&mut self) {
        self.over.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Scene {
    pub(crate) async fn inject(&mut self, action: &Action, injected: &mut Injected) -> Result<()> {
        match *action {
            Action::Kill(process, who) => {
                self.processes(process, who).into_iter().for_each(|pid| send(pid, Signal::KILL));
            }
            Action::Freeze(process, who) => {
                for pid in self.processes(process, who) {
                    send(pid, Signal::STOP);
                    injected.then(Undo::Continue(pid));
                }
            }
            Action::Starve(process, who) => {
                let pids = self.processes(process, who);
                let stopped = pids.clone();
                injected.then(Undo::Repeat(Repeated::new(move || {
                    pids.iter().for_each(|&pid| send(pid, Signal::STOP));
                    std::thread::sleep(Duration::from_millis(95));
                    pids.iter().for_each(|&pid| send(pid, Signal::CONT));
                    std::thread::sleep(Duration::from_millis(5));
                })));
                stopped.into_iter().for_each(|pid| injected.then(Undo::Continue(pid)));
            }
            Action::Reset(who) => {
                for at in self.targets(who) {
                    self.nodes[at].host.reboot()?;
                    self.nodes[at].host.signal(Signal::KILL);
                }
            }
            Action::Lose(who) => {
                for at in self.targets(who) {
                    self.nodes[at].forget();
                    self.nodes[at].host.link(false)?;
                    self.nodes[at].host.signal(Signal::STOP);
                    self.lost.push(at);
                }
            }
            Action::Drain(who) => {
                for at in self.targets(who) {
                    self.nodes[at].forget();
                    self.nodes[at].signal(Process::Agent, Signal::TERM);
                    injected.then(Undo::Return(at));
                }
            }
            Action::Inject(process, who, what) => {
                for pid in self.processes(process, who) {
                    injected.0.extend(Tracer::attach(pid, what).await?.map(Undo::LetGo));
                }
            }
            Action::Exhaust(process, who, resource) => {
                for pid in self.processes(process, who) {
                    injected.0.extend(Limit::at_what_it_has(pid, resource)?.map(Undo::Limit));
                }
            }
            Action::OutOfMemory(process, who) => {
                for pid in self.processes(process, who) {
                    injected.then(Undo::Memory(Cage::around(pid)?));
                }
            }
            Action::Wait(time) => tokio::time::sleep(time).await,
            _ => return self.inject_around(action, injected).await,
        }
        Ok(())
    }

    /// Injects a fault of what surrounds a node: the network, disks, names, clocks, the coordinator.
    async fn inject_around(&mut self, action: &Action, injected: &mut Injected) -> Result<()> {
        match *action {
            Action::Cut(who, side, direction, cut) => {
                injected.then(Undo::Ways);
                for at in self.targets(who) {
                    self.cut(at, side, direction, cut)?;
                }
            }
            Action::Flap(who, side) => {
                let ways: Vec<_> =
                    self.targets(who).into_iter().flat_map(|at| self.ways(&self.nodes[at].host, side)).collect();
                injected.then(Undo::Repeat(Repeated::new(move || {
                    for (from, to) in &ways {
                        let _ = from.cut_to(to, Cut::Silent);
                        let _ = to.cut_to(from, Cut::Silent);
                    }
                    std::thread::sleep(Duration::from_millis(100));
                    let _ = hosts::heal_all();
                    std::thread::sleep(Duration::from_millis(100));
                })));
                injected.then(Undo::Ways);
            }
            Action::Unplug(who) => {
                for at in self.targets(who) {
                    self.nodes[at].host.link(false)?;
                    injected.then(Undo::Cable(at));
                }
            }
            Action::Fill(place) => self.disks(place, injected, |disk| disk.fill())?,
            Action::ReadOnly(place) => self.disks(place, injected, |disk| disk.read_only(true))?,
            Action::Stall(place) => self.disks(place, injected, super::disk::Disk::freeze)?,
            Action::Names(answers) => {
                injected.then(Undo::Names);
                self.names.answer(answers);
            }
            Action::Clock(who, ahead) => {
                for at in self.targets(who) {
                    self.nodes[at].set_clock(ahead)?;
                    injected.then(Undo::Clock(at));
                }
            }
            Action::Strobe(who) => self.strobe(who, injected).await?,
            Action::KillCoordinator => {
                injected.then(Undo::Coordinator);
                self.coordinator.iter_mut().for_each(Coordinator::kill);
            }
            Action::FreezeCoordinator => {
                injected.then(Undo::ContinueCoordinator);
                self.coordinator.iter().for_each(|coordinator| coordinator.freeze(true));
            }
            Action::CutCoordinator(side) => {
                injected.then(Undo::Ways);
                if let Some(coordinator) = &self.coordinator {
                    for (own, other) in self.ways(&coordinator.host, side) {
                        own.cut_to(&other, Cut::Silent)?;
                        other.cut_to(&own, Cut::Silent)?;
                    }
                }
            }
            _ => return self.inject_store(action, injected).await,
        }
        Ok(())
    }

    /// Sets the clock of each node an hour ahead and an hour back, quickly.
    async fn strobe(&mut self, who: Who, injected: &mut Injected) -> Result<()> {
        for at in self.targets(who) {
            injected.then(Undo::Clock(at));
            for ahead in [3600, -3600, 3600] {
                self.nodes[at].set_clock(ahead)?;
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        }
        Ok(())
    }

    async fn inject_store(&mut self, action: &Action, injected: &mut Injected) -> Result<()> {
        match *action {
            Action::KillStore(which) => {
                injected.then(Undo::Members);
                for at in self.members(which).await? {
                    self.cluster.kill(at);
                }
            }
            Action::FreezeStore(which) => {
                for at in self.members(which).await? {
                    self.cluster.freeze(at, true);
                    injected.then(Undo::ContinueMember(at));
                }
            }
            Action::InjectStore(which, what) => {
                for at in self.members(which).await? {
                    if let Some(pid) = self.cluster.pid(at) {
                        injected.0.extend(Tracer::attach(pid, what).await?.map(Undo::LetGo));
                    }
                }
            }
            Action::CutMember(which) => {
                injected.then(Undo::Ways);
                for at in self.members(which).await? {
                    let member = &self.cluster.members[at].host;
                    for other in self.cluster.members.iter().filter(|other| other.host.name != member.name) {
                        member.cut_to(&other.host, Cut::Silent)?;
                        other.host.cut_to(member, Cut::Silent)?;
                    }
                }
            }
            Action::ReplaceMember(which) => {
                for at in self.members(which).await? {
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
                injected.then(Undo::Renew(holder));
                self.cluster.renew(holder, true)?;
            }
            Action::TakeRights => {
                injected.then(Undo::Rights);
                let (secrets, mut client) = self.cluster.users().await?;
                secrets.rights(&mut client, false).await?;
            }
            Action::ForgetTokens => {
                let (secrets, mut client) = self.cluster.users().await?;
                secrets.forget_tokens(&mut client).await?;
            }
            Action::Compact => self.cluster.compact().await?,
            Action::NoSpace => {
                injected.then(Undo::Space);
                self.cluster.no_space(true).await?;
            }
            Action::MoveLeader => self.cluster.move_leader().await?,
            Action::Defragment => self.cluster.defragment().await?,
            Action::RevokeLeases => self.cluster.revoke_leases().await?,
            _ => return self.inject_record(action).await,
        }
        Ok(())
    }

    /// Changes a record of the job in the store.
    async fn inject_record(&mut self, action: &Action) -> Result<()> {
        match *action {
            Action::Delete(key) => self.delete(&format!("{}{key}", self.keys.root())).await?,
            Action::DeleteNode => {
                let key = self.node_key();
                if let Some(key) = key {
                    self.delete(&key).await?;
                }
            }
            Action::Overwrite(key, value) => self.put(&format!("{}{key}", self.keys.root()), value).await?,
            Action::OverwriteNode(value) => {
                if let Some(key) = self.node_key() {
                    self.put(&key, value).await?;
                }
            }
            _ => {}
        }
        Ok(())
    }

    async fn delete(&self, key: &str) -> Result<()> {
        let revision = self.cluster.delete(key).await?;
        self.observer.events().ours.insert(revision);
        Ok(())
    }

    async fn put(&self, key: &str, value: &str) -> Result<()> {
        let revision = self.cluster.put(key, value).await?;
        self.observer.events().ours.insert(revision);
        Ok(())
    }

    fn node_key(&self) -> Option<String> {
        let name = self.targets(Who::Follower).first().map(|&at| self.nodes[at].host.name.clone())?;
        let events = self.observer.events();
        let node = events.nodes().into_iter().find(|node| node.name == name)?;
        Some(self.keys.node(&node.id()))
    }

    pub(crate) async fn undo(&mut self, injected: Injected) -> Result<()> {
        for undo in injected.0 {
            match undo {
                Undo::Continue(pid) => send(pid, Signal::CONT),
                Undo::LetGo(tracer) => drop(tracer),
                Undo::Limit(limit) => limit.give_back()?,
                Undo::Repeat(repeated) => drop(repeated),
                Undo::Memory(cage) => drop(cage),
                Undo::Renew(holder) => self.cluster.renew(holder, false)?,
                Undo::Rights => {
                    let (secrets, mut client) = self.cluster.users().await?;
                    secrets.rights(&mut client, true).await?;
                }
                Undo::Ways => hosts::heal_all()?,
                Undo::Cable(at) => self.nodes[at].host.link(true)?,
                Undo::Disk(at) => self.nodes[at].disk.repair()?,
                Undo::Checkpoints => self.checkpoints.repair()?,
                Undo::Names => self.names.answer(Answers::Right),
                Undo::Clock(at) => self.nodes[at].set_clock(0)?,
                Undo::ContinueMember(at) => self.cluster.freeze(at, false),
                Undo::Members => self.cluster.revive()?,
                Undo::Space => self.cluster.no_space(false).await?,
                Undo::Return(at) => self.again.push(at),
                Undo::Coordinator => {
                    self.coordinator.as_mut().map(Coordinator::revive).transpose()?;
                }
                Undo::ContinueCoordinator => {
                    self.coordinator.iter().for_each(|coordinator| coordinator.freeze(false));
                }
            }
        }
        Ok(())
    }

    fn processes(&self, process: Process, who: Who) -> Vec<u32> {
        self.targets(who).into_iter().flat_map(|at| self.nodes[at].processes(process)).collect()
    }

    /// The nodes of `who` that run.
    fn targets(&self, who: Who) -> Vec<usize> {
        let up: Vec<usize> = (0..self.nodes.len()).filter(|&at| self.nodes[at].is_up()).collect();
        let leader = self.observer.events().leader();
        let leads = |at: &usize| leader.as_ref().is_some_and(|leader| *leader == self.nodes[*at].host.name);
        // The node that is spared counts as the leader, whichever node leads now.
        let leads = |at: &usize| if self.spared.is_some() { self.spared == Some(*at) } else { leads(at) };
        let leading: Vec<usize> = up.iter().copied().filter(leads).collect();
        // Without a leader, the first node counts as one.
        let leading = if leading.is_empty() { up.iter().copied().take(1).collect() } else { leading };
        let following: Vec<usize> = up.iter().copied().filter(|at| !leading.contains(at)).take(1).collect();
        match who {
            Who::Leader => leading,
            Who::Follower => following,
            Who::LeaderAndFollower => [leading, following].concat(),
            Who::All => up,
        }
    }

    async fn members(&self, which: Which) -> Result<Vec<usize>> {
        let all: Vec<usize> = (0..self.cluster.members.len()).collect();
        if which == Which::All {
            return Ok(all);
        }
        let leader = self.cluster.leader().await?;
        let following: Vec<usize> = all.into_iter().filter(|&at| at != leader).collect();
        Ok(match which {
            Which::Leader => vec![leader],
            Which::Follower => following[..1].to_vec(),
            _ => vec![leader, following[0]],
        })
    }

    fn ways(&self, own: &hosts::Host, side: Side) -> Vec<(hosts::Host, hosts::Host)> {
        let store = self.cluster.members.iter().map(|member| &member.host);
        let peers = self.nodes.iter().map(|node| &node.host).filter(|host| host.name != own.name);
        let others: Vec<&hosts::Host> = match side {
            Side::Store => store.collect(),
            Side::Peers => peers.collect(),
            Side::World => store.chain(peers).collect(),
        };
        others.into_iter().map(|other| (own.clone(), other.clone())).collect()
    }

    fn cut(&self, at: usize, side: Side, direction: Direction, cut: Cut) -> Result<()> {
        for (own, other) in self.ways(&self.nodes[at].host, side) {
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
                injected.then(Undo::Checkpoints);
                fails(&mut self.checkpoints)
            }
            Place::Own(who) => {
                for at in self.targets(who) {
                    injected.then(Undo::Disk(at));
                    fails(&mut self.nodes[at].disk)?;
                }
                Ok(())
            }
        }
    }
}
