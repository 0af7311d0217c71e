//! Records that somebody wrote by hand, or lost: a job goes on, and says what is wrong.

use elastic_coordinator::job::Keys;
use elastic_coordinator::store::{Op, Store, Txn};
use elastic_tests::agents::{AT_ONCE, Job, LIMIT, exits};
use elastic_tests::etcd::{EtcdOptions, EtcdServer};
use elastic_tests::wait::eventually;

#[tokio::test]
async fn one_bad_record_leaves_no_failure_unhandled() {
    // Given a job at work
    let etcd = EtcdServer::start(EtcdOptions::default()).await;
    let job = Job::on(&etcd, "2").prompt().flag("--max-restarts=9");
    let mut agents = job.start_all(["a", "b"]);
    let mut round = job.runs(1, 2).await;
    let store = etcd.store();
    let keys = Keys::new(Keys::DEFAULT_PREFIX, &"job".parse().unwrap());
    // (a port that accepts and never answers)
    let mute = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = mute.local_addr().unwrap().port();
    let of_the_mute = format!(r#"{{"node":"x:1","peer":{{"host":"127.0.0.1","port":{port}}}}}"#);
    for (key, value) in [
        (keys.desired(), Some("rubbish")),
        (keys.checkpoint(), Some("rubbish")),
        (keys.leader(), Some("rubbish")),
        (keys.leader(), Some(of_the_mute.as_str())),
        (keys.spec(), None),
        (keys.leader(), Some("rubbish")),
        (keys.spec(), Some("rubbish")),
        (keys.leader(), Some(of_the_mute.as_str())),
    ] {
        eprintln!("{key}: {value:?}");
        // when somebody writes rubbish, or takes a record away
        let op = value.map_or_else(|| Op::delete(&key), |value| Op::put(&key, value));
        store.txn(Txn::of([op])).await.unwrap();
        // and a worker fails
        round.of("b").exit(1);
        // then that is handled at once
        round = job.runs_within(round.number + 1, 2, AT_ONCE).await;
        if key == keys.checkpoint() {
            // A leader that never knew where training resumes would seal no round.
            store.delete(vec![], &key).await.unwrap();
        }
    }
    // and each record was named, in a warning
    let said = || agents.iter().map(|agent| agent.output()).collect::<String>();
    for key in [keys.desired(), keys.checkpoint(), keys.leader(), keys.spec()] {
        let warned = |line: &str| line.contains("WARN") && line.contains(&key);
        eventually(&format!("a warning of {key}"), LIMIT, async || said().lines().any(warned).then_some(())).await;
        let times = said().lines().filter(|line| warned(line)).count();
        assert!(times <= 12, "{key}: {times} warnings");
    }
    // and the job's spec is whole again
    assert!(job.record(&etcd, "spec").await.is_some_and(|spec| spec["protocol"] == 1));
    store.delete(vec![], &keys.desired()).await.unwrap();
    round.exit(0);
    assert_eq!(exits(&mut agents).await, [0, 0]);
}
