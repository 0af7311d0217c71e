//! Given a job's records and what its ports did, what is said of it.

use elastic_rendezvous::job::{
    Desired, JobProtocol, LeaderRecord, NodeId, NodeRecord, Phase, Protocols, RankRecord, Release, Sealed, Tombstone,
    Versioned, samples,
};
use elastic_store::Revision;

use super::*;

const PLAN: Revision = Revision(9);

fn versioned<T>(value: T) -> Versioned<T> {
    Versioned { value, created: Revision(5), modified: Revision(7) }
}

fn node(name: &str) -> NodeId {
    NodeId::new(name, "1")
}

fn peer(name: &str) -> Endpoint {
    Endpoint { host: name.to_owned(), port: 1 }
}

fn record(name: &str, phase: Phase, round: Option<u64>) -> NodeRecord {
    NodeRecord { slots: 2, phase, round, release: Some(Release::ours()), ..samples::node(name) }
}

fn rank(name: &str, group_rank: u32) -> RankRecord {
    RankRecord {
        group_rank,
        first_rank: 2 * group_rank,
        slots: 2,
        role_rank_base: 0,
        role_world_size: 4,
        name: name.to_owned(),
        machine: "m".to_owned(),
        boot: "b".to_owned(),
        peer: peer(name),
        before: None,
        replica_since: None,
    }
}

/// Nodes a and b run round 3, a leads; two to three nodes are wanted.
fn runs() -> Seen {
    let id: JobId = "train".parse().unwrap();
    let leader = serde_json::to_string(&LeaderRecord::new(node("a"), peer("a"), false)).unwrap();
    let mut job = samples::overview(&[("train/leader", leader)]).jobs.remove(&id).unwrap();
    job.spec = Some(samples::spec(2, 3));
    job.round = Some(versioned(RoundRecord {
        sealed: Some(Sealed { number: 3, plan: PLAN, nodes: 2 }),
        world_size: 4,
        reason: "b joined".to_owned(),
        ..samples::round(3, RoundState::Running)
    }));
    let mut seen = Seen { id, job, ports: BTreeMap::new() };
    for (n, name) in ["a", "b"].into_iter().enumerate() {
        seen.job.ranks.insert((3, PLAN, node(name)), rank(name, n as u32));
        seen.put(record(name, Phase::Running, Some(3)));
    }
    seen
}

impl Seen {
    fn put(&mut self, record: NodeRecord) {
        self.ports.insert(record.peer.clone(), Port::Accepts);
        self.job.nodes.insert(record.id(), versioned(record));
    }

    fn round(&mut self) -> &mut RoundRecord {
        &mut self.job.round.as_mut().unwrap().value
    }

    /// Round 4 begins to form.
    fn forms(mut self) -> Seen {
        (self.round().number, self.round().state) = (4, RoundState::Forming);
        self
    }

    #[track_caller]
    fn says(&self, check: &str, of: &str, state: State, seen: &str) -> String {
        let findings = judge(self);
        let mut lines = findings.iter().filter(|line| line.check == check && line.of == of);
        let (Some(line), None) = (lines.next(), lines.next()) else { panic!("{check} of {of}: {findings:#?}") };
        assert!(line.state == state && line.seen.contains(seen), "wanted {state:?}, {seen:?}: {line:#?}");
        line.advice.clone().unwrap_or_default()
    }
}

#[test]
fn a_job_that_runs_has_only_good_lines() {
    let seen = runs();
    assert!(judge(&seen).iter().all(|line| line.state == State::Ok), "{:#?}", judge(&seen));
    seen.says("round", "job train", State::Ok, "round 3 runs, nodes: 2, workers: 4");
    seen.says("leader", "job train", State::Ok, "a a:1");
    seen.says("peer", "the nodes", State::Ok, "2 of 2");
    assert!(judge(&seen).iter().all(|line| line.check != "waits"));
}

#[test]
fn a_job_that_has_ended_or_lost_all_nodes_says_so() {
    let mut seen = runs();
    seen.round().state = RoundState::Failed;
    let advice = seen.says("round", "job train", State::Failed, "round 3 has failed");
    assert!(advice.contains("elasticctl describe train"), "{advice}");
    seen.job.nodes.clear();
    seen.round().state = RoundState::Succeeded;
    seen.says("round", "job train", State::Ok, "succeeded");
    seen.round().state = RoundState::Running;
    seen.says("round", "job train", State::Warning, "no node is here");
}

