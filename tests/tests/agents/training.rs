//! Real training under agents: what a checkpoint saves when nodes die.

use elastic_tests::prelude::*;

const LONG: Duration = Duration::from_secs(60);

/// The event of this kind in the trace that `fits`, once it is there.
async fn event(job: &Job, what: &str, fits: impl Fn(&Value) -> bool) -> Value {
    eventually(what, LONG, async || job.lines("trace").into_iter().find(|line| fits(line))).await
}

#[tokio::test]
async fn training_continues_from_the_committed_step() {
    let job = Job::on_etcd("1:2").await.flag("--max-restarts=0");
    let (trace, checkpoints) = (job.path("trace"), job.path("checkpoints"));
    std::fs::create_dir(&checkpoints).unwrap();
    let folder = format!("--checkpoint-dir={}", checkpoints.display());
    let job = job.trainer(["digits", "--epochs=40", "--hidden=256,256", "--checkpoint-every=10", &folder]);
    let mut a = job.start("a");
    let mut b = job.start("b");

    // Given two nodes that have committed some steps, when one is killed, then the other continues alone, from memory
    let both = |line: &Value| line["event"] == "begin" && line["world_size"] == 2;
    let begun = event(&job, "both train", both).await["round"].as_u64().unwrap();
    let committed = |line: &Value, after: u64| line["event"] == "committed" && line["round"].as_u64().unwrap() >= after;
    event(&job, "a checkpoint is committed", |line| committed(line, begun)).await;
    b.kill();
    let later = |line: &Value, after: u64, size: u64| {
        line["event"] == "begin" && line["round"].as_u64().unwrap() > after && line["world_size"] == size
    };
    let alone = event(&job, "one trains alone", |line| later(line, begun, 1)).await["round"].as_u64().unwrap();
    event(&job, "another checkpoint is committed", |line| committed(line, alone)).await;

    // When it comes back, then both continue, to the end
    b = job.start("b");
    event(&job, "both train again", |line| later(line, alone, 2)).await;
    assert_eq!(exits([&mut a, &mut b]).await, [0, 0]);

    let lines = json_lines(&trace);
    let number = |line: &Value, name: &str| line[name].as_u64().unwrap();
    let rounds: Vec<u64> = lines.iter().filter(|l| l["event"] == "begin").map(|l| number(l, "round")).collect();
    assert!(rounds.len() >= 3 && rounds.is_sorted_by(|a, b| a < b), "{rounds:?}");
    let mut resumed_later = 0;
    let mut done = 0;
    for round in rounds {
        let of = |kind: &str| -> Vec<&Value> {
            lines.iter().filter(|line| line["event"] == kind && line["round"] == round).collect()
        };
        let begin = number(of("begin")[0], "step");
        // A commit is published before it is traced, so a worker that dies between the two leaves it out of the trace.
        let traced = lines.iter().filter(|line| line["event"] == "committed" && number(line, "round") < round);
        let traced = traced.map(|line| number(line, "step")).max().unwrap_or(0);
        assert!(begin >= traced, "round {round} begins after step {begin}, committed was {traced}");
        // Only the dead worker may have done the last step.
        assert!(begin + 1 >= done, "round {round} begins after step {begin}, {done} were done");
        resumed_later += u32::from(begin > 0);
        let steps: Vec<u64> = of("step").into_iter().map(|line| number(line, "step")).collect();
        let expected: Vec<u64> = (begin + 1..).take(steps.len()).collect();
        assert_eq!(steps, expected, "the steps of round {round}");
        done = steps.last().copied().unwrap_or(begin);
    }
    assert!(resumed_later >= 2, "nothing was resumed");
    let checkpoint = job.record("checkpoint").await.unwrap();
    let last = lines.iter().filter(|line| line["event"] == "step").map(|line| number(line, "step")).max().unwrap();
    assert_eq!(number(&checkpoint, "step"), last, "the last step is committed");
}

#[tokio::test]
async fn an_error_that_no_restart_can_help_ends_the_job_at_once() {
    let etcd = EtcdServer::start(EtcdOptions::default()).await;
    for (at, (flag, said)) in [
        ("--lr=1e30", "is not finite"),
        ("--threads=3000", "--threads 3000 is more than 1024"),
        ("--no-such-flag", "error: unexpected argument '--no-such-flag' found"),
    ]
    .iter()
    .enumerate()
    {
        let job = Job::on(&etcd, "2").named(&format!("job-{at}")).flag("--max-restarts=3").trainer(["digits", flag]);
        let mut agents = job.start_all(["a", "b"]);
        assert_eq!(exits(&mut agents).await, [JOB_FAILED; 2], "{flag}: {}", agents[0].output());
        let round = job.record("round").await.unwrap();
        assert_eq!((&round["restarts"], &round["cause"]["permanent"]), (&0.into(), &true.into()), "{round}");
        let reason = round["reason"].as_str().unwrap();
        assert!(reason.contains(said) && reason.ends_with("; the worker says that a restart cannot help"), "{reason}");
    }
}
