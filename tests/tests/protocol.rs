//! The protocol in one process: real driver, machines, pulses over TCP, and the in-process store.

#![allow(clippy::unwrap_used)]

use std::sync::Arc;
use std::time::Duration;

use elastic_coordinator::job::{FailureClass, JobId, Keys, Spec};
use elastic_coordinator::mvcc::Limits;
use elastic_coordinator::node::Parting;
use elastic_coordinator::rendezvous::End;
use elastic_coordinator::store::{MemoryStore, Store};
use elastic_tests::fleet::{FleetNode, quick_spec, start_node};

const WITHIN: Duration = Duration::from_secs(15);

struct Fleet {
    store: Arc<dyn Store>,
    keys: Keys,
    job: JobId,
    spec: Spec,
}

impl Fleet {
    fn of(min: u32, max: u32) -> Fleet {
        let job: JobId = "fleet".parse().unwrap();
        Fleet {
            store: Arc::new(MemoryStore::start(Limits::default())),
            keys: Keys::new(Keys::DEFAULT_PREFIX, &job),
            job,
            spec: quick_spec(min, max),
        }
    }

    async fn start(&self, name: &str) -> FleetNode {
        start_node(Arc::clone(&self.store), self.keys.clone(), &self.job, self.spec.clone(), name).await.unwrap()
    }
}

#[tokio::test]
async fn three_nodes_form_a_round_and_succeed() {
    let fleet = Fleet::of(3, 3);
    let mut nodes = vec![fleet.start("a").await, fleet.start("b").await, fleet.start("c").await];
    let mut ranks = Vec::new();
    for node in &mut nodes {
        ranks.push(node.runs(1, 3, WITHIN).await.unwrap().rank.group_rank);
    }
    ranks.sort();
    assert_eq!(ranks, [0, 1, 2]);
    nodes.iter().for_each(FleetNode::finish);
    for node in nodes {
        assert_eq!(node.parting(WITHIN).await.unwrap(), Parting::End(End::Succeeded));
    }
    assert!(fleet.store.range(&fleet.keys.nodes()).await.unwrap().0.is_empty(), "done nodes leave no keys");
}

#[tokio::test]
async fn a_failure_costs_a_restart_and_the_budget_ends_the_job_with_its_cause() {
    let mut fleet = Fleet::of(2, 2);
    fleet.spec.max_restarts = 1;
    let (mut a, mut b) = (fleet.start("a").await, fleet.start("b").await);
    a.runs(1, 2, WITHIN).await.unwrap();
    b.runs(1, 2, WITHIN).await.unwrap();
    b.fail(FailureClass::Own, "ValueError: boom");
    let again = a.runs(2, 2, WITHIN).await.unwrap();
    assert_eq!((again.round.number, again.round.restarts), (2, 1));
    b.runs(2, 2, WITHIN).await.unwrap();
    b.fail(FailureClass::Own, "ValueError: boom again");
    for node in [a, b] {
        match node.parting(WITHIN).await.unwrap() {
            Parting::End(End::Failed(Some(cause), _)) => assert_eq!(cause.message, "ValueError: boom again"),
            other => panic!("{other:?}"),
        }
    }
}

#[tokio::test]
async fn a_newcomer_joins_and_a_leaver_leaves_while_ranks_stay() {
    let fleet = Fleet::of(1, 3);
    let mut a = fleet.start("a").await;
    a.runs(1, 1, WITHIN).await.unwrap();
    let mut b = fleet.start("b").await;
    let grown = a.runs(2, 2, WITHIN).await.unwrap();
    assert_eq!((grown.rank.group_rank, grown.round.restarts), (0, 0));
    b.runs(2, 2, WITHIN).await.unwrap();
    let mut c = fleet.start("c").await;
    c.runs(3, 3, WITHIN).await.unwrap();
    b.runs(3, 3, WITHIN).await.unwrap();
    b.drain();
    assert_eq!(a.runs(4, 2, WITHIN).await.unwrap().rank.group_rank, 0);
    assert_eq!(c.runs(4, 2, WITHIN).await.unwrap().rank.group_rank, 1);
    assert_eq!(b.parting(WITHIN).await.unwrap(), Parting::End(End::Drained));
    a.finish();
    c.finish();
    assert_eq!(a.parting(WITHIN).await.unwrap(), Parting::End(End::Succeeded));
    assert_eq!(c.parting(WITHIN).await.unwrap(), Parting::End(End::Succeeded));
}
