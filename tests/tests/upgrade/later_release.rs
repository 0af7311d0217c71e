//! An artificial later release: one that speaks a version that ours does not, or adds what ours does not know.

use elastic_rendezvous::job::{Protocols, Release};
use elastic_tests::prelude::*;
use elastic_tests::previous_release::PreviousRelease;

use super::Build;

/// What a release would speak that knows one version more than ours.
fn later() -> Release {
    let ours = Protocols::OURS;
    Release { version: "9.8.7".into(), protocols: Protocols { oldest: ours.newest, newest: ours.newest + 1 } }
}

/// The flags that an agent of a [`Job`] has by default, as a node of the later release has them.
fn spec(protocol: u32) -> Spec {
    let mut spec = quick_spec(1, 2);
    (spec.protocol, spec.release, spec.max_restarts) = (protocol, Some(later()), 0);
    spec
}

async fn node(etcd: &EtcdServer, job: &str, spec: Spec) -> (Arc<dyn Store>, Keys, InProcessNode) {
    let store: Arc<dyn Store> = Arc::new(etcd.store());
    let id: JobId = job.parse().unwrap();
    let keys = Keys::new(Keys::DEFAULT_PREFIX, &id);
    let node = start_node(Arc::clone(&store), keys.clone(), &id, spec, "later").await.unwrap();
    (store, keys, node)
}

#[tokio::test]
async fn a_job_of_a_later_protocol_is_refused_by_name_and_left_alone() {
    let before = PreviousRelease::build();
    let etcd = EtcdServer::start(EtcdOptions::default()).await;
    let newest = Protocols::OURS.newest;
    // Given a job that a later release has begun, by its newest protocol
    let (store, keys, mut first) = node(&etcd, "job", spec(newest + 1)).await;
    first.runs(1, 1, LIMIT).await.unwrap();
    let leader = async || store.get(&keys.leader()).await.unwrap().unwrap().mod_revision;
    let term = leader().await;
    // when agents of this release and of the one before come, then they end, and say what to do
    let job = Job::on(&etcd, "1:2");
    let mut agent = job.start("a");
    assert_ne!(agent.exit(LIMIT).await, 0);
    let said = agent.output();
    for part in [
        format!("protocol version {}", newest + 1),
        format!("{} (protocol {})", env!("CARGO_PKG_VERSION"), Protocols::OURS),
        format!("9.8.7 (protocol {})", later().protocols),
        "upgrade the programs of this host to 9.8.7".to_owned(),
        format!("job_protocol={newest}"),
    ] {
        assert!(said.contains(&part), "{part:?} is missing: {said}");
    }
    if let Some(before) = &before {
        assert_ne!(Build::Before.start(&job, before, "b").exit(LIMIT).await, 0);
    }
    // and a coordinator leaves the job alone and says so,
    let address = etcd.address();
    let args = ["--etcd", &address, "--peer-listen", "127.0.0.1:0", "--lease-ttl", "2"];
    let mut coordinator = Process::start("elastic-coordinator", &args);
    eventually("the coordinator says so", LIMIT, async || {
        coordinator.output().contains("left to its agents: the job speaks protocol version").then_some(())
    })
    .await;
    assert_eq!(coordinator.terminate(LIMIT).await, 0);
    assert_eq!(coordinator.output().matches("left to its agents").count(), 1, "once: {}", coordinator.output());
    // and elasticctl shows it and asks nothing of it.
    let ctl = async |args: &[&str]| {
        let told = output("elasticctl", &[&["--etcd", &address], args].concat(), LIMIT).await;
        (
            told.status.success(),
            format!("{}{}", String::from_utf8_lossy(&told.stdout), String::from_utf8_lossy(&told.stderr)),
        )
    };
    for (args, succeeds) in [
        (&["jobs"][..], true),
        (&["describe", "job"], true),
        (&["doctor", "job"], false),
        (&["close", "job"], false),
        (&["delete", "job"], false),
    ] {
        let (success, told) = ctl(args).await;
        assert!(success == succeeds && told.contains("protocol version"), "{args:?}: {told}");
    }
    assert!(store.get(&keys.desired()).await.unwrap().is_none());
    assert_eq!(leader().await, term, "no one else has led it");
    first.finish();
    first.parting(LIMIT).await.unwrap();
}

