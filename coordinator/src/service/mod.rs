//! The coordinator service: leads every job under a prefix while it runs. This only decides which jobs to lead; what a
//! leader does is in [`elastic_rendezvous::Leader`], and [`elastic_node`] carries it out.
//!
//! It keeps no state outside the store. Any number of replicas may run: each has its own lease, on which the `leader`
//! keys that it writes hang, and none takes a job from another. Where an agent leads a running job, a replica puts
//! itself over the `leader` key in one transaction, guarded by the agent's term and by the round as read. It need not
//! ask: the guard makes every later write of the agent fail, as after any change of leaders (the model in
//! `docs/model.md` plays it at every moment of a round), and no round, worker or member's key is touched.
//!
//! | module | what it is |
//! |---|---|
//! | [`claim`] | which jobs to lead, as a pure function |
//! | [`lease`] | the replica's lease |
//! | `twin` | another replica that was given the same address |
//! | [`retention`] | which jobs that have ended are deleted, as a pure function; `sweep` deletes them |
//! | [`metrics`] | what Prometheus reads |
//! | [`http`] | `/live`, `/ready`, `/metrics`, the JSON and the gRPC API, and the web page |

pub mod claim;
pub mod http;
pub mod lease;
pub mod metrics;
pub mod retention;
mod sweep;
mod twin;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::net::TcpListener;
use tokio::sync::{mpsc, watch};

use crate::operator::{Operator, log_problems};
use claim::Move;
use elastic_node::epoch_ms;
use elastic_node::lead::LeaderDrive;
use elastic_node::notes::LeaderNote;
use elastic_node::peer_port::PeerPort;
use elastic_node::pulse_server;
use elastic_node::tasks::{AbortOnDrop, Alarm};
use elastic_rendezvous::Leader;
use elastic_rendezvous::job::overview::{Change, Job, Overview};
use elastic_rendezvous::job::{JobId, Keys, LeaderRecord, NodeId};
use elastic_rendezvous::time::Time;
use elastic_store::tls::MutualTls;
use elastic_store::{Guard, LeaseId, Mirror, News, Op, Result, Revision, Store, Txn, TxnResult};
use metrics::Metrics;
use retention::Policy;
use sweep::Sweep;

/// How often everything is checked again, whatever the events say.
const LOOK: Duration = Duration::from_secs(1);

const RETRY: Duration = Duration::from_millis(300);

/// How long a job is left to its agents after one of them could not reach this replica.
const STAND_BACK: Duration = Duration::from_secs(60);

/// How long leaving may take before the lease is given up, whatever is still under way.
const LEAVE: Duration = Duration::from_secs(3);

/// What a replica needs.
pub struct ServiceSetup {
    /// The store.
    pub store: Arc<dyn Store>,
    /// Where the jobs live.
    pub prefix: String,
    /// What it writes under the `leader` keys: an id of this process alone, and where it takes pulses.
    pub record: LeaderRecord,
    /// Its peer port.
    pub listener: TcpListener,
    /// How it speaks with agents.
    pub tls: Option<MutualTls>,
    /// How long its `leader` keys outlive a host that falls silent.
    pub lease_ttl: Duration,
    /// How long jobs that have ended are kept.
    pub retention: Policy,
    /// What others may look at while it runs.
    pub shared: Arc<Shared>,
}

/// What the HTTP port shows of a replica.
#[derive(Default)]
pub struct Shared {
    /// The jobs, once they were read.
    overview: Mutex<Option<Overview>>,
    /// The lease, while it is held.
    lease: Mutex<Option<LeaseId>>,
    /// Told after each change of the jobs.
    changes: watch::Sender<()>,
    /// Counters.
    pub metrics: Metrics,
    /// How it speaks with agents.
    tls: Option<MutualTls>,
}

impl Shared {
    /// Of a replica that speaks so with agents, before it runs.
    pub fn new(tls: Option<MutualTls>) -> Shared {
        Shared { tls, ..Shared::default() }
    }

