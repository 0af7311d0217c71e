//! `elastic-coordinator` and `elasticctl` as users run them: the built binaries, on real etcd and on the embedded
//! store, with nodes of this process, whose workers are simulated.

mod browser;
mod grpc;
mod history;
mod http;
mod pause;
mod retention;
mod top;
mod users;

use elastic_coordinator::operator::Operator;
use elastic_node::Parting;
use elastic_rendezvous::End;
use elastic_rendezvous::job::RoundRecord;
use elastic_tests::counting_store::{CountingStore, KEYS};
use elastic_tests::http::answer as http;
use elastic_tests::prelude::*;

const WITHIN: Duration = Duration::from_secs(20);

/// A job on a store that others can reach.
struct Scene {
    address: String,
    store: Arc<dyn Store>,
    job: JobId,
    keys: Keys,
    spec: Spec,
    _etcd: Option<EtcdServer>,
}

impl Scene {
    async fn on_etcd(min: u32, max: u32) -> Scene {
        let etcd = EtcdServer::start(EtcdOptions::default()).await;
        let mut scene = Scene::at(&etcd.address(), min, max);
        scene._etcd = Some(etcd);
        scene
    }

    fn at(address: &str, min: u32, max: u32) -> Scene {
        let job: JobId = "train".parse().unwrap();
        Scene {
            address: address.to_owned(),
            store: Arc::new(EtcdStore::connect(EtcdConfig::new([address])).unwrap()),
            keys: Keys::new(Keys::DEFAULT_PREFIX, &job),
            job,
            spec: quick_spec(min, max),
            _etcd: None,
        }
    }

    /// A coordinator that serves the embedded store and all jobs over HTTP; where the page is, and the scene.
    async fn embedded(min: u32, max: u32) -> (Process, String, Scene) {
        let store = ["--embedded", "--listen", "127.0.0.1:0", "--peer-listen", "127.0.0.1:0"];
        let args = [&store[..], &["--http", "127.0.0.1:0", "--http-jobs"]].concat();
        // A variable for all programs does not rule the flag out.
        let program = binary("elastic-coordinator");
        let before = ["ELASTIC_ETCD=etcd.invalid:2379", program.to_str().unwrap()];
        let coordinator = Process::start_program(Path::new("/usr/bin/env"), &[&before[..], &args].concat());
        let page = coordinator.says("http://", WITHIN).await;
        let scene = Scene::at(&coordinator.says("address=", WITHIN).await, min, max);
        (coordinator, page, scene)
    }

    async fn node(&self, name: &str) -> InProcessNode {
        start_node(Arc::clone(&self.store), self.keys.clone(), &self.job, self.spec.clone(), name).await.unwrap()
    }

    /// Nodes of these names, all at work in round 1.
    async fn nodes<const N: usize>(&self, names: [&str; N]) -> [InProcessNode; N] {
        let mut nodes = Vec::new();
        for name in names {
            nodes.push(self.node(name).await);
        }
        for node in &mut nodes {
            node.runs(1, N as u32, WITHIN).await.unwrap();
        }
        eventually("all say that they run", WITHIN, async || {
            let (values, _) = self.store.range(&self.keys.nodes()).await.unwrap();
            let running = values.iter().filter(|kv| String::from_utf8_lossy(&kv.value).contains("\"running\""));
            (running.count() == N).then_some(())
        })
        .await;
        nodes.try_into().ok().expect("as many as were asked for")
    }

    fn coordinator(&self) -> Process {
        self.coordinator_with(&[])
    }

    fn coordinator_with(&self, args: &[&str]) -> Process {
        let args = [&["--etcd", &self.address, "--peer-listen", "127.0.0.1:0"], args].concat();
        Process::start("elastic-coordinator", &args)
    }

    fn other(&self, job: &str) -> Scene {
        let mut scene = Scene::at(&self.address, self.spec.min_nodes, self.spec.max_nodes);
        scene.job = job.parse().unwrap();
        scene.keys = Keys::new(Keys::DEFAULT_PREFIX, &scene.job);
        scene
    }

