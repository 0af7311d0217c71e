//! The deadlines after which a worker of this node counts as hung. This is a pure record. `stacks.rs` finds out what a
//! worker is doing.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use elastic_rendezvous::time::Time;

use crate::machine::field;

/// A worker's state is sampled this many times within the time that it may spend in an uninterruptible wait.
const SAMPLES: u32 = 8;

/// What the watchdog watches for. By default this is nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct HangLimits {
    /// The longest time without a sign of progress.
    pub progress: Option<Duration>,
    /// The longest single uninterruptible wait in the kernel.
    pub uninterruptible: Option<Duration>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Cause {
    /// The worker gave no sign of progress for this time.
    Progress(Duration),
    /// The worker was in one uninterruptible wait for this time.
    Uninterruptible(Duration),
    /// One of the worker's own timers expired.
    Timer {
        /// The worker's name for the timer.
        scope: String,
        /// The number of the signal that the timer asks for. Zero or less: no signal.
        signal: i32,
    },
}

impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Cause::Progress(limit) => write!(f, "no progress for {limit:?} (--progress-timeout)"),
            Cause::Uninterruptible(limit) => write!(
                f,
                "in one uninterruptible wait in the kernel for {limit:?} (TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT): \
                 a device or a file system does not answer"
            ),
            Cause::Timer { scope, .. } => write!(f, "its timer {scope:?} expired"),
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Expired {
    pub local_rank: u32,
    /// The process. This is the worker, or for a timer perhaps one of the worker's children.
    pub pid: i32,
    pub cause: Cause,
}

/// A process's state, from `/proc/<pid>/status`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Sample {
    /// State `D`: it waits in the kernel and takes no signal, not even SIGKILL.
    pub uninterruptible: bool,
    /// How often it has waited for something. Two samples with the same number are from the same wait.
    pub waits: u64,
}

impl Sample {
    /// Parses the text of `/proc/<pid>/status`. `None` if the text is something else.
    pub(crate) fn parse(status: &str) -> Option<Sample> {
        let state = field(status, "State")?;
        let waits = field(status, "voluntary_ctxt_switches")?.parse().ok()?;
        Some(Sample { uninterruptible: state.starts_with('D'), waits })
    }
}

#[derive(Debug, Clone)]
struct WatchedWorker {
    pid: i32,
    /// When it last gave a sign of progress, or was started.
    moved: Time,
    /// The number of the wait that it is in, and the earliest time at which that wait was seen.
    stuck: Option<(u64, Time)>,
}

#[derive(Debug, Clone)]
struct Timer {
    local_rank: u32,
    until: Time,
    signal: i32,
}

/// The deadlines of this node's workers.
#[derive(Debug, Clone, Default)]
pub(crate) struct Deadlines {
    limits: HangLimits,
    workers: BTreeMap<u32, WatchedWorker>,
    /// Timers by process id and scope.
    timers: BTreeMap<(i32, String), Timer>,
    sampled: Time,
}

impl Deadlines {
    pub(crate) fn new(limits: HangLimits) -> Deadlines {
        Deadlines { limits, ..Deadlines::default() }
    }

    /// Starts watching these workers, given by local rank and process id, from now on. All others are dropped.
    pub(crate) fn begin(&mut self, now: Time, workers: impl IntoIterator<Item = (u32, i32)>) {
        let begun = |(local_rank, pid)| (local_rank, WatchedWorker { pid, moved: now, stuck: None });
        self.workers = workers.into_iter().map(begun).collect();
        self.timers.clear();
        self.sampled = now;
    }

    /// Stops watching a worker, which has ended or whose end is handled elsewhere from now on.
    pub(crate) fn ended(&mut self, local_rank: u32) {
        self.workers.remove(&local_rank);
        self.timers.retain(|_, timer| timer.local_rank != local_rank);
    }

    /// The workers that are watched, by local rank and process id.
    pub(crate) fn workers(&self) -> impl Iterator<Item = (u32, i32)> {
        self.workers.iter().map(|(local_rank, worker)| (*local_rank, worker.pid))
    }

    /// Records that a worker gave a sign of progress.
    pub(crate) fn moved(&mut self, local_rank: u32, at: Time) {
        if let Some(worker) = self.workers.get_mut(&local_rank) {
            worker.moved = worker.moved.max(at);
        }
    }

    /// Records that a process of a worker sets a timer, or sets it again. This counts as progress, too.
    pub(crate) fn set_timer(&mut self, now: Time, local_rank: u32, pid: i32, scope: String, until: Time, signal: i32) {
        self.moved(local_rank, now);
        self.timers.insert((pid, scope), Timer { local_rank, until, signal });
    }

