//! The guard's own loop. It has one thread and one `poll`, which is woken by the agent, a child's end, or the deadline.
//! While the agent lives, the agent decides what to stop and with which grace.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::io::{self, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use elastic_rendezvous::time::Time;
use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;
use rustix::process::{Pid, Signal, WaitOptions};
use rustix::time::{Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec};

use super::deadline::Deadline;
use super::exit::Exit;
use super::helpers;
use super::kernel::{self, Executable, Step};
use super::nursery::{self, Nursery, Order, Outcome};
use super::tree::{self, Process};
use super::wire::{Channel, GuardRequest, Notice, SpawnRefusal, WorkerId};

/// How often to look at processes whose end does not wake the guard: the parents of helpers that were spared the stop
/// signal, and children of the nursery.
const LOOK: Duration = Duration::from_millis(100);

/// Serves the agent until it is gone and nothing that it started is left.
pub(super) fn run(channel: Channel) -> io::Result<()> {
    let mut keeper = Keeper::new(channel)?;
    while !keeper.agent_gone || keeper.populated || keeper.nursery.pid().is_some() {
        keeper.wait()?;
        keeper.hear();
        keeper.check_deadline();
        keeper.settle_forks();
        keeper.settle_starts();
        keeper.tell_orphans();
        keeper.reap()?;
        keeper.tell();
    }
    let Keeper { held, ended_after_agent, .. } = keeper;
    // After this, the agent's port refuses connections, which tells its peers that the whole tree is gone.
    drop(held);
    if ended_after_agent > 0 {
        let _ = writeln!(
            io::stderr(),
            "elastic-agent guard: the agent is gone; ended the {ended_after_agent} processes that it left"
        );
    }
    Ok(())
}

struct Child {
    pid: Pid,
    /// Whether it is not reaped yet. Only then its number still names it and its group.
    alive: bool,
    /// Whether its program never ran. Then its end is no exit of a worker.
    refused: bool,
}

/// A worker that is forked, and not yet known to execute its program.
struct Start {
    worker: WorkerId,
    failure: OwnedFd,
}

/// A stop in progress.
struct Stop {
    signal: Signal,
    /// The groups that got the signal. They get it only once, because a second signal often means "now" to a program.
    groups: BTreeSet<i32>,
    /// Helpers that did not get it, because their parents may need them to save. They get it when their parent is gone.
    spared: Vec<Process>,
    strays_told: bool,
}

struct Keeper {
    channel: Channel,
    children: OwnedFd,
    timer: OwnedFd,
    me: Pid,
    deadline: Deadline,
    /// All workers since the tree was last empty.
    workers: BTreeMap<WorkerId, Child>,
    starts: Vec<Start>,
    nursery: Nursery,
    stop: Option<Stop>,
    /// Whether everything gets SIGKILL until nothing is left.
    killing: bool,
    /// Whether some process below the guard may be alive that a worker is or started.
    populated: bool,
    agent_gone: bool,
    ended_after_agent: u32,
    held: Vec<OwnedFd>,
    /// Reports that the socket had no room for. A frozen agent must not block its guard.
    outbox: VecDeque<Notice>,
}

impl Keeper {
    fn new(channel: Channel) -> io::Result<Keeper> {
        let timer_flags = TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK;
        Ok(Keeper {
            channel,
            children: kernel::child_signals()?,
            timer: rustix::time::timerfd_create(TimerfdClockId::Boottime, timer_flags)?,
            me: rustix::process::getpid(),
            deadline: Deadline::default(),
            workers: BTreeMap::new(),
            starts: Vec::new(),
            nursery: Nursery::default(),
            stop: None,
            killing: false,
            populated: false,
            agent_gone: false,
            ended_after_agent: 0,
            held: Vec::new(),
            outbox: VecDeque::new(),
        })
    }

