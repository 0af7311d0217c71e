//! Memory that agents keep for their workers: a job continues from it when all workers die at once.

use elastic_tests::prelude::*;

use crate::agents::final_save::{begun_after, ends_as_undisturbed, kill_all_workers, last, newest_round, training_job};

#[tokio::test]
async fn when_all_workers_are_killed_at_once_training_continues_from_the_last_snapshot_in_memory() {
    let job = training_job("2", 4).await;
    let mut agents = job.start_all(["a", "b"]);
    let done = kill_all_workers(&job, 4, || ()).await;
    let (round, committed) = (newest_round(&job), last(&job.path("trace"), "committed").unwrap());

    // The next ones continue from the last snapshot
    let begin = begun_after(&job, round).await;
    assert!(begin.is_multiple_of(7) || begin.is_multiple_of(200), "{begin} is no step of a snapshot");
    assert!(
        begin + 8 > done && begin > committed,
        "{done} steps were done, {committed} committed, and it continued at {begin}"
    );

    // And the end is the undisturbed run's.
    assert_eq!(exits(&mut agents).await, [0, 0]);
    ends_as_undisturbed(&agents);
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
    let job = Job::on_etcd("1").await.flag("--max-restarts=1").python_script(WORKER);
    let mut agent = job.start("a");
    let told = async |round: u64| {
        let name = format!("told-{round}");
        eventually(&name, LIMIT, async || job.lines(&name).pop()).await
    };
    let go = |round: u64| job.write(&format!("go-{round}"), "");

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
    let kilobytes = agent.kilobytes("RssShmem:");
    assert!(kilobytes < 1024, "{kilobytes} kB");

    go(1);
    assert_eq!(told(2).await["found"], "left");
    go(2);
    assert_eq!(exits([&mut agent]).await, [0]);
}
