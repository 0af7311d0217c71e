//! What operators ask of a job, by the `elasticctl` of one release, where the other leads.

use elastic_rendezvous::job::Desired;
use elastic_tests::prelude::*;
use elastic_tests::previous_release::PreviousRelease;

use super::{Build, LEFT};

/// Runs `elasticctl` of a build: what it printed.
async fn ask(build: Build, before: &PreviousRelease, etcd: &EtcdServer, args: &[&str]) -> String {
    let program = match build {
        Build::Before => before.program("elasticctl"),
        Build::Now => binary("elasticctl"),
    };
    let told = output_of(&program, &[&["--etcd", &etcd.address()], args].concat(), LIMIT).await;
    assert!(told.status.success(), "{build:?} {args:?}: {told:?}");
    String::from_utf8_lossy(&told.stdout).into_owned()
}

#[tokio::test]
async fn each_elasticctl_is_understood_by_each_leader() {
    let Some(before) = PreviousRelease::build() else { return };
    for leads in [Build::Before, Build::Now] {
        let etcd = EtcdServer::start(EtcdOptions::default()).await;
        let job = Job::on(&etcd, "1:3").prompt();
        let first = leads.start(&job, &before, "a");
        assert_eq!(job.leader().await, "a");
        let second = leads.other().start(&job, &before, "b");
        let mut round = job.runs(1, 2).await;
        let mut agents = [first, second];
        for asks in [Build::Now, Build::Before] {
            eprintln!("{leads:?} leads, {asks:?} asks");
            let shown = ask(asks, &before, &etcd, &["describe", "job"]).await;
            assert!(shown.contains("\na ") && shown.contains("\nb "), "{shown}");
            // A node is drained, and may come back.
            ask(asks, &before, &etcd, &["drain", "job", "b"]).await;
            assert_eq!(agents[1].exit(LIMIT).await, LEFT, "{}", agents[1].output());
            let asked = ask(asks, &before, &etcd, &["undrain", "job", "b"]).await;
            assert!(asked.contains("drained none"), "{asked}");
            agents[1] = leads.other().start(&job, &before, "b");
            round = job.runs_within(round.number + 2, 2, AT_ONCE).await;
        }
        // The one closes what the other leads, and all leave.
        ask(leads.other(), &before, &etcd, &["close", "job"]).await;
        exits(&mut agents).await;
        assert_eq!(job.record("round").await.unwrap()["state"], "closed");
    }
}

#[tokio::test]
async fn an_older_leader_passes_over_what_it_does_not_know_and_loses_none_of_it() {
    let Some(before) = PreviousRelease::build() else { return };
    let etcd = EtcdServer::start(EtcdOptions::default()).await;
    let job = Job::on(&etcd, "2").prompt().flag("--max-restarts=3");
    let mut agents = [Build::Before.start(&job, &before, "a"), Build::Now.start(&job, &before, "b")];
    let round = job.runs(1, 2).await;
    // Given everything that this release and a later one can wish for, and a key that neither knows
    let keys = job.keys();
    let mut wish = serde_json::to_value(Desired { max_nodes: Some(2), ..Desired::default() }).unwrap();
    for (field, value) in [
        ("paused", serde_json::json!(false)),
        ("excluded", serde_json::json!([])),
        ("priority", 3.into()),
        ("asked", serde_json::json!({"by": {"name": "anna", "via": "api"}, "at_ms": 1, "event": 0})),
        ("weights", serde_json::json!({"a": 2})),
    ] {
        wish[field] = value;
    }
    let store = etcd.store();
    let later = format!("{}later", keys.root());
    let puts = [Op::put(keys.desired(), wish.to_string()), Op::put(&later, "not JSON at all")];
    store.txn(Txn::of(puts)).await.unwrap();
    // when a worker fails, then the older leader continues
    round.of("b").exit(1);
    job.runs_within(2, 2, AT_ONCE).await;
    // and neither it nor this release's elasticctl has lost any of it.
    ask(Build::Now, &before, &etcd, &["set", "job", "--min", "2"]).await;
    let kept = job.record("desired").await.unwrap();
    assert_eq!(
        (&kept["priority"], &kept["weights"]["a"], &kept["min_nodes"], &kept["asked"]["by"]["via"]),
        (&3.into(), &2.into(), &2.into(), &"elasticctl".into())
    );
    assert!(store.get(&later).await.unwrap().is_some());
    job.succeeds(&mut agents).await;
    eventually("the job has its result", LIMIT, async || {
        job.record("round").await.filter(|round| round["state"] == "succeeded")
    })
    .await;
}
