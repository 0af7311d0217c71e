//! The nursery: a Python process that has imported what the user named, and that workers are forked from
//! (`agent/python/elastic_agent/nursery.py`). It saves a worker the time of these imports.
//!
//! ```text
//! elastic-guard            nursery              between               worker
//!     │ ── order ───────────▶ │ ──── forks ────────▶ │ ──── forks ───────▶ │
//!     │   (body, start, stdio)│                      exits                 │ its parent is the guard now
//!     │ ◀───────────────────────────── start: its process id ───────────── │
//!     │ ── start: go ──────────────────────────────────────────────────▶   │ runs the script
//! ```
//!
//! A worker runs nothing before the guard knows it. If the `start` socket ends before, no worker came of the order, and
//! the guard starts the worker itself. So the nursery can fail a start at no point, and can delay one by [`PATIENCE`].
//!
//! ECHILD cannot prove that the workers are gone while the nursery lives: see [`Nursery::is_alone`].

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use elastic_rendezvous::time::Time;
use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SendFlags, SocketFlags, SocketType};
use rustix::process::{Pid, Signal};
use serde::{Deserialize, Serialize};

use super::exit::Exit;
use super::kernel::Executable;
use super::tree;
use super::wire::{Channel, Notice, WorkerId};

/// How long the nursery may take to fork a worker.
const PATIENCE: Duration = Duration::from_secs(2);

/// The most characters of a reason that the nursery gives. They fit into a packet however they are escaped.
const REASON: usize = 400;

/// A worker to be started.
#[derive(Debug)]
pub(super) struct Order {
    pub(super) worker: WorkerId,
    pub(super) arguments: usize,
    pub(super) cpus: Vec<u64>,
    pub(super) body: OwnedFd,
    pub(super) stdout: Option<OwnedFd>,
    pub(super) stderr: Option<OwnedFd>,
}

/// An order as the nursery reads it. The descriptors are body, start, standard input, output and error.
#[derive(Serialize)]
struct Request<'a> {
    arguments: usize,
    cpus: &'a [u64],
}

/// What the nursery says.
#[derive(Deserialize)]
enum Word {
    Ready,
    /// It cannot be forked from, and ends.
    Refused(String),
}

/// An order that the nursery has.
#[derive(Debug)]
struct Fork {
    order: Order,
    start: OwnedFd,
    until: Time,
    /// Whether the workers were stopped meanwhile. Then none may come of it.
    stopped: bool,
}

/// What an order has led to.
pub(super) enum Outcome {
    /// The worker is forked, and waits for [`go`].
    Born { worker: WorkerId, pid: Pid, start: OwnedFd },
    /// No worker came of it, and none will.
    Unborn(Order),
    /// The workers were stopped before it ran.
    Stopped(WorkerId),
}

#[derive(Debug)]
struct Process {
    pid: Pid,
    /// None once it is killed, or ends.
    channel: Option<Channel>,
    ready: bool,
    /// Why it was killed. The agent hears of it once the process has ended: then there is room for another.
    why: Option<String>,
}

#[derive(Debug, Default)]
pub(super) struct Nursery {
    process: Option<Process>,
    forks: Vec<Fork>,
}

impl Nursery {
    /// Starts its process.
    pub(super) fn begin(&mut self, program: io::Result<Executable>) -> Notice {
        let start = |program: Executable| {
            // Without this list there would be no proof that the workers are gone.
            tree::children(rustix::process::getpid())?;
            let (channel, theirs) = Channel::pair()?;
            let stderr = io::stderr();
            let stdio = [Some(theirs.as_fd()), Some(stderr.as_fd()), None];
            Ok((program.start(stdio, theirs.as_fd())?, channel))
        };
        match program.and_then(start) {
            Ok((pid, channel)) => {
                self.process = Some(Process { pid, channel: Some(channel), ready: false, why: None });
                Notice::NurseryRuns { pid: pid.as_raw_pid() }
            }
            Err(error) => Notice::NurseryGone { why: Some(format!("its process cannot be started: {error}")) },
        }
    }

    pub(super) fn pid(&self) -> Option<Pid> {
        self.process.as_ref().map(|process| process.pid)
    }

    /// Orders a worker. Returns the order if no nursery can take it.
    pub(super) fn take(&mut self, order: Order, now: Time) -> Result<(), Order> {
        let ready = self.process.as_ref().filter(|process| process.ready);
        let Some(channel) = ready.and_then(|process| process.channel.as_ref()) else { return Err(order) };
        match send(channel, &order) {
            Ok(start) => self.forks.push(Fork { order, start, until: now + PATIENCE, stopped: false }),
            Err(_) => return Err(order),
        }
        Ok(())
    }

    /// The workers are being stopped. None may come of the orders that the nursery has.
    pub(super) fn stop(&mut self) {
        self.forks.iter_mut().for_each(|fork| fork.stopped = true);
    }

