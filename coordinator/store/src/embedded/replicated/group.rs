//! Drives a replica: its clock, its letters, the clients that wait for what they asked. What is agreed on goes to the
//! hub.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use elastic_proto::replication::command::What;
use elastic_proto::replication::letter::Body;
use elastic_proto::replication::replication_server::Replication;
use elastic_proto::replication::{Delivered, Grant, Letter, Place};
use elastic_rendezvous::time::Time;
use tokio::sync::{oneshot, watch};
use tonic::{Request, Response, Status};

use super::post::Post;
use super::{Output, Replica, Standing};
use crate::Revision;
use crate::embedded::cluster::{Closing, Cluster, RpcResult};
use crate::embedded::command::{self, Answer};
use crate::embedded::gate::Reign;
use crate::embedded::hub::{FIRST_LEASE, Hub};
use crate::embedded::mvcc::Mvcc;
use crate::tls::MutualTls;

/// How often the replica hears the time.
const TICK: Duration = Duration::from_millis(50);

/// Between two entries that end leases.
const ENDS: Duration = Duration::from_millis(200);

/// How long a client waits here for one that serves, before it has to look elsewhere.
const HOLD: Duration = Duration::from_millis(700);

/// For how long the one that serves is silent about another that does not hold the store.
const FEW: Duration = Duration::from_secs(30);

/// The agents that may serve the store.
#[derive(Clone, Debug)]
pub struct Replicas {
    /// All of them, as `host:port`, sorted.
    pub endpoints: Vec<String>,
    /// Which of them this one is.
    pub seat: usize,
}

/// This process's part in a replicated store.
pub struct Group {
    hub: Arc<Hub>,
    endpoints: Vec<String>,
    state: Mutex<State>,
    standing: watch::Sender<Standing>,
    posts: Vec<Option<Post>>,
}

struct State {
    replica: Replica,
    /// Clients, by the index of what they asked for, and its term.
    waiting: BTreeMap<u64, (u64, oneshot::Sender<(Answer, Revision)>)>,
    /// While this process serves; dropped, it ends the streams.
    reign: Option<watch::Sender<()>>,
    /// When leases were last ended.
    ended: Time,
    /// Since when this process serves with fewer than all, and whether it has said so.
    few: Option<(Time, bool)>,
}

impl std::fmt::Debug for Group {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Group").field("endpoints", &self.endpoints).finish_non_exhaustive()
    }
}

impl Group {
    /// Takes part from now on, until it is dropped. Must be called within a tokio runtime.
    pub(in crate::embedded) fn start(
        hub: Arc<Hub>,
        Replicas { endpoints, seat }: Replicas,
        tls: Option<&MutualTls>,
    ) -> Result<Arc<Group>, String> {
        let now = crate::clock::now();
        let replica = Replica::new(&endpoints, seat, rand::random(), now);
        let mut posts = Vec::new();
        for (at, endpoint) in endpoints.iter().enumerate() {
            posts.push(if at == seat { None } else { Some(Post::to(endpoint, tls)?) });
        }
        let standing = watch::Sender::new(replica.standing(now));
        let state = Mutex::new(State { replica, waiting: BTreeMap::new(), reign: None, ended: now, few: None });
        let group = Arc::new(Group { hub, endpoints, state, standing, posts });
        tokio::spawn(keep_time(Arc::downgrade(&group)));
        Ok(group)
    }

