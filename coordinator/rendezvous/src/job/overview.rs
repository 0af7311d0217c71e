//! Every job under a prefix, as the store tells it: one read, then events. It is only read: nothing is decided by it,
//! and it is never written back.

use std::collections::{BTreeMap, BTreeSet};

use serde::de::DeserializeOwned;

use super::{
    Checkpoint, Desired, EventRecord, JobId, JobKey, JobProtocol, Keys, LeaderRecord, NodeId, NodeRecord, Phase,
    ProgressRecord, RankRecord, Release, RoundRecord, Spec, Tombstone, Versioned,
};
use crate::kv::{Event, KeyValue, News, Revision};

/// The jobs under one prefix.
#[derive(Debug, Clone)]
pub struct Overview {
    prefix: String,
    /// By id.
    pub jobs: BTreeMap<JobId, Job>,
    /// Records that could not be read, each as a message for the log. The reader takes them out.
    pub problems: Vec<String>,
}

/// One job's records.
#[derive(Debug, Clone, PartialEq)]
pub struct Job {
    /// Where they live.
    pub keys: Keys,
    /// The protocol that it speaks, and who began it: also where the rest of `spec` cannot be read.
    pub protocol: Option<JobProtocol>,
    /// What all agreed on.
    pub spec: Option<Spec>,
    /// The operator's overrides.
    pub desired: Option<Versioned<Desired>>,
    /// Who decides.
    pub leader: Option<Versioned<LeaderRecord>>,
    /// The mod revision of a `leader` record that no one holds, for its successor; [`Revision::NONE`]: there is
    /// none.
    pub vacant: Revision,
    /// The current round.
    pub round: Option<Versioned<RoundRecord>>,
    /// The latest committed checkpoint.
    pub checkpoint: Option<Versioned<Checkpoint>>,
    /// How far its workers have come, where they report it.
    pub progress: Option<ProgressRecord>,
    /// Nodes that are here.
    pub nodes: BTreeMap<NodeId, Versioned<NodeRecord>>,
    /// Places of the rounds that still have keys, by round and plan.
    pub ranks: BTreeMap<(u64, Revision, NodeId), RankRecord>,
    /// Nodes that were evicted in this generation.
    pub evicted: BTreeMap<NodeId, Tombstone>,
    /// The history that is kept.
    pub events: BTreeMap<u64, EventRecord>,
    /// Spare hosts that are on their way, by name, and since when.
    pub coming: BTreeMap<String, Revision>,
    /// Of the newest change of any of this, or later: another one means that there may be something new.
    pub changed: Revision,
}

/// What an event did to a job, for those who count.
#[derive(Debug, Clone, PartialEq)]
pub enum Change {
    /// Someone began to lead.
    Term(Versioned<LeaderRecord>),
    /// No one leads any more.
    Leaderless,
    /// The round was written.
    Round(Box<RoundRecord>),
    /// A node was evicted.
    Evicted(NodeId, Tombstone),
    /// A line of history.
    Event(Box<EventRecord>),
}

impl Overview {
    /// No job yet.
    pub fn new(prefix: &str) -> Overview {
        Overview { prefix: prefix.to_owned(), jobs: BTreeMap::new(), problems: Vec::new() }
    }

    /// All jobs, out of everything under [`Keys::jobs`]. A record that cannot be read is left out: see
    /// [`Overview::problems`].
    pub fn of(prefix: &str, values: &[KeyValue]) -> Overview {
        let mut overview = Overview::new(prefix);
        for kv in values {
            overview.put(kv);
        }
        overview
    }

    /// The same, where others were shown what was known before: as of this revision all jobs may have changed.
    pub fn again(prefix: &str, values: &[KeyValue], revision: Revision) -> Overview {
        let mut overview = Overview::of(prefix, values);
        overview.jobs.values_mut().for_each(|job| job.changed = revision);
        overview
    }

    /// Takes in what a mirror of all jobs, or of one, delivers.
    pub fn take(&mut self, news: News) {
        match news {
            News::All { values, .. } => *self = Overview::of(&self.prefix, &values),
            News::Changes(events) => events.iter().for_each(|event| drop(self.apply(event))),
        }
    }

    /// Takes in an event: the job it is about, and what it changed of interest.
    pub fn apply(&mut self, event: &Event) -> Option<(JobId, Option<Change>)> {
        match event {
            Event::Put(kv) => self.put(kv),
            Event::Delete { key, revision } => self.delete(key, *revision),
        }
    }

    fn put(&mut self, kv: &KeyValue) -> Option<(JobId, Option<Change>)> {
        let id = Keys::job_of(&self.prefix, &kv.key)?;
        let keys = Keys::new(&self.prefix, &id);
        let part = keys.part(&kv.key)?;
        let job = self.jobs.entry(id.clone()).or_insert_with(|| Job::new(keys));
        job.changed = job.changed.max(kv.mod_revision);
        match job.set(part, Some(kv)) {
            Ok(change) => Some((id, change)),
            Err(problem) => {
                self.problems.push(problem);
                None
            }
        }
    }