    async fn leader(&self) -> Option<LeaderRecord> {
        let kv = self.store.get(&self.keys.leader()).await.unwrap()?;
        Some(Versioned::parse(&kv).unwrap().value)
    }

    async fn led(&self, what: &str, fits: impl Fn(&LeaderRecord) -> bool) -> LeaderRecord {
        eventually(what, WITHIN, async || self.leader().await.filter(|leader| fits(leader))).await
    }

    async fn round(&self) -> Versioned<RoundRecord> {
        Versioned::parse(&self.store.get(&self.keys.round()).await.unwrap().unwrap()).unwrap()
    }

    /// Runs elasticctl on this scene's store; what it printed, and whether it succeeded.
    async fn ctl(&self, args: &[&str]) -> (bool, String) {
        ctl(&self.address, args).await
    }

    async fn ctl_ok(&self, args: &[&str]) -> String {
        ctl_ok(&self.address, args).await
    }

    async fn ctl_json(&self, args: &[&str]) -> serde_json::Value {
        serde_json::from_str(&self.ctl_ok(&[args, &["-o", "json"]].concat()).await).unwrap()
    }
}

async fn succeed<const N: usize>(nodes: [InProcessNode; N]) {
    nodes.iter().for_each(InProcessNode::finish);
    for node in nodes {
        assert_eq!(node.parting(WITHIN).await.unwrap(), Parting::End(End::Succeeded));
    }
}

#[tokio::test]
async fn a_coordinator_takes_over_leads_and_dies_without_costing_a_round() {
    let scene = Scene::on_etcd(3, 3).await;
    let [mut a, b, mut c] = scene.nodes(["a", "b", "c"]).await;
    let agent = scene.leader().await.expect("an agent leads");
    assert!(!agent.coordinator);
    let before = scene.round().await.modified;

    let mut coordinator = scene.coordinator();
    let leader = scene.led("the coordinator leads", |leader| leader.coordinator).await;
    assert_ne!(leader.node, agent.node);
    assert_eq!(scene.round().await.modified, before, "taking over writes no round");

    // It does lead: it judges a failure, and the members' pulses reach it. Otherwise the round would wait for the
    // blamed peer for ever.
    b.fail(FailureClass::Peer, "connection reset by peer");
    for node in [&mut a, &mut c] {
        let start = node.runs(2, 3, WITHIN).await.unwrap();
        assert_eq!(start.round.restarts, 1);
    }
    assert!(scene.leader().await.is_some_and(|leader| leader.coordinator), "it leads on");
    let before = eventually("round 2 runs", WITHIN, async || {
        Some(scene.round().await).filter(|round| round.value.number == 2 && round.value.group_world_size == 3)
    })
    .await
    .modified;

    coordinator.kill();
    let killed = std::time::Instant::now();
    scene.led("an agent leads again", |leader| !leader.coordinator).await;
    assert!(killed.elapsed() < Duration::from_secs(5), "sooner than its lease of 10 s: {:?}", killed.elapsed());
    assert_eq!(scene.round().await.modified, before, "its death writes no round");
    for node in [&a, &b, &c] {
        assert_eq!(node.place.borrow().as_ref().map(|(start, _)| start.round.number), Some(2));
    }
    succeed([a, b, c]).await;
}

#[tokio::test]
async fn a_coordinator_that_is_stopped_hands_over_and_one_that_stays_takes_the_job() {
    let scene = Scene::on_etcd(1, 2).await;
    let [a, b] = scene.nodes(["a", "b"]).await;
    let before = scene.round().await.modified;
    let mut first = scene.coordinator();
    let leader = scene.led("a coordinator leads", |leader| leader.coordinator).await;
    let second = scene.coordinator();
    second.says("watching ", WITHIN).await;

    assert_eq!(first.terminate(WITHIN).await, 0);
    scene.led("the other replica leads", |now| now.coordinator && now.node != leader.node).await;
    assert_eq!(scene.round().await.modified, before);

    drop(second);
    scene.led("an agent leads", |leader| !leader.coordinator).await;
    assert_eq!(scene.round().await.modified, before);
    succeed([a, b]).await;
}

