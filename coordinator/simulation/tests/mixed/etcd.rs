//! etcd's v2 key space as a model: indexes, conditions, times to live, a history of 1,000 events.

use std::collections::{BTreeMap, VecDeque};
use std::rc::Rc;
use std::time::Duration;

use elastic_torchelastic::etcd_v2::{Answer, Entry, News, Only, Refusal, Request};
use tokio::sync::Notify;
use tokio::time::Instant;

/// Events that etcd keeps.
const HISTORY: usize = 1_000;
/// How often etcd looks for what has expired.
pub(crate) const EXPIRY: Duration = Duration::from_millis(500);

#[derive(Clone)]
struct Node {
    value: String,
    dir: bool,
    modified: u64,
    expires: Option<Instant>,
}

struct Event {
    index: u64,
    key: String,
    gone: bool,
    value: String,
    dir: bool,
    /// Refreshes have an index, and etcd tells no watcher of them.
    silent: bool,
}

/// The server.
pub(crate) struct Etcd {
    index: u64,
    nodes: BTreeMap<String, Node>,
    history: VecDeque<Event>,
    /// The newest event whose successors are all known.
    forgotten: u64,
    away: bool,
    /// Not tokio's `watch`, which wakes in an order of chance.
    news: Rc<Notify>,
}

impl Etcd {
    pub(crate) fn new() -> Etcd {
        Etcd {
            index: 1,
            nodes: BTreeMap::new(),
            history: VecDeque::new(),
            forgotten: 0,
            away: false,
            news: Rc::default(),
        }
    }

    /// Whether this etcd answers no one.
    pub(crate) fn is_away(&self) -> bool {
        self.away
    }

    /// Begins or ends an outage. Long polls hear of it.
    pub(crate) fn set_away(&mut self, away: bool) {
        self.away = away;
        self.news.notify_waiters();
    }

    /// Tells of new events.
    pub(crate) fn news(&self) -> Rc<Notify> {
        Rc::clone(&self.news)
    }

    fn note(&mut self, key: &str, gone: bool, silent: bool) -> u64 {
        self.index += 1;
        let node = self.nodes.get(key);
        let event = Event {
            index: self.index,
            key: key.to_owned(),
            gone,
            value: node.map(|node| node.value.clone()).unwrap_or_default(),
            dir: node.is_some_and(|node| node.dir),
            silent,
        };
        self.history.push_back(event);
        if self.history.len() > HISTORY {
            self.forgotten = self.history.pop_front().map_or(0, |event| event.index);
        }
        self.news.notify_waiters();
        self.index
    }

    /// Forgets all events, as a busy cluster does soon.
    pub(crate) fn clear_history(&mut self) {
        // Writes of other clients to keys that no one here watches.
        self.index += HISTORY as u64;
        self.history.clear();
        self.forgotten = self.index;
    }

    /// Deletes what has expired.
    pub(crate) fn expire(&mut self, now: Instant) {
        if self.away {
            return;
        }
        let expired = |node: &Node| node.expires.is_some_and(|at| at <= now);
        let gone: Vec<String> =
            self.nodes.iter().filter(|(_, node)| expired(node)).map(|(key, _)| key.clone()).collect();
        gone.iter().for_each(|key| self.remove(key));
    }

    fn remove(&mut self, key: &str) {
        if self.nodes.remove(key).is_none() {
            return;
        }
        let below = format!("{key}/");
        self.nodes.retain(|other, _| !other.starts_with(&below));
        self.note(key, true, false);
    }

    fn entry(&self, key: &str, deep: bool) -> Entry {
        let node = &self.nodes[key];
        let mut entry = Entry {
            key: key.to_owned(),
            value: node.value.clone(),
            dir: node.dir,
            modified: node.modified,
            ..Entry::default()
        };
        if node.dir && deep {
            let below = format!("{key}/");
            let children = self.nodes.range(below.clone()..).take_while(|(other, _)| other.starts_with(&below));
            let children = children.filter(|(other, _)| !other[below.len()..].contains('/'));
            entry.entries = children.map(|(other, _)| self.entry(other, true)).collect();
        }
        entry
    }

