//! `elasticctl doctor` on servers that are well, dead, full, foreign or strict. The judgement has table tests of its own,
//! next to it; here it is what real servers answer.

mod certificates;
mod clocks;

use elastic_rendezvous::job::{NodeRecord, Phase, to_json};
use elastic_store::embedded::EmbeddedServer;
use elastic_tests::prelude::*;
use elastic_torchelastic::etcd_v2::{EtcdV2, Only, Request};

/// Longer than a look may take: half a minute.
const WITHIN: Duration = Duration::from_secs(40);

struct Told {
    code: Option<i32>,
    findings: Vec<Value>,
}

impl Told {
    async fn by(args: &[&str]) -> Told {
        let output = output("elasticctl", &[&["doctor", "-o", "json"], args].concat(), WITHIN).await;
        let text = String::from_utf8_lossy(&output.stdout);
        let told: Value = serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text} {output:?}"));
        assert_eq!(told["failed"] == true, output.status.code() == Some(1), "{told:#}");
        Told { code: output.status.code(), findings: told["findings"].as_array().unwrap().clone() }
    }

    #[track_caller]
    fn line(&self, check: &str, of: &str) -> &Value {
        let mut found = self.findings.iter().filter(|line| line["check"] == check && line["of"] == of);
        match (found.next(), found.next()) {
            (Some(line), None) => line,
            other => panic!("{check} of {of}: {other:?} of {:#?}", self.findings),
        }
    }

    #[track_caller]
    fn says(&self, check: &str, of: &str, state: &str, seen: &str) {
        let line = self.line(check, of);
        let text = line["seen"].as_str().unwrap();
        assert!(line["state"] == state && text.contains(seen), "wanted {state} and {seen:?}: {line:#}");
        assert!(state == "ok" || state == "unknown" || line["advice"].is_string(), "{line:#}");
    }

    #[track_caller]
    fn only_fails(&self, check: &str) {
        let failed: Vec<_> = self.findings.iter().filter(|line| line["state"] == "failed").collect();
        assert!(failed.len() == 1 && failed[0]["check"] == check, "{failed:#?}");
    }
}

#[tokio::test]
async fn a_server_that_runs_is_well_and_keeps_nothing_of_the_look() {
    let etcd = EtcdServer::start(EtcdOptions::default()).await;
    let at = etcd.address();
    let told = Told::by(&["--etcd", &at]).await;
    assert_eq!(told.code, Some(0), "{:#?}", told.findings);
    for (check, seen) in [
        ("name", "127.0.0.1"),
        ("port", "accepts"),
        ("answer", "lets us in"),
        ("size", "MiB"),
        ("read", "ms (median)"),
        ("write", "ms (median)"),
        ("v2", "the v2 API is off"),
        ("clock", "within"),
    ] {
        told.says(check, &at, "ok", seen);
    }
    told.says("leader", "the cluster", "ok", &at);
    told.says("alarm", "the cluster", "ok", "none");
    told.says("members", "the cluster", "warning", "1 member");
    let version = etcd.client().await.status().await.unwrap().version().to_owned();
    assert!(told.line("version", &at)["seen"].as_str().unwrap().starts_with(&version), "{:#?}", told.findings);
    let (left, _) = etcd.store().range("/elastic/").await.unwrap();
    assert!(left.is_empty(), "{left:?}");

    // People read the same.
    let printed = output("elasticctl", &["doctor", "--etcd", &at], WITHIN).await;
    let text = String::from_utf8_lossy(&printed.stdout);
    assert!(printed.status.success() && text.starts_with("STATE"), "{text}");
    assert!(text.contains("\n         what to do: ") && text.contains("\n0 failed, "), "{text}");
}

#[tokio::test]
async fn the_v2_api_is_told_where_it_answers() {
    let etcd = EtcdServer::start(EtcdOptions::with_v2()).await;
    let at = etcd.address();
    Told::by(&["--etcd", &at]).await.says("v2", &at, "ok", "the v2 API answers, and holds nothing");
    let client = EtcdV2::connect(etcd.config()).unwrap();
    let key = "/torchelastic/p2p/a".to_owned();
    client.request(Request::Put { key, value: "1".into(), ttl: None, only: Only::Always }).await.unwrap();
    Told::by(&["--etcd", &at]).await.says("v2", &at, "warning", "holds /torchelastic");
}

#[tokio::test]
async fn no_server_listens_or_the_name_is_none() {
    let dead = format!("127.0.0.1:{}", free_port());
    let told = Told::by(&["--etcd", &dead]).await;
    told.says("port", &dead, "failed", "refused");
    told.only_fails("port");

    let nowhere = "no-such-host.invalid:2379";
    let told = Told::by(&["--etcd", nowhere]).await;
    told.says("name", nowhere, "failed", "does not resolve");
    told.only_fails("name");

    let told = Told::by(&["--etcd", "a b"]).await;
    told.says("flags", "elasticctl", "failed", "\"a b\"");
}

