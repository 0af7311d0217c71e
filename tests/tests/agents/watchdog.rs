//! Workers that hang: found by missing progress, by timers of their own, or by what the kernel says; their stacks kept,
//! the workers ended and started again.

use elastic_tests::http::answer;
use elastic_tests::prelude::*;

async fn reason(job: &Job) -> String {
    job.record("round").await.unwrap()["reason"].as_str().unwrap().to_owned()
}

/// The stacks that were kept of any worker.
fn stacks(job: &Job) -> Vec<PathBuf> {
    fn below(path: PathBuf, found: &mut Vec<PathBuf>) {
        for entry in std::fs::read_dir(path).into_iter().flatten().flatten() {
            match entry.file_name().to_str() {
                Some("stacks.txt") => found.push(entry.path()),
                _ => below(entry.path(), found),
            }
        }
    }
    let mut found = Vec::new();
    below(job.path("logs"), &mut found);
    found
}

async fn stays_for(job: &Job, time: Duration) {
    let begun = Instant::now();
    eventually("time passes", time + LIMIT, async || {
        assert_eq!(job.round().map(|round| round.number), Some(1));
        (begun.elapsed() >= time).then_some(())
    })
    .await;
}

#[tokio::test]
async fn a_worker_that_falls_silent_is_inspected_killed_and_started_again() {
    let job = Job::on_etcd("2").await.flag("--max-restarts=1").flag("--progress-timeout=4").flag("--redirects=3");
    // A stand-in, since the machine need not have the real one. It prints what the real one prints of a collective that
    // hangs.
    let tools = job.path("tools");
    std::fs::create_dir(&tools).unwrap();
    let spy = "#!/bin/sh\n[ \"$1 $2\" = 'dump --pid' ] && echo \"Process $3: python3\" && \
               printf 'Thread 1 (idle): \"MainThread\"\\n    all_reduce (train.py:7)\\n'\n";
    std::fs::write(tools.join("py-spy"), spy).unwrap();
    std::fs::set_permissions(tools.join("py-spy"), std::fs::Permissions::from_mode(0o755)).unwrap();
    let path = format!("{}:{}", tools.display(), std::env::var("PATH").unwrap());
    // The output is the heartbeat: in the first round that of node b stops.
    let job = job.env("PATH", &path).python(
        r#"
here()
while True:
    if not (round == 1 and node == "b" and (folder / "hang").exists()): print("step", flush=True)
    time.sleep(0.1)
"#,
    );
    let mut agents = job.start_all(["a", "b"]);
    let first = job.runs(1, 2).await;

    // Given workers that write for longer than the deadline, then nothing happens
    stays_for(&job, Duration::from_secs(6)).await;

    // When one falls silent, then it fails with the place where it is, and the next round starts
    job.write("hang", "");
    let second = job.runs(2, 2).await;
    assert_eq!(second.restarts(), 1);
    let reason = reason(&job).await;
    for part in
        ["b: the worker hangs: no progress for 4s (--progress-timeout)", "in all_reduce (train.py:7)", "stacks in "]
    {
        assert!(reason.contains(part), "{part:?} is not in {reason}");
    }
    let kept = stacks(&job);
    assert_eq!(kept.len(), 1, "{kept:?}");
    let text = std::fs::read_to_string(&kept[0]).unwrap();
    let pid = first.of("b").pid;
    for part in [format!("process {pid} (python3"), format!("Process {pid}: python3"), format!("thread {pid} (")] {
        assert!(text.contains(&part), "{part:?} is not in {text}");
    }
    job.leaves(&mut agents).await;
}

#[tokio::test]
async fn steps_reported_over_the_socket_are_progress_and_the_same_step_again_is_not() {
    let job = Job::on_etcd("1").await.flag("--max-restarts=1").flag("--progress-timeout=4");
    let job = job.python(
        r#"
say, step = agent(), 0
here()
while True:
    step += not (round == 1 and (folder / "hang").exists())
    say(type="progress", step=step)
    time.sleep(0.1)
"#,
    );
    let mut agent = job.start("a");
    job.runs(1, 1).await;
    stays_for(&job, Duration::from_secs(6)).await;

    job.write("hang", "");
    assert_eq!(job.runs(2, 1).await.restarts(), 1);
    let reason = reason(&job).await;
    assert!(reason.contains("no progress for 4s (--progress-timeout) after step "), "{reason}");
    job.leaves([&mut agent]).await;
}

