//! What is between a job and its etcd: etcd's own proxy, a balancer, and releases of etcd that follow each other.

use elastic_tests::prelude::*;

use crate::agents::live::undisturbed;

/// etcd's own proxy in front of a server, and where it listens.
async fn proxied(etcd: &EtcdServer) -> (Process, String) {
    let at = format!("127.0.0.1:{}", free_port());
    let (members, listen) = (format!("--endpoints={}", etcd.address()), format!("--listen-addr={at}"));
    let args = ["grpc-proxy", "start", &members, &listen, &format!("--advertise-client-url={at}")];
    let proxy = Process::start_program(usual_etcd(), &args);
    eventually("the proxy listens", LIMIT, async || TcpStream::connect(&at).ok()).await;
    (proxy, at)
}

/// What the proxy answers by itself names no cluster.
#[tokio::test]
async fn etcd_may_be_behind_its_own_proxy() {
    let etcd = EtcdServer::start(EtcdOptions::default()).await;
    let (_proxy, at) = proxied(&etcd).await;
    let job = Job::on(&etcd, "1:2").flag(&format!("--rdzv-endpoint={at}")).flag("--max-restarts=1");
    // Given a job whose agents meet through the proxy, when a worker fails, and an agent dies
    let mut agents = job.start_all(["a", "b"]);
    let round = job.runs(1, 2).await;
    round.of("b").exit(1);
    let round = job.runs(round.number + 1, 2).await;
    agents[1].kill();
    let round = job.runs(round.number + 1, 1).await;
    // then the job continues as on etcd itself
    assert_eq!(round.restarts(), 1);
    job.succeeds(&mut agents[..1]).await;
}

/// The proxy answers a renewal when it makes its own next, three in each TTL.
#[tokio::test]
async fn renewals_that_etcds_proxy_answers_late_keep_a_node() {
    let etcd = EtcdServer::start(EtcdOptions::default()).await;
    let (_proxy, at) = proxied(&etcd).await;
    // Given a lease whose third is longer than any other call may take, and workers that no leader keeps alive
    let job = Job::on(&etcd, "2").flag(&format!("--rdzv-endpoint={at}")).conf("lease_ttl", "10");
    let job = job.flag("--on-store-loss=fence").flag("--max-restarts=0");
    let mut agents = job.start_all(["a", "b"]);
    let first = job.runs(1, 2).await;
    // Time, which is what is tested here: more than two leases
    tokio::time::sleep(Duration::from_secs(21)).await;
    assert!(first.workers.iter().all(Worker::is_alive));
    for agent in &agents {
        let log = agent.output();
        assert!(!log.contains("trying again") && !log.contains("WARN"), "{log}");
    }
    job.succeeds(&mut agents).await;
    assert_eq!(job.round().unwrap().number, first.number);
}

/// A cluster with users, and the file with the password of the one for jobs.
async fn with_users() -> (EtcdCluster, tempfile::NamedTempFile) {
    let cluster = EtcdCluster::start_with(EtcdOptions::default().args(["--bcrypt-cost=4"])).await;
    cluster.enable_auth("root-secret", "secret").await;
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), "secret").unwrap();
    (cluster, file)
}

fn addresses(cluster: &EtcdCluster) -> Vec<String> {
    cluster.members.iter().map(EtcdServer::address).collect()
}

#[tokio::test]
#[ignore = "takes a minute; make test-etcd runs it"]
async fn a_balancer_in_front_of_etcd_costs_no_restart_and_no_node() {
    let (cluster, password) = with_users().await;
    // Given a balancer that cuts idle connections after 5 s and all every 20 s
    let balancer = Balancer::start(addresses(&cluster), Duration::from_secs(5), Duration::from_secs(20)).await;
    let flags = ["--rdzv-backend=etcd", &format!("--rdzv-endpoint={}", balancer.address()), "--max-restarts=0"];
    let password_file = password.path().display().to_string();
    let job = Job::met_by(&flags, "1:3").conf("user", "trainer").conf("password_file", &password_file);
    let mut agents = job.start_all(["a", "b", "c"]);
    let first = job.runs(1, 3).await;
    // Time, which is what is tested here: two cuts of all
    tokio::time::sleep(Duration::from_secs(50)).await;
    // then the round is the same, and so are its workers
    assert!(balancer.connections() >= 9, "{}", balancer.connections());
    assert!(first.workers.iter().all(Worker::is_alive));
    first.exit(0);
    assert_eq!(exits(&mut agents).await, [0; 3]);
    assert_eq!(job.round().unwrap().number, first.number);
}

