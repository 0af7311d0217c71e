//! All keys under a prefix, read once and then watched. What the records mean is up to the reader.

use super::{News, Result, Scope, Store, StoreError, WatchUpdate, Watcher};

/// A prefix that is read once and then watched from the next revision. [`News::All`] comes first, and again after the
/// history that was still to come has been compacted away. Dropping the mirror ends the watch.
#[derive(Debug)]
pub struct Mirror {
    /// What was read at the start, until [`Mirror::next`] delivers it.
    first: Option<News>,
    watcher: Watcher,
}

impl Mirror {
    /// Reads everything under the prefix, and watches it.
    pub async fn open(store: &dyn Store, prefix: &str) -> Result<Mirror> {
        let (values, revision) = store.range(prefix).await?;
        let watcher = store.watch(Scope::Prefix(prefix.to_owned()), revision.next()).await?;
        Ok(Mirror { first: Some(News::All { revision, values }), watcher })
    }

    /// Waits for what comes next. The wait may be cancelled: nothing is lost. An error: the watch is broken for good,
    /// and nothing follows.
    pub async fn next(&mut self) -> Result<News> {
        if let Some(first) = self.first.take() {
            return Ok(first);
        }
        let ended = || StoreError::Invalid("the watch has ended".into());
        news(self.watcher.recv().await.ok_or_else(ended)?)
    }

    /// What has come already; `None` if nothing has.
    pub fn try_next(&mut self) -> Result<Option<News>> {
        match self.first.take() {
            Some(first) => Ok(Some(first)),
            None => self.watcher.try_recv().ok().map(news).transpose(),
        }
    }
}

fn news(update: WatchUpdate) -> Result<News> {
    match update {
        WatchUpdate::Events(events) => Ok(News::Changes(events)),
        WatchUpdate::Snapshot { revision, values } => Ok(News::All { revision, values }),
        WatchUpdate::Broken(error) => Err(error),
    }
}
