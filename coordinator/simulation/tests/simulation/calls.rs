//! Calls to the store and back, with all that can go wrong between.

use elastic_node::requests::checkpoint::commit_txn;
use elastic_rendezvous::job::{Checkpoint, RoundState};
use elastic_rendezvous::time::Time;
use elastic_rendezvous::{Credentials, LeaderInput, MemberInput};
use elastic_store::{Guard, Op, OpResult, Revision, Scope, StoreError, Txn, WatchUpdate};

use crate::dice::{MS, SECOND, seconds};
use crate::process::Input;
use crate::service::{Answer, Asker, Request, failure, unavailable, unknown};
use crate::world::{Happening, Mutation, World};

impl World {
    pub(crate) fn send(&mut self, p: usize, asker: Asker, request: Request) {
        if !matches!(asker, Asker::CommitRead(_) | Asker::Commit(_)) {
            self.promises.called(self.now, p);
        }
        let (sent, life, ticket) = (self.local(p), self.processes[p].life, self.fresh());
        self.store.open.insert(ticket);
        let wrong = self.goes_wrong(self.scenario.losing);
        let patience = self.dice.between(2 * SECOND, 6 * SECOND);
        let travels = if wrong && self.dice.chance(0.5) {
            // Longer than the caller waits, now and then: done, but never heard of.
            let late = self.dice.between(SECOND, 9 * SECOND);
            self.schedule(|| format!("a call of p{p} reaches the store only after {}", seconds(late)));
            late
        } else {
            self.hop(p)
        };
        if travels >= patience {
            self.fail(p, life, ticket, asker.clone(), sent, &request, patience);
        }
        self.at(travels, Happening::AtStore { p, life, ticket, asker, sent, request });
    }

    /// The caller gives up: reads did nothing, writes may have.
    #[allow(clippy::too_many_arguments)]
    fn fail(&mut self, p: usize, life: u32, ticket: u64, asker: Asker, sent: Time, request: &Request, after: u64) {
        let error = if request.is_write() { unknown() } else { unavailable() };
        let answer = failure(request, error);
        self.at(after, Happening::Answered { p, life, ticket, asker, sent, answer });
    }

    pub(crate) fn at_store(&mut self, p: usize, life: u32, ticket: u64, asker: Asker, sent: Time, request: Request) {
        let host = self.processes[p].host;
        if !self.store.up || self.hosts[host].cut_off || !self.hosts[host].up {
            let refused = self.dice.chance(0.5);
            let after = if refused { self.dice.between(MS, 50 * MS) } else { self.dice.between(SECOND, 5 * SECOND) };
            if refused || !request.is_write() || self.dice.chance(0.5) {
                let answer = failure(&request, unavailable());
                return self.at(after, Happening::Answered { p, life, ticket, asker, sent, answer });
            }
            return self.fail(p, life, ticket, asker, sent, &request, after);
        }
        if let Some(error) = self.refusal(p, &asker, &request) {
            self.tell(|| format!("store: p{p} {asker:?}: {error}"));
            let (hop, answer) = (self.hop(p), failure(&request, error));
            return self.at(hop, Happening::Answered { p, life, ticket, asker, sent, answer });
        }
        let request = self.mutated(&asker, request);
        let answer = self.store.apply(self.now, &request);
        self.tell(|| format!("store: p{p} {asker:?}: {answer:?}"));
        if let (Asker::Commit(credentials), Answer::Txn(Ok(result))) = (&asker, &answer)
            && result.succeeded
        {
            let tombstone = Scope::Key(self.keys.evicted(&credentials.node));
            let evicted = !self.store.mvcc.snapshot(&tombstone).is_empty();
            let round = self.store_round();
            self.promises.committed(credentials, evicted, round);
        }
        self.changed();
        if self.goes_wrong(self.scenario.losing) {
            let after = self.dice.between(SECOND, 5 * SECOND);
            self.schedule(|| format!("the store's answer to p{p} is lost"));
            return self.fail(p, life, ticket, asker, sent, &request, after);
        }
        let hop = self.hop(p);
        self.at(hop, Happening::Answered { p, life, ticket, asker, sent, answer });
    }

