//! Workers that take longer than an exchange between ranks may take, and live.

use elastic_tests::prelude::*;

use super::promises::each_sample_once_an_epoch;
use super::{SCRIPT, finish, pid_of};
use crate::pytorch::trace::{LIMIT, Line, ended, lines, works};

/// As the script has it with the word `hasty`.
const OPERATION_TIMEOUT: Duration = Duration::from_secs(2);

#[tokio::test]
async fn a_newcomer_whose_first_pass_is_slow_is_waited_for_and_costs_no_restart() {
    let Some(torch) = Torch::find() else { return };
    let job = Job::on_etcd("1:3").await.flag("--warm-up=120").flag("--shutdown-timeout=20").script(&torch, SCRIPT, &[]);
    job.write("hasty", "");
    job.write("slow-b", "");
    let mut agents = vec![job.start("a")];
    let first = works(&job, "applied", 1, 1).await;
    agents.push(job.start("b"));
    let begins = async || {
        let told = lines(&job);
        told.into_iter().find(|line| line.is("uses") && line.text("node") == "b").map(|line| line.number("pid"))
    };
    let slow = eventually("b has begun its first step", LIMIT, begins).await;

    // When its pass takes longer than the ranks wait for each other, and another node joins meanwhile
    tokio::time::sleep(3 * OPERATION_TIMEOUT).await;
    agents.push(job.start("c"));
    let place = async || job.workers().into_iter().find(|worker| worker.node == "c");
    eventually("c has a place", LIMIT, place).await;
    std::fs::remove_file(job.path("slow-b")).unwrap();

    // Then all train in their processes, and no restart was spent: the job has none
    let all = works(&job, "applied", first + 1, 3).await;
    assert_eq!((pid_of(&job, "a", all), pid_of(&job, "b", all)), (pid_of(&job, "a", first), slow));
    let epochs = finish(&job);
    ended(&mut agents, 0).await;
    each_sample_once_an_epoch(&lines(&job), epochs);
}

#[tokio::test]
async fn a_rank_0_that_is_stopped_now_and_then_costs_a_restart_each_time_and_none_in_a_row() {
    let Some(torch) = Torch::find() else { return };
    let flags = ["--max-restarts=2", "--restarts-without-progress=1", "--warm-up=120"];
    let job = flags.iter().fold(Job::on_etcd("2").await, |job, flag| job.flag(flag)).conf("quiesce_timeout", "2s");
    let job = job.script(&torch, SCRIPT, &[]);
    job.write("hasty", "");
    let mut agents = job.start_all(["a", "b"]);
    let mut round = works(&job, "applied", 1, 2).await;
    for _ in 0..2 {
        // When rank 0 gives no sign of life any more
        let (stopped, other) = by_rank(&job, round);
        let pid = pid_of(&job, other, round);
        send(u32::try_from(pid_of(&job, stopped, round)).unwrap(), Signal::STOP);

        // Then the other one continues in its process, and a new worker comes
        round = works(&job, "applied", round + 1, 2).await;
        assert_eq!(pid_of(&job, other, round), pid);
    }
    // The job has no more than these restarts, and none that gets no further.
    let epochs = finish(&job);
    ended(&mut agents, 0).await;
    each_sample_once_an_epoch(&lines(&job), epochs);
}

#[tokio::test]
async fn a_rank_0_that_is_stopped_before_each_step_ends_the_job_as_it_was_told() {
    let Some(torch) = Torch::find() else { return };
    let flags = ["--max-restarts=9", "--restarts-without-progress=1", "--warm-up=120"];
    let job = flags.iter().fold(Job::on_etcd("2").await, |job, flag| job.flag(flag)).conf("quiesce_timeout", "2s");
    let job = job.script(&torch, SCRIPT, &[]);
    job.write("hasty", "");
    for node in ["a", "b"] {
        job.write(&format!("slow-{node}"), "");
    }
    let mut agents = job.start_all(["a", "b"]);

    // When whatever worker is rank 0 is stopped in its first step
    let (mut stopped, began) = (BTreeSet::new(), Instant::now());
    while agents[0].ended().is_none() {
        assert!(began.elapsed() < LIMIT, "the job has not ended: {}", agents[0].output());
        let told = lines(&job);
        let newest = told.iter().filter(|line| line.is("uses")).map(|line| line.number("round")).max();
        let first = told
            .iter()
            .find(|line| line.is("uses") && Some(line.number("round")) == newest && line.number("rank") == 0);
        if let Some(first) = first.filter(|line| stopped.insert(line.number("pid"))) {
            send(u32::try_from(first.number("pid")).unwrap(), Signal::STOP);
            // The other rank goes through its step, and waits.
            let other = if first.text("node") == "a" { "slow-b" } else { "slow-a" };
            let _ = std::fs::remove_file(job.path(other));
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }

    // Then it ends after one restart, not after nine
    for agent in &mut agents {
        assert_eq!(agent.exit(LIMIT).await, 5, "{}", agent.output());
    }
    assert_eq!(stopped.len(), 2, "{stopped:?}");
}

/// The nodes of rank 0 and of the other rank.
fn by_rank(job: &Job, round: u64) -> (&'static str, &'static str) {
    let told = lines(job);
    let is_first = |line: &Line| {
        line.is("applied") && line.number("round") == round && line.text("node") == "a" && line.number("rank") == 0
    };
    if told.iter().any(is_first) { ("a", "b") } else { ("b", "a") }
}
