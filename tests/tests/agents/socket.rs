//! A worker in another language that uses only its standard library, and speaks to its agent over the socket.

use std::io::Write;
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use elastic_agent::for_tests::{JobPaths, JobStore, WorkerSocket};
use elastic_node::Status;
use elastic_rendezvous::job::Keys;
use elastic_store::embedded::MemoryStore;
use elastic_store::embedded::mvcc::Limits;
use elastic_tests::prelude::*;
use elastic_torchelastic::{DEFAULT_PREFIX, Paths};

/// Registers, tells its progress, meets its peers, and commits a checkpoint; what it hears goes to a file.
const WORKER: &str = r#"
import json, os, pathlib, socket, sys, time
folder, rank, round = pathlib.Path(sys.argv[1]), int(os.environ["RANK"]), int(os.environ["ELASTIC_ROUND"])
agent = socket.socket(socket.AF_UNIX)
agent.connect(os.environ["ELASTIC_AGENT_SOCKET"])
lines = agent.makefile()
def say(**message): agent.sendall((json.dumps(message) + "\n").encode())
def ask(**message):
    say(**message)
    with open(folder / f"heard-{rank}", "a") as heard: heard.write(lines.readline())
def commit(step):
    path = folder / f"ckpt-{step}"
    path.touch()
    return dict(type="commit", id=step, checkpoint=dict(step=step, path=str(path), digest="crc32c:0"))
ask(type="register", local_rank=int(os.environ["LOCAL_RANK"]), pid=os.getpid())
say(type="progress", step=10, loss=0.5)
ask(type="barrier", id=1, name="all-here")
if rank == 0: ask(**commit(round * 10))
(folder / f"ready-{round}-{rank}").touch()
while not (folder / f"go-{round}").exists(): time.sleep(0.02)
if (folder / f"late-{round}").exists() and rank == 1: ask(**commit(1000))
if (folder / "stay").exists(): time.sleep(1000)
"#;

async fn job_on(nnodes: &str) -> Job {
    Job::on_etcd(nnodes).await.python_script(WORKER)
}

#[tokio::test]
async fn a_worker_registers_meets_its_peer_and_commits() {
    let job = job_on("2").await;
    let mut agents = job.start_all(["a", "b"]);
    job.appears("ready-1-0").await;
    job.appears("ready-1-1").await;

    let heard = job.lines("heard-0");
    let types: Vec<&str> = heard.iter().filter_map(|line| line["type"].as_str()).collect();
    assert_eq!(types, ["welcome", "barrier_passed", "committed"], "{heard:?}");
    let place = &heard[0];
    assert_eq!((&place["job"], &place["round"], &place["world_size"]), (&"job".into(), &1.into(), &2.into()));
    assert_eq!(heard[2]["step"], 10);
    let checkpoint = job.record("checkpoint").await.unwrap();
    assert_eq!(
        (&checkpoint["step"], &checkpoint["path"], &checkpoint["round"]),
        (&10.into(), &job.path("ckpt-10").to_str().unwrap().into(), &1.into())
    );

    job.write("go-1", "");
    assert_eq!(exits(&mut agents).await, [0, 0]);
}

#[tokio::test]
async fn an_evicted_nodes_commit_is_refused() {
    let job = job_on("1:2").await.gathers();
    let first = job.start("a");
    assert_eq!(job.leader().await, "a");
    let second = job.start("b");
    job.appears("ready-1-0").await;
    job.appears("ready-1-1").await;

    // Given rank 1 on a frozen agent, when its worker offers a checkpoint and the others have gone on without it
    let members = rank_holders(&job).await;
    let frozen = if members[1] == "a" { &first } else { &second };
    frozen.signal(Signal::STOP);
    for name in ["stay", "late-1", "go-1"] {
        job.write(name, "");
    }
    eventually("the other continues alone", LEASE * 4, async || {
        let round = job.record("round").await?;
        (round["state"] == "running" && round["number"].as_u64()? >= 2 && round["group_world_size"] == 1).then_some(())
    })
    .await;
    job.appears("ready-2-0").await;

    // Then it is not published when the agent thaws and reads it
    frozen.signal(Signal::CONT);
    frozen.says("evicted: ", LIMIT).await;
    job.appears("ready-3-1").await;
    let step = job.record("checkpoint").await.unwrap()["step"].as_u64().unwrap();
    assert!(step < 1000, "an evicted node's checkpoint was published");
}