    fn overview(&self) -> MutexGuard<'_, Option<Overview>> {
        self.overview.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lease(&self) -> MutexGuard<'_, Option<LeaseId>> {
        self.lease.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Why it cannot lead just now; `None` if it can.
    pub fn unready(&self) -> Option<&'static str> {
        if self.overview().is_none() {
            Some("the jobs were not read yet: is the store there?")
        } else if self.lease().is_none() {
            Some("no lease is held: the store does not answer")
        } else {
            None
        }
    }

    /// Everything that Prometheus reads, in its text format.
    pub fn render(&self) -> String {
        self.metrics.render(self.overview().as_ref(), self.tls.as_ref().map(MutualTls::good_until))
    }
}

struct Led {
    term: Revision,
    task: AbortOnDrop,
    stop: watch::Sender<bool>,
}

/// A transaction on a `leader` key was answered.
struct Answered {
    job: JobId,
    result: Result<TxnResult>,
}

struct Service {
    store: Arc<dyn Store>,
    prefix: String,
    record: LeaderRecord,
    tls: Option<MutualTls>,
    shared: Arc<Shared>,
    front: Arc<PeerPort>,
    leads: BTreeMap<JobId, Led>,
    /// Jobs with a transaction on their `leader` key under way.
    asked: BTreeSet<JobId>,
    /// Jobs to be left alone until then.
    away: BTreeMap<JobId, Time>,
    /// Jobs of another protocol, with what was said of it.
    foreign: BTreeMap<JobId, String>,
    /// A living replica that leads at this one's address.
    twin: watch::Receiver<Option<NodeId>>,
    answers: mpsc::UnboundedSender<Answered>,
}

/// Leads until `stop` completes; then hands every job to its agents and returns. An error of the store ends it where no
/// waiting would help: the store refuses us, or is another one than before.
pub async fn run(setup: ServiceSetup, stop: impl Future<Output = ()>) -> Result<()> {
    let ServiceSetup { store, prefix, record, listener, tls, lease_ttl, retention, shared } = setup;
    let front = Arc::<PeerPort>::default();
    front.introduce(&record.node);
    let _port = AbortOnDrop(tokio::spawn(pulse_server::serve(listener, Arc::clone(&front), None, tls.clone())));
    let (held, mut lease) = watch::channel(None);
    let _keeper = AbortOnDrop(tokio::spawn(lease::keep(Arc::clone(&store), lease_ttl, held)));
    let (told, twin) = watch::channel(None);
    let twins = twin::watch(Arc::clone(&shared), record.clone(), tls.clone(), told);
    let _twins = AbortOnDrop(tokio::spawn(twins));
    let (answers, mut answered) = mpsc::unbounded_channel();
    let (mut sweep, mut swept) = Sweep::new(Operator::new(Arc::clone(&store), &prefix).over(tls.clone()), retention);
    let (leads, asked, away, foreign) = Default::default();
    let mut service = Service { store, prefix, record, tls, shared, front, leads, asked, away, foreign, twin, answers };
    tokio::pin!(stop);
    let mut mirror = tokio::select! {
        opened = service.open() => opened?,
        () = &mut stop => return Ok(()),
    };
    let mut looks = tokio::time::interval(LOOK);
    looks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            news = mirror.next() => service.saw(news?),
            Some(answer) = answered.recv() => service.answered(answer),
            Ok(()) = lease.changed() => {
                *service.shared.lease() = *lease.borrow_and_update();
                service.settle_all();
            }
            Some(swept) = swept.recv() => sweep.swept(swept, &service.shared.metrics),
            _ = looks.tick() => {
                service.settle_all();
                sweep.look(service.shared.overview().as_ref());
            }
            () = &mut stop => break,
        }
    }
    let lease = *lease.borrow();
    service.leave(lease).await;
    Ok(())
}

impl Service {
    /// Reads all jobs and watches them, however long the store takes to come.
    async fn open(&self) -> Result<Mirror> {
        let prefix = Keys::jobs(&self.prefix);
        let mut said = false;
        loop {
            match Mirror::open(&*self.store, &prefix).await {
                Err(error) if error.is_transient() => {
                    if !std::mem::replace(&mut said, true) {
                        tracing::warn!("{error}; waiting for it");
                    }
                    tokio::time::sleep(RETRY).await;
                }
                opened => return opened,
            }
        }
    }