#[tokio::test]
async fn replicas_that_were_given_one_address_do_not_replace_each_other() {
    let scene = Scene::on_etcd(1, 1).await;
    let nodes = scene.nodes(["a"]).await;
    let first = scene.coordinator();
    let leader = scene.led("a coordinator leads", |leader| leader.coordinator).await;
    let second = scene.coordinator_with(&["--peer-address", &leader.peer.to_string()]);
    let own = second.says(" node=", WITHIN).await;
    second.says(&format!("replica {} takes agents' pulses at {} too", leader.node, leader.peer), WITHIN).await;
    let said = second.output();
    assert!(said.contains(&format!("This one, {own},")) && said.contains("--peer-address"), "{said}");
    assert_eq!(scene.leader().await, Some(leader));
    assert!(!first.output().contains("replaced as leader"), "{}", first.output());
    drop((first, second));
    succeed(nodes).await;
}

#[tokio::test]
async fn a_coordinator_leads_many_jobs_on_one_port() {
    let first = Scene::on_etcd(2, 2).await;
    let second = first.other("eval");
    let _coordinator = first.coordinator();
    let [mut a, b] = first.nodes(["a", "b"]).await;
    let [mut c, d] = second.nodes(["c", "d"]).await;
    let leader = first.led("the coordinator leads one", |leader| leader.coordinator).await;
    assert_eq!(second.led("and the other", |leader| leader.coordinator).await, leader);
    // Each is judged by its own members' pulses.
    b.fail(FailureClass::Peer, "reset");
    d.fail(FailureClass::Peer, "reset");
    a.runs(2, 2, WITHIN).await.unwrap();
    c.runs(2, 2, WITHIN).await.unwrap();
    let (left, right) = tokio::join!(first.ctl_json(&["describe", "train"]), first.ctl_json(&["describe", "eval"]));
    assert_eq!((left["nodes"].as_array().unwrap().len(), right["nodes"].as_array().unwrap().len()), (2, 2));
    succeed([a, b]).await;
    succeed([c, d]).await;
}

#[tokio::test]
async fn a_coordinator_that_agents_cannot_reach_leaves_the_job_to_them() {
    let scene = Scene::on_etcd(2, 2).await;
    let nodes = scene.nodes(["a", "b"]).await;
    let before = scene.round().await.modified;
    // One address refuses; the other accepts and never answers.
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let silent = listener.local_addr().unwrap().to_string();
    let refuses = scene.coordinator_with(&["--peer-address", "127.0.0.1:1"]);
    refuses.says("replaced as leader", WITHIN).await;
    drop(refuses);
    let unheard = scene.coordinator_with(&["--peer-address", &silent]);
    unheard.says("leaving the job to its agents", WITHIN).await;
    scene.led("an agent leads", |leader| !leader.coordinator).await;
    assert_eq!(scene.round().await.modified, before, "nothing of this costs a round");
    succeed(nodes).await;
}

#[tokio::test]
async fn a_coordinator_lets_go_of_a_job_that_has_ended() {
    let scene = Scene::on_etcd(2, 2).await;
    let _coordinator = scene.coordinator();
    let nodes = scene.nodes(["a", "b"]).await;
    scene.led("the coordinator leads", |leader| leader.coordinator).await;
    succeed(nodes).await;
    eventually("no one leads", WITHIN, async || scene.leader().await.is_none().then_some(())).await;
    let (left, _) = scene.store.range(&scene.keys.nodes()).await.unwrap();
    assert!(left.is_empty(), "done nodes leave no keys");
    assert!(scene.ctl_ok(&["jobs"]).await.contains("succeeded"));
}