#[tokio::test]
async fn a_job_resumes_from_where_a_restored_backup_knows_it() {
    let mut job = job_on("2:3").await;
    let [a, b] = job.start_all(["a", "b"]);
    job.appears("ready-1-0").await;
    job.appears("ready-1-1").await;

    // Given a backup of etcd, and a later round with a later checkpoint: every agent knows of that round
    job.etcd().snapshot(&job.path("backup.db"));
    let c = job.start("c");
    let later = ["ready-2-0", "ready-2-1", "ready-2-2"];
    for name in later {
        job.appears(name).await;
    }
    assert_eq!(job.record("checkpoint").await.unwrap()["step"], 20);

    // When it is restored, then the agents see that the store has gone back, and end
    let backup = job.path("backup.db");
    job.etcd_mut().restore(&backup).await;
    let mut agents = [a, b, c];
    assert_eq!(exits(&mut agents).await, [1, 1, 1]);
    assert!(agents.iter().all(|agent| agent.output().contains("store lost")));

    // and those that are started after that resume from the earlier checkpoint.
    for name in later {
        std::fs::remove_file(job.path(name)).unwrap();
    }
    let _again = job.start_all(["a", "b"]);
    job.appears("ready-2-0").await;
    let heard = job.lines("heard-0");
    let places: Vec<_> = heard.iter().filter(|line| line["type"] == "welcome").collect();
    assert_eq!(places.len(), 3, "{heard:?}");
    assert_eq!((&places[2]["round"], &places[2]["checkpoint"]["step"]), (&2.into(), &10.into()), "{heard:?}");
}

/// Before it registers, commits a checkpoint that exists; afterwards, one that does not.
const UNFIT: &str = r#"
import json, os, pathlib, socket, sys
folder = pathlib.Path(sys.argv[1])
agent = socket.socket(socket.AF_UNIX)
agent.connect(os.environ["ELASTIC_AGENT_SOCKET"])
lines = agent.makefile()
def ask(**message):
    agent.sendall((json.dumps(message) + "\n").encode())
    with open(folder / "heard", "a") as heard: heard.write(lines.readline())
there = folder / "there"
there.touch()
def commit(path): ask(type="commit", id=1, checkpoint=dict(step=1, path=str(path), digest="crc32c:0"))
commit(there)
ask(type="register", local_rank=0, pid=os.getpid())
for path in (folder / "not-there", there / "below-a-file", there): commit(path)
"#;

#[tokio::test]
async fn only_a_worker_commits_and_only_what_is_there() {
    let job = Job::met_by(&["--standalone"], "1").python_script(UNFIT);
    assert_eq!(exits(&mut [job.start("a")]).await, [0]);
    let heard = job.lines("heard");
    let answers: Vec<&str> = heard
        .iter()
        .filter(|line| line["type"] != "welcome")
        .map(|line| line["message"].as_str().unwrap_or(line["type"].as_str().unwrap()))
        .collect();
    let [unregistered, missing, below, committed] = answers[..] else { panic!("{heard:?}") };
    assert!(unregistered.contains("registered"), "{heard:?}");
    assert!(missing.contains("nothing at") && below.contains("nothing at"), "{heard:?}");
    assert_eq!(committed, "committed");
}

/// The nodes of round 1 by group rank.
async fn rank_holders(job: &Job) -> Vec<String> {
    let mut nodes: Vec<(u64, String)> = Vec::new();
    for record in job.records("rounds/1/").await {
        nodes.push((record["group_rank"].as_u64().unwrap(), record["name"].as_str().unwrap().to_owned()));
    }
    nodes.sort();
    nodes.into_iter().map(|(_, name)| name).collect()
}

/// Sends far more than an agent can handle at once, on connections that it does not keep, and then fails. Rank 1 stays.
const FLOODS: &str = r#"
import json, os, pathlib, socket, sys, time
folder, rank, round = pathlib.Path(sys.argv[1]), int(os.environ["RANK"]), int(os.environ["ELASTIC_ROUND"])
def flood(lines):
    agent = socket.socket(socket.AF_UNIX)
    agent.connect(os.environ["ELASTIC_AGENT_SOCKET"])
    agent.settimeout(3)
    agent.sendall((json.dumps(dict(type="register", local_rank=0, pid=os.getpid())) + "\n").encode())
    try:
        agent.sendall("".join(json.dumps(line) + "\n" for line in lines).encode())
    except OSError:
        pass
    return agent
if round == 1 and rank == 0:
    flood(dict(type="barrier", id=n, name=f"left-{n}") for n in range(20000)).close()
    kept = flood(dict(type="barrier", id=n, name=f"kept-{n}") for n in range(20000))
    pad = "x" * 16000
    commit = dict(path=f"/ckpt/{pad}", digest="crc32c:0")
    flood(dict(type="commit", id=n, checkpoint=dict(commit, step=n + 1)) for n in range(20000)).close()
    (folder / "flooded").touch()
    while not (folder / "go").exists(): time.sleep(0.02)
    sys.exit(1)
(folder / f"ready-{round}-{rank}").touch()
while not (folder / "finish").exists(): time.sleep(0.02)
"#;

