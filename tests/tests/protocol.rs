//! The protocol in one process: real driver, machines, pulses over TCP, and the in-process store.

use async_trait::async_trait;
use elastic_node::Parting;
use elastic_node::requests::checkpoint::{LastWord, last_word};
use elastic_rendezvous::End;
use elastic_rendezvous::job::{NodeRecord, Phase, Sealed};
use elastic_store::embedded::MemoryStore;
use elastic_store::embedded::mvcc::Limits;
use elastic_store::{self, Event, KeyValue, LeaseId, TxnResult};
use elastic_tests::counting_store::{CountingStore, KEYS};
use elastic_tests::prelude::*;

const WITHIN: Duration = Duration::from_secs(15);

struct TestJob {
    store: Arc<dyn Store>,
    keys: Keys,
    job: JobId,
    spec: Spec,
}

impl TestJob {
    fn of(min: u32, max: u32) -> TestJob {
        let job: JobId = "job".parse().unwrap();
        TestJob {
            store: Arc::new(MemoryStore::start(Limits::default())),
            keys: Keys::new(Keys::DEFAULT_PREFIX, &job),
            job,
            spec: quick_spec(min, max),
        }
    }

    async fn start(&self, name: &str) -> InProcessNode {
        start_node(Arc::clone(&self.store), self.keys.clone(), &self.job, self.spec.clone(), name).await.unwrap()
    }
}

#[tokio::test]
async fn three_nodes_form_a_round_and_succeed() {
    let job = TestJob::of(3, 3);
    let mut nodes = vec![job.start("a").await, job.start("b").await, job.start("c").await];
    let mut ranks = Vec::new();
    for node in &mut nodes {
        ranks.push(node.runs(1, 3, WITHIN).await.unwrap().rank.group_rank);
    }
    ranks.sort();
    assert_eq!(ranks, [0, 1, 2]);
    nodes.iter().for_each(InProcessNode::finish);
    for node in nodes {
        assert_eq!(node.parting(WITHIN).await.unwrap(), Parting::End(End::Succeeded));
    }
    assert!(job.store.range(&job.keys.nodes()).await.unwrap().0.is_empty(), "done nodes leave no keys");
}