    /// Records that a process releases its timer. This counts as progress, too.
    pub(crate) fn release(&mut self, now: Time, pid: i32, scope: String) {
        if let Some(timer) = self.timers.remove(&(pid, scope)) {
            self.moved(timer.local_rank, now);
        }
    }

    pub(crate) fn sampled(&mut self, now: Time, local_rank: u32, sample: Sample) {
        self.sampled = now;
        if let Some(worker) = self.workers.get_mut(&local_rank) {
            worker.stuck = match worker.stuck {
                _ if !sample.uninterruptible => None,
                Some((waits, since)) if waits == sample.waits => Some((waits, since)),
                _ => Some((sample.waits, now)),
            };
        }
    }

    /// Whether the workers' states should be sampled now.
    pub(crate) fn wants_samples(&self, now: Time) -> bool {
        self.next_sample().is_some_and(|at| now >= at)
    }

    /// Whether to look for signs of progress now. A worker will count as hung unless there is a newer sign.
    pub(crate) fn wants_signs(&self, now: Time) -> bool {
        self.next_progress().is_some_and(|at| now >= at)
    }

    fn next_sample(&self) -> Option<Time> {
        let limit = self.limits.uninterruptible.filter(|_| !self.workers.is_empty())?;
        Some(self.sampled + (limit / SAMPLES).max(Duration::from_millis(10)))
    }

    fn next_progress(&self) -> Option<Time> {
        let limit = self.limits.progress?;
        self.workers.values().map(|worker| worker.moved + limit).min()
    }

    /// When to look next, at the latest.
    pub(crate) fn next(&self) -> Option<Time> {
        let timers = self.timers.values().map(|timer| timer.until).min();
        [self.next_sample(), self.next_progress(), timers].into_iter().flatten().min()
    }

    /// The deadlines that have passed by now. Each is returned once. A worker that is to be ended because of one is no
    /// longer watched.
    pub(crate) fn expired(&mut self, now: Time) -> Vec<Expired> {
        let mut expired = Vec::new();
        let due: Vec<_> =
            self.timers.iter().filter(|(_, timer)| now >= timer.until).map(|(key, _)| key.clone()).collect();
        for (pid, scope) in due {
            let Some(Timer { local_rank, signal, .. }) = self.timers.remove(&(pid, scope.clone())) else { continue };
            expired.push(Expired { local_rank, pid, cause: Cause::Timer { scope, signal } });
        }
        let past = |since: Time, limit: Option<Duration>| limit.filter(|limit| now.since(since) >= *limit);
        let mut hung: Vec<(Time, Expired)> = Vec::new();
        for (&local_rank, worker) in &self.workers {
            let stuck = worker.stuck.and_then(|(_, since)| past(since, self.limits.uninterruptible));
            let cause = match (stuck, past(worker.moved, self.limits.progress)) {
                (Some(limit), _) => Cause::Uninterruptible(limit),
                (None, Some(limit)) => Cause::Progress(limit),
                (None, None) => continue,
            };
            hung.push((worker.moved, Expired { local_rank, pid: worker.pid, cause }));
        }
        // The worker that stopped first is the likelier cause. The others may only have waited for it.
        hung.sort_by_key(|(moved, _)| *moved);
        expired.extend(hung.into_iter().map(|(_, expired)| expired));
        for Expired { local_rank, pid, cause } in &expired {
            let ends = !matches!(cause, Cause::Timer { signal, .. } if *signal <= 0);
            if ends && self.workers.get(local_rank).is_some_and(|worker| worker.pid == *pid) {
                self.workers.remove(local_rank);
            }
        }
        expired
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: u64) -> Time {
        Time::from_millis(seconds * 1000)
    }