#[tokio::test]
async fn a_later_release_joins_and_leads_a_job_of_our_protocol() {
    let etcd = EtcdServer::start(EtcdOptions::default()).await;
    let newest = Protocols::OURS.newest;
    // Given a job of ours, and a node that could speak a later version
    let conf = |job: Job| {
        let timings = quick_spec(1, 2).timings;
        let ms = |time: Duration| format!("{}ms", time.as_millis());
        [
            ("lease_ttl", format!("{}", timings.lease_ttl.as_secs())),
            ("last_call_timeout", ms(timings.last_call)),
            ("join_timeout", ms(timings.join_timeout)),
            ("start_timeout", ms(timings.start_timeout)),
            ("drain_grace", ms(timings.drain_grace)),
            ("margin", ms(timings.margin)),
            ("takeover_delay", ms(timings.takeover_delay)),
            ("min_round_time", ms(timings.min_round_time)),
        ]
        .iter()
        .fold(job.flag("--shutdown-timeout=2"), |job, (key, value)| job.conf(key, value))
    };
    let job = conf(Job::on(&etcd, "1:2")).conf("job_protocol", &newest.to_string());
    let mut agent = job.start("a");
    job.runs(1, 1).await;
    let (store, keys, mut second) = node(&etcd, "job", spec(newest + 1)).await;
    // then it takes part by ours,
    second.runs(2, 2, LIMIT).await.unwrap();
    let record = async |key: String| {
        let kv = store.get(&key).await.unwrap();
        kv.map(|kv| serde_json::from_slice::<Value>(&kv.value).unwrap())
    };
    assert_eq!(record(keys.spec()).await.unwrap()["protocol"], newest);
    // and leads once the other is gone.
    agent.kill();
    second.runs(3, 1, LIMIT).await.unwrap();
    eventually("the later release leads", LIMIT, async || {
        record(keys.leader())
            .await
            .filter(|leader| leader["node"].as_str().is_some_and(|node| node.starts_with("later:")))
    })
    .await;
    assert_eq!(record(keys.spec()).await.unwrap()["protocol"], newest);
    second.finish();
    second.parting(LIMIT).await.unwrap();
}

#[tokio::test]
async fn a_protocol_that_we_do_not_speak_cannot_be_asked_for() {
    let job = Job::on_etcd("1").await.conf("job_protocol", "99");
    let mut agent = job.start("a");
    assert_eq!(agent.exit(LIMIT).await, 2);
    assert!(agent.output().contains(&format!("speaks protocol version {}", Protocols::OURS)), "{}", agent.output());
}

/// Adds fields of every shape to a record, on every level of it.
fn enlarge(value: &mut Value) {
    if let Value::Object(fields) = value {
        fields.values_mut().for_each(enlarge);
        fields.insert("of_a_later_release".into(), json!({"list": [1, null, "x"], "deep": {"er": 1.5}}));
    }
}

#[tokio::test]
async fn what_a_later_release_adds_to_records_is_passed_over() {
    let before = PreviousRelease::build();
    // Without a release before, ours pass over what they do not know among themselves.
    let start = |build: Build, job: &Job, node| {
        before.as_ref().map_or_else(|| job.start(node), |before| build.start(job, before, node))
    };
    for leads in [Build::Now, Build::Before].into_iter().take(1 + usize::from(before.is_some())) {
        let etcd = EtcdServer::start(EtcdOptions::default()).await;
        let job = Job::on(&etcd, "2").prompt().flag("--max-restarts=9");
        let mut agents = vec![start(leads, &job, "a")];
        assert_eq!(job.leader().await, "a");
        agents.push(start(leads.other(), &job, "b"));
        let mut round = job.runs(1, 2).await;
        // Given records with more in them than anybody here knows. Nodes' and leaders' own are theirs, and stay.
        let keys = job.keys();
        let store = etcd.store();
        let larger = async |key: String, or: Value| {
            let kv = store.get(&key).await.unwrap();
            let mut value = kv.map_or(or, |kv| serde_json::from_slice(&kv.value).unwrap());
            enlarge(&mut value);
            store.txn(Txn::of([Op::put(&key, value.to_string())])).await.unwrap();
        };
        larger(keys.spec(), json!({})).await;
        larger(keys.desired(), json!({"max_nodes": 2})).await;
        larger(keys.checkpoint(), json!({"step": 3, "path": "/dev/null", "digest": "crc32c:00000000", "round": 1}))
            .await;
        larger(keys.event(900), json!({"at_ms": 1, "round": 1, "state": "running", "reason": "r"})).await;
        larger(format!("{}later/key", keys.root()), json!({})).await;
        // when workers fail at both, and a node joins again, then all continues
        for node in ["a", "b"] {
            round.of(node).exit(1);
            round = job.runs_within(round.number + 1, 2, AT_ONCE).await;
        }
        agents[1].kill();
        agents[1] = start(leads, &job, "b");
        job.runs_within(round.number + 1, 2, AT_ONCE).await;
        let said: String = agents.iter().map(|agent| agent.output()).collect();
        assert!(!said.contains("not one of ours"), "{said}");
        job.succeeds(&mut agents).await;
    }
}
