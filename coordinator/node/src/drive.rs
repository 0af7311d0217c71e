//! The one task that owns a node's machines.

use std::sync::Arc;

use tokio::sync::mpsc;

use super::lead::LeaderDrive;
use super::notes::{LeaderInbox, LeaderNote};
use super::tasks::{AbortOnDrop, Alarm, watch};
use super::{Command, GroupReport, Inbox, Node, Parting, Status, epoch_ms, pulse_client};
use elastic_rendezvous::job::{JobSecret, Keys, LeaderRecord};
use elastic_rendezvous::time::Time;
use elastic_rendezvous::{End, Leader, Member, MemberInput, MemberOutput, MemberSetup};
use elastic_store::{LeaseId, Revision, WatchUpdate};

struct Drive<'a> {
    node: &'a Node,
    member: Member,
    keys: Keys,
    /// The job's, as read when the node joined.
    secret: Option<JobSecret>,
    inbox: Inbox,
    leader_inbox: LeaderInbox,
    commands: &'a mpsc::UnboundedSender<Command>,
    leader: Option<LeaderDrive>,
    member_watches: Vec<AbortOnDrop>,
    pulse: Option<AbortOnDrop>,
    /// A lease to give up once the leader has tidied up.
    revoke: Option<LeaseId>,
    parting: Option<Parting>,
}

/// Runs one incarnation of a node to its end.
pub(super) async fn run(
    node: &Node,
    setup: MemberSetup,
    commands: &mpsc::UnboundedSender<Command>,
    reports: &mut mpsc::UnboundedReceiver<GroupReport>,
) -> Parting {
    let (inbox, inputs) = mpsc::unbounded_channel();
    let (leader_inbox, notes) = mpsc::unbounded_channel();
    node.front.open(&setup.record.id(), &node.job, leader_inbox.clone());
    let drive = Drive {
        node,
        keys: setup.keys.clone(),
        member: Member::new(setup),
        secret: None,
        inbox,
        leader_inbox,
        commands,
        leader: None,
        member_watches: Vec::new(),
        pulse: None,
        revoke: None,
        parting: None,
    };
    drive.run(inputs, notes, reports).await
}