#[tokio::test]
async fn a_timer_that_expires_ends_only_its_worker() {
    let job = Job::on_etcd("1").await.flag("--max-restarts=1").flag("--nproc-per-node=2");
    let job = job.env("TORCHELASTIC_ENABLE_FILE_TIMER", "1");
    // PyTorch's FileTimerClient also opens the pipe once for each line.
    let job = job.python(
        r#"
def timer(scope, after, number=9):
    until = time.time() + after if after is not None else -1
    line = dict(version=1, pid=os.getpid(), scope_id=scope, expiration_time=until, signal=number)
    with open(e["TORCHELASTIC_TIMER_FILE"], "w") as pipe: pipe.write(json.dumps(line) + "\n")
def stopped(number, frame):
    note("stopped", f"{round} {rank}")
    os._exit(0)
signal.signal(signal.SIGTERM, stopped)
# The kernel cuts this name inside a letter.
open("/proc/self/comm", "wb").write("обучение-модели".encode())
timer("released", 0.5)
timer("released", None)
timer("harmless", 0.1, 0)
here()
if round == 1 and rank == 1: timer("step", 0.5)
while True: signal.pause()
"#,
    );
    let mut agent = job.start("a");
    job.runs(2, 2).await;
    let record = job.record("round").await.unwrap();
    assert_eq!((&record["number"], &record["restarts"]), (&2.into(), &1.into()), "{record}");
    let reason = record["reason"].as_str().unwrap();
    assert!(reason.contains("a: the worker hangs: its timer \"step\" expired"), "{reason}");
    // The other worker was asked to stop, as in any restart, and the agent is still the first one.
    assert_eq!(job.read("stopped"), "1 0\n");
    job.leaves([&mut agent]).await;
}

#[tokio::test]
async fn a_worker_that_the_kernel_does_not_let_go_fails() {
    let job = Job::on_etcd("1").await.flag("--max-restarts=1").env("TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT", "0.8");
    // A process that calls vfork is in state D until its child ends or executes another program.
    let job = job.python(
        r#"
here()
ctypes.CDLL(None).vfork()
time.sleep(1000)
"#,
    );
    let mut agent = job.start("a");
    assert_eq!(job.runs(2, 1).await.restarts(), 1);
    // The last one fails the job, and the agent says so by its exit code, too.
    assert_eq!(agent.exit(LIMIT).await, JOB_FAILED);
    let reason = reason(&job).await;
    assert!(reason.contains("in one uninterruptible wait in the kernel for 800ms"), "{reason}");
}

/// The port at which an agent tells its health, once it does.
pub(crate) async fn health_port(agent: &Agent) -> String {
    agent.says("health over HTTP port=", LIMIT).await;
    let output = agent.output();
    let (_, rest) = output.split_once("health over HTTP port=").unwrap();
    // Only on loopback, which is the default.
    assert!(rest.lines().next().unwrap().contains("address=127.0.0.1"), "{output}");
    rest.split_whitespace().next().unwrap().to_owned()
}

pub(crate) async fn get(port: &str, path: &str) -> String {
    answer(&format!("127.0.0.1:{port}"), path).await
}

