//! Watches this node's workers for hangs: reports when one has passed a deadline, and what it was doing. Ending the
//! worker is in `group.rs`.
//!
//! | what is watched | asked for by | signs |
//! |---|---|---|
//! | progress | `--progress-timeout` | steps told over the worker socket, output that goes to files, timers |
//! | timers of PyTorch | `TORCHELASTIC_ENABLE_FILE_TIMER=1` | lines in a named pipe (`timer_file.rs`) |
//! | uninterruptible waits | `TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT` | `/proc/<pid>/status` |
//!
//! Signs of progress are not tracked continuously. When a deadline is about to pass, they are looked up, and the
//! deadline moves. Only the states of workers are polled, and only if the user asked for that.

mod deadlines;
mod stacks;
mod timer_file;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use elastic_rendezvous::time::Time;
use futures::future::{OptionFuture, join_all};
use rustix::process::{Pid, Signal};
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::sleep;

use crate::guard::tree;

pub(crate) use deadlines::{Cause, Deadlines, Expired, HangLimits, Sample};
pub(crate) use timer_file::{TIMER_FILE, TimerFile, TimerRequest, Timers};

/// What to watch for, as the command line says. By default, the agent watches nothing.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct WatchOptions {
    pub limits: HangLimits,
    /// Whether workers may set PyTorch's timers.
    pub timers: Timers,
}

/// The newest step that a worker, given by local rank, has reported, and when it first reported that step.
pub(crate) type Steps = Arc<dyn Fn(u32) -> Option<(u64, Time)> + Send + Sync>;

#[derive(Debug, Clone)]
pub(crate) struct Watched {
    pub local_rank: u32,
    pub pid: i32,
    /// Its log directory, if it has one. Its output is looked up there, and its stacks are written there.
    pub directory: Option<PathBuf>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Verdict {
    pub round: u64,
    pub local_rank: u32,
    /// The signal to end it with.
    pub signal: Signal,
    /// One line for people: why it counts as hung, and where it was.
    pub message: String,
}

enum Order {
    Begin { round: u64, workers: Vec<Watched> },
    Ended { local_rank: u32 },
    End,
}

/// The watchdog of one agent. Dropping it stops the watch.
pub(crate) struct Watchdog {
    orders: mpsc::UnboundedSender<Order>,
    verdicts: mpsc::UnboundedReceiver<Verdict>,
    _task: JoinSet<()>,
}

impl Watchdog {
    /// Watches for what `limits` name and for the timers that arrive through the pipe. Must be called within a tokio
    /// runtime.
    pub(crate) fn start(limits: HangLimits, timers: Option<TimerFile>, steps: Steps) -> Watchdog {
        let (orders, inbox) = mpsc::unbounded_channel();
        let (outbox, verdicts) = mpsc::unbounded_channel();
        let watch =
            Watch { deadlines: Deadlines::new(limits), timers, steps, round: 0, workers: BTreeMap::new(), outbox };
        let mut task = JoinSet::new();
        task.spawn(watch.run(inbox));
        Watchdog { orders, verdicts, _task: task }
    }

    /// These workers were started in this round. From now on no others are watched.
    pub(crate) fn begin(&self, round: u64, workers: Vec<Watched>) {
        self.order(Order::Begin { round, workers });
    }

    pub(crate) fn ended(&self, local_rank: u32) {
        self.order(Order::Ended { local_rank });
    }

    /// The workers are being stopped. They are not watched during their grace.
    pub(crate) fn end(&self) {
        self.order(Order::End);
    }

    fn order(&self, order: Order) {
        // The task ends only when this handle is dropped.
        let _ = self.orders.send(order);
    }

    /// The next worker that hangs. The wait may be cancelled.
    pub(crate) async fn verdict(&mut self) -> Option<Verdict> {
        self.verdicts.recv().await
    }
}

struct Watch {
    deadlines: Deadlines,
    timers: Option<TimerFile>,
    steps: Steps,
    round: u64,
    workers: BTreeMap<u32, Watched>,
    outbox: mpsc::UnboundedSender<Verdict>,
}

impl Watch {
    async fn run(mut self, mut inbox: mpsc::UnboundedReceiver<Order>) {
        loop {
            // At least a millisecond, so that a deadline that is just about to pass does not cause a busy loop.
            let sleep = |at: Time| sleep(at.since(elastic_store::clock::now()).max(Duration::from_millis(1)));
            let look = OptionFuture::from(self.deadlines.next().map(sleep));
            tokio::select! {
                // A stop takes precedence over a deadline that passed at the same moment.
                biased;
                order = inbox.recv() => match order {
                    Some(order) => self.obey(order),
                    None => return,
                },
                Some(request) = OptionFuture::from(self.timers.as_mut().map(TimerFile::next)) => self.request(request),
                Some(()) = look => self.look(&mut inbox).await,
            }
        }
    }

    fn obey(&mut self, order: Order) {
        match order {
            Order::Begin { round, workers } => {
                self.round = round;
                self.deadlines
                    .begin(elastic_store::clock::now(), workers.iter().map(|worker| (worker.local_rank, worker.pid)));
                self.workers = workers.into_iter().map(|worker| (worker.local_rank, worker)).collect();
            }
            Order::Ended { local_rank } => self.deadlines.ended(local_rank),
            Order::End => self.deadlines.begin(elastic_store::clock::now(), []),
        }
    }

