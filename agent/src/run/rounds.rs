//! Takes part in a job, until the node's part is over. Commands of the protocol go to the workers, and events of the
//! workers go back to the protocol.

use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use elastic_node::{Command, GroupReport, Parting, random_bytes};
use elastic_rendezvous::job::{Endpoint, JobSecret, Keys, NodeRecord, Spec};
use elastic_rendezvous::{End, MemberSetup, Start};
use elastic_store::Store;
use tokio::sync::{mpsc, watch};
use uuid::Uuid;

use super::command_lines::CommandLines;
use crate::store::participation::Participation;
use crate::workers::group::Moved;
use crate::workers::guard_client::Event;
use crate::workers::lifecycle::{Ahead, WorkersLifecycle, wait};
use crate::workers::signals::{Handled, Signals};

fn seed() -> u64 {
    Uuid::new_v4().as_u64_pair().0
}

/// Runs the node's part in the protocol, one incarnation after the other. `offers` gives the ports for rank 0.
async fn drive(
    part: Participation,
    mut setup: MemberSetup,
    offers: watch::Receiver<Option<Endpoint>>,
    commands: mpsc::UnboundedSender<Command>,
    mut reports: mpsc::UnboundedReceiver<GroupReport>,
) -> End {
    loop {
        match part.run(setup.clone(), &commands, &mut reports).await {
            Parting::Rejoin(reason) => {
                setup.record.incarnation = Uuid::new_v4().to_string();
                // The port offered before may have been used.
                setup.record.master = offers.borrow().clone();
                setup.seed = seed();
                let node = setup.record.id();
                tracing::warn!(%node, "evicted: {reason}; joining again as a new incarnation");
            }
            Parting::End(end) => return end,
        }
    }
}

/// Takes part, one incarnation after the other, until the node's part is over.
pub(super) async fn take_part(
    part: Participation,
    mut record: NodeRecord,
    spec: Spec,
    store: Option<&Arc<dyn Store>>,
    keys: &Keys,
    local: &mut WorkersLifecycle,
    signals: &mut Signals,
) -> anyhow::Result<End> {
    let (reports, inbox) = mpsc::unbounded_channel();
    let (commands, mut orders) = mpsc::unbounded_channel();
    record.master = local.group.master().offer();
    let secret = JobSecret::of(random_bytes().context("make a secret for the job")?);
    let command_lines = CommandLines::of(record.clone());
    let setup = MemberSetup { record, spec, keys: keys.clone(), secret, may_lead: true, seed: seed() };
    let mut driver = tokio::spawn(drive(part, setup, local.group.master().latest(), commands, inbox));

    let mut leaving = Leaving::No;
    // The reason why no more workers can be started here.
    let mut unfit: Option<String> = None;
    loop {
        let report = tokio::select! {
            end = &mut driver => {
                let end = end.context("the node's driver ended")?;
                return Ok(unfit.map_or(end, End::Refused));
            }
            Some(command) = orders.recv() => {
                if let (Command::Start(start), Some(store)) = (&command, store)
                    && start.rank.group_rank == 0
                {
                    command_lines.compare(store, keys);
                }
                carry_out(command, local, store, keys, leaving)
            }
            moved = local.group.next() => {
                let lost = matches!(moved, Moved::Workers(Event::GuardLost { .. }));
                let report = local.moved(moved).await;
                if lost {
                    unfit = Some("the guard process was lost".to_owned());
                    reports.send(GroupReport::Drain).ok();
                }
                report
            }
            request = local.socket.round_asked() => local.group.ask_round(request),
            finished = local.socket.finished() => Some(GroupReport::Finished { round: local.group.round(), finished }),
            Some(verdict) = local.watchdog.verdict() => local.group.condemn(verdict),
            waited = wait(&mut local.phase, local.forming, &local.socket) => local.waited(waited),
            caught = signals.next() => {
                leaving = leaving.told_again();
                if let Some(concluded) = leave(leaving, caught, local) {
                    reports.send(concluded).ok();
                }
                Some(GroupReport::Drain)
            }
        };
        if let Some(why) = local.group.starved() {
            tracing::error!("{why}; this node leaves the job: make room, and start its agent again");
            unfit = Some(why);
            reports.send(GroupReport::Drain).ok();
        }
        for report in report.into_iter().chain(local.settle()) {
            // If the driver is gone, the select above sees it.
            reports.send(local.with_step(report)).ok();
        }
    }
}

/// Carries out a command of the protocol. Returns what there is to report of it at once.
fn carry_out(
    command: Command,
    local: &mut WorkersLifecycle,
    store: Option<&Arc<dyn Store>>,
    keys: &Keys,
    leaving: Leaving,
) -> Option<GroupReport> {
    match command {
        Command::Start(start) => {
            announce(&start);
            return local.start(start);
        }
        Command::Quiesce(grace) => local.quiesce(grace),
        Command::WarmUp { round, restarts, grace } => {
            tracing::info!(round, "the other nodes continue without this node until its new workers are warm");
            local.warm_up(Ahead { round, restarts, grace });
        }
        Command::Stop(grace) => local.stop(grace),
        Command::Kill => local.stop(Duration::ZERO),
        Command::Fence(until) => local.group.fence(until),
        Command::Leaving(grace) => local.socket.draining(grace),
        Command::Forming(round, reason) => {
            tracing::info!(round, "forming: {reason}");
            local.forming(round, &reason);
        }
        Command::Say(line) => tracing::info!("{line}"),
        Command::Conclude(node, end) => {
            return local.conclude(store, keys, node, &end, leaving == Leaving::AtOnce);
        }
    }
    None
}

/// Prepares the workers for the end that a signal asks for. Returns the report of a final save that is given up.
fn leave(leaving: Leaving, caught: Handled, local: &mut WorkersLifecycle) -> Option<GroupReport> {
    if leaving == Leaving::AtOnce {
        tracing::warn!("{caught} again: killing the workers and leaving at once");
        return local.give_up_saving();
    }
    tracing::warn!("{caught}: leaving the job; a second signal after 3 s kills the workers and leaves at once");
    local.group.leave(caught.0);
    None
}

/// Whether a signal told this node to leave.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Leaving {
    No,
    /// The first signal asks for a planned leave: the workers may save.
    AsPlanned,
    /// Another signal asks to leave without waiting for anything.
    AtOnce,
}

impl Leaving {
    fn told_again(self) -> Leaving {
        match self {
            Leaving::No => Leaving::AsPlanned,
            Leaving::AsPlanned | Leaving::AtOnce => Leaving::AtOnce,
        }
    }
}

fn announce(start: &Start) {
    let round = &start.round;
    tracing::info!(
        round = round.number,
        nodes = round.group_world_size,
        world_size = round.world_size,
        group_rank = start.rank.group_rank,
        first_rank = start.rank.first_rank,
        restarts = round.restarts,
        "running: {}",
        round.reason
    );
}