    fn delete(&mut self, key: &str, revision: Revision) -> Option<(JobId, Option<Change>)> {
        let id = Keys::job_of(&self.prefix, key)?;
        let job = self.jobs.get_mut(&id)?;
        let part = job.keys.part(key)?;
        job.changed = job.changed.max(revision);
        // Only a record can be unreadable.
        let change = job.set(part, None).unwrap_or_default();
        if job.is_nothing() {
            self.jobs.remove(&id);
        }
        Some((id, change))
    }
}

/// The record of a key; `None` where the key is gone.
fn read<T: DeserializeOwned>(kv: Option<&KeyValue>) -> Result<Option<Versioned<T>>, String> {
    kv.map(Versioned::parse).transpose()
}

/// Sets an entry, or removes it.
fn enter<K: Ord, V>(map: &mut BTreeMap<K, V>, key: K, value: Option<V>) {
    match value {
        Some(value) => drop(map.insert(key, value)),
        None => drop(map.remove(&key)),
    }
}

impl Job {
    fn new(keys: Keys) -> Job {
        Job {
            keys,
            protocol: None,
            spec: None,
            desired: None,
            leader: None,
            vacant: Revision::NONE,
            round: None,
            checkpoint: None,
            progress: None,
            nodes: BTreeMap::new(),
            ranks: BTreeMap::new(),
            evicted: BTreeMap::new(),
            events: BTreeMap::new(),
            coming: BTreeMap::new(),
            changed: Revision::NONE,
        }
    }

    /// Takes in what a key holds now; `None` where it is gone.
    fn set(&mut self, part: JobKey, kv: Option<&KeyValue>) -> Result<Option<Change>, String> {
        match part {
            JobKey::Spec => {
                self.protocol = kv.and_then(JobProtocol::of);
                self.spec = None;
                self.spec = read(kv)?.map(|spec| spec.value);
            }
            JobKey::Desired => self.desired = read(kv)?,
            JobKey::Checkpoint => self.checkpoint = read(kv)?,
            JobKey::Progress => self.progress = read(kv)?.map(|progress| progress.value),
            JobKey::Leader => {
                self.leader = None;
                self.vacant = kv.map_or(Revision::NONE, |kv| kv.mod_revision);
                self.leader = kv.map(LeaderRecord::held).transpose()?;
                self.vacant = Revision::NONE;
                return Ok(Some(self.leader.clone().map_or(Change::Leaderless, Change::Term)));
            }
            JobKey::Round => {
                self.round = read(kv)?;
                return Ok(self.round.as_ref().map(|round| Change::Round(Box::new(round.value.clone()))));
            }
            JobKey::Node(node) => enter(&mut self.nodes, node, read(kv)?),
            JobKey::Rank(number, plan, node) => {
                enter(&mut self.ranks, (number, plan, node), read(kv)?.map(|rank| rank.value));
            }
            JobKey::Evicted(node) => {
                let stone: Option<Tombstone> = read(kv)?.map(|stone| stone.value);
                enter(&mut self.evicted, node.clone(), stone.clone());
                return Ok(stone.map(|stone| Change::Evicted(node, stone)));
            }
            JobKey::Coming(spare) => enter(&mut self.coming, spare, kv.map(|kv| kv.create_revision)),
            JobKey::Event(number) => {
                let event: Option<EventRecord> = read(kv)?.map(|event| event.value);
                enter(&mut self.events, number, event.clone());
                return Ok(event.map(|event| Change::Event(Box::new(event))));
            }
        }
        Ok(None)
    }

    fn is_nothing(&self) -> bool {
        *self == Job { vacant: self.vacant, changed: self.changed, ..Job::new(self.keys.clone()) }
    }

    /// A node's place in the round that was sealed last.
    pub fn rank(&self, node: &NodeId) -> Option<&RankRecord> {
        let sealed = self.round.as_ref()?.value.sealed?;
        self.ranks.get(&(sealed.number, sealed.plan, node.clone()))
    }

    /// Why this build leaves the job alone: it does not speak the job's protocol.
    pub fn refusal(&self) -> Option<String> {
        self.protocol.as_ref()?.refuses(&Release::ours())
    }

    /// Why the job's agents cannot be spoken with by a program that has TLS for that, or has not.
    pub fn unlike(&self, tls: bool) -> Option<String> {
        let theirs = self.spec.as_ref()?.peer_tls;
        let flags = "--peer-cert, --peer-key and --peer-ca";
        match (theirs, tls) {
            (true, false) => Some(format!("its agents speak TLS with each other: give this program {flags} too")),
            (false, true) => Some(format!("its agents do not speak TLS with each other: start them with {flags} too")),
            _ => None,
        }
    }

    /// Whether there is anything left for us to lead: we speak the job's protocol and can read what it agreed on, and it
    /// has not ended, or has nodes still to be tidied away.
    pub fn is_live(&self) -> bool {
        let ours = self.spec.is_some() && self.refusal().is_none();
        let Some(round) = self.round.as_ref().filter(|_| ours) else { return false };
        !round.value.state.is_final() || !self.nodes.is_empty()
    }

