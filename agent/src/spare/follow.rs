//! Follows one job's records, and holds a claim in them. Other modules decide what to do.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use elastic_rendezvous::job::overview::{Job, Overview};
use elastic_rendezvous::job::{JobId, Keys, RoundState, Vacancy};
use elastic_store::{Guard, LeaseId, Mirror, Op, Revision, Store, StoreError};
use tokio::sync::{mpsc, oneshot};
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::sleep;

/// How long `withdraw` waits until the store has deleted a claim.
const GIVE_UP: Duration = Duration::from_secs(2);

/// How long a claim outlives its host.
const CLAIM_TTL: Duration = Duration::from_secs(20);

/// What a job's records say to one host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct News {
    pub(super) job: JobId,
    /// The place that the job has free for the host.
    pub(super) vacancy: Option<Vacancy>,
    /// Whether the host's node has a place, or may get one in the round that forms.
    pub(super) placed: bool,
    /// Whether the host's node has a key in the job.
    pub(super) here: bool,
    /// The create revision of the job's round key. It changes when a new job takes the id.
    pub(super) life: Revision,
}

/// A job that a task follows until this is dropped, or the job's store fails.
pub(super) struct Followed {
    pub(super) store: Arc<dyn Store>,
    pub(super) keys: Keys,
    task: JoinSet<StoreError>,
}

impl Followed {
    /// Follows the job for the host of this name.
    pub(super) fn begin(
        store: Arc<dyn Store>,
        prefix: &str,
        job: &JobId,
        host: &str,
        news: mpsc::UnboundedSender<News>,
    ) -> Followed {
        let keys = Keys::new(prefix, job);
        let watched = (Arc::clone(&store), prefix.to_owned(), keys.root().to_owned());
        let (job, host) = (job.clone(), host.to_owned());
        let mut task = JoinSet::new();
        task.spawn(async move {
            let (store, prefix, root) = watched;
            // This fails once the host leaves and has dropped the receiver.
            let tell = |overview: &Overview| drop(news.send(News::of(&job, overview.jobs.get(&job), &host)));
            match watch(&*store, &prefix, &root, tell).await {
                Err(error) => error,
                Ok(never) => match never {},
            }
        });
        Followed { store, keys, task }
    }

    /// The error that ended the task. `None` while the task runs.
    pub(super) fn end(&mut self) -> Option<StoreError> {
        let ended = self.task.try_join_next()?;
        Some(ended.unwrap_or_else(|error| StoreError::Invalid(error.to_string())))
    }
}

/// Tells what the records say, once at the beginning and after each change, until the watch breaks.
async fn watch(
    store: &dyn Store,
    prefix: &str,
    root: &str,
    tell: impl Fn(&Overview),
) -> Result<Infallible, StoreError> {
    let mut overview = Overview::new(prefix);
    let mut mirror = Mirror::open(store, root).await?;
    loop {
        overview.take(mirror.next().await?);
        tell(&overview);
    }
}

impl News {
    fn of(id: &JobId, job: Option<&Job>, host: &str) -> News {
        let own = job.and_then(|job| job.nodes.values().find(|node| node.value.name == host).map(|own| (job, own)));
        let placed = own.is_some_and(|(job, own)| {
            let forming = job.round.as_ref().is_some_and(|round| round.value.state == RoundState::Forming);
            forming || job.rank(&own.value.id()).is_some()
        });
        let life = job.and_then(|job| job.round.as_ref()).map_or(Revision::NONE, |round| round.created);
        News { job: id.clone(), vacancy: job.and_then(|job| job.vacancy(host)), placed, here: own.is_some(), life }
    }
}

/// A claim to a place: a key in the job's records that tells other spare hosts that this one is on its way. The key
/// is deleted when this is dropped, or when the host dies and the lease ends.
pub(super) struct PlaceClaim {
    task: JoinHandle<()>,
    stop: oneshot::Sender<()>,
}

impl PlaceClaim {
    /// Writes the claim, and holds it. If the store refuses the claim, the log says so.
    pub(super) fn make(followed: &Followed, host: &str, life: Revision) -> PlaceClaim {
        let (store, keys, host) = (Arc::clone(&followed.store), followed.keys.clone(), host.to_owned());
        let (stop, stopped) = oneshot::channel();
        let task = tokio::spawn(async move {
            let held = async {
                let lease = store.grant(CLAIM_TTL).await?;
                // A claim must not outlive the job: the next job with the same id would find it.
                let guards = vec![Guard::created(keys.round(), life)];
                store.put(guards, Op::put_leased(keys.coming(&host), "{}", lease)).await?;
                Ok::<LeaseId, StoreError>(lease)
            };
            let lease = match held.await {
                Ok(lease) => lease,
                Err(error) => return tracing::warn!("{error}; no place is claimed"),
            };
            let renew = async {
                loop {
                    sleep(CLAIM_TTL / 4).await;
                    // If the lease is lost, the records show that the claim is gone.
                    let _ = store.keep_alive(lease).await;
                }
            };
            tokio::select! {
                _ = stopped => {}
                () = renew => {}
            }
            // If this fails, the key is deleted when the lease ends.
            let _ = store.revoke(lease).await;
        });
        PlaceClaim { task, stop }
    }

    /// Deletes the claim, and waits until it is deleted, up to [`GIVE_UP`].
    pub(super) async fn withdraw(self) {
        drop(self.stop);
        let _ = tokio::time::timeout(GIVE_UP, self.task).await;
    }
}
