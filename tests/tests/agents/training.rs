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
async fn a_job_whose_store_knows_nothing_begins_at_what_its_folder_has() {
    let endpoint = format!("--rdzv-endpoint=127.0.0.1:{}", free_port());
    let c10d = ["--rdzv-backend=c10d", &endpoint];
    for (flags, nodes) in [(&["--standalone"][..], "1"), (&c10d, "1"), (&c10d, "1:2")] {
        let folder = tempfile::tempdir().unwrap();
        let to = format!("--checkpoint-dir={}", folder.path().display());
        for (epochs, begun) in [(1, 0), (3, 23)] {
            let job = Job::met_by(flags, nodes).flag("--max-restarts=0");
            let job = job.trainer(["digits", "--hidden=16", &format!("--epochs={epochs}"), &to]);
            let mut agent = job.start("a");
            assert_eq!(agent.exit(LIMIT).await, 0, "{flags:?}: {}", agent.output());
            assert_eq!(job.lines("trace")[0]["step"], begun, "{flags:?}, {epochs} epochs");
        }
    }
}

#[tokio::test]
async fn a_job_that_is_asked_to_stop_commits_its_last_step() {
    let etcd = EtcdServer::start(EtcdOptions::default()).await;
    for (at, (nodes, flags)) in
        [(&["a"][..], ["--nproc-per-node=2", "--snapshot-every=0"]), (&["a", "b"], ["--nproc-per-node=1", "--seed=0"])]
            .into_iter()
            .enumerate()
    {
        let job = Job::on(&etcd, &nodes.len().to_string()).named(&format!("job-{at}")).flag("--drain-grace=20");
        let folder = format!("--checkpoint-dir={}", job.path("checkpoints").display());
        let endless = ["digits", "--hidden=16", "--epochs=100000", "--checkpoint-every=1000000", &folder, flags[1]];
        let job = job.flag(flags[0]).trainer(endless);
        let mut agents: Vec<Agent> = nodes.iter().map(|node| job.start(node)).collect();
        event(&job, "some steps", |line| line["event"] == "step" && line["step"].as_u64() > Some(20)).await;
        agents.iter().for_each(|agent| agent.signal(Signal::TERM));
        for agent in &mut agents {
            assert_eq!(agent.exit(LIMIT).await, LEFT, "{}", agent.output());
        }
        let steps = job.lines("trace").into_iter().filter(|line| line["event"] == "step");
        let last = steps.map(|line| line["step"].as_u64().unwrap()).max();
        assert_eq!(job.record("checkpoint").await.unwrap()["step"].as_u64(), last, "{nodes:?}: {}", agents[0].output());
    }
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
