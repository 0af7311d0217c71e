//! Replicas of a sharded model, one on each node, whose workers live and die together.

use elastic_tests::prelude::*;

use super::promises::{each_sample_once_an_epoch, result};
use super::{SCRIPT, finish, first_step, is_as_undisturbed, kill, last_step, meet_without_agents, pid_of};
use crate::pytorch::trace::{LIMIT, Line, ended, lines, works};

/// The rest of what must hold of replicas, where a test sees more than from outside of the processes.
#[test]
fn the_ranks_of_a_replica_come_to_one_decision() {
    let Some(torch) = Torch::find() else { return };
    meet_without_agents(&torch, "forms_replicas.py", &[]);
    meet_without_agents(&torch, "forms_replicas.py", &["across"]);
}

/// What a replica's ranks divide among them besides the parameters, they train as one rank does that has all.
#[test]
fn the_ranks_of_a_replica_divide_layers_and_copies() {
    divide_replicas(&["both", "copies", "pipeline", "staged-shards"]);
}

#[test]
#[ignore = "half a minute: `make chaos` runs it"]
fn the_ranks_of_a_replica_divide_stages_and_parts_of_layers() {
    divide_replicas(&["tensor", "staged-parts"]);
}

fn divide_replicas(ways: &[&str]) {
    let Some(torch) = Torch::find() else { return };
    for way in ways {
        meet_without_agents(&torch, "divides_replicas.py", &[way]);
    }
}

#[tokio::test]
#[ignore = "half a minute: `make chaos` runs it"]
async fn a_replica_dies_as_one_and_the_others_keep_their_processes() {
    die_as_one(2, &["sharded"]).await;
}

#[tokio::test]
#[ignore = "a minute: `make chaos` runs it"]
async fn a_replica_of_shards_and_parts_of_layers_dies_as_one_too() {
    die_as_one(4, &["sharded", "tensor"]).await;
}

#[tokio::test]
#[ignore = "half a minute: `make chaos` runs it"]
async fn a_replica_of_the_stages_of_a_pipeline_dies_as_one_too() {
    die_as_one(2, &["pipeline"]).await;
}

async fn die_as_one(workers: u64, words: &[&str]) {
    let Some(torch) = Torch::find() else { return };
    let job = Job::on_etcd("1:2").await.flag(&format!("--nproc-per-node={workers}")).flag("--max-restarts=1");
    // Both are in the first round, and no process is stopped that computes its first steps beside many others.
    let job = job.conf("last_call_timeout", "60s").conf("quiesce_timeout", "15s");
    let job = job.flag("--warm-up=120").script(&torch, SCRIPT, words);
    let mut agents: [Agent; 2] = job.start_all(["a", "b"]);
    let all = 2 * workers;
    let first = works(&job, "applied", 1, all).await;
    let (a, b) = (pids(&job, "a", first), pids(&job, "b", first));
    assert_eq!((a.len(), b.len()), (workers as usize, workers as usize));

    // When a worker of a replica is killed, then the other continues in its processes, without it
    kill(*b.last().unwrap());
    let alone = works(&job, "applied", first + 1, workers).await;
    assert_eq!(pids(&job, "a", alone), a);
    // And all workers of that replica are others, which get the state, each its part
    let both = works(&job, "applied", alone + 1, all).await;
    assert_eq!(pids(&job, "a", both), a);
    let replacements = pids(&job, "b", both);
    assert!(replacements.len() == workers as usize && replacements.is_disjoint(&b), "{b:?}, then {replacements:?}");
    begins_with_the_state(&lines(&job), "b", both, workers);

    // When an agent is killed, then its replica is gone, and comes back by another agent
    agents[0].kill();
    let alone = works(&job, "applied", both + 1, workers).await;
    assert_eq!(pids(&job, "b", alone), replacements);
    agents[0] = job.start("a");
    let third = works(&job, "applied", alone + 1, all).await;
    assert_eq!(pids(&job, "b", third), replacements);
    begins_with_the_state(&lines(&job), "a", third, workers);

    // When a node leaves as planned, then no step is done again
    agents[1].signal(Signal::TERM);
    assert_eq!(agents[1].exit(LIMIT).await, 3);
    let last = works(&job, "applied", third + 1, workers).await;
    let told = lines(&job);
    assert_eq!(last_step(&told, third) + 1, first_step(&told, last), "a leave repeats nothing");

    let epochs = finish(&job);
    assert_eq!(agents[0].exit(LIMIT).await, 0);
    let told = lines(&job);
    each_sample_once_an_epoch(&told, epochs);

    // Then the result is that of a training that nothing disturbed, and that was not sharded
    is_as_undisturbed(&torch, &[], &told, epochs).await;
}