impl Drive<'_> {
    async fn run(
        mut self,
        mut inputs: mpsc::UnboundedReceiver<MemberInput>,
        mut notes: mpsc::UnboundedReceiver<LeaderNote>,
        reports: &mut mpsc::UnboundedReceiver<GroupReport>,
    ) -> Parting {
        self.member(MemberInput::Tick);
        let mut alarm = Alarm::default();
        loop {
            if let Some(parting) = self.parting.take() {
                if let Parting::End(end) = &parting
                    && self.node.concludes
                {
                    self.conclude(end, reports).await;
                }
                if let Some(leader) = &mut self.leader {
                    leader.tidy(&mut notes).await;
                }
                if let Some(lease) = self.revoke.take() {
                    let _ = self.node.store.revoke(lease).await;
                }
                return parting;
            }
            self.publish();
            let deadline = self.deadline();
            tokio::select! {
                Some(input) = inputs.recv() => self.member(input),
                Some(note) = notes.recv() => {
                    self.lead(|leader| leader.notes(note, &mut notes));
                }
                report = reports.recv() => match report {
                    Some(report) => self.member(report.into()),
                    // The agent's side is gone: nothing can be carried out any more.
                    None => return Parting::End(End::Drained),
                },
                () = alarm.rings(deadline) => self.tick(),
            }
        }
    }

    /// Lets the agent have the last word, and keeps the node's key meanwhile.
    async fn conclude(&mut self, end: &End, reports: &mut mpsc::UnboundedReceiver<GroupReport>) {
        self.command(Command::Conclude(self.member.id(), Box::new(end.clone())));
        let every = self.member.spec().timings.renewal();
        loop {
            tokio::select! {
                report = reports.recv() => if matches!(report, Some(GroupReport::Concluded) | None) {
                    return;
                },
                () = tokio::time::sleep(every) => if let Some(lease) = self.revoke {
                    let store = Arc::clone(&self.node.store);
                    // If it fails, the key goes, and what hangs on it is refused.
                    tokio::spawn(async move { drop(store.keep_alive(lease).await) });
                },
            }
        }
    }

    fn deadline(&self) -> Option<Time> {
        let leader = self.leader.as_ref().and_then(LeaderDrive::deadline);
        [self.member.deadline(), leader].into_iter().flatten().min()
    }

    fn publish(&self) {
        let status = Status {
            credentials: self.member.credentials(),
            membership: None,
            round: self.member.round().cloned(),
            leading: self.leader.is_some(),
            timings: Some(self.member.spec().timings),
        };
        self.node.status.send_if_modified(|old| {
            let changed = *old != status;
            *old = status;
            changed
        });
    }

    fn tick(&mut self) {
        if self.lead(LeaderDrive::tick).unwrap_or(false) {
            self.own_word();
        }
        self.member(MemberInput::Tick);
    }

    /// The leader's word to its own node needs no stream.
    fn own_word(&mut self) {
        let now = elastic_store::clock::now();
        if let Some(leader) = &self.leader
            && let Some(word) = leader.word(now, &self.member.id())
        {
            let term = leader.term();
            self.member(MemberInput::Word { sent: now, term, word });
        }
    }

    /// Does something with the leader, if this node leads. Without a leader, a stream that was opened ends here: a node
    /// that does not lead takes no pulses.
    fn lead<T>(&mut self, act: impl FnOnce(&mut LeaderDrive) -> T) -> Option<T> {
        let leader = self.leader.as_mut()?;
        let done = act(leader);
        if leader.is_over() {
            let broken = leader.broken();
            self.leader = None;
            if let Some(error) = broken {
                // It ends as from a watch of its own, and its key of the lead with it: while it exists, no one leads.
                self.member(MemberInput::Watched(WatchUpdate::Broken(error)));
            }
        }
        Some(done)
    }

    fn member(&mut self, input: MemberInput) {
        let outputs = self.member.step(elastic_store::clock::now(), input);
        if self.member.is_over() {
            // This comes before its stream and its key end: others learn from those that they must ask.
            self.node.front.leave();
        }
        for output in outputs {
            self.carry(output);
        }
    }

    fn command(&self, command: Command) {
        // The agent outlives the driver: it holds the other end while `run` is awaited.
        let _ = self.commands.send(command);
    }

    fn carry(&mut self, output: MemberOutput) {
        let (store, inbox) = (Arc::clone(&self.node.store), self.inbox.clone());
        match output {
            MemberOutput::Txn(call, txn) => self.spawn(async move {
                let sent = elastic_store::clock::now();
                let result = store.txn(txn).await;
                let _ = inbox.send(MemberInput::Answered { call, sent, result });
            }),
            MemberOutput::Grant(ttl) => self.spawn(async move {
                let sent = elastic_store::clock::now();
                let result = store.grant(ttl).await;
                let _ = inbox.send(MemberInput::Leased { sent, result });
            }),
            MemberOutput::Renew(lease) => self.spawn(async move {
                let sent = elastic_store::clock::now();
                let result = store.keep_alive(lease).await.map(|left| left.is_some());
                let _ = inbox.send(MemberInput::Renewed { sent, lease, result });
            }),
            // The `leader` key hangs on it, and with that the leader's right to tidy up; and the node's own: see `run`.
            MemberOutput::Revoke(lease) if self.member.is_over() && (self.leader.is_some() || self.node.concludes) => {
                self.revoke = Some(lease);
            }
            MemberOutput::Revoke(lease) => self.spawn(async move {
                // If it fails the lease ends by itself.
                let _ = store.revoke(lease).await;
            }),
            MemberOutput::Watch(scope, from) => {
                let watch = watch(store, scope, from, move |update| inbox.send(MemberInput::Watched(update)).is_ok());
                self.member_watches.push(watch);
            }
            MemberOutput::Pulse(None) => self.pulse = None,
            MemberOutput::Pulse(Some((term, leader))) => self.pulse = Some(self.open_pulse(term, leader)),
            MemberOutput::Lead(term, former) => {
                let now = elastic_store::clock::now();
                let leader = Leader::new(self.member.id(), self.keys.clone(), term, now, epoch_ms(now))
                    .after(former)
                    .seeing(self.member.stage_seen())
                    .knowing(self.member.spec().clone())
                    .trusting(self.secret.clone());
                let commands = self.commands.clone();
                let say = Box::new(move |line| drop(commands.send(Command::Say(line))));
                self.leader = Some(LeaderDrive::new(
                    leader,
                    store,
                    self.leader_inbox.clone(),
                    Some(self.member.id()),
                    say,
                    self.node.tls.clone(),
                ));
            }
            // At the end the leader still tidies up: see `run`.
            MemberOutput::StopLeading if self.member.is_over() => {}
            MemberOutput::StopLeading => self.leader = None,
            MemberOutput::Agent(command) => self.command(command),
            MemberOutput::Warn(line) => tracing::warn!("{line}"),
            MemberOutput::Secret(secret) => {
                self.secret.clone_from(&secret);
                self.node.front.trust(secret);
            }
            MemberOutput::Rejoin(reason) => self.parting = Some(Parting::Rejoin(reason)),
            MemberOutput::End(end) => self.parting = Some(Parting::End(end)),
        }
    }

    fn open_pulse(&self, term: Revision, leader: LeaderRecord) -> AbortOnDrop {
        let client = pulse_client::PulseClient {
            job: self.node.job.to_string(),
            node: self.member.id(),
            secret: self.secret.clone(),
            tls: self.node.tls.clone(),
            leader,
            term,
            beat: self.member.spec().timings.beat(),
            patience: self.member.spec().timings.lease_ttl,
            inbox: self.inbox.clone(),
        };
        AbortOnDrop(tokio::spawn(client.run()))
    }

    fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        tokio::spawn(task);
    }
}
