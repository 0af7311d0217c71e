//! The guard's own loop. It has one thread and one `poll`, which is woken by the agent, a child's end, or the deadline.
//! While the agent lives, the agent decides what to stop and with which grace.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ffi::CString;
use std::io::{self, Write};
use std::os::fd::{AsFd, OwnedFd};

use elastic_rendezvous::time::Time;
use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;
use rustix::process::{Pid, Signal, WaitOptions};
use rustix::time::{Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec};

use super::deadline::Deadline;
use super::exit::Exit;
use super::helpers;
use super::kernel::{self, Executable, Step};
use super::tree::{self, Process};
use super::wire::{self, Channel, GuardRequest, Notice, SpawnRefusal, WorkerId};

/// How often to look whether the parents of helpers that were spared the stop signal still live.
const ORPHANS: Timespec = Timespec { tv_sec: 0, tv_nsec: 100_000_000 };

/// Serves the agent until it is gone and nothing that it started is left.
pub(super) fn run(channel: Channel) -> io::Result<()> {
    let mut keeper = Keeper::new(channel)?;
    while !keeper.agent_gone || keeper.populated {
        keeper.wait()?;
        keeper.hear();
        keeper.check_deadline();
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
    stop: Option<Stop>,
    /// Whether everything gets SIGKILL until nothing is left.
    killing: bool,
    /// Whether some process below the guard may be alive.
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
        if !self.agent_gone {
            let mut interest = PollFlags::IN;
            interest.set(PollFlags::OUT, !self.outbox.is_empty());
            fds.push(PollFd::new(&self.channel, interest));
        }
        // Nothing wakes the guard when a process dies that is not its child.
        let limit = self.stop.as_ref().filter(|stop| !stop.spared.is_empty()).map(|_| ORPHANS);
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
                if descriptors.len() < 1 + usize::from(stdout) + usize::from(stderr) {
                    // The kernel drops descriptors that this process has no room for.
                    self.outbox.push_back(Notice::Refused { worker, refusal: SpawnRefusal::Fork(libc::EMFILE) });
                    return;
                }
                descriptors.reverse();
                let body = descriptors.pop();
                let program = read_program(body, arguments, cpus);
                let stdout = if stdout { descriptors.pop() } else { None };
                let stderr = if stderr { descriptors.pop() } else { None };
                if let Err(refusal) = self.spawn(worker, program, stdout, stderr) {
                    self.outbox.push_back(Notice::Refused { worker, refusal });
                }
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

    fn spawn(
        &mut self,
        worker: WorkerId,
        program: io::Result<Executable>,
        stdout: Option<OwnedFd>,
        stderr: Option<OwnedFd>,
    ) -> Result<(), SpawnRefusal> {
        if self.deadline.passed(elastic_store::clock::now()) {
            return Err(SpawnRefusal::Deadline);
        }
        if self.killing {
            return Err(SpawnRefusal::Stopping);
        }
        let program = program.map_err(|e| SpawnRefusal::Request(e.to_string()))?;
        let fork_failed = |e: io::Error| SpawnRefusal::Fork(e.raw_os_error().unwrap_or(libc::EIO));
        let flags = rustix::pipe::PipeFlags::CLOEXEC | rustix::pipe::PipeFlags::NONBLOCK;
        let (failure, child_end) = rustix::pipe::pipe_with(flags).map_err(|e| fork_failed(e.into()))?;
        let pid = program
            .start(stdout.as_ref().map(AsFd::as_fd), stderr.as_ref().map(AsFd::as_fd), child_end.as_fd())
            .map_err(fork_failed)?;
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
        if !self.populated {
            return;
        }
        self.killing = true;
        // The groups come first. This takes microseconds, however many processes /proc lists.
        for worker in self.workers.values().filter(|worker| worker.alive) {
            signal_group(worker.pid, Signal::KILL);
        }
        self.sweep();
    }

    fn sweep(&self) {
        for process in self.descendants().iter().filter(|process| !process.is_zombie()) {
            let _ = process.signal(Signal::KILL);
        }
    }

    fn descendants(&self) -> Vec<Process> {
        // Without /proc only the groups can be reached.
        tree::descendants(self.me).unwrap_or_default()
    }

    /// Collects dead children. The guard is the subreaper, so no descendant is left when no child is left.
    fn reap(&mut self) -> io::Result<()> {
        if !self.populated {
            return Ok(());
        }
        let mut reaped = false;
        loop {
            match rustix::process::wait(WaitOptions::NOHANG) {
                Ok(Some((pid, status))) => {
                    reaped = true;
                    self.ended_after_agent += u32::from(self.agent_gone);
                    if let Some(exit) = Exit::from_wait(status) {
                        self.bury(pid, exit);
                    }
                }
                Ok(None) => break,
                Err(Errno::INTR) => {}
                Err(Errno::CHILD) => {
                    self.populated = false;
                    self.killing = false;
                    self.stop = None;
                    self.workers.clear();
                    self.outbox.push_back(Notice::TreeGone);
                    return Ok(());
                }
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

    fn bury(&mut self, pid: Pid, exit: Exit) {
        // Settles its start, if this has not happened yet: its end of the pipe is closed now.
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

fn read_program(body: Option<OwnedFd>, arguments: usize, cpus: Vec<u64>) -> io::Result<Executable> {
    let body = body.ok_or(io::ErrorKind::UnexpectedEof)?;
    let mut strings = wire::read_body(body)?.into_iter();
    let directory = strings.next().ok_or(io::ErrorKind::UnexpectedEof)?;
    let arguments: Vec<CString> = strings.by_ref().take(arguments).collect();
    if arguments.is_empty() {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "no program given"));
    }
    Ok(Executable { arguments, variables: strings.collect(), directory, cpus })
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
