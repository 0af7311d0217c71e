//! Records that someone wrote by hand, or lost: a job continues, and says what is wrong.

use elastic_tests::prelude::*;

#[tokio::test]
async fn one_bad_record_leaves_no_failure_unhandled() {
    // (a port that accepts and never answers)
    let mute = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = mute.local_addr().unwrap().port();
    let of_the_mute = format!(r#"{{"node":"x:1","peer":{{"host":"127.0.0.1","port":{port}}}}}"#);
    let (rubbish, of_the_mute) = (Some("rubbish"), Some(of_the_mute.as_str()));
    let keys = Keys::new(Keys::DEFAULT_PREFIX, &"job".parse().unwrap());
    let (desired, checkpoint, leader, spec) = (keys.desired(), keys.checkpoint(), keys.leader(), keys.spec());
    // Two jobs, because the pauses between failures grow.
    failures_are_handled_beside(&[
        (&desired, rubbish),
        (&checkpoint, rubbish),
        (&leader, rubbish),
        (&leader, of_the_mute),
    ])
    .await;
    failures_are_handled_beside(&[(&spec, None), (&leader, rubbish), (&spec, rubbish), (&leader, of_the_mute)]).await;
}

async fn failures_are_handled_beside(rubbish: &[(&String, Option<&str>)]) {
    // Given a job at work
    let job = Job::on_etcd("2").await.prompt().flag("--max-restarts=9").flag("--restarts-without-progress=9");
    let mut agents = job.start_all(["a", "b"]);
    let mut round = job.runs(1, 2).await;
    let store = job.etcd().store();
    let keys = job.keys();
    for (key, value) in rubbish {
        eprintln!("{key}: {value:?}");
        // when someone writes rubbish, or takes a record away
        let op = value.map_or_else(|| Op::delete(*key), |value| Op::put(*key, value));
        store.txn(Txn::of([op])).await.unwrap();
        // and a worker fails
        round.of("b").exit(1);
        // then that is handled at once
        round = job.runs_within(round.number + 1, 2, AT_ONCE).await;
        if **key == keys.checkpoint() {
            // A leader that never knew where training resumes would seal no round.
            store.delete(vec![], key).await.unwrap();
        }
    }
    // and each record was named, in a warning
    let said = || agents.iter().map(|agent| agent.output()).collect::<String>();
    for (key, _) in rubbish {
        let warned = |line: &str| line.contains("WARN") && line.contains(*key);
        eventually(&format!("a warning of {key}"), LIMIT, async || said().lines().any(warned).then_some(())).await;
        let times = said().lines().filter(|line| warned(line)).count();
        assert!(times <= 12, "{key}: {times} warnings");
    }
    // and the job's spec is whole again
    assert!(job.record("spec").await.is_some_and(|spec| spec["protocol"] == 1));
    store.delete(vec![], &keys.desired()).await.unwrap();
    job.succeeds(&mut agents).await;
}

#[tokio::test]
async fn a_round_that_is_gone_or_unreadable_ends_every_agent_and_its_leftovers_stop_no_node() {
    for value in [None, Some("rubbish")] {
        // Given a job at work
        let etcd = EtcdServer::start(EtcdOptions::default()).await;
        let job = Job::on(&etcd, "2");
        let mut agents = job.start_all(["a", "b"]);
        job.runs(1, 2).await;
        let store = etcd.store();
        let keys = job.keys();

        // when its round is deleted, or written over
        let op = value.map_or_else(|| Op::delete(keys.round()), |value| Op::put(keys.round(), value));
        store.txn(Txn::of([op])).await.unwrap();

        // then all agents end, and say which key it was
        assert_eq!(exits(&mut agents).await, [1, 1]);
        assert!(agents.iter().all(|agent| agent.output().contains("round")));
        job.none_is_left(LIMIT).await;

        // and when the unreadable record is gone too, then agents of the same id begin again, though a spec is left
        store.delete(vec![], &keys.round()).await.unwrap();
        assert!(job.record("spec").await.is_some());
        let anew = Job::on(&etcd, "2");
        let mut agents = anew.start_all(["a", "b"]);
        anew.runs(1, 2).await.exit(0);
        assert_eq!(exits(&mut agents).await, [0, 0]);
    }
}

#[tokio::test]
async fn workers_do_not_warm_up_for_a_round_that_cannot_be_read() {
    let job = Job::on_etcd("1").await.flag("--warm-up=60");
    let keys = job.keys();
    job.store().txn(Txn::of([Op::put(keys.round(), "{}")])).await.unwrap();
    let mut agent = job.start("a");
    assert_eq!(agent.exit(LIMIT).await, 1, "{}", agent.output());
    let said = agent.output();
    assert!(said.contains(&keys.round()) && !said.contains("warm up"), "{said}");
}

#[tokio::test]
async fn a_checkpoint_that_cannot_be_read_ends_a_job_that_would_resume_from_it() {
    // Given a corrupt record of what an earlier job of this id committed
    let etcd = EtcdServer::start(EtcdOptions::default()).await;
    let (store, keys) = (etcd.store(), Keys::new(Keys::DEFAULT_PREFIX, &"job".parse().unwrap()));
    store.txn(Txn::of([Op::put(keys.checkpoint(), "7")])).await.unwrap();
    let job = Job::on(&etcd, "2");
    let mut first = job.start("a");
    // then the job fails at once, also before all are there, and the agent names the key, and what to do
    assert_eq!(first.exit(LIMIT).await, JOB_FAILED);
    let said = first.output();
    assert!(said.contains(&keys.checkpoint()) && said.contains("delete it to begin from nothing"), "{said}");
    // and when that was done, it begins
    store.delete(vec![], &keys.checkpoint()).await.unwrap();
    let mut agents = job.start_all(["a", "b"]);
    job.runs(1, 2).await;
    job.succeeds(&mut agents).await;
}

#[tokio::test]
async fn a_members_key_that_was_deleted_is_written_again_while_it_runs() {
    let job = Job::on_etcd("2").await;
    let mut agents = job.start_all(["a", "b"]);
    let round = job.runs(1, 2).await;
    let leader = job.leader().await;
    for name in ["a", "b"] {
        let node = format!("{}{name}:", job.keys().nodes());
        let key = async || Some(job.store().range(&node).await.ok()?.0.first()?.key.clone());
        let key_of = eventually("its key", LIMIT, key).await;
        job.store().delete(vec![], &key_of).await.unwrap();
        eventually(&format!("{name}'s key is there again; {leader} leads"), LIMIT, key).await;
    }
    assert_eq!(job.runs(1, 2).await.pids(), round.pids());
    job.succeeds(&mut agents).await;
}

#[tokio::test]
async fn a_lost_spec_is_written_again_for_the_next_node() {
    let job = Job::on_etcd("1:2").await;
    let first = job.start("a");
    job.runs(1, 1).await;
    let store = job.etcd().store();
    let keys = job.keys();
    for op in [Op::put(keys.spec(), "rubbish"), Op::delete(keys.spec())] {
        store.txn(Txn::of([op])).await.unwrap();
        eventually("the leader writes the spec again", AT_ONCE, async || {
            let (records, _) = store.range(&keys.spec()).await.ok()?;
            records.first().is_some_and(|record| record.value.starts_with(b"{")).then_some(())
        })
        .await;
    }
    let second = job.start("b");
    job.runs(2, 2).await;
    job.succeeds(&mut [first, second]).await;
}