#[tokio::test]
#[ignore = "half a minute: `make chaos` runs it"]
async fn replicas_continue_from_the_agents_memory_when_all_die_and_from_disk_when_all_leave() {
    continue_from_memory_and_disk("sharded").await;
}

#[tokio::test]
#[ignore = "half a minute: `make chaos` runs it"]
async fn pipelines_continue_from_the_agents_memory_when_all_die_and_from_disk_when_all_leave() {
    continue_from_memory_and_disk("pipeline").await;
}

async fn continue_from_memory_and_disk(word: &str) {
    let Some(torch) = Torch::find() else { return };
    let job = Job::on_etcd("2").await.flag("--nproc-per-node=2").flag("--max-restarts=1");
    let job = job.script(&torch, SCRIPT, &[word]);
    job.write("snapshots", "");
    std::fs::create_dir(job.path("checkpoints")).unwrap();
    let mut agents: [Agent; 2] = job.start_all(["a", "b"]);
    let first = works(&job, "applied", 1, 4).await;
    for node in ["a", "b"] {
        pids(&job, node, first).into_iter().for_each(kill);
    }
    let second = works(&job, "applied", first + 1, 4).await;
    let told = lines(&job);
    let applied = |line: &&Line| line.is("applied") && line.number("round") == first;
    let done = told.iter().filter(applied).map(|line| line.number("step")).max().unwrap() + 1;
    for begin in told.iter().filter(|line| line.is("begin") && line.number("round") == second) {
        // A step's copy is complete when the next one is done.
        assert!((done - 2..=done + 1).contains(&begin.number("step")), "{begin:?}, {done} steps were done");
    }

    // Beside training the first node writes a checkpoint of both parts
    let committed = async || job.record("checkpoint").await.and_then(|record| record["step"].as_u64());
    let beside = eventually("a checkpoint is committed", LIMIT, committed).await;
    assert!(beside >= 10, "{beside}");

    // When the job is asked to leave, then its last step is saved, and it continues from there
    agents.iter().for_each(|agent| agent.signal(Signal::TERM));
    ended(&mut agents, LEFT).await;
    let done = last_step(&lines(&job), second) + 1;
    assert_eq!(committed().await.unwrap(), done);
    agents = job.start_all(["a", "b"]);
    let third = works(&job, "applied", second + 1, 4).await;
    assert_eq!(first_step(&lines(&job), third), done);

    let epochs = finish(&job);
    ended(&mut agents, 0).await;
    each_sample_once_an_epoch(&lines(&job), epochs);
    result(&lines(&job));
}

#[tokio::test]
#[ignore = "half a minute: `make chaos` runs it"]
async fn a_replica_of_two_nodes_takes_a_spare_for_a_lost_one_and_the_other_keeps_its_processes() {
    take_a_spare("sharded").await;
}

#[tokio::test]
#[ignore = "half a minute: `make chaos` runs it"]
async fn a_pipeline_over_two_nodes_takes_a_spare_for_a_lost_one_too() {
    take_a_spare("pipeline").await;
}

async fn take_a_spare(word: &str) {
    let Some(torch) = Torch::find() else { return };
    let job = Job::on_etcd("2:4").await.flag("--replica-nodes=2").flag("--max-restarts=0").flag("--warm-up=120");
    // All four are in the first round, and no process is stopped while others import.
    let job = job.conf("last_call_timeout", "60s").flag("--shutdown-timeout=20");
    let job = job.script(&torch, SCRIPT, &[word, "across"]);
    let names = ["a", "b", "c", "d"];
    let mut agents: Vec<Agent> = job.start_all(names).into();
    let first = works(&job, "applied", 1, 4).await;
    let mut nodes: BTreeMap<u64, String> = BTreeMap::new();
    for line in lines(&job).iter().filter(|line| line.is("applied") && line.number("round") == first) {
        nodes.insert(line.number("rank"), line.text("node").to_owned());
    }
    let [kept, other, left, lost] = [0, 1, 2, 3].map(|rank| nodes[&rank].clone());
    let whole: Vec<u64> = [&kept, &other].map(|node| pid_of(&job, node, first)).to_vec();
    let spare = job.start("e");
    spare.says("the workers are warm", LIMIT).await;

    // When a node is lost, then the other replica keeps its processes
    agents.remove(names.iter().position(|name| *name == lost).unwrap()).kill();
    let alone = works(&job, "applied", first + 1, 2).await;
    // And the spare takes its place: both workers of that replica are new, and get the state, each its part
    let both = works(&job, "applied", alone, 4).await;
    for round in [alone, both] {
        assert_eq!([&kept, &other].map(|node| pid_of(&job, node, round)).to_vec(), whole);
    }
    assert_ne!(pid_of(&job, &left, both), pid_of(&job, &left, first));
    let told = lines(&job);
    let begins: Vec<_> = told.iter().filter(|line| line.is("begin") && line.number("round") == both).collect();
    let names: BTreeSet<&str> = begins.iter().map(|line| line.text("node")).collect();
    assert_eq!(names, BTreeSet::from([left.as_str(), "e"]));
    assert!(begins.iter().all(|line| line.number("step") > 0), "{begins:?}");
    // No restart was charged: there is none.
    assert_eq!(job.record("round").await.unwrap()["restarts"], 0);

    let epochs = finish(&job);
    agents.push(spare);
    ended(&mut agents, 0).await;
    each_sample_once_an_epoch(&lines(&job), epochs);
    is_as_undisturbed(&torch, &[], &lines(&job), epochs).await;
}