#[tokio::test]
async fn of_three_members_the_dead_and_the_frozen_are_named() {
    let mut cluster = EtcdCluster::start().await;
    let at: Vec<_> = cluster.members.iter().map(EtcdServer::address).collect();
    let all = at.join(",");
    let told = Told::by(&["--etcd", &all]).await;
    assert_eq!(told.code, Some(0), "{:#?}", told.findings);
    told.says("members", "the cluster", "ok", "3 members, all named");
    told.says("leader", "the cluster", "ok", &at[cluster.leader(None).await]);
    Told::by(&["--etcd", &at[0]]).await.says("members", "the cluster", "warning", "only 1 of them named");

    cluster.members[1].kill();
    cluster.leader(None).await;
    let told = Told::by(&["--etcd", &all]).await;
    told.says("port", &at[1], "failed", "refused");
    told.only_fails("port");
    told.says("answer", &at[0], "ok", "");

    // Without a quorum the survivor answers, and says why it cannot serve.
    cluster.members[2].pause().await;
    let told = eventually("the survivor has lost its leader", WITHIN, async || {
        let told = Told::by(&["--etcd", &all]).await;
        told.line("answer", &at[0])["seen"].as_str().unwrap().contains("no leader").then_some(told)
    })
    .await;
    told.says("answer", &at[0], "failed", "no leader");
    told.says("answer", &at[2], "failed", "does not");
    cluster.members[2].resume();
}

#[tokio::test]
async fn a_full_server_raises_an_alarm() {
    let quota = 16 * 1024 * 1024;
    let etcd = EtcdServer::start(EtcdOptions::default().args(["--quota-backend-bytes".to_owned(), quota.to_string()]));
    let etcd = etcd.await;
    let store = etcd.store();
    eventually("it is full", WITHIN, async || {
        // What is written over stays in its history.
        let full = store.put(Vec::new(), Op::put("/other", vec![b'x'; 1024 * 1024])).await;
        matches!(full, Err(StoreError::NoSpace { .. })).then_some(())
    })
    .await;
    let told = Told::by(&["--etcd", &etcd.address()]).await;
    let member = etcd.client().await.status().await.unwrap().header().unwrap().member_id();
    told.says("alarm", &format!("member {member:x}"), "failed", "NOSPACE");
    told.says("write", &etcd.address(), "failed", "out of space");
    told.says("read", &etcd.address(), "ok", "ms");
    assert_eq!(told.code, Some(1));
}

#[tokio::test]
async fn tls_that_does_not_fit_says_what_does_not() {
    let certs = Arc::new(Certs::new());
    let options = EtcdOptions { tls: Some(certs.clone()), client_certificates: true, ..Default::default() };
    let etcd = EtcdServer::start(options).await;
    let at = etcd.address();
    let path = |path: &std::path::Path| path.to_str().unwrap().to_owned();
    let (ca, cert, key) = (path(&certs.ca), path(&certs.client.0), path(&certs.client.1));
    let told = Told::by(&["--etcd", &at, "--cacert", &ca, "--cert", &cert, "--key", &key]).await;
    assert_eq!(told.code, Some(0), "{:#?}", told.findings);

    let foreign = Certs::new();
    let wrong = path(&foreign.ca);
    for (args, seen) in [
        (vec!["--cacert", &wrong, "--cert", &cert, "--key", &key], "not signed by the CA"),
        (vec!["--cacert", &ca], "client certificate"),
        (vec![], "TLS"),
    ] {
        let told = Told::by(&[&["--etcd", &at][..], &args].concat()).await;
        told.says("answer", &at, "failed", seen);
        told.says("port", &at, "ok", "accepts");
        told.only_fails("answer");
    }
    let told = Told::by(&["--etcd", &at, "--cacert", "/no/such/file"]).await;
    told.says("flags", "elasticctl", "failed", "/no/such/file");
}