    fn seconds(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    fn watched(progress: Option<u64>, uninterruptible: Option<u64>) -> Deadlines {
        let limits = HangLimits { progress: progress.map(seconds), uninterruptible: uninterruptible.map(seconds) };
        let mut deadlines = Deadlines::new(limits);
        deadlines.begin(at(100), [(0, 1000), (1, 1001)]);
        deadlines
    }

    #[test]
    fn nothing_is_watched_unless_it_is_asked_for() {
        let mut deadlines = watched(None, None);
        assert_eq!(deadlines.next(), None);
        assert_eq!(deadlines.expired(at(1_000_000)), []);
    }

    #[test]
    fn a_worker_without_a_sign_of_progress_expires_once_and_the_slowest_first() {
        let mut deadlines = watched(Some(10), None);
        deadlines.moved(0, at(105));
        deadlines.moved(1, at(104));
        // Signs may come late and out of order.
        deadlines.moved(1, at(102));
        assert_eq!(deadlines.next(), Some(at(114)));
        assert!(!deadlines.wants_signs(at(113)) && deadlines.wants_signs(at(114)));
        assert_eq!(deadlines.expired(at(113)), []);
        let hung: Vec<u32> = deadlines.expired(at(120)).iter().map(|expired| expired.local_rank).collect();
        assert_eq!(hung, [1, 0]);
        assert_eq!((deadlines.expired(at(200)), deadlines.next()), (vec![], None));
    }

    #[test]
    fn a_worker_that_has_ended_is_not_waited_for() {
        let mut deadlines = watched(Some(10), None);
        deadlines.set_timer(at(101), 0, 1000, "step".into(), at(105), 9);
        deadlines.ended(0);
        deadlines.ended(1);
        assert_eq!((deadlines.next(), deadlines.expired(at(500))), (None, vec![]));
    }

    #[test]
    fn timers_are_kept_by_process_and_scope_and_a_later_one_replaces() {
        let mut deadlines = watched(None, None);
        deadlines.set_timer(at(100), 0, 1000, "a".into(), at(110), 9);
        deadlines.set_timer(at(100), 0, 1000, "b".into(), at(111), 9);
        deadlines.set_timer(at(100), 1, 1001, "a".into(), at(112), 15);
        deadlines.set_timer(at(101), 0, 1000, "a".into(), at(120), 9);
        deadlines.release(at(102), 0, "a".into());
        deadlines.release(at(102), 1000, "b".into());
        assert_eq!(deadlines.next(), Some(at(112)));
        let cause = Cause::Timer { scope: "a".into(), signal: 15 };
        assert_eq!(deadlines.expired(at(112)), [Expired { local_rank: 1, pid: 1001, cause }]);
        let cause = Cause::Timer { scope: "a".into(), signal: 9 };
        assert_eq!(deadlines.expired(at(130)), [Expired { local_rank: 0, pid: 1000, cause }]);
    }

    #[test]
    fn setting_and_releasing_timers_is_progress() {
        let mut deadlines = watched(Some(10), None);
        deadlines.ended(1);
        deadlines.set_timer(at(108), 0, 1000, "a".into(), at(500), 9);
        assert_eq!(deadlines.next(), Some(at(118)));
        deadlines.release(at(117), 1000, "a".into());
        assert_eq!(deadlines.next(), Some(at(127)));
    }

    #[test]
    fn a_timer_without_a_signal_ends_no_worker() {
        let mut deadlines = watched(Some(10), None);
        deadlines.set_timer(at(100), 0, 1000, "a".into(), at(101), 0);
        assert_eq!(deadlines.expired(at(101)).len(), 1);
        assert_eq!(deadlines.workers().count(), 2, "it is watched on");
    }

    fn status(state: &str, waits: u64) -> Sample {
        let text = format!("Name:\tpython3\nUmask:\t0022\nState:\t{state}\nvoluntary_ctxt_switches:\t{waits}\n");
        Sample::parse(&text).unwrap()
    }

    #[test]
    fn one_long_uninterruptible_wait_expires_and_many_short_ones_do_not() {
        let (stuck, busy) = (0, 1);
        let mut deadlines = watched(None, Some(8));
        assert_eq!(deadlines.next(), Some(at(101)));
        for second in 101..109 {
            assert!(deadlines.wants_samples(at(second)));
            deadlines.sampled(at(second), stuck, status("D (disk sleep)", 7));
            // This worker reads a slow disk: every sample finds it asleep, but each time in another wait.
            deadlines.sampled(at(second), busy, status("D (disk sleep)", second));
            assert_eq!(deadlines.expired(at(second)), []);
        }
        deadlines.sampled(at(109), stuck, status("D (disk sleep)", 7));
        deadlines.sampled(at(109), busy, status("S (sleeping)", 109));
        let cause = Cause::Uninterruptible(seconds(8));
        assert_eq!(deadlines.expired(at(109)), [Expired { local_rank: stuck, pid: 1000, cause }]);
    }

    #[test]
    fn a_wait_that_ended_between_two_samples_counts_from_the_second() {
        let mut deadlines = watched(None, Some(8));
        deadlines.sampled(at(101), 0, status("D (disk sleep)", 1));
        deadlines.sampled(at(105), 0, status("D (disk sleep)", 2));
        assert_eq!(deadlines.expired(at(110)), []);
        assert_eq!(deadlines.expired(at(113)).len(), 1);
    }

    #[test]
    fn a_text_that_is_no_status_is_no_sample() {
        assert_eq!(Sample::parse(""), None);
        assert_eq!(Sample::parse("State:\tD (disk sleep)\n"), None);
    }
}