    fn mutated(&self, asker: &Asker, request: Request) -> Request {
        // Each round has a line of history, whose own guard stops most of what the round's would.
        let dropped = match (self.mutation, asker) {
            (Some(Mutation::NoRound), Asker::Leader(_)) => vec![self.keys.round(), self.keys.events()],
            (Some(Mutation::NoGuards), Asker::Leader(_)) => {
                vec![self.keys.round(), self.keys.events(), self.keys.leader()]
            }
            _ => return request,
        };
        let Request::Txn(mut txn) = request else { return request };
        let lies_under = |key: &str, prefix: &str| prefix.ends_with('/') && key.starts_with(prefix);
        let is_dropped = |key: &str| dropped.iter().any(|dropped| key == dropped || lies_under(key, dropped));
        txn.when.retain(|guard| match guard {
            Guard::Modified { key, .. } | Guard::Created { key, .. } => !is_dropped(key),
            Guard::Empty(..) => true,
        });
        Request::Txn(txn)
    }

    pub(crate) fn answered(&mut self, p: usize, life: u32, asker: Asker, sent: Time, answer: Answer) {
        if self.processes[p].life != life || !self.processes[p].alive {
            return;
        }
        if let Answer::Txn(Ok(result)) = &answer {
            self.store.reached(p, result.revision);
        }
        let input = match (asker, answer) {
            (Asker::Member(call), Answer::Txn(result)) => Input::Member(MemberInput::Answered { call, sent, result }),
            (Asker::Leader(term), Answer::Txn(result)) => Input::Leader(term, LeaderInput::Answered { sent, result }),
            (_, Answer::Granted(result)) => Input::Member(MemberInput::Leased { sent, result }),
            (_, Answer::Renewed(lease, result)) => Input::Member(MemberInput::Renewed { sent, lease, result }),
            (Asker::CommitRead(credentials), Answer::Txn(Ok(result))) => {
                return self.commit_read(p, credentials, result.results.first());
            }
            _ => return,
        };
        self.input_after(0, p, input);
    }

    /// Something may have been written: watches and promises hear of it.
    pub(crate) fn changed(&mut self) {
        let (events, changed) = self.store.written(self.keys.root());
        if changed {
            self.promises.changed(self.now);
        }
        if !events.is_empty() {
            self.promises.written(self.now, &self.keys, &events, &self.store.mvcc);
            for watch in 0..self.store.watches.len() {
                if !self.store.watches[watch].over && !self.store.watches[watch].waiting {
                    self.store.watches[watch].waiting = true;
                    let hop = self.dice.between(0, 2 * MS);
                    self.at(hop, Happening::News { watch });
                }
            }
        }
        if let Some(at) = self.store.next_expiry()
            && (at < self.store.expiry_at || self.store.expiry_at <= self.now)
        {
            self.store.expiry_at = at;
            self.queue(at, Happening::Expire);
        }
    }

    pub(crate) fn expire(&mut self) {
        if self.store.up {
            let time = self.store.time(self.now);
            self.store.expiry_at = u64::MAX;
            self.store.mvcc.expire(time);
            self.changed();
        }
    }