    fn wait(&self) -> io::Result<()> {
        let mut fds = vec![PollFd::new(&self.children, PollFlags::IN), PollFd::new(&self.timer, PollFlags::IN)];
        fds.extend(self.starts.iter().map(|start| PollFd::new(&start.failure, PollFlags::IN)));
        fds.extend(self.nursery.watched());
        if !self.agent_gone {
            let mut interest = PollFlags::IN;
            interest.set(PollFlags::OUT, !self.outbox.is_empty());
            fds.push(PollFd::new(&self.channel, interest));
        }
        // Nothing wakes the guard when a process dies that is not its child.
        let spares = self.stop.as_ref().is_some_and(|stop| !stop.spared.is_empty());
        let looks = spares || self.nursery.pid().is_some() && self.may_be_empty();
        let patience = self.nursery.wake_at().map(|at| at.since(elastic_store::clock::now()));
        let limit = patience.into_iter().chain(looks.then_some(LOOK)).min();
        let limit = limit.and_then(|limit| Timespec::try_from(limit).ok());
        rustix::io::retry_on_intr(|| rustix::event::poll(&mut fds, limit.as_ref()))?;
        drain(&self.children);
        drain(&self.timer);
        Ok(())
    }

    fn hear(&mut self) {
        while !self.agent_gone {
            match self.channel.receive::<GuardRequest>() {
                Ok(Some((request, descriptors))) => self.handle(request, descriptors),
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => break,
                // A packet that makes no sense cannot come from the binary that the guard is part of. So the agent
                // counts as gone.
                Ok(None) | Err(_) => {
                    self.agent_gone = true;
                    self.kill();
                }
            }
        }
    }

    fn handle(&mut self, request: GuardRequest, mut descriptors: Vec<OwnedFd>) {
        match request {
            GuardRequest::Spawn { worker, arguments, stdout, stderr, cpus } => {
                let complete = descriptors.len() == 1 + usize::from(stdout) + usize::from(stderr);
                let mut descriptors = descriptors.into_iter();
                match descriptors.next().filter(|_| complete) {
                    Some(body) => {
                        let stdout = if stdout { descriptors.next() } else { None };
                        self.start(Order { worker, arguments, cpus, body, stdout, stderr: descriptors.next() });
                    }
                    // The kernel drops descriptors that this process has no room for.
                    None => self.refuse(worker, SpawnRefusal::Fork(libc::EMFILE)),
                }
            }
            GuardRequest::Nursery { arguments, cpus } => {
                let program = descriptors.pop().ok_or_else(|| Errno::MFILE.into());
                let program = program.and_then(|body| Executable::read(body, arguments, cpus));
                let notice = match self.refusal() {
                    None => self.nursery.begin(program),
                    Some(_) => Notice::NurseryGone { why: None },
                };
                self.outbox.push_back(notice);
            }
            GuardRequest::Signal { worker, signal } => self.signal(worker, signal),
            GuardRequest::Stop { signal } => self.begin_stop(signal),
            GuardRequest::Kill => {
                self.kill();
                self.outbox.push_back(Notice::Killing);
            }
            GuardRequest::Deadline { until, sent } => {
                if self.deadline.renew(until.map(|until| Time::ZERO + until), Time::ZERO + sent) {
                    self.kill_by_deadline();
                }
                self.arm_timer();
            }
            GuardRequest::Hold => self.held.append(&mut descriptors),
        }
    }

    /// Why nothing may be started now.
    fn refusal(&self) -> Option<SpawnRefusal> {
        let passed = self.deadline.passed(elastic_store::clock::now()).then_some(SpawnRefusal::Deadline);
        passed.or(self.killing.then_some(SpawnRefusal::Stopping))
    }

    fn refuse(&mut self, worker: WorkerId, refusal: SpawnRefusal) {
        self.outbox.push_back(Notice::Refused { worker, refusal });
    }

