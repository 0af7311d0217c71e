//! From one round to the next in the same process: leaving the peers, waiting for a place, agreeing with new peers on
//! the state to continue from.
//!
//! A surviving worker keeps its state in memory. Ranks may differ by one step: a rank has its step as soon as its own
//! sum is whole, and a peer may have died before another's was. So on every change the ranks compare the steps that
//! they hold. All continue from the furthest, and those that have it send it to those that do not: laggards, restarted
//! workers, and newcomers. Only where no rank holds a state, one is loaded from disk.

use std::time::{Duration, Instant};

use elastic_collective::stop::GLANCE;
use elastic_collective::{Group, GroupConfig, SumOrder, list_ranks};
use elastic_proto::worker::{Assignment, FailureClass};
use tracing::{info, warn};

use super::program;
use super::replicas::{self, Verdict};
use super::saving::Saving;
use super::{Holding, TrainError, Trainer};
use crate::checkpoint::snapshot::LastStep;
use crate::checkpoint::writer::WriteMode;
use crate::engine::state::State;
use crate::model::Model;

/// How long rank 0 waits for a write and for commits under way before it quiesces: another may be rank 0 then. A write
/// that takes longer continues, in a folder of its round's own, and is committed later if this is rank 0 still.
const COMMIT_TIME: Duration = Duration::from_millis(500);

/// How long one wait for the agent's next message lasts.
const LISTEN_TIME: Duration = Duration::from_secs(60);

