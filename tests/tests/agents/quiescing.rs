//! Workers that know about rounds: which of them keep their process when the group changes. They are written in Python
//! and use only its standard library, as users may write them.

use elastic_tests::prelude::*;

/// Writes down each assignment that it gets. Files tell it whether to know about rounds, and whether to quiesce.
const WORKER: &str = r#"
import json, os, pathlib, signal, socket, sys, threading, time
folder, node, local_rank = pathlib.Path(sys.argv[1]), os.environ["ELASTIC_NODE"], int(os.environ["ELASTIC_LOCAL_RANK"])
def told(what): return (folder / f"{what}-{node}-{local_rank}").exists()
def note(name, **what):
    with open(folder / name, "a") as file: file.write(json.dumps(what) + "\n")
note("started", node=node, local_rank=local_rank, pid=os.getpid(),
    **{name: os.environ.get(name) for name in
        ("RANK", "MASTER_PORT", "ELASTIC_ROUND", "ELASTIC_WARM_UP", "TORCHELASTIC_MAX_RESTARTS")})
asks = threading.Event()
def stopped(*_):
    note("stopped", node=node, local_rank=local_rank, pid=os.getpid())
    while told("lingers") or asks.is_set(): time.sleep(0.02)
    os._exit(1)
signal.signal(signal.SIGTERM, stopped)
agent = socket.socket(socket.AF_UNIX)
agent.connect(os.environ["ELASTIC_AGENT_SOCKET"])
def say(**message): agent.sendall((json.dumps(message) + "\n").encode())
def listen():
    for line in agent.makefile():
        message = json.loads(line)
        if message["type"] in ("welcome", "assignment"):
            del message["type"]
            note("places", node=node, local_rank=local_rank, pid=os.getpid(), **message)
        elif message["type"] == "forming" and not told("unaware") and not told("stubborn"):
            if told("steps"): time.sleep(1)
            note("forming", node=node, at=time.monotonic_ns())
            say(type="quiesced", round=message["round"], step=7)
        elif message["type"] == "error":
            note("errors", message=message["message"])
        elif message["type"] == "round_requested":
            note("requested", node=node, id=message["id"])
        if message.get("id") == 5: asks.clear()
threading.Thread(target=listen, daemon=True).start()
if told("hasty"): say(type="quiesced", round=1, step=0)
while told("slow") and not (folder / "go").exists(): time.sleep(0.02)
note("ready", node=node, at=time.monotonic_ns())
say(type="register", local_rank=local_rank, pid=os.getpid(), round_aware=not told("unaware"))
if told("hasty"): say(type="quiesced", round=1, step=0)
done, step = threading.Event(), 0
while not (folder / "done").exists():
    done.wait(1.3 if told("steps") else 0.02)
    if told("steps"):
        step += 1
        say(type="progress", step=step)
        note("steps", node=node, step=step)
    if told("ask"):
        (folder / f"ask-{node}-{local_rank}").rename(folder / f"asked-{node}-{local_rank}")
        asks.set()
        say(type="request_round", id=5, round=int((folder / "round").read_text()), reason="a cable is loose")
"#;

pub(crate) async fn job_on(nnodes: &str) -> Job {
    Job::on_etcd(nnodes).await.flag("--max-restarts=3").python_script(WORKER)
}

pub(crate) type Worker = (String, u64);

pub(crate) fn pid(line: &Value) -> u32 {
    u32::try_from(line["pid"].as_u64().unwrap()).unwrap()
}

/// The places of a round later than `after`, of a world of this size, once all have theirs.
pub(crate) async fn places(job: &Job, after: u64, world_size: u64) -> BTreeMap<Worker, Value> {
    eventually(&format!("a world of {world_size} after round {after}"), LIMIT, async || {
        let lines = job.lines("places");
        let newest = lines.iter().filter_map(|line| line["round"].as_u64()).max().filter(|round| *round > after)?;
        let of_round = lines.into_iter().filter(|line| line["round"] == newest && line["world_size"] == world_size);
        let worker = |line: &Value| (line["node"].as_str().unwrap().to_owned(), line["local_rank"].as_u64().unwrap());
        let places: BTreeMap<Worker, Value> = of_round.map(|line| (worker(&line), line)).collect();
        (places.len() as u64 == world_size).then_some(places)
    })
    .await
}

pub(crate) fn of<'a>(places: &'a BTreeMap<Worker, Value>, node: &str, local_rank: u64) -> &'a Value {
    &places[&(node.to_owned(), local_rank)]
}

