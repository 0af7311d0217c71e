//! Snapshots in the agent's memory: training whose workers all die continues from there.

use elastic_tests::prelude::*;

use crate::pytorch::trace::{LIMIT, Line, ended, lines, works};

const SCRIPT: &str = "trains_with_snapshots.py";

#[test]
fn snapshots_are_whole_or_do_not_count() {
    let Some(torch) = Torch::find() else { return };
    for name in ["keeps_snapshots.py", "keeps_checkpoints.py"] {
        let ended = torch.run(&script(name)).output().unwrap();
        assert!(ended.status.success(), "{}", String::from_utf8_lossy(&ended.stderr));
    }
}

#[tokio::test]
async fn ddp_continues_from_the_agents_memory() {
    let Some(torch) = Torch::find() else { return };
    let job = Job::on_etcd("2").await.flag("--max-restarts=2").script(&torch, SCRIPT, &[]);
    let mut agents = job.start_all(["a", "b"]);
    works(&job, "done", 1, 2).await;

    // When all workers are killed while they copy, then training continues from the copy before
    job.write("hold", "");
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
    ended(&mut agents, 0).await;
}

#[tokio::test]
async fn the_last_snapshot_is_saved_when_none_is_left_to_continue() {
    let Some(torch) = Torch::find() else { return };
    let job = Job::on_etcd("1").await.flag("--max-restarts=0").script(&torch, SCRIPT, &[]);
    std::fs::create_dir(job.path("checkpoints")).unwrap();
    let mut agent = job.start("a");
    let committed = async || job.record("checkpoint").await.and_then(|record| record["step"].as_u64());
    let beside = eventually("a snapshot is written and committed beside training", LIMIT, committed).await;
    assert!(beside >= 10, "{beside}");

    eventually("more steps are done", LIMIT, async || (newest(&lines(&job)) >= beside + 3).then_some(())).await;
    job.runs(1, 1).await.workers[0].kill();
    assert_eq!(agent.exit(LIMIT).await, JOB_FAILED);
    let (saved, done) = (committed().await.unwrap(), newest(&lines(&job)));
    assert!((done - 1..=done).contains(&saved) && saved > beside, "saved {saved}, done {done}, before that {beside}");

    // When the job is started again, then it continues from what was saved
    std::fs::write(job.path("end"), (saved + 10).to_string()).unwrap();
    assert_eq!(job.start("a").exit(LIMIT).await, 0);
    let told = lines(&job);
    let begin = told.iter().rfind(|line| line.is("begin")).unwrap();
    assert_eq!((begin.text("source"), begin.number("step")), ("checkpoint", saved));
    nothing_is_lost(&told, begin.number("round"));

    // And so does one whose store is new
    let other = Job::met_by(&["--standalone"], "1").script(&torch, SCRIPT, &[]);
    std::os::unix::fs::symlink(job.path("checkpoints"), other.path("checkpoints")).unwrap();
    other.write("end", &saved.to_string());
    assert_eq!(other.start("a").exit(LIMIT).await, 0);
    let begin = lines(&other).into_iter().find(|line| line.is("begin")).unwrap();
    assert!(begin.text("source") == "checkpoint" && begin.number("step") >= saved, "{begin:?}");
}

