//! Where a job's records live in the store. The only place that builds or takes apart keys.

use super::{JobId, NodeId};
use crate::kv::Revision;

/// The keys of one job, under `<prefix>/v1/jobs/<job>/`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Keys {
    root: String,
}

/// What a key of a job holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum JobKey {
    /// [`Keys::spec`].
    Spec,
    /// [`Keys::desired`].
    Desired,
    /// [`Keys::leader`].
    Leader,
    /// [`Keys::round`].
    Round,
    /// [`Keys::checkpoint`].
    Checkpoint,
    /// [`Keys::progress`].
    Progress,
    /// [`Keys::node`].
    Node(NodeId),
    /// [`Keys::evicted`].
    Evicted(NodeId),
    /// [`Keys::rank`].
    Rank(u64, Revision, NodeId),
    /// [`Keys::event`].
    Event(u64),
    /// [`Keys::coming`].
    Coming(String),
}

impl Keys {
    /// Prefix unless configured otherwise.
    pub const DEFAULT_PREFIX: &str = "/elastic";

    /// The keys of `job` under `prefix` (a slash at its end makes no difference).
    pub fn new(prefix: &str, job: &JobId) -> Keys {
        Keys { root: format!("{}{job}/", Keys::jobs(prefix)) }
    }

    /// Prefix of all jobs.
    pub fn jobs(prefix: &str) -> String {
        format!("{}/v1/jobs/", prefix.trim_end_matches('/'))
    }

    /// Prefix of everything that belongs to the job.
    pub fn root(&self) -> &str {
        &self.root
    }

    /// What all must share.
    pub fn spec(&self) -> String {
        format!("{}spec", self.root)
    }

    /// What proves that a client may read the job's keys.
    pub fn secret(&self) -> String {
        format!("{}secret", self.root)
    }

    /// The operator's overrides.
    pub fn desired(&self) -> String {
        format!("{}desired", self.root)
    }

    /// Who decides; its mod revision is the term.
    pub fn leader(&self) -> String {
        format!("{}leader", self.root)
    }

    /// The current round.
    pub fn round(&self) -> String {
        format!("{}round", self.root)
    }

    /// Pointer to the latest committed checkpoint.
    pub fn checkpoint(&self) -> String {
        format!("{}checkpoint", self.root)
    }

    /// How far the workers have come.
    pub fn progress(&self) -> String {
        format!("{}progress", self.root)
    }

    /// Prefix of the nodes' own keys.
    pub fn nodes(&self) -> String {
        format!("{}nodes/", self.root)
    }

    /// One node's own key.
    pub fn node(&self, node: &NodeId) -> String {
        format!("{}nodes/{node}", self.root)
    }

    /// Prefix of the tombstones.
    pub fn evictions(&self) -> String {
        format!("{}evicted/", self.root)
    }

    /// One node's tombstone.
    pub fn evicted(&self, node: &NodeId) -> String {
        format!("{}evicted/{node}", self.root)
    }

    /// Prefix of all rounds' rank keys.
    pub fn rounds(&self) -> String {
        format!("{}rounds/", self.root)
    }

    /// Prefix of everything about round `number`'s ranks, of every plan.
    pub fn ranks_of_round(&self, number: u64) -> String {
        format!("{}rounds/{number}/", self.root)
    }

    /// Prefix of the rank keys of one plan.
    pub fn ranks(&self, number: u64, plan: Revision) -> String {
        format!("{}rounds/{number}/{plan}/", self.root)
    }

    /// One node's rank key under one plan.
    pub fn rank(&self, number: u64, plan: Revision, node: &NodeId) -> String {
        format!("{}rounds/{number}/{plan}/{node}", self.root)
    }

    /// Prefix of round `number`'s barriers.
    pub fn barriers(&self, number: u64) -> String {
        format!("{}barriers/{number}/", self.root)
    }

    /// Prefix of the arrivals at one barrier; nothing but arrivals lies under it, so it can be counted.
    pub fn arrivals(&self, number: u64, name: &str) -> String {
        format!("{}barriers/{number}/arrived/{name}/", self.root)
    }

    /// Written once all have arrived.
    pub fn release(&self, number: u64, name: &str) -> String {
        format!("{}barriers/{number}/released/{name}", self.root)
    }

    /// Prefix of the history.
    pub fn events(&self) -> String {
        format!("{}events/", self.root)
    }

