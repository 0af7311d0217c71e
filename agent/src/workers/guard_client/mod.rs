//! The agent's async view of its workers: starts them, reports whether they started and how they ended, stops them all.
//! What an end means is decided in `group.rs`.
//!
//! A driver holds one [`GuardClient`] and waits for [`GuardClient::next_event`] beside its other sources. Every method
//! may be cancelled. Nothing here runs at intervals: the guard reports. Timers are the grace of a stop, and the time in
//! which the guard must confirm a kill.

mod adopted;
mod confirmation;
mod error;
mod event;
mod nursery;
mod orphans;
mod requests;
mod watch;

use std::collections::{BTreeMap, VecDeque};
use std::ffi::OsString;
use std::future;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::time::Duration;

use elastic_rendezvous::time::Time;
use futures::future::OptionFuture;
use rustix::process::{Pid, Signal};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::task::JoinSet;
use tokio::time::Instant;

use crate::guard::wire::{self, Channel, GuardRequest, Notice, WorkerId};
use crate::guard::{Guard, tree};
use crate::machine::cpus::CpuSet;
use crate::output::logs::Stdio;

pub(crate) use error::Refused;
pub use error::{GuardClientError, SpawnError};
pub use event::{Event, Exited};
pub(crate) use nursery::command_line;
pub(crate) use watch::readable;

use confirmation::Confirmation;
use error::SpawnAttempt;
use requests::Requests;

/// How long what succeeded workers left may take to end, before it is named.
const LEFT_NOTICE: Duration = Duration::from_millis(300);

/// A process that still lives this long after SIGKILL is reported.
const SURVIVOR_NOTICE: Duration = Duration::from_secs(5);

/// The worker to start.
#[derive(Debug)]
pub struct WorkerSpec {
    /// Which worker of this node.
    pub local_rank: u32,
    /// Program and arguments. A program without `/` is searched in the PATH of `env`.
    pub argv: Vec<OsString>,
    /// The whole environment. Nothing is inherited.
    pub env: BTreeMap<OsString, OsString>,
    /// The working directory.
    pub cwd: PathBuf,
    /// Where the worker's output goes. Its standard input is the agent's.
    pub stdio: Stdio,
    /// The CPUs that the worker may run on. If empty, these are the agent's.
    pub cpus: CpuSet,
}

/// Owns the guard, and through it all workers of this node. Dropping it ends them.
#[derive(Debug)]
pub struct GuardClient {
    guard: Pid,
    link: Link,
    next_id: u64,
    /// All workers since the process tree was last empty.
    workers: BTreeMap<WorkerId, u32>,
    /// Workers that were asked for. The guard has not answered yet.
    asked: BTreeMap<WorkerId, SpawnAttempt>,
    events: VecDeque<Event>,
    /// Whether some process below the guard may be alive.
    populated: bool,
    stopping: Option<Stopping>,
    confirmation: Confirmation,
    /// The process that workers are forked from, if there is one.
    nursery: Option<Pid>,
    /// What reaps orphans, if this is process 1.
    _reaper: JoinSet<()>,
}

#[derive(Debug)]
enum Link {
    Up {
        socket: AsyncFd<Channel>,
        /// Requests that the socket has no room for.
        requests: Requests,
    },
    /// The guard has ended, or was killed. What is left is ended until this time, and then named.
    Broken { until: Instant, cause: Option<String> },
    /// Something is left, and was named.
    Haunted,
    /// Nothing is left.
    Down,
}

#[derive(Debug)]
struct Stopping {
    signal: Signal,
    phase: StopPhase,
}

#[derive(Debug, Clone, Copy)]
enum StopPhase {
    /// The workers have succeeded. What they left gets the stop signal at `until`, and SIGKILL `grace` later. It is
    /// named at `name_at`.
    Left { name_at: Option<Instant>, until: Instant, grace: Duration },
    /// SIGKILL is sent at this time.
    Grace(Instant),
    /// SIGKILL was sent. Survivors are named at this time.
    Killed(Instant),
    /// The survivors were named.
    Named,
}

impl GuardClient {
    /// Takes over the guard. Must be called within a tokio runtime.
    pub fn new(guard: Guard) -> Result<GuardClient, GuardClientError> {
        let both = Interest::READABLE | Interest::WRITABLE;
        let socket = watch::registered(guard.channel, both).map_err(GuardClientError::Connection)?;
        let mut reaper = JoinSet::new();
        if rustix::process::getpid().is_init() {
            reaper.spawn(adopted::reap(guard.pid));
        }
        Ok(GuardClient {
            guard: guard.pid,
            link: Link::Up { socket, requests: Requests::new() },
            next_id: 0,
            workers: BTreeMap::new(),
            asked: BTreeMap::new(),
            events: VecDeque::new(),
            populated: false,
            stopping: None,
            confirmation: Confirmation::default(),
            nursery: None,
            _reaper: reaper,
        })
    }