#[tokio::test]
async fn a_sharded_model_outlives_a_node_and_is_divided_again() {
    let Some(torch) = Torch::find() else { return };
    let job = Job::on_etcd("1:2").await.flag("--max-restarts=2").script(&torch, SCRIPT, &["sharded"]);
    std::fs::create_dir(job.path("checkpoints")).unwrap();
    let mut agents = job.start_all(["a", "b"]);
    let mut first = works(&job, "done", 1, 2).await;

    // When all workers are killed while one copies more slowly than the other, then both still have the step before
    job.write("hold-b", "");
    let ahead = async || {
        let told = lines(&job);
        let held = told.iter().find(|line| line.is("held"))?.number("step");
        told.iter().any(|line| line.is("ahead") && line.number("step") > held).then_some(())
    };
    eventually("a does the next step while b is in the midst of a copy", LIMIT, ahead).await;
    std::fs::remove_file(job.path("hold-b")).unwrap();
    job.runs(first, 2).await.workers.iter().for_each(|worker| worker.kill());
    first = works(&job, "done", first + 1, 2).await;
    continues_whole(&lines(&job), first);

    // When an agent is killed, and the part in its memory is lost, then the other has a copy
    agents[1].kill();
    let alone = works(&job, "done", first + 1, 1).await;
    continues_whole(&lines(&job), alone);

    // When a node joins, then it gets its part of the whole
    agents[1] = job.start("b");
    let both = works(&job, "done", alone + 1, 2).await;
    continues_whole(&lines(&job), both);

    let said = std::fs::read_to_string(job.path("agent-a.log")).unwrap();
    assert!(said.contains("from memory: 2 parts, for 1 rank"), "{said}");

    // When all memory is lost, then one node continues from the parts that two wrote to disk
    let begun = began(&lines(&job), both).next().unwrap().number("step");
    let committed = async || job.record("checkpoint").await.filter(|it| it["step"].as_u64() > Some(begun));
    eventually("a checkpoint of two parts is committed", LIMIT, committed).await;
    agents.iter_mut().for_each(Agent::kill);
    let committed = committed().await.unwrap();
    let mut other = job.start("c");
    let from_disk = works(&job, "done", both + 1, 1).await;
    let told = lines(&job);
    nothing_is_lost(&told, from_disk);
    let begin = began(&told, from_disk).next().unwrap();
    assert_eq!((begin.text("source"), Some(begin.number("step"))), ("checkpoint", committed["step"].as_u64()));
    let mut same = told.iter().filter(|line| line.is("done") && line.number("step") == begin.number("step"));
    assert!(same.any(|line| line.number("round") == both && line.text("digest") == begin.text("digest")), "{begin:?}");

    job.write("end", "1");
    assert_eq!(other.exit(LIMIT).await, 0);
}

#[tokio::test]
#[ignore = "minutes of restarts"]
async fn parts_of_many_ranks_are_divided_among_fewer_and_more() {
    let Some(torch) = Torch::find() else { return };
    let job = Job::on_etcd("1:4").await.flag("--max-restarts=4").script(&torch, SCRIPT, &["sharded"]);
    let mut agents: Vec<Agent> = job.start_all(["a", "b", "c", "d"]).into();
    let mut round = works(&job, "done", 1, 4).await;

    // When all workers are killed, then each takes its own part
    job.runs(round, 4).await.workers.iter().for_each(|worker| worker.kill());
    round = works(&job, "done", round + 1, 4).await;
    continues_whole(&lines(&job), round);

    // When one of four nodes is lost, then three continue; and four when it is back
    for lost in [0, 3] {
        agents[lost].kill();
        round = works(&job, "done", round + 1, 3).await;
        continues_whole(&lines(&job), round);
        agents[lost] = job.start(&agents[lost].name.clone());
        round = works(&job, "done", round + 1, 4).await;
        continues_whole(&lines(&job), round);
    }

    // When two nodes are lost at once that do not keep each other's parts, then the other two continue
    let node = |rank: usize| job.round().unwrap().workers[rank].node.clone();
    let of_rank: Vec<String> = (0..4).map(node).collect();
    for agent in agents.iter_mut().filter(|agent| [&of_rank[0], &of_rank[2]].contains(&&agent.name)) {
        agent.kill();
    }
    round = works(&job, "done", round + 1, 2).await;
    continues_whole(&lines(&job), round);

    // When those two are lost that keep one part, then training begins again, and says why
    for name in [&of_rank[0], &of_rank[2]] {
        *agents.iter_mut().find(|agent| agent.name == *name).unwrap() = job.start(name);
    }
    round = works(&job, "done", round + 1, 4).await;
    continues_whole(&lines(&job), round);
    // The last snapshots of the two nodes' round would be whole, too.
    let begun = began(&lines(&job), round).next().unwrap().number("step");
    eventually("those are replaced", LIMIT, async || (newest(&lines(&job)) > begun + 4).then_some(())).await;
    let of_rank: Vec<String> = (0..4).map(node).collect();
    for agent in agents.iter_mut().filter(|agent| [&of_rank[1], &of_rank[2]].contains(&&agent.name)) {
        agent.kill();
    }
    round = works(&job, "done", round + 1, 2).await;
    assert!(began(&lines(&job), round).all(|begin| begin.text("source") == "nothing" && begin.number("step") == 0));
    let said = std::fs::read_to_string(job.path(&format!("agent-{}.log", of_rank[0]))).unwrap();
    // Of the last step the copies on other nodes may not have been whole either.
    assert!(said.contains("no rank holds part ") && said.contains(" of the 4 (counted from 0)"), "{said}");
    job.write("end", "1");
    for agent in agents.iter_mut().filter(|agent| [&of_rank[0], &of_rank[3]].contains(&&agent.name)) {
        assert_eq!(agent.exit(LIMIT).await, 0);
    }
}

