//! What the agent knows of the workers that talk to it. Nothing is read or written here.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use elastic_node::Status;
use elastic_proto::worker::{Assignment, FailureClass, ToWorker};
use elastic_rendezvous::time::Time;
use tokio::sync::mpsc::error::TrySendError;
use tokio::sync::{Notify, mpsc, watch};
use tokio::time::Instant;

use super::outgoing::Outgoing;
use crate::store::participation::{JobPaths, JobStore};
use crate::workers::snapshot_memory::Memories;

/// How far a worker has come in a round, as it reported.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Progress {
    /// The first step that it reported, and when.
    pub first: (u64, Time),
    /// Its newest step, and when it first reported that.
    pub last: (u64, Time),
    /// Epoch, counted from 0.
    pub epoch: Option<u64>,
    /// The newest training loss.
    pub loss: Option<f64>,
    /// Steps planned in all.
    pub total_steps: Option<u64>,
}

/// How long a step of a worker took, by the newest two times between its reports. Those before a round count too, also of
/// a worker whose place this one took.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct StepTimes([Option<Duration>; 2]);

impl StepTimes {
    fn took(&mut self, steps: u64, time: Duration) {
        self.0 = [Some(time.div_f64(steps.max(1) as f64)), self.0[0]];
    }

    /// The shorter one: what comes between two steps now and then, such as an evaluation, is no part of a step.
    pub(super) fn step(&self) -> Option<Duration> {
        let [newest, before] = self.0;
        Some(newest?.min(before?))
    }
}

/// How far the furthest worker of this node has come in the newest round in which one has reported a step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Furthest {
    /// The round.
    pub round: u64,
    /// The node's position in the round.
    pub group_rank: u32,
    /// What the worker reported.
    pub progress: Progress,
}

/// What a worker can do when a round forms, as far as it has told the agent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Awareness {
    /// It has not registered.
    Unknown,
    /// It must be stopped.
    Unaware,
    /// It can quiesce.
    Aware,
    /// It has quiesced.
    Quiesced,
}

/// What may come with a step.
pub(super) struct Said {
    pub(super) epoch: Option<u64>,
    pub(super) loss: Option<f64>,
    pub(super) total_steps: Option<u64>,
}

/// What the workers of the current round have reported.
#[derive(Debug, Default)]
pub(super) struct Told {
    pub(super) failing: BTreeMap<u32, (FailureClass, String)>,
    pub(super) progress: BTreeMap<u32, Progress>,
}

/// A worker's request for another round.
#[derive(Debug)]
pub struct RoundRequest {
    /// The worker.
    pub local_rank: u32,
    /// The round that it wants to leave.
    pub round: u64,
    /// Why, for people.
    pub reason: String,
}

/// State shared by all connections.
pub(super) struct Shared {
    pub(super) rendezvous: JobStore,
    pub(super) paths: JobPaths,
    pub(super) status: watch::Receiver<Status>,
    /// Whether what the job did before this agent's first round counts for nothing.
    pub(super) fresh: bool,
    pub(super) state: Mutex<SocketState>,
    /// Notified when all that had come on a connection is read, or the connection has ended.
    pub(super) heard: Notify,
    /// Notified when a worker's awareness may have changed.
    pub(super) awareness: Notify,
    /// Notified when a worker has asked for another round.
    pub(super) round_asked: Notify,
    /// Notified when a worker has said whether the training is over.
    pub(super) finished: Notify,
}

/// A worker's connection, until it is read to its end.
pub(super) struct Connection {
    pub(super) line: mpsc::Sender<Outgoing>,
    /// Closes the connection.
    pub(super) let_go: Arc<Notify>,
    pub(super) registered: Option<Registered>,
    /// Asks whether all that had come is read. `heard` is true once it is.
    pub(super) asked: Arc<Notify>,
    pub(super) heard: bool,
    /// The process id of the peer that opened it.
    pub(super) pid: Option<i32>,
}