impl<M: Model> Trainer<'_, M> {
    /// Whether another round can fix this error: there is an agent to announce it, and the error is about peers. While
    /// a round is forming, any error of a collective is an echo of what happens elsewhere.
    pub(super) fn may_pass(&self, error: &TrainError) -> bool {
        let forming = self.stop.forming_after(self.group_config.round).is_some();
        match error {
            error if error.is_stuck() => false,
            TrainError::Collective(error) | TrainError::GivenUp { cause: error, .. } => {
                self.agent.is_some() && (forming || error.class() == FailureClass::Peer)
            }
            TrainError::Damaged { .. } => self.agent.is_some(),
            _ => false,
        }
    }

    /// Writes down what the collectives have done, for users who ask why one was given up. Not while a round forms:
    /// then the reason is the round's.
    pub(super) fn with_record(&self, error: TrainError) -> TrainError {
        let TrainError::Collective(cause) = error else { return error };
        if cause.is_planned() || self.stop.forming_after(self.group_config.round).is_some() {
            return TrainError::Collective(cause);
        }
        match self.recorder.write(&self.group_config, &cause.to_string()) {
            Ok(Some(record)) => TrainError::GivenUp { cause, record },
            Ok(None) => TrainError::Collective(cause),
            Err(error) => {
                warn!(%error, "cannot write what the collectives have done; see ELASTIC_RECORD_DIR");
                TrainError::Collective(cause)
            }
        }
    }

    /// Leaves the round, for `cause` or as agreed; quiesces when the next one forms, and waits for a place in it.
    pub(super) fn next_place(&mut self, cause: Option<TrainError>) -> Result<Assignment, TrainError> {
        let (round, step) = (self.group_config.round, self.state.step);
        if let Some(group) = self.group.take() {
            group.leave();
        }
        match &cause {
            Some(cause) if self.stop.forming_after(round).is_none() => {
                warn!("{cause}; this worker waits for the next round, after step {step}");
            }
            // Peers leave because a round forms.
            cause => info!(cause = cause.as_ref().map(tracing::field::display), step, "left round {round}"),
        }
        let waited = self.settings.peer_timeout;
        let deadline = Instant::now() + waited;
        let forming = loop {
            if let Some(forming) = self.stop.forming_after(round) {
                break forming.round;
            }
            if !self.listen(deadline)? {
                return Err(cause.unwrap_or(TrainError::LeftAlone { round, waited }));
            }
        };
        // Now rank 0 alone writes a checkpoint that several had begun.
        self.decide(WriteMode::Whole);
        let commits_by = Instant::now() + COMMIT_TIME;
        while self.saving.as_ref().is_some_and(Saving::is_pending) && Instant::now() < commits_by {
            if !self.saving.as_ref().is_some_and(|saving| saving.wait(GLANCE)) {
                self.listen(commits_by)?;
            }
            self.follow()?;
        }
        if let Some(agent) = self.agent.as_mut() {
            agent.quiesced(forming, step)?;
        }
        info!(step, "quiesced for round {forming}");
        self.assigned = None;
        loop {
            if let Some(assignment) = self.assigned.take() {
                return Ok(assignment);
            }
            self.listen(Instant::now() + LISTEN_TIME)?;
        }
    }

    /// Takes in the agent's next word. Whether there was one before the deadline.
    fn listen(&mut self, deadline: Instant) -> Result<bool, TrainError> {
        let Some(agent) = self.agent.as_mut() else { return Ok(false) };
        match agent.next(deadline, self.stop)? {
            Some(message) => self.take(&message).map(|()| true),
            None => Ok(false),
        }
    }

    /// Continues in another place.
    pub(super) fn take_place(&mut self, assignment: Assignment) {
        self.group_config = super::assigned(self.group_config.clone(), &assignment);
        self.assignment = Some(assignment);
        self.draining = false;
    }

    /// Comes to one state with the peers of a new group.
    pub(super) fn agree(&mut self, group: &mut Group) -> Result<(), TrainError> {
        let begun = Instant::now();
        let committed = self.assignment.as_ref().and_then(|it| it.checkpoint.as_ref()).map_or(0, |it| it.step);
        self.prepare(committed)?;
        // No rank goes back behind what is committed. One more than the step: 0 is nothing.
        let own =
            if self.holding != Holding::Nothing && self.state.step >= committed { self.state.step + 1 } else { 0 };
        let program = if self.group_config.world_size > 1 { program::checksum() } else { 0 };
        let rescued = self.holding == Holding::Rescued;
        let all = group.gather([own, u64::from(rescued), self.offer_folder(), program])?;
        if rescued {
            self.holding = Holding::Reached;
        }
        self.compare_programs(&all.iter().map(|[.., program]| *program).collect::<Vec<_>>());
        self.find_writers(group, all.first().map_or(0, |[_, _, offer, _]| *offer))?;
        let newest = all.iter().map(|[held, ..]| *held).max().unwrap_or_default();
        let Some(step) = newest.checked_sub(1) else {
            self.begin(group)?;
            // A faulty disk or build shows here first.
            return self.share(group, self.state.step, &vec![true; all.len()]).map(drop);
        };
        let holds: Vec<bool> = all.iter().map(|[held, ..]| *held == newest).collect();
        let only_rescued = all.iter().all(|[held, rescued, ..]| *held != newest || *rescued > 0);
        let lacking = self.share(group, step, &holds)?;
        // The rank that writes the trace may not have done the step itself.
        if self.history.lacks(step) {
            self.record_step();
        }
        if only_rescued && step > committed {
            // All workers had died, and this step is in the agents' memory alone.
            self.save_soon = true;
        }
        let (round, took) = (self.group_config.round, begun.elapsed());
        info!(round, step, lacking, ?took, "continues from memory");
        Ok(())
    }

    /// Makes ready what a rank needs beside its state: rank 0 most of all.
    fn prepare(&mut self, committed: u64) -> Result<(), TrainError> {
        self.find_memory()?;
        let GroupConfig { rank, world_size, .. } = self.group_config;
        if rank > 0 {
            self.end_saving();
            self.history.close();
            return Ok(());
        }
        if u64::from(world_size) > u64::from(self.settings.shards.get()) {
            warn!("{world_size} workers share {} shards: some have no work; raise --shards", self.settings.shards);
        }
        self.begin_saving(committed)?;
        self.history.open(self.holding != Holding::Nothing)
    }

    /// Says so where ranks run different programs: their results may differ.
    fn compare_programs(&self, programs: &[u64]) {
        let others = program::others(programs);
        let rank = self.group_config.rank as usize;
        if !others.is_empty() && (rank == 0 || others.contains(&rank)) {
            warn!(
                "these ranks run another build of this program than rank 0: {}. Results may differ; install the same \
                 build on all nodes",
                list_ranks(&others)
            );
        }
    }

    /// Has all ranks hold the same state of `step`, from those that hold it: how many lacked it. Of those that hold it,
    /// what most have counts ([`replicas`]).
    pub(super) fn share(&mut self, group: &mut Group, step: u64, holds: &[bool]) -> Result<usize, TrainError> {
        if holds.len() < 2 {
            return Ok(0);
        }
        let rank = self.group_config.rank as usize;
        let holder = holds[rank];
        if holder {
            self.engine.give(&mut self.state)?;
        }
        let checksum = |state: &State| u64::from(crc32c::crc32c(bytemuck::cast_slice(&state.flat)));
        let own = if holder { checksum(&self.state) } else { 0 };
        // A round of 0 ranks: no rank here did the step; it was loaded.
        let done = self.last.unwrap_or(LastStep { round: 0, world_size: 0, loss: 0.0 });
        let told = [own, done.round, u64::from(done.world_size), u64::from(done.loss.to_bits())];
        let all = group.gather(told)?;
        let sums: Vec<Option<u64>> = all.iter().zip(holds).map(|([sum, ..], holds)| holds.then_some(*sum)).collect();
        let right = match replicas::judge(&sums, self.settings.sum_order == SumOrder::Any) {
            Verdict::Same => None,
            Verdict::Most(right) => Some(right),
            Verdict::Split => return Err(self.split(step, replicas::named(&sums))?),
        };
        if let Some(right) = &right
            && (rank == 0 || holder && !right[rank])
        {
            warn!(
                "these ranks differ from most after step {step}, and take the majority's state: {} ({}). A machine, \
                 its memory or a build there is faulty",
                list_ranks(&replicas::wrong(&sums, right)),
                replicas::named(&sums)
            );
        }
        let holds = right.as_deref().unwrap_or(holds);
        let (holder, lacking) = (holds[rank], holds.iter().filter(|&&holds| !holds).count());
        if lacking == 0 {
            return Ok(0);
        }
        let theirs: Vec<_> = all.iter().zip(holds).filter(|(_, holds)| **holds).map(|(told, _)| *told).collect();
        // Of two ranks that hold the step, one may have loaded it. Only one that did it knows how it was done.
        let Some(&[sum, round, world_size, loss]) = theirs.iter().max_by_key(|[_, _, world_size, _]| *world_size > 0)
        else {
            return Err(TrainError::Damaged { step });
        };
        // Until all of it is here, this rank holds no state.
        self.holding = if holder { Holding::Reached } else { Holding::Nothing };
        group.spread(holds, bytemuck::cast_slice_mut(&mut self.state.flat))?;
        if checksum(&self.state) != sum {
            return Err(TrainError::Damaged { step });
        }
        self.state.step = step;
        if !holder {
            self.engine.take(&self.state)?;
        }
        self.holding = Holding::Reached;
        let done = LastStep { round, world_size: world_size as u32, loss: f32::from_bits(loss as u32) };
        self.last = Some(done).filter(|done| done.world_size > 0);
        Ok(lacking)
    }

    /// No rank knows what is right, so nothing of it is kept. Nor is the agent's memory, since the next start would
    /// take it up from there. Only what is committed is left.
    fn split(&mut self, step: u64, sums: String) -> Result<TrainError, TrainError> {
        self.holding = Holding::Nothing;
        (self.agent_memory, _) = self.agent_memory.in_round(false, true);
        self.give_memory_back()?;
        Ok(TrainError::Split { step, sums })
    }
}