    fn saw(&mut self, news: News) {
        match news {
            News::Changes(events) => {
                let touched: BTreeSet<JobId> = events.iter().filter_map(|event| self.event(event)).collect();
                self.shared.changes.send_replace(());
                for job in touched {
                    self.settle(&job);
                }
            }
            News::All { values, revision } => {
                let mut overview = Overview::again(&self.prefix, &values, revision);
                log_problems(&mut overview);
                tracing::info!(jobs = overview.jobs.len(), "watching {}", Keys::jobs(&self.prefix));
                *self.shared.overview() = Some(overview);
                self.shared.changes.send_replace(());
                self.settle_all();
            }
        }
    }

    /// Takes in an event; the job to be checked, if one is.
    fn event(&mut self, event: &elastic_store::Event) -> Option<JobId> {
        let now = elastic_store::clock::now();
        let shared = Arc::clone(&self.shared);
        let mut overview = shared.overview();
        let overview = overview.as_mut()?;
        let applied = overview.apply(event);
        log_problems(overview);
        let (job, change) = applied?;
        let change = change?;
        self.shared.metrics.saw(now, &job, &change);
        if change == Change::Leaderless {
            // What another writes after this is no replacement of ours.
            self.stop_leading(&job);
        }
        if let Change::Term(leader) = &change
            && self.leads.contains_key(&job)
            && leader.value.node != self.record.node
        {
            tracing::warn!(
                %job, by = %leader.value.node,
                "replaced as leader: an agent could not reach {}; is it what --peer-address should say? \
                 Leaving the job to its agents for {STAND_BACK:?}", self.record.peer
            );
            self.away.insert(job.clone(), now + STAND_BACK);
        }
        Some(job)
    }

    fn settle_all(&mut self) {
        let jobs: BTreeSet<JobId> = match self.shared.overview().as_ref() {
            Some(overview) => overview.jobs.keys().chain(self.leads.keys()).cloned().collect(),
            None => return,
        };
        for job in jobs {
            self.settle(&job);
        }
    }

    fn settle(&mut self, id: &JobId) {
        let shared = Arc::clone(&self.shared);
        let overview = shared.overview();
        let Some(job) = overview.as_ref().and_then(|overview| overview.jobs.get(id)) else {
            self.foreign.remove(id);
            return self.stop_leading(id);
        };
        self.say_foreign(id, job);
        let own = job.leader.as_ref().filter(|leader| leader.value.node == self.record.node);
        let term = own.map(|leader| leader.modified);
        match term {
            Some(term) if self.leads.get(id).is_none_or(|led| led.term != term) => self.start_leading(id, job, term),
            Some(_) => {}
            None => self.stop_leading(id),
        }
        if self.asked.contains(id) {
            return;
        }
        let gave_up = self.leads.get(id).is_some_and(|led| led.task.0.is_finished());
        if gave_up {
            tracing::warn!(job = %id, "leaving the job to its agents for {STAND_BACK:?}");
            self.away.insert(id.clone(), elastic_store::clock::now() + STAND_BACK);
        }
        let stands_back = self.away.get(id).is_some_and(|until| elastic_store::clock::now() < *until);
        let stands_back = stands_back || self.twin.borrow().is_some();
        let txn = match claim::next(job, &self.record, self.tls.is_some()) {
            Move::Resign(term) => Some(self.resign(job, term)),
            _ if gave_up => term.map(|term| self.resign(job, term)),
            Move::Claim(guards) if !stands_back => self.shared.lease().map(|lease| self.put(job, guards, lease)),
            _ => None,
        };
        let Some(txn) = txn else { return };
        self.asked.insert(id.clone());
        let (store, answers, job) = (Arc::clone(&self.store), self.answers.clone(), id.clone());
        tokio::spawn(async move {
            let result = store.txn(txn).await;
            match &result {
                Ok(_) => {}
                Err(error) if error.is_transient() => tokio::time::sleep(RETRY).await,
                // Only a person can help.
                Err(_) => tokio::time::sleep(RETRY * 10).await,
            }
            let _ = answers.send(Answered { job, result });
        });
    }

