//! Runs the machine of [`crate`]: its requests, its watch, its timers. To the agent it is what
//! [`Node`](elastic_node::Node) is.

use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;

use crate::etcd_v2::{Entry, EtcdV2, Request};
use crate::{Input, Output, Participant, Paths, RendezvousState, RendezvousStatus, dynamic_found};
use elastic_node::tasks::Alarm;
use elastic_node::{Command, GroupReport, Parting, Status};
use elastic_rendezvous::job::Versioned;
use elastic_rendezvous::{End, MemberSetup};
use elastic_store::{Result, Revision};

/// A node's driver in TorchElastic's rendezvous.
pub struct TorchElastic {
    etcd: EtcdV2,
    paths: Paths,
    identical: bool,
    status: watch::Sender<Status>,
}

impl TorchElastic {
    /// A node of the job that lives at `paths`. `identical`: no ranks are exchanged, as
    /// `TORCH_ELASTIC_WORKER_IDENTICAL=1` tells all nodes.
    pub fn new(etcd: EtcdV2, paths: Paths, identical: bool) -> TorchElastic {
        TorchElastic { etcd, paths, identical, status: watch::Sender::default() }
    }

    /// The node's state, as it changes. It never has credentials: nothing can be committed through this API.
    pub fn status(&self) -> watch::Receiver<Status> {
        self.status.subscribe()
    }

    /// Takes part until the node's part is over.
    pub async fn run(
        &self,
        setup: MemberSetup,
        commands: &mpsc::UnboundedSender<Command>,
        reports: &mut mpsc::UnboundedReceiver<GroupReport>,
    ) -> Parting {
        let MemberSetup { record, spec, seed, .. } = setup;
        let (paths, identical) = (self.paths.clone(), self.identical);
        let machine = Participant::new(crate::ParticipantSetup { record, spec, paths, identical, seed });
        let (inbox, mut inputs) = mpsc::unbounded_channel();
        let mut drive = Drive { node: self, machine, inbox, commands, beside: JoinSet::new(), end: None };
        drive.step(Input::Tick);
        let mut alarm = Alarm::default();
        let end = loop {
            if let Some(end) = drive.end.take() {
                break end;
            }
            let deadline = drive.machine.deadline();
            let input = tokio::select! {
                Some(input) = inputs.recv() => input,
                report = reports.recv() => match report {
                    Some(report) => Input::Agent(report),
                    // The agent's side is gone: nothing can be carried out any more.
                    None => break End::Drained,
                },
                () = alarm.rings(deadline) => Input::Tick,
            };
            while drive.beside.try_join_next().is_some() {}
            drive.step(input);
        };
        self.status.send_replace(Status::default());
        Parting::End(end)
    }
}

struct Drive<'a> {
    node: &'a TorchElastic,
    machine: Participant,
    inbox: mpsc::UnboundedSender<Input>,
    commands: &'a mpsc::UnboundedSender<Command>,
    /// Requests and the watch; they end with this.
    beside: JoinSet<()>,
    end: Option<End>,
}

impl Drive<'_> {
    fn step(&mut self, input: Input) {
        for output in self.machine.step(elastic_store::clock::now(), input) {
            self.carry(output);
        }
        let round = self.machine.round().map(|round| Versioned {
            value: round.clone(),
            created: Revision::NONE,
            modified: Revision::NONE,
        });
        let membership = self.machine.at_work();
        self.node.status.send_if_modified(|old| {
            let changed = (&old.round, old.membership) != (&round, membership);
            (old.round, old.membership) = (round, membership);
            changed
        });
    }

    fn carry(&mut self, output: Output) {
        let (etcd, inbox) = (self.node.etcd.clone(), self.inbox.clone());
        match output {
            Output::Ask(request) => {
                self.beside.spawn(async move {
                    let _ = inbox.send(Input::Answered(etcd.request(request).await));
                });
            }
            Output::Refresh(upkeep, request) => {
                self.beside.spawn(async move {
                    let sent = elastic_store::clock::now();
                    let _ = inbox.send(Input::Refreshed(upkeep, sent, etcd.request(request).await));
                });
            }
            Output::Watch(directory, index) => {
                self.beside.spawn(async move {
                    let _ = inbox.send(Input::News(etcd.wait(&directory, index).await));
                });
            }
            // The agent outlives the driver: it holds the other end while `run` is awaited.
            Output::Agent(command) => drop(self.commands.send(command)),
            Output::End(end) => self.end = Some(end),
        }
    }
}

/// What a node that meets the others through etcd's v3 API finds of the same job on its v2 API, and what to do about
/// it. An error: that is not known, for example because the server does not offer the v2 API.
pub async fn met_on_v2(etcd: &EtcdV2, paths: &Paths) -> Result<Option<String>> {
    etcd.probe().await?;
    let read = async |key: String| -> Result<Option<Entry>> {
        Ok(etcd.request(Request::Read { key, recursive: false }).await?.outcome.ok())
    };
    if read(paths.dynamic().to_owned()).await?.is_some() {
        return Ok(Some(dynamic_found(paths.dynamic())));
    }
    let Some(state) = read(paths.active()).await?.and_then(|entry| RendezvousState::parse(&entry.value).ok()) else {
        return Ok(None);
    };
    let in_use = match state.status {
        RendezvousStatus::Closed => false,
        RendezvousStatus::Setup | RendezvousStatus::Joinable | RendezvousStatus::Frozen => true,
        // It outlives its members; their signs of life do not.
        RendezvousStatus::Final => {
            let directory = read(paths.version(state.version.as_deref().unwrap_or_default())).await?;
            let entries = directory.map(|directory| directory.entries).unwrap_or_default();
            entries.iter().any(|entry| entry.key.rsplit('/').next().is_some_and(|name| name.starts_with("rank_")))
        }
    };
    let active = paths.active();
    Ok(in_use.then(|| {
        format!(
            "nodes of this job's id meet through etcd's v2 API, by TorchElastic's rendezvous (its state is at \
             {active}); this one would begin a second group. Start it with --rdzv-conf api=v2 (or \
             --rdzv-backend=etcd-v2), which joins them, or under another --rdzv-id"
        )
    }))
}