impl Connection {
    /// Sends the worker news of rounds, or closes the connection if there is no room for it.
    pub(super) fn tell(&self, message: ToWorker) {
        if let Err(TrySendError::Full(_)) = self.line.try_send(message.into()) {
            tracing::warn!(pid = self.pid, "a worker does not read its agent's messages: closing its connection");
            self.let_go.notify_one();
        }
    }
}

#[derive(Clone, Copy)]
pub(super) struct Registered {
    pub(super) local_rank: u32,
    pub(super) aware: bool,
    pub(super) quiesced: bool,
    /// Whether the worker has received its first place.
    pub(super) welcomed: bool,
}

#[derive(Default)]
pub(super) struct SocketState {
    /// The places of this node's workers, by local rank. Empty while no workers run.
    pub(super) places: Vec<Assignment>,
    /// How long a worker waits at a barrier.
    pub(super) barrier_timeout: Duration,
    /// Until when the workers are to register, if they were started before they had places.
    pub(super) ahead: Option<Instant>,
    pub(super) told: Told,
    pub(super) furthest: Option<Furthest>,
    /// The first round in which this agent's workers had places.
    pub(super) first_round: Option<u64>,
    /// What a worker said last of whether the training is over, until it is taken.
    pub(super) finished: Option<bool>,
    /// By local rank.
    pub(super) step_times: BTreeMap<u32, StepTimes>,
    /// Steps that take longer than this are warned of, once.
    pub(super) longest_step: Option<Duration>,
    /// What the agent told the workers about the round that is forming.
    pub(super) forming: Option<ToWorker>,
    /// The first request to leave the newest round that a worker has asked to leave, until it is taken.
    pub(super) round_asked: Option<RoundRequest>,
    /// The workers' memory that outlives them.
    pub(super) memories: Memories,
    pub(super) next: u64,
    pub(super) connections: BTreeMap<u64, Connection>,
}

impl SocketState {
    /// What the connections that have registered can do.
    pub(super) fn registered(&self) -> impl Iterator<Item = Registered> {
        self.connections.values().filter_map(|connection| connection.registered)
    }

    /// Registers a worker on a connection. Returns the messages to send to it.
    pub(super) fn register(&mut self, id: u64, local_rank: u32, aware: bool) -> Vec<ToWorker> {
        let place = self.places.get(local_rank as usize).cloned();
        if place.is_none() && self.ahead.is_none() {
            let message = format!("no worker of this node has local rank {local_rank} just now");
            return vec![ToWorker::Error { id: None, message, again: false }];
        }
        let welcomed = place.is_some();
        if let Some(connection) = self.connections.get_mut(&id) {
            connection.registered = Some(Registered { local_rank, aware, quiesced: aware && !welcomed, welcomed });
        }
        // The worker may register so late that the next round is already forming.
        let forming = self.forming.clone().filter(|_| welcomed);
        place.map(ToWorker::Welcome).into_iter().chain(forming).collect()
    }

    /// Records that the worker of this local rank has done `step` steps.
    pub(super) fn progressed(&mut self, local_rank: u32, step: u64, said: Said) {
        let now = (step, elastic_store::clock::now());
        let before = self.told.progress.get(&local_rank);
        let progress = Progress {
            // A worker that goes back to an earlier step counts from there.
            first: before.map(|before| before.first).filter(|first| first.0 <= step).unwrap_or(now),
            last: before.map(|before| before.last).filter(|last| last.0 == step).unwrap_or(now),
            epoch: said.epoch,
            loss: said.loss.or(before.and_then(|before| before.loss)),
            total_steps: said.total_steps,
        };
        if let Some((done, at)) = before.map(|before| before.last).filter(|(done, _)| *done < step) {
            self.step_times.entry(local_rank).or_default().took(step - done, now.1.since(at));
        }
        self.told.progress.insert(local_rank, progress);
        self.warn_of_long_steps(local_rank);
        let Some(place) = self.places.get(local_rank as usize) else { return };
        let (round, group_rank) = (place.round, place.group_rank);
        if self.furthest.is_none_or(|furthest| furthest.round != round || furthest.progress.last.0 <= step) {
            self.furthest = Some(Furthest { round, group_rank, progress });
        }
    }