    /// Starts a worker, from the nursery if there is one.
    fn start(&mut self, order: Order) {
        if let Some(refusal) = self.refusal() {
            return self.refuse(order.worker, refusal);
        }
        match self.nursery.take(order, elastic_store::clock::now()) {
            Ok(()) => self.populated = true,
            Err(order) => self.execute(order),
        }
    }

    /// Takes in the workers that the nursery forked, and starts those itself that it did not.
    fn settle_forks(&mut self) {
        self.outbox.extend(self.nursery.hear());
        for outcome in self.nursery.settle(elastic_store::clock::now()) {
            match outcome {
                Outcome::Born { worker, pid, start } => {
                    nursery::go(&start);
                    self.workers.insert(worker, Child { pid, alive: true, refused: false });
                    self.starts.push(Start { worker, failure: start });
                }
                Outcome::Unborn(order) => self.execute(order),
                Outcome::Stopped(worker) => self.refuse(worker, SpawnRefusal::Stopping),
            }
        }
    }

    fn execute(&mut self, order: Order) {
        let worker = order.worker;
        if let Err(refusal) = self.refusal().map_or_else(|| self.spawn(order), Err) {
            self.refuse(worker, refusal);
        }
    }

    fn spawn(&mut self, order: Order) -> Result<(), SpawnRefusal> {
        let Order { worker, arguments, cpus, body, stdout, stderr } = order;
        let program = Executable::read(body, arguments, cpus).map_err(|e| SpawnRefusal::Request(e.to_string()))?;
        let fork_failed = |e: io::Error| SpawnRefusal::Fork(e.raw_os_error().unwrap_or(libc::EIO));
        let flags = rustix::pipe::PipeFlags::CLOEXEC | rustix::pipe::PipeFlags::NONBLOCK;
        let (failure, child_end) = rustix::pipe::pipe_with(flags).map_err(|e| fork_failed(e.into()))?;
        let stdio = [None, stdout.as_ref().map(AsFd::as_fd), stderr.as_ref().map(AsFd::as_fd)];
        let pid = program.start(stdio, child_end.as_fd()).map_err(fork_failed)?;
        self.workers.insert(worker, Child { pid, alive: true, refused: false });
        self.starts.push(Start { worker, failure });
        self.populated = true;
        Ok(())
    }

    /// Reports the starts whose outcome is known.
    fn settle_starts(&mut self) {
        let Keeper { starts, workers, outbox, .. } = self;
        starts.retain(|start| {
            let mut report = [0; 5];
            let (step, errno) = match rustix::io::retry_on_intr(|| rustix::io::read(&start.failure, &mut report)) {
                Err(Errno::AGAIN) => return true,
                Ok(5) => Step::from_report(&report),
                // The pipe closed without a report, so the program runs. (Or it was killed before it could run. Its
                // exit status will say so.)
                _ => {
                    if let Some(worker) = workers.get(&start.worker) {
                        outbox.push_back(Notice::Spawned { worker: start.worker, pid: worker.pid.as_raw_pid() });
                    }
                    return false;
                }
            };
            if let Some(worker) = workers.get_mut(&start.worker) {
                worker.refused = true;
            }
            let refusal = match step {
                Step::Prepare => SpawnRefusal::Fork(errno),
                Step::Cpus => SpawnRefusal::Cpus(errno),
                Step::Directory => SpawnRefusal::Directory(errno),
                Step::Execute => SpawnRefusal::Execute(errno),
            };
            outbox.push_back(Notice::Refused { worker: start.worker, refusal });
            false
        });
    }

    fn signal(&self, worker: WorkerId, signal: i32) {
        let (Some(worker), Some(signal)) = (self.workers.get(&worker), Signal::from_named_raw(signal)) else { return };
        if worker.alive {
            signal_group(worker.pid, signal);
            return;
        }
        // The leader is reaped, so its number may name another group by now. The guard searches for the group among its
        // own descendants.
        for process in self.descendants().iter().filter(|p| p.group == worker.pid.as_raw_pid()) {
            process.tell(signal);
        }
    }

