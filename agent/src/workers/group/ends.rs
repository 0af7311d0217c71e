//! Ends of workers: gathers and judges what the workers left behind, and reports the end of the group.

use std::path::Path;
use std::time::Duration;

use elastic_node::GroupReport;
use elastic_rendezvous::Outcome;
use elastic_rendezvous::job::{Failure, FailureClass};

use super::phase::{ExitMeans, Input};
use super::{LAST_LINES, LocalGroup, WorkerProcess};
use crate::guard::Exit;
use crate::output::events;
use crate::output::outcome::judge::{Evidence, judge};
use crate::output::outcome::recorded::Recorded;
use crate::workers::guard_client::Exited;
use crate::workers::signals;
use crate::workers::socket::WorkerSocket;

/// A program that ends so soon has hardly got beyond what each start does.
const START: Duration = Duration::from_secs(60);

/// The most characters of a command line in the log.
const COMMAND: usize = 120;

impl LocalGroup {
    /// The node lost its workers. This is a change of membership, not a failure of the workers.
    pub(super) fn lost(&self, message: String) -> GroupReport {
        self.failed(self.failure(FailureClass::Lost, message).bounded())
    }

    pub(super) fn failed(&self, failure: Failure) -> GroupReport {
        GroupReport::Ended { round: self.round, outcome: Outcome::Failed(failure) }
    }

    pub(super) fn failure(&self, class: FailureClass, message: String) -> Failure {
        let (host, at_ms) = (Some(self.setup.host.clone()), Some(elastic_store::clock::epoch_ms()));
        Failure { host, at_ms, ..Failure::new(class, message) }
    }

    pub(super) async fn exited(&mut self, exited: Exited, socket: &WorkerSocket) -> Option<GroupReport> {
        let subject = self.note(exited)?.subject(exited.local_rank, None);
        let (rank, pid) = (subject.rank, subject.pid);
        match self.phase.exit() {
            ExitMeans::News => {}
            ExitMeans::Expected => {
                self.events.worker(events::EventState::Terminated, &subject);
                return None;
            }
            ExitMeans::Nothing => return None,
        }
        let round = self.round;
        if exited.exit.success() {
            self.events.worker(events::EventState::Succeeded, &subject);
            tracing::info!(round, rank, pid, "worker done");
            let all_done = self.workers.len() == self.setup.slots as usize
                && self.workers.values().all(|worker| worker.exit.is_some_and(Exit::success));
            if all_done {
                self.step(Input::Report);
            }
            return all_done.then_some(GroupReport::Ended { round, outcome: Outcome::Done });
        }
        self.step(Input::Report);
        if self.leaving.is_some() {
            // The sender of the agent's signal may have signalled its workers, too.
            self.events.worker(events::EventState::Terminated, &subject);
            tracing::info!(round, rank, pid, "worker ended: {}", exited.exit);
            return Some(self.failed(self.failure(FailureClass::Signalled, exited.exit.to_string())));
        }
        let mut failure = self.explain(exited, socket).await?;
        // It may be only by chance that this exit was seen first. A worker that failed by itself takes precedence over
        // one that the agent stopped or that lost its peers.
        let others = self.guard.exited_meanwhile().await;
        for other in &others {
            self.note(*other);
        }
        if failure.class < FailureClass::Own {
            // Explains all exits at the same time, because each may take [`LAST_LINES`], and this task renews the
            // node's lease.
            let failed = others.iter().filter(|other| !other.exit.success());
            let explained = futures::future::join_all(failed.map(|other| self.explain(*other, socket))).await;
            for other in explained.into_iter().flatten() {
                failure = if other.class > failure.class { other } else { failure };
            }
        }
        tracing::warn!(round, rank = failure.rank, pid = failure.pid, "worker failed: {}", failure.message);
        for ended in std::iter::once(exited).chain(others) {
            self.tell_end(ended, &failure);
        }
        Some(self.failed(failure))
    }

