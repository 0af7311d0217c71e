//! Jobs that have ended are deleted: by an operator, by a coordinator, and in one transaction that a newcomer wins.

use async_trait::async_trait;
use elastic_coordinator::removal::{RemovalError, Target, check, remove};
use elastic_store::clock::epoch_ms;
use elastic_store::embedded::MemoryStore;
use elastic_store::embedded::mvcc::Limits;
use elastic_store::{LeaseId, TxnResult};

use super::*;

/// A store that does something right before the first write that its user makes.
struct Overtaken {
    store: Arc<dyn Store>,
    first: Mutex<Option<Txn>>,
}

#[async_trait]
impl Store for Overtaken {
    async fn txn(&self, txn: Txn) -> elastic_store::Result<TxnResult> {
        let first = if txn.is_write() { self.first.lock().unwrap().take() } else { None };
        if let Some(first) = first {
            assert!(self.store.txn(first).await?.succeeded);
        }
        self.store.txn(txn).await
    }

    async fn watch(&self, scope: Scope, from: Revision) -> elastic_store::Result<Watcher> {
        self.store.watch(scope, from).await
    }

    async fn grant(&self, ttl: Duration) -> elastic_store::Result<LeaseId> {
        self.store.grant(ttl).await
    }

    async fn keep_alive(&self, lease: LeaseId) -> elastic_store::Result<Option<Duration>> {
        self.store.keep_alive(lease).await
    }

    async fn revoke(&self, lease: LeaseId) -> elastic_store::Result<()> {
        self.store.revoke(lease).await
    }
}

