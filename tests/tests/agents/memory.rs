//! Memory that agents keep for their workers: a job goes on from it when all workers die at once.

use std::process::Command;
use std::time::Duration;

use elastic_tests::agents::{Job, LIMIT, exits, json_lines};
use elastic_tests::binaries::binary;
use elastic_tests::etcd::{EtcdOptions, EtcdServer};
use elastic_tests::wait::eventually;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use crate::agents::live::workers;

const LONG: Duration = Duration::from_secs(60);

fn number(line: &Value, name: &str) -> u64 {
    line[name].as_u64().unwrap()
}

#[tokio::test]
async fn when_all_workers_are_killed_at_once_training_goes_on_from_the_last_snapshot_in_memory() {
    let etcd = EtcdServer::start(EtcdOptions::default()).await;
    let job = Job::on(&etcd, "2").flag("--nproc-per-node=2").flag("--max-restarts=4");
    let (trace, checkpoints) = (job.path("trace"), job.path("checkpoints"));
    std::fs::create_dir(&checkpoints).unwrap();
    let trainer = binary("elastic-trainer");
    let training = ["digits", "--epochs=40", "--hidden=128,128"];
    let mut program = vec![trainer.to_str().unwrap().to_owned()];
    program.extend(training.iter().map(|&word| word.to_owned()));
    program.extend(["--checkpoint-every=200".to_owned(), "--snapshot-every=7".to_owned()]);
    program.push(format!("--checkpoint-dir={}", checkpoints.display()));
    program.push(format!("--trace={}", trace.display()));
    let job = job.program(program);
    let mut agents = job.start_all(["a", "b"]);

    // Given a job some way past a checkpoint, when all of its workers are killed at once
    let far = |line: &Value| line["event"] == "step" && number(line, "step") >= 240;
    eventually("a checkpoint and some steps", LONG, async || json_lines(&trace).into_iter().find(far)).await;
    let killed = workers(&job);
    assert_eq!(killed.len(), 4);
    // All are stopped first: a worker that survived the others by some milliseconds would hold the last step.
    for signal in [Signal::STOP, Signal::KILL] {
        for pid in killed.values() {
            kill_process(Pid::from_raw(*pid).unwrap(), signal).unwrap();
        }
    }
    let before = json_lines(&trace);
    let round = before.iter().filter(|line| line["event"] == "begin").map(|line| number(line, "round")).max().unwrap();

    // Then the next ones go on from the last snapshot
    let begin = eventually("the next round", LONG, async || {
        let lines = json_lines(&trace);
        lines.into_iter().find(|line| line["event"] == "begin" && number(line, "round") > round)
    });
    let begin = number(&begin.await, "step");
    let of = |kind: &str| before.iter().filter(|line| line["event"] == kind).map(|line| number(line, "step")).max();
    let (done, committed) = (of("step").unwrap(), of("committed").unwrap_or(0));
    assert!(begin.is_multiple_of(7) || begin.is_multiple_of(200), "{begin} is no step of a snapshot");
    assert!(
        begin + 8 > done && begin > committed,
        "{done} steps were done, {committed} committed, and it went on at {begin}"
    );

    // And the end is the undisturbed run's.
    let [a, b] = &mut agents;
    assert_eq!(exits([a, b]).await, [0, 0]);
    let alone = Command::new(&trainer).args(training).output().unwrap();
    let printed = String::from_utf8(alone.stdout).unwrap();
    let checksum = printed.lines().find(|line| line.starts_with("parameters crc32c:")).unwrap();
    assert!(agents.iter().any(|agent| agent.output().contains(checksum)), "not {checksum}");
}

/// Asks for memory, and after a restart for the same memory again. It writes what it finds to files.
const WORKER: &str = r#"
import json, mmap, os, pathlib, signal, socket, sys, time
folder, round = pathlib.Path(sys.argv[1]), int(os.environ["ELASTIC_ROUND"])
agent = socket.socket(socket.AF_UNIX)
agent.connect(os.environ["ELASTIC_AGENT_SOCKET"])
def ask(**message):
    agent.sendall((json.dumps(message) + "\n").encode())
    answer, files = b"", []
    while not answer.endswith(b"\n"):
        data, received, _, _ = socket.recv_fds(agent, 65536, 4)
        answer, files = answer + data, files + received
    return json.loads(answer), files
early, _ = ask(type="memory", id=1, bytes=4096)
ask(type="register", local_rank=0, pid=os.getpid())
much, none = ask(type="memory", id=2, bytes=1 << 60)
given, [file] = ask(type="memory", id=3, bytes=64 << 20)
memory = mmap.mmap(file, 64 << 20)
text = dict(early=early, much=much, files=len(none), given=given, found=memory[:4].decode())
memory[:] = b"left" * (16 << 20)
(folder / "told.new").write_text(json.dumps(text) + "\n")
(folder / "told.new").rename(folder / f"told-{round}")
while not (folder / f"go-{round}").exists(): time.sleep(0.02)
if round == 1: os.kill(os.getpid(), signal.SIGKILL)
"#;

#[tokio::test]
async fn an_agent_keeps_a_workers_memory_for_its_successor_and_lends_no_more_than_there_is() {
    let etcd = EtcdServer::start(EtcdOptions::default()).await;
    let job = Job::on(&etcd, "1").flag("--max-restarts=1");
    let script = job.path("worker.py");
    std::fs::write(&script, WORKER).unwrap();
    let folder = job.path("").display().to_string();
    let job = job.program(["python3".to_owned(), script.display().to_string(), folder]);
    let mut agent = job.start("a");
    let told = async |round: u64| {
        let name = format!("told-{round}");
        eventually(&name, LIMIT, async || json_lines(&job.path(&name)).pop()).await
    };
    let go = |round: u64| std::fs::write(job.path(&format!("go-{round}")), "").unwrap();

    let first = told(1).await;
    assert_eq!((&first["early"]["type"], &first["early"]["id"]), (&"error".into(), &1.into()), "{first}");
    assert_eq!(
        (&first["much"]["type"], &first["much"]["id"], &first["files"]),
        (&"error".into(), &2.into(), &0.into())
    );
    assert!(first["much"]["message"].as_str().unwrap().contains("more than this node can spare"), "{first}");
    assert_eq!(first["given"], serde_json::json!({"type": "memory", "id": 3, "bytes": 64 << 20}));
    assert_eq!(first["found"], "\0\0\0\0");
    // The memory does not count as the agent's own.
    let status = std::fs::read_to_string(format!("/proc/{}/status", agent.pid())).unwrap();
    let shared = status.lines().find_map(|line| line.strip_prefix("RssShmem:")).unwrap();
    let kilobytes: u64 = shared.trim().trim_end_matches(" kB").parse().unwrap();
    assert!(kilobytes < 1024, "{kilobytes} kB");

    go(1);
    assert_eq!(told(2).await["found"], "left");
    go(2);
    assert_eq!(exits([&mut agent]).await, [0]);
}
