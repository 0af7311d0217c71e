//! Jobs that an operator pauses: all workers end, agents stay, and the job continues where it was.

use elastic_tests::prelude::*;

use crate::agents::preemption::COMMITS;
use crate::agents::quiescing::{done, job_on, of, pid, places, round};

/// Waits until the job is paused, and every one of its nodes has stopped its workers.
async fn is_paused(job: &Job, nodes: usize) {
    eventually("all nodes wait", LIMIT, async || {
        let round = job.record("round").await?;
        let waiting = job
            .records("nodes/")
            .await
            .into_iter()
            .filter(|node| node["phase"] == "waiting" && node["round"] == round["number"]);
        (round["paused"] == true && waiting.count() == nodes).then_some(())
    })
    .await;
}

#[tokio::test]
async fn a_paused_job_frees_its_machines_and_continues_from_what_was_committed_in_the_grace() {
    let job = Job::on_etcd("2").await.prompt().flag("--max-restarts=0").flag("--drain-grace=20").python(COMMITS);
    let mut agents = job.start_all(["a", "b"]);
    let first = job.runs(1, 2).await;

    // When it is paused, then all workers end, and their agents stay
    job.ctl_ok(&["pause", "job"]).await;
    is_paused(&job, 2).await;
    job.none_is_left(LIMIT).await;
    assert!(agents.iter_mut().all(|agent: &mut Agent| !agent.is_gone()));
    for node in ["a", "b"] {
        let heard = job.lines(&format!("heard-{node}"));
        let draining = heard.iter().find(|line| line["type"] == "draining").expect("its worker was informed");
        assert_eq!(draining["grace_ms"], 20_000);
    }
    assert_eq!(job.record("checkpoint").await.expect("a checkpoint")["step"], 41);

    // When it is resumed, then it continues from there, with the ranks that it had, and it has cost nothing
    job.ctl_ok(&["resume", "job"]).await;
    let second = job.runs(2, 2).await;
    assert_eq!((second.number, second.restarts(), second.nodes()), (2, 0, first.nodes()));
    assert_eq!(job.record("round").await.unwrap()["checkpoint"]["step"], 41);

    // An agent that is asked to leave while its job is paused does so at once.
    job.ctl_ok(&["pause", "job"]).await;
    is_paused(&job, 2).await;
    job.leaves(&mut agents).await;
}

#[tokio::test]
async fn workers_that_know_about_rounds_end_too() {
    let job = job_on("2:3").await;
    let [a, b] = job.start_all(["a", "b"]);
    let first = places(&job, 0, 2).await;
    job.ctl_ok(&["pause", "job"]).await;
    is_paused(&job, 2).await;
    let stopped = || {
        let lines = job.lines("stopped").into_iter();
        let mut nodes: Vec<String> = lines.filter_map(|line| Some(line["node"].as_str()?.to_owned())).collect();
        nodes.sort();
        nodes
    };
    assert_eq!(stopped(), ["a", "b"], "each got the signal");
    // Those that a node starts before it joins do not stay either, and get no place while they end.
    job.write("lingers-c-0", "");
    let c = job.start_with("c", &["--warm-up=60"]);
    eventually("the worker of c is stopped", LIMIT, async || (stopped() == ["a", "b", "c"]).then_some(())).await;
    job.ctl_ok(&["resume", "job"]).await;
    places(&job, round(&first), 2).await;
    std::fs::remove_file(job.path("lingers-c-0")).unwrap();
    let second = places(&job, round(&first), 3).await;
    let dismissed = job.lines("stopped").into_iter().find(|line| line["node"] == "c").unwrap();
    assert_ne!(pid(of(&second, "c", 0)), pid(&dismissed));
    for node in ["a", "b"] {
        assert_ne!(pid(of(&second, node, 0)), pid(of(&first, node, 0)));
        assert_eq!(of(&second, node, 0)["rank"], of(&first, node, 0)["rank"]);
        assert_eq!(of(&second, node, 0)["restart_count"], 0);
    }
    assert_eq!(of(&second, "c", 0)["rank"], 2);
    done(&job, &mut [a, b, c]).await;
}