#[tokio::test]
#[ignore = "minutes of restarts"]
async fn a_replica_of_shards_gives_its_state_to_others() {
    let Some(torch) = Torch::find() else { return };
    let etcd = EtcdServer::start(EtcdOptions::default()).await;
    for (word, other) in [("hsdp", "sharded"), ("sharded", "hsdp")] {
        let job = Job::on(&etcd, "1:2").named(word).flag("--nproc-per-node=2").flag("--max-restarts=2");
        let job = job.script(&torch, SCRIPT, &[word]);
        let mut agents = job.start_all(["a", "b"]);
        let first = works(&job, "done", 1, 4).await;
        job.runs(first, 4).await.workers[3].kill();
        let second = works(&job, "done", first + 1, 4).await;
        continues_whole(&lines(&job), second);

        agents[0].kill();
        let alone = works(&job, "done", second + 1, 2).await;
        continues_whole(&lines(&job), alone);
        agents[0] = job.start("a");
        let both = works(&job, "done", alone + 1, 4).await;
        continues_whole(&lines(&job), both);

        // And the parts of one layout are divided again for the other
        job.write("layout", other);
        job.runs(both, 4).await.workers[3].kill();
        let changed = works(&job, "done", both + 1, 4).await;
        continues_whole(&lines(&job), changed);
        job.write("end", "1");
        ended(&mut agents, 0).await;
    }
}

#[tokio::test]
async fn parts_of_layers_continue_from_memory() {
    let Some(torch) = Torch::find() else { return };
    let job = Job::on_etcd("2").await.flag("--nproc-per-node=2").flag("--max-restarts=1");
    let job = job.script(&torch, SCRIPT, &["tensor"]);
    let mut agents = job.start_all(["a", "b"]);
    let first = works(&job, "done", 1, 4).await;
    job.runs(first, 4).await.workers[3].kill();
    let second = works(&job, "done", first + 1, 4).await;
    continues_whole(&lines(&job), second);
    job.write("end", "1");
    ended(&mut agents, 0).await;
}

/// A round begins with the very bits that a step had left, out of memory, and with no more than two steps to do again.
fn continues_whole(told: &[Line], round: u64) {
    nothing_is_lost(told, round);
    let before = || told.iter().filter(|line| line.is("done") && line.number("round") < round);
    let last = before().map(|line| line.number("step")).max().unwrap();
    for begin in began(told, round) {
        assert_eq!(begin.text("source"), "memory", "{begin:?}");
        assert!(begin.number("step") + 2 >= last, "{begin:?}, and step {last} was done");
        let mut same = before().filter(|line| line.number("step") == begin.number("step"));
        assert!(same.any(|line| line.text("digest") == begin.text("digest")), "{begin:?}");
    }
}

fn began(told: &[Line], round: u64) -> impl Iterator<Item = &Line> {
    let mut of_round = told.iter().filter(move |line| line.is("begin") && line.number("round") == round).peekable();
    assert!(of_round.peek().is_some(), "no one began in round {round}");
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
