//! The training loop of one worker: resume, step, reduce, save, and go from round to round.
//!
//! ```text
//!            ┌─────────── the next place ◀─── quiesce ◀──┐
//!            ▼                                           │ a round forms, or a peer is gone
//!   form the group ─▶ agree on the state ─▶ step, step, step ─▶ finish
//! ```

mod account;
mod agent_memory;
mod ending;
mod error;
mod evaluation;
mod held;
mod history;
mod init;
mod keeper;
mod loading;
mod membership;
mod memory;
mod observer;
mod plot;
mod program;
mod ready;
mod replicas;
mod report;
mod rounds;
mod saving;
mod settling;
mod shards;
mod trace;

use std::io::Write;
use std::time::Instant;

use elastic_proto::worker::{Assignment, ToWorker};
use tracing::info;

pub use error::TrainError;
pub use observer::{Event, Observer};
pub(crate) use ready::Ready;

use elastic_collective::identity::RunIdentity;
use elastic_collective::stop::Stop;
use elastic_collective::tree::{Node, nodes_of};
use elastic_collective::{Group, GroupConfig};

use crate::agent::Agent;
use crate::checkpoint::Checkpoints;
use crate::checkpoint::disk::Host;
use crate::checkpoint::sharded_write::BEGIN;
use crate::checkpoint::snapshot::{LastStep, Layout};
use crate::data::{Data, Order, Schedule, StepSamples};
use crate::engine::feed::Feed;
use crate::engine::gradient::{GradientTask, Work};
use crate::engine::interruption::Interruption;
use crate::engine::state::State;
use crate::engine::{Advance, EngineError, Ranks, Reduced, Transport};
use crate::model::{Model, Optimizer, rules_of};
use crate::settings::{Environment, OptimizerState, Settings};
use account::Account;
use held::Held;
use history::History;
use init::InitFile;
use keeper::Keeper;
use membership::Membership;
use memory::Memory;
use report::{Lines, Printer};

/// The vote that asks for a checkpoint, since a node drains. (Those of [`crate::checkpoint::sharded_write`] travel with
/// it.)
const DRAIN: u32 = 1;
/// The vote to quiesce after this step, since a round is forming.
const QUIESCE: u32 = 2;
/// The vote to compare what the ranks hold after this step, since it is to be saved.
const COMPARE: u32 = 32;
/// The vote to end the round after this step, since a signal has asked a rank to stop.
const LEAVE: u32 = 64;
/// The vote to put whole states together after this step, since a rank is to copy one.
const ASSEMBLE: u32 = 128;

/// One worker.
pub(crate) struct Trainer<'a, M: Model> {
    run: Run<'a, M>,
    held: Held<'a, M>,
    keeper: Keeper,
    membership: Membership<'a>,
    history: History<'a>,
    /// The last step that was evaluated.
    evaluated: Option<u64>,
}

/// The program that trains: how it saves when its node ends, and what it hears of the training.
pub(crate) struct Caller<'a> {
    pub(crate) rescue: Vec<String>,
    pub(crate) out: &'a mut dyn Write,
    pub(crate) observer: Option<&'a mut dyn Observer>,
}

/// What is trained: the same in all rounds.
struct Run<'a, M: Model> {
    settings: &'a Settings,
    /// What fixes a step.
    identity: RunIdentity,
    /// Where its first parameters are.
    init: Option<InitFile>,
    model: &'a M,
    optimizer: Optimizer,
    data: &'a dyn Data<Batch = M::Batch>,
    feed: &'a Feed<'a, M::Batch>,
    order: Order,
    schedule: Schedule,
}

/// What a finished run has reached.
#[derive(Debug, Clone, PartialEq)]
pub struct Outcome {
    /// This worker's rank at the end. What is to be printed once, rank 0 prints.
    pub rank: u32,
    /// The parameters, the optimizer's state, and the steps done in all rounds: the same on all ranks. Where the
    /// optimizer's numbers are sharded, each rank has those that it owns.
    pub state: State,
}

impl<M: Model> Run<'_, M> {
    /// How the step after `done` steps moves, if so many of its samples were left out.
    fn along(&self, done: u64, skipped: Option<u64>) -> Advance<'_> {
        let read = self.schedule.batch_after(done).samples() - skipped.unwrap_or_default();
        let units = (read * self.data.unit().of_a_sample) as f32;
        let rate = self.settings.rate(self.schedule.total_steps()).of(done + 1);
        let (optimizer, tensors, clip) = (&self.optimizer, self.model.tensors(), self.settings.clip);
        Advance { optimizer, tensors, rate, mean: 1.0 / units, clip }
    }
}

