//! How jobs end, and what their ids mean afterwards.

use elastic_tests::prelude::*;

#[tokio::test]
async fn a_spent_budget_ends_the_job_everywhere_with_one_cause() {
    let job = Job::on_etcd("3").await.prompt().flag("--max-restarts=1");
    let mut agents = job.start_all(["a", "b", "c"]);

    job.runs(1, 3).await.of("b").exit(3);
    let second = job.runs_within(2, 3, AT_ONCE).await;
    assert_eq!(second.restarts(), 1);
    second.of("c").exit(7);

    assert_eq!(exits(&mut agents).await, [JOB_FAILED; 3]);
    let cause = |output: &str| output.split_once("  root cause").map(|(_, cause)| cause.trim().to_owned());
    let causes: Vec<_> = agents.iter().map(|agent| cause(&agent.output())).collect();
    assert!(causes[0].is_some() && causes.iter().all(|other| *other == causes[0]), "{causes:#?}");
    let text = causes[0].as_ref().unwrap();
    for part in ["node       c:", "exit code  7", &format!("pid        {}", second.of("c").pid), "told to exit with 7"]
    {
        assert!(text.contains(part), "{part:?} is not in {text}");
    }
    job.none_is_left(AT_ONCE).await;
}

/// Under torchrun's name only the budget ends a program that cannot start.
#[tokio::test]
async fn restarts_of_a_program_that_cannot_start_come_ever_more_slowly() {
    let job = Job::met_by(&["torchrun-compat", "--standalone"], "1").flag("--max-restarts=5");
    let script = "date +%s%N >> starts; [ -e said ] || echo first >&2; touch said; exit 3";
    let job = job.program(["sh", "-c", script]);
    let mut agent = job.start("a");
    assert_eq!(agent.exit(LIMIT).await, 1);
    let starts: Vec<u64> = job.read("starts").lines().map(|line| line.parse().unwrap()).collect();
    let gaps: Vec<u64> = starts.windows(2).map(|pair| (pair[1] - pair[0]) / 1_000_000).collect();
    assert_eq!(gaps.len(), 5, "{}", agent.output());
    assert!(gaps[2] >= 500 && gaps[3] >= 1000 && gaps[4] >= 2000, "{gaps:?} ms");
    let output = agent.output();
    let story = output.lines().rfind(|line| line.contains("the first time: ")).expect("a pause is explained");
    assert!(story.contains("failed 5 times") && story.contains("first"), "{story}");
}

#[tokio::test]
async fn success_leaves_no_node_behind_and_a_late_agent_leaves_with_success() {
    let job = Job::on_etcd("2").await.prompt();
    let mut agents = job.start_all(["a", "b"]);
    job.runs(1, 2).await;
    job.succeeds(&mut agents).await;
    assert_eq!(job.record("nodes/").await, None, "nothing is left under nodes/");

    let mut late = job.start("late");
    assert_eq!(late.exit(AT_ONCE).await, 0);
    let said = ["no worker ran here: job `job` had ended already", "the job has succeeded"];
    assert!(said.iter().all(|said| late.output().contains(said)), "{}", late.output());
    assert_eq!(job.workers().len(), 2, "it started no worker");
}

#[tokio::test]
async fn after_failure_a_new_start_is_a_new_generation() {
    let job = Job::on_etcd("2").await.flag("--max-restarts=1");
    let mut agents = job.start_all(["a", "b"]);
    job.runs(1, 2).await.of("a").exit(1);
    job.runs(2, 2).await.of("a").exit(1);
    assert_eq!(exits(&mut agents).await, [JOB_FAILED; 2]);

    // When the job is started again, with other flags, then numbers continue and the budget is whole
    agents = ["a", "b"].map(|name| job.start_with(name, &["--max-restarts=2"]));
    let round = job.runs(3, 2).await;
    assert_eq!(round.restarts(), 0);
    let reason = job.record("round").await.unwrap()["reason"].clone();
    assert_eq!(reason, "the job begins again", "and not that nodes of the failed one are gone");
    round.of("b").exit(1);
    let again = job.runs(round.number + 1, 2).await;
    assert_eq!(again.restarts(), 1);
    job.succeeds(&mut agents).await;
    let record = job.record("round").await.unwrap();
    assert_eq!((&record["state"], &record["generation"]), (&"succeeded".into(), &2.into()), "{record}");
}

#[tokio::test]
async fn a_cluster_killed_as_a_whole_continues_with_the_same_flags() {
    let job = Job::on_etcd("2:3").await.gathers().flag("--max-restarts=2");
    let mut agents = job.start_all(["a", "b", "c"]);
    job.runs(1, 3).await.of("a").exit(1);
    let before = job.runs(2, 3).await;
    assert_eq!(before.restarts(), 1);
    agents.iter_mut().for_each(|agent| agent.kill());

    agents = job.start_all(["a", "b", "c"]);
    let after = job.runs_within(3, 3, LEASE * 5).await;
    assert_eq!(after.restarts(), 1, "the deaths of agents are no failures of workers");
    let mut nodes = after.nodes();
    nodes.sort_unstable();
    assert_eq!(nodes, ["a", "b", "c"]);
    job.succeeds(&mut agents).await;
}

#[tokio::test]
async fn too_few_nodes_for_too_long_end_the_job() {
    let job = Job::on_etcd("2").await.prompt().flag("--max-restarts=5").conf("join_timeout", "3s");
    let [mut a, mut b] = job.start_all(["a", "b"]);
    job.runs(1, 2).await;

    // When the job stays below its minimum, then it fails and says why; its workers were stopped at the loss
    b.kill();
    assert_eq!(a.exit(LIMIT).await, JOB_FAILED);
    assert!(a.output().contains("the job has failed: "), "{}", a.output());
    job.none_is_left(AT_ONCE).await;
}

#[tokio::test]
async fn what_succeeded_workers_left_is_named_and_may_end_by_itself() {
    let script = "setsid sh -c 'sleep 1; touch \"$0/uploaded\"' \"$0\" & exit 0";
    let job = Job::met_by(&["--standalone"], "1").flag("--shutdown-timeout=60");
    let folder = job.path("").display().to_string();
    let job = job.program(["sh", "-c", script, &folder]);
    let mut agent = job.start("a");
    assert_eq!(agent.exit(LIMIT).await, 0, "{}", agent.output());
    assert!(job.path("uploaded").exists(), "{}", agent.output());
    let said = agent.output();
    let named = said.lines().find(|line| line.contains("still there: pid"));
    assert!(named.is_some_and(|line| line.contains("(sh -c sleep 1; touch")), "{said}");
}
