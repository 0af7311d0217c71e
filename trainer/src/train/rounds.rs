//! From one round to the next in the same process: leaving the peers, waiting for a place, agreeing with new peers on
//! the state to continue from.
//!
//! A surviving worker keeps its state in memory. Ranks may differ by one step: a rank has its step as soon as its own
//! sum is whole, and a peer may have died before another's was. So on every change the ranks compare the steps that
//! they hold. All continue from the furthest, and those that have it send it to those that do not: laggards, restarted
//! workers, and newcomers. Only where no rank holds a state, one is loaded from disk. Where the optimizer's numbers are
//! sharded, each rank holds a part, and `settling` does this.

use std::time::{Duration, Instant};

use elastic_collective::stop::GLANCE;
use elastic_collective::{Group, GroupConfig, list_ranks};
use elastic_proto::worker::{Assignment, ToWorker};
use tracing::{info, warn};

use super::held::Holding;
use super::program;
use super::{TrainError, Trainer};
use crate::checkpoint::writer::WriteMode;
use crate::model::Model;

/// How long rank 0 waits for a write and for commits under way before it quiesces: another may be rank 0 then. A write
/// that takes longer continues, in a folder of its round's own, and is committed later if this is rank 0 still.
const COMMIT_TIME: Duration = Duration::from_millis(500);

/// How long one wait for the agent's next message lasts.
const LISTEN_TIME: Duration = Duration::from_secs(60);