#[tokio::test]
async fn elasticctl_shows_the_truth_to_people_and_programs() {
    let scene = Scene::on_etcd(2, 3).await;
    assert_eq!(scene.ctl_ok(&["jobs"]).await, "no jobs\n");
    let [a, b] = scene.nodes(["a", "b"]).await;

    let table = scene.ctl_ok(&["jobs"]).await;
    let row: Vec<_> = table.lines().nth(1).unwrap().split_whitespace().collect();
    assert_eq!(&row[..8], ["train", "running", "1", "2", "2:3", "2", "-", "0/3"], "{table}");
    let jobs = scene.ctl_json(&["jobs"]).await;
    assert_eq!((&jobs[0]["job"], &jobs[0]["state"]), (&"train".into(), &"running".into()));
    assert_eq!(jobs[0]["round"]["group_world_size"], 2);

    let text = scene.ctl_ok(&["describe", "train"]).await;
    assert!(text.contains("leader") && text.contains("GROUP RANK"), "{text}");
    let job = scene.ctl_json(&["describe", "train"]).await;
    let mut ranks: Vec<_> =
        job["nodes"].as_array().unwrap().iter().map(|node| node["rank"]["first_rank"].clone()).collect();
    ranks.sort_by_key(|rank| rank.as_u64());
    assert_eq!(ranks, [0, 1]);
    assert_eq!(job["spec"]["min_nodes"], 2);

    b.fail(FailureClass::Own, "ValueError: boom");
    let mut a = a;
    a.runs(2, 2, WITHIN).await.unwrap();
    let events = scene.ctl_ok(&["events", "train"]).await;
    assert!(events.contains("ValueError: boom"), "{events}");
    let lines = scene.ctl_ok(&["events", "train", "-o", "json"]).await;
    let last: serde_json::Value = serde_json::from_str(lines.lines().last().unwrap()).unwrap();
    assert_eq!((&last["round"], &last["state"]), (&2.into(), &"running".into()));

    let follow = Process::start("elasticctl", &["--etcd", &scene.address, "events", "train", "-f"]);
    follow.says("ValueError: ", WITHIN).await;
    b.fail(FailureClass::Own, "KeyError: again");
    follow.says("KeyError: ", WITHIN).await;
    a.runs(3, 2, WITHIN).await.unwrap();
    drop(follow);
    succeed([a, b]).await;
}

#[tokio::test]
async fn describe_says_why_a_node_waits() {
    let scene = Scene::on_etcd(1, 1).await;
    let [a] = scene.nodes(["a"]).await;
    let b = scene.node("b").await;
    let why = "b      a spare: the round has all 1 nodes that it may have";
    eventually("b is a spare", WITHIN, async || scene.ctl_ok(&["describe", "train"]).await.contains(why).then_some(()))
        .await;
    let job = scene.ctl_json(&["describe", "train"]).await;
    let waits: Vec<_> = job["nodes"].as_array().unwrap().iter().map(|node| node["waits"].as_str()).collect();
    assert!(waits.contains(&None) && waits.iter().flatten().all(|why| why.contains("a spare")), "{job}");
    succeed([a, b]).await;
}

