//! What all nodes share: the clock, etcd, and the workers, whose collectives break when a peer of theirs stops. It keeps
//! what must hold at every moment.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Duration;

use elastic_rendezvous::job::FailureClass;
use elastic_rendezvous::time::Time;
use elastic_torchelastic::{Input, RendezvousState};
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use tokio::sync::mpsc::UnboundedSender;
use tokio::time::{Instant, sleep};

use crate::etcd::{EXPIRY, Etcd};
use crate::network::Weather;
use crate::ours::ended;

/// How long an agent of ours may continue in a version that has ended, while etcd answers.
const BEHIND: Duration = Duration::from_secs(10);
/// How often the test checks the world.
const LOOK: Duration = Duration::from_millis(50);

/// A place that workers were started in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Seat {
    pub(crate) version: u64,
    pub(crate) group_rank: u32,
    pub(crate) size: u32,
    pub(crate) first: u32,
    pub(crate) slots: u32,
    pub(crate) world_size: u32,
    pub(crate) master: String,
}

/// How a node's workers are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Worker {
    None,
    Runs,
    Done,
    Failed(FailureClass),
}

/// How an agent ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Exit {
    Succeeded,
    Drained,
    Closed,
    Failed(&'static str),
    Ended(String),
}

struct Running {
    seat: Seat,
    worker: Worker,
    since: Instant,
    /// An agent of ours hears of its workers by this.
    agent: Option<UnboundedSender<Input>>,
    /// When its collectives break.
    fuse: Option<Instant>,
    /// Since when its version is no more.
    behind: Option<Instant>,
    stopping: bool,
}

pub(crate) struct Inner {
    begun: Instant,
    pub(crate) etcd: Rc<RefCell<Etcd>>,
    pub(crate) weather: Rc<RefCell<Weather>>,
    running: RefCell<BTreeMap<String, Running>>,
    seats: RefCell<BTreeMap<u64, BTreeMap<String, Seat>>>,
    /// Members of a version that have stopped, however they ended.
    left: RefCell<BTreeMap<u64, u32>>,
    random: RefCell<SmallRng>,
    breach: RefCell<Option<(&'static str, String)>>,
    story: RefCell<Option<Vec<String>>>,
    closed: Cell<bool>,
    finishing: Cell<bool>,
    pub(crate) min: u32,
    pub(crate) max: u32,
    pub(crate) last_call: Duration,
    pub(crate) timeout: Duration,
}

/// The world; clones are the same.
#[derive(Clone)]
pub(crate) struct World(Rc<Inner>);

impl std::ops::Deref for World {
    type Target = Inner;
    fn deref(&self) -> &Inner {
        &self.0
    }
}

impl World {
    pub(crate) fn new(seed: u64, nodes: (u32, u32), last_call: Duration, telling: bool) -> World {
        let (min, max) = nodes;
        World(Rc::new(Inner {
            begun: Instant::now(),
            etcd: Rc::new(RefCell::new(Etcd::new())),
            weather: Rc::new(RefCell::new(Weather { slow: 0.0, loss: 0.0 })),
            running: RefCell::default(),
            seats: RefCell::default(),
            left: RefCell::default(),
            random: RefCell::new(SmallRng::seed_from_u64(seed ^ 0x5eed)),
            breach: RefCell::default(),
            story: RefCell::new(telling.then(Vec::new)),
            closed: Cell::new(false),
            finishing: Cell::new(false),
            min,
            max,
            last_call,
            timeout: Duration::from_secs(900),
        }))
    }

    pub(crate) fn now(&self) -> Time {
        // Not from zero, which means never.
        Time::from_millis(1_000) + self.begun.elapsed()
    }

    pub(crate) fn instant(&self, at: Time) -> Instant {
        self.begun + at.since(Time::from_millis(1_000))
    }

    pub(crate) fn tell(&self, who: &str, line: &str) {
        if let Some(story) = self.story.borrow_mut().as_mut() {
            story.push(format!("{:9.3} {who}: {line}", self.begun.elapsed().as_secs_f64()));
        }
    }

    pub(crate) fn story(&self) -> String {
        self.story.borrow().as_ref().map(|story| story.join("\n")).unwrap_or_default()
    }

    pub(crate) fn break_promise(&self, promise: &'static str, what: String) {
        self.tell("breach", &what);
        self.breach.borrow_mut().get_or_insert((promise, what));
    }

    pub(crate) fn breach(&self) -> Option<(&'static str, String)> {
        self.breach.borrow().clone()
    }

    pub(crate) fn etcd_is_away(&self) -> bool {
        self.etcd.borrow().is_away()
    }

    pub(crate) fn closed_by_torchrun(&self) {
        self.tell("torchrun", "has failed, and closed the rendezvous");
        self.closed.set(true);
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.closed.get()
    }

    /// Workers that run long enough end well from now on.
    pub(crate) fn finish(&self) {
        self.finishing.set(true);
    }

    pub(crate) fn worker(&self, name: &str) -> Worker {
        self.running.borrow().get(name).map_or(Worker::None, |running| running.worker)
    }

    fn up_to(&self, most: Duration) -> Duration {
        most.mul_f64(self.random.borrow_mut().random())
    }

