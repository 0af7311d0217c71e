//! A client of etcd's v2 API, which only TorchElastic's protocol needs. It is no [`Store`](elastic_store::Store): v2
//! has no transactions over several keys, and keeps only 1,000 events of history.
//!
//! | module | what it is |
//! |---|---|
//! | `wire` | requests as HTTP, answers out of JSON |
//! | `link` | HTTP to one member at a time |
//!
//! The API is described in etcd 3.4's `Documentation/v2/api.md`. It is off by default from etcd 3.4 on
//! (`--enable-v2`), and gone from 3.6.

mod link;
mod wire;

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use self::link::Links;
use self::wire::HttpReply;
use elastic_store::etcd::EtcdConfig;
use elastic_store::etcd::fault::Repeat;
use elastic_store::{Result, StoreError};

/// What must be so for a write to happen; etcd checks it in the same step.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Only {
    /// Nothing.
    Always,
    /// The key is absent (`prevExist=false`).
    Absent,
    /// The key is there (`prevExist=true`).
    Present,
    /// The key has this value (`prevValue`).
    Value(String),
    /// The key was modified last at this index (`prevIndex`).
    Index(u64),
}

/// What is asked of etcd.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Request {
    /// Reads a key or a directory, as of now (`quorum=true`).
    Read {
        /// The key, with a leading `/`.
        key: String,
        /// A directory's whole tree.
        recursive: bool,
    },
    /// Writes a key. Without a time to live it stays; one that it had ends.
    Put {
        /// The key.
        key: String,
        /// Its value.
        value: String,
        /// Seconds until it vanishes.
        ttl: Option<u64>,
        /// The condition.
        only: Only,
    },
    /// Makes a directory.
    MakeDir {
        /// The key.
        key: String,
        /// Seconds until it vanishes with all that is in it.
        ttl: Option<u64>,
    },
    /// Starts a key's or directory's time to live again, without telling those who watch it.
    Refresh {
        /// The key.
        key: String,
        /// Whether it is a directory.
        dir: bool,
        /// Seconds from now.
        ttl: u64,
    },
    /// Deletes a key.
    Delete {
        /// The key.
        key: String,
        /// The condition.
        only: Only,
    },
}

impl Request {
    /// The key that it is about.
    pub fn key(&self) -> &str {
        match self {
            Request::Read { key, .. }
            | Request::Put { key, .. }
            | Request::MakeDir { key, .. }
            | Request::Refresh { key, .. }
            | Request::Delete { key, .. } => key,
        }
    }
}

/// A key or a directory.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Entry {
    /// The key, with a leading `/`.
    pub key: String,
    /// Its value; a directory has none.
    pub value: String,
    /// Whether it is a directory.
    pub dir: bool,
    /// What is in the directory, if the request asked for it.
    pub entries: Vec<Entry>,
    /// The index of its last change.
    pub modified: u64,
}

/// Why etcd did not do it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// There is no such key (error 100).
    #[error("there is no such key (100)")]
    Missing,
    /// The condition does not hold (101).
    #[error("the condition does not hold (101)")]
    Differs,
    /// The key exists (105).
    #[error("the key exists (105)")]
    Exists,
    /// Something else, by etcd's number and words: a directory where a key was meant, say.
    #[error("{1} ({0})")]
    Other(u32, String),
}

/// What etcd said to a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Answer {
    /// etcd's index as of the answer.
    pub index: u64,
    /// The present entry (for a deletion: the last one), or why nothing was done.
    pub outcome: Result<Entry, Refusal>,
}

/// What came out of waiting.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum News {
    /// The first change at or after the index.
    Change {
        /// It is gone: deleted or expired.
        gone: bool,
        /// What changed: with its new value, or where it was.
        entry: Entry,
    },
    /// etcd no longer knows what happened since that index (error 401): read again.
    Forgotten,
    /// Nothing so far: wait again from the same index.
    Nothing,
}

/// Longest that one long poll lasts: how long a dead connection goes unnoticed. etcd ends a poll after five minutes.
const POLL: Duration = Duration::from_secs(60);

/// The etcd that answered a probe.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Probe {
    /// The endpoints that were asked.
    pub endpoint: String,
    /// The etcd version it runs.
    pub version: String,
    /// What its v2 API holds at the top.
    pub keys: Vec<String>,
}

/// A client of one cluster. Cheap to clone; clones share connections.
#[derive(Clone)]
pub struct EtcdV2 {
    inner: Arc<Inner>,
}

struct Inner {
    links: Links,
    /// The cluster that answered first, and the highest index that it named in a linearizable answer.
    cluster: OnceLock<String>,
    newest: AtomicU64,
}

