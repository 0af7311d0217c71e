//! Nodes that are asked to leave: the others hear of it at once, workers get the signal and time to save, and the next
//! round waits for nothing else.

use elastic_tests::prelude::*;

/// On a signal it commits a checkpoint, and ends when it has the answer.
pub(crate) const COMMITS: &str = r#"
def save(number, frame):
    (folder / "manifest.json").touch()
    say(type="commit", id=1, checkpoint=dict(step=41, path=str(folder / "manifest.json"), digest="crc32c:0"))
    while not any(message.get("id") == 1 for message in heard): time.sleep(0.01)
    os._exit(0)
signal.signal(signal.SIGTERM, save)
say = agent()
here()
while True: signal.pause()
"#;

/// On a signal it saves for as long as its node's file says.
const SAVES: &str = r#"
def save(number, frame):
    note(f"signals-{node}", signal.Signals(number).name)
    slow = folder / f"saving-{node}"
    time.sleep(float(slow.read_text()) if slow.exists() else 0)
    note(f"checkpoint-{node}", str(round))
    os._exit(0)
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT): signal.signal(number, save)
agent()
here()
while True: signal.pause()
"#;

/// On a signal it saves with the processes of a pool.
const SAVES_WITH_A_POOL: &str = r#"
import concurrent.futures, multiprocessing
def shard(number):
    time.sleep(0.05)
    return number
told, forks = [], multiprocessing.get_context("fork")
with concurrent.futures.ProcessPoolExecutor(2, mp_context=forks) as pool:
    list(pool.map(shard, range(4)))
    signal.signal(signal.SIGTERM, lambda *_: told.append(1))
    here()
    while not told: time.sleep(0.02)
    note("saved", str(list(pool.map(shard, range(4)))))
"#;

fn saving(job: Job) -> Job {
    job.python(SAVES)
}

/// Workers of this node take `seconds` to save.
fn takes(job: &Job, node: &str, seconds: f64) {
    std::fs::write(job.path(&format!("saving-{node}")), seconds.to_string()).unwrap();
}

fn age(job: &Job, name: &str) -> Duration {
    let written = std::fs::metadata(job.path(name)).and_then(|metadata| metadata.modified()).unwrap();
    SystemTime::now().duration_since(written).unwrap_or_default()
}

async fn is_saving(job: &Job, node: &str) {
    eventually("its worker got the signal", LIMIT, async || {
        (!job.read(&format!("signals-{node}")).is_empty()).then_some(())
    })
    .await;
}

#[tokio::test]
async fn a_preempted_node_saves_and_the_others_continue_when_it_has() {
    let job = saving(Job::on_etcd("1:3").await.prompt().gathers().flag("--max-restarts=0").flag("--drain-grace=20"));
    let mut a = job.start("a");
    assert_eq!(job.leader().await, "a");
    let [b, mut c] = job.start_all(["b", "c"]);
    job.runs(1, 3).await;
    takes(&job, "c", 2.0);

    // When a node is asked to leave whose worker takes long to save
    let asked = Instant::now();
    c.signal(Signal::TERM);
    // then the others are informed while it saves,
    eventually("the next round is forming", AT_ONCE, async || {
        job.record("round").await.filter(|round| round["state"] == "forming")
    })
    .await;
    println!("SIGTERM → the others are informed: {:?}", asked.elapsed());
    assert_eq!(job.read("checkpoint-c"), "", "it is still saving");
    is_saving(&job, "c").await;
    // and the round starts as soon as it has saved: longer than the stop grace of 3 s would have been no trouble either
    let second = job.runs(2, 2).await;
    println!("its worker gone → the next round runs: less than {:?}", age(&job, "checkpoint-c"));
    assert_eq!((second.number, second.restarts()), (2, 0));
    assert!(!second.nodes().contains(&"c"));
    assert_eq!(job.read("checkpoint-c"), "1\n");
    assert_eq!(c.exit(AT_ONCE).await, LEFT);
    assert!(c.output().contains("this node has left the job"), "{}", c.output());
    let heard = job.lines("heard-c");
    let draining = heard.iter().find(|line| line["type"] == "draining").expect("it was informed");
    assert_eq!(draining["grace_ms"], 20_000);

    // When the leader is asked to leave, then it seals the next round itself, and then goes
    let asked = Instant::now();
    a.signal(Signal::TERM);
    let third = job.runs_within(3, 1, AT_ONCE).await;
    println!("SIGTERM to the leader → the next round runs: {:?}", asked.elapsed());
    assert_eq!(third.nodes(), ["b"]);
    assert_eq!(a.exit(AT_ONCE).await, LEFT);
    assert_eq!(job.leader().await, "b");
    b.signal(Signal::TERM);
}

