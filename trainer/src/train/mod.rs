//! The training loop of one worker: resume, step, reduce, save, and go from round to round.
//!
//! ```text
//!            ┌─────────── the next place ◀─── quiesce ◀──┐
//!            ▼                                           │ a round forms, or a peer is gone
//!   form the group ─▶ agree on the state ─▶ step, step, step ─▶ finish
//! ```

mod account;
mod agent_memory;
mod error;
mod history;
mod loading;
mod plot;
mod program;
mod ready;
mod replicas;
mod report;
mod rounds;
mod saving;
mod snapshot_copy;
mod trace;

use std::io::Write;
use std::time::{Duration, Instant};

use elastic_proto::worker::{Assignment, Checkpoint, ToWorker};
use tracing::{info, warn};

pub use error::TrainError;
pub(crate) use ready::Ready;

use elastic_collective::recorder::Recorder;
use elastic_collective::stop::Stop;
use elastic_collective::tree::{Node, cover, shards_of};
use elastic_collective::{Group, GroupConfig};

use crate::agent::Agent;
use crate::checkpoint::sharded_write::ShardedWrite;
use crate::checkpoint::snapshot::LastStep;
use crate::checkpoint::snapshot_slots::SnapshotSlots;
use crate::checkpoint::writer::Writer;
use crate::data::{Data, Order, Schedule, StepSamples};
use crate::engine::gradient::GradientTask;
use crate::engine::state::State;
use crate::engine::{Engine, EngineError, Ranks, Reduced, Step, Transport};
use crate::model::{AdamW, Model, Rate};
use crate::settings::{Environment, Settings};
use account::Account;
use agent_memory::AgentMemory;
use history::History;
use plot::Point;
use report::{Printer, ProgressLine};
use saving::Saving;
use snapshot_copy::BackgroundCopy;
use trace::Event;

/// The vote that asks for a checkpoint, since a node drains. (Those of [`crate::checkpoint::sharded_write`] travel with
/// it.)
const DRAIN: u32 = 1;
/// The vote to quiesce after this step, since a round is forming.
const QUIESCE: u32 = 2;
/// The vote to compare what the ranks hold after this step, since it is to be saved.
const COMPARE: u32 = 32;
/// How long rank 0 waits for its last commit when it leaves, and when it has finished. In the second case its peers are
/// done, so it can wait for a store that is away.
const LEAVE_TIME: Duration = Duration::from_secs(3);
const FINISH_TIME: Duration = Duration::from_secs(120);

/// One worker.
pub(crate) struct Trainer<'a, M: Model> {
    settings: &'a Settings,
    /// The flags that fix a step, in words.
    words: String,
    agent: &'a mut Option<Agent>,
    stop: &'a Stop,
    model: &'a M,
    data: &'a dyn Data<Batch = M::Batch>,
    order: Order,
    schedule: Schedule,
    engine: Box<dyn Engine<M> + 'a>,
    /// The engine's own copy may have newer numbers.
    state: State,
    holding: Holding,
    /// How its last step was done, if one was.
    last: Option<LastStep>,
    /// `LOCAL_RANK`.
    local_rank: u32,
    /// Room for copies of the state, in the agent's memory once it was asked for that; else, on rank 0, in its own.
    slots: Option<SnapshotSlots>,
    agent_memory: AgentMemory,
    /// The beginning of a command line that saves what is there; `--dir` follows.
    rescue: Vec<String>,
    /// The last step whose state was copied.
    copied: u64,
    /// A copy is due at once: the last one was under way when it was due.
    copy_soon: bool,
    /// The next copy goes to disk, whichever step it is of.
    save_soon: bool,
    /// A copy that is made beside steps. It ends with the round.
    background_copy: Option<BackgroundCopy>,
    /// In the present round.
    group_config: GroupConfig,
    /// What the agent said of it.
    assignment: Option<Assignment>,
    /// The next one.
    assigned: Option<Assignment>,
    /// The group that was left well: its peers still need a farewell.
    group: Option<Group>,
    /// What the groups of all rounds have done.
    recorder: Recorder,
    /// Its part in checkpoints that several nodes write in this round.
    sharded: Option<ShardedWrite>,
    /// What writes its shares, on ranks other than 0.
    helper: Option<Writer>,
    /// What saves checkpoints, on rank 0.
    saving: Option<Saving>,
    history: History<'a>,
    /// Whether a node of the round drains: heard from the agent, or from a peer's vote.
    draining: bool,
}