#[tokio::test]
async fn users_see_what_they_may_not_do() {
    let dir = tempfile::tempdir().unwrap();
    let etcd = EtcdServer::start(EtcdOptions::default()).await;
    etcd.enable_auth("root's", "trainer's").await;
    let at = etcd.address();
    let told = Told::by(&["--etcd", &at]).await;
    told.says("answer", &at, "failed", "refuses us");
    told.only_fails("answer");

    let file = |name: &str, password: &str| {
        let path = dir.path().join(name);
        std::fs::write(&path, password).unwrap();
        path.to_str().unwrap().to_owned()
    };
    let (right, wrong) = (file("right", "trainer's"), file("wrong", "another's"));
    let user = ["--etcd", &at, "--user", "trainer", "--password-file"];
    let told = Told::by(&[&user[..], &[&wrong]].concat()).await;
    told.says("answer", &at, "failed", "authentication failed");

    let told = Told::by(&[&user[..], &[&right]].concat()).await;
    assert_eq!(told.code, Some(0), "{:#?}", told.findings);
    told.says("write", &at, "ok", "ms");
    let told = Told::by(&[&user[..], &[&right, "--prefix", "/elsewhere"]].concat()).await;
    told.says("write", &at, "unknown", "may not write");
    assert_eq!(told.code, Some(0), "{:#?}", told.findings);
}

#[tokio::test]
async fn the_embedded_store_is_no_failure() {
    let server = EmbeddedServer::bind("127.0.0.1:0".parse().unwrap(), false).await.unwrap();
    let at = server.address().to_string();
    tokio::spawn(server.serve(std::future::pending()));
    let told = Told::by(&["--etcd", &at]).await;
    assert_eq!(told.code, Some(0), "{:#?}", told.findings);
    told.says("version", &at, "ok", "embedded store");
    told.says("clock", &at, "ok", "within");
    told.says("write", &at, "ok", "ms");
    told.says("alarm", "the cluster", "ok", "none");
}

/// A job of exactly these nodes' number on a store.
struct Jobs {
    store: Arc<dyn Store>,
    job: JobId,
    keys: Keys,
    spec: Spec,
}

impl Jobs {
    fn on(etcd: &EtcdServer, nodes: u32) -> Jobs {
        let job: JobId = "train".parse().unwrap();
        let keys = Keys::new(Keys::DEFAULT_PREFIX, &job);
        Jobs { store: Arc::new(etcd.store()), job, keys, spec: quick_spec(nodes, nodes) }
    }

    async fn node(&self, name: &str) -> InProcessNode {
        start_node(Arc::clone(&self.store), self.keys.clone(), &self.job, self.spec.clone(), name).await.unwrap()
    }

    async fn waits(&self, name: &str) -> NodeRecord {
        eventually(&format!("{name} waits"), WITHIN, async || {
            let (values, _) = self.store.range(&self.keys.nodes()).await.unwrap();
            let records = values.iter().map(|kv| Versioned::<NodeRecord>::parse(kv).unwrap().value);
            records.into_iter().find(|record| record.name == name && record.phase == Phase::Waiting)
        })
        .await
    }
}

#[tokio::test]
async fn a_job_tells_who_leads_who_waits_and_whose_port_is_closed() {
    let etcd = EtcdServer::start(EtcdOptions::default()).await;
    let at = etcd.address();
    let jobs = Jobs::on(&etcd, 2);
    let told = Told::by(&["train", "--etcd", &at]).await;
    told.says("round", "job train", "failed", "there is no job \"train\"");
    told.only_fails("round");

    // One of two nodes is here.
    let mut a = jobs.node("a").await;
    jobs.waits("a").await;
    let told = Told::by(&["train", "--etcd", &at]).await;
    told.says("waits", "node a", "warning", "1 of at least 2 nodes are here");
    assert_eq!(told.code, Some(0), "{:#?}", told.findings);

    // Both are, and a third.
    let mut b = jobs.node("b").await;
    a.runs(1, 2, WITHIN).await.unwrap();
    b.runs(1, 2, WITHIN).await.unwrap();
    let c = jobs.node("c").await;
    let waits = jobs.waits("c").await;
    let told = Told::by(&["train", "--etcd", &at]).await;
    told.says("round", "job train", "ok", "nodes: 2");
    told.says("peer", "the nodes", "ok", "3 of 3 nodes' ports accept");
    told.says("waits", "node c", "ok", "a spare");
    told.says("leader", "job train", "ok", "127.0.0.1:");
    assert_eq!(told.code, Some(0), "{:#?}", told.findings);

    // A fourth one's port refuses.
    let mut gone = NodeRecord { name: "gone".to_owned(), ..waits };
    gone.peer.port = free_port();
    let lease = jobs.store.grant(WITHIN).await.unwrap();
    jobs.store.put(Vec::new(), Op::put_leased(jobs.keys.node(&gone.id()), to_json(&gone), lease)).await.unwrap();
    let told = Told::by(&["train", "--etcd", &at]).await;
    told.says("peer", "node gone", "failed", "refuses");
    told.says("peer", "the nodes", "ok", "3 of 4");
    told.only_fails("peer");
    drop((a, b, c));
}