#[tokio::test]
async fn what_a_leaving_worker_commits_after_the_signal_is_resumed_from() {
    let job = Job::on_etcd("1:2").await.gathers().flag("--max-restarts=0").python(COMMITS);
    let [a, mut b] = job.start_all(["a", "b"]);
    job.runs(1, 2).await;

    // When a node is asked to leave, whose worker commits while another round is forming already
    b.signal(Signal::TERM);
    // then the commit is taken,
    assert_eq!(b.exit(LIMIT).await, LEFT);
    let heard = job.lines("heard-b");
    let answer = heard.iter().find(|line| line["id"] == 1).expect("an answer");
    assert_eq!((&answer["type"], &answer["step"]), (&"committed".into(), &41.into()), "{answer}");
    // and the next round resumes from it.
    job.runs(2, 1).await;
    assert_eq!(job.record("round").await.unwrap()["checkpoint"]["step"], 41);
    a.signal(Signal::TERM);
}

#[tokio::test]
async fn a_job_that_is_stopped_as_a_whole_ends_at_once_and_starts_again_at_once() {
    let job = saving(Job::on_etcd("2:3").await.prompt().gathers().flag("--max-restarts=0"));
    let mut agents = job.start_all(["a", "b", "c"]);
    job.runs(1, 3).await;
    takes(&job, "b", 0.5);

    let asked = Instant::now();
    job.leaves(&mut agents).await;
    println!("SIGTERM to all → the last agent has ended: {:?}", asked.elapsed());
    assert!(asked.elapsed() < AT_ONCE, "{:?}", asked.elapsed());
    assert_eq!(["a", "b", "c"].map(|node| job.read(&format!("checkpoint-{node}"))), ["1\n"; 3]);
    assert_eq!(job.record("nodes/").await, None);

    // When it is started again, then no one waits for those that said that they had left
    let begun = Instant::now();
    agents = job.start_all(["a", "b", "c"]);
    let again = job.runs_within(2, 3, AT_ONCE).await;
    println!("started again → runs: {:?}", begun.elapsed());
    assert_eq!((again.number, again.restarts()), (2, 0));
    job.leaves(&mut agents).await;
}

#[tokio::test]
async fn who_saves_for_too_long_is_killed_when_the_grace_is_over() {
    let job = saving(Job::on_etcd("1:2").await.prompt().flag("--max-restarts=0").flag("--drain-grace=1"));
    let [mut a, mut b] = job.start_all(["a", "b"]);
    job.runs(1, 2).await;
    takes(&job, "b", 1000.0);

    b.signal(Signal::TERM);
    assert_eq!(job.runs_within(2, 1, AT_ONCE).await.nodes(), ["a"]);
    assert_eq!(b.exit(AT_ONCE).await, LEFT);
    assert_eq!((job.read("signals-b").as_str(), job.read("checkpoint-b").as_str()), ("SIGTERM\n", ""));
    job.leaves([&mut a]).await;
}

#[tokio::test]
async fn the_second_signal_means_now() {
    let job = saving(Job::on_etcd("1:2").await.prompt().flag("--max-restarts=0").flag("--drain-grace=1000"));
    let [mut a, mut b] = job.start_all(["a", "b"]);
    job.runs(1, 2).await;
    takes(&job, "b", 1000.0);

    b.signal(Signal::TERM);
    is_saving(&job, "b").await;
    let asked = Instant::now();
    b.signal_until_it_ends(Signal::TERM).await;
    assert!(asked.elapsed() < Duration::from_secs(3) + AT_ONCE, "{:?}", asked.elapsed());
    assert_eq!(b.exit(AT_ONCE).await, LEFT);
    assert_eq!(job.runs_within(2, 1, AT_ONCE).await.nodes(), ["a"]);
    job.leaves([&mut a]).await;
}

