//! One schedule: which nodes there are, which faults happen, and what must hold in the end.

use std::time::Duration;

use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use tokio::runtime::Builder;
use tokio::sync::mpsc::{UnboundedSender, unbounded_channel};
use tokio::task::{JoinHandle, LocalSet};
use tokio::time::{Instant, sleep};

use crate::network::{Client, Weather};
use crate::ours::{Order, Ours};
use crate::torchrun::Torchrun;
use crate::world::{Exit, World};

/// How long faults continue.
const TROUBLE: Duration = Duration::from_secs(45);
/// How soon a group must be at work after the last fault: torchrun's agents may be stuck for five minutes, and then fail.
const SETTLED: Duration = Duration::from_secs(400);
/// How soon all must have ended after the workers' work is done: torchrun's exit barrier takes five minutes.
const ENDED: Duration = Duration::from_secs(400);

/// How a schedule went.
pub(crate) struct Ran {
    pub(crate) breach: Option<(&'static str, String)>,
    pub(crate) scenario: String,
    pub(crate) story: String,
    /// Both kinds were there.
    pub(crate) mixed: bool,
    pub(crate) closed_by_torchrun: bool,
    pub(crate) versions: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Ours,
    Torchrun,
}

/// A machine whose agent is started again whenever it has ended.
struct Machine {
    number: usize,
    kind: Kind,
    slots: u32,
    starts: u32,
    agent: Option<Agent>,
    /// When the next agent starts.
    start_at: Option<Instant>,
}

struct Agent {
    name: String,
    task: JoinHandle<Exit>,
    orders: Option<UnboundedSender<Order>>,
}

/// Plays a seed in virtual time.
pub(crate) fn play(seed: u64, telling: bool) -> Ran {
    let runtime = Builder::new_current_thread().enable_time().start_paused(true).build().expect("a runtime");
    LocalSet::new().block_on(&runtime, async {
        let mut schedule = Schedule::new(seed, telling);
        schedule.run().await;
        let Schedule { world, scenario, machines, .. } = schedule;
        let counter = world.etcd.borrow().value("/torchelastic/p2p/run_job/rdzv/version_counter").map(str::to_owned);
        let has = |kind| machines.iter().any(|machine| machine.kind == kind);
        Ran {
            breach: world.breach(),
            scenario,
            story: world.story(),
            mixed: has(Kind::Ours) && has(Kind::Torchrun),
            closed_by_torchrun: world.is_closed(),
            versions: counter.and_then(|counter| counter.parse().ok()).unwrap_or(0),
        }
    })
}

struct Schedule {
    world: World,
    random: SmallRng,
    machines: Vec<Machine>,
    scenario: String,
    /// Agents are started again, whatever they ended with.
    restless: bool,
}

impl Schedule {
    fn new(seed: u64, telling: bool) -> Schedule {
        let mut random = SmallRng::seed_from_u64(seed);
        let count = random.random_range(1..=4usize);
        let share = [0.0, 0.3, 0.5, 0.7][random.random_range(0..4)];
        let kinds: Vec<Kind> = (0..count)
            .map(|number| if number > 0 && random.random_bool(share) { Kind::Torchrun } else { Kind::Ours })
            .collect();
        // A spare of torchrun's has the group stopped and formed again for ever, so there are spares of ours alone.
        let all_ours = kinds.iter().all(|kind| *kind == Kind::Ours);
        let spare = all_ours && count > 1 && random.random_bool(0.3);
        let max = count as u32 - u32::from(spare);
        let min = if random.random_bool(0.4) { max } else { random.random_range(1..=max) };
        // torchrun's own is 30 s; one that is shorter than the second after which it looks again never gets it in.
        let shortest = if all_ours { 0 } else { 2_500 };
        let last_call = Duration::from_millis(random.random_range(shortest..6_000));
        let world = World::new(seed, (min, max), last_call, telling);
        let scenario = format!("{kinds:?}, nodes {min}:{max}, last call {last_call:?}");
        let machines = kinds.into_iter().enumerate().map(|(number, kind)| Machine {
            number,
            kind,
            slots: random.random_range(1..=3),
            starts: 0,
            agent: None,
            start_at: Some(Instant::now() + Duration::from_millis(random.random_range(0..8_000))),
        });
        let machines = machines.collect();
        Schedule { world, random, machines, scenario, restless: true }
    }

    fn up_to(&mut self, ms: u64) -> Duration {
        Duration::from_millis(self.random.random_range(0..ms.max(1)))
    }

    async fn run(&mut self) {
        tokio::task::spawn_local(self.world.clone().look_after());
        *self.world.weather.borrow_mut() = match self.random.random_range(0..4) {
            0 => Weather { slow: 0.0, loss: 0.0 },
            1 => Weather { slow: 0.1, loss: 0.0 },
            2 => Weather { slow: 0.02, loss: 0.02 },
            _ => Weather { slow: 0.05, loss: 0.05 },
        };
        let calm = self.random.random_bool(0.1);
        let until = Instant::now() + TROUBLE;
        let mut next = Instant::now() + self.up_to(10_000);
        while Instant::now() < until {
            if Instant::now() >= next && !calm {
                self.befall().await;
                next = Instant::now() + self.up_to(9_000);
            }
            if self.step(Duration::from_millis(50)).await {
                return;
            }
        }
        *self.world.weather.borrow_mut() = Weather { slow: 0.0, loss: 0.0 };
        self.settle().await;
    }