#[tokio::test]
async fn a_failure_costs_a_restart_and_the_budget_ends_the_job_with_its_cause() {
    let mut job = TestJob::of(2, 2);
    job.spec.max_restarts = 1;
    let (mut a, mut b) = (job.start("a").await, job.start("b").await);
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

/// A store that refuses what leaders alone watch.
struct RefusesLeaders(Arc<dyn Store>);

#[async_trait]
impl Store for RefusesLeaders {
    async fn txn(&self, txn: Txn) -> elastic_store::Result<TxnResult> {
        self.0.txn(txn).await
    }

    async fn watch(&self, scope: Scope, from: Revision) -> elastic_store::Result<Watcher> {
        match scope {
            Scope::Prefix(prefix) if prefix.ends_with("/nodes/") => {
                Err(StoreError::Denied { endpoints: "e".into(), cause: "permission denied".into() })
            }
            scope => self.0.watch(scope, from).await,
        }
    }

    async fn grant(&self, ttl: Duration) -> elastic_store::Result<LeaseId> {
        self.0.grant(ttl).await
    }

    async fn keep_alive(&self, lease: LeaseId) -> elastic_store::Result<Option<Duration>> {
        self.0.keep_alive(lease).await
    }

    async fn revoke(&self, lease: LeaseId) -> elastic_store::Result<()> {
        self.0.revoke(lease).await
    }
}

#[tokio::test]
async fn a_node_that_cannot_watch_what_leaders_watch_leaves_the_lead_to_others() {
    let mut job = TestJob::of(2, 2);
    let whole = Arc::clone(&job.store);
    job.store = Arc::new(RefusesLeaders(Arc::clone(&whole)));
    let a = job.start("a").await;

    match a.parting(WITHIN).await.unwrap() {
        Parting::End(End::StoreLost(why)) => assert!(why.contains("permission denied"), "{why}"),
        other => panic!("{other:?}"),
    }
    assert!(whole.range(&job.keys.leader()).await.unwrap().0.is_empty(), "its key of the lead is gone");
    job.store = whole;
    let (mut b, mut c) = (job.start("b").await, job.start("c").await);
    b.runs(1, 2, WITHIN).await.unwrap();
    c.runs(1, 2, WITHIN).await.unwrap();
}

#[tokio::test]
async fn a_newcomer_joins_and_a_leaver_leaves_while_ranks_stay() {
    let job = TestJob::of(1, 3);
    let mut a = job.start("a").await;
    a.runs(1, 1, WITHIN).await.unwrap();
    let mut b = job.start("b").await;
    let grown = a.runs(2, 2, WITHIN).await.unwrap();
    assert_eq!((grown.rank.group_rank, grown.round.restarts), (0, 0));
    b.runs(2, 2, WITHIN).await.unwrap();
    let mut c = job.start("c").await;
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

/// How often each key under `prefix` was written since revision `from`.
async fn puts(store: &dyn Store, prefix: String, from: Revision) -> BTreeMap<String, u32> {
    let (_, until) = store.range(&prefix).await.unwrap();
    // What marks the end of the history that is read.
    let end = format!("{prefix}end");
    store.put(Vec::new(), Op::put(&end, "")).await.unwrap();
    let mut watcher = store.watch(Scope::Prefix(prefix), from).await.unwrap();
    let mut puts = BTreeMap::new();
    loop {
        let update = tokio::time::timeout(WITHIN, watcher.recv()).await.unwrap().unwrap();
        let WatchUpdate::Events(events) = update else { panic!("{update:?}") };
        for event in events {
            match event {
                Event::Put(kv) if kv.key == end => return puts,
                Event::Put(kv) if kv.mod_revision <= until => *puts.entry(kv.key).or_default() += 1,
                _ => {}
            }
        }
    }
}

#[tokio::test]
async fn a_node_writes_its_key_twice_to_come_into_its_first_round() {
    let job = TestJob::of(4, 4);
    let mut nodes = Vec::new();
    for name in ["a", "b", "c", "d"] {
        nodes.push(job.start(name).await);
    }
    for node in &mut nodes {
        node.runs(1, 4, WITHIN).await.unwrap();
    }
    eventually("all say that they run", WITHIN, async || {
        let (records, _) = job.store.range(&job.keys.nodes()).await.unwrap();
        let runs = |kv: &KeyValue| serde_json::from_slice::<NodeRecord>(&kv.value).unwrap().phase == Phase::Running;
        (records.len() == 4 && records.iter().all(runs)).then_some(())
    })
    .await;
    // That it waits, and that its workers run.
    let puts = puts(&*job.store, job.keys.nodes(), Revision(1)).await;
    assert!(puts.len() == 4 && puts.values().all(|count| *count == 2), "{puts:?}");
}

/// Keys that were read since this was asked last.
fn keys_read(store: &CountingStore) -> u64 {
    store.take().get(KEYS).copied().unwrap_or_default()
}

#[tokio::test]
async fn those_who_wait_for_a_failed_jobs_last_nodes_do_not_all_read_them() {
    const LEFT: u64 = 200;
    const COME: u64 = 10;
    // Given a job that has failed, whose leader died before it deleted what done nodes left, and a node that still
    // leaves
    let mut job = TestJob::of(COME as u32, COME as u32);
    let failed = json!({ "number": 3, "generation": 1, "state": "failed", "reason": "r" });
    let spec = serde_json::to_vec(&job.spec).unwrap();
    let begun = [Op::put(job.keys.spec(), spec), Op::put(job.keys.round(), failed.to_string())];
    job.store.txn(Txn::of(begun)).await.unwrap();
    let says = |name: &str, phase: &str| {
        let record = json!({
            "name": name, "incarnation": "1", "machine": name, "boot": "b", "host": "h", "slots": 1, "role": "default",
            "peer": { "host": "127.0.0.1", "port": 1 }, "phase": phase, "round": 3,
        });
        (job.keys.node(&NodeId::new(name, "1")), record.to_string())
    };
    for index in 0..LEFT {
        let (key, record) = says(&format!("done-{index}"), "done");
        job.store.put(Vec::new(), Op::put(key, record)).await.unwrap();
    }
    let lease = job.store.grant(Duration::from_secs(60)).await.unwrap();
    let (key, record) = says("leaves", "failed");
    job.store.put(Vec::new(), Op::put_leased(key, record, lease)).await.unwrap();
    // when nodes come, and wait until that one has left
    let real = Arc::clone(&job.store);
    let counted = Arc::new(CountingStore::new(Arc::clone(&real)));
    job.store = Arc::clone(&counted) as Arc<dyn Store>;
    let mut nodes = Vec::new();
    for index in 0..COME {
        nodes.push(job.start(&format!("n{index}")).await);
    }
    eventually("one of them deletes what was left", WITHIN, async || {
        (real.range(&job.keys.nodes()).await.unwrap().0.len() == 1).then_some(())
    })
    .await;
    real.revoke(lease).await.unwrap();
    // then the job begins again with them
    for node in &mut nodes {
        assert_eq!(node.runs(4, COME as u32, WITHIN).await.unwrap().round.generation, 2);
    }
    // and only who led read what was left: when it came to lead, and when the new generation had begun
    let keys = keys_read(&counted);
    assert!(keys < 3 * LEFT + 60 * COME, "{keys} keys were read by {COME} nodes");
}

#[tokio::test]
async fn at_a_jobs_end_not_every_node_reads_all_of_them() {
    const SIZE: u32 = 100;
    let job = TestJob::of(1, SIZE);
    let store = CountingStore::new(Arc::clone(&job.store));
    let seat = Sealed { number: 3, plan: Revision(7), nodes: SIZE };
    let ids: Vec<NodeId> = (0..SIZE).map(|index| NodeId::new(&format!("n{index:03}"), "1")).collect();
    let ranks: Vec<usize> = (0..ids.len()).rev().collect();
    for (rank, index) in ranks.iter().enumerate() {
        let before = rank.checked_sub(1).map(|before| &ids[ranks[before]]);
        let place = json!({
            "group_rank": rank, "first_rank": rank, "slots": 1, "role_rank_base": rank, "role_world_size": SIZE,
            "name": ids[*index].name(), "machine": "m", "boot": "b", "peer": { "host": "h", "port": 1 }, "before": before,
        });
        let key = job.keys.rank(seat.number, seat.plan, &ids[*index]);
        store.put(Vec::new(), Op::put(key, place.to_string())).await.unwrap();
    }
    let says = async |index: usize, phase: &str| {
        let record = json!({
            "name": ids[index].name(), "incarnation": "1", "machine": "m", "boot": "b", "host": "h", "slots": 1,
            "role": "default", "peer": { "host": "h", "port": 1 }, "phase": phase, "round": 3,
        });
        store.put(Vec::new(), Op::put(job.keys.node(&ids[index]), record.to_string())).await.unwrap();
    };
    // Given a job that ended so, and nodes: those of the first ranks, and every third, are gone: who publishes, and what
    // all of them read
    let ends = async |state: &str| {
        let sealed = json!({ "number": 3, "plan": 7, "nodes": SIZE });
        let round = json!({ "number": 3, "generation": 1, "state": state, "sealed": sealed, "reason": "r" });
        store.put(Vec::new(), Op::put(job.keys.round(), round.to_string())).await.unwrap();
        store.take();
        let mut publishers = Vec::new();
        for (rank, index) in ranks.iter().enumerate() {
            if rank > 2 && rank % 3 > 0 {
                let word = last_word(&store, &job.keys, &ids[*index], seat).await.unwrap();
                publishers.extend((word == LastWord::After(None)).then_some(rank));
            }
        }
        (publishers, keys_read(&store))
    };
    for (rank, index) in ranks.iter().enumerate() {
        if rank > 2 && rank % 3 > 0 {
            says(*index, "failed").await;
        }
    }
    // then the first that is there does, and each read a few keys
    let (publishers, keys) = ends("failed").await;
    assert_eq!(publishers, [4]);
    assert!(keys < u64::from(SIZE) * 6, "{keys}");
    // No one does while they continue, and the first alone where all leave
    let (publishers, keys) = ends("running").await;
    assert!(publishers.is_empty(), "{publishers:?}");
    assert!(keys < u64::from(SIZE) * 8, "{keys}");
    for (rank, index) in ranks.iter().enumerate() {
        if rank > 2 && rank % 3 > 0 {
            says(*index, "draining").await;
        }
    }
    let (publishers, keys) = ends("running").await;
    assert_eq!(publishers, [4]);
    assert!(keys < u64::from(SIZE) * 8, "{keys}");
    // But not where the last one stays
    says(ranks[97], "running").await;
    assert!(ends("running").await.0.is_empty());
}