    fn begin_stop(&mut self, signal: i32) {
        let Some(signal) = Signal::from_named_raw(signal) else { return self.kill() };
        self.nursery.stop();
        let below = self.descendants();
        let spared = helpers::spared(&below, signal);
        let is_spared = |process: &Process| spared.contains(&process.pid.as_raw_pid());
        let mut groups = self.stop.take().map(|stop| stop.groups).unwrap_or_default();
        for worker in self.workers.values().filter(|worker| worker.alive) {
            let group = worker.pid.as_raw_pid();
            groups.insert(group);
            let members = || below.iter().filter(|process| process.group == group);
            if members().any(is_spared) {
                members().filter(|process| !is_spared(process)).for_each(|told| told.tell(signal));
                // A helper that was stopped could not help.
                let _ = rustix::process::kill_process_group(worker.pid, Signal::CONT);
            } else {
                // At once, so that none is forked unseen meanwhile.
                signal_group(worker.pid, signal);
            }
        }
        let spared = below.iter().filter(|p| groups.contains(&p.group) && is_spared(p)).cloned().collect();
        self.stop = Some(Stop { signal, groups, spared, strays_told: false });
        self.tell_strays();
    }

    /// Once the workers are gone, the processes that they left outside their groups get the stop signal too.
    fn tell_strays(&mut self) {
        if !self.populated || self.workers.values().any(|worker| worker.alive) {
            return;
        }
        let processes = self.descendants();
        let Some(stop) = self.stop.as_mut().filter(|stop| !stop.strays_told) else { return };
        stop.strays_told = true;
        let spared = helpers::spared(&processes, stop.signal);
        for process in processes.into_iter().filter(|p| !stop.groups.contains(&p.group)) {
            if spared.contains(&process.pid.as_raw_pid()) {
                stop.spared.push(process);
            } else {
                process.tell(stop.signal);
            }
        }
    }

    /// Helpers that were spared the stop signal get it once their parent is gone.
    fn tell_orphans(&mut self) {
        let Some(Stop { signal, spared, .. }) = &mut self.stop else { return };
        spared.retain(|helper| {
            let now = Process::read(helper.pid.as_raw_pid()).filter(|now| now.started == helper.started);
            if now.as_ref().is_some_and(|now| now.parent != helper.parent) {
                helper.tell(*signal);
            }
            now.is_some_and(|now| now.parent == helper.parent)
        });
    }

    fn check_deadline(&mut self) {
        if self.deadline.passed(elastic_store::clock::now()) {
            self.kill_by_deadline();
        }
    }

    fn kill_by_deadline(&mut self) {
        if self.populated && !self.killing {
            self.outbox.push_back(Notice::DeadlinePassed { at: elastic_store::clock::now().as_duration() });
            self.kill();
        }
    }

    fn arm_timer(&self) {
        // An expiry of zero disarms the timer, so a deadline at the clock's zero becomes one nanosecond later.
        let expiry = self.deadline.until().map_or(Timespec::default(), |until| {
            let until = until.as_duration();
            let tv_sec = i64::try_from(until.as_secs()).unwrap_or(i64::MAX);
            Timespec { tv_sec, tv_nsec: i64::from(until.subsec_nanos()).max(i64::from(tv_sec == 0)) }
        });
        let value = Itimerspec { it_interval: Timespec::default(), it_value: expiry };
        // This fails only for a descriptor that is no timer, or for an invalid time.
        let _ = rustix::time::timerfd_settime(&self.timer, TimerfdTimerFlags::ABSTIME, &value);
    }

    /// Ends everything. Each child's end brings another look, until nothing is left. So a process that is forked during
    /// one look is found by the next look, which its parent's death brings.
    fn kill(&mut self) {
        if !self.populated && self.nursery.pid().is_none() {
            return;
        }
        self.killing = true;
        self.nursery.stop();
        // The groups come first. This takes microseconds, however many processes /proc lists.
        for worker in self.workers.values().filter(|worker| worker.alive) {
            signal_group(worker.pid, Signal::KILL);
        }
        self.sweep();
    }