    /// Warns once if the steps of a worker that could quiesce are too long for that.
    fn warn_of_long_steps(&mut self, local_rank: u32) {
        let is_aware = self.registered().any(|worker| worker.local_rank == local_rank && worker.aware);
        let step = self.step_times.get(&local_rank).and_then(StepTimes::step).filter(|_| is_aware);
        if let Some(step) = step
            && let Some(longest) = self.longest_step.take_if(|longest| step > *longest)
        {
            let [step, longest] = [step, longest].map(|time| time.as_secs_f64());
            tracing::warn!(
                "a step takes {step:.1} s, and has {longest:.1} s to end once members change: then it is lost, or workers \
                 that cannot give it up are stopped; to keep it, give --rdzv-conf a stop_grace of {:.0} s on all nodes",
                (4.0 * step).ceil()
            );
        }
    }

    /// Records that the worker of a connection asks for another round instead of `round`.
    pub(super) fn ask_round(&mut self, id: u64, round: u64, reason: String) -> Result<(), &'static str> {
        let Some(Registered { local_rank, aware: true, .. }) = self.connections.get(&id).and_then(|it| it.registered)
        else {
            return Err("only a worker that has registered with `round_aware` can ask for a round");
        };
        let asked = self.round_asked.take().filter(|asked| asked.round >= round);
        self.round_asked = asked.or(Some(RoundRequest { local_rank, round, reason }));
        Ok(())
    }

    /// Records that the worker of a connection has quiesced.
    pub(super) fn quiesced(&mut self, id: u64) -> Result<(), &'static str> {
        let worker = self.connections.get_mut(&id).and_then(|connection| connection.registered.as_mut());
        match worker {
            Some(worker) if worker.aware && self.forming.is_some() => {
                worker.quiesced = true;
                Ok(())
            }
            Some(worker) if worker.aware => Err("no round is forming, so there is nothing to quiesce for"),
            _ => Err("only a worker that has registered with `round_aware` can quiesce"),
        }
    }
}

impl Shared {
    pub(super) fn state(&self) -> MutexGuard<'_, SocketState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_steps_time_is_the_shorter_of_the_newest_two() {
        let seconds = Duration::from_secs;
        for (what, reports, expected) in [
            ("nothing is known", &[][..], None),
            ("the first may be followed by a pause", &[(1, 4)], None),
            ("a step", &[(1, 4), (1, 5)], Some(4)),
            ("reports of ten steps each", &[(10, 40), (10, 40)], Some(4)),
            ("an evaluation between two steps", &[(1, 4), (1, 90), (1, 5)], Some(5)),
            ("shorter ones, in a larger world", &[(1, 9), (1, 9), (1, 3)], Some(3)),
            ("longer ones, in a smaller world", &[(1, 3), (1, 9), (1, 8)], Some(8)),
        ] {
            let mut times = StepTimes::default();
            reports.iter().for_each(|(steps, time)| times.took(*steps, seconds(*time)));
            assert_eq!(times.step(), expected.map(seconds), "{what}");
        }
    }

    #[test]
    fn a_request_for_an_earlier_round_hides_none_for_a_later_one() {
        let mut state = SocketState::default();
        for local_rank in [0, 1] {
            let registered = Some(Registered { local_rank, aware: true, quiesced: false, welcomed: true });
            let (line, (let_go, asked)) = (mpsc::channel(1).0, Default::default());
            state
                .connections
                .insert(u64::from(local_rank), Connection { line, let_go, registered, asked, heard: false, pid: None });
        }
        // Given one worker that is a round behind, and asks before and after the other
        for (id, round) in [(0, 3), (1, 4), (0, 3), (0, 4)] {
            state.ask_round(id, round, String::new()).unwrap();
        }
        let asked = state.round_asked.expect("a request");
        assert_eq!((asked.round, asked.local_rank), (4, 1));
    }
}
