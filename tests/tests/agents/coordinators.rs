//! A job that trains on three members of etcd with TLS and users, led by two replicas of the coordinator. Each
//! is killed at each phase of a round; and then both, and etcd's leader.

use elastic_store::Event;
use elastic_tests::prelude::*;

use super::live::{self, number, undisturbed, workers};

const LONG: Duration = Duration::from_secs(60);
const NODES: [&str; 4] = ["a", "b", "c", "d"];
const TRAINING: [&str; 2] = ["--epochs=600", "--hidden=64"];

/// The moment of a round's end at which the leading replica is killed, by the record that is written then.
#[derive(Debug, Clone, Copy)]
enum Moment {
    /// A node has said that its worker failed.
    Failed,
    Forming,
    Sealed,
}

impl Moment {
    /// Whether the record of a key says that it is now, where this round was before.
    fn is_now(self, keys: &Keys, event: &Event, before: u64) -> bool {
        let Event::Put(kv) = event else { return false };
        let Ok(record) = serde_json::from_slice::<Value>(&kv.value) else { return false };
        let round = |state: &str| kv.key == keys.round() && record["state"] == state && record["number"] == before + 1;
        match self {
            Moment::Failed => kv.key.starts_with(&keys.nodes()) && record["phase"] == "failed",
            Moment::Forming => round("forming"),
            Moment::Sealed => round("running"),
        }
    }
}

struct Site {
    // Processes end before the cluster that they use.
    replicas: [Option<(String, Process)>; 2],
    agents: Vec<Agent>,
    job: Job,
    store: EtcdStore,
    keys: Keys,
    cluster: EtcdCluster,
    certs: Arc<Certs>,
}

impl Site {
    async fn start() -> Site {
        let certs = Arc::new(Certs::new());
        let options = EtcdOptions { tls: Some(Arc::clone(&certs)), client_certificates: true, ..Default::default() };
        let cluster = EtcdCluster::start_with(options).await;
        cluster.enable_auth("root's", "trainer's").await;

        let endpoint = format!("--rdzv-endpoint={}", addresses(&cluster));
        let job = Job::met_by(&["--rdzv-backend=etcd", &endpoint], "2:4")
            .flag("--max-restarts=100")
            .flag("--exclude-after=0");
        let password = job.path("password");
        std::fs::write(&password, "trainer's\n").unwrap();
        let mut config = cluster.config();
        let tls = EtcdTls { ca: certs.ca.clone(), client: Some(certs.client.clone()), server_name: None };
        config.tls = Some(tls);
        config.user = Some(EtcdUser { name: "trainer".into(), password: Secret::from_file(&password).unwrap() });
        let text = |path: &std::path::Path| path.to_str().unwrap().to_owned();
        let job = [
            ("protocol", "https".to_owned()),
            ("cacert", text(&certs.ca)),
            ("cert", text(&certs.client.0)),
            ("key", text(&certs.client.1)),
            ("user", "trainer".to_owned()),
            ("password_file", text(&password)),
            ("last_call_timeout", "1s".to_owned()),
        ]
        .iter()
        .fold(job, |job, (key, value)| job.conf(key, value))
        .trainer([&["digits"][..], &TRAINING].concat());

        let keys = job.keys();
        let store = EtcdStore::connect(config).unwrap();
        let mut site = Site { replicas: [None, None], agents: Vec::new(), job, store, keys, cluster, certs };
        for replica in 0..2 {
            site.start_replica(replica).await;
        }
        site.agents.extend(NODES.map(|node| site.job.start(node)));
        site
    }

    async fn start_replica(&mut self, replica: usize) {
        let (etcd, password) = (addresses(&self.cluster), self.job.path("password").display().to_string());
        let [ca, cert, key] =
            [&self.certs.ca, &self.certs.client.0, &self.certs.client.1].map(|path| path.display().to_string());
        let args = ["--etcd", &etcd, "--cacert", &ca, "--cert", &cert, "--key", &key, "--user", "trainer"];
        let more = ["--password-file", &password, "--peer-listen", "127.0.0.1:0", "--lease-ttl", "2"];
        let running = Process::start("elastic-coordinator", &[&args[..], &more].concat());
        let peer = running.says("pulses at ", LONG).await;
        self.replicas[replica] = Some((peer, running));
    }

    async fn leader(&self) -> Option<LeaderRecord> {
        let kv = self.store.get(&self.keys.leader()).await.ok()??;
        Versioned::parse(&kv).ok().map(|leader| leader.value)
    }

