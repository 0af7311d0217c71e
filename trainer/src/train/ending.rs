//! How a worker ends: with the last step, or before.

use std::time::{Duration, Instant};

use elastic_collective::Group;
use elastic_collective::stop::Stop;
use elastic_proto::worker::Checkpoint;
use tracing::warn;

use super::history::History;
use super::report::Lines;
use super::{Outcome, TrainError, Trainer};
use crate::checkpoint::snapshot::SnapshotHeader;
use crate::model::Model;
use crate::vectors::first_not_finite;

/// How long rank 0 waits for its last commit when it has finished. Its peers are done, so it can wait for a store that
/// is away.
const FINISH_TIME: Duration = Duration::from_secs(120);

impl<M: Model> Trainer<'_, M> {
    /// Ends a run whose steps are done.
    pub(super) fn finish(mut self, group: Option<Group>) -> Result<Outcome, TrainError> {
        let (step, stop, rank) = (self.held.state.step, self.membership.stop, self.membership.config.rank);
        stop.lets_finish(self.membership.agent.is_some());
        self.save_last(FINISH_TIME, stop).map_err(|cause| {
            if stop.is_raised() { TrainError::Stopped } else { TrainError::Unsaved { step, cause } }
        })?;
        self.history.account.saved(Instant::now());
        self.held.give()?;
        if let Some(number) = first_not_finite(&self.held.state.flat) {
            return Err(TrainError::not_finite(&self.held.state, self.run.model.tensors(), number));
        }
        if rank == 0 {
            let History { account, lines: Lines { printer, .. }, skipped, .. } = &mut self.history;
            printer.line(format_args!("done: {step} steps, {} epochs", self.run.schedule.epochs_of(step)));
            if let Some(skipped) = skipped {
                printer.line(format_args!("skipped {skipped} samples that cannot be read, since this worker began"));
            }
            printer.line(format_args!("{}", account.summary(Instant::now())));
            self.history.draw(self.run.data.reachable_loss());
            let checksum = self.held.state.checksum();
            self.history.lines.printer.line(format_args!("parameters crc32c:{checksum:08x}"));
        }
        group.into_iter().for_each(Group::leave);
        Ok(Outcome { rank, state: self.held.state })
    }

    /// Leaves for good, before the last step.
    pub(super) fn part(&mut self, group: Option<Group>, error: TrainError) -> TrainError {
        let leaves = matches!(error, TrainError::Stopped) && self.membership.agent.is_some();
        // While a node drains the last state is saved, whatever ends the round.
        if (self.membership.draining || leaves) && self.held.holds() && !error.spoils_the_state() {
            let time = self.membership.stop.left(Instant::now());
            // A stop that is raised already must not cut this wait short: the commit is made because of it.
            self.save_last(time, &Stop::default())
                .unwrap_or_else(|cause| warn!(%cause, "the last state is not committed"));
        }
        group.into_iter().for_each(Group::leave);
        error
    }

    /// Waits until the present state is committed.
    fn save_last(&mut self, time: Duration, stop: &Stop) -> Result<(), String> {
        let Trainer { run, held, keeper, membership, history, .. } = self;
        held.give().map_err(|error| error.to_string())?;
        let Some(saving) = keeper.saving() else { return Ok(()) };
        let header = held.header(run, &membership.config);
        let state = (!held.is_cut()).then_some(&held.state.flat[..]);
        let on_commit = |checkpoint: &Checkpoint| history.tell_commit(checkpoint);
        let (agent, kept) = (membership.agent.as_mut(), saving.kept());
        if state.is_none() && kept < header.step {
            let saved = saving.finish(&SnapshotHeader { step: kept, ..header }, None, agent, time, stop, on_commit);
            let instead = match saved {
                Ok(()) => format!("step {kept} counts"),
                Err(cause) => format!("nor is step {kept}: {cause}"),
            };
            return Err(format!("parts of it are on other workers; {instead}"));
        }
        saving.finish(&header, state, agent, time, stop, on_commit)
    }
}
