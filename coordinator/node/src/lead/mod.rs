//! Carries one term of a [`Leader`]: its transactions, watches, pulse streams and dials. An agent has a member beside
//! it; a replica of the coordinator has none.

#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::{Semaphore, mpsc, watch};

use elastic_proto::pulse::{Answer, Beat, LeaderMessage, Probe};

use super::dial;
use super::notes::{LeaderInbox, LeaderNote, PulseEvent};
use super::pulse_proof::Shown;
use super::tasks::{self, AbortOnDrop, Alarm};
use elastic_rendezvous::job::{NodeId, Phase};
use elastic_rendezvous::time::Time;
use elastic_rendezvous::{Demand, Leader, LeaderInput, LeaderOutput, Word};
use elastic_store::tls::MutualTls;
use elastic_store::{Revision, Store, StoreError};

/// Longest that a leaving leader finishes what it began.
const TIDY: Duration = Duration::from_secs(2);

/// Beats while the job's own pace is not known yet.
const FIRST_BEAT: Duration = Duration::from_millis(200);

/// How long a suspect may leave a dial unanswered while the job's own patience is not known yet.
const FIRST_PATIENCE: Duration = Duration::from_secs(2);

/// Most notes taken in before a decision, and before others on the same task have their turn.
const BATCH: usize = 1024;
/// Dials of suspects at once.
const DIALS: usize = 64;
/// Streams of nodes that the leader does not know yet. One that is turned away comes again.
const STRANGERS: usize = 1024;

fn lock(nodes: &Mutex<BTreeSet<NodeId>>) -> MutexGuard<'_, BTreeSet<NodeId>> {
    nodes.lock().unwrap_or_else(PoisonError::into_inner)
}

struct Stream {
    node: NodeId,
    /// What proves that it is that node's, until that was checked.
    shown: Option<Shown>,
    answers: watch::Sender<LeaderMessage>,
    /// The leader knows of it: it knows the node, and the stream has shown what it must.
    known: bool,
    /// The newest beat that came before that.
    early: Option<Beat>,
}

/// A term being carried.
pub struct LeaderDrive {
    leader: Leader,
    store: Arc<dyn Store>,
    inbox: LeaderInbox,
    /// The node that leads, where it is a member too: it needs no stream to itself.
    own: Option<NodeId>,
    say: Box<dyn Fn(String) + Send>,
    tls: Option<MutualTls>,
    watches: Vec<AbortOnDrop>,
    streams: BTreeMap<u64, Stream>,
    /// The newest stream of each node. An older one may have broken unheard, and says nothing of the node.
    newest: BTreeMap<NodeId, u64>,
    /// Those of nodes that the leader does not know, yet or at all.
    strangers: BTreeSet<u64>,
    /// Nodes in whose names streams were turned away: one warning for each is enough.
    forged: BTreeSet<NodeId>,
    /// Nodes that are being dialled: each once at a time.
    dialled: Arc<Mutex<BTreeSet<NodeId>>>,
    /// Places for dials: a rack that falls silent makes many suspects.
    dials: Arc<Semaphore>,
    /// Why the store tells it nothing more.
    broken: Option<StoreError>,
    begun: Time,
    /// When the own node counts as heard next.
    beat_at: Time,
}

impl LeaderDrive {
    /// Carries `leader`; what is next to it reports to `inbox`, whose other end feeds [`LeaderDrive::note`].
    pub fn new(
        leader: Leader,
        store: Arc<dyn Store>,
        inbox: LeaderInbox,
        own: Option<NodeId>,
        say: Box<dyn Fn(String) + Send>,
        tls: Option<MutualTls>,
    ) -> LeaderDrive {
        let (watches, streams, newest, strangers, forged) = Default::default();
        let now = elastic_store::clock::now();
        let mut drive = LeaderDrive {
            leader,
            store,
            inbox,
            own,
            say,
            tls,
            watches,
            streams,
            newest,
            strangers,
            forged,
            dialled: Arc::default(),
            dials: Arc::new(Semaphore::new(DIALS)),
            broken: None,
            begun: now,
            beat_at: now,
        };
        match drive.own.clone() {
            Some(own) => drive.step(LeaderInput::Opened(own)),
            None => drive.step(LeaderInput::Tick),
        }
        drive.decide();
        drive
    }

    /// The term.
    pub fn term(&self) -> Revision {
        self.leader.term()
    }

    /// The term is over: nothing follows.
    pub fn is_over(&self) -> bool {
        self.leader.is_over()
    }

    /// Why the term is over, where the store ended it and no other leader did.
    pub fn broken(&self) -> Option<StoreError> {
        self.broken.clone()
    }

    /// The leader's word to a node now; none before it has read the job.
    pub fn word(&self, now: Time, node: &NodeId) -> Option<Word> {
        self.leader.word(now, node)
    }

    /// When it wants a [`LeaderDrive::tick`].
    pub fn deadline(&self) -> Option<Time> {
        let beat = self.own.is_some().then_some(self.beat_at);
        [self.leader.deadline(), beat].into_iter().flatten().min()
    }