    fn request(&mut self, request: TimerRequest) {
        let now = elastic_store::clock::now();
        match request {
            TimerRequest::Release { pid, scope } => self.deadlines.release(now, pid, scope),
            TimerRequest::Set { pid, scope, left, signal } => match self.owner(pid) {
                Some(local_rank) => self.deadlines.set_timer(now, local_rank, pid, scope, now + left, signal),
                None => tracing::debug!(pid, scope, "a timer of a process that belongs to no worker"),
            },
        }
    }

    /// The worker that a process belongs to. Each worker leads a session, and its children share it.
    fn owner(&self, pid: i32) -> Option<u32> {
        let session = tree::session(Pid::from_raw(pid)?)?;
        self.deadlines
            .workers()
            .find(|(_, worker)| *worker == pid || *worker == session)
            .map(|(local_rank, _)| local_rank)
    }

    /// Looks whether a deadline has passed, or whether there were newer signs of progress.
    async fn look(&mut self, inbox: &mut mpsc::UnboundedReceiver<Order>) {
        let now = elastic_store::clock::now();
        if self.deadlines.wants_samples(now) {
            for (local_rank, pid) in self.deadlines.workers().collect::<Vec<_>>() {
                // If the process is gone, the guard will report it.
                let status = tree::text(format!("/proc/{pid}/status")).unwrap_or_default();
                if let Some(sample) = Sample::parse(&status) {
                    self.deadlines.sampled(now, local_rank, sample);
                }
            }
        }
        if self.deadlines.wants_signs(now) {
            let workers: Vec<Watched> = self.workers.values().cloned().collect();
            for worker in &workers {
                let step = (self.steps)(worker.local_rank).map(|(_, at)| at);
                step.into_iter().for_each(|at| self.deadlines.moved(worker.local_rank, at));
            }
            // This runs outside this task, because reading may take long on some file systems.
            let look = move || {
                let output = |worker: Watched| Some((worker.local_rank, output(worker.directory.as_deref()?, now)?));
                workers.into_iter().filter_map(output).collect::<Vec<_>>()
            };
            for (local_rank, at) in stacks::in_time(look).await.unwrap_or_default() {
                self.deadlines.moved(local_rank, at);
            }
        }
        let expired = self.deadlines.expired(now);
        if expired.is_empty() {
            return;
        }
        let verdicts = self.judge(expired).await;
        // These orders came while stacks were being collected. `LocalGroup::condemn` ignores verdicts that are stale
        // by now.
        while let Ok(order) = inbox.try_recv() {
            self.obey(order);
        }
        for verdict in verdicts {
            // If no receiver is left, the agent is ending.
            let _ = self.outbox.send(verdict);
        }
    }

    async fn judge(&self, expired: Vec<Expired>) -> Vec<Verdict> {
        let judged = expired.into_iter().map(|expired| self.judge_one(expired));
        join_all(judged).await.into_iter().flatten().collect()
    }

    async fn judge_one(&self, Expired { local_rank, pid, cause }: Expired) -> Option<Verdict> {
        let worker = self.workers.get(&local_rank)?;
        let signal = match cause {
            Cause::Timer { signal, .. } => Signal::from_named_raw(signal),
            _ => Some(Signal::KILL),
        };
        let Some(signal) = signal else {
            tracing::warn!(pid, "{cause}; the timer names no signal, so the agent sends none");
            return None;
        };
        let stacks = stacks::collect(pid).await;
        let file = match &worker.directory {
            Some(directory) => stacks::write(directory, stacks.text).await,
            None => None,
        };
        let place =
            Some(stacks.excerpt).filter(|excerpt| !excerpt.is_empty()).map(|place| format!("; main thread {place}"));
        let file = file.map(|file| format!("; stacks in {}", file.display()));
        let step = (self.steps)(local_rank).filter(|_| matches!(cause, Cause::Progress(_)));
        let step = step.map(|(step, _)| format!(" after step {step}")).unwrap_or_default();
        let message = format!("{cause}{step}{}{}", place.unwrap_or_default(), file.unwrap_or_default());
        if pid == worker.pid {
            return Some(Verdict { round: self.round, local_rank, signal, message });
        }
        // A process that the worker started hangs, not the worker itself. The worker decides what that means.
        tracing::warn!(local_rank, pid, "a process of this worker hangs: {message}; ending the process");
        if let Some(process) =
            Pid::from_raw(pid).and_then(tree::process).filter(|_| self.owner(pid) == Some(local_rank))
            && let Err(error) = process.signal(signal)
        {
            tracing::warn!(pid, %error, "cannot end the process");
        }
        None
    }
}

/// When one of a worker's output files last grew.
fn output(directory: &Path, now: Time) -> Option<Time> {
    let age = |name: &str| {
        let metadata = std::fs::metadata(directory.join(name)).ok().filter(|metadata| metadata.len() > 0)?;
        // The wall clock may have been changed meanwhile. A file from the future counts as new.
        Some(SystemTime::now().duration_since(metadata.modified().ok()?).unwrap_or(Duration::ZERO))
    };
    let youngest = ["stdout.log", "stderr.log"].into_iter().filter_map(age).min()?;
    Some(now.minus(youngest))
}