    /// All workers of a node start.
    pub(crate) fn started(&self, name: &str, seat: Seat, agent: Option<UnboundedSender<Input>>) {
        self.tell(name, &format!("starts {seat:?}"));
        let mut seats = self.seats.borrow_mut();
        let others = seats.entry(seat.version).or_default();
        for (other, its) in others.iter().filter(|(other, _)| *other != name) {
            let apart = seat.first + seat.slots <= its.first || its.first + its.slots <= seat.first;
            let agree = (seat.size, seat.world_size, &seat.master) == (its.size, its.world_size, &its.master);
            if seat.group_rank == its.group_rank || !apart || !agree {
                self.break_promise("agreement", format!("{name} has {seat:?}, and {other} has {its:?}"));
            }
        }
        if seat.group_rank >= seat.size || seat.first + seat.slots > seat.world_size {
            self.break_promise("agreement", format!("{name} has {seat:?}"));
        }
        others.insert(name.to_owned(), seat.clone());
        let running = Running {
            seat,
            worker: Worker::Runs,
            since: Instant::now(),
            agent,
            fuse: None,
            behind: None,
            stopping: false,
        };
        self.running.borrow_mut().insert(name.to_owned(), running);
    }

    /// The agent tells its workers to stop.
    pub(crate) fn stopping(&self, name: &str) {
        if let Some(running) = self.running.borrow_mut().get_mut(name) {
            running.stopping = true;
        }
    }

    /// None of them is left.
    pub(crate) fn stopped(&self, name: &str) {
        if let Some(running) = self.running.borrow_mut().remove(name) {
            self.tell(name, "its workers are gone");
            if running.worker != Worker::Done {
                *self.left.borrow_mut().entry(running.seat.version).or_default() += 1;
            }
        }
    }

    fn ends(&self, name: &str, running: &mut Running, worker: Worker) {
        self.tell(name, &format!("its workers: {worker:?}"));
        running.worker = worker;
        if let Some(agent) = &running.agent {
            let failed = if let Worker::Failed(class) = worker { Some(class) } else { None };
            let _ = agent.send(ended(running.seat.version, failed));
        }
    }

    /// A worker of this node fails by itself.
    pub(crate) fn fail(&self, name: &str) {
        if let Some(running) = self.running.borrow_mut().get_mut(name).filter(|it| it.worker == Worker::Runs) {
            self.ends(name, running, Worker::Failed(FailureClass::Own));
        }
    }

    /// The one version that all these nodes work in, for at least so long.
    pub(crate) fn works(&self, names: &[String], size: u32, for_at_least: Duration) -> Option<u64> {
        let running = self.running.borrow();
        let mut at_work = names.iter().filter_map(|name| running.get(name));
        let first = at_work.next()?;
        let well = |it: &Running| {
            it.worker == Worker::Runs
                && !it.stopping
                && it.since.elapsed() >= for_at_least
                && (it.seat.version, it.seat.size) == (first.seat.version, size)
        };
        (well(first) && at_work.filter(|it| well(it)).count() as u32 + 1 == size).then_some(first.seat.version)
    }

    /// Looks after workers and promises for ever.
    pub(crate) async fn look_after(self) {
        let mut expiry = Instant::now();
        loop {
            sleep(LOOK).await;
            if expiry.elapsed() >= EXPIRY {
                expiry = Instant::now();
                self.etcd.borrow_mut().expire(expiry);
            }
            self.look();
        }
    }

    fn look(&self) {
        let away = self.etcd_is_away();
        let newest = {
            let etcd = self.etcd.borrow();
            let raw = etcd.value("/torchelastic/p2p/run_job/rdzv/active_version");
            raw.and_then(|raw| RendezvousState::parse(raw).ok()).and_then(|state| state.version?.parse::<u64>().ok())
        };
        let seats = self.seats.borrow();
        let left = self.left.borrow();
        let now = Instant::now();
        for (name, running) in self.running.borrow_mut().iter_mut() {
            let version = running.seat.version;
            if running.worker == Worker::Runs && !running.stopping {
                let here = seats.get(&version).map_or(0, BTreeMap::len) as u32;
                let slow = here < running.seat.size && running.since.elapsed() > Duration::from_secs(8);
                if left.get(&version).is_some_and(|left| *left > 0) || slow {
                    let fuse = *running
                        .fuse
                        .get_or_insert_with(|| now + Duration::from_millis(200) + self.up_to(Duration::from_secs(3)));
                    if now >= fuse {
                        self.ends(name, running, Worker::Failed(FailureClass::Peer));
                    }
                } else if self.finishing.get() && here == running.seat.size {
                    let fuse = *running.fuse.get_or_insert_with(|| now + self.up_to(Duration::from_secs(2)));
                    if now >= fuse {
                        self.ends(name, running, Worker::Done);
                    }
                }
            }
            let behind = newest != Some(version) && running.agent.is_some() && !running.stopping;
            if !behind || away {
                running.behind = None;
            } else if now - *running.behind.get_or_insert(now) > BEHIND {
                let what = format!("{name} works in {version} and the newest is {newest:?}");
                self.break_promise("no life in a world that was replaced", what);
                running.behind = None;
            }
        }
    }
}
