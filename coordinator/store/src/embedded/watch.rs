//! etcd's Watch service: one task for each stream, which carries any number of watches. The events come from the hub's
//! subscriptions.
//!
//! A stream's task is the only one that waits for its client. While it does, its events wait in the history.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use etcd_client::proto::{PbWatchRequest, PbWatchRequestUnion, PbWatchResponse, PbWatchService};
use futures::StreamExt;
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore, mpsc};
use tokio::time::{Instant, MissedTickBehavior};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status, Streaming};

use super::cluster::{Cluster, RpcResult, Stream};
use super::gate::{Gate, Reign};
use super::mvcc::{Compacted, Mvcc, Span};
use super::{Batch, Hub, Subscription, status, wire};
use crate::Revision;

const RESPONSES_AHEAD: usize = 4;

/// The id in an answer that is about the stream rather than a watch.
const NO_WATCH: i64 = -1;

/// Room for one watch, or for one stream of watches, until it is dropped.
fn place(places: &Arc<Semaphore>) -> Result<OwnedSemaphorePermit, &'static str> {
    let full = |_| "the embedded store has as many watches as it takes; use etcd for more";
    Arc::clone(places).try_acquire_owned().map_err(full)
}

pub(super) struct WatchService {
    pub(super) gate: Gate,
    /// Room for watches and for the streams that carry them.
    pub(super) places: Arc<Semaphore>,
    /// How often a watch that asked for it hears of the store's progress.
    pub(super) progress_every: Duration,
}

#[tonic::async_trait]
impl PbWatchService for WatchService {
    type WatchStream = Stream<PbWatchResponse>;

    async fn watch(&self, request: Request<Streaming<PbWatchRequest>>) -> RpcResult<Response<Self::WatchStream>> {
        let place = place(&self.places).map_err(Status::resource_exhausted)?;
        let Reign { hub, cluster, closing } = self.gate.reign().await?;
        let (answers, stream) = mpsc::channel(RESPONSES_AHEAD);
        let session = Session {
            hub,
            cluster,
            places: Arc::clone(&self.places),
            _place: place,
            answers,
            wake: Arc::new(Notify::new()),
            watches: BTreeMap::new(),
            next_id: 0,
            progress_wanted: false,
        };
        let every = self.progress_every;
        tokio::spawn(async move {
            tokio::select! {
                _gone = session.run(request.into_inner(), every) => {}
                () = closing.closed() => {}
            }
        });
        Ok(Response::new(Box::pin(ReceiverStream::new(stream))))
    }
}

/// The client of a stream is gone, or wants no more.
struct Gone;

struct Watch {
    subscription: Subscription,
    _place: OwnedSemaphorePermit,
    prev_kv: bool,
    progress_notify: bool,
    puts: bool,
    deletes: bool,
}

struct Session {
    hub: Arc<Hub>,
    cluster: Cluster,
    places: Arc<Semaphore>,
    _place: OwnedSemaphorePermit,
    answers: mpsc::Sender<Result<PbWatchResponse, Status>>,
    wake: Arc<Notify>,
    watches: BTreeMap<i64, Watch>,
    next_id: i64,
    progress_wanted: bool,
}

impl Session {
    async fn run(mut self, mut requests: Streaming<PbWatchRequest>, progress_every: Duration) -> Result<(), Gone> {
        let mut progress = tokio::time::interval_at(Instant::now() + progress_every, progress_every);
        progress.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let wake = self.wake.clone();
        loop {
            tokio::select! {
                request = requests.next() => match request {
                    Some(Ok(request)) => self.handle(request).await?,
                    Some(Err(_)) | None => return Err(Gone),
                },
                () = wake.notified() => {}
                _ = progress.tick() => self.tell_progress().await?,
                () = self.answers.closed() => return Err(Gone),
            }
            self.deliver().await?;
        }
    }

    async fn handle(&mut self, request: PbWatchRequest) -> Result<(), Gone> {
        let create = match request.request_union {
            Some(PbWatchRequestUnion::CreateRequest(create)) => create,
            Some(PbWatchRequestUnion::CancelRequest(cancel)) => {
                if self.watches.remove(&cancel.watch_id).is_some() {
                    let revision = self.hub.look(Mvcc::revision);
                    let canceled = PbWatchResponse { canceled: true, ..self.response(cancel.watch_id, revision) };
                    self.send(canceled).await?;
                }
                return Ok(());
            }
            Some(PbWatchRequestUnion::ProgressRequest(_)) => {
                self.progress_wanted = true;
                return Ok(());
            }
            None => return Ok(()),
        };
        // etcd takes an empty key as the smallest one.
        let key = if create.key.is_empty() { vec![0] } else { create.key };
        let span = Span::of(key, create.range_end);
        let refused = if self.watches.contains_key(&create.watch_id) && create.watch_id != 0 {
            Some("mvcc: duplicate watch ID provided on the WatchStream")
        } else if matches!(&span, Span::Between(start, end) if start >= end) {
            Some("mvcc: watcher range is empty")
        } else {
            None
        };
        let place = match refused {
            Some(reason) => Err(reason.to_owned()),
            None => place(&self.places).map_err(str::to_owned),
        };
        let place = match place {
            Ok(place) => place,
            Err(cancel_reason) => {
                let revision = self.hub.look(Mvcc::revision);
                let response = self.response(NO_WATCH, revision);
                return self.send(PbWatchResponse { created: true, canceled: true, cancel_reason, ..response }).await;
            }
        };
        let id = if create.watch_id != 0 { create.watch_id } else { self.unused_id() };
        let from = (create.start_revision > 0).then_some(Revision(create.start_revision));
        let (subscription, revision) = self.hub.subscribe(span, from, self.wake.clone());
        let watch = Watch {
            subscription,
            _place: place,
            prev_kv: create.prev_kv,
            progress_notify: create.progress_notify,
            puts: !create.filters.contains(&0),
            deletes: !create.filters.contains(&1),
        };
        self.watches.insert(id, watch);
        self.send(PbWatchResponse { created: true, ..self.response(id, revision) }).await
    }