/// How a worker's part in a round ends well.
enum Ended {
    /// All steps are done.
    Finished,
    /// The ranks have agreed to quiesce, or that some of them leave.
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
        caller: Caller<'a>,
    ) -> Trainer<'a, M> {
        let Ready { model, feed, init, engine } = ready;
        let Caller { rescue, out, observer } = caller;
        let data = feed.data();
        let (samples, optimizer) = (data.samples(), settings.optimizer());
        let schedule = settings.steps(samples);
        let of_file = init.as_ref().map_or(String::new(), InitFile::words);
        let of_model = format!("{} {} {of_file}", model.identity(), rules_of(model.tensors()));
        let identity = settings.identity(&of_model, &data.identity(), schedule.total_steps());
        // A checkpoint can resume on any kind of engine; peers must give the same bits.
        let entries = State::entries(model.tensors(), &optimizer);
        // A model may say of itself what it likes.
        let tensors = crc32c::crc32c(&serde_json::to_vec(&entries).unwrap_or_default());
        let Settings { epochs, bucket_mb, eval_every, .. } = settings;
        let length = settings.max_steps.map_or(format!("--epochs {epochs}"), |steps| format!("--max-steps {steps}"));
        let mut shared = identity.clone();
        shared.say(&format!("{length} --bucket-mb {bucket_mb} (tensors {tensors:08x})"));
        if feed.skips() {
            shared.say("--unreadable skip");
        }
        if let (Some(steps), Some(held_out)) = (eval_every, data.held_out()) {
            shared.say(&format!("--eval-every {steps} on {}", held_out.identity()));
        }
        shared.say(&engine.kind().unwrap_or_default());
        if settings.optimizer_state == OptimizerState::Sharded {
            shared.say("--optimizer-state sharded");
        }
        let membership = Membership::new(environment, assignment, agent, stop, shared.to_string());
        let job = job_of(settings, environment, &membership.config.job);
        let layout = Layout::new(&job, &identity.to_string(), &entries);
        let now = Instant::now();
        let lines = Lines::new(Printer::new(out), schedule, data.unit(), data.reachable_loss(), now);
        Trainer {
            held: Held::nothing(engine, model, settings),
            run: Run {
                settings,
                identity,
                init,
                model,
                optimizer,
                data,
                feed,
                order: Order::new(settings.seed, samples),
                schedule,
            },
            keeper: Keeper::new(layout, job, environment, rescue),
            membership,
            history: History::new(settings, Account::new(now), lines, observer),
            evaluated: None,
        }
    }

    /// Goes from round to round.
    pub(crate) fn train(mut self) -> Result<Outcome, TrainError> {
        if self.membership.config.rank == 0 {
            let memory = Memory::of(
                self.run.model,
                self.run.settings,
                self.run.schedule.samples,
                (self.membership.agent.is_some(), self.membership.config.world_size),
            );
            self.history.lines.printer.line(format_args!("{}", memory.line()));
        }
        loop {
            let (ended, group) = self.round();
            let (next, group) = match ended.map_err(|error| self.membership.with_record(error)) {
                Ok(Ended::Finished) => return self.finish(group),
                Ok(Ended::Quiesced) if self.membership.stop.is_raised() => (Err(TrainError::Stopped), group),
                Ok(Ended::Quiesced) => (self.next_place(group, None), None),
                Err(error) if self.membership.may_pass(&error) => (self.next_place(group, Some(error)), None),
                Err(error) => (Err(error), group),
            };
            match next {
                Ok(assignment) => self.membership.take_place(assignment),
                Err(error) => {
                    let error = self.part(group, error);
                    if error.is_stuck() {
                        // NCCL may still use whatever this holds.
                        std::mem::forget(self);
                    }
                    return Err(error);
                }
            }
        }
    }

    /// Takes part in a round. Its group comes back where it was left well: then its peers still need a farewell.
    fn round(&mut self) -> (Result<Ended, TrainError>, Option<Group>) {
        let mut group = match self.membership.form(self.run.settings.patience()) {
            Ok(group) => group,
            Err(error) => return (Err(error.into()), None),
        };
        let ended = loop {
            if let Some(ended) = self.turn(&mut group).transpose() {
                break ended;
            }
        };
        // After any other error the group is dropped, so that its sockets close and the peers do not wait in vain.
        let group = matches!(ended, Ok(_) | Err(TrainError::Stopped)).then_some(group);
        (ended, group)
    }

    /// One try at a round, from preparing the sums to the end. None where all ranks must start again in the same round.
    fn turn(&mut self, group: &mut Group) -> Result<Option<Ended>, TrainError> {
        self.held.engine.join(group)?;
        self.agree(group)?;
        self.keeper.give_memory_back(self.membership.agent)?;
        // With an agent a signal is a request: this rank's peers hear of it, and all stop after the same step.
        self.membership.stop.lets_finish(self.membership.agent.is_some());
        let ended = self.steps(group);
        self.membership.stop.lets_finish(false);
        let copied = match &ended {
            Err(error) if error.is_stuck() => Ok(()),
            _ => self.keeper.end_background_copy(),
        };
        let Some(ended) = ended.and_then(|ended| copied.map(|()| ended))? else { return Ok(None) };
        match self.held.engine.leave(group) {
            Err(EngineError::Again) => Ok(None),
            // A peer that is gone by now is missed in the next round, if there is one.
            _ => Ok(Some(ended)),
        }
    }

    fn steps(&mut self, group: &mut Group) -> Result<Option<Ended>, TrainError> {
        let GroupConfig { rank, world_size, round, .. } = self.membership.config;
        let shards = self.run.settings.shards.get();
        let nodes = nodes_of(rank, world_size, shards);
        let total = self.run.schedule.total_steps();
        let (step, pid) = (self.held.state.step, std::process::id());
        let mut drain_known = false;
        let Transport { name: collectives, nccl_failures } = self.held.engine.transport();
        self.history.tell(&Event::Begin { round, step, world_size, pid, collectives, nccl_failures });

        self.agree_on_evaluated(group)?;
        loop {
            let votes = self.evaluate(group, &nodes)?;
            if votes & (QUIESCE | LEAVE) != 0 {
                self.hear_votes(group, votes, &mut drain_known)?;
                self.hand_over(group, votes)?;
                return Ok(Some(Ended::Quiesced));
            }
            if self.held.state.step >= total {
                if self.held.is_cut() {
                    self.keep_last(group)?;
                }
                return Ok(Some(Ended::Finished));
            }
            self.hear()?;
            if self.membership.stop.interrupts(Instant::now()) {
                return Err(TrainError::Stopped);
            }
            let Some(Reduced { loss, votes }) = self.reduce(group, &nodes)? else { return Ok(None) };
            self.held.skipped = match skipped(self.run.feed, group) {
                Err(EngineError::Again) => return Ok(None),
                skipped => skipped?,
            };
            self.advance(group, loss, votes)?;
            self.keeper.hear_share_votes(votes, self.held.state.step)?;
            self.hear_votes(group, votes, &mut drain_known)?;
            // All ranks learn in the same step that a round is forming or a rank leaves, too: this is the boundary.
            if votes & (QUIESCE | LEAVE) != 0 {
                self.hand_over(group, votes)?;
                return Ok(Some(Ended::Quiesced));
            }
        }
    }

    /// Follows the ranks' votes to save, or to compare what they hold.
    fn hear_votes(&mut self, group: &mut Group, votes: u32, drain_known: &mut bool) -> Result<(), TrainError> {
        // All ranks learn of a drain in the same step. Rank 0 saves then; it will save again if more steps follow.
        let drains = votes & (DRAIN | LEAVE) != 0 && !std::mem::replace(drain_known, true);
        if drains {
            self.membership.draining = true;
            self.keeper.save_soon();
            self.held.sharding.iter_mut().for_each(|sharding| sharding.assembles = true);
        }
        if drains || votes & COMPARE != 0 {
            self.share(group, &vec![self.held.state.step + 1; group.world_size() as usize])?;
        }
        Ok(())
    }

    /// Sums the next step's gradient over the ranks, and copies the state meanwhile where that is due. None where all
    /// ranks must start again in the same round.
    fn reduce(&mut self, group: &mut Group, nodes: &[Node]) -> Result<Option<Reduced>, TrainError> {
        let Trainer { run, held, keeper, membership, .. } = self;
        let mut copying = keeper.begin_copy(run, &membership.config, held, group)?;
        let mut known = keeper.share_vote(run, membership.leads(), held.state.step);
        known |= if is_to_compare(run, membership, held.state.step) { COMPARE } else { 0 };
        known |= if membership.draining { DRAIN } else { 0 };
        let after = held.state.step + 1;
        known |= if held.is_cut() && keeper.will_copy(run.settings, after) { ASSEMBLE } else { 0 };
        let interruption = Interruption::new(membership.stop, membership.config.round);
        let task = GradientTask {
            model: run.model,
            parameters: held.state.parameters(),
            work: Work::Gradient,
            feed: run.feed,
            order: &run.order,
            batch: run.schedule.batch_after(held.state.step),
            later: evaluation::course(run, held.state.step).skip(1).take(run.feed.most()).collect(),
            shards: run.settings.shards.get(),
            micro_batch: run.settings.micro_batch,
            interruption: &interruption,
        };
        let reduced = keeper::during(copying.as_mut(), &held.state.flat, || {
            let vote = &mut || known | vote_to_end(membership);
            held.engine.reduce(&task, Ranks { group, nodes, vote })
        });
        keeper.end_copy(copying)?;
        match reduced {
            Err(EngineError::Again) => Ok(None),
            reduced => Ok(Some(reduced?)),
        }
    }

    /// Does the step along the gradient, with the sum of its losses.
    fn advance(&mut self, group: &mut Group, loss: f32, votes: u32) -> Result<(), TrainError> {
        let Trainer { run, held, membership, .. } = self;
        let (batch, next, skipped) = (run.schedule.batch_after(held.state.step), held.state.step + 1, held.skipped);
        let read = batch.samples() - skipped.unwrap_or_default();
        if read == 0 {
            return Err(TrainError::NothingRead { step: next, what: "the" });
        }
        let along = run.along(next - 1, skipped);
        let loss = held.engine.commit(group, next, &along, loss)? / (read * run.data.unit().of_a_sample) as f32;
        if !loss.is_finite() {
            return Err(TrainError::Diverged { step: next });
        }
        held.move_owned(run)?;
        let step = held.state.step;
        let GroupConfig { round, world_size, .. } = membership.config;
        held.last = Some(LastStep { round, world_size, loss });
        held.sharding.iter_mut().for_each(|sharding| sharding.assembles = votes & (ASSEMBLE | BEGIN) != 0);
        let StepSamples { epoch, first, end, .. } = batch;
        self.history.tell(&Event::Step { round, step, epoch, first, end, loss, world_size, skipped });
        if let Some(agent) = self.membership.agent.as_mut() {
            agent.progress(step, epoch, f64::from(loss), self.run.schedule.total_steps())?;
        }
        // The step counts, though a peer may be gone before its parameters are here.
        self.held.gather(group)
    }

    /// Reads what the agent has said since the last step, and hears what was saved.
    fn hear(&mut self) -> Result<(), TrainError> {
        while let Some(message) = self.membership.agent.as_mut().map_or(Ok(None), Agent::poll)? {
            self.take(&message);
        }
        self.follow()
    }

    /// Has what is durable since the last look committed.
    fn follow(&mut self) -> Result<(), TrainError> {
        let Some(saving) = self.keeper.saving() else { return Ok(()) };
        let committed = saving.follow(self.membership.agent.as_mut())?;
        committed.iter().for_each(|checkpoint| self.history.tell_commit(checkpoint));
        Ok(())
    }

    /// Takes in what the agent has said. Assignments are for those who wait for them.
    fn take(&mut self, message: &ToWorker) {
        match message {
            ToWorker::Draining { grace_ms } => {
                info!(grace_ms, "this node drains: a checkpoint follows");
                (self.membership.draining, self.membership.drains) = (true, true);
            }
            ToWorker::Forming { round, reason, .. } => info!(round, reason, "a round is forming"),
            message => {
                let committed = self.keeper.saving().and_then(|saving| saving.hear(message));
                committed.iter().for_each(|checkpoint| self.history.tell_commit(checkpoint));
            }
        }
    }

    fn record_step(&mut self) {
        let Some(LastStep { round, world_size, loss }) = self.held.last else { return };
        let step = self.held.state.step;
        let StepSamples { epoch, first, end, .. } = self.run.schedule.batch_after(step - 1);
        let skipped = None;
        self.history.record(&Event::Step { round, step, epoch, first, end, loss, world_size, skipped });
    }
}