/// `uv run` and batch scripts forward a signal that the agent has got already.
#[tokio::test]
async fn a_stop_signal_that_comes_twice_is_one_request() {
    let etcd = EtcdServer::start(EtcdOptions::default()).await;
    for (first, second) in [(Signal::TERM, Signal::TERM), (Signal::INT, Signal::TERM)] {
        let job = saving(Job::on(&etcd, "1").prompt().flag("--max-restarts=0"));
        let mut agent = job.start("a");
        job.runs(1, 1).await;
        takes(&job, "a", 0.5);
        agent.signal(first);
        is_saving(&job, "a").await;
        agent.signal(second);
        assert_eq!(agent.exit(LIMIT).await, LEFT);
        assert!(!job.read("checkpoint-a").is_empty(), "{}", agent.output());
    }
}

/// Slurm's `--signal=USR1@60` reaches all processes of a step.
#[tokio::test]
async fn a_worker_saves_at_a_signal_that_the_agent_and_its_guard_pass_over() {
    let script = "trap 'sleep 0.5; echo > saved; exit 0' USR1; echo > up; while :; do sleep 0.05; done";
    let job = Job::met_by(&["--standalone"], "1").program(["sh", "-c", script]);
    let mut agent = job.start("a");
    job.appears("up").await;
    let guard = children(agent.pid())[0];
    let worker = children(guard)[0];
    send(agent.pid(), Signal::USR2);
    [agent.pid(), guard, worker].into_iter().for_each(|pid| send(pid, Signal::USR1));
    assert_eq!(agent.exit(LIMIT).await, 0, "{}", agent.output());
    assert!(job.path("saved").exists(), "{}", agent.output());
    let said = ["SIGUSR1 is for the workers", "SIGUSR2 is for the workers"];
    assert!(said.iter().all(|said| agent.output().contains(said)), "{}", agent.output());
}

#[tokio::test]
async fn workers_get_the_signal_that_the_agent_got() {
    let etcd = EtcdServer::start(EtcdOptions::default()).await;
    for (signal, name) in [(Signal::INT, "SIGINT\n"), (Signal::HUP, "SIGHUP\n"), (Signal::QUIT, "SIGQUIT\n")] {
        let job = saving(Job::on(&etcd, "1").prompt().flag("--max-restarts=0"));
        let mut agent = job.start("a");
        job.runs(1, 1).await;
        agent.signal(signal);
        assert_eq!(agent.exit(AT_ONCE).await, LEFT);
        assert_eq!((job.read("signals-a").as_str(), job.read("checkpoint-a").is_empty()), (name, false));
    }
}

#[tokio::test]
async fn a_node_that_has_no_place_yet_leaves_at_once() {
    let etcd = EtcdServer::start(EtcdOptions::default()).await;
    let leaves = async |agent: &mut Agent| {
        agent.signal(Signal::TERM);
        assert_eq!(agent.exit(AT_ONCE).await, LEFT);
    };

    // Given one that waits for a second node
    let job = saving(Job::on(&etcd, "2").prompt());
    let mut alone = job.start("a");
    eventually("it is known", LIMIT, async || job.record("nodes/a").await).await;
    leaves(&mut alone).await;
    assert_eq!((job.record("nodes/").await, job.workers().len()), (None, 0));

    // and one whose store does not answer
    let silent = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let endpoint = format!("--rdzv-endpoint={}", silent.local_addr().unwrap());
    let job = saving(Job::met_by(&["--rdzv-backend=etcd", &endpoint], "2"));
    let mut waiting = job.start("a");
    // The agent has connected to the store.
    silent.accept().await.unwrap();
    leaves(&mut waiting).await;
    assert!(waiting.output().contains("SIGTERM: leaving before the job was joined"), "{}", waiting.output());
}

#[tokio::test]
async fn an_operator_drains_a_node_as_a_signal_would() {
    let etcd = EtcdServer::start(EtcdOptions::default()).await;
    let job = saving(Job::on(&etcd, "1:2").prompt().gathers().flag("--max-restarts=0").flag("--drain-grace=20"));
    let [mut a, mut b] = job.start_all(["a", "b"]);
    job.runs(1, 2).await;
    takes(&job, "b", 1.0);

    let drained = output("elasticctl", &["--etcd", &etcd.address(), "drain", "job", "b"], LIMIT).await;
    assert!(drained.status.success(), "{drained:?}");
    assert_eq!(job.runs_within(2, 1, AT_ONCE).await.nodes(), ["a"]);
    assert_eq!(b.exit(AT_ONCE).await, LEFT);
    assert_eq!(job.read("checkpoint-b"), "1\n");
    let heard = job.lines("heard-b");
    let types: Vec<&str> = heard.iter().filter_map(|line| line["type"].as_str()).collect();
    assert_eq!(types, ["welcome", "draining", "forming"]);
    assert_eq!(heard[1]["grace_ms"], 20_000);
    // The others are stopped, but not drained.
    assert!(!job.read("heard-a").contains("draining"));
    job.leaves([&mut a]).await;
}