#[tokio::test]
async fn elasticctl_says_what_is_wrong() {
    let scene = Scene::on_etcd(1, 1).await;
    let nodes = scene.nodes(["a"]).await;
    let long = "n".repeat(300);
    for (args, wanted) in [
        (&["describe", "trian"][..], "there is no job \"trian\" under /elastic: `elasticctl jobs` lists those"),
        (&["describe", "a/b"], "there is no job"),
        (&["drain", "train", "z"], "job train has no node \"z\": there are a"),
        (&["exclude", "train", "a\tb"], "no node has a name like \"a\\tb\""),
        (&["drain", "train", &long], "no node has a name like \"nnn"),
        (&["undrain", "train", "a"], "none is drained"),
        (&["set", "train", "--min", "5"], "at least 5 and at most 1"),
        (&["drop-checkpoint", "train"], "job train is running: its resume point can be dropped once it has ended"),
    ] {
        let (ok, text) = scene.ctl(args).await;
        assert!(!ok && text.contains(wanted), "{args:?}: {text}");
    }
    let counting = Arc::new(CountingStore::new(Arc::clone(&scene.store)));
    assert!(Operator::new(counting.clone(), Keys::DEFAULT_PREFIX).job("trian").await.is_err());
    assert_eq!(counting.take(), BTreeMap::from([("read", 1), (KEYS, 0)]), "other jobs are not read");
    succeed(nodes).await;
    let (ok, text) = scene.ctl(&["close", "train"]).await;
    assert!(!ok && text.contains("has succeeded already"), "{text}");
    let nowhere = output("elasticctl", &["--etcd", "127.0.0.1:1", "jobs"], WITHIN).await;
    let text = String::from_utf8_lossy(&nowhere.stderr);
    assert!(!nowhere.status.success() && text.contains("127.0.0.1:1") && text.contains("cannot be reached"), "{text}");
}

#[tokio::test]
async fn users_passwords_and_certificates_are_taken_from_flags_and_files() {
    let dir = tempfile::tempdir().unwrap();
    let certs = Arc::new(Certs::new());
    let etcd =
        EtcdServer::start(EtcdOptions { tls: Some(certs.clone()), client_certificates: true, ..Default::default() });
    let etcd = etcd.await;
    etcd.enable_auth("root's", "trainer's").await;
    let password = dir.path().join("password");
    std::fs::write(&password, "trainer's\n").unwrap();
    let path = |path: &std::path::Path| path.to_str().unwrap().to_owned();
    let (ca, cert, key) = (path(&certs.ca), path(&certs.client.0), path(&certs.client.1));
    let (address, password) = (etcd.address(), path(&password));
    let tls = ["--etcd", &address, "--cacert", &ca, "--cert", &cert, "--key", &key];

    let known = [&["jobs", "--user", "trainer", "--password-file", &password], &tls[..]].concat();
    let told = output("elasticctl", &known, WITHIN).await;
    assert!(told.status.success(), "{}", String::from_utf8_lossy(&told.stderr));
    for (args, wanted) in [
        ([&["jobs"], &tls[..]].concat(), "refuses us"),
        ([&["jobs", "--user", "trainer"], &tls[..]].concat(), "ELASTIC_ETCD_PASSWORD holds no password"),
        (vec!["jobs", "--etcd", &address], "TLS"),
    ] {
        let told = output("elasticctl", &args, WITHIN).await;
        let text = String::from_utf8_lossy(&told.stderr);
        assert!(!told.status.success() && text.contains(wanted), "{args:?}: {text}");
    }
}

#[tokio::test]
async fn a_drained_node_leaves_stays_away_and_may_come_back() {
    let scene = Scene::on_etcd(1, 3).await;
    let [mut a, b, mut c] = scene.nodes(["a", "b", "c"]).await;
    scene.ctl_ok(&["drain", "train", "b"]).await;
    assert_eq!(a.runs(2, 2, WITHIN).await.unwrap().round.restarts, 0, "a drain costs no restart");
    c.runs(2, 2, WITHIN).await.unwrap();
    assert_eq!(b.parting(WITHIN).await.unwrap(), Parting::End(End::Drained));

    let again = scene.node("b").await;
    assert_eq!(again.parting(WITHIN).await.unwrap(), Parting::End(End::Drained), "it stays away");
    assert!(scene.ctl_ok(&["describe", "train"]).await.contains("drained     b"));
    assert_eq!(scene.round().await.value.number, 2, "no one is disturbed");

    scene.ctl_ok(&["undrain", "train", "b"]).await;
    let mut b = scene.node("b").await;
    b.runs(3, 3, WITHIN).await.unwrap();
    a.runs(3, 3, WITHIN).await.unwrap();
    c.runs(3, 3, WITHIN).await.unwrap();
    succeed([a, b, c]).await;
}