    /// Asks the guard to start a worker. [`Event::Started`] or [`Event::NotStarted`] follows, however long it takes to
    /// read the program. Several workers may be asked for at once. No event follows an error.
    pub fn begin_spawn(&mut self, spec: WorkerSpec) -> Result<(), SpawnError> {
        if self.stopping.is_some() {
            return Err(SpawnError::Stopping);
        }
        let Link::Up { .. } = self.link else { return Err(GuardClientError::GuardLost.into()) };
        let asked = SpawnAttempt::new(&spec)?;
        let worker = WorkerId(self.next_id);
        self.next_id += 1;
        let WorkerSpec { local_rank, argv, env, cwd, stdio, cpus } = spec;
        let arguments = argv.len();
        let body = body_of(cwd, argv, env)?;
        let (stdout, stderr) = (stdio.stdout.is_some(), stdio.stderr.is_some());
        let descriptors = [Some(body), stdio.stdout, stdio.stderr].into_iter().flatten().collect();
        self.send(GuardRequest::Spawn { worker, arguments, stdout, stderr, cpus: cpus.mask() }, descriptors);
        self.workers.insert(worker, local_rank);
        self.asked.insert(worker, asked);
        Ok(())
    }

    /// The next event. Never ends. After [`Event::GuardLost`] no more events come.
    pub async fn next_event(&mut self) -> Event {
        loop {
            if let Some(event) = self.events.pop_front() {
                return event;
            }
            self.turn().await;
        }
    }

    /// Removes the exits that are known by now from the pending events, and returns them. Does not wait.
    pub async fn exited_meanwhile(&mut self) -> Vec<Exited> {
        while tokio::time::timeout(Duration::ZERO, self.turn()).await.is_ok() {}
        let mut exits = Vec::new();
        self.events.retain(|event| match event {
            Event::Exited(exited) => {
                exits.push(*exited);
                false
            }
            _ => true,
        });
        exits
    }

    /// Signals the process group of one worker: the worker that was last started with this local rank. The group is
    /// signalled even if the worker has exited and left other processes in it. If there is no such worker, nothing
    /// happens.
    pub fn signal(&mut self, local_rank: u32, signal: Signal) {
        let worker = self.workers.iter().rev().find(|(_, rank)| **rank == local_rank).map(|(id, _)| *id);
        if let Some(worker) = worker {
            self.send(GuardRequest::Signal { worker, signal: signal.as_raw() }, Vec::new());
        }
    }

    /// Begins to stop everything. Sends `signal` to the workers' process groups, without helpers of programs that handle
    /// it. Once the last worker has exited, also sends it to the processes that the workers left outside their groups.
    /// After `grace`, sends SIGKILL to whatever is left. If the grace is zero, kills at once. [`Event::Stopped`] comes as
    /// soon as nothing is left. A later call can shorten the grace, but not lengthen it.
    pub fn begin_stop(&mut self, signal: Signal, grace: Duration) {
        if !self.may_be_populated() {
            if self.stopping.is_none() {
                self.events.push_back(Event::Stopped);
            }
            return;
        }
        let phase = self.stopping.as_ref().map(|stopping| (stopping.signal, stopping.phase));
        match phase {
            Some((_, StopPhase::Killed(_) | StopPhase::Named)) => return,
            _ if grace.is_zero() => return self.kill(signal),
            Some((before, StopPhase::Grace(_))) if before == signal => {}
            _ => self.send(GuardRequest::Stop { signal: signal.as_raw() }, Vec::new()),
        }
        let mut kill_at = Instant::now() + grace;
        if let Some((_, StopPhase::Grace(before))) = phase {
            kill_at = kill_at.min(before);
        }
        self.stopping = Some(Stopping { signal, phase: StopPhase::Grace(kill_at) });
    }

    /// Begins to end what workers left that have succeeded. It has `patience` to end by itself, and is then stopped as
    /// by [`GuardClient::begin_stop`]. [`Event::Left`] names it. [`Event::Stopped`] comes as soon as nothing is left.
    pub fn begin_end(&mut self, patience: Duration, signal: Signal, grace: Duration) {
        if !self.may_be_populated() || self.stopping.is_some() {
            return self.begin_stop(signal, grace);
        }
        let (name_at, until) = (Instant::now() + LEFT_NOTICE, Instant::now() + patience);
        let phase = StopPhase::Left { name_at: Some(name_at.min(until)), until, grace };
        self.stopping = Some(Stopping { signal, phase });
    }

