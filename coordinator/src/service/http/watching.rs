//! Watches of the gRPC API: a job or all jobs as they stand, and again whenever they have changed. A client that reads
//! slowly hears of fewer states, never of old ones, and nothing is kept for it.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::http::HeaderMap;
use elastic_proto::jobs::{JobSummary, WatchAllReply, WatchReply};
use futures::Stream;
use futures::stream::try_unfold;
use prost::Message;
use tokio::sync::{OwnedSemaphorePermit, watch};
use tokio::time::{sleep, timeout};
use tonic::Status;

use super::Site;
use super::access::Caller;
use super::messages::{MESSAGE, message};
use super::operations::{aside, copied, find, look, since};
use super::problem::Problem;
use elastic_rendezvous::job::overview::Overview;
use elastic_rendezvous::job::{self, JobId};
use elastic_store::Revision;

/// What changes within this time is sent together; where it takes long to tell, within so many times as long.
const TOGETHER: Duration = Duration::from_millis(100);
const PART: u32 = 10;

/// How often a watch looks whether its caller may still call, whatever changes.
const LOOK: Duration = Duration::from_secs(2);

/// Its place among the watches, and its connection.
type Held = (OwnedSemaphorePermit, Option<watch::Receiver<()>>);

/// Somebody's watch, with the token that it came with: one that is taken away, or expires, ends it.
pub(super) struct Watching {
    site: Arc<Site>,
    token: HeaderMap,
    changes: watch::Receiver<()>,
    /// There is more to tell, whether anything changes or not.
    at_once: bool,
    /// What changes within this time is sent together.
    together: Duration,
    _held: Held,
}

impl Watching {
    pub(super) fn new(site: Arc<Site>, token: HeaderMap, held: Held) -> Watching {
        let changes = site.shared.changes.subscribe();
        Watching { site, token, changes, at_once: true, together: TOGETHER, _held: held }
    }

    /// Looks until there is news.
    async fn news<T>(
        &mut self,
        mut news: impl FnMut(&Overview, &Caller) -> Result<Option<T>, Problem>,
    ) -> Result<T, Problem> {
        loop {
            if !std::mem::take(&mut self.at_once) {
                let _ = timeout(LOOK, self.changes.changed()).await;
                sleep(self.together).await;
            }
            self.changes.mark_unchanged();
            let caller = self.site.caller(&self.token)?;
            if let Some(news) = look(&self.site.shared, |overview| news(overview, &caller))? {
                return Ok(news);
            }
        }
    }
}

/// One job, and the lines of its history after one.
pub(super) fn one(
    watching: Watching,
    id: String,
    after: u64,
) -> impl Stream<Item = Result<WatchReply, Status>> + use<> {
    try_unfold((watching, id, after, None), |(mut watching, id, after, told)| async move {
        let news = watching.news(|overview, caller| {
            let (id, job) = find(overview, &id, caller)?;
            if told == Some(job.changed) {
                return Ok(None);
            }
            // A history that has begun again is sent from its start.
            let last = job.events.keys().next_back().copied().unwrap_or(0);
            let (value, _) = since(job, if last < after { 0 } else { after }, None);
            Ok(Some((value, copied((id, job)))))
        });
        let (mut value, (id_of, job)) = news.await?;
        let changed = job.changed;
        let tell = move || {
            let begun = Instant::now();
            value["job"] = job::json::job(&id_of, &job);
            let reply: WatchReply = message(value)?;
            Ok((reply, begun.elapsed()))
        };
        let (reply, took) = aside(tell).await?;
        watching.together = TOGETHER.max(took * PART);
        let after = reply.next;
        Ok(Some((reply, (watching, id, after, Some(changed)))))
    })
}

pub(super) fn all(watching: Watching) -> impl Stream<Item = Result<WatchAllReply, Status>> + use<> {
    try_unfold((watching, None), |(mut watching, told)| async move {
        let first = told.is_none();
        let mut told: BTreeMap<JobId, Revision> = told.unwrap_or_default();
        let news = watching.news(|overview, caller| {
            let reply = changed(overview, caller, &mut told)?;
            let anything = first || !reply.jobs.is_empty() || !reply.gone.is_empty();
            Ok(anything.then_some(reply))
        });
        let reply = news.await?;
        watching.at_once = reply.more;
        Ok::<_, Status>(Some((reply, (watching, Some(told)))))
    })
}

/// What to tell a client that has this already; as much as goes into one message.
fn changed(
    overview: &Overview,
    caller: &Caller,
    told: &mut BTreeMap<JobId, Revision>,
) -> Result<WatchAllReply, Problem> {
    let visible = |id: &JobId| {
        let job = overview.jobs.get(id).filter(|job| job.round.is_some() && caller.sees(id))?;
        Some((job, job.changed))
    };
    let mut reply = WatchAllReply::default();
    told.retain(|id, _| {
        let there = visible(id).is_some();
        if !there {
            reply.gone.push(id.to_string());
        }
        there
    });
    let mut bytes = 0;
    for id in overview.jobs.keys() {
        let Some((job, changed)) = visible(id).filter(|(_, changed)| told.get(id) != Some(changed)) else { continue };
        let summary: JobSummary = message(job::json::summary(id, job))?;
        bytes += summary.encoded_len();
        if bytes > MESSAGE && !reply.jobs.is_empty() {
            reply.more = true;
            break;
        }
        told.insert(id.clone(), changed);
        reply.jobs.push(summary);
    }
    Ok(reply)
}
