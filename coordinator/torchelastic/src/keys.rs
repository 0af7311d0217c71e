//! Where TorchElastic keeps a job's rendezvous in etcd's v2 key space. The only place that builds or takes apart those
//! keys.

#![deny(clippy::disallowed_methods, clippy::disallowed_types)]

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;

/// The prefix that torchrun uses unless `etcd_prefix` says otherwise.
pub const DEFAULT_PREFIX: &str = "/torchelastic/p2p";

/// The keys of one job, under `<prefix>/run_<id>`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Paths {
    prefix: String,
    run: String,
    dynamic: String,
}

impl Paths {
    /// The keys of the job `run_id` under `prefix` (a slash at its end makes no difference). As in torchrun, nothing in
    /// the id is escaped.
    pub fn new(prefix: &str, run_id: &str) -> Paths {
        let prefix = format!("/{}", prefix.trim_matches('/'));
        let run = format!("{}/run_{run_id}", prefix.trim_end_matches('/'));
        Paths { prefix, run, dynamic: format!("/torch/elastic/rendezvous/{run_id}") }
    }

    /// The directory of all jobs; none if that is the root.
    pub fn prefix(&self) -> Option<&str> {
        (self.prefix != "/").then_some(&self.prefix)
    }

    /// The job's directory. It has a time to live, and all that is the job's ends with it.
    pub fn run(&self) -> &str {
        &self.run
    }

    /// The directory of the rendezvous.
    pub fn rendezvous(&self) -> String {
        format!("{}/rdzv", self.run)
    }

    /// The number of the newest version.
    pub fn counter(&self) -> String {
        format!("{}/rdzv/version_counter", self.run)
    }

    /// The state.
    pub fn active(&self) -> String {
        format!("{}/rdzv/active_version", self.run)
    }

    /// What belongs to one version.
    pub fn version(&self, version: &str) -> String {
        format!("{}/rdzv/v_{version}", self.run)
    }

    /// A member's sign of life.
    pub fn rank(&self, version: &str, rank: u32) -> String {
        format!("{}/{}", self.version(version), rank_file(rank))
    }

    /// The arrivals at a barrier of a version. torchrun looks at nothing there.
    pub fn barrier(&self, version: u64, name: &str) -> String {
        format!("{}/barriers/v_{version}/at_{name}", self.run)
    }

    /// A member's arrival there.
    pub fn arrival(&self, version: u64, name: &str, rank: u32) -> String {
        format!("{}/{}", self.barrier(version, name), rank_file(rank))
    }

    /// Where torchrun's *dynamic* rendezvous, which it calls `etcd-v2`, keeps the pickled state of a job of this id.
    pub fn dynamic(&self) -> &str {
        &self.dynamic
    }
}

/// A member's sign of life, within its version's directory.
pub(super) fn rank_file(rank: u32) -> String {
    format!("rank_{rank}")
}

/// An entry of the version's key-value store, within its directory.
pub(super) fn kv_file(key: &str) -> String {
    format!("kv/{}", STANDARD.encode(key))
}

/// The key of an entry in the key-value store; none for what is no such entry.
pub(super) fn kv_key(file: &str) -> Option<String> {
    String::from_utf8(STANDARD.decode(file.strip_prefix("kv/")?).ok()?).ok()
}

/// A value as the key-value store holds it.
pub(super) fn kv_value(value: &str) -> String {
    STANDARD.encode(value)
}

/// What a value of the key-value store says.
pub(super) fn kv_text(value: &str) -> Option<String> {
    String::from_utf8(STANDARD.decode(value).ok()?).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_torchruns() {
        let paths = Paths::new(DEFAULT_PREFIX, "J");
        assert_eq!(paths.prefix(), Some("/torchelastic/p2p"));
        assert_eq!(paths.active(), "/torchelastic/p2p/run_J/rdzv/active_version");
        assert_eq!(paths.rank("7", 1), "/torchelastic/p2p/run_J/rdzv/v_7/rank_1");
        // Nothing may begin with an underscore, which hides it, or be a dot.
        assert_eq!(paths.arrival(7, "..", 1), "/torchelastic/p2p/run_J/barriers/v_7/at_../rank_1");
        assert_eq!(paths.dynamic(), "/torch/elastic/rendezvous/J");
        assert_eq!(Paths::new("/", "J").prefix(), None);
        assert_eq!(Paths::new("own/", "J").run(), "/own/run_J");
        assert_eq!(kv_file("MASTER_ADDR"), "kv/TUFTVEVSX0FERFI=");
        assert_eq!(kv_key("kv/TUFTVEVSX0FERFI=").as_deref(), Some("MASTER_ADDR"));
        assert_eq!(kv_text(&kv_value("29500")).as_deref(), Some("29500"));
    }
}