    /// Gives each watch its next events. A watch that has more comes again after the others, and after requests.
    async fn deliver(&mut self) -> Result<(), Gone> {
        let mut responses = Vec::new();
        let mut lost = Vec::new();
        for (&id, watch) in &self.watches {
            match watch.subscription.take() {
                Ok(Some(batch)) => responses.extend(self.events(id, watch, &batch)),
                Ok(None) => continue,
                Err(compacted) => lost.push((id, compacted)),
            }
            self.wake.notify_one();
        }
        for response in responses {
            self.send(response).await?;
        }
        for (id, Compacted { oldest, .. }) in lost {
            self.watches.remove(&id);
            let revision = self.hub.look(Mvcc::revision);
            let canceled = PbWatchResponse {
                canceled: true,
                compact_revision: oldest.0,
                cancel_reason: status::COMPACTED.to_owned(),
                ..self.response(id, revision)
            };
            self.send(canceled).await?;
        }
        if self.progress_wanted {
            self.answer_progress().await?;
        }
        Ok(())
    }

    fn events(&self, id: i64, watch: &Watch, batch: &Batch) -> Option<PbWatchResponse> {
        let wanted =
            batch.events.iter().filter(|event| if event.record.is_some() { watch.puts } else { watch.deletes });
        let events: Vec<_> = wanted.map(|event| wire::event(event, watch.prev_kv)).collect();
        (!events.is_empty()).then(|| PbWatchResponse { events, ..self.response(id, batch.revision) })
    }

    /// Says up to where everything on this stream has been delivered, once that is all.
    async fn answer_progress(&mut self) -> Result<(), Gone> {
        let current = self.hub.look(Mvcc::revision);
        let mut reached = self.watches.values().map(|watch| watch.subscription.caught_up());
        if let Some(revision) = reached.try_fold(current, |least, reached| Some(least.min(reached?))) {
            self.progress_wanted = false;
            self.send(self.response(NO_WATCH, revision)).await?;
        }
        Ok(())
    }

    async fn tell_progress(&self) -> Result<(), Gone> {
        for (&id, watch) in self.watches.iter().filter(|(_, watch)| watch.progress_notify) {
            if let Some(revision) = watch.subscription.caught_up() {
                self.send(self.response(id, revision)).await?;
            }
        }
        Ok(())
    }

    fn unused_id(&mut self) -> i64 {
        while self.watches.contains_key(&self.next_id) {
            self.next_id += 1;
        }
        self.next_id += 1;
        self.next_id - 1
    }

    fn response(&self, watch_id: i64, revision: Revision) -> PbWatchResponse {
        PbWatchResponse { header: Some(self.cluster.header(revision)), watch_id, ..PbWatchResponse::default() }
    }

    async fn send(&self, response: PbWatchResponse) -> Result<(), Gone> {
        self.answers.send(Ok(response)).await.map_err(|_| Gone)
    }
}

#[cfg(test)]
mod tests {
    use elastic_rendezvous::time::Time;
    use prost::Message;

    use super::*;
    use crate::embedded::command;
    use crate::embedded::mvcc::Limits;

    #[tokio::test]
    async fn no_watch_ends_a_lease_of_a_store_that_others_hold_too() {
        let hub = Hub::idle(Limits::default());
        hub.carry_out(&command::at(Time::ZERO, command::grant(7, 1)));
        let (answers, mut heard) = mpsc::channel(20);
        let places = Arc::new(Semaphore::new(2));
        let mut session = Session {
            hub: hub.clone(),
            cluster: Cluster::of(1, 1),
            _place: place(&places).unwrap(),
            places,
            answers,
            wake: Arc::new(Notify::new()),
            watches: BTreeMap::new(),
            next_id: 0,
            progress_wanted: false,
        };
        // A watch of nothing, one of a to b with id 3, its progress, its end.
        for request in [
            &b"\x0a\x06\x0a\x01b\x12\x01a"[..],
            b"\x0a\x08\x0a\x01a\x12\x01b\x38\x03",
            b"\x1a\x00",
            b"\x12\x02\x08\x03",
        ] {
            let request = PbWatchRequest::decode(request).unwrap();
            assert!(session.handle(request).await.is_ok() && session.deliver().await.is_ok());
            assert!(heard.try_recv().is_ok(), "no answer");
            assert!(hub.look(Mvcc::next_expiry).is_some(), "a lease has ended without a command");
        }
    }
}
