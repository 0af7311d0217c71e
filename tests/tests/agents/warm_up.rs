//! `--warm-up`: workers that are started before their node joins.

use elastic_tests::prelude::*;

use crate::agents::quiescing::{done, job_on, kill, of, pid, places, round};

/// What the worker noted when it started, by node.
fn started(job: &Job, node: &str) -> Vec<Value> {
    job.lines("started").into_iter().filter(|line| line["node"] == node).collect()
}

#[tokio::test]
async fn the_others_pause_only_once_a_newcomers_workers_are_ready() {
    let job = job_on("1:2").await;
    job.write("slow-b-0", "");
    let mut a = job.start("a");
    let alone = places(&job, 0, 1).await;
    let mut b = job.start_with("b", &["--warm-up=60"]);
    let early = eventually("b's worker runs", LIMIT, async || started(&job, "b").pop()).await;
    for unknown in ["RANK", "MASTER_PORT", "ELASTIC_ROUND"] {
        assert!(early[unknown].is_null(), "{unknown} is {}", early[unknown]);
    }
    assert_eq!(early["ELASTIC_WARM_UP"], "1");
    job.write("go", "");
    let both = places(&job, round(&alone), 2).await;
    assert_eq!(pid(of(&both, "b", 0)), pid(&early), "the same process got the place");
    assert_eq!(of(&both, "b", 0)["rank"], 1);
    let at = |name: &str, node: &str| {
        let line = job.lines(name).into_iter().find(|line| line["node"] == node).unwrap();
        line["at"].as_u64().unwrap()
    };
    assert!(at("ready", "b") < at("forming", "a"), "a was disturbed before b could work");
    assert!(started(&job, "a")[0]["ELASTIC_WARM_UP"].is_null());

    // Then it is a worker like any other: it continues when the group changes.
    a.signal(Signal::TERM);
    let left = places(&job, round(&both), 1).await;
    assert_eq!(pid(of(&left, "b", 0)), pid(&early));
    job.write("done", "");
    exits([&mut a]).await;
    assert_eq!(exits([&mut b]).await, [0]);
    assert_eq!(job.lines("errors"), Vec::<Value>::new());
}

#[tokio::test]
async fn a_node_whose_worker_died_comes_back_when_its_replacement_is_warm() {
    let job = job_on("1:2").await.flag("--nproc-per-node=2").flag("--warm-up=60");
    let [mut a, mut b] = job.start_all(["a", "b"]);
    let first = places(&job, 0, 4).await;
    // The replacement takes its time.
    job.write("slow-b-1", "");
    kill(of(&first, "b", 1));

    // Then the others continue without the node
    let without = places(&job, round(&first), 2).await;
    assert!(without.keys().all(|(node, _)| node == "a"), "{without:?}");
    for worker in without.keys() {
        assert_eq!(pid(&without[worker]), pid(&first[worker]));
    }
    let replacement = eventually("it is started again", LIMIT, async || started(&job, "b").get(2).cloned()).await;
    assert_eq!((&replacement["ELASTIC_WARM_UP"], &replacement["RANK"]), (&"1".into(), &Value::Null));

    // and with it when it is ready, in the processes that they had
    job.write("go", "");
    let again = places(&job, round(&without), 4).await;
    for (worker, line) in &again {
        let known = if *worker == ("b".to_owned(), 1) { &replacement } else { &first[worker] };
        assert_eq!(pid(line), pid(known), "{worker:?}");
        assert_eq!(line["restart_count"], 1, "its return costs no restart");
    }

    // When the replacement cannot warm up, then the node comes back with workers that are started in their round
    job.write("unaware-b-1", "");
    kill(of(&again, "b", 1));
    let third = places(&job, round(&again) + 1, 4).await;
    b.says("the workers cannot warm up: one has not registered as round-aware", LIMIT).await;
    assert_eq!(pid(of(&third, "a", 0)), pid(of(&first, "a", 0)));
    assert_ne!(pid(of(&third, "b", 0)), pid(of(&first, "b", 0)));
    done(&job, [&mut a, &mut b]).await;
    assert_eq!(job.lines("errors"), Vec::<Value>::new());
}