/// An address that refuses: it was free a moment ago.
fn refusing() -> String {
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    format!(r#"{{"host":"127.0.0.1","port":{port}}}"#)
}

/// The keys of an ended job with `nodes` members, all of whom are gone, and some of whom are done.
pub(super) fn ended(job: &str, nodes: usize, done: usize) -> Vec<(String, String)> {
    let peer = refusing();
    let spec = serde_json::to_string(&quick_spec(1, 4)).unwrap();
    let round = format!(
        r#"{{"number":1,"generation":1,"state":"failed","reason":"r","sealed":{{"number":1,"plan":3,"nodes":{nodes}}}}}"#
    );
    let mut keys = vec![
        ("spec".to_owned(), spec),
        ("round".to_owned(), round),
        ("desired".to_owned(), r#"{"drain":[]}"#.to_owned()),
        ("checkpoint".to_owned(), r#"{"step":7,"path":"/c","digest":"d","round":1}"#.to_owned()),
        ("evicted/z:1".to_owned(), r#"{"round":1,"fate":"dead","reason":"r"}"#.to_owned()),
        ("barriers/1/released/b".to_owned(), String::new()),
        (
            "events/000000000001".to_owned(),
            format!(r#"{{"at_ms":{},"round":1,"state":"failed","reason":"r"}}"#, epoch_ms()),
        ),
    ];
    for node in 0..nodes {
        keys.push((
            format!("rounds/1/3/n{node}:1"),
            format!(
                r#"{{"group_rank":{node},"first_rank":{node},"slots":1,"role_rank_base":{node},"role_world_size":{nodes},
                    "name":"n{node}","machine":"m","boot":"b","peer":{peer}}}"#
            ),
        ));
    }
    for node in 0..done {
        keys.push((
            format!("nodes/n{node}:1"),
            format!(
                r#"{{"name":"n{node}","incarnation":"1","machine":"m","boot":"b","host":"h","peer":{peer},"slots":1,
                    "role":"default","phase":"done","round":1}}"#
            ),
        ));
    }
    keys.into_iter().map(|(key, value)| (format!("/elastic/v1/jobs/{job}/{key}"), value)).collect()
}

pub(super) async fn write(store: &dyn Store, keys: &[(String, String)]) {
    for (key, value) in keys {
        store.put(vec![], Op::put(key, value.as_bytes())).await.unwrap();
    }
}

async fn stored(store: &dyn Store, prefix: &str) -> usize {
    store.range(prefix).await.unwrap().0.len()
}

/// What a deletion must do on every store.
async fn deletes_all_or_nothing(store: Arc<dyn Store>) {
    let job: JobId = "old".parse().unwrap();
    let keys = Keys::new(Keys::DEFAULT_PREFIX, &job);
    let target = Target { prefix: Keys::DEFAULT_PREFIX, job: &job, chosen: None, now_ms: epoch_ms(), tls: None };

    // Given a job of more keys than a transaction has operations, and neighbours whose ids begin or end alike,
    let records = ended("old", 200, 120);
    write(&*store, &records).await;
    let neighbours = ["older", "ol", "old.2"];
    for neighbour in neighbours {
        write(&*store, &ended(neighbour, 1, 0)).await;
    }

    // when it is only read, nothing goes;
    assert_eq!(check(&*store, &target).await.unwrap(), records.len() as i64);
    assert_eq!(stored(&*store, keys.root()).await, records.len());

    // when a node joins right before the deletion, the node and the job's records stay;
    let newcomer = records.iter().find(|(key, _)| key.ends_with("nodes/n0:1")).unwrap().1.replace("done", "waiting");
    let join = Txn::of([Op::put(format!("{}new:1", keys.nodes()), newcomer)]);
    let late = Overtaken { store: Arc::clone(&store), first: Mutex::new(Some(join)) };
    let error = remove(&late, &target).await.unwrap_err();
    assert!(matches!(error, RemovalError::Agents { .. }) && error.to_string().contains("new:1"), "{error}");
    assert_eq!(stored(&*store, &keys.rounds()).await, 200);
    assert!(store.get(&format!("{}new:1", keys.nodes())).await.unwrap().is_some(), "no one's key goes silently");
    store.delete(vec![], &format!("{}new:1", keys.nodes())).await.unwrap();

    // when it begins again right before the deletion, the new generation stays;
    let began = r#"{"number":2,"generation":2,"state":"forming","reason":"the job begins again"}"#;
    let last = store.get(&keys.round()).await.unwrap().unwrap();
    let begin = Txn::of([Op::put(keys.round(), began)]);
    let late = Overtaken { store: Arc::clone(&store), first: Mutex::new(Some(begin)) };
    assert!(matches!(remove(&late, &target).await, Err(RemovalError::NotEnded { .. })));
    assert!(store.get(&keys.checkpoint()).await.unwrap().is_some());
    store.put(vec![], Op::put(keys.round(), last.value)).await.unwrap();

    // when it was chosen by another record than is there now, it stays;
    let chosen = Target { chosen: Some(last.mod_revision), ..target.clone() };
    assert!(matches!(remove(&*store, &chosen).await, Err(RemovalError::Changed { .. })));

    // and when no one interferes all of it goes, once, and no neighbour's keys do.
    let left = stored(&*store, keys.root()).await;
    let (one, other) = tokio::join!(remove(&*store, &target), remove(&*store, &target));
    let counts: Vec<i64> = [one, other].into_iter().filter_map(Result::ok).collect();
    assert_eq!(stored(&*store, keys.root()).await, 0);
    assert!(counts.len() == 1 && counts[0] <= left as i64, "{counts:?} of {left}");
    for neighbour in neighbours {
        let keys = Keys::new(Keys::DEFAULT_PREFIX, &neighbour.parse().unwrap());
        assert_eq!(stored(&*store, keys.root()).await, ended(neighbour, 1, 0).len(), "{neighbour}");
    }

    // It counts every key that it deletes.
    write(&*store, &records).await;
    assert_eq!(remove(&*store, &target).await.unwrap(), records.len() as i64);
    assert!(matches!(remove(&*store, &target).await, Err(RemovalError::NoSuchJob { .. })));
}

#[tokio::test]
async fn a_deletion_takes_all_or_nothing_on_etcd() {
    let etcd = EtcdServer::start(EtcdOptions::default()).await;
    deletes_all_or_nothing(Arc::new(EtcdStore::connect(EtcdConfig::new([etcd.address()])).unwrap())).await;
}

#[tokio::test]
async fn a_deletion_takes_all_or_nothing_on_the_embedded_store() {
    deletes_all_or_nothing(Arc::new(MemoryStore::start(Limits::default()))).await;
}

#[tokio::test]
async fn a_port_that_still_answers_keeps_the_job() {
    let store: Arc<dyn Store> = Arc::new(MemoryStore::start(Limits::default()));
    write(&*store, &ended("old", 1, 0)).await;
    // A host that takes connections and says nothing: frozen, or ending its workers.
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let job: JobId = "old".parse().unwrap();
    let rank = format!("{}1/3/n0:1", Keys::new(Keys::DEFAULT_PREFIX, &job).rounds());
    let kv = store.get(&rank).await.unwrap().unwrap();
    let mut record: serde_json::Value = serde_json::from_slice(&kv.value).unwrap();
    record["peer"]["port"] = listener.local_addr().unwrap().port().into();
    store.put(vec![], Op::put(&rank, record.to_string())).await.unwrap();
    let mut target = Target { prefix: Keys::DEFAULT_PREFIX, job: &job, chosen: None, now_ms: epoch_ms(), tls: None };
    let error = remove(&*store, &target).await.unwrap_err();
    assert!(matches!(error, RemovalError::Unconfirmed { .. }) && error.to_string().contains("n0:1"), "{error}");
    target.now_ms += 2 * 3_600_000;
    assert_eq!(remove(&*store, &target).await.unwrap(), 8);
}

/// Runs the built agent alone on the scene's job, to its end. Its worker adds a line to a file. In-process nodes would
/// keep their ports for as long as the test runs.
async fn run_agent(scene: &Scene, backend: &str, file: &std::path::Path) {
    let script = format!("echo ran >> {}", file.display());
    let endpoint = format!("--rdzv-endpoint={}", scene.address);
    let job = format!("--rdzv-id={}", scene.job);
    let backend = format!("--rdzv-backend={backend}");
    let program = ["--no-python", "sh", "-c", &script];
    let args = [&["--nnodes=1:2", "--rdzv-conf=last_call_timeout=0", &backend, &endpoint, &job][..], &program].concat();
    assert_eq!(Process::start("elastic-agent", &args).exit(WITHIN).await, 0);
}

#[tokio::test]
async fn an_operator_deletes_a_job_that_has_ended_and_its_id_runs_afresh() {
    let scene = Scene::on_etcd(1, 1).await;
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("runs");
    let runs = || std::fs::read_to_string(&file).unwrap().lines().count();

    // A living job is refused, and nothing of it goes.
    let living = scene.other("living");
    let nodes = living.nodes(["b"]).await;
    let (ok, text) = scene.ctl(&["delete", "living"]).await;
    assert!(!ok && text.contains("job living is running") && text.contains("elasticctl close living"), "{text}");
    assert_eq!(living.round().await.value.number, 1);

    // A job that has succeeded does not run again,
    run_agent(&scene, "c10d", &file).await;
    run_agent(&scene, "etcd", &file).await;
    assert_eq!(runs(), 1);
    let known = scene.keys.arrivals(1, "@result");
    assert_eq!(stored(&*scene.store, &known).await, 1, "c10d may name a store that stays, and its agents say so there");
    let would = scene.ctl_ok(&["delete", "train", "--dry-run"]).await;
    let keys = would.strip_prefix("would delete job train: ").unwrap();
    let deleted = scene.ctl_ok(&["delete", "train"]).await;
    assert!(deleted.starts_with(&format!("deleted job train: {}", keys.trim())), "{deleted} after {would}");
    assert!(deleted.contains("checkpoint files stay"), "{deleted}");
    assert_eq!(stored(&*scene.store, scene.keys.root()).await, 0);
    let (ok, text) = scene.ctl(&["delete", "train"]).await;
    assert!(!ok && text.contains("there is no job \"train\""), "{text}");

    // until it was deleted.
    run_agent(&scene, "etcd", &file).await;
    assert_eq!(runs(), 2);
    assert_eq!((scene.round().await.value.number, scene.round().await.value.generation), (1, 1));
    succeed(nodes).await;
}

#[tokio::test]
async fn an_operator_deletes_many_jobs_by_their_age() {
    let scene = Scene::on_etcd(1, 1).await;
    for job in ["one", "two"] {
        write(&*scene.store, &ended(job, 1, 0)).await;
    }
    let nodes = scene.nodes(["a"]).await;
    let many = |age| ["delete", "--finished", "--older-than", age];
    assert!(scene.ctl_ok(&many("1h")).await.contains("no job under /elastic/v1/jobs/ ended that long ago"));
    let would = scene.ctl_ok(&[&many("0s")[..], &["--dry-run"]].concat()).await;
    assert_eq!(would, "would delete job one: 8 keys\nwould delete job two: 8 keys\n");
    let done = scene.ctl_json(&many("0s")).await;
    assert_eq!(done[1], serde_json::json!({"job": "two", "keys": 8, "deleted": true}));
    assert_eq!(stored(&*scene.store, &scene.other("one").keys.root().replace("one/", "")).await, {
        stored(&*scene.store, scene.keys.root()).await
    });
    assert!(scene.ctl_ok(&["jobs"]).await.contains("train  running"));
    succeed(nodes).await;
}

#[tokio::test]
async fn two_coordinators_delete_an_ended_job_once_and_leave_a_living_one() {
    let scene = Scene::on_etcd(1, 1).await;
    let args = ["--keep-finished", "0s", "--http", "127.0.0.1:0"];
    let replicas = [scene.coordinator_with(&args), scene.coordinator_with(&args)];
    let living = scene.other("living");
    let [stays] = living.nodes(["b"]).await;
    let dir = tempfile::tempdir().unwrap();
    for _ in 0..3 {
        run_agent(&scene, "etcd", &dir.path().join("runs")).await;
        // An agent that is just ending may cost a second look.
        eventually("the job is deleted", 5 * WITHIN, async || {
            (stored(&*scene.store, scene.keys.root()).await == 0).then_some(())
        })
        .await;
    }
    let runs = std::fs::read_to_string(dir.path().join("runs")).unwrap();
    assert_eq!(runs.lines().count(), 3, "each time from nothing");
    eventually("the replicas have deleted three times in all", WITHIN, async || {
        let mut counted = 0;
        for replica in &replicas {
            let page = http(&replica.says("http://", WITHIN).await, "/metrics").await;
            let value = page.split("elastic_jobs_deleted_total ").nth(1).expect("the metric");
            counted += value.split_whitespace().next().unwrap().parse::<u32>().unwrap();
        }
        (counted == 3).then_some(())
    })
    .await;
    let logged: usize = replicas.iter().map(|replica| replica.output().matches("it is kept no longer").count()).sum();
    assert_eq!(logged, 3);
    assert_eq!(living.round().await.value.number, 1);
    succeed([stays]).await;
}

#[tokio::test]
async fn a_coordinator_keeps_every_job_unless_it_is_configured() {
    let scene = Scene::on_etcd(1, 1).await;
    let keeper = scene.coordinator();
    write(&*scene.store, &ended("old", 1, 0)).await;
    // A job that came later has been led and let go of: the replica has read all jobs meanwhile.
    let nodes = scene.nodes(["a"]).await;
    scene.led("the replica leads", |leader| leader.coordinator).await;
    succeed(nodes).await;
    keeper.says("not leading any more", WITHIN).await;
    assert!(scene.ctl_ok(&["jobs"]).await.contains("old"));
    drop(keeper);
    let _counting = scene.coordinator_with(&["--keep-finished-count", "1"]);
    let old = scene.other("old");
    eventually("the one that ended first goes", WITHIN, async || {
        (stored(&*scene.store, old.keys.root()).await == 0).then_some(())
    })
    .await;
    assert!(scene.ctl_ok(&["jobs"]).await.contains("train  succeeded"));
}
