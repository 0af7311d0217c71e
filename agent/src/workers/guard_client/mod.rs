//! The agent's async view of its workers: starts them, reports whether they started and how they ended, stops them all.
//! What an end means is decided in `group.rs`.
//!
//! A driver holds one [`GuardClient`] and waits for [`GuardClient::next_event`] beside its other sources. Every method
//! may be cancelled. Nothing here runs at intervals: the guard reports, and the only timer is the grace of a stop.

mod error;
mod orphans;
mod watch;

use std::collections::{BTreeMap, VecDeque};
use std::ffi::OsString;
use std::future;
use std::io;
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::time::Duration;

use elastic_rendezvous::time::Time;
use futures::future::OptionFuture;
use rustix::process::{Pid, Signal};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::time::Instant;

use crate::guard::wire::{self, Channel, GuardRequest, Notice, WorkerId};
use crate::guard::{Exit, Guard, tree};
use crate::machine::cpus::CpuSet;
use crate::output::logs::Stdio;

pub(crate) use error::Refused;
pub use error::{GuardClientError, SpawnError};
pub(crate) use watch::readable;

use error::SpawnAttempt;

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

/// A worker's end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Exited {
    /// Which worker of this node.
    pub local_rank: u32,
    /// Its process id, which may be in use again by now.
    pub pid: i32,
    /// How it ended.
    pub exit: Exit,
    /// When the guard saw it.
    pub at: Time,
}

/// What a [`GuardClient`] reports.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// A worker's program runs.
    Started {
        /// Which worker of this node.
        local_rank: u32,
        /// Its process id.
        pid: i32,
    },
    /// A worker was not started. No other event follows for it.
    NotStarted {
        /// Which worker of this node.
        local_rank: u32,
        /// Why.
        refused: Refused,
    },
    /// A worker has ended, by itself or because it was stopped.
    Exited(Exited),
    /// The deadline has passed, and everything got SIGKILL. Exits and [`Event::Stopped`] follow.
    DeadlineKilled {
        /// When the guard acted.
        at: Time,
    },
    /// Nothing is left that any worker started. This follows a stop or a passed deadline.
    Stopped,
    /// Some processes still live five seconds after SIGKILL. They wait in the kernel, or now belong to another user.
    Survivors {
        /// Each is written as `pid 4711 (python3, state D)`.
        processes: Vec<String>,
    },
    /// The guard has ended before the agent. Its workers are dead, and nothing can be started any more.
    GuardLost {
        /// How it ended.
        cause: String,
        /// Processes that could not be ended within five seconds, as in [`Event::Survivors`].
        survivors: Vec<String>,
    },
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
}

#[derive(Debug)]
enum Link {
    Up(AsyncFd<Channel>),
    /// The guard has ended, and its orphans are not ended yet.
    Broken,
    Down,
}

#[derive(Debug)]
struct Stopping {
    signal: Signal,
    phase: StopPhase,
}