impl<M: Model> Trainer<'_, M> {
    /// Leaves the round, for `cause` or as agreed; quiesces when the next one forms, and waits for a place in it.
    pub(super) fn next_place(
        &mut self,
        group: Option<Group>,
        cause: Option<TrainError>,
    ) -> Result<Assignment, TrainError> {
        let (round, step) = (self.membership.config.round, self.held.state.step);
        group.into_iter().for_each(Group::leave);
        match &cause {
            Some(cause) if self.membership.forming().is_none() => {
                warn!("{cause}; this worker waits for the next round, after step {step}");
            }
            // Peers leave because a round forms.
            cause => info!(cause = cause.as_ref().map(tracing::field::display), step, "left round {round}"),
        }
        let waited = self.run.settings.peer_timeout;
        let deadline = Instant::now() + waited;
        let forming = loop {
            if let Some(forming) = self.membership.forming() {
                break forming.round;
            }
            if self.listen(deadline)?.is_none() {
                return Err(cause.unwrap_or(TrainError::LeftAlone { round, waited }));
            }
        };
        // Now rank 0 alone writes a checkpoint that several had begun.
        self.keeper.decide(WriteMode::Whole);
        let commits_by = Instant::now() + COMMIT_TIME;
        while let Some(saving) = self.keeper.saving().filter(|saving| saving.is_pending())
            && Instant::now() < commits_by
        {
            if !saving.wait(GLANCE) {
                self.listen(commits_by)?;
            }
            self.follow()?;
        }
        if let Some(agent) = self.membership.agent.as_mut() {
            agent.quiesced(forming, step)?;
        }
        info!(step, "quiesced for round {forming}");
        loop {
            if let Some(ToWorker::Assignment(assignment)) = self.listen(Instant::now() + LISTEN_TIME)? {
                return Ok(assignment);
            }
        }
    }

    /// Takes in the agent's next word, if there is one before the deadline.
    fn listen(&mut self, deadline: Instant) -> Result<Option<ToWorker>, TrainError> {
        let message = self.membership.next_message(deadline)?;
        message.iter().for_each(|message| self.take(message));
        Ok(message)
    }

    /// Comes to one state with the peers of a new group.
    pub(super) fn agree(&mut self, group: &mut Group) -> Result<(), TrainError> {
        let begun = Instant::now();
        let committed = self.membership.committed().map_or(0, |checkpoint| checkpoint.step);
        self.prepare(committed)?;
        // A copy may be due of the step that the round begins after.
        self.held.sharding.iter_mut().for_each(|sharding| sharding.assembles = true);
        // No rank goes back behind what is committed. One more than the step: 0 is nothing.
        let held = self.held.state.step;
        let own = if self.held.holds() && held >= committed { held + 1 } else { 0 };
        let program = if group.world_size() > 1 { program::checksum() } else { 0 };
        let rescued = self.held.holding == Holding::Rescued;
        let folder = self.run.settings.checkpoint_dir.as_deref();
        let offer = self.keeper.offer_folder(folder, self.membership.leads() && self.membership.nodes() > 1);
        let all = group.gather([own, u64::from(rescued), offer, program])?;
        if rescued {
            self.held.holding = Holding::Reached;
        }
        compare_programs(group, &all.iter().map(|[.., program]| *program).collect::<Vec<_>>());
        self.keeper.find_writers(group, folder, all.first().map_or(0, |[_, _, offer, _]| *offer))?;
        let newest = all.iter().map(|[held, ..]| *held).max().unwrap_or_default();
        if newest == 0 {
            self.begin(group)?;
            // A faulty disk or build shows here first.
            return self.share(group, &vec![self.held.state.step + 1; all.len()]).map(drop);
        }
        let only_rescued = all.iter().all(|[held, rescued, ..]| *held != newest || *rescued > 0);
        let (step, lacking) = self.share(group, &all.iter().map(|[held, ..]| *held).collect::<Vec<_>>())?;
        // The rank that writes the trace may not have done the step itself.
        if self.history.lacks(step) {
            self.record_step();
        }
        if only_rescued && step > committed {
            // All workers had died, and this step is in the agents' memory alone.
            self.keeper.save_soon();
        }
        let (round, took) = (group.round(), begun.elapsed());
        info!(round, step, lacking, ?took, "continues from memory");
        Ok(())
    }

    /// Makes ready what a rank needs beside its state: rank 0 most of all.
    fn prepare(&mut self, committed: u64) -> Result<(), TrainError> {
        let Trainer { run, held, keeper, membership, history, .. } = self;
        keeper.find_memory(run.settings, membership, held)?;
        let GroupConfig { rank, world_size, .. } = membership.config;
        if rank > 0 {
            keeper.end_saving();
            history.close();
            return Ok(());
        }
        if u64::from(world_size) > u64::from(run.settings.shards.get()) {
            warn!("{world_size} workers share {} shards: some have no work; raise --shards", run.settings.shards);
        }
        keeper.begin_saving(run.settings, membership, committed)?;
        history.open(held.holds())
    }

    /// Has all ranks hold the same state, the furthest: its step, and how many lacked it. `held` has for each rank one
    /// more than the step that it holds, or 0 if that does not count. Where the optimizer's numbers are sharded, ranks
    /// that lost a part come to another step.
    pub(super) fn share(&mut self, group: &mut Group, held: &[u64]) -> Result<(u64, usize), TrainError> {
        let newest = held.iter().copied().max().unwrap_or_default();
        let shared = match self.held.sharding {
            Some(_) => self.held.settle(&self.run, group, held[group.rank() as usize] > 0),
            None => {
                let (step, holds) = (newest.saturating_sub(1), held.iter().map(|held| *held == newest));
                self.held.share(group, step, &holds.collect::<Vec<_>>()).map(|lacking| (step, lacking))
            }
        };
        if matches!(shared, Err(TrainError::Split { .. })) {
            // No rank knows what is right, so nothing of it is kept. Nor is the agent's memory, since the next start
            // would take it up from there. Only what is committed is left.
            self.held.holding = Holding::Nothing;
            self.keeper.leave_memory(self.membership.agent)?;
        }
        shared
    }
}

/// Says so where ranks run different programs: their results may differ.
fn compare_programs(group: &Group, programs: &[u64]) {
    let others = program::others(programs);
    let rank = group.rank() as usize;
    if !others.is_empty() && (rank == 0 || others.contains(&rank)) {
        warn!(
            "these ranks run another build of this program than rank 0: {}. Results may differ; install the same build \
             on all nodes",
            list_ranks(&others)
        );
    }
}
