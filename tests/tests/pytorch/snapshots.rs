//! Snapshots in the agent's memory: training whose workers all die goes on from there.

use elastic_tests::agents::{JOB_FAILED, Job, exits_within};
use elastic_tests::etcd::{EtcdOptions, EtcdServer};
use elastic_tests::torch::{Torch, script};
use elastic_tests::wait::eventually;

use crate::pytorch::trace::{LIMIT, Line, lines, works};

const SCRIPT: &str = "trains_with_snapshots.py";

#[test]
fn snapshots_are_whole_or_do_not_count() {
    let Some(torch) = Torch::find() else { return };
    let package = concat!(env!("CARGO_MANIFEST_DIR"), "/../agent/python");
    let ended = torch.run(&script("keeps_snapshots.py")).env("PYTHONPATH", package).output().unwrap();
    assert!(ended.status.success(), "{}", String::from_utf8_lossy(&ended.stderr));
}

#[tokio::test]
async fn ddp_goes_on_from_the_agents_memory() {
    let Some(torch) = Torch::find() else { return };
    let etcd = EtcdServer::start(EtcdOptions::default()).await;
    let job = Job::on(&etcd, "2").flag("--max-restarts=2").script(&torch, SCRIPT, &[]);
    let mut agents = job.start_all(["a", "b"]);
    works(&job, "done", 1, 2).await;

    // When all workers are killed while they copy, then training goes on from the copy before
    std::fs::write(job.path("hold"), "").unwrap();
    let held = async || (lines(&job).iter().filter(|line| line.is("held")).count() == 2).then_some(());
    eventually("both workers are in the midst of a copy", LIMIT, held).await;
    std::fs::remove_file(job.path("hold")).unwrap();
    job.runs(1, 2).await.workers.iter().for_each(|worker| worker.kill());
    let second = works(&job, "done", 2, 2).await;
    let told = lines(&job);
    let last = told.iter().filter(|line| line.is("done") && line.number("round") < second);
    let last = last.map(|line| line.number("step")).max().unwrap();
    for begin in began(&told, second) {
        assert_eq!((begin.text("source"), begin.number("step")), ("memory", last - 1), "{begin:?}, {last} was done");
    }
    nothing_is_lost(&told, second);

    // When an agent dies, and its memory with it, then its new worker gets the state from the other node
    agents[1].kill();
    agents[1] = job.start("b");
    let third = works(&job, "done", second + 1, 2).await;
    let told = lines(&job);
    assert!(began(&told, third).all(|begin| begin.text("source") == "memory" && begin.number("step") >= last));
    nothing_is_lost(&told, third);

    std::fs::write(job.path("end"), (newest(&told) + 20).to_string()).unwrap();
    let [a, b] = &mut agents;
    assert_eq!(exits_within(LIMIT, [a, b]).await, [0, 0]);
}

#[tokio::test]
async fn the_last_snapshot_is_saved_when_nobody_is_left_to_go_on() {
    let Some(torch) = Torch::find() else { return };
    let etcd = EtcdServer::start(EtcdOptions::default()).await;
    let job = Job::on(&etcd, "1").flag("--max-restarts=0").script(&torch, SCRIPT, &[]);
    std::fs::create_dir(job.path("checkpoints")).unwrap();
    let mut agent = job.start("a");
    let committed = async || job.record(&etcd, "checkpoint").await.and_then(|record| record["step"].as_u64());
    let beside = eventually("a snapshot is written and committed beside training", LIMIT, committed).await;
    assert!(beside >= 10, "{beside}");

    eventually("more steps are done", LIMIT, async || (newest(&lines(&job)) >= beside + 3).then_some(())).await;
    job.runs(1, 1).await.workers[0].kill();
    assert_eq!(agent.exit(LIMIT).await, JOB_FAILED);
    let (saved, done) = (committed().await.unwrap(), newest(&lines(&job)));
    assert!((done - 1..=done).contains(&saved) && saved > beside, "saved {saved}, done {done}, before that {beside}");

    // When the job is started again, then it goes on from what was saved
    std::fs::write(job.path("end"), (saved + 10).to_string()).unwrap();
    assert_eq!(job.start("a").exit(LIMIT).await, 0);
    let told = lines(&job);
    let begin = told.iter().rfind(|line| line.is("begin")).unwrap();
    assert_eq!((begin.text("source"), begin.number("step")), ("checkpoint", saved));
    nothing_is_lost(&told, begin.number("round"));
}

#[tokio::test]
async fn a_sharded_model_goes_on_only_if_every_part_is_there() {
    let Some(torch) = Torch::find() else { return };
    let etcd = EtcdServer::start(EtcdOptions::default()).await;
    let job = Job::on(&etcd, "2").flag("--max-restarts=1").script(&torch, SCRIPT, &["sharded"]);
    let mut agents = job.start_all(["a", "b"]);
    works(&job, "done", 1, 2).await;
    job.runs(1, 2).await.workers[0].kill();
    let second = works(&job, "done", 2, 2).await;
    let told = lines(&job);
    assert!(began(&told, second).all(|begin| begin.text("source") == "memory" && begin.number("step") > 0));
    nothing_is_lost(&told, second);

    // When a part is lost with its agent, then training begins anew, and says why
    let last = job.round().unwrap().workers[1].node.clone();
    let lost = agents.iter_mut().find(|agent| agent.name == last).unwrap();
    lost.kill();
    *lost = job.start(&last);
    let third = works(&job, "done", second + 1, 2).await;
    assert!(began(&lines(&job), third).all(|begin| begin.text("source") == "nothing" && begin.number("step") == 0));
    std::fs::write(job.path("end"), "1").unwrap();
    let [a, b] = &mut agents;
    assert_eq!(exits_within(LIMIT, [a, b]).await, [0, 0]);
    let stayed = if last == "a" { "b" } else { "a" };
    let said = std::fs::read_to_string(job.path(&format!("agent-{stayed}.log"))).unwrap();
    assert!(said.contains("nothing to go on from in memory: of the snapshot of step "), "{said}");
    assert!(said.contains("rank 1 holds no part"), "{said}");
}

fn began(told: &[Line], round: u64) -> impl Iterator<Item = &Line> {
    let mut of_round = told.iter().filter(move |line| line.is("begin") && line.number("round") == round).peekable();
    assert!(of_round.peek().is_some(), "nobody began in round {round}");
    of_round
}

/// The step that any worker has done last.
fn newest(told: &[Line]) -> u64 {
    told.iter().filter(|line| line.is("done")).map(|line| line.number("step")).max().unwrap_or(0)
}

/// A round begins with the parameters that the step had left, and what it does again comes out the same: so the
/// optimizer's state is there, too.
fn nothing_is_lost(told: &[Line], round: u64) {
    let sum = |step: u64, counts: &dyn Fn(&Line) -> bool| {
        let mut of_step = told.iter().filter(|line| line.is("done") && line.number("step") == step && counts(line));
        of_step.next().map(|line| line.real("sum"))
    };
    let (before, now) = (|line: &Line| line.number("round") < round, |line: &Line| line.number("round") == round);
    for begin in began(told, round) {
        let step = begin.number("step");
        let had = sum(step, &before).unwrap_or_else(|| panic!("{begin:?}: no earlier round has done this step"));
        assert!((begin.real("sum") - had).abs() < 1e-12 * had, "{begin:?}, and the step had left {had}");
        if let (Some(first), Some(again)) = (sum(step + 1, &before), sum(step + 1, &now)) {
            assert!((first - again).abs() < 1e-9 * first, "step {} came to {first}, and then to {again}", step + 1);
        }
    }
}