#[tokio::test]
async fn processes_that_a_worker_saves_with_live_however_it_is_asked_to_stop() {
    let etcd = EtcdServer::start(EtcdOptions::default()).await;
    for request in ["a signal", "drain", "pause"] {
        let job = Job::on(&etcd, "1").named(&request.replace(' ', "-")).prompt().flag("--drain-grace=20");
        let job = job.flag("--max-restarts=0").python(SAVES_WITH_A_POOL);
        let mut agent = job.start("a");
        job.runs(1, 1).await;
        match request {
            "drain" => drop(job.ctl_ok(&["drain", "drain", "a"]).await),
            "pause" => drop(job.ctl_ok(&["pause", "pause"]).await),
            _ => agent.signal(Signal::TERM),
        }
        eventually("all is saved", LIMIT, async || (job.read("saved") == "[0, 1, 2, 3]\n").then_some(())).await;
        if request == "pause" {
            agent.signal(Signal::TERM);
        }
        assert_eq!(agent.exit(LIMIT).await, LEFT, "{request}: {}", agent.output());
    }
}

#[tokio::test]
async fn without_the_store_workers_get_their_signal_all_the_same() {
    let mut job = saving(Job::on_etcd("2").await.flag("--max-restarts=0"));
    let mut agents = job.start_all(["a", "b"]);
    job.runs(1, 2).await;

    job.etcd_mut().kill();
    agents.iter().for_each(|agent| agent.signal(Signal::TERM));
    for agent in &mut agents {
        assert_eq!(agent.exit(LIMIT).await, LEFT);
    }
    assert_eq!(["a", "b"].map(|node| job.read(&format!("checkpoint-{node}"))), ["1\n"; 2]);
}

/// A worker and its agent get a signal at the same time, as systemd, Slurm and others send it to a whole cgroup. It
/// makes no difference which of the two gets it first.
#[tokio::test]
async fn a_worker_that_is_signalled_with_its_agent_has_not_failed() {
    let etcd = EtcdServer::start(EtcdOptions::default()).await;
    let tell = |pid: u32, signal| {
        let _ = kill_process(Pid::from_raw(pid as i32).unwrap(), signal);
    };
    let job = |etcd| Job::on(etcd, "1:2").prompt().flag("--max-restarts=0").flag("--signals-to-handle=SIGTERM,SIGUSR1");
    for (signal, worker_first) in [(Signal::TERM, true), (Signal::TERM, false), (Signal::USR1, true)] {
        // Given workers that end by the signal, and no restarts to spare,
        let job = job(&etcd);
        let [mut a, mut b] = job.start_all(["a", "b"]);
        let round = job.runs(1, 2).await;

        // when all processes of a node get the signal, then that is a leave,
        let worker = round.of("b").pid;
        let order = if worker_first { [worker, b.pid()] } else { [b.pid(), worker] };
        order.into_iter().for_each(|pid| tell(pid, signal));
        let alone = job.runs_within(round.number + 1, 1, AT_ONCE).await;
        assert_eq!((alone.nodes(), alone.restarts()), (vec!["a"], 0));
        assert_eq!(b.exit(AT_ONCE).await, LEFT, "{}", b.output());

        // and so it is when the last one is.
        tell(alone.of("a").pid, signal);
        tell(a.pid(), signal);
        assert_eq!(a.exit(AT_ONCE).await, LEFT, "{}", a.output());
    }

    // When only the worker gets the signal, then it has failed.
    let job = job(&etcd);
    let mut agents = job.start_all(["a", "b"]);
    job.runs(1, 2).await.of("b").signal(Signal::TERM);
    assert_eq!(exits(&mut agents).await, [JOB_FAILED; 2]);
    assert!(agents[0].output().contains("signal     15 (SIGTERM)"), "{}", agents[0].output());
}