    fn may_be_populated(&self) -> bool {
        self.populated || !self.asked.is_empty()
    }

    /// Sets the time at which the guard kills everything, unless a later call moves it. `None`: never.
    pub fn set_deadline(&mut self, until: Option<Time>) {
        let now = elastic_store::clock::now();
        self.confirmation.fence(now, until, self.may_be_populated());
        let (until, sent) = (until.map(|until| until.as_duration()), now.as_duration());
        self.send(GuardRequest::Deadline { until, sent }, Vec::new());
    }

    /// Makes the guard keep a duplicate of this descriptor open until the agent and everything below it are gone. This
    /// is meant for listening sockets and lock files. Fails if this process has no room for the duplicate.
    pub fn hold(&mut self, descriptor: impl AsFd) -> io::Result<()> {
        let duplicate = descriptor.as_fd().try_clone_to_owned()?;
        self.send(GuardRequest::Hold, vec![duplicate]);
        Ok(())
    }

    /// Ends everything at once and waits until the guard has ended.
    pub async fn close(mut self) {
        if let Link::Up { socket, requests } = &mut self.link {
            *requests = Requests::new();
            requests.send(socket.get_ref(), GuardRequest::Kill, Vec::new());
            // If this fails, the guard is gone, and the link ends too.
            let _ = socket.get_ref().finish();
            self.confirmation.ask(elastic_store::clock::now());
        }
        while let Link::Up { .. } = self.link {
            self.turn().await;
        }
        match self.link {
            // It has ended by itself, after everything else.
            Link::Broken { until, cause: None } => drop(orphans::end_of(self.guard, until).await),
            _ => self.clear_orphans().await,
        }
    }

    fn kill(&mut self, signal: Signal) {
        self.send(GuardRequest::Kill, Vec::new());
        self.confirmation.ask(elastic_store::clock::now());
        self.stopping = Some(Stopping { signal, phase: StopPhase::Killed(Instant::now() + SURVIVOR_NOTICE) });
    }

    /// Without the guard this does nothing: its loss ends everything, and is reported.
    fn send(&mut self, request: GuardRequest, descriptors: Vec<OwnedFd>) {
        if let Link::Up { socket, requests } = &mut self.link {
            requests.send(socket.get_ref(), request, descriptors);
        }
    }

    /// Waits for one report of the guard or for a time at which something is due, and handles it.
    async fn turn(&mut self) {
        let now = elastic_store::clock::now();
        let look_at = self.confirmation.wake_at(now, self.may_be_populated());
        let look_at = look_at.map(|at| Instant::now() + at.since(now));
        let (socket, requests) = match &mut self.link {
            Link::Up { socket, requests } => (&*socket, requests),
            Link::Broken { .. } => return self.clear_orphans().await,
            Link::Haunted => {
                orphans::end_all().await;
                self.link = Link::Down;
                self.nothing_is_left();
                return;
            }
            Link::Down => return future::pending().await,
        };
        let due = match self.stopping.as_ref().map(|stopping| stopping.phase) {
            Some(StopPhase::Left { name_at: Some(at), .. } | StopPhase::Left { until: at, .. }) => Some(at),
            Some(StopPhase::Grace(at) | StopPhase::Killed(at)) => Some(at),
            Some(StopPhase::Named) | None => None,
        };
        let waits = !requests.is_empty();
        tokio::select! {
            biased;
            report = receive(socket) => match report {
                Ok(Some(report)) => self.take_in(report),
                Ok(None) | Err(_) => self.lose_guard(None),
            },
            () = requests.pass_on(socket), if waits => {}
            Some(()) = OptionFuture::from(look_at.map(tokio::time::sleep_until)) => {
                if self.confirmation.look(elastic_store::clock::now(), self.may_be_populated()) {
                    self.kill_guard();
                }
            }
            Some(()) = OptionFuture::from(due.map(tokio::time::sleep_until)) => self.stop_further(),
        }
    }

    /// Takes the step of a stop that is due.
    fn stop_further(&mut self) {
        let Some(Stopping { signal, phase }) = &mut self.stopping else { return };
        let signal = *signal;
        match phase {
            StopPhase::Left { name_at: name_at @ Some(_), until, .. } => {
                *name_at = None;
                let patience = until.saturating_duration_since(Instant::now());
                let processes = self.left().iter().map(|process| process.pid.as_raw_pid()).collect();
                self.events.push_back(Event::Left { processes, patience });
            }
            StopPhase::Left { grace, .. } => {
                let grace = *grace;
                self.begin_stop(signal, grace);
            }
            StopPhase::Grace(_) => {
                let left = orphans::describe(&self.left());
                if !left.is_empty() {
                    tracing::warn!("killing what the stop signal has not ended in its time: {}", left.join(", "));
                }
                self.kill(signal);
            }
            StopPhase::Killed(_) | StopPhase::Named => {
                *phase = StopPhase::Named;
                let processes = orphans::describe(&self.left());
                self.events.push_back(Event::Survivors { processes });
            }
        }
    }