pub(crate) fn round(places: &BTreeMap<Worker, Value>) -> u64 {
    places.values().next().unwrap()["round"].as_u64().unwrap()
}

/// Lets all workers end, and sees the agents do so.
pub(crate) async fn done<'a>(job: &Job, agents: impl IntoIterator<Item = &'a mut Agent>) {
    job.write("done", "");
    job.ended(agents, 0).await;
}

pub(crate) fn kill(line: &Value) {
    send(pid(line), Signal::KILL);
}

#[tokio::test]
async fn a_worker_that_quiesces_keeps_its_process_while_nodes_come_and_go() {
    let job = job_on("1:2").await;
    let mut a = job.start("a");
    let alone = places(&job, 0, 1).await;

    // When a node comes
    let mut b = job.start("b");
    let two = places(&job, round(&alone), 2).await;
    assert_eq!(pid(of(&two, "a", 0)), pid(of(&alone, "a", 0)));
    let of_both = |name: &str| (&of(&two, "a", 0)[name], &of(&two, "b", 0)[name]);
    assert_eq!(of_both("rank"), (&0.into(), &1.into()));
    for shared in ["master_addr", "master_port", "group_world_size", "restart_count", "round"] {
        assert_eq!(of_both(shared).0, of_both(shared).1, "{shared}");
    }
    assert_ne!(
        of(&two, "a", 0)["master_port"],
        of(&alone, "a", 0)["master_port"],
        "each round has an address of its own"
    );

    // And when it is killed
    b.kill();
    let again = places(&job, round(&two), 1).await;
    assert_eq!(pid(of(&again, "a", 0)), pid(of(&alone, "a", 0)));
    done(&job, [&mut a]).await;
    assert_eq!(job.lines("stopped"), Vec::<Value>::new());
    assert_eq!(job.lines("errors"), Vec::<Value>::new());
}

#[tokio::test]
async fn only_a_dead_workers_process_is_started_again_and_costs_a_restart() {
    let job = job_on("2").await.flag("--nproc-per-node=2");
    let mut agents = job.start_all(["a", "b"]);
    let first = places(&job, 0, 4).await;
    kill(of(&first, "a", 1));
    let second = places(&job, round(&first), 4).await;
    for (worker, line) in &first {
        let same = pid(line) == pid(&second[worker]);
        assert_eq!(same, *worker != ("a".to_owned(), 1), "{worker:?}");
        assert_eq!(second[worker]["rank"], line["rank"], "{worker:?}");
        assert_eq!(second[worker]["restart_count"], 1);
    }
    done(&job, &mut agents).await;
}

#[tokio::test]
async fn a_worker_that_quiesces_waits_for_as_long_as_a_node_is_missing() {
    let job = job_on("2").await;
    let [mut a, mut b] = job.start_all(["a", "b"]);
    let first = places(&job, 0, 2).await;
    b.kill();
    a.says("the workers have quiesced", LIMIT).await;
    // Longer than a lease, so that the agent has to move its fence point.
    let begun = Instant::now();
    eventually("a lease's time is over", LIMIT, async || (begun.elapsed() > LEASE * 3 / 2).then_some(())).await;
    b = job.start("b");
    let second = places(&job, round(&first), 2).await;
    assert_eq!(pid(of(&second, "a", 0)), pid(of(&first, "a", 0)));
    done(&job, [&mut a, &mut b]).await;
}

#[tokio::test]
async fn workers_that_do_not_quiesce_in_time_are_stopped_like_any_other() {
    let job = job_on("1:2").await.conf("quiesce_timeout", "300ms").flag("--nproc-per-node=2");
    job.write("stubborn-a-1", "");
    let mut a = job.start("a");
    let alone = places(&job, 0, 2).await;
    let mut b = job.start("b");
    let both = places(&job, round(&alone), 4).await;
    for local_rank in [0, 1] {
        assert_ne!(pid(of(&both, "a", local_rank)), pid(of(&alone, "a", local_rank)));
    }
    assert!(a.output().contains("did not quiesce within 300ms"), "{}", a.output());
    assert_eq!(job.lines("stopped").len(), 2, "politely");
    done(&job, [&mut a, &mut b]).await;
}

/// Waits until the agent knows how long the steps of node `a` are: two times between reports.
async fn stepped(job: &Job) {
    eventually("four steps", LIMIT, async || (job.lines("steps").len() > 3).then_some(())).await;
}