    /// Reads what the nursery says.
    pub(super) fn hear(&mut self) -> Option<Notice> {
        let process = self.process.as_mut()?;
        match process.channel.as_ref()?.receive::<Word>() {
            Ok(Some((Word::Ready, _))) => {
                process.ready = true;
                Some(Notice::NurseryReady { pid: process.pid.as_raw_pid() })
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => None,
            other => {
                self.end(match other {
                    Ok(Some((Word::Refused(why), _))) => Some(why.chars().take(REASON).collect()),
                    Err(error) => Some(format!("it said what makes no sense: {error}")),
                    // It is ending. Its exit says how.
                    _ => None,
                });
                None
            }
        }
    }

    /// Kills it. Its end tells the agent.
    fn end(&mut self, why: Option<String>) {
        let Some(process) = &mut self.process else { return };
        (process.channel, process.ready) = (None, false);
        process.why = process.why.take().or(why);
        // It is a child of this process and not reaped, so its number is its own.
        let _ = rustix::process::kill_process(process.pid, Signal::KILL);
    }

    /// A child of the guard was reaped. `killing`: everything is being killed. The notice if it was the nursery.
    pub(super) fn reaped(&mut self, pid: Pid, exit: Exit, killing: bool) -> Option<Notice> {
        let process = self.process.take_if(|process| process.pid == pid)?;
        let ended = || format!("its process (pid {}) ended by {exit}", pid.as_raw_pid());
        Some(Notice::NurseryGone { why: process.why.or_else(|| (!killing).then(ended)) })
    }

    /// What orders have led to until `now`. Kills the nursery if it did not answer.
    pub(super) fn settle(&mut self, now: Time) -> Vec<Outcome> {
        let (mut outcomes, mut silent) = (Vec::new(), false);
        for fork in std::mem::take(&mut self.forks) {
            let mut pid = [0; 4];
            let born = match rustix::io::retry_on_intr(|| rustix::io::read(&fork.start, &mut pid)) {
                Err(Errno::AGAIN) if now < fork.until => {
                    self.forks.push(fork);
                    continue;
                }
                Ok(4) => Pid::from_raw(i32::from_ne_bytes(pid)),
                answer => {
                    silent |= answer == Err(Errno::AGAIN);
                    None
                }
            };
            outcomes.push(match (born, fork) {
                (_, Fork { stopped: true, order, .. }) => Outcome::Stopped(order.worker),
                (Some(pid), Fork { order, start, .. }) => Outcome::Born { worker: order.worker, pid, start },
                (None, Fork { order, .. }) => Outcome::Unborn(order),
            });
        }
        if silent {
            self.end(Some(format!("it forked no worker within {PATIENCE:?}")));
        }
        outcomes
    }

    /// Whether nothing is left below the guard but the nursery, where the guard has no worker that it knows to live.
    ///
    /// The nursery forks only what is ordered, and no order is open. What it has forked is its child, or the guard's. So
    /// the nursery's children are read first: a process can leave these for the guard's, and never comes back.
    pub(super) fn is_alone(&self, guard: Pid) -> bool {
        let Some(Process { pid, channel: Some(_), .. }) = &self.process else { return false };
        self.forks.is_empty()
            && tree::children(*pid).is_ok_and(|children| children.is_empty())
            && tree::children(guard).is_ok_and(|children| children == [pid.as_raw_pid()])
    }

    /// What wakes the guard.
    pub(super) fn watched(&self) -> impl Iterator<Item = PollFd<'_>> {
        let channel = self.process.iter().filter_map(|process| process.channel.as_ref()).map(AsFd::as_fd);
        let starts = self.forks.iter().map(|fork| fork.start.as_fd());
        channel.chain(starts).map(|socket| PollFd::from_borrowed_fd(socket, PollFlags::IN))
    }

    /// When the patience with an order ends.
    pub(super) fn wake_at(&self) -> Option<Time> {
        self.forks.iter().map(|fork| fork.until).min()
    }
}

/// Sends an order, and returns the guard's end of the worker's `start` socket.
fn send(channel: &Channel, order: &Order) -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let (start, theirs) = rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
    let (stdin, stdout, stderr) = (io::stdin(), io::stdout(), io::stderr());
    let stdout = order.stdout.as_ref().map_or(stdout.as_fd(), AsFd::as_fd);
    let stderr = order.stderr.as_ref().map_or(stderr.as_fd(), AsFd::as_fd);
    let descriptors = [order.body.as_fd(), theirs.as_fd(), stdin.as_fd(), stdout, stderr];
    channel.send(&Request { arguments: order.arguments, cpus: &order.cpus }, &descriptors)?;
    Ok(start)
}

/// Lets a forked worker run. If it is dead already, its exit follows.
pub(super) fn go(start: &OwnedFd) {
    let _ = rustix::net::send(start, b"g", SendFlags::NOSIGNAL);
}
