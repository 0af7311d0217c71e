//! What stands between a job and its etcd: etcd's own proxy, a balancer, and releases of etcd that follow each other.

use elastic_tests::prelude::*;

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
    // Given a lease a third of which is longer than any other call may take, and workers that no leader keeps alive
    let job = Job::on(&etcd, "2").flag(&format!("--rdzv-endpoint={at}")).conf("lease_ttl", "12");
    let job = job.flag("--on-store-loss=fence").flag("--max-restarts=0");
    let mut agents = job.start_all(["a", "b"]);
    let first = job.runs(1, 2).await;
    // Time, which is what is tested here: more than two leases
    tokio::time::sleep(Duration::from_secs(30)).await;
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

#[tokio::test]
#[ignore = "takes a minute; make test-etcd runs it"]
async fn a_job_outlives_the_upgrade_of_its_etcd_through_all_releases() {
    let releases = EtcdOptions::of(["3.4", "3.5", "3.6", "3.7"]);
    let (_, oldest) = &releases[0];
    let oldest = oldest.clone().args([format!("--snapshot-count={SNAPSHOT_COUNT}")]);
    let mut cluster = EtcdCluster::start_with(oldest).await;
    let flags = ["--rdzv-backend=etcd", &format!("--rdzv-endpoint={}", addresses(&cluster).join(","))];
    let job = Job::met_by(&flags, "3").flag("--max-restarts=0");
    let mut agents = job.start_all(["a", "b", "c"]);
    let first = job.runs(1, 3).await;
    for (release, options) in &releases[1..] {
        makes_snapshots(&cluster).await;
        for at in 0..cluster.members.len() {
            cluster.members[at].upgrade(options.binary.clone().unwrap()).await;
        }
        let version = cluster.members[0].client().await.status().await.unwrap().version().to_owned();
        assert!(version.starts_with(release), "{version}");
        assert!(first.workers.iter().all(Worker::is_alive), "on {release}");
    }
    // then a failure is handled as before: the job has no restarts, so it has not used any
    assert_eq!(job.round().unwrap().number, first.number);
    for agent in &agents {
        assert!(!agent.output().contains("WARN"), "{}", agent.output());
    }
    job.succeeds(&mut agents).await;
}
