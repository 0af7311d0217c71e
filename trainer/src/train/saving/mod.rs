//! When a saved checkpoint counts, and what happens when saving fails while training continues. A
//! thread writes it: [`crate::checkpoint::writer`].
//!
//! A checkpoint is made durable, then committed by the agent; only then may older ones go. A disk that is slow, fills
//! up or hangs does not stop the training: the last good checkpoint stays, warnings get rarer, and the run ends with an
//! error if its last state could not be saved. Only that last save is waited for, as long as the caller allows.

#[cfg(test)]
mod tests;

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use elastic_collective::stop::{GLANCE, Stop};
use elastic_proto::worker::{Checkpoint, ToWorker};
use tracing::warn;

use crate::agent::{Agent, AgentError};
use crate::checkpoint::disk::Disk;
use crate::checkpoint::retention::Retention;
use crate::checkpoint::sharded_write::Share;
use crate::checkpoint::snapshot::SnapshotHeader;
use crate::checkpoint::snapshot_slots::SnapshotSlots;
use crate::checkpoint::writer::{ReservedSlot, WriteMode, Writer};
use crate::checkpoint::{CheckpointError, Checkpoints};

/// Unanswered commits after which saving pauses: while the store is away, checkpoints must not fill the disk.
const MOST_PENDING: usize = 4;

/// Pause after the first try to save the last state: the disk may have room again, or the store be back. The next are
/// twice as long each, up to the longest.
const TRY_AGAIN: Duration = Duration::from_millis(500);
const LONGEST_PAUSE: Duration = Duration::from_secs(4);

/// Tries to write it, which take 7.5 s with their pauses. A commit is tried for as long as there is time.
const LAST_WRITES: u32 = 5;

/// How long a checkpoint's folder may take to show that it can be written.
const PREPARE_TIME: Duration = Duration::from_secs(10);

/// A write that takes longer is suspected to hang.
const SLOW_TIME: Duration = Duration::from_secs(10);

/// Rank 0's checkpoints on their way to being the job's.
#[derive(Debug)]
pub(crate) struct Saving {
    writer: Writer,
    /// Durable, and not yet answered by the agent.
    pending: VecDeque<(u64, Checkpoint)>,
    /// The last that is durable, where the agent could not commit it.
    uncommitted: Option<Checkpoint>,
    /// Newest step on disk, and newest step that is committed.
    saved: u64,
    committed: u64,
    /// In a row, and in all.
    failures: u32,
    overtaken: u32,
    last_failure: String,
}

