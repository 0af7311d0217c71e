//! What a node knows of the rendezvous: read once, then kept up by the events of one watch.

#![deny(clippy::disallowed_methods, clippy::disallowed_types)]

use std::collections::BTreeMap;

use super::keys::{Paths, kv_file, kv_key, kv_text, rank_file};
use super::state::RendezvousState;
use crate::etcd_v2::{Entry, News};

/// The state, and as which string it is there.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Active {
    pub(super) raw: String,
    pub(super) state: RendezvousState,
}

/// The files of a version's directory, by their names in it.
#[derive(Debug, Clone, Default)]
pub(super) struct Files {
    version: String,
    as_of: u64,
    entries: BTreeMap<String, String>,
}

impl Files {
    /// Whether the member of this rank has given a sign of life that has not lapsed.
    pub(super) fn has_rank(&self, rank: u32) -> bool {
        self.entries.contains_key(&rank_file(rank))
    }

    pub(super) fn kv(&self, key: &str) -> Option<String> {
        self.entries.get(&kv_file(key)).and_then(|value| kv_text(value))
    }

    /// The same, as written there.
    pub(super) fn kv_raw(&self, key: &str) -> Option<&String> {
        self.entries.get(&kv_file(key))
    }

    pub(super) fn kv_keys(&self) -> impl Iterator<Item = String> {
        self.entries.keys().filter_map(|file| kv_key(file))
    }
}

/// What is known. Each part is either unknown or as of an index of etcd's, and moves on with the watch's events.
#[derive(Debug, Clone)]
pub(super) struct VersionView {
    paths: Paths,
    /// None: to be read. Within: the state, if there is one, as of an index.
    active: Option<(u64, Option<Active>)>,
    files: Option<Files>,
    /// What the watch has to tell next.
    next: Option<u64>,
}

impl VersionView {
    pub(super) fn new(paths: Paths) -> VersionView {
        VersionView { paths, active: None, files: None, next: None }
    }

    pub(super) fn forget(&mut self) {
        self.active = None;
        self.files = None;
    }

    pub(super) fn forget_active(&mut self) {
        self.active = None;
    }

    /// The state, if it is known, and if there is one.
    pub(super) fn active(&self) -> Option<Option<&Active>> {
        self.active.as_ref().map(|(_, active)| active.as_ref())
    }

    /// The files of a version, if they are known.
    pub(super) fn files(&self, version: &str) -> Option<&Files> {
        self.files.as_ref().filter(|files| files.version == version)
    }

    /// Where the watch continues; none before anything was read.
    pub(super) fn next(&self) -> Option<u64> {
        self.next
    }

    /// The state was read, or written by this node. An error says for people why it is no state.
    pub(super) fn set_active(&mut self, index: u64, value: Option<String>) -> Result<(), String> {
        if self.active.as_ref().is_some_and(|(as_of, _)| *as_of > index) || self.active.is_none() && self.is_old(index)
        {
            return Ok(());
        }
        let active = value.map(|raw| RendezvousState::parse(&raw).map(|state| Active { raw, state })).transpose()?;
        self.active = Some((index, active));
        self.next.get_or_insert(index + 1);
        Ok(())
    }

    pub(super) fn set_files(&mut self, version: &str, index: u64, directory: Option<&Entry>) {
        if self.is_old(index) {
            return;
        }
        let root = self.paths.version(version);
        let mut entries = BTreeMap::new();
        let mut left: Vec<&Entry> = directory.into_iter().collect();
        while let Some(entry) = left.pop() {
            left.extend(&entry.entries);
            if let Some(file) = within(&root, &entry.key).filter(|_| !entry.dir) {
                entries.insert(file.to_owned(), entry.value.clone());
            }
        }
        self.files = Some(Files { version: version.to_owned(), as_of: index, entries });
    }

    /// Whether the watch is ahead of an answer: changes that the answer lacks were passed over.
    fn is_old(&self, index: u64) -> bool {
        self.next.is_some_and(|next| next > index + 1)
    }

    /// A file of a version was written by this node, or found gone.
    pub(super) fn set_file(&mut self, version: &str, file: &str, value: Option<&str>) {
        let Some(files) = self.files.as_mut().filter(|files| files.version == version) else { return };
        match value {
            Some(value) => files.entries.insert(file.to_owned(), value.to_owned()),
            None => files.entries.remove(file),
        };
    }