#[tokio::test]
async fn an_agent_tells_its_health() {
    let job = Job::on_etcd("2").await.python(
        r#"
agent()(type="progress", step=7)
here()
time.sleep(1000)
"#,
    );
    let first = job.start_with("a", &["--health-port=0"]);
    let port = health_port(&first).await;

    // Given an agent that waits for another, then it lives, and is not ready
    assert!(get(&port, "/live").await.starts_with("HTTP/1.1 200"));
    assert!(get(&port, "/ready").await.starts_with("HTTP/1.1 503"));

    // When workers run, then it is, and says what it knows
    let second = job.start("b");
    let round = job.runs(1, 2).await;
    eventually("it is ready", LIMIT, async || get(&port, "/ready").await.starts_with("HTTP/1.1 200").then_some(()))
        .await;
    let state = eventually("its worker's step is known", LIMIT, async || {
        let answer = get(&port, "/").await;
        let state: serde_json::Value = serde_json::from_str(answer.split_once("\r\n\r\n")?.1).unwrap();
        (state["workers"][0]["step"] == 7).then_some(state)
    })
    .await;
    assert_eq!((&state["job"], &state["node"], &state["ready"]), (&"job".into(), &"a".into(), &true.into()));
    assert_eq!((&state["round"]["number"], &state["round"]["world_size"]), (&1.into(), &2.into()), "{state}");
    assert_eq!(state["workers"][0]["pid"], round.of("a").pid);

    // and Prometheus gets the same.
    let metrics = get(&port, "/metrics").await;
    for line in [
        r#"elastic_agent_round{job="job",node="a"} 1"#,
        r#"elastic_agent_round_world_size{job="job",node="a"} 2"#,
        r#"elastic_agent_workers{job="job",node="a"} 1"#,
        r#"elastic_agent_rounds_total{job="job",node="a",change="first"} 1"#,
        r#"elastic_agent_recovery_seconds_count{job="job",node="a",change="first"} 1"#,
        r#"elastic_agent_worker_step{job="job",node="a",local_rank="0",rank="#,
        r#"elastic_agent_store_requests_total{job="job",node="a",call="grant",outcome="ok"} "#,
        r#"elastic_agent_stage_seconds_total{job="job",node="a",stage="running"} "#,
    ] {
        assert!(metrics.contains(line), "{line} is not in\n{metrics}");
    }
    let margin = metrics
        .lines()
        .find_map(|line| line.strip_prefix(r#"elastic_agent_fence_margin_seconds{job="job",node="a"} "#));
    let margin: f64 = margin.expect(&metrics).parse().unwrap();
    assert!(margin > 0.0 && margin < 60.0, "{margin}");
    job.leaves(&mut [first, second]).await;
}

#[tokio::test]
async fn an_agent_that_waits_lives_and_is_not_ready() {
    // Given an agent whose machine is still being checked, and whose store does not answer
    let mut job = Job::on_etcd("1").await.conf("join_timeout", "10m");
    let address = job.store_address().to_owned();
    job.etcd_mut().kill();
    let look = "--preflight-command=until test -e looked; do sleep 0.1; done";
    let mut agent = job.start_with("a", &["--health-port=0", look]);
    let port = health_port(&agent).await;

    // Then it says at once that it lives, and what it waits for, one after the other
    let waits = async |what: &str| {
        let says = async |path: &str, status: &str| {
            let answer = get(&port, path).await;
            answer.starts_with(&format!("HTTP/1.1 {status}")) && answer.contains(what)
        };
        let lives = async || (says("/live", "200").await && says("/ready", "503").await).then_some(());
        eventually(&format!("it lives, and waits: {what}"), LIMIT, lives).await;
        assert!(says("/", "200").await);
    };
    waits("looking at this machine").await;
    job.write("looked", "");
    waits(&format!("waiting for the store at {address}")).await;
    let metrics = get(&port, "/metrics").await;
    assert!(metrics.ends_with("\r\n\r\n# EOF\n"), "{metrics}");

    // When the store comes, then the agent joins and is ready
    job.etcd_mut().restart().await;
    job.runs(1, 1).await;
    let is_ready = async || get(&port, "/ready").await.starts_with("HTTP/1.1 200").then_some(());
    eventually("it is ready", LIMIT, is_ready).await;
    assert_eq!(get(&port, "/live").await.split_once("\r\n\r\n").unwrap().1, "the agent runs\n");
    assert!(get(&port, "/metrics").await.contains(r#"elastic_agent_round{job="job",node="a"} 1"#));
    job.succeeds([&mut agent]).await;
}