    /// Lets time pass; whether the schedule is over.
    async fn step(&mut self, time: Duration) -> bool {
        for at in 0..self.machines.len() {
            self.look_after(at).await;
        }
        sleep(time).await;
        self.world.breach().is_some()
    }

    async fn look_after(&mut self, at: usize) {
        let ended = self.machines[at].agent.as_ref().is_some_and(|agent| agent.task.is_finished());
        if ended && self.restless {
            let Some(agent) = self.machines[at].agent.take() else { return };
            let exit = agent.task.await.expect("an agent's end");
            self.world.tell(&agent.name, &format!("has ended: {exit:?}"));
            let drained = exit == Exit::Drained;
            if self.machines[at].kind == Kind::Ours && !drained && !self.world.is_closed() {
                self.world.break_promise("no end without cause", format!("{} ended: {exit:?}", agent.name));
            }
            let pause = self.up_to(5_000);
            self.machines[at].start_at = Some(Instant::now() + pause);
        }
        if self.machines[at].start_at.is_some_and(|start| start <= Instant::now()) {
            self.start(at);
        }
    }

    fn start(&mut self, at: usize) {
        let seed = self.random.random();
        let machine = &mut self.machines[at];
        machine.starts += 1;
        machine.start_at = None;
        let kind = if machine.kind == Kind::Ours { "ours" } else { "torchrun" };
        let name = format!("{kind}{}.{}", machine.number, machine.starts);
        self.world.tell(&name, "starts");
        let client = Client::new(self.world.etcd.clone(), self.world.weather.clone(), seed);
        let (world, slots) = (self.world.clone(), machine.slots);
        let (orders, task) = match machine.kind {
            Kind::Ours => {
                let (sender, orders) = unbounded_channel();
                let agent = Ours { world, client, name: name.clone(), slots, seed, orders };
                (Some(sender), tokio::task::spawn_local(agent.run()))
            }
            Kind::Torchrun => {
                let agent = Torchrun::new(world, client, name.clone(), slots);
                (None, tokio::task::spawn_local(agent.run()))
            }
        };
        machine.agent = Some(Agent { name, task, orders });
    }

    /// SIGKILL of an agent, and the end of its workers.
    async fn kill(&mut self, at: usize) {
        let Some(agent) = self.machines[at].agent.take() else { return };
        self.world.tell(&agent.name, "is killed");
        agent.task.abort();
        let _ = agent.task.await;
        self.world.stopped(&agent.name);
        let pause = self.up_to(15_000);
        self.machines[at].start_at = Some(Instant::now() + pause);
    }

    async fn befall(&mut self) {
        let at = self.random.random_range(0..self.machines.len());
        match self.random.random_range(0..100) {
            0..30 => self.kill(at).await,
            30..60 => {
                if let Some(agent) = &self.machines[at].agent {
                    self.world.fail(&agent.name.clone());
                }
            }
            60..75 => {
                let order =
                    self.machines[at].agent.as_ref().and_then(|agent| Some((&agent.name, agent.orders.as_ref()?)));
                if let Some((name, orders)) = order {
                    self.world.tell(name, "is asked to leave");
                    let _ = orders.send(Order::Drain);
                }
            }
            75..85 => {
                self.world.tell("etcd", "forgets its history");
                self.world.etcd.borrow_mut().clear_history();
            }
            _ => {
                let long = self.random.random_bool(0.5);
                let time = self.up_to(if long { 20_000 } else { 3_000 });
                self.world.tell("etcd", &format!("goes away for {time:?}"));
                self.world.etcd.borrow_mut().set_away(true);
                let world = self.world.clone();
                tokio::task::spawn_local(async move {
                    sleep(time).await;
                    world.tell("etcd", "is back");
                    world.etcd.borrow_mut().set_away(false);
                });
            }
        }
    }

    fn names(&self) -> Vec<String> {
        self.machines.iter().filter_map(|machine| Some(machine.agent.as_ref()?.name.clone())).collect()
    }

    /// After the last fault a group comes to work, and ends well, everywhere.
    async fn settle(&mut self) {
        let size = self.world.max.min(self.machines.len() as u32);
        let until = Instant::now() + SETTLED;
        loop {
            if self.step(Duration::from_millis(200)).await || self.world.is_closed() {
                return;
            }
            let all = self.machines.iter().all(|machine| machine.agent.is_some());
            if all && self.world.works(&self.names(), size, Duration::from_secs(6)).is_some() {
                break;
            }
            if Instant::now() > until {
                return self.world.break_promise("progress", format!("no group of {size} nodes within {SETTLED:?}"));
            }
        }
        self.world.tell("schedule", "the work is done");
        self.restless = false;
        self.world.finish();
        let until = Instant::now() + ENDED;
        while !self.machines.iter().all(|machine| machine.agent.as_ref().is_some_and(|agent| agent.task.is_finished()))
        {
            if self.step(Duration::from_millis(200)).await {
                return;
            }
            if Instant::now() > until {
                return self.world.break_promise("one end", format!("not all have ended within {ENDED:?}"));
            }
        }
        for machine in &mut self.machines {
            let Some(agent) = machine.agent.take() else { continue };
            let exit = agent.task.await.expect("an agent's end");
            if exit != Exit::Succeeded {
                self.world.break_promise("one end", format!("{} ended with {exit:?}", agent.name));
            }
        }
    }
}