    pub(in crate::embedded) fn hub(&self) -> &Arc<Hub> {
        &self.hub
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Has the replica do something, and carries out what follows from it.
    fn act<T>(&self, act: impl FnOnce(&mut Replica, Time) -> (T, Vec<Output>)) -> T {
        let mut state = self.lock();
        let now = crate::clock::now();
        let (result, outputs) = act(&mut state.replica, now);
        self.carry_out(&mut state, now, outputs);
        result
    }

    fn carry_out(&self, state: &mut State, now: Time, outputs: Vec<Output>) {
        for output in outputs {
            match output {
                Output::Send(seat, mut letter) => {
                    if let Some(Body::Snapshot(snapshot)) = &mut letter.body {
                        snapshot.state = self.hub.look(Mvcc::saved);
                    }
                    if let Some(Some(post)) = self.posts.get(seat) {
                        post.send(letter);
                    }
                }
                Output::Apply(place, command) => {
                    let done = self.hub.carry_out(&command);
                    if let Some((term, client)) = state.waiting.remove(&place.index)
                        && term == place.term
                    {
                        // A client that is gone needs no answer.
                        let _ = client.send(done);
                    }
                }
                Output::Restore(saved) => match Mvcc::restored(self.hub.look(|mvcc| mvcc.limits().clone()), &saved) {
                    Ok(mvcc) => self.hub.replace(mvcc),
                    Err(error) => {
                        tracing::error!(%error, "another agent sent a state that is none: it is asked for again");
                        let again = state.replica.end(now);
                        return self.carry_out(state, now, again);
                    }
                },
                Output::Reset => self.hub.replace(Mvcc::new(self.hub.look(|mvcc| mvcc.limits().clone()), FIRST_LEASE)),
            }
        }
        self.look(state, now);
    }

    /// Notes whether this process serves, and tells those whom that concerns.
    fn look(&self, state: &mut State, now: Time) {
        let standing = state.replica.standing(now);
        let serves = standing == Standing::Serves;
        if serves && state.reign.is_none() {
            state.reign = Some(watch::Sender::new(()));
            let (term, cluster) = (state.replica.term(), state.replica.cluster());
            tracing::info!(term, cluster = format_args!("{cluster:x}"), "this process serves the store now");
        } else if !serves && state.reign.take().is_some() {
            // No one can say whether what they asked for will be done.
            state.waiting.clear();
            tracing::info!("this process does not serve the store any more");
        }
        self.note_few(state, serves, now);
        let changed = |before: &mut Standing| std::mem::replace(before, standing.clone()) != standing;
        if self.standing.send_if_modified(changed)
            && let Standing::Follows(seat) = &standing
        {
            tracing::info!("the process at {} serves the store", self.endpoints[*seat]);
        }
    }

    /// Warns once where some agents do not come to hold the store.
    fn note_few(&self, state: &mut State, serves: bool, now: Time) {
        let lives = state.replica.voters();
        let missing = self.endpoints.iter().zip(lives).filter(|(_, life)| **life == 0);
        let missing: Vec<&str> = missing.map(|(endpoint, _)| endpoint.as_str()).collect();
        if !serves || missing.is_empty() {
            state.few = None;
            return;
        }
        let (since, said) = state.few.get_or_insert((now, false));
        if now.since(*since) >= FEW && !*said {
            *said = true;
            let missing = missing.join(" and ");
            tracing::warn!("no process holds the store at {missing}: until one does, losing a host loses the store");
        }
    }

    /// Waits until the store is served, and this process has a vote: then another may be lost.
    pub async fn is_served(&self) {
        while matches!(*self.standing.borrow(), Standing::Waits(_)) || !self.lock().replica.votes() {
            tokio::time::sleep(TICK).await;
        }
    }

    /// Tells the others that this process needs the store no more, and waits until that is so of all that are there, or
    /// were heard within the time after which one is `gone`.
    pub async fn leave(&self, gone: Duration) {
        self.act(|replica, now| ((), replica.leave(now, gone)));
        while !self.needed_by().is_empty() {
            tokio::time::sleep(TICK).await;
        }
    }

    /// The endpoints of those for which [`Group::leave`] still waits: they need this process, or are there and do not
    /// know yet that it leaves, so they would wait for it. A way that was cut until now has letters in it that are late.
    pub fn needed_by(&self) -> Vec<&str> {
        let (state, now) = (self.lock(), crate::clock::now());
        let needed = state.replica.needed_by(now);
        let posts = self.posts.iter().enumerate().filter_map(|(seat, post)| Some((seat, post.as_ref()?)));
        let waits = |(seat, post): &(usize, &Post)| {
            needed.contains(seat) || state.replica.is_there(*seat, now) && !post.knows_of_leave()
        };
        posts.filter(waits).map(|(seat, _)| self.endpoints[seat].as_str()).collect()
    }

    /// Waits a moment until this process serves; else a client has to look elsewhere.
    async fn serves(&self) -> RpcResult<()> {
        let mut standing = self.standing.subscribe();
        let known = standing.wait_for(|standing| !matches!(standing, Standing::Waits(_)));
        let known = tokio::time::timeout(HOLD, known).await;
        match known.ok().and_then(Result::ok).map(|standing| standing.clone()) {
            Some(Standing::Serves) => Ok(()),
            Some(Standing::Follows(seat)) => {
                Err(Status::unavailable(format!("etcdserver: no leader here: {} serves it", self.endpoints[seat])))
            }
            _ => Err(Status::unavailable(self.why_not())),
        }
    }

    /// Says what a store lacks that no one serves.
    pub fn missing(&self) -> String {
        let all = self.endpoints.join(", ");
        match &*self.standing.borrow() {
            Standing::Waits(there) => {
                let there: Vec<&str> = there.iter().map(|&seat| self.endpoints[seat].as_str()).collect();
                format!(
                    "two of the processes at {all} must be there to serve the store, and {} is",
                    there.join(" and ")
                )
            }
            Standing::Serves | Standing::Follows(_) => format!("one of the processes at {all} serves the store"),
        }
    }

    fn why_not(&self) -> String {
        format!("etcdserver: no leader: {}", self.missing())
    }

    /// Has a command agreed on and carried out.
    pub(in crate::embedded) async fn run(&self, what: What) -> RpcResult<(Answer, Revision, Cluster)> {
        self.serves().await?;
        let what = match what {
            // Drawn here, so that a client of a store that was lost renews no stranger's lease.
            What::Grant(Grant { id: 0, seconds }) => What::Grant(Grant { id: rand::random_range(1..1 << 62), seconds }),
            what => what,
        };
        let (proposed, cluster) = self.propose(what);
        let Some(answer) = proposed else { return Err(Status::unavailable(self.why_not())) };
        let lost = |_| Status::unavailable("etcdserver: leader changed");
        let (answer, revision) = answer.await.map_err(lost)?;
        Ok((answer, revision, cluster))
    }

    fn propose(&self, what: What) -> (Option<oneshot::Receiver<(Answer, Revision)>>, Cluster) {
        let mut state = self.lock();
        let now = crate::clock::now();
        let (place, outputs) = state.replica.propose(now, command::at(now, what));
        let answer = place.map(|Place { index, term }| {
            let (sender, answer) = oneshot::channel();
            state.waiting.insert(index, (term, sender));
            answer
        });
        self.carry_out(&mut state, now, outputs);
        (answer, Cluster::of(state.replica.cluster(), state.replica.life()))
    }

    /// The lives that have a vote, and their endpoints.
    pub(in crate::embedded) fn voters(&self) -> Vec<(u64, String)> {
        let lives = self.lock().replica.voters().to_vec();
        lives.into_iter().zip(self.endpoints.iter().cloned()).filter(|(life, _)| *life != 0).collect()
    }

    /// For a stream, while this process serves.
    pub(in crate::embedded) async fn reign(&self) -> RpcResult<Reign> {
        self.serves().await?;
        let state = self.lock();
        let Some(reign) = &state.reign else { return Err(Status::unavailable(self.why_not())) };
        let cluster = Cluster::of(state.replica.cluster(), state.replica.life());
        Ok(Reign { hub: Arc::clone(&self.hub), cluster, closing: Closing(reign.subscribe()) })
    }

    fn tick(&self) {
        self.act(|replica, now| ((), replica.tick(now)));
        let now = crate::clock::now();
        let mut state = self.lock();
        let due = self.hub.look(|mvcc| mvcc.next_expiry().is_some_and(|at| at <= now));
        let ends = due && state.reign.is_some() && now.since(state.ended) >= ENDS;
        if ends {
            state.ended = now;
            drop(state);
            self.propose(command::tick());
        }
    }
}

async fn keep_time(group: Weak<Group>) {
    while let Some(group) = group.upgrade() {
        group.tick();
        drop(group);
        tokio::time::sleep(TICK).await;
    }
}

/// The agents' own service, on the store's port.
#[derive(Clone)]
pub(in crate::embedded) struct Letters(pub(in crate::embedded) Arc<Group>);

#[tonic::async_trait]
impl Replication for Letters {
    async fn deliver(&self, request: Request<Letter>) -> RpcResult<Response<Delivered>> {
        let letter = request.into_inner();
        if !self.0.lock().replica.knows(&letter) {
            let own = self.0.endpoints.join(",");
            let why = format!(
                "it was given other endpoints, which are {own}: give all the same (--rdzv-endpoint, --members)"
            );
            return Err(Status::failed_precondition(why));
        }
        let seat = self.0.lock().replica.seat;
        if letter.to_seat as usize != seat {
            let own = &self.0.endpoints[seat];
            let why = format!("it is the process at {own}, to which two endpoints lead: name three that differ");
            return Err(Status::failed_precondition(why));
        }
        self.0.act(|replica, now| ((), replica.receive(now, letter)));
        Ok(Response::new(Delivered {}))
    }
}