#[tokio::test]
async fn a_worker_that_asks_without_end_holds_up_neither_the_next_round_nor_the_agent() {
    let job = Job::on_etcd("2").await.flag("--max-restarts=1").prompt().python_script(FLOODS);
    let mut agents = job.start_all(["a", "b"]);
    eventually("the flood is over", LIMIT * 2, async || job.path("flooded").exists().then_some(())).await;
    let most = agents.iter().map(|agent| agent.kilobytes("VmHWM:") / 1024).max().unwrap();

    // When the worker fails, then the next round runs at once, and the agent has not grown
    let begun = std::time::Instant::now();
    job.write("go", "");
    job.appears("ready-2-0").await;
    job.appears("ready-2-1").await;
    let took = begun.elapsed();
    println!("round 2 after {took:?}; the larger agent took {most} MiB at most");
    assert!(took < LEASE, "round 2 ran only after {took:?}");
    assert!(most < 100, "an agent took {most} MiB");
    job.write("finish", "");
    assert_eq!(exits(&mut agents).await, [0, 0]);
}

/// Registers as round-aware, asks without reading until the agent takes no more, and notes when it is let go.
const DEAF: &str = r#"
import json, os, pathlib, signal, socket, sys, time
folder = pathlib.Path(sys.argv[1])
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.environ["GROUP_RANK"] == "0" and os.environ["ELASTIC_ROUND"] == "1":
    agent = socket.socket(socket.AF_UNIX)
    agent.connect(os.environ["ELASTIC_AGENT_SOCKET"])
    agent.sendall((json.dumps(dict(type="register", local_rank=0, pid=os.getpid(), round_aware=True)) + "\n").encode())
    agent.settimeout(1)
    try:
        while True: agent.sendall(b"{}\n" * 1000)
    except OSError:
        pass
    (folder / "full").touch()
    while not (folder / "read").exists(): time.sleep(0.02)
    agent.settimeout(20)
    try:
        while agent.recv(1 << 20): pass
    except ConnectionResetError:
        pass
    (folder / "let-go").touch()
time.sleep(1000)
"#;

#[tokio::test]
async fn a_worker_that_does_not_read_is_let_go_when_a_round_forms() {
    let job = Job::on_etcd("1:2").await.prompt().python_script(DEAF);
    let first = job.start("a");
    job.appears("full").await;

    // When a node joins and news of the round cannot be sent, then the connection ends: what cannot be heard is not
    // waited for.
    let second = job.start("b");
    first.says("a worker does not read its agent's messages", LIMIT).await;
    job.write("read", "");
    job.appears("let-go").await;
    drop((first, second));
}

/// Says that the training is over, and does something else.
const IS_OVER: &str = r#"
say = agent()
say(type="finished", finished=True)
(folder / f"over-{node}").touch()
while not (folder / "go").exists(): time.sleep(0.02)
"#;

#[tokio::test]
async fn no_node_is_admitted_once_the_training_is_over() {
    let job = Job::on_etcd("1:2").await.python(IS_OVER);
    let a = job.start("a");
    job.appears("over-a").await;
    let b = job.start("b");
    a.says("no node is admitted", LIMIT).await;

    // The node that came too late ends with the job
    job.write("go", "");
    assert_eq!(exits(&mut [a, b]).await, [0, 0]);
    assert!(!job.path("over-b").exists());
    assert_eq!(job.record("round").await.unwrap()["number"], 1);
}

#[tokio::test]
async fn what_a_dead_worker_has_said_is_read_though_its_child_holds_the_socket() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("socket");
    let store = JobStore::Store(Arc::new(MemoryStore::start(Limits::default())));
    let keys = Keys::new("/elastic", &"J".parse().unwrap());
    let paths = JobPaths { job: "J".parse().unwrap(), keys, paths: Paths::new(DEFAULT_PREFIX, "J") };
    let (_status, status) = tokio::sync::watch::channel(Status::default());
    let socket = WorkerSocket::open(&path, (store, paths), status, false).unwrap();
    socket.ahead(tokio::time::Instant::now() + LIMIT);
    let mut held = UnixStream::connect(&path).unwrap();
    held.write_all(b"{\"type\":\"register\",\"local_rank\":0,\"pid\":1}\n").unwrap();
    let registered = async || (format!("{:?}", socket.awareness(0)) != "Unknown").then_some(());
    eventually("the worker has registered", LIMIT, registered).await;

    // Its last words come in two parts, and then the worker is no more
    held.write_all(b"{\"type\":\"failing\",\"class\":\"own\",").unwrap();
    tokio::time::timeout(LIMIT, socket.heard_out(0, 10 * LIMIT)).await.expect("its child is not waited for");
    held.write_all(b"\"message\":\"boom\"}\n").unwrap();
    tokio::time::timeout(LIMIT, socket.heard_out(0, 10 * LIMIT)).await.expect("its child is not waited for");
    assert_eq!(socket.failing(0).map(|(_, message)| message), Some("boom".to_owned()));
}
