//! What is left in memory when a job ends: an agent has it saved and commits it, and the job's next start goes on from
//! there. Not for what lies in the memory.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use elastic_tests::agents::{Agent, Job, exits, json_lines};
use elastic_tests::binaries::binary;
use elastic_tests::etcd::{EtcdOptions, EtcdServer};
use elastic_tests::wait::eventually;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use crate::live::workers;

const LONG: Duration = Duration::from_secs(60);

const TRAINING: [&str; 3] = ["digits", "--epochs=40", "--hidden=128,128"];

fn number(line: &Value, name: &str) -> u64 {
    line[name].as_u64().unwrap()
}

/// A job of two workers a node that has no restart to spare.
fn job(etcd: &EtcdServer, nodes: &str) -> Job {
    let job = Job::on(etcd, nodes).flag("--nproc-per-node=2").flag("--max-restarts=0");
    std::fs::create_dir(job.path("checkpoints")).unwrap();
    let mut program = vec![binary("elastic-trainer").to_str().unwrap().to_owned()];
    program.extend(TRAINING.iter().map(|&word| word.to_owned()));
    program.extend(["--device=cpu", "--checkpoint-every=200", "--snapshot-every=7"].map(str::to_owned));
    program.push(format!("--checkpoint-dir={}", job.path("checkpoints").display()));
    program.push(format!("--trace={}", job.path("trace").display()));
    job.program(program)
}

fn last(trace: &Path, event: &str) -> Option<u64> {
    json_lines(trace).iter().filter(|line| line["event"] == event).map(|line| number(line, "step")).max()
}

/// Holds all workers of the job, some way past a checkpoint, and kills them after `meanwhile`. The last step that was
/// done.
async fn kill_all_workers(job: &Job, count: usize, meanwhile: impl FnOnce()) -> u64 {
    let trace = job.path("trace");
    eventually("a checkpoint and some steps", LONG, async || {
        (last(&trace, "committed").is_some() && last(&trace, "step") >= Some(240)).then_some(())
    })
    .await;
    let all = workers(job);
    assert_eq!(all.len(), count);
    let send = |signal| {
        for pid in all.values() {
            kill_process(Pid::from_raw(*pid).unwrap(), signal).unwrap();
        }
    };
    send(Signal::STOP);
    meanwhile();
    send(Signal::KILL);
    last(&trace, "step").unwrap()
}

/// The step that the newest round began after, once there is a round newer than `round`.
async fn begun_after(job: &Job, round: u64) -> u64 {
    let begin = eventually("the next start's round", LONG, async || {
        let lines = json_lines(&job.path("trace"));
        lines.into_iter().find(|line| line["event"] == "begin" && number(line, "round") > round)
    });
    number(&begin.await, "step")
}

fn newest_round(job: &Job) -> u64 {
    json_lines(&job.path("trace")).iter().map(|line| number(line, "round")).max().unwrap()
}

/// What an agent says it has saved.
fn saved(agent: &Agent) -> Option<u64> {
    let output = agent.output();
    let words = output.split_once("saved step ")?.1;
    words.split_once(' ')?.0.parse().ok()
}

#[tokio::test]
async fn where_no_restart_is_left_the_first_agent_saves_what_is_in_memory_and_the_next_start_goes_on_from_it() {
    let etcd = EtcdServer::start(EtcdOptions::default()).await;
    let job = job(&etcd, "2");
    let mut agents = job.start_all(["a", "b"]);
    let done = kill_all_workers(&job, 4, || ()).await;
    let round = newest_round(&job);
    assert_eq!(exits(&mut agents).await, [1, 1]);

    // Then one has saved the last snapshot, and the other has not, and says so
    let steps: Vec<u64> = agents.iter().filter_map(saved).collect();
    let [step] = steps[..] else { panic!("{steps:?} were saved") };
    assert!(step % 7 == 0 && step + 8 > done, "{done} steps were done, and step {step} was saved");
    let silent = agents.iter().find(|agent| saved(agent).is_none()).unwrap().output();
    assert!(silent.contains("the snapshots in memory are not saved by this node"), "{silent}");
    let pointer = job.record(&etcd, "checkpoint").await.unwrap();
    assert_eq!((number(&pointer, "step"), number(&pointer, "round")), (step, round));
    let verify = Command::new(binary("elastic-trainer"))
        .args(["checkpoint", "verify"])
        .arg(Path::new(pointer["path"].as_str().unwrap()).parent().unwrap())
        .output()
        .unwrap();
    assert!(verify.status.success(), "{}", String::from_utf8_lossy(&verify.stdout));

    // And the next start of the job goes on from there, to the undisturbed run's end.
    let mut agents = job.start_all(["a", "b"]);
    assert_eq!(begun_after(&job, round).await, step);
    assert_eq!(exits(&mut agents).await, [0, 0]);
    let alone = Command::new(binary("elastic-trainer")).args(TRAINING).arg("--device=cpu").output().unwrap();
    let printed = String::from_utf8(alone.stdout).unwrap();
    let checksum = printed.lines().find(|line| line.starts_with("parameters crc32c:")).unwrap();
    assert!(agents.iter().any(|agent| agent.output().contains(checksum)), "not {checksum}");
}

#[tokio::test]
async fn a_rescue_that_fails_leaves_the_last_good_checkpoint_and_says_why() {
    let etcd = EtcdServer::start(EtcdOptions::default()).await;
    let job = job(&etcd, "1");
    let mut agent = job.start("a");
    // Given a folder that cannot be written
    let (folder, aside) = (job.path("checkpoints"), job.path("aside"));
    let spoil = || {
        std::fs::rename(&folder, &aside).unwrap();
        std::fs::write(&folder, "").unwrap();
    };
    kill_all_workers(&job, 2, spoil).await;
    let round = newest_round(&job);
    let committed = last(&job.path("trace"), "committed").unwrap();
    assert_eq!(exits([&mut agent]).await, [1]);
    let output = agent.output();
    let expected = format!("the job resumes from step {committed}, {}/", folder.display());
    assert!(output.contains("the newest snapshot in memory is not saved: ") && output.contains(&expected), "{output}");
    assert!(output.contains("cannot be written"), "{output}");

    std::fs::remove_file(&folder).unwrap();
    std::fs::rename(&aside, &folder).unwrap();
    let mut agent = job.start("a");
    assert_eq!(begun_after(&job, round).await, committed);
    assert_eq!(exits([&mut agent]).await, [0]);
}