    /// The living processes below the guard, without the nursery.
    fn left(&self) -> Vec<tree::Process> {
        let below = tree::descendants_but(self.guard, self.nursery).unwrap_or_default();
        below.into_iter().filter(|process| !process.is_zombie()).collect()
    }

    /// The guard did not confirm a kill. Its end ends the workers.
    fn kill_guard(&mut self) {
        let pid = self.guard.as_raw_pid();
        let state = tree::process(self.guard).map_or('?', |guard| guard.state);
        let cause = format!(
            "it did not confirm for a second that it kills the workers, so this agent killed it (pid {pid}, which was in \
             state {state}; T: stopped by a signal)"
        );
        // It is this process's child and not reaped, so its number is its own.
        let _ = rustix::process::kill_process(self.guard, Signal::KILL);
        // The kernel may hold it up. No process of another user's can be ended here.
        for process in self.left() {
            let _ = process.signal(Signal::KILL);
        }
        self.lose_guard(Some(cause));
    }

    fn lose_guard(&mut self, cause: Option<String>) {
        self.link = Link::Broken { until: Instant::now() + orphans::PATIENCE, cause };
    }

    fn take_in(&mut self, report: Notice) {
        match report {
            Notice::Spawned { worker, pid } => {
                self.populated = true;
                if self.asked.remove(&worker).is_some()
                    && let Some(&local_rank) = self.workers.get(&worker)
                {
                    self.events.push_back(Event::Started { local_rank, pid });
                }
            }
            Notice::Refused { worker, refusal } => {
                if let (Some(local_rank), Some(asked)) = (self.workers.remove(&worker), self.asked.remove(&worker)) {
                    self.events.push_back(Event::NotStarted { local_rank, refused: Refused { asked, refusal } });
                }
                self.check_stopped();
            }
            Notice::Exited { worker, pid, exit, at } => {
                if let Some(local_rank) = self.workers.get(&worker) {
                    let (local_rank, at) = (*local_rank, Time::ZERO + at);
                    self.events.push_back(Event::Exited(Exited { local_rank, pid, exit, at }));
                }
            }
            Notice::Killing => self.confirmation.confirmed(elastic_store::clock::now()),
            Notice::DeadlinePassed { at } => {
                self.confirmation.confirmed(elastic_store::clock::now());
                self.events.push_back(Event::DeadlineKilled { at: Time::ZERO + at });
                let phase = StopPhase::Killed(Instant::now() + SURVIVOR_NOTICE);
                self.stopping = Some(Stopping { signal: Signal::KILL, phase });
            }
            Notice::TreeGone => {
                self.workers.retain(|worker, _| self.asked.contains_key(worker));
                self.confirmation.gone();
                self.nothing_is_left();
            }
            nursery => self.hear_of_nursery(nursery),
        }
    }

    fn nothing_is_left(&mut self) {
        self.populated = false;
        self.check_stopped();
    }

    fn check_stopped(&mut self) {
        if !self.may_be_populated() && self.stopping.take().is_some() {
            self.events.push_back(Event::Stopped);
        }
    }

    /// Ends what the guard left. Only when nothing is left can a stop be over.
    async fn clear_orphans(&mut self) {
        let Link::Broken { until, cause } = &mut self.link else { return };
        let ended = orphans::end_of(self.guard, *until).await;
        let cause = cause.get_or_insert(ended).clone();
        let survivors = orphans::clear(*until).await;
        self.asked.clear();
        self.events.push_back(Event::GuardLost { cause, survivors: survivors.clone() });
        if survivors.is_empty() {
            self.link = Link::Down;
            self.nothing_is_left();
        } else {
            // They may be a worker's.
            (self.link, self.populated) = (Link::Haunted, true);
        }
    }
}

fn body_of(cwd: PathBuf, argv: Vec<OsString>, env: BTreeMap<OsString, OsString>) -> Result<OwnedFd, SpawnError> {
    let variables = env.into_iter().map(|(mut name, value)| {
        name.push("=");
        name.push(value);
        name
    });
    let strings = [cwd.into_os_string()].into_iter().chain(argv).chain(variables);
    wire::write_body(strings).map_err(SpawnError::NoRoom)
}

async fn receive(socket: &AsyncFd<Channel>) -> io::Result<Option<Notice>> {
    let report = socket.async_io(Interest::READABLE, |channel| channel.receive::<Notice>()).await?;
    Ok(report.map(|(report, _)| report))
}