#[derive(Debug, Clone, Copy)]
enum StopPhase {
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
        let socket = watch::readable(guard.channel).map_err(GuardClientError::Connection)?;
        Ok(GuardClient {
            guard: guard.pid,
            link: Link::Up(socket),
            next_id: 0,
            workers: BTreeMap::new(),
            asked: BTreeMap::new(),
            events: VecDeque::new(),
            populated: false,
            stopping: None,
        })
    }

    /// Asks the guard to start a worker. [`Event::Started`] or [`Event::NotStarted`] follows, however long it takes to
    /// read the program. Several workers may be asked for at once. No event follows an error.
    pub fn begin_spawn(&mut self, spec: WorkerSpec) -> Result<(), SpawnError> {
        if self.stopping.is_some() {
            return Err(SpawnError::Stopping);
        }
        let asked = SpawnAttempt::new(&spec)?;
        let worker = WorkerId(self.next_id);
        self.next_id += 1;
        let WorkerSpec { local_rank, argv, env, cwd, stdio, cpus } = spec;
        let arguments = argv.len();
        let variables = env.into_iter().map(|(mut name, value)| {
            name.push("=");
            name.push(value);
            name
        });
        let strings = [cwd.into_os_string()].into_iter().chain(argv).chain(variables);
        let body = wire::write_body(strings).map_err(SpawnError::NoRoom)?;
        let descriptors: Vec<_> = [Some(&body), stdio.stdout.as_ref(), stdio.stderr.as_ref()]
            .into_iter()
            .flatten()
            .map(AsFd::as_fd)
            .collect();
        let (stdout, stderr) = (stdio.stdout.is_some(), stdio.stderr.is_some());
        self.send(&GuardRequest::Spawn { worker, arguments, stdout, stderr, cpus: cpus.mask() }, &descriptors)?;
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
    pub fn signal(&mut self, local_rank: u32, signal: Signal) -> Result<(), GuardClientError> {
        let worker = self.workers.iter().rev().find(|(_, rank)| **rank == local_rank).map(|(id, _)| *id);
        match worker {
            Some(worker) => self.send(&GuardRequest::Signal { worker, signal: signal.as_raw() }, &[]),
            None => Ok(()),
        }
    }

    /// Begins to stop everything. Sends `signal` to the workers' process groups. Once the last worker has exited, also
    /// sends it to the processes that the workers left outside their groups. After `grace`, sends SIGKILL to whatever
    /// is left. If the grace is zero, kills at once. [`Event::Stopped`] comes as soon as nothing is left. A later call
    /// can shorten the grace, but not lengthen it.
    pub fn begin_stop(&mut self, signal: Signal, grace: Duration) -> Result<(), GuardClientError> {
        if !self.populated && self.asked.is_empty() {
            if self.stopping.is_none() {
                self.events.push_back(Event::Stopped);
            }
            return Ok(());
        }
        let told = self.stopping.as_ref().map(|stopping| (stopping.signal, stopping.phase));
        match told {
            Some((_, StopPhase::Killed(_) | StopPhase::Named)) => return Ok(()),
            _ if grace.is_zero() => return self.kill(signal),
            Some((before, _)) if before == signal => {}
            _ => self.send(&GuardRequest::Stop { signal: signal.as_raw() }, &[])?,
        }
        let mut kill_at = Instant::now() + grace;
        if let Some((_, StopPhase::Grace(before))) = told {
            kill_at = kill_at.min(before);
        }
        self.stopping = Some(Stopping { signal, phase: StopPhase::Grace(kill_at) });
        Ok(())
    }

    /// Sets the time at which the guard kills everything, unless a later call moves it. `None`: never.
    pub fn set_deadline(&mut self, until: Option<Time>) -> Result<(), GuardClientError> {
        let (until, sent) = (until.map(|until| until.as_duration()), elastic_store::clock::now().as_duration());
        self.send(&GuardRequest::Deadline { until, sent }, &[])
    }

    /// Makes the guard keep a duplicate of this descriptor open until the agent and everything below it are gone. This
    /// is meant for listening sockets and lock files.
    pub fn hold(&mut self, descriptor: impl AsFd) -> Result<(), GuardClientError> {
        self.send(&GuardRequest::Hold, &[descriptor.as_fd()])
    }

    /// Ends everything at once and waits until the guard has ended.
    pub async fn close(mut self) {
        if let Link::Up(socket) = &self.link
            && socket.get_ref().finish().is_ok()
        {
            while let Link::Up(socket) = &self.link {
                if !matches!(receive(socket).await, Ok(Some(_))) {
                    self.link = Link::Down;
                }
            }
            orphans::wait_for(self.guard).await;
        }
    }

    fn kill(&mut self, signal: Signal) -> Result<(), GuardClientError> {
        self.send(&GuardRequest::Kill, &[])?;
        self.stopping = Some(Stopping { signal, phase: StopPhase::Killed(Instant::now() + SURVIVOR_NOTICE) });
        Ok(())
    }

    fn send(
        &self,
        request: &GuardRequest,
        descriptors: &[std::os::fd::BorrowedFd<'_>],
    ) -> Result<(), GuardClientError> {
        let Link::Up(socket) = &self.link else { return Err(GuardClientError::GuardLost) };
        socket.get_ref().send(request, descriptors).map_err(|e| match e.kind() {
            io::ErrorKind::WouldBlock => GuardClientError::GuardStuck(self.guard.as_raw_pid()),
            io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset => GuardClientError::GuardLost,
            _ => GuardClientError::Connection(e),
        })
    }

    /// Waits for one report of the guard or for the end of a grace, and handles it.
    async fn turn(&mut self) {
        let socket = match &self.link {
            Link::Up(socket) => socket,
            Link::Broken => return self.clear_orphans().await,
            Link::Down => return future::pending().await,
        };
        let phase = self.stopping.as_ref().map(|stopping| stopping.phase);
        let wake_at = match phase {
            Some(StopPhase::Grace(at) | StopPhase::Killed(at)) => Some(at),
            _ => None,
        };
        tokio::select! {
            biased;
            report = receive(socket) => match report {
                Ok(Some(report)) => self.take_in(report),
                Ok(None) | Err(_) => self.link = Link::Broken,
            },
            Some(()) = OptionFuture::from(wake_at.map(tokio::time::sleep_until)) => match phase {
                // If the guard cannot be reached, its socket has ended, and the next turn sees that.
                Some(StopPhase::Grace(_)) => {
                    let signal = self.stopping.as_ref().map_or(Signal::KILL, |stopping| stopping.signal);
                    if let Err(error) = self.kill(signal) {
                        tracing::error!(%error, "cannot kill the workers whose grace is over");
                        self.stopping = Some(Stopping { signal, phase: StopPhase::Named });
                    }
                }
                _ => self.name_survivors(),
            },
        }
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
            Notice::DeadlinePassed { at } => {
                self.events.push_back(Event::DeadlineKilled { at: Time::ZERO + at });
                let phase = StopPhase::Killed(Instant::now() + SURVIVOR_NOTICE);
                self.stopping = Some(Stopping { signal: Signal::KILL, phase });
            }
            Notice::TreeGone => {
                self.populated = false;
                self.workers.retain(|worker, _| self.asked.contains_key(worker));
                self.check_stopped();
            }
        }
    }

    fn check_stopped(&mut self) {
        if !self.populated && self.asked.is_empty() && self.stopping.take().is_some() {
            self.events.push_back(Event::Stopped);
        }
    }

    fn name_survivors(&mut self) {
        if let Some(stopping) = &mut self.stopping {
            stopping.phase = StopPhase::Named;
        }
        let processes = orphans::describe(&tree::descendants(self.guard).unwrap_or_default());
        self.events.push_back(Event::Survivors { processes });
    }

    async fn clear_orphans(&mut self) {
        let (cause, survivors) = orphans::clear(self.guard).await;
        self.link = Link::Down;
        self.populated = false;
        self.stopping = None;
        self.asked.clear();
        self.events.push_back(Event::GuardLost { cause, survivors });
    }
}

async fn receive(socket: &AsyncFd<Channel>) -> io::Result<Option<Notice>> {
    let report = socket.async_io(Interest::READABLE, |channel| channel.receive::<Notice>()).await?;
    Ok(report.map(|(report, _)| report))
}