/// What a finished run has reached.
#[derive(Debug, Clone, PartialEq)]
pub struct Outcome {
    /// This worker's rank at the end. What is to be printed once, rank 0 prints.
    pub rank: u32,
    /// The parameters, the optimizer's state, and the steps done in all rounds: the same on all ranks.
    pub state: State,
}

/// What a worker's state is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Holding {
    /// Room for one, or half of one from a peer.
    Nothing,
    /// One from the agent's memory, where a dead worker left it. The ranks have not yet agreed on it.
    Rescued,
    /// One that the ranks agreed on, or a later one.
    Reached,
}

/// How a worker's part in a round ends well.
enum Ended {
    /// All steps are done.
    Finished,
    /// The ranks have agreed to quiesce.
    Quiesced,
}

impl<'a, M: Model> Trainer<'a, M> {
    pub(crate) fn new(
        settings: &'a Settings,
        environment: &Environment,
        assignment: Option<Assignment>,
        agent: &'a mut Option<Agent>,
        stop: &'a Stop,
        ready: Ready<'a, M>,
        rescue: Vec<String>,
    ) -> Trainer<'a, M> {
        let Ready { model, data, engine } = ready;
        let samples = data.samples();
        let schedule = Schedule { samples, batch: settings.batch.get(), epochs: settings.epochs.get() };
        let words = settings.of_a_step(&model.describe(), &data.describe(), schedule.total_steps());
        // A checkpoint can resume on any kind of engine; peers must give the same bits.
        let mut shared = format!("{words} --epochs {} --bucket-mb {}", settings.epochs, settings.bucket_mb);
        if let Some(kind) = engine.kind() {
            shared += &format!(" {kind}");
        }
        Trainer {
            settings,
            model,
            data,
            group_config: group_config(environment, assignment.as_ref(), shared),
            words,
            agent,
            stop,
            order: Order::new(settings.seed, samples),
            schedule,
            engine,
            state: State::room(model.parameters()),
            holding: Holding::Nothing,
            last: None,
            local_rank: environment.local_rank,
            slots: None,
            agent_memory: AgentMemory::Unasked,
            rescue,
            copied: 0,
            copy_soon: false,
            save_soon: false,
            background_copy: None,
            assignment,
            assigned: None,
            group: None,
            recorder: Recorder::new(environment.record_dir.as_deref()),
            sharded: None,
            helper: None,
            saving: None,
            history: History::new(settings, Account::new(Instant::now())),
            draining: false,
        }
    }

    /// Goes from round to round.
    pub(crate) fn train(mut self, out: &mut dyn Write) -> Result<Outcome, TrainError> {
        let mut out = Printer::new(out);
        loop {
            let ended = self.round(&mut out);
            let next = match ended.map_err(|error| self.with_record(error)) {
                Ok(Ended::Finished) => return self.finish(&mut out),
                Ok(Ended::Quiesced) => self.next_place(None),
                Err(error) if self.may_pass(&error) => self.next_place(Some(error)),
                Err(error) => Err(error),
            };
            match next {
                Ok(assignment) => self.take_place(assignment),
                Err(error) => {
                    let error = self.part(error);
                    if error.is_stuck() {
                        // NCCL may still use whatever this holds.
                        std::mem::forget(self);
                    }
                    return Err(error);
                }
            }
        }
    }

    /// Takes part in a round.
    fn round(&mut self, out: &mut Printer<'_>) -> Result<Ended, TrainError> {
        let group = Group::form(&self.group_config, self.settings.patience(), self.stop.clone())?;
        let mut group = group.recorded_by(&self.recorder);
        let ended = loop {
            if let Some(ended) = self.turn(&mut group, out).transpose() {
                break ended;
            }
        };
        // After any other error the group is dropped, so that its sockets close and the peers do not wait in vain.
        if matches!(ended, Ok(_) | Err(TrainError::Stopped)) {
            self.group = Some(group);
        }
        ended
    }

    /// One try at a round, from preparing the sums to the end. None where all ranks must start again in the same round.
    fn turn(&mut self, group: &mut Group, out: &mut Printer<'_>) -> Result<Option<Ended>, TrainError> {
        self.engine.join(group)?;
        self.agree(group)?;
        self.give_memory_back()?;
        let ended = self.steps(group, out);
        let copied = match &ended {
            Err(error) if error.is_stuck() => Ok(()),
            _ => self.end_background_copy(),
        };
        let Some(ended) = ended.and_then(|ended| copied.map(|()| ended))? else { return Ok(None) };
        match self.engine.leave(group) {
            Err(EngineError::Again) => Ok(None),
            // A peer that is gone by now is missed in the next round, if there is one.
            _ => Ok(Some(ended)),
        }
    }

    fn steps(&mut self, group: &mut Group, out: &mut Printer<'_>) -> Result<Option<Ended>, TrainError> {
        let GroupConfig { rank, world_size, round, .. } = self.group_config;
        let shards = self.settings.shards.get();
        let nodes = cover(shards, &shards_of(rank, world_size, shards));
        let total = self.schedule.total_steps();
        let rate = self.settings.rate(total);
        let mut progress = ProgressLine::new(self.state.step, self.schedule, self.data, world_size);
        let mut drain_known = false;
        let Transport { name: collectives, nccl_failures } = self.engine.transport();
        let (step, pid) = (self.state.step, std::process::id());
        self.history.record(&Event::Begin { round, step, world_size, pid, collectives, nccl_failures });
        self.history.account.begin(Instant::now());

        while self.state.step < total {
            self.hear()?;
            if self.stop.is_raised() {
                return Err(TrainError::Stopped);
            }
            let Some(Reduced { loss, votes }) = self.reduce(group, &nodes)? else { return Ok(None) };
            let loss = self.advance(&rate, loss)?;
            // All ranks learn of a drain in the same step. Rank 0 saves then; it will save again if more steps follow.
            if votes & DRAIN != 0 && !std::mem::replace(&mut drain_known, true) {
                (self.draining, self.save_soon) = (true, true);
            }
            self.hear_share_votes(votes)?;
            if votes & COMPARE != 0 {
                self.share(group, self.state.step, &vec![true; world_size as usize])?;
            }
            if rank == 0 && progress.is_due() {
                progress.print(out, self.state.step, loss);
            }
            // All ranks learn in the same step that a round is forming, too: this is the boundary.
            if votes & QUIESCE != 0 {
                return Ok(Some(Ended::Quiesced));
            }
        }
        Ok(Some(Ended::Finished))
    }

    /// Sums the next step's gradient over the ranks, and copies the state meanwhile where that is due. None where all
    /// ranks must start again in the same round.
    fn reduce(&mut self, group: &mut Group, nodes: &[Node]) -> Result<Option<Reduced>, TrainError> {
        let (round, total, after) = (self.group_config.round, self.schedule.total_steps(), self.state.step + 1);
        let mut copying = self.begin_copy()?;
        let mut known = self.share_vote();
        known |= if self.is_to_compare(total) { COMPARE } else { 0 };
        known |= if self.draining { DRAIN } else { 0 };
        let task = GradientTask {
            model: self.model,
            parameters: self.state.parameters(),
            data: self.data,
            order: &self.order,
            batch: self.schedule.batch_after(self.state.step),
            next: (after < total).then(|| self.schedule.batch_after(after)),
            shards: self.settings.shards.get(),
            micro_batch: self.settings.micro_batch,
        };
        let reduced = snapshot_copy::during(copying.as_mut(), &self.state.flat, || {
            let vote = &mut || known | if self.stop.forming_after(round).is_some() { QUIESCE } else { 0 };
            self.engine.reduce(&task, Ranks { group, nodes, vote })
        });
        self.end_copy(copying);
        match reduced {
            Err(EngineError::Again) => Ok(None),
            reduced => Ok(Some(reduced?)),
        }
    }

    /// Does the step along the gradient, with the sum of its losses: their mean.
    fn advance(&mut self, rate: &Rate, loss: f32) -> Result<f32, TrainError> {
        let (batch, next) = (self.schedule.batch_after(self.state.step), self.state.step + 1);
        let units = (batch.samples() * self.data.unit().of_a_sample) as f32;
        let loss = loss / units;
        if !loss.is_finite() {
            return Err(TrainError::Diverged { step: next });
        }
        let rule = AdamW::new(rate.of(next), self.settings.weight_decay);
        let (tensors, clip) = (self.model.tensors(), self.settings.clip);
        self.engine.advance(&mut self.state, &Step { rule, tensors, scale: 1.0 / units, clip })?;
        let step = self.state.step;
        let GroupConfig { round, world_size, .. } = self.group_config;
        self.last = Some(LastStep { round, world_size, loss });
        self.record_step();
        self.history.account.stepped(step, Instant::now());
        self.history.see(Point { step, loss, round, world_size });
        if let Some(agent) = self.agent.as_mut() {
            agent.progress(step, batch.epoch, f64::from(loss), self.schedule.total_steps())?;
        }
        Ok(loss)
    }

    /// Whether this rank asks all ranks to compare their states after the next step. Rank 0 does so before it saves
    /// that state. On a GPU each comparison would wait for a download, so there states are compared only when a round
    /// begins.
    fn is_to_compare(&self, total: u64) -> bool {
        let next = self.state.step + 1;
        let saves = next == total || next.is_multiple_of(self.settings.checkpoint_every.get());
        self.group_config.rank == 0 && self.engine.is_in_place() && saves
    }

    /// Ends a run whose steps are done.
    fn finish(mut self, out: &mut Printer<'_>) -> Result<Outcome, TrainError> {
        let step = self.state.step;
        let stop = self.stop;
        self.save_last(FINISH_TIME, stop).map_err(|cause| {
            if stop.is_raised() { TrainError::Stopped } else { TrainError::Unsaved { step, cause } }
        })?;
        self.history.account.saved(Instant::now());
        self.engine.give(&mut self.state)?;
        if !self.state.is_finite() {
            return Err(TrainError::NotFinite { step });
        }
        if self.group_config.rank == 0 {
            out.line(format_args!("done: {step} steps, {} epochs", self.settings.epochs));
            out.line(format_args!("{}", self.history.account.summary(Instant::now())));
            self.history.draw(self.data.reachable_loss());
            out.line(format_args!("parameters crc32c:{:08x}", self.state.checksum()));
        }
        if let Some(group) = self.group.take() {
            group.leave();
        }
        Ok(Outcome { rank: self.group_config.rank, state: self.state })
    }

    /// Leaves for good, before the last step.
    fn part(&mut self, error: TrainError) -> TrainError {
        // While a node drains the last state is saved, whatever ends the round.
        let lost = error.spoils_the_state();
        if self.draining && self.holding != Holding::Nothing && !lost {
            // A stop that is raised already must not cut this wait short: the commit is made because of it.
            self.save_last(LEAVE_TIME, &Stop::default())
                .unwrap_or_else(|cause| warn!(%cause, "the last state is not committed"));
        }
        if let Some(group) = self.group.take() {
            group.leave();
        }
        error
    }

    /// Reads what the agent has said since the last step, and hears what was saved.
    fn hear(&mut self) -> Result<(), TrainError> {
        while let Some(message) = self.agent.as_mut().map_or(Ok(None), Agent::poll)? {
            self.take(&message)?;
        }
        self.follow()
    }

    /// Has what is durable since the last look committed.
    fn follow(&mut self) -> Result<(), TrainError> {
        let Some(saving) = &mut self.saving else { return Ok(()) };
        let committed = saving.follow(self.agent.as_mut())?;
        committed.iter().for_each(|checkpoint| self.record_commit(checkpoint));
        Ok(())
    }

    /// Takes in what the agent has said.
    fn take(&mut self, message: &ToWorker) -> Result<(), TrainError> {
        match message {
            ToWorker::Draining { grace_ms } => {
                info!(grace_ms, "this node drains: a checkpoint follows");
                self.draining = true;
                Ok(())
            }
            ToWorker::Forming { round, reason, .. } => {
                info!(round, reason, "a round is forming");
                Ok(())
            }
            ToWorker::Assignment(assignment) => {
                self.assigned = Some(assignment.clone());
                Ok(())
            }
            message => {
                let committed = self.saving.as_mut().and_then(|saving| saving.hear(message));
                committed.iter().for_each(|checkpoint| self.record_commit(checkpoint));
                Ok(())
            }
        }
    }

    fn record_step(&mut self) {
        let Some(LastStep { round, world_size, loss }) = self.last else { return };
        let step = self.state.step;
        let StepSamples { epoch, first, end } = self.schedule.batch_after(step - 1);
        self.history.record(&Event::Step { round, step, epoch, first, end, loss, world_size });
    }

    fn record_commit(&mut self, checkpoint: &Checkpoint) {
        self.history.record(&Event::Committed {
            round: checkpoint.round,
            step: checkpoint.step,
            path: &checkpoint.path,
        });
    }
}

/// The group that the environment names, or the agent's assignment.
fn group_config(environment: &Environment, assignment: Option<&Assignment>, settings: String) -> GroupConfig {
    let Environment { rank, world_size, round, master_port, agent_store, .. } = *environment;
    let (job, master_addr) = (environment.job.clone(), environment.master_addr.clone());
    let own = GroupConfig { job, round, rank, world_size, master_addr, master_port, agent_store, settings };
    match assignment {
        Some(assignment) => assigned(own, assignment),
        None => own,
    }
}

/// The group of another assignment, with the same settings.
fn assigned(config: GroupConfig, assignment: &Assignment) -> GroupConfig {
    let Assignment { job, round, rank, world_size, master_addr, master_port, .. } = assignment.clone();
    GroupConfig { job, round, rank, world_size, master_addr, master_port, ..config }
}