#[tokio::test]
async fn the_leader_itself_can_be_drained() {
    let scene = Scene::on_etcd(1, 2).await;
    let [a, b] = scene.nodes(["a", "b"]).await;
    let leads = scene.leader().await.unwrap().node;
    let (leader, mut other) = if leads.name() == "a" { (a, b) } else { (b, a) };
    scene.ctl_ok(&["drain", "train", leads.name()]).await;
    other.runs(2, 1, WITHIN).await.unwrap();
    assert_eq!(leader.parting(WITHIN).await.unwrap(), Parting::End(End::Drained));
    succeed([other]).await;
}

#[tokio::test]
async fn an_operator_resizes_and_closes_a_job() {
    let scene = Scene::on_etcd(1, 3).await;
    let [a, b, c] = scene.nodes(["a", "b", "c"]).await;
    scene.ctl_ok(&["set", "train", "--max", "2"]).await;
    eventually("two nodes run", WITHIN, async || {
        let round = scene.round().await.value;
        // The third node may have come after the last call, in a round of its own.
        (round.number >= 2 && round.group_world_size == 2).then_some(())
    })
    .await;
    scene.ctl_ok(&["close", "train"]).await;
    for node in [a, b, c] {
        assert_eq!(node.parting(WITHIN).await.unwrap(), Parting::End(End::Closed));
    }
}

#[tokio::test]
async fn a_coordinator_serves_the_embedded_store_and_its_own_state() {
    let (_coordinator, page, scene) = Scene::embedded(2, 2).await;
    assert!(http(&page, "/live").await.starts_with("HTTP/1.1 200"));
    eventually("it is ready", WITHIN, async || http(&page, "/ready").await.starts_with("HTTP/1.1 200").then_some(()))
        .await;

    let [mut a, b] = scene.nodes(["a", "b"]).await;
    scene.led("the coordinator leads", |leader| leader.coordinator).await;
    b.fail(FailureClass::Own, "boom");
    a.runs(2, 2, WITHIN).await.unwrap();
    let jobs = scene.ctl_ok(&["jobs"]).await;
    assert!(jobs.contains("train") && jobs.contains("coordinator 127.0.0.1"), "{jobs}");
    let metrics = eventually("metrics tell of round 2", WITHIN, async || {
        Some(http(&page, "/metrics").await).filter(|text| text.contains("elastic_rounds_formed_total 2"))
    })
    .await;
    for line in [
        "elastic_jobs{state=\"running\"} 1",
        "elastic_job_round{job=\"train\"} 2",
        "elastic_job_restarts{job=\"train\"} 1",
        "elastic_leading 1",
        "elastic_leader_terms_total{by=\"coordinator\"} 1",
        "elastic_round_forming_seconds_count 2",
        "elastic_store_requests_total{call=\"write\",outcome=\"ok\"}",
    ] {
        assert!(metrics.contains(line), "{line} is missing:\n{metrics}");
    }
    succeed([a, b]).await;
}

#[tokio::test]
async fn a_coordinator_without_a_store_is_alive_but_not_ready() {
    let args = ["--etcd", "127.0.0.1:1", "--peer-listen", "127.0.0.1:0", "--http", "127.0.0.1:0"];
    let mut coordinator = Process::start("elastic-coordinator", &args);
    let page = coordinator.says("http://", WITHIN).await;
    assert!(http(&page, "/live").await.starts_with("HTTP/1.1 200"));
    let answer = http(&page, "/ready").await;
    assert!(answer.starts_with("HTTP/1.1 503") && answer.contains("is the store there?"), "{answer}");
    assert_eq!(coordinator.terminate(WITHIN).await, 0);
}