    /// A watch delivers what is new, in order and in its own time.
    pub(crate) fn news(&mut self, watch: usize) {
        let (p, life, term) = {
            let watch = &mut self.store.watches[watch];
            watch.waiting = false;
            (watch.process, watch.life, watch.term)
        };
        if self.store.watches[watch].over {
            return;
        }
        let host = &self.hosts[self.processes[p].host];
        let broken = self.store.watches[watch].broken_until;
        if !self.store.up || host.cut_off || !host.up || self.now < broken {
            self.store.watches[watch].waiting = true;
            let after = self.dice.between(50 * MS, 500 * MS);
            return self.queue((self.now + after).max(broken), Happening::News { watch });
        }
        let update = if self.store.is_lost_to(p) {
            self.store.watches[watch].over = true;
            Some(WatchUpdate::Broken(StoreError::Lost { cause: "simulated".into() }))
        } else {
            self.store.news(watch)
        };
        let Some(update) = update else { return };
        self.store.reached_by(p, &update);
        let hop = if self.goes_wrong(self.scenario.losing / 2.0) {
            let late = self.dice.between(SECOND, 8 * SECOND);
            self.schedule(|| format!("the store's news reach p{p} only after {}", seconds(late)));
            late
        } else {
            self.hop(p)
        };
        let when = (self.now + hop).max(self.store.watches[watch].free_at + 1);
        self.store.watches[watch].free_at = when;
        let input = match term {
            Some(term) => Input::Leader(term, LeaderInput::Watched(update)),
            None => Input::Member(MemberInput::Watched(update)),
        };
        self.queue(when, Happening::Input { p, life, input });
    }

    /// Now and then a worker publishes a checkpoint.
    pub(crate) fn commit_perhaps(&mut self, p: usize) {
        if !self.dice.chance(0.02) || self.processes[p].at_work().is_none() {
            return;
        }
        let Some(credentials) = self.processes[p].member.credentials() else { return };
        let current = &credentials.current.value;
        let member = current.sealed.is_some_and(|sealed| sealed.number == credentials.round);
        if !member || !matches!(current.state, RoundState::Running | RoundState::Forming) {
            return;
        }
        let read = Request::Txn(Txn::of([Op::get(self.keys.checkpoint())]));
        self.send(p, Asker::CommitRead(credentials), read);
    }

    fn commit_read(&mut self, p: usize, credentials: Credentials, pointer: Option<&OpResult>) {
        let pointer = pointer.and_then(OpResult::value);
        let step =
            pointer.and_then(|kv| serde_json::from_slice::<Checkpoint>(&kv.value).ok()).map_or(1, |it| it.step + 1);
        let pointer = pointer.map_or(Revision::NONE, |kv| kv.mod_revision);
        let life = self.processes[p].life;
        // Between the reading and the sending a process may be stopped for long.
        let after = self.dice.mostly(20 * MS, 15 * SECOND);
        self.at(after, Happening::CommitSent { p, life, credentials: Box::new(credentials), pointer, step });
    }

    pub(crate) fn commit(&mut self, p: usize, life: u32, credentials: Credentials, pointer: Revision, step: u64) {
        if !self.processes[p].alive || self.processes[p].life != life {
            return;
        }
        if self.processes[p].frozen {
            let again = Happening::CommitSent { p, life, credentials: Box::new(credentials), pointer, step };
            return self.at(SECOND, again);
        }
        let checkpoint =
            Checkpoint { step, path: format!("/ckpt/{step}"), digest: "crc32c:0".into(), round: credentials.round };
        let mut txn = commit_txn(&self.keys, &credentials, &checkpoint, pointer);
        if self.mutation == Some(Mutation::CommitUnfenced) {
            txn.when.retain(|guard| !matches!(guard, Guard::Modified { key, .. } if *key == self.keys.round()));
            txn.when.retain(|guard| !matches!(guard, Guard::Created { .. }));
        }
        self.send(p, Asker::Commit(credentials), Request::Txn(txn));
    }

    /// Breaks a watch for a while.
    pub(crate) fn break_watch(&mut self, watch: usize, until: u64) {
        self.store.watches[watch].broken_until = until;
    }

    /// A watch works again at this time, even if it was to be broken for longer.
    pub(crate) fn repair_watch(&mut self, watch: usize, at: u64) {
        self.break_watch(watch, at);
        self.queue(at, Happening::News { watch });
    }
}