    /// Writes the event of a worker that ended by itself, where `failure` is the one that counts.
    fn tell_end(&self, ended: Exited, failure: &Failure) {
        let Some(worker) = self.workers.get(&ended.local_rank).filter(|worker| worker.pid == ended.pid) else { return };
        if ended.exit.success() {
            return self.events.worker(events::EventState::Succeeded, &worker.subject(ended.local_rank, None));
        }
        let counts = failure.local_rank == Some(ended.local_rank);
        let message = if counts { failure.message.clone() } else { ended.exit.to_string() };
        let how = (ended.exit.number(), message.as_str());
        self.events.worker(events::EventState::Failed, &worker.subject(ended.local_rank, Some(how)));
    }

    /// Records how a worker ended, if it belongs to this round.
    fn note(&mut self, exited: Exited) -> Option<&WorkerProcess> {
        let worker = self.workers.get_mut(&exited.local_rank).filter(|worker| worker.pid == exited.pid)?;
        worker.exit = Some(exited.exit);
        self.publish();
        self.workers.get(&exited.local_rank)
    }

    /// Gathers what a dead worker left behind, and judges its end.
    async fn explain(&self, exited: Exited, socket: &WorkerSocket) -> Option<Failure> {
        let Exited { local_rank, exit, at, .. } = exited;
        let at_ms = elastic_store::clock::epoch_ms()
            .saturating_sub(u64::try_from(elastic_store::clock::now().since(at).as_millis()).unwrap_or(0));
        let worker = self.workers.get(&local_rank)?;
        tokio::join!(worker.logs.settled(LAST_LINES), socket.heard_out(local_rank, LAST_LINES));
        let (stderr, error_file) = (worker.logs.stderr(), worker.logs.error_file().map(Path::to_owned));
        // Reading may take long on some file systems, and this task renews the node's lease.
        let reading = tokio::task::spawn_blocking(move || {
            let recorded = error_file.and_then(|path| Recorded::read(&path));
            (recorded, stderr.read())
        });
        let read = tokio::time::timeout(LAST_LINES, reading).await;
        let (recorded, stderr) = read.ok().and_then(Result::ok).unwrap_or_default();
        let evidence = Evidence {
            exit,
            told: socket.failing(local_rank),
            recorded,
            stderr,
            before: self.victims.clone(),
            after: self.counters.read(),
            asked_to_stop: signals::asks_to_stop(exit, &self.setup.signals),
        };
        let (at_start, host) = (at.since(worker.since) < START, Some(self.setup.host.clone()));
        Some(worker.failure(local_rank, Failure { at_start, at_ms: Some(at_ms), host, ..judge(&evidence) }))
    }
}

/// Says which processes the workers left when they succeeded.
pub(super) async fn name_left(pids: Vec<i32>, patience: Duration) {
    // Reading a command line waits for a lock that a process may hold while it waits for a disk.
    let read = move || pids.into_iter().filter_map(described).collect::<Vec<_>>();
    let left = tokio::time::timeout(LAST_LINES, tokio::task::spawn_blocking(read)).await;
    let left = left.ok().and_then(Result::ok).unwrap_or_else(|| vec!["they cannot be read".to_owned()]);
    if !left.is_empty() {
        tracing::warn!(
            "the workers have succeeded, and processes that they started are still there: {}. They have {patience:.0?} \
             to end, and are then stopped. Work that the job must wait for belongs into the worker's own process",
            left.join(", ")
        );
    }
}

/// A process with its command line. `None` if it is gone.
fn described(pid: i32) -> Option<String> {
    let command = std::fs::read(format!("/proc/{pid}/cmdline")).ok()?;
    let words = String::from_utf8_lossy(&command).trim_end_matches('\0').replace('\0', " ");
    let shown: String = words.chars().take(COMMAND).collect();
    (!shown.is_empty()).then(|| format!("pid {pid} ({})", shown.escape_debug()))
}