    /// A member that is here and has opened no stream to us for two leases: it cannot reach us, and without its pulses
    /// a leader is slow to judge.
    pub fn unreached(&self, now: Time) -> Option<&NodeId> {
        let view = self.leader.view()?;
        if view.roster.all_opened().is_some() {
            return None;
        }
        let patience = view.spec.timings.lease_ttl * 2;
        view.roster.members().map(|(node, _)| node).find(|node| {
            let opened = view.roster.contact(node).is_some_and(|contact| contact.opened.is_some());
            let late = view.roster.node(node).is_some_and(|present| {
                // A result outlives its node.
                present.record.phase != Phase::Done && now.since(present.arrived.max(self.begun)) >= patience
            });
            late && !opened
        })
    }

    /// Does what time asks for; whether a beat of the own node was due.
    pub fn tick(&mut self) -> bool {
        let now = elastic_store::clock::now();
        let beat = self.own.clone().filter(|_| now >= self.beat_at);
        let beats = beat.is_some();
        if let Some(own) = beat {
            self.beat_at = now + self.leader.view().map_or(FIRST_BEAT, |view| view.spec.timings.beat());
            self.step(LeaderInput::Heard { node: own, probe: 0, echo: Some(now) });
        }
        if self.leader.deadline().is_some_and(|at| now >= at) {
            self.step(LeaderInput::Tick);
        }
        self.decide();
        beats
    }

    /// Takes in this note and those queued behind it. One decision is enough for all.
    pub fn notes(&mut self, first: LeaderNote, queue: &mut mpsc::UnboundedReceiver<LeaderNote>) {
        self.take(first);
        for _ in 1..BATCH {
            let Ok(note) = queue.try_recv() else { break };
            self.take(note);
        }
        self.meet_strangers();
        self.decide();
    }

    /// Takes in one thing that happened next to it.
    pub fn note(&mut self, note: LeaderNote) {
        self.take(note);
        self.meet_strangers();
        self.decide();
    }

    /// Takes in the streams of nodes that the leader knows by now, and the beats that came too early.
    fn meet_strangers(&mut self) {
        let met: Vec<u64> = self.strangers.iter().copied().filter(|id| self.is_met(*id)).collect();
        for id in met {
            self.introduce(id);
            if let Some(beat) = self.streams.get_mut(&id).and_then(|stream| stream.early.take()) {
                self.beat(id, beat);
            }
        }
    }

    fn is_met(&self, stream: u64) -> bool {
        self.streams.get(&stream).is_some_and(|stream| self.leader.demand(&stream.node) != Demand::Wait)
    }

    fn take(&mut self, note: LeaderNote) {
        match note {
            LeaderNote::Input(term, input) => {
                if term == self.term() {
                    self.step(input);
                }
            }
            LeaderNote::Pulse { stream, event, turn: _turn } => match event {
                PulseEvent::Opened { node, shown, answers } => self.opened(stream, node, shown, answers),
                PulseEvent::Beat(beat) => self.beat(stream, beat),
                PulseEvent::Closed => self.closed(stream),
            },
        }
    }

    fn opened(&mut self, stream: u64, node: NodeId, shown: Option<Shown>, answers: watch::Sender<LeaderMessage>) {
        if self.strangers.len() < STRANGERS || self.leader.demand(&node) != Demand::Wait {
            self.streams.insert(stream, Stream { node, shown, answers, known: false, early: None });
            self.strangers.insert(stream);
            self.introduce(stream);
        }
    }

    /// Tells the leader of a stream once it knows the node, and ends one that does not show what it must; whether the
    /// leader knows it.
    fn introduce(&mut self, id: u64) -> bool {
        let Some(stream) = self.streams.get_mut(&id) else { return false };
        if stream.known {
            return true;
        }
        let node = stream.node.clone();
        match self.leader.demand(&node) {
            Demand::Wait => return false,
            Demand::Nothing => {}
            Demand::Proof(secret) => {
                let shown = stream.shown.take();
                let Some(proof) = shown.and_then(|shown| shown.answer(secret, self.leader.node(), &node)) else {
                    self.turn_away(id, node);
                    return false;
                };
                stream.answers.send_modify(|word| word.proof = proof);
            }
        }
        stream.known = true;
        self.strangers.remove(&id);
        let newest = self.newest.entry(node.clone()).or_default();
        *newest = id.max(*newest);
        self.step(LeaderInput::Opened(node));
        true
    }

    /// No one but that node itself can make up for what is missing, on a stream of its own.
    fn turn_away(&mut self, stream: u64, node: NodeId) {
        self.closed(stream);
        if self.forged.insert(node.clone()) {
            tracing::warn!(
                %node,
                "a pulse stream in the name of this node does not prove that it knows the job's secret, and counts for \
                 nothing: somebody else opened it, or the `secret` in the store was changed after the node had joined"
            );
        }
    }