impl EtcdV2 {
    /// A client. Nothing is sent yet.
    pub fn connect(config: EtcdConfig) -> Result<EtcdV2> {
        let links = Links::new(config)?;
        Ok(EtcdV2 { inner: Arc::new(Inner { links, cluster: OnceLock::new(), newest: AtomicU64::new(0) }) })
    }

    /// All endpoints, for messages.
    pub fn endpoints(&self) -> String {
        self.inner.links.endpoints()
    }

    /// Checks that an etcd with the v2 API answers and accepts our credentials. [`StoreError::NotV2`] names the flag to
    /// use. It is a read of one member's own state: a quorum read is an entry in etcd's log, on which 3.6 panics.
    pub async fn probe(&self) -> Result<Probe> {
        let version = self.version().await?;
        let endpoint = self.endpoints();
        let reply = self.inner.links.call(Repeat::Safe, &wire::get("/v2/keys/", "")).await?;
        if reply.status == 404 && reply.json().is_err() {
            return Err(StoreError::NotV2 { endpoints: endpoint, cause: without_v2(&version) });
        }
        let root = self.judge(reply, false)?.outcome.unwrap_or_default();
        let keys = root.entries.into_iter().map(|entry| entry.key).collect();
        Ok(Probe { endpoint, version, keys })
    }

    /// The server's version.
    pub async fn version(&self) -> Result<String> {
        let reply = self.inner.links.call(Repeat::Safe, &wire::get("/version", "")).await?;
        let version = reply.json().ok().and_then(|json| Some(json.get("etcdserver")?.as_str()?.to_owned()));
        version.ok_or_else(|| StoreError::NotV2 {
            endpoints: self.endpoints(),
            cause: format!(
                "it is some HTTP server (status {}), not etcd; clients connect to etcd's port 2379 by default",
                reply.status
            ),
        })
    }

    /// Carries out a request.
    ///
    /// # Errors
    /// etcd does not answer, or is another one than before. What etcd refuses is an answer.
    pub async fn request(&self, request: Request) -> Result<Answer> {
        let repeat = match &request {
            // The outcome is the same, however often they are carried out.
            Request::Read { .. } | Request::Refresh { .. } => Repeat::Safe,
            _ => Repeat::Never,
        };
        let reply = self.inner.links.call(repeat, &wire::request(&request)).await?;
        self.judge(reply, true)
    }

    /// Waits for a change of `key`, or of anything in that directory, at or after `index`.
    ///
    /// # Errors
    /// As [`EtcdV2::request`], or a refused watch.
    pub async fn wait(&self, key: &str, index: u64) -> Result<News> {
        let query = format!("wait=true&recursive=true&waitIndex={index}");
        let reply = match self.inner.links.poll(&wire::get(&wire::path(key), &query), POLL).await? {
            Some(reply) if !reply.body.is_empty() => reply,
            _ => return Ok(News::Nothing),
        };
        if let Some(news) = reply.news() {
            return Ok(news);
        }
        match self.judge(reply, false)?.outcome {
            Err(refusal @ Refusal::Other(..)) => Err(StoreError::Unavailable {
                endpoints: self.endpoints(),
                cause: format!("a watch was refused: {refusal}"),
            }),
            _ => Ok(News::Nothing),
        }
    }

    fn judge(&self, reply: HttpReply, linearizable: bool) -> Result<Answer> {
        let endpoints = self.endpoints();
        if let Some(cluster) = &reply.cluster {
            let known = self.inner.cluster.get_or_init(|| cluster.clone());
            if known != cluster {
                let cause = format!("the etcd at {endpoints} is another cluster than before ({cluster}, not {known})");
                return Err(StoreError::Lost { cause });
            }
        }
        let answer = reply.answer(&endpoints)?;
        if linearizable {
            let newest = self.inner.newest.fetch_max(answer.index, Ordering::Relaxed);
            // Answers on different connections overtake each other. Only a large step back means another history.
            if answer.index + STEP_BACK < newest {
                let cause = format!(
                    "the etcd at {endpoints} went back from index {newest} to {}: it was emptied or restored",
                    answer.index
                );
                return Err(StoreError::Lost { cause });
            }
        }
        Ok(answer)
    }
}

/// Concurrent answers differ by the requests under way, which are few.
const STEP_BACK: u64 = 1_000;

fn without_v2(version: &str) -> String {
    let minor = version.split('.').nth(1).and_then(|minor| minor.parse::<u32>().ok()).unwrap_or(0);
    if version.starts_with("3.") && minor < 6 {
        format!(
            "it is etcd {version} with that API switched off; start it with --enable-v2, or use --rdzv-backend=etcd \
             without api=v2 on every node (torchrun has no such backend)"
        )
    } else {
        format!(
            "it is etcd {version}, which has none any more (3.5 was the last); use --rdzv-backend=etcd without api=v2 \
             on every node (torchrun has no such backend)"
        )
    }
}
