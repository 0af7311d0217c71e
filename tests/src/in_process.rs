//! Many nodes in one process: the real driver and state machines, with simulated workers. The supervision of real
//! worker processes is tested on the built agent.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use elastic_node::{Command, GroupReport, Node, Parting, Status};
use elastic_rendezvous::job::{
    Endpoint, Failure, FailureClass, JobId, JobSecret, Keys, NodeRecord, Release, Spec, Timings, samples,
};
use elastic_rendezvous::time::Time;
use elastic_rendezvous::{MemberSetup, Outcome, Start};
use elastic_store::Store;
use elastic_store::listener::listen;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;

/// A spec with short times, so that tests need not wait.
pub fn quick_spec(min_nodes: u32, max_nodes: u32) -> Spec {
    Spec {
        release: Some(Release::ours()),
        max_restarts: 3,
        exclude_after: 3,
        timings: Timings {
            lease_ttl: Duration::from_secs(2),
            last_call: Duration::from_millis(100),
            join_timeout: Duration::from_secs(20),
            start_timeout: Duration::from_secs(5),
            stop_grace: Duration::from_secs(2),
            drain_grace: Duration::from_secs(2),
            margin: Duration::from_millis(200),
            takeover_delay: Duration::from_secs(5),
            min_round_time: Duration::from_millis(100),
        },
        ..samples::spec(min_nodes, max_nodes)
    }
}

/// One node: its driver in a task, its workers simulated.
pub struct InProcessNode {
    /// Its name.
    pub name: String,
    /// Its state.
    pub status: watch::Receiver<Status>,
    /// The place its workers run in; `None` while there are none.
    pub place: watch::Receiver<Option<(Start, Time)>>,
    reports: mpsc::UnboundedSender<GroupReport>,
    task: JoinHandle<Parting>,
}

/// Starts a node. Its workers start at once, stop at once, and end only when told to.
pub async fn start_node(
    store: Arc<dyn Store>,
    keys: Keys,
    job: &JobId,
    spec: Spec,
    name: &str,
) -> Result<InProcessNode> {
    let listener = listen(([127, 0, 0, 1], 0).into()).context("bind the peer port")?;
    let peer = Endpoint { host: "127.0.0.1".into(), port: listener.local_addr()?.port() };
    let node = Node::new(store, job.clone(), listener, None, None);
    let status = node.status();
    let (reports, mut inbox) = mpsc::unbounded_channel();
    let (commands, mut orders) = mpsc::unbounded_channel();
    let (place_tx, place) = watch::channel(None);
    let worker_reports = reports.clone();
    tokio::spawn(async move {
        while let Some(command) = orders.recv().await {
            match command {
                Command::Start(start) => {
                    let round = start.round.number;
                    place_tx.send_replace(Some((*start, elastic_store::clock::now())));
                    let _ = worker_reports.send(GroupReport::Started(round));
                }
                Command::Quiesce(_) | Command::WarmUp { .. } | Command::Stop(_) | Command::Kill => {
                    place_tx.send_replace(None);
                    let _ = worker_reports.send(GroupReport::Stopped { master: None });
                }
                Command::Fence(_) | Command::Leaving(_) | Command::Forming(..) | Command::Conclude(..) => {}
                Command::Say(line) => {
                    if std::env::var_os("ELASTIC_SHOW").is_some() {
                        eprintln!("{:?} {line}", elastic_store::clock::now());
                    }
                }
            }
        }
    });
    let record_name = name.to_owned();
    let task = tokio::spawn(async move {
        let mut incarnation = 0;
        loop {
            incarnation += 1;
            let record = NodeRecord {
                incarnation: format!("{}-{incarnation}", peer.port),
                machine: format!("machine-{record_name}"),
                boot: "boot".into(),
                peer: peer.clone(),
                master: Some(Endpoint { host: "127.0.0.1".into(), port: peer.port }),
                release: Some(Release::ours()),
                ..samples::node(&record_name)
            };
            let seed = u64::from(peer.port) << 8 | incarnation;
            let (spec, keys, secret) = (spec.clone(), keys.clone(), JobSecret::of([7; JobSecret::LENGTH]));
            let setup = MemberSetup { record, spec, keys, secret, may_lead: true, seed };
            match node.run(setup, &commands, &mut inbox).await {
                Parting::Rejoin(_) => {}
                parting => return parting,
            }
        }
    });
    Ok(InProcessNode { name: name.to_owned(), status, place, reports, task })
}

impl InProcessNode {
    /// Waits until its workers run in round `at_least` or later with `group_world_size` nodes.
    pub async fn runs(&mut self, at_least: u64, group_world_size: u32, within: Duration) -> Result<Start> {
        let fits = |place: &Option<(Start, Time)>| {
            place.as_ref().is_some_and(|(start, _)| {
                start.round.number >= at_least && start.round.group_world_size == group_world_size
            })
        };
        let waited = tokio::time::timeout(within, self.place.wait_for(fits)).await;
        match waited {
            Ok(Ok(place)) => place.as_ref().map(|(start, _)| start.clone()).context("it has a place"),
            Ok(Err(_)) => bail!("{} is gone", self.name),
            Err(_) => bail!(
                "{} did not run with {group_world_size} nodes within {within:?}; it is at {:?}",
                self.name,
                self.status.borrow().round
            ),
        }
    }

    /// Its workers of the current round end well.
    pub fn finish(&self) {
        self.end(Outcome::Done);
    }

    /// One of its workers fails.
    pub fn fail(&self, class: FailureClass, message: &str) {
        let failure = Failure { exit_code: Some(1), ..Failure::new(class, message) };
        self.end(Outcome::Failed(failure));
    }

    fn end(&self, outcome: Outcome) {
        let round = self.place.borrow().as_ref().map(|(start, _)| start.round.number);
        if let Some(round) = round {
            let _ = self.reports.send(GroupReport::Ended { round, outcome });
        }
    }

    /// It is asked to leave.
    pub fn drain(&self) {
        let _ = self.reports.send(GroupReport::Drain);
    }

    /// How its part ended.
    pub async fn parting(self, within: Duration) -> Result<Parting> {
        tokio::time::timeout(within, self.task).await.context("it did not end in time")?.context("its task failed")
    }
}