    fn closed(&mut self, stream: u64) {
        self.strangers.remove(&stream);
        let Some(Stream { node, known, .. }) = self.streams.remove(&stream) else { return };
        if known && self.newest.get(&node).is_none_or(|newest| *newest <= stream) {
            self.newest.remove(&node);
            self.step(LeaderInput::Closed(node));
        }
    }

    fn beat(&mut self, stream: u64, Beat { seq, probe, echo_ms }: Beat) {
        if !self.introduce(stream) {
            if let Some(stranger) = self.streams.get_mut(&stream) {
                stranger.early = Some(Beat { seq, probe, echo_ms });
            }
            return;
        }
        let Some(Stream { node, answers, .. }) = self.streams.get(&stream) else { return };
        let node = node.clone();
        if echo_ms > answers.borrow().answer.map(|answer| answer.sent_ms) {
            // The sender claims to have heard what was not said to it, so it is not that node.
            tracing::warn!(%node, "closed a pulse stream in this node's name: it echoed a message that was never sent");
            return self.closed(stream);
        }
        let echo = echo_ms.map(Time::from_millis);
        self.step(LeaderInput::Heard { node: node.clone(), probe, echo });
        if self.is_over() {
            return;
        }
        let now = elastic_store::clock::now();
        if let Some(word) = self.word(now, &node) {
            let answer = Answer {
                seq,
                round: word.round,
                round_revision: word.revision.0,
                running: word.running,
                proof_age_ms: word.proof_age.as_millis() as u64,
                all_heard_ms: word.all_heard.map(|age| age.as_millis() as u64),
                term: self.term().0,
                sent_ms: now.as_millis(),
            };
            if let Some(stream) = self.streams.get(&stream) {
                stream.answers.send_modify(|word| word.answer = Some(answer));
            }
        }
    }

    fn step(&mut self, input: LeaderInput) {
        for output in self.leader.take(elastic_store::clock::now(), input) {
            self.carry(output);
        }
    }

    fn decide(&mut self) {
        loop {
            let outputs = self.leader.act(elastic_store::clock::now());
            if outputs.is_empty() {
                return;
            }
            outputs.into_iter().for_each(|output| self.carry(output));
        }
    }

    fn carry(&mut self, output: LeaderOutput) {
        let (store, inbox, term) = (Arc::clone(&self.store), self.inbox.clone(), self.term());
        match output {
            LeaderOutput::Txn(txn) => {
                tokio::spawn(async move {
                    let sent = elastic_store::clock::now();
                    let result = store.txn(txn).await;
                    let _ = inbox.send(LeaderNote::Input(term, LeaderInput::Answered { sent, result }));
                });
            }
            LeaderOutput::Watch(scope, from) => self.watches.push(tasks::watch(store, scope, from, move |update| {
                inbox.send(LeaderNote::Input(term, LeaderInput::Watched(update))).is_ok()
            })),
            LeaderOutput::Probe(number) => {
                let asked = Some(Probe { number });
                for stream in self.streams.values().filter(|stream| stream.known) {
                    // Asked again for one that opened late, the others have nothing to wake for.
                    stream.answers.send_if_modified(|word| std::mem::replace(&mut word.probe, asked) != asked);
                }
                if let Some(own) = self.own.clone() {
                    self.step(LeaderInput::Heard { node: own, probe: number, echo: Some(elastic_store::clock::now()) });
                }
            }
            LeaderOutput::Suspect(node, peer) => {
                let patience = self.leader.view().map_or(FIRST_PATIENCE, |view| view.spec.timings.lease_ttl);
                let tls = self.tls.clone();
                let (dialled, dials) = (Arc::clone(&self.dialled), Arc::clone(&self.dials));
                if !lock(&dialled).insert(node.clone()) {
                    return;
                }
                tokio::spawn(async move {
                    let place = dials.acquire_owned().await;
                    let dead = dial::is_dead(&peer, &node, tls.as_ref(), patience).await;
                    lock(&dialled).remove(&node);
                    drop(place);
                    if dead {
                        let _ = inbox.send(LeaderNote::Input(term, LeaderInput::Dead(node)));
                    }
                });
            }
            LeaderOutput::Deposed => self.close(),
            LeaderOutput::Broken(error) => {
                tracing::warn!("cannot lead the job: {error}");
                self.broken = Some(error);
                self.close();
            }
            LeaderOutput::Say(line) => (self.say)(line),
            LeaderOutput::Warn(line) => tracing::warn!("{line}"),
        }
    }

    fn close(&mut self) {
        self.watches.clear();
        self.streams.clear();
        self.newest.clear();
        self.strangers.clear();
    }

    /// Finishes the transaction under way, and what follows from it, before the leader leaves.
    pub async fn tidy(&mut self, notes: &mut mpsc::UnboundedReceiver<LeaderNote>) {
        let (by, mut alarm) = (elastic_store::clock::now() + TIDY, Alarm::default());
        while self.leader.is_busy() && elastic_store::clock::now() < by {
            tokio::select! {
                note = notes.recv() => if let Some(note @ LeaderNote::Input(..)) = note { self.note(note) },
                () = alarm.rings(Some(by)) => {}
            }
        }
    }
}