    /// Says once of a job that it is left to its agents.
    fn say_foreign(&mut self, id: &JobId, job: &Job) {
        match job.refusal().or_else(|| job.unlike(self.tls.is_some())) {
            Some(refusal) if self.foreign.get(id) == Some(&refusal) => {}
            Some(refusal) => {
                tracing::warn!(job = %id, "left to its agents: {refusal}");
                self.foreign.insert(id.clone(), refusal);
            }
            None => drop(self.foreign.remove(id)),
        }
    }

    fn put(&self, job: &Job, guards: Vec<Guard>, lease: LeaseId) -> Txn {
        Txn::of([Op::put_leased(job.keys.leader(), elastic_rendezvous::job::to_json(&self.record), lease)])
            .guarded(guards)
    }

    fn resign(&self, job: &Job, term: Revision) -> Txn {
        let leader = job.keys.leader();
        Txn::of([Op::delete(&leader)]).guarded([Guard::modified(leader, term)])
    }

    /// The watch says who leads, so an unknown outcome needs no care.
    fn answered(&mut self, answer: Answered) {
        self.asked.remove(&answer.job);
        if let Err(error) = answer.result {
            tracing::warn!(job = %answer.job, "{error}");
            self.settle(&answer.job);
        }
    }

    fn start_leading(&mut self, id: &JobId, job: &Job, term: Revision) {
        tracing::info!(job = %id, %term, "leading");
        self.away.remove(id);
        let now = elastic_store::clock::now();
        let (inbox, notes) = mpsc::unbounded_channel();
        let mut leader = Leader::new(self.record.node.clone(), job.keys.clone(), term, now, epoch_ms(now));
        if let Some(spec) = job.spec.clone() {
            leader = leader.knowing(spec);
        }
        let name = id.clone();
        let say = Box::new(move |line: String| tracing::info!(job = %name, "{line}"));
        let drive = LeaderDrive::new(leader, Arc::clone(&self.store), inbox.clone(), None, say, self.tls.clone());
        self.front.open(&self.record.node, id, inbox);
        let (stop, stopping) = watch::channel(false);
        let task = AbortOnDrop(tokio::spawn(lead(drive, notes, stopping, Arc::clone(&self.shared))));
        self.leads.insert(id.clone(), Led { term, task, stop });
        self.shared.metrics.leading(self.leads.len());
    }

    fn stop_leading(&mut self, id: &JobId) {
        if self.leads.remove(id).is_some() {
            tracing::info!(job = %id, "not leading any more");
            self.front.close(id);
            self.shared.metrics.leading(self.leads.len());
        }
    }

    /// Finishes what is under way, then gives up the lease: its `leader` keys vanish in one step, and agents campaign
    /// within 50 ms.
    async fn leave(&mut self, lease: Option<LeaseId>) {
        tracing::info!(jobs = self.leads.len(), "leaving: the jobs' agents lead from now on");
        let mut leads = std::mem::take(&mut self.leads);
        let finished = async {
            for led in leads.values_mut() {
                led.stop.send_replace(true);
            }
            for led in leads.values_mut() {
                let _ = (&mut led.task.0).await;
            }
        };
        if tokio::time::timeout(LEAVE, finished).await.is_err() {
            tracing::warn!("a transaction is not answered; leaving all the same");
        }
        if let Some(lease) = lease
            && let Err(error) = self.store.revoke(lease).await
        {
            tracing::warn!("{error}; agents lead once they find this port closed");
        }
    }
}

/// Carries one term to its end, or until a member proves to be out of reach.
async fn lead(
    mut drive: LeaderDrive,
    mut notes: mpsc::UnboundedReceiver<LeaderNote>,
    mut stop: watch::Receiver<bool>,
    shared: Arc<Shared>,
) {
    let mut alarm = Alarm::default();
    while !drive.is_over() {
        tokio::select! {
            Some(note) = notes.recv() => {
                shared.metrics.queued(1 + notes.len());
                drive.notes(note, &mut notes);
            }
            () = alarm.rings(drive.deadline()) => {
                drive.tick();
                if let Some(node) = drive.unreached(elastic_store::clock::now()) {
                    tracing::warn!(%node, "a member cannot reach the peer port; is --peer-address right?");
                    return drive.tidy(&mut notes).await;
                }
            }
            _ = stop.changed() => return drive.tidy(&mut notes).await,
        }
    }
}
