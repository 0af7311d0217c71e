//! Who speaks in the name of a node on the port for peers, without the job's secret.

use std::sync::atomic::{AtomicU64, Ordering};

use elastic_proto::pulse::pulse_client::PulseClient;
use elastic_proto::pulse::{Beat, MemberMessage};
use elastic_tests::prelude::*;
use futures::StreamExt;
use futures::future::join_all;
use tokio::task::JoinHandle;

use crate::hostile::floods::hello;

/// How often each forger beats: much more often than a node.
const BEAT: Duration = Duration::from_millis(20);

/// Forgers of one node's pulses, at work until this is dropped.
struct Forgers {
    turned_away: Arc<AtomicU64>,
    heard: Arc<AtomicU64>,
    task: JoinHandle<()>,
}

impl Forgers {
    /// One that shows nothing, and one that shows what is no proof.
    fn start(peer: String, node: String) -> Forgers {
        let (turned_away, heard) = (Arc::<AtomicU64>::default(), Arc::<AtomicU64>::default());
        let counts = (Arc::clone(&turned_away), Arc::clone(&heard));
        let task = tokio::spawn(async move {
            join_all([false, true].map(|shows| forge(&peer, &node, shows, &counts.0, &counts.1))).await;
        });
        Forgers { turned_away, heard, task }
    }

    async fn are_turned_away(&self, times: u64) {
        let enough = self.turned_away.load(Ordering::Relaxed) + times;
        let ended = async || (self.turned_away.load(Ordering::Relaxed) >= enough).then_some(());
        eventually("forged streams are ended", LIMIT, ended).await;
    }
}

impl Drop for Forgers {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Opens one stream after the other, and beats on each for as long as it lasts.
async fn forge(peer: &str, node: &str, shows: bool, turned_away: &AtomicU64, heard: &AtomicU64) {
    let mut client = PulseClient::connect(format!("http://{peer}")).await.unwrap();
    loop {
        let mut first = hello(node);
        let mut proof = MemberMessage::default();
        if shows {
            first.hello.as_mut().unwrap().nonce = vec![1; 32];
            proof.proof = vec![2; 32];
        }
        let beats = futures::stream::unfold(1, |seq| async move {
            tokio::time::sleep(BEAT).await;
            Some((MemberMessage { beat: Some(Beat { seq, ..Beat::default() }), ..MemberMessage::default() }, seq + 1))
        });
        let words = futures::stream::iter([first, proof]).chain(beats);
        if let Ok(answers) = client.watch(words).await {
            let mut answers = answers.into_inner();
            while let Ok(Some(word)) = answers.message().await {
                if word.answer.is_some() || word.probe.is_some() || !word.proof.is_empty() {
                    heard.fetch_add(1, Ordering::Relaxed);
                }
            }
        }
        turned_away.fetch_add(1, Ordering::Relaxed);
        tokio::time::sleep(BEAT).await;
    }
}

/// A node whose pulses are forged is a member like any other while it lives, and is lost when it falls silent.
async fn no_one_speaks_for_a_node_without_the_secret(coordinator: bool) {
    let job = Job::on_etcd("1:2").await.conf("lease_ttl", "2").conf("margin", "300ms");
    let address = job.etcd().address();
    let leads = coordinator.then(|| {
        let flags = ["--etcd", &address, "--peer-listen", "127.0.0.1:0", "--lease-ttl", "2"];
        Process::start("elastic-coordinator", &flags)
    });
    let mut stays = job.start("a");
    job.runs(1, 1).await;
    let silent = job.start("b");
    let round = job.runs(1, 2).await;
    let leader = eventually("it is led", LIMIT, async || {
        job.record("leader").await.filter(|leader| leader["coordinator"].as_bool().unwrap_or(false) == coordinator)
    })
    .await;
    let node = job.record("nodes/b").await.unwrap();
    let peer = format!("{}:{}", leader["peer"]["host"].as_str().unwrap(), leader["peer"]["port"]);
    let id = format!("b:{}", node["incarnation"].as_str().unwrap());

    // Given forgers, the node is what it was
    let forgers = Forgers::start(peer, id.clone());
    forgers.are_turned_away(20).await;
    let still = job.record("round").await.unwrap();
    assert_eq!((&still["number"], &still["state"]), (&round.number.into(), &"running".into()));
    assert_eq!(job.record("nodes/b").await.unwrap()["phase"], "running");
    // and when it falls silent, its lease over, they do not keep it
    silent.signal(Signal::STOP);
    let alone = job.runs(round.number + 1, 1).await;
    assert_eq!(alone.nodes(), ["a"]);
    // nor do they hear a word.
    assert_eq!(forgers.heard.load(Ordering::Relaxed), 0);
    let log = leads.as_ref().map_or_else(|| stays.output(), Process::output);
    let told: Vec<_> =
        log.lines().filter(|line| line.contains("does not prove that it knows the job's secret")).collect();
    assert!(told.len() == 1 && told[0].contains(&id), "{told:?}");
    job.succeeds([&mut stays]).await;
}

#[tokio::test]
async fn no_one_speaks_for_a_node_without_the_secret_to_an_agent_or_to_a_coordinator() {
    tokio::join!(no_one_speaks_for_a_node_without_the_secret(false), no_one_speaks_for_a_node_without_the_secret(true));
}