    async fn leading(&self) -> usize {
        eventually("a replica leads", LONG, async || {
            let peer = self.leader().await?.peer.to_string();
            self.replicas.iter().position(|replica| replica.as_ref().is_some_and(|(own, _)| *own == peer))
        })
        .await
    }

    async fn step(&self, what: &str, fits: impl Fn(&Value) -> bool) -> Value {
        live::step(&self.job.path("trace"), what, LONG, fits).await
    }

    /// All four ranks train: the round, and the step.
    async fn is_whole(&self) -> (u64, u64) {
        let line = self.step("all four ranks train", |line| line["world_size"] == 4).await;
        (number(&line, "round"), number(&line, "step"))
    }

    async fn continues(&self, after: u64) {
        self.step("training continues", |line| number(line, "step") > after + 20).await;
    }

    fn kill_worker(&self, node: &str) {
        send(workers(&self.job)[&(node.to_owned(), 0)], Signal::KILL);
    }

    /// Kills a worker, and the leading replica at this moment of what follows.
    async fn strike(&mut self, moment: Moment, node: &str) {
        let leading = self.leading().await;
        let (before, _) = self.is_whole().await;
        let revision = self.store.range(self.keys.root()).await.unwrap().1;
        let scope = Scope::Prefix(self.keys.root().to_owned());
        let mut watcher = self.store.watch(scope, revision.next()).await.unwrap();
        self.kill_worker(node);
        let is_now = |update: WatchUpdate| match update {
            WatchUpdate::Events(events) => events.iter().any(|event| moment.is_now(&self.keys, event, before)),
            other => panic!("{other:?}"),
        };
        let seen = async { while !is_now(watcher.recv().await.expect("the watch continues")) {} };
        tokio::time::timeout(LONG, seen).await.unwrap_or_else(|_| panic!("{moment:?} never came"));
        drop(self.replicas[leading].take());
        let next = self.step("training continues", |line| number(line, "round") > before).await;
        eprintln!("{moment:?}: replica {leading} was killed; step {} came in round {}", next["step"], next["round"]);
        self.start_replica(leading).await;
    }
}

fn addresses(cluster: &EtcdCluster) -> String {
    let all: Vec<String> = cluster.members.iter().map(|member| member.address()).collect();
    all.join(",")
}

#[tokio::test]
async fn training_lives_through_the_deaths_of_replicas_and_of_etcds_leader() {
    let folder = tempfile::tempdir().unwrap();
    let undisturbed = undisturbed(&TRAINING, &folder.path().join("trace"));
    let mut site = Site::start().await;

    // The leading replica, while the round runs: it costs no round.
    let leading = site.leading().await;
    let (round, step) = site.is_whole().await;
    drop(site.replicas[leading].take());
    site.continues(step).await;
    let other = site.leading().await;
    assert_ne!(other, leading);
    assert_eq!(site.is_whole().await.0, round, "a leader's death costs a round");
    site.start_replica(leading).await;

    for (moment, node) in [(Moment::Failed, "b"), (Moment::Forming, "c"), (Moment::Sealed, "d")] {
        site.strike(moment, node).await;
    }

    // Both: then an agent leads.
    let (round, _) = site.is_whole().await;
    site.replicas = [None, None];
    site.kill_worker("b");
    site.step("agents form a round", |line| number(line, "round") > round).await;
    assert!(site.leader().await.is_some_and(|leader| !leader.coordinator));
    for replica in 0..2 {
        site.start_replica(replica).await;
    }

    // etcd's leader, and a worker while the others elect one.
    site.leading().await;
    let (round, step) = site.is_whole().await;
    let member = site.cluster.leader(Some(("root", "root's"))).await;
    site.cluster.members[member].kill();
    site.kill_worker("c");
    site.step("a round forms on two members", |line| number(line, "round") > round).await;
    site.continues(step).await;
    site.cluster.members[member].restart().await;
    let last = number(&site.step("a step", |_| true).await, "step");
    eprintln!("etcd's leader was killed; {last} of {} steps are done", undisturbed.steps());

    for agent in &mut site.agents {
        assert_eq!(agent.exit(2 * LONG).await, 0);
    }
    let printed: String = site.agents.iter().map(Agent::output).collect();
    undisturbed.is_same(&json_lines(&site.job.path("trace")), &printed);
}
