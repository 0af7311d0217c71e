//! Workers that take longer than an exchange between ranks may take, and live.

use elastic_tests::prelude::*;

use super::promises::each_sample_once_an_epoch;
use super::{SCRIPT, finish, pid_of};
use crate::pytorch::trace::{LIMIT, ended, lines, works};

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
async fn a_worker_that_is_stopped_for_longer_costs_one_restart() {
    let Some(torch) = Torch::find() else { return };
    let job = Job::on_etcd("2").await.flag("--max-restarts=1").flag("--warm-up=120").conf("quiesce_timeout", "2s");
    let job = job.script(&torch, SCRIPT, &[]);
    job.write("hasty", "");
    let mut agents = job.start_all(["a", "b"]);
    let first = works(&job, "applied", 1, 2).await;

    // When rank 0 gives no sign of life any more
    let told = lines(&job);
    let (stopped, other) = if told.iter().any(|line| line.text("node") == "a" && line.number("rank") == 0) {
        ("a", "b")
    } else {
        ("b", "a")
    };
    let pid = pid_of(&job, other, first);
    send(u32::try_from(pid_of(&job, stopped, first)).unwrap(), Signal::STOP);

    // Then the other one continues in its process, and a new worker comes. The job has no more than that restart.
    let last = works(&job, "applied", first + 1, 2).await;
    assert_eq!(pid_of(&job, other, last), pid);
    let epochs = finish(&job);
    ended(&mut agents, 0).await;
    each_sample_once_an_epoch(&lines(&job), epochs);
}