#[tokio::test]
async fn workers_whose_steps_are_long_have_longer_to_quiesce() {
    let job = job_on("1:2").await.conf("quiesce_timeout", "300ms");
    job.write("steps-a-0", "");
    let mut a = job.start("a");
    let alone = places(&job, 0, 1).await;
    stepped(&job).await;
    let mut b = job.start("b");
    let both = places(&job, round(&alone), 2).await;
    assert_eq!(pid(of(&both, "a", 0)), pid(of(&alone, "a", 0)));
    done(&job, [&mut a, &mut b]).await;
}

#[tokio::test]
async fn steps_that_are_too_long_to_quiesce_are_warned_of_once() {
    let job = job_on("1").await;
    job.write("steps-a-0", "");
    let mut a = job.start("a");
    stepped(&job).await;
    done(&job, [&mut a]).await;
    // A step has half of three quarters of 3 s
    assert_eq!(a.output().matches("has 1.1 s to end once members change").count(), 1, "{}", a.output());
}

#[tokio::test]
async fn a_node_with_one_worker_that_knows_no_rounds_restarts_all_its_workers() {
    let job = job_on("2:3").await;
    job.write("unaware-a-1", "");
    let [mut a, mut b] = [("a", "2"), ("b", "1")].map(|(node, slots)| {
        let slots = format!("--nproc-per-node={slots}");
        job.start_with(node, &[&slots])
    });
    let first = places(&job, 0, 3).await;
    let mut c = job.start("c");
    let second = places(&job, round(&first), 4).await;
    for (worker, line) in &first {
        assert_eq!(pid(line) == pid(&second[worker]), worker.0 == "b", "{worker:?}");
    }
    done(&job, [&mut a, &mut b, &mut c]).await;
}

#[tokio::test]
async fn quiescing_out_of_turn_is_an_error() {
    let job = job_on("1").await;
    job.write("hasty-a-0", "");
    let mut a = job.start("a");
    let errors =
        eventually("both errors", LIMIT, async || Some(job.lines("errors")).filter(|errors| errors.len() == 2)).await;
    let says = |at: usize, what: &str| errors[at]["message"].as_str().unwrap().contains(what);
    assert!(says(0, "only a worker that has registered with `round_aware`"), "{errors:?}");
    assert!(says(1, "no round is forming"), "{errors:?}");
    done(&job, [&mut a]).await;
}

#[tokio::test]
async fn a_worker_whose_group_is_broken_asks_for_a_round_and_all_keep_their_process() {
    let job = job_on("2").await.flag("--nproc-per-node=2").flag("--max-restarts=1");
    let [mut a, mut b] = job.start_all(["a", "b"]);
    let first = places(&job, 0, 4).await;
    let ask = async |node: &str, round: u64, answers: usize| {
        std::fs::write(job.path("round"), round.to_string()).unwrap();
        job.write(&format!("ask-{node}-1"), "");
        let answered = async || (job.lines("requested").len() == answers).then_some(());
        eventually("the request is answered", LIMIT, answered).await;
    };

    // Given a request about a round that is not there yet, then nothing follows; given one about this round, then all
    // meet again
    ask("a", round(&first) + 7, 1).await;
    ask("b", round(&first), 2).await;
    let second = places(&job, round(&first), 4).await;
    assert_eq!(round(&second), round(&first) + 1);
    for (worker, line) in &first {
        assert_eq!(pid(&second[worker]), pid(line), "{worker:?}");
        assert_eq!(second[worker]["restart_count"], 1);
    }
    a.says("b: the worker asks for a new round: a cable is loose", LIMIT).await;

    // Given a request about a round that is over, then nothing follows; given one about this round and no restart that
    // is left, then the job fails and says why
    ask("b", round(&first), 3).await;
    ask("a", round(&second), 4).await;
    assert_eq!(exits([&mut a, &mut b]).await, [5, 5]);
    let reason = "the job has failed: a: the worker asks for a new round: a cable is loose";
    assert!(b.output().contains(reason), "{}", b.output());
    assert_eq!(job.lines("errors"), Vec::<Value>::new());
}

#[tokio::test]
async fn a_worker_that_does_not_know_about_rounds_cannot_ask_for_one() {
    let job = job_on("1").await;
    job.write("unaware-a-0", "");
    job.write("round", "1");
    job.write("ask-a-0", "");
    let mut a = job.start("a");
    let refused = eventually("it is refused", LIMIT, async || job.lines("errors").pop()).await;
    assert!(refused["message"].as_str().unwrap().contains("registered with `round_aware`"), "{refused}");
    done(&job, [&mut a]).await;
}