    pub(super) fn told(&mut self, news: News) -> Result<(), String> {
        let (gone, entry) = match news {
            News::Nothing => return Ok(()),
            News::Forgotten => {
                self.next = None;
                self.forget();
                return Ok(());
            }
            News::Change { gone, entry } => (gone, entry),
        };
        self.next = self.next.max(Some(entry.modified + 1));
        let active = self.paths.active();
        if entry.key == active || gone && within(&entry.key, &active).is_some() {
            let known = self.active.as_ref().is_some_and(|(as_of, _)| entry.modified > *as_of);
            if known {
                self.set_active(entry.modified, (!gone).then(|| entry.value.clone()))?;
            }
        }
        let Some(files) = self.files.as_mut().filter(|files| entry.modified > files.as_of) else { return Ok(()) };
        let root = self.paths.version(&files.version);
        match within(&root, &entry.key) {
            Some(file) if gone => {
                files.entries.retain(|name, _| name != file && within(file, name).is_none());
            }
            Some(file) if !entry.dir => {
                files.entries.insert(file.to_owned(), entry.value);
            }
            Some(_) => {}
            None if gone && (entry.key == root || within(&entry.key, &root).is_some()) => files.entries.clear(),
            None => {}
        }
        Ok(())
    }
}

/// The part of a key below a directory.
fn within<'a>(directory: &str, key: &'a str) -> Option<&'a str> {
    key.strip_prefix(directory)?.strip_prefix('/')
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(key: &str, value: &str, modified: u64) -> Entry {
        Entry { key: key.into(), value: value.into(), modified, ..Entry::default() }
    }

    fn change(gone: bool, key: &str, value: &str, modified: u64) -> News {
        News::Change { gone, entry: entry(key, value, modified) }
    }

    fn joinable() -> String {
        RendezvousState::joinable("1").text()
    }

    fn view() -> VersionView {
        let mut view = VersionView::new(Paths::new("/p", "J"));
        view.set_active(10, Some(joinable())).unwrap();
        let directory = Entry {
            key: "/p/run_J/rdzv/v_1".into(),
            dir: true,
            entries: vec![
                entry("/p/run_J/rdzv/v_1/rank_0", "", 9),
                Entry {
                    key: "/p/run_J/rdzv/v_1/kv".into(),
                    dir: true,
                    entries: vec![entry("/p/run_J/rdzv/v_1/kv/TUFTVEVSX0FERFI=", "MTAuMC4wLjE=", 9)],
                    ..Entry::default()
                },
            ],
            ..Entry::default()
        };
        view.set_files("1", 12, Some(&directory));
        view
    }

    #[test]
    fn an_answer_that_the_watch_has_overtaken_is_asked_for_again() {
        let mut view = view();
        view.forget();
        view.told(change(false, "/p/run_J/rdzv/v_1/rank_1", "", 20)).unwrap();
        view.set_active(19, Some(joinable())).unwrap();
        view.set_files("1", 19, None);
        assert!(view.active().is_none() && view.files("1").is_none());
        view.set_active(20, Some(joinable())).unwrap();
        assert!(view.active().is_some());
    }

    #[test]
    fn what_is_read_is_there() {
        let view = view();
        assert_eq!(view.active().unwrap().unwrap().state, RendezvousState::joinable("1"));
        let files = view.files("1").unwrap();
        assert!(files.has_rank(0) && !files.has_rank(1));
        assert_eq!(files.kv("MASTER_ADDR").as_deref(), Some("10.0.0.1"));
        assert!(view.files("2").is_none());
        assert_eq!(view.next(), Some(11));
    }

    #[test]
    fn events_move_it_on_and_older_ones_do_not() {
        let mut view = view();
        // Older than the directory's reading
        view.told(change(true, "/p/run_J/rdzv/v_1/rank_0", "", 11)).unwrap();
        assert!(view.files("1").unwrap().has_rank(0));
        view.told(change(false, "/p/run_J/rdzv/v_1/rank_1", "", 13)).unwrap();
        view.told(change(true, "/p/run_J/rdzv/v_1/rank_0", "", 14)).unwrap();
        assert!(view.files("1").unwrap().has_rank(1) && !view.files("1").unwrap().has_rank(0));
        view.told(change(false, "/p/run_J/rdzv/active_version", r#"{"status":"setup"}"#, 15)).unwrap();
        assert_eq!(view.active().unwrap().unwrap().raw, r#"{"status":"setup"}"#);
        view.told(change(true, "/p/run_J/rdzv/active_version", "", 16)).unwrap();
        assert_eq!(view.active(), Some(None));
        assert_eq!(view.next(), Some(17));
        assert!(view.told(change(false, "/p/run_J/rdzv/active_version", "odd", 18)).is_err());
    }

    #[test]
    fn all_is_gone_with_the_jobs_directory() {
        let mut view = view();
        view.told(change(true, "/p/run_J", "", 20)).unwrap();
        assert_eq!(view.active(), Some(None));
        assert!(!view.files("1").unwrap().has_rank(0) && view.files("1").unwrap().kv("MASTER_ADDR").is_none());
    }

    #[test]
    fn what_was_forgotten_is_read_again() {
        let mut view = view();
        view.told(News::Forgotten).unwrap();
        assert!(view.active().is_none() && view.files("1").is_none() && view.next().is_none());
        view.set_active(2000, None).unwrap();
        assert_eq!((view.active(), view.next()), (Some(None), Some(2001)));
    }
}