/// The job whose checkpoints these are: one without a name of its own continues its folder's.
fn job_of(settings: &Settings, environment: &Environment, job: &str) -> String {
    let folder = settings.checkpoint_dir.as_deref().filter(|_| environment.unnamed);
    let owner = folder.and_then(|folder| Checkpoints::new(Host, folder).owner());
    owner.unwrap_or_else(|| job.to_owned())
}

/// How many samples all ranks have left out of a step, if they may: whole numbers, whose sum has no order.
fn skipped<B: Default + Send>(feed: &Feed<'_, B>, group: &mut Group) -> Result<Option<u64>, EngineError> {
    if !feed.skips() {
        return Ok(None);
    }
    // In the form of the words before a sum over NCCL, because a rank where that failed says so with these.
    let all = group.gather([feed.skipped(), 0])?;
    if all.iter().any(|[_, failed]| *failed > 0) {
        return Err(EngineError::Again);
    }
    Ok(Some(all.iter().map(|[skipped, _]| skipped).sum()))
}

/// Whether this rank asks all ranks to end the round.
fn vote_to_end(membership: &Membership<'_>) -> u32 {
    let quiesce = if membership.forming().is_some() { QUIESCE } else { 0 };
    quiesce | if membership.is_to_leave() { LEAVE } else { 0 }
}

/// Whether this rank asks all ranks to compare their states after the step that follows `done` steps. Rank 0 does so
/// before it saves that state.
fn is_to_compare<M: Model>(run: &Run<'_, M>, membership: &Membership<'_>, done: u64) -> bool {
    let next = done + 1;
    let saves = next == run.schedule.total_steps() || next.is_multiple_of(run.settings.checkpoint_every.get());
    membership.leads() && saves
}
