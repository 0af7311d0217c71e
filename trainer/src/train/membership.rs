//! A worker's place in the present round, and what its agent says of the next.

use std::time::Instant;

use elastic_collective::recorder::Recorder;
use elastic_collective::stop::{Forming, Stop};
use elastic_collective::{CollectiveError, Group, GroupConfig, Patience};
use elastic_proto::worker::{Assignment, Checkpoint, FailureClass, ToWorker};
use tracing::warn;

use super::TrainError;
use crate::agent::{Agent, AgentError};
use crate::settings::Environment;

/// A worker's place.
pub(super) struct Membership<'a> {
    pub(super) agent: &'a mut Option<Agent>,
    pub(super) stop: &'a Stop,
    /// The present round's.
    pub(super) config: GroupConfig,
    /// What the agent said of it.
    assignment: Option<Assignment>,
    /// What the groups of all rounds have done.
    recorder: Recorder,
    /// Whether a node of the round drains: heard from the agent, or from a peer's vote.
    pub(super) draining: bool,
    /// Whether this worker's own node does.
    pub(super) drains: bool,
}

impl<'a> Membership<'a> {
    /// The place that the environment names, or the agent's assignment. `settings` are what all ranks must agree on.
    pub(super) fn new(
        environment: &Environment,
        assignment: Option<Assignment>,
        agent: &'a mut Option<Agent>,
        stop: &'a Stop,
        settings: String,
    ) -> Membership<'a> {
        let Environment { rank, world_size, round, master_port, agent_store, .. } = *environment;
        let (job, master_addr) = (environment.job.clone(), environment.master_addr.clone());
        let config = GroupConfig { job, round, rank, world_size, master_addr, master_port, agent_store, settings };
        let recorder = Recorder::new(environment.record_dir.as_deref());
        let mut place = Membership { agent, stop, config, assignment: None, recorder, draining: false, drains: false };
        assignment.into_iter().for_each(|assignment| place.take_place(assignment));
        place
    }

    /// Continues in another place.
    pub(super) fn take_place(&mut self, assignment: Assignment) {
        let Assignment { job, round, rank, world_size, master_addr, master_port, .. } = assignment.clone();
        let GroupConfig { agent_store, settings, .. } = self.config.clone();
        self.config = GroupConfig { job, round, rank, world_size, master_addr, master_port, agent_store, settings };
        self.assignment = Some(assignment);
        (self.draining, self.drains) = (false, false);
    }

    /// Connects with the round's ranks.
    pub(super) fn form(&self, patience: Patience) -> Result<Group, CollectiveError> {
        Ok(Group::form(&self.config, patience, self.stop.clone())?.recorded_by(&self.recorder))
    }

    /// Whether this is rank 0.
    pub(super) fn leads(&self) -> bool {
        self.config.rank == 0
    }

    /// This worker's node, by its number in the round.
    pub(super) fn node(&self) -> u32 {
        self.assignment.as_ref().map_or(0, |assignment| assignment.group_rank)
    }

    /// Nodes in the round.
    pub(super) fn nodes(&self) -> u32 {
        self.assignment.as_ref().map_or(1, |assignment| assignment.group_world_size)
    }

    /// What the job has committed, as far as the agent says.
    pub(super) fn committed(&self) -> Option<&Checkpoint> {
        self.assignment.as_ref()?.checkpoint.as_ref()
    }

    /// Whether this is the job's first start, as far as the agent or the launcher says. A start after a failure
    /// continues what the first one has saved.
    pub(super) fn begins(&self) -> bool {
        self.assignment.as_ref().map_or(self.config.round, |assignment| u64::from(assignment.restart_count)) == 0
    }

    /// The later round that forms, if one does.
    pub(super) fn forming(&self) -> Option<Forming> {
        self.stop.forming_after(self.config.round)
    }

    /// Whether a signal has asked this worker to stop, and its peers are to hear of that: without an agent there is no
    /// other round for them.
    pub(super) fn is_to_leave(&self) -> bool {
        self.agent.is_some() && self.stop.is_raised()
    }

    /// The agent's next message, if one comes before the deadline.
    pub(super) fn next_message(&mut self, deadline: Instant) -> Result<Option<ToWorker>, AgentError> {
        self.agent.as_mut().map_or(Ok(None), |agent| agent.next(deadline, self.stop))
    }

    /// Whether another round can fix this error: there is an agent to announce it, and the error is about peers. While
    /// a round is forming, any error of a collective is an echo of what happens elsewhere.
    pub(super) fn may_pass(&self, error: &TrainError) -> bool {
        let forming = self.forming().is_some();
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
        if cause.is_planned() || self.forming().is_some() {
            return TrainError::Collective(cause);
        }
        match self.recorder.write(&self.config, &cause.to_string()) {
            Ok(Some(record)) => TrainError::GivenUp { cause, record },
            Ok(None) => TrainError::Collective(cause),
            Err(error) => {
                warn!(%error, "cannot write what the collectives have done; see ELASTIC_RECORD_DIR");
                TrainError::Collective(cause)
            }
        }
    }
}