    /// The releases of the programs that are here, the leader's too, without repetition; `None` is for programs whose
    /// records name none.
    pub fn releases(&self) -> BTreeSet<Option<&str>> {
        let nodes = self.nodes.values().map(|node| node.value.release.as_ref());
        let leader = self.leader.iter().map(|leader| leader.value.release.as_ref());
        nodes.chain(leader).map(|release| release.map(|release| release.version.as_str())).collect()
    }

    /// When the job ended, in milliseconds since the Unix epoch on the clock of the leader of that time; `None` while
    /// it has not ended, or where no history tells. What an operator asked afterwards does not count.
    pub fn ended_ms(&self) -> Option<u64> {
        self.round.as_ref().filter(|round| round.value.state.is_final())?;
        self.events.values().rev().find(|event| event.asked_by.is_none()).map(|event| event.at_ms)
    }

    /// Nodes that wait without a place. One that was given its first place says so until its workers run.
    pub fn spares(&self) -> impl Iterator<Item = &NodeRecord> {
        let spare = |node: &NodeId, record: &NodeRecord| {
            record.phase == Phase::Waiting && record.round.is_none() && self.rank(node).is_none()
        };
        self.nodes.iter().filter(move |(id, node)| spare(id, &node.value)).map(|(_, node)| &node.value)
    }

    /// Fewest and most nodes, as the operator or else the job says.
    pub fn range(&self) -> Option<(u32, u32)> {
        let spec = self.spec.as_ref()?;
        let desired = self.desired.as_ref().map(|desired| &desired.value);
        let min = desired.and_then(|desired| desired.min_nodes).unwrap_or(spec.min_nodes);
        let max = desired.and_then(|desired| desired.max_nodes).unwrap_or(spec.max_nodes);
        Some((min, max.max(min)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kv::LeaseId;

    fn kv(key: &str, value: &str) -> KeyValue {
        KeyValue {
            key: key.to_owned(),
            value: value.as_bytes().to_vec(),
            create_revision: Revision(5),
            mod_revision: Revision(7),
            lease: Some(LeaseId(1)),
        }
    }

    const LEADER: &str = r#"{"node":"a:1","peer":{"host":"h","port":1}}"#;

    #[test]
    fn jobs_come_and_go_with_their_keys() {
        let mut overview = Overview::of("/elastic", &[kv("/elastic/v1/jobs/J/leader", LEADER)]);
        let job: JobId = "J".parse().unwrap();
        assert_eq!(overview.jobs[&job].leader.as_ref().unwrap().modified, Revision(7));
        assert!(!overview.jobs[&job].leader.as_ref().unwrap().value.coordinator);
        let gone = Event::Delete { key: "/elastic/v1/jobs/J/leader".into(), revision: Revision(8) };
        assert_eq!(overview.apply(&gone), Some((job, Some(Change::Leaderless))));
        assert!(overview.jobs.is_empty());
    }

    #[test]
    fn a_job_says_when_it_changed() {
        let (job, round) = ("J".parse().unwrap(), r#"{"number":1,"generation":1,"state":"running","reason":"r"}"#);
        let at = |revision, key, value| KeyValue { mod_revision: Revision(revision), ..kv(key, value) };
        let (round, leader) = (at(9, "/elastic/v1/jobs/J/round", round), at(7, "/elastic/v1/jobs/J/leader", LEADER));
        let mut overview = Overview::of("/elastic", &[round.clone(), leader]);
        assert_eq!(overview.jobs[&job].changed, Revision(9));
        overview.apply(&Event::Delete { key: "/elastic/v1/jobs/J/leader".into(), revision: Revision(11) });
        assert_eq!(overview.jobs[&job].changed, Revision(11));
        overview.apply(&Event::Put(at(12, "/elastic/v1/jobs/J/round", "{")));
        assert_eq!(overview.jobs[&job].changed, Revision(12));
        // What was deleted meanwhile left no trace.
        assert_eq!(Overview::again("/elastic", &[round], Revision(20)).jobs[&job].changed, Revision(20));
    }

    #[test]
    fn what_is_asked_of_a_job_that_has_ended_does_not_move_its_end() {
        let round = r#"{"number":1,"generation":1,"state":"failed","reason":"r"}"#;
        let line = |at: u64, more: &str| format!(r#"{{"at_ms":{at},"round":1,"state":"failed","reason":"r"{more}}}"#);
        let asked = line(90, r#","asked_by":{"name":"anna","via":"api"}"#);
        let values = [
            kv("/elastic/v1/jobs/J/round", round),
            kv("/elastic/v1/jobs/J/events/000000000004", &line(40, "")),
            kv("/elastic/v1/jobs/J/events/000000000005", &asked),
        ];
        let overview = Overview::of("/elastic", &values);
        let job = overview.jobs.values().next().unwrap();
        assert_eq!((job.events.len(), job.ended_ms()), (2, Some(40)));
    }

    #[test]
    fn foreign_records_are_left_out() {
        let values = [kv("/elastic/v1/jobs/J/leader", "{"), kv("/elastic/other", "x")];
        let overview = Overview::of("/elastic", &values);
        assert!(overview.jobs.values().all(|job| job.leader.is_none()));
    }
}