#[tokio::test]
#[ignore = "half a minute: `make chaos` runs it"]
async fn replicas_of_two_nodes_continue_from_memory_when_a_node_is_lost_and_all_workers_die() {
    let Some(torch) = Torch::find() else { return };
    let job = Job::on_etcd("2:4").await.flag("--replica-nodes=2").flag("--max-restarts=3");
    let job = job.conf("last_call_timeout", "60s").flag("--shutdown-timeout=20");
    let job = job.script(&torch, SCRIPT, &["sharded", "across"]);
    job.write("snapshots", "");
    let names = ["a", "b", "c", "d"];
    let mut agents: Vec<Agent> = job.start_all(names).into();
    let first = works(&job, "applied", 1, 4).await;
    let node_of = |rank: u64| {
        let told = lines(&job);
        let mut of_round = told.iter().filter(|line| line.is("applied") && line.number("round") == first);
        of_round.find(|line| line.number("rank") == rank).unwrap().text("node").to_owned()
    };
    let [kept, other, left, lost] = [0, 1, 2, 3].map(node_of);
    let workers = [&kept, &other, &left].map(|node| pid_of(&job, node, first));

    // When a node is lost in the moment in which all other workers die, then no process has the state any more
    agents.remove(names.iter().position(|name| *name == lost).unwrap()).kill();
    workers.into_iter().for_each(kill);
    // And the replica whose nodes have both of its parts in memory continues, each with its own
    let alone = works(&job, "applied", first + 1, 2).await;
    let told = lines(&job);
    let applied = told.iter().filter(|line| line.is("applied") && line.number("round") == first);
    let done = applied.map(|line| line.number("step")).max().unwrap() + 1;
    let begins: Vec<_> = told.iter().filter(|line| line.is("begin") && line.number("round") == alone).collect();
    let nodes: BTreeSet<&str> = begins.iter().map(|line| line.text("node")).collect();
    assert_eq!(nodes, BTreeSet::from([kept.as_str(), other.as_str()]));
    // A step's copy is complete when the next one is done.
    assert!(begins.iter().all(|line| (done - 2..=done + 1).contains(&line.number("step"))), "{begins:?} of {done}");

    // When a node comes for the lost one, then the other replica gets its parts from this one
    agents.push(job.start("e"));
    let both = works(&job, "applied", alone + 1, 4).await;
    let told = lines(&job);
    begins_with_the_state(&told, "e", both, 1);
    begins_with_the_state(&told, &left, both, 1);

    let epochs = finish(&job);
    ended(&mut agents, 0).await;
    each_sample_once_an_epoch(&lines(&job), epochs);
    is_as_undisturbed(&torch, &[], &lines(&job), epochs).await;
}

/// The workers of a node that have done a step in a round.
fn pids(job: &Job, node: &str, round: u64) -> BTreeSet<u64> {
    let told = lines(job);
    let of =
        told.iter().filter(|line| line.is("applied") && line.text("node") == node && line.number("round") == round);
    of.map(|line| line.number("pid")).collect()
}

fn begins_with_the_state(told: &[Line], node: &str, round: u64, workers: u64) {
    let begins: Vec<_> = told
        .iter()
        .filter(|line| line.is("begin") && line.text("node") == node && line.number("round") == round)
        .collect();
    assert!(begins.len() == workers as usize && begins.iter().all(|line| line.number("step") > 0), "{begins:?}");
}