#[test]
fn no_leader_and_an_unreachable_leader_are_findings() {
    let mut seen = runs();
    seen.job.leader = None;
    seen.says("leader", "job train", State::Warning, "no node leads");
    let (at, node) = (peer("c"), node("c"));
    seen.job.leader = Some(versioned(LeaderRecord::new(node, at.clone(), true)));
    seen.ports.insert(at.clone(), Port::Accepts);
    seen.says("leader", "job train", State::Ok, "the coordinator at c:1");
    seen.ports.insert(at, Port::Refuses);
    assert!(seen.says("leader", "job train", State::Failed, "c:1 refuses").contains("--peer-address"));
}

#[test]
fn a_port_that_refuses_fails_and_one_that_is_silent_may_be_seen_from_elsewhere() {
    let mut seen = runs();
    seen.ports.insert(peer("b"), Port::Refuses);
    assert!(seen.says("peer", "node b", State::Failed, "b:1 refuses").contains("--local-addr"));
    seen.says("peer", "the nodes", State::Ok, "1 of 2");
    seen.ports.insert(peer("b"), Port::Silent("no answer".to_owned()));
    assert!(seen.says("peer", "node b", State::Warning, "no answer").contains("on a node too"));
    // What was not tried, as a done node's, is not judged.
    seen.ports.remove(&peer("b"));
    seen.says("peer", "the nodes", State::Ok, "1 of 1");
}

#[test]
fn a_node_that_waits_beside_a_running_round_is_a_spare_a_newcomer_or_starting() {
    let mut seen = runs();
    seen.put(record("c", Phase::Waiting, None));
    seen.says("waits", "node c", State::Ok, "joins with the next round");
    seen.job.spec.as_mut().unwrap().max_nodes = 2;
    assert!(seen.says("waits", "node c", State::Ok, "a spare").contains("elasticctl set train --max"));
    let desired = Desired { drain: vec!["c".to_owned()], ..Default::default() };
    seen.job.desired = Some(versioned(desired));
    assert!(seen.says("waits", "node c", State::Ok, "drained").contains("elasticctl undrain train c"));
    seen.job.desired = None;
    seen.job.ranks.insert((3, PLAN, node("c")), rank("c", 2));
    seen.says("waits", "node c", State::Ok, "starts its workers");
    seen.round().state = RoundState::Failed;
    seen.says("waits", "node c", State::Ok, "has failed");
}

#[test]
fn another_protocol_or_several_releases_are_findings() {
    let mut seen = runs();
    assert!(judge(&seen).iter().all(|line| line.check != "protocol"));
    seen.job.protocol = Some(JobProtocol { version: Protocols::OURS.newest, release: None });
    assert!(judge(&seen).iter().all(|line| line.check != "protocol"));
    seen.put(NodeRecord { release: None, ..record("b", Phase::Running, Some(3)) });
    let advice = seen.says("protocol", "job train", State::Warning, "releases here: not told, 0.");
    assert!(advice.contains("elasticctl describe train"), "{advice}");
    let version = Protocols::OURS.newest + 1;
    seen.job.protocol = Some(JobProtocol { version, release: None });
    seen.says("protocol", "job train", State::Failed, &format!("the job speaks protocol version {version}"));
}

#[test]
fn nodes_of_a_forming_round_wait_for_late_members_then_for_the_minimum() {
    let mut seen = runs().forms();
    seen.put(record("a", Phase::Waiting, Some(4)));
    seen.says("waits", "node a", State::Ok, "for b (running)");
    seen.job.nodes.remove(&node("b"));
    seen.says("waits", "node a", State::Ok, "for b (its key is gone)");
    let tombstone: Tombstone = serde_json::from_str(r#"{"round":3,"fate":"dead","reason":"silent"}"#).unwrap();
    seen.job.evicted.insert(node("b"), tombstone);
    let advice = seen.says("waits", "node a", State::Warning, "1 of at least 2 nodes are here");
    assert!(advice.contains("elasticctl set train --min"), "{advice}");
    // One that is drained, or that speaks of an older round, does not count.
    seen.put(record("c", Phase::Waiting, Some(3)));
    seen.says("waits", "node a, c", State::Warning, "1 of at least 2");
    seen.put(record("c", Phase::Waiting, None));
    seen.says("waits", "node a, c", State::Ok, "2 nodes are here, at most 3");
}