    /// One event; numbers are padded so that key order is their order.
    pub fn event(&self, number: u64) -> String {
        format!("{}events/{number:012}", self.root)
    }

    /// Prefix of the claims of spare hosts that are on their way to the job.
    pub fn comings(&self) -> String {
        format!("{}coming/", self.root)
    }

    /// The claim of one spare host, by its name.
    pub fn coming(&self, spare: &str) -> String {
        format!("{}coming/{spare}", self.root)
    }

    /// Round, plan and node of a rank key.
    pub fn rank_of(&self, key: &str) -> Option<(u64, Revision, NodeId)> {
        let mut parts = key.strip_prefix(&self.rounds())?.splitn(3, '/');
        let number = parts.next()?.parse().ok()?;
        let plan = Revision(parts.next()?.parse().ok()?);
        Some((number, plan, NodeId::from_text(parts.next()?)))
    }

    /// The job that a key under [`Keys::jobs`] belongs to.
    pub fn job_of(prefix: &str, key: &str) -> Option<JobId> {
        key.strip_prefix(&Keys::jobs(prefix))?.split_once('/')?.0.parse().ok()
    }

    /// What a key of this job holds; `None` for one that is not ours, of a barrier, or the secret, which no one is to
    /// see.
    pub fn part(&self, key: &str) -> Option<JobKey> {
        match key.strip_prefix(&self.root)? {
            "spec" => Some(JobKey::Spec),
            "desired" => Some(JobKey::Desired),
            "leader" => Some(JobKey::Leader),
            "round" => Some(JobKey::Round),
            "checkpoint" => Some(JobKey::Checkpoint),
            "progress" => Some(JobKey::Progress),
            _ => Keys::node_of(&self.nodes(), key)
                .map(JobKey::Node)
                .or_else(|| Keys::node_of(&self.evictions(), key).map(JobKey::Evicted))
                .or_else(|| self.rank_of(key).map(|(number, plan, node)| JobKey::Rank(number, plan, node)))
                .or_else(|| key.strip_prefix(&self.events())?.parse().ok().map(JobKey::Event))
                .or_else(|| key.strip_prefix(&self.comings()).map(|spare| JobKey::Coming(spare.to_owned()))),
        }
    }

    /// The node that a key directly under `prefix` belongs to.
    pub fn node_of(prefix: &str, key: &str) -> Option<NodeId> {
        key.strip_prefix(prefix).filter(|rest| !rest.is_empty()).map(NodeId::from_text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_lie_where_the_protocol_says() {
        let keys = Keys::new("/elastic/", &"J".parse().unwrap());
        let node = NodeId::new("a", "1");
        assert_eq!(keys.node(&node), "/elastic/v1/jobs/J/nodes/a:1");
        assert_eq!(keys.rank(3, Revision(17), &node), "/elastic/v1/jobs/J/rounds/3/17/a:1");
        assert_eq!(keys.rank_of(&keys.rank(3, Revision(17), &node)), Some((3, Revision(17), node.clone())));
        assert_eq!(Keys::node_of(&keys.nodes(), &keys.node(&node)), Some(node));
        assert_eq!(Keys::node_of(&keys.nodes(), "/elastic/v1/jobs/J/round"), None);
    }

    #[test]
    fn keys_tell_their_job_and_what_they_hold() {
        let job: JobId = "J".parse().unwrap();
        let keys = Keys::new("/elastic", &job);
        let node = NodeId::new("a", "1");
        for (key, part) in [
            (keys.spec(), JobKey::Spec),
            (keys.leader(), JobKey::Leader),
            (keys.progress(), JobKey::Progress),
            (keys.node(&node), JobKey::Node(node.clone())),
            (keys.evicted(&node), JobKey::Evicted(node.clone())),
            (keys.rank(3, Revision(17), &node), JobKey::Rank(3, Revision(17), node.clone())),
            (keys.event(12), JobKey::Event(12)),
            (keys.coming("a"), JobKey::Coming("a".into())),
        ] {
            assert_eq!(Keys::job_of("/elastic/", &key), Some(job.clone()));
            assert_eq!(keys.part(&key), Some(part));
        }
        assert_eq!(keys.part(&keys.release(3, "b")), None);
        assert_eq!(keys.part(&keys.secret()), None);
        assert_eq!(Keys::job_of("/elastic", "/other/v1/jobs/J/spec"), None);
    }
}