#[tokio::test]
async fn a_client_that_is_moved_between_its_login_and_its_use_is_not_refused() {
    let (cluster, password) = with_users().await;
    let balancer = Balancer::start(addresses(&cluster), LIMIT, Duration::from_millis(70)).await;
    let user = EtcdUser { name: "trainer".into(), password: Secret::from_file(password.path()).unwrap() };
    let store = EtcdStore::connect(EtcdConfig { user: Some(user), ..EtcdConfig::new([balancer.address()]) }).unwrap();
    let mut written = 0;
    while written < 100 || balancer.connections() < 15 {
        match store.txn(Txn::of([Op::put("/elastic/a", written.to_string())])).await {
            Ok(_) => written += 1,
            Err(error) => assert!(error.is_transient(), "{error}"),
        }
    }
}

/// Writes until each member has made a snapshot: what the release before left in their logs is not read any more.
async fn makes_snapshots(cluster: &EtcdCluster) {
    let store = EtcdStore::connect(cluster.config()).unwrap();
    for n in 0..4 * SNAPSHOT_COUNT {
        store.put(Vec::new(), Op::put("/else", n.to_string())).await.unwrap();
    }
}

const SNAPSHOT_COUNT: usize = 50;

/// The releases that follow each other: all, and from 3.6 back to 3.5 and up again.
fn path() -> Vec<(&'static str, EtcdOptions)> {
    let mut path = EtcdOptions::of(RELEASES);
    let at = |wanted: &str| path.iter().position(|(release, _)| *release == wanted);
    if let (Some(older), Some(newer)) = (at("3.5"), at("3.6")) {
        let again = [path[older].clone(), path[newer].clone()];
        path.splice(newer + 1..newer + 1, again);
    }
    path
}

#[tokio::test]
#[ignore = "takes minutes; make test-etcd runs it"]
async fn a_training_outlives_every_release_of_its_etcd_and_a_downgrade() {
    let path = path();
    let oldest = path[0].1.clone().args([format!("--snapshot-count={SNAPSHOT_COUNT}")]);
    let mut cluster = EtcdCluster::start_with(oldest).await;
    let flags = ["--rdzv-backend=etcd", &format!("--rdzv-endpoint={}", addresses(&cluster).join(","))];
    let job = Job::met_by(&flags, "3").flag("--max-restarts=0");
    // Given a training of three nodes without restarts
    let model = "--hidden=512,256";
    let job = job.trainer(["digits", model, "--epochs=100000", "--snapshot-every=0"]);
    let agents = job.start_all(["a", "b", "c"]);
    let of = |kind: &str| job.lines("trace").into_iter().filter(|line| line["event"] == kind).collect::<Vec<_>>();
    let steps = || of("step").last().map_or(0, |line| line["step"].as_u64().unwrap());
    eventually("a step", LIMIT, async || (steps() > 0).then_some(())).await;

    // when its etcd is replaced member by member, again and again
    let mut before = path[0].0;
    for (release, options) in &path[1..] {
        makes_snapshots(&cluster).await;
        if *release < before {
            cluster.allow_downgrade(release).await;
        }
        for at in 0..cluster.members.len() {
            cluster.members[at].upgrade(options.binary.clone().unwrap()).await;
        }
        let version = cluster.members[0].client().await.status().await.unwrap().version().to_owned();
        assert!(version.starts_with(release), "{version}");
        let done = steps();
        eventually("further steps", LIMIT, async || (steps() > done).then_some(())).await;
        eprintln!("on {version}: step {done}");
        before = release;
    }

    // then it has been one round without a warning
    let begun = of("begin");
    assert_eq!(begun.len(), 1, "{begun:?}");
    for agent in &agents {
        assert!(!agent.output().contains("WARN"), "{}", agent.output());
    }
    drop(agents);
    // and each step has the bits of a training that nothing disturbs
    let scratch = tempfile::tempdir().unwrap();
    let epochs = format!("--epochs={}", steps() / STEPS_OF_AN_EPOCH + 1);
    undisturbed(&[model, &epochs], &scratch.path().join("trace")).begins_as(&of("step"));
}

/// Of the digits, with the default batch.
const STEPS_OF_AN_EPOCH: u64 = 23;