impl Saving {
    /// Starts to work in a folder, which must be there or have a parent, after `step` steps that are safe already.
    pub(crate) fn start<D: Disk + Send + 'static>(
        checkpoints: Checkpoints<D>,
        retention: Retention,
        slots: SnapshotSlots,
        step: u64,
    ) -> Result<Saving, CheckpointError> {
        let writer = Writer::start(checkpoints, retention, slots, PREPARE_TIME)?;
        Ok(Saving {
            writer,
            pending: VecDeque::new(),
            uncommitted: None,
            saved: step,
            committed: step,
            failures: 0,
            overtaken: 0,
            last_failure: String::new(),
        })
    }

    /// A slot to copy a snapshot of `step` to, which is to be saved, or only to be in memory;
    /// [`take_in`](Self::take_in) follows. None where there is nothing to be done, or nowhere to do it.
    pub(crate) fn reserve(&mut self, step: u64, write: bool) -> Option<ReservedSlot> {
        let write = write && step > self.newest();
        if write && self.has_room() {
            return self.writer.reserve(true);
        }
        if write {
            self.failed(format!("{} commits have no answer: is the store unreachable?", self.pending.len()));
        }
        if self.writer.slots().are_kept() { self.writer.reserve(false) } else { None }
    }

    /// A slot to copy a snapshot of `step` to, whose share is to be written.
    pub(crate) fn reserve_for_share(&mut self, step: u64, share: Share) -> Option<ReservedSlot> {
        if step <= self.newest() || !self.has_room() {
            return None;
        }
        self.writer.slots().take().map(|slot| ReservedSlot::for_share(slot, share))
    }

    /// The thread that writes.
    pub(crate) fn writer(&self) -> &Writer {
        &self.writer
    }

    /// Takes in a slot that was filled, to be saved while training continues: [`follow`](Self::follow) reports the
    /// result.
    pub(crate) fn take_in(&mut self, reserved: ReservedSlot) {
        let Some(overtaken) = self.writer.take_in(reserved) else { return };
        self.overtaken += 1;
        if self.overtaken.is_power_of_two() {
            let (times, cause) = (self.overtaken, self.slowness().unwrap_or("the disk is slower than that".to_owned()));
            warn!(
                "step {overtaken} is not saved ({times} so far); a newer step replaces it: {cause}; raise \
                --checkpoint-every"
            );
        }
    }

    /// Copies a state into a slot, to be saved; or has the slot saved that it is in. Returns whether there was a slot for
    /// it.
    fn save(&mut self, header: &SnapshotHeader, state: Option<&[f32]>) -> bool {
        let reserved = match state {
            Some(state) => self.reserve(header.step, true).map(|mut reserved| {
                reserved.slot.fill(header, state);
                reserved
            }),
            None => self.writer.again(header.step),
        };
        reserved.map(|reserved| self.take_in(reserved)).is_some()
    }

    /// The newest step that is committed, on its way, or in a slot.
    pub(crate) fn kept(&self) -> u64 {
        self.newest().max(self.writer.slots().newest())
    }

    /// A slot for the last state, whatever waits to be written or committed.
    pub(crate) fn reserve_last(&mut self, step: u64) -> Option<ReservedSlot> {
        if step <= self.newest() {
            return None;
        }
        self.writer.decide(WriteMode::Cancel);
        self.writer.slots().wait(PREPARE_TIME);
        self.writer.reserve(true)
    }

    /// Whether one more may be written: no more than a few commits stay unanswered.
    pub(crate) fn has_room(&self) -> bool {
        self.pending.is_empty() || self.pending.len() + self.writer.under_way() < MOST_PENDING
    }

    /// What is to be said of a write that has been under way for long.
    fn slowness(&self) -> Option<String> {
        let writing = self.writer.writing().filter(|writing| writing.since.elapsed() >= SLOW_TIME)?;
        Some(self.unwritten(writing.step, writing.since.elapsed()))
    }

    fn unwritten(&self, step: u64, time: Duration) -> String {
        let (seconds, folder) = (time.as_secs(), self.writer.folder().display());
        format!("step {step} has been written to {folder} for {seconds} s; does its file system hang?")
    }

    /// Takes in what has become of the writes since the last look: asks the agent to commit what is durable. Without an
    /// agent a durable checkpoint is a committed one, and is returned.
    pub(crate) fn follow(&mut self, mut agent: Option<&mut Agent>) -> Result<Vec<Checkpoint>, AgentError> {
        let mut committed = Vec::new();
        while let Some(ended) = self.writer.ended() {
            match ended {
                Err(error) => self.failed(error.to_string()),
                Ok(checkpoint) => {
                    self.saved = self.saved.max(checkpoint.step);
                    self.failures = 0;
                    match agent.as_deref_mut() {
                        None => committed.push(self.settle(checkpoint)),
                        Some(agent) => self.pending.push_back((agent.commit(&checkpoint)?, checkpoint)),
                    }
                }
            }
        }
        Ok(committed)
    }

    /// Hears the agent's answer to a commit. Returns the checkpoint that is now the job's.
    pub(crate) fn hear(&mut self, message: &ToWorker) -> Option<Checkpoint> {
        match message {
            ToWorker::Committed { id, .. } => {
                let place = self.pending.iter().position(|(pending, _)| pending == id)?;
                let (_, checkpoint) = self.pending.remove(place)?;
                // Answers come in order; an older one that is still open was overtaken.
                self.pending.retain(|(_, other)| other.step > checkpoint.step);
                (checkpoint.step > self.committed).then(|| self.settle(checkpoint))
            }
            ToWorker::Error { id: Some(id), message, again } => {
                let place = self.pending.iter().position(|(pending, _)| pending == id)?;
                let (_, checkpoint) = self.pending.remove(place)?;
                self.failed(format!("the commit of step {} failed: {message}", checkpoint.step));
                // Answers may come in any order: the newest is what counts.
                let newest = self.uncommitted.as_ref().is_none_or(|other| other.step < checkpoint.step);
                if *again && newest {
                    self.uncommitted = Some(checkpoint);
                }
                None
            }
            _ => None,
        }
    }

    /// Saves the last state and waits until it is committed and what it made superfluous is gone, for at most `time`,
    /// and after a stop no longer than that allows. What fails is tried again: this is the last chance. Says why if it
    /// is not committed. Without a `state`, it is in a slot.
    pub(crate) fn finish(
        &mut self,
        header: &SnapshotHeader,
        state: Option<&[f32]>,
        mut agent: Option<&mut Agent>,
        time: Duration,
        stop: &Stop,
        mut on_commit: impl FnMut(&Checkpoint),
    ) -> Result<(), String> {
        // What several write is older than this.
        self.writer.decide(WriteMode::Cancel);
        let (mut next_try, mut pause, mut writes) = (Instant::now(), TRY_AGAIN, LAST_WRITES);
        let deadline = next_try + time;
        loop {
            let committed = self.follow(agent.as_deref_mut()).map_err(|error| error.to_string())?;
            committed.iter().for_each(&mut on_commit);
            let safe = self.committed >= header.step;
            let now = Instant::now();
            let uncommitted = self.uncommitted.as_ref().is_some_and(|durable| durable.step == header.step);
            let unwritten = self.newest() < header.step && writes > 0;
            let tries = !safe && (uncommitted || unwritten) && now >= next_try;
            if tries && self.try_last(header, state, agent.as_deref_mut()).map_err(|error| error.to_string())? {
                (next_try, pause) = (now + pause, (pause * 2).min(LONGEST_PAUSE));
                writes -= u32::from(unwritten);
            }
            let at_rest = self.writer.is_idle() && self.pending.is_empty() && self.writer.under_way() == 0;
            let left = deadline.saturating_duration_since(now);
            let over = left.is_zero() || stop.interrupts(now) && (!stop.may_finish() || stop.left(now).is_zero());
            if over || (at_rest && (safe || !(uncommitted || unwritten))) {
                return if safe { Ok(()) } else { Err(self.overdue(time)) };
            }
            let glance = left.min(GLANCE);
            let message = match agent.as_deref_mut() {
                Some(agent) if self.writer.is_idle() => agent.next(Instant::now() + glance, &Stop::default()),
                Some(agent) => {
                    self.writer.wait(glance);
                    agent.poll()
                }
                None => {
                    self.writer.wait(glance);
                    Ok(None)
                }
            };
            if let Some(message) = message.map_err(|error| error.to_string())?
                && let Some(checkpoint) = self.hear(&message)
            {
                on_commit(&checkpoint);
            }
        }
    }

    /// Saves the last state, where there is room for it; commits it, where it is durable already. Returns whether
    /// either was begun.
    fn try_last(
        &mut self,
        header: &SnapshotHeader,
        state: Option<&[f32]>,
        agent: Option<&mut Agent>,
    ) -> Result<bool, AgentError> {
        let durable = self.uncommitted.take_if(|durable| durable.step == header.step);
        if let (Some(checkpoint), Some(agent)) = (durable, agent) {
            self.pending.push_back((agent.commit(&checkpoint)?, checkpoint));
            return Ok(true);
        }
        Ok(self.newest() < header.step && self.has_room() && self.save(header, state))
    }

    fn overdue(&self, time: Duration) -> String {
        match self.writer.writing() {
            Some(writing) => self.unwritten(writing.step, writing.since.elapsed()),
            None if !self.last_failure.is_empty() => self.last_failure.clone(),
            None => format!("the agent did not commit it within {} s", time.as_secs()),
        }
    }

    /// Training resumes after `step`, which is safe already.
    pub(crate) fn resumed(&mut self, step: u64) {
        self.saved = step;
        self.committed = step;
    }

    /// Whether a write is under way or a commit is unanswered.
    pub(crate) fn is_pending(&self) -> bool {
        !self.pending.is_empty() || self.writer.under_way() > 0
    }

    /// Waits for a write, for at most `time`, if that is what a commit waits for.
    pub(crate) fn wait(&self, time: Duration) -> bool {
        let writes = self.pending.is_empty() && self.writer.under_way() > 0;
        if writes {
            self.writer.wait(time);
        }
        writes
    }

    /// Newest step that is on disk or on its way there.
    pub(crate) fn newest(&self) -> u64 {
        self.saved.max(self.writer.newest().unwrap_or(0))
    }

    fn settle(&mut self, checkpoint: Checkpoint) -> Checkpoint {
        self.committed = checkpoint.step;
        self.writer.prune(checkpoint.clone());
        checkpoint
    }

    /// Warns of the first failure in a row, the second, the fourth, the eighth…
    fn failed(&mut self, cause: String) {
        self.failures += 1;
        if self.failures.is_power_of_two() {
            let (failures, committed) = (self.failures, self.committed);
            warn!(failures, "{cause}; training continues, but a restart would go back to step {committed}");
        }
        self.last_failure = cause;
    }
}