#[tokio::test]
async fn a_node_that_warms_up_ends_with_its_job_and_leaves_when_asked_to() {
    for told in [false, true] {
        let job = job_on("1:2").await.flag("--warm-up=60");
        let [mut a, mut b] = job.start_all(["a", "b"]);
        let first = places(&job, 0, 2).await;
        job.write("slow-b-0", "");
        kill(of(&first, "b", 0));
        places(&job, round(&first), 1).await;
        eventually("it is started again", LIMIT, async || started(&job, "b").get(1).cloned()).await;
        if told {
            job.leaves([&mut b]).await;
        }
        job.write("done", "");
        assert_eq!(exits([&mut a]).await, [0]);
        if !told {
            assert_eq!(exits([&mut b]).await, [0]);
        }
        job.none_is_left(LIMIT).await;
    }
}

#[tokio::test]
async fn a_worker_that_dies_warm_is_started_again_in_its_round_and_costs_nothing() {
    let job = job_on("2").await.flag("--warm-up=60").flag("--max-restarts=0");
    let mut a = job.start("a");
    a.says("the workers are warm", LIMIT).await;
    let first = started(&job, "a").pop().unwrap();
    kill(&first);
    eventually("it is gone", LIMIT, async || {
        (!std::path::Path::new(&format!("/proc/{}/exe", pid(&first))).exists()).then_some(())
    })
    .await;
    let mut b = job.start("b");
    let both = places(&job, 0, 2).await;
    assert_ne!(pid(of(&both, "a", 0)), pid(&first));
    done(&job, [&mut a, &mut b]).await;
}

#[tokio::test]
async fn workers_that_need_their_place_get_it_when_they_start() {
    // Does not know about rounds, but registers.
    let job = job_on("1").await.flag("--warm-up=60");
    job.write("unaware-a-0", "");
    let mut a = job.start("a");
    let alone = places(&job, 0, 1).await;
    a.says("the workers cannot warm up: one has not registered as round-aware", LIMIT).await;
    let pids: Vec<u32> = started(&job, "a").iter().map(pid).collect();
    assert_eq!(pids.len(), 2);
    assert_eq!(pid(of(&alone, "a", 0)), pids[1]);
    done(&job, [&mut a]).await;

    // Ends without a rank.
    let job = Job::on_etcd("1").await.flag("--warm-up=60").flag("--max-restarts=0");
    let job = job.program(["sh", "-c", "test -n \"$RANK\""]);
    let mut a = job.start("a");
    assert_eq!(exits([&mut a]).await, [0]);
    assert!(a.output().contains("the workers cannot warm up: one has ended"), "{}", a.output());

    // Never says anything.
    let job = Job::on_etcd("1").await.flag("--warm-up=200ms").flag("--max-restarts=0");
    let job = job.program(["sh", "-c", "test -n \"$RANK\" || exec sleep 1000"]);
    let mut a = job.start("a");
    assert_eq!(exits([&mut a]).await, [0]);
    assert!(a.output().contains("has not registered in time; --warm-up sets the limit"), "{}", a.output());
}

#[tokio::test]
async fn a_signal_ends_a_warm_up_and_leaves_no_process() {
    let job = Job::on_etcd("1").await.flag("--warm-up=60");
    let job = job.program(["sh", "-c", "exec sleep 1000"]);
    let mut a = job.start("a");
    a.says("worker started ahead of its round", LIMIT).await;
    a.signal(Signal::INT);
    exits([&mut a]).await;
    assert!(a.output().contains("leaving before the job was joined"), "{}", a.output());
    job.none_is_left(LIMIT).await;
}

#[tokio::test]
async fn a_rank_cannot_be_asked_for_ahead() {
    let job = Job::on_etcd("1").await.flag("--warm-up=60").program(["echo", "${rank}"]);
    let mut a = job.start("a");
    assert_eq!(exits([&mut a]).await, [2]);
    assert!(a.output().contains("--warm-up: a worker that starts before its round has no rank yet"), "{}", a.output());
}