    fn write(&mut self, key: &str, value: &str, dir: bool, ttl: Option<u64>, now: Instant) -> Entry {
        let parents: Vec<&str> = key.match_indices('/').skip(1).map(|(at, _)| &key[..at]).collect();
        for parent in parents {
            let index = self.index + 1;
            self.nodes.entry(parent.to_owned()).or_insert_with(|| Node {
                value: String::new(),
                dir: true,
                modified: index,
                expires: None,
            });
        }
        let expires = ttl.map(|ttl| now + Duration::from_secs(ttl));
        let node = Node { value: value.to_owned(), dir, modified: self.index + 1, expires };
        self.nodes.insert(key.to_owned(), node);
        self.note(key, false, false);
        self.entry(key, false)
    }

    fn permits(&self, key: &str, only: &Only) -> Result<(), Refusal> {
        match (only, self.nodes.get(key)) {
            (Only::Always, _) | (Only::Absent, None) | (Only::Present, Some(_)) => Ok(()),
            (Only::Absent, Some(_)) => Err(Refusal::Exists),
            (_, None) => Err(Refusal::Missing),
            (Only::Value(value), Some(node)) if node.value == *value => Ok(()),
            (Only::Index(index), Some(node)) if node.modified == *index => Ok(()),
            (Only::Value(_) | Only::Index(_), Some(_)) => Err(Refusal::Differs),
        }
    }

    /// Carries out a request.
    pub(crate) fn request(&mut self, request: &Request, now: Instant) -> Answer {
        let outcome = self.carry_out(request, now);
        Answer { index: self.index, outcome }
    }

    fn carry_out(&mut self, request: &Request, now: Instant) -> Result<Entry, Refusal> {
        match request {
            Request::Read { key, .. } => {
                if self.nodes.contains_key(key) {
                    Ok(self.entry(key, true))
                } else {
                    Err(Refusal::Missing)
                }
            }
            Request::Put { key, value, ttl, only } => {
                self.permits(key, only)?;
                Ok(self.write(key, value, false, *ttl, now))
            }
            Request::MakeDir { key, ttl } => {
                self.permits(key, &Only::Absent)?;
                Ok(self.write(key, "", true, *ttl, now))
            }
            Request::Refresh { key, ttl, .. } => {
                let index = self.index + 1;
                let node = self.nodes.get_mut(key).ok_or(Refusal::Missing)?;
                node.expires = Some(now + Duration::from_secs(*ttl));
                node.modified = index;
                self.note(key, false, true);
                Ok(self.entry(key, false))
            }
            Request::Delete { key, only } => {
                self.permits(key, only)?;
                if !self.nodes.contains_key(key) {
                    return Err(Refusal::Missing);
                }
                self.remove(key);
                Ok(Entry { key: key.clone(), modified: self.index, ..Entry::default() })
            }
        }
    }

    /// The first change of the key, or below it, at or after that index.
    pub(crate) fn change(&self, key: &str, index: u64) -> Option<News> {
        if index <= self.forgotten {
            return Some(News::Forgotten);
        }
        let below = |directory: &str, key: &str| key.strip_prefix(directory).is_some_and(|rest| rest.starts_with('/'));
        let event = self.history.iter().find(|event| {
            let concerns = event.key == key || below(key, &event.key) || event.gone && below(&event.key, key);
            event.index >= index && !event.silent && concerns
        })?;
        let entry = Entry {
            key: event.key.clone(),
            value: event.value.clone(),
            dir: event.dir,
            modified: event.index,
            ..Entry::default()
        };
        Some(News::Change { gone: event.gone, entry })
    }

    /// A key's value, for those who check.
    pub(crate) fn value(&self, key: &str) -> Option<&str> {
        self.nodes.get(key).map(|node| node.value.as_str())
    }
}