    fn sweep(&self) {
        let below = tree::descendants(self.me).unwrap_or_default();
        for process in below.iter().filter(|process| !process.is_zombie()) {
            let _ = process.signal(Signal::KILL);
        }
    }

    /// All that workers are or started.
    fn descendants(&self) -> Vec<Process> {
        // Without /proc only the groups can be reached.
        tree::descendants_but(self.me, self.nursery.pid()).unwrap_or_default()
    }

    /// Whether no worker lives that is known.
    fn may_be_empty(&self) -> bool {
        self.populated && !self.workers.values().any(|worker| worker.alive)
    }

    /// Collects dead children. The guard is the subreaper, so no descendant is left when no child is left.
    fn reap(&mut self) -> io::Result<()> {
        if !self.populated && self.nursery.pid().is_none() {
            return Ok(());
        }
        let mut reaped = false;
        loop {
            match rustix::process::wait(WaitOptions::NOHANG) {
                Ok(Some((pid, status))) => {
                    reaped = true;
                    let left = self.agent_gone && self.nursery.pid() != Some(pid);
                    self.ended_after_agent += u32::from(left);
                    if let Some(exit) = Exit::from_wait(status) {
                        self.bury(pid, exit);
                    }
                }
                Ok(None) if self.killing || !self.may_be_empty() || !self.nursery.is_alone(self.me) => break,
                Ok(None) | Err(Errno::CHILD) => {
                    self.empty();
                    return Ok(());
                }
                Err(Errno::INTR) => {}
                Err(e) => return Err(e.into()),
            }
        }
        if self.killing && reaped {
            self.sweep();
        } else if reaped {
            self.tell_strays();
        }
        Ok(())
    }

    /// Nothing of the workers is left.
    fn empty(&mut self) {
        self.killing = false;
        self.stop = None;
        self.workers.clear();
        if std::mem::take(&mut self.populated) {
            self.outbox.push_back(Notice::TreeGone);
        }
    }

    fn bury(&mut self, pid: Pid, exit: Exit) {
        let nursery = self.nursery.reaped(pid, exit, self.killing);
        self.outbox.extend(nursery);
        // Settles its start, if this has not happened yet: its end of the pipe is closed now.
        self.settle_forks();
        self.settle_starts();
        let Some((id, worker)) = self.workers.iter_mut().find(|(_, worker)| worker.alive && worker.pid == pid) else {
            return;
        };
        worker.alive = false;
        if !worker.refused {
            let at = elastic_store::clock::now().as_duration();
            self.outbox.push_back(Notice::Exited { worker: *id, pid: pid.as_raw_pid(), exit, at });
        }
    }

    fn tell(&mut self) {
        while let Some(report) = self.outbox.front() {
            match self.channel.send(report, &[]) {
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return,
                // The agent does not read any more. If the agent is gone, the next receive shows it.
                Ok(()) | Err(_) => self.outbox.pop_front(),
            };
        }
    }
}

/// Signals the group of a worker that is not reaped. Between its fork and its setsid the worker has no group of its own
/// yet.
fn signal_group(leader: Pid, signal: Signal) {
    if rustix::process::kill_process_group(leader, signal) == Err(Errno::SRCH) {
        let _ = rustix::process::kill_process(leader, signal);
    }
    if signal != Signal::KILL && signal != Signal::STOP {
        // A stopped process would see the signal only when somebody continues it.
        let _ = rustix::process::kill_process_group(leader, Signal::CONT);
    }
}

/// Empties a non-blocking descriptor whose content does not matter.
fn drain(fd: &OwnedFd) {
    let mut buffer = [0; 1024];
    while rustix::io::read(fd, &mut buffer).is_ok_and(|n| n > 0) {}
}
