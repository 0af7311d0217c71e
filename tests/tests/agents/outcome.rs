//! What a failed job tells: the root cause, the same from every agent, and the logs it leaves.

use std::io::Read;

use elastic_tests::prelude::*;

/// The last line that an agent with `--report=json` printed.
fn json(agent: &Agent) -> Value {
    let output = agent.output();
    let report = serde_json::from_str(output.lines().last().unwrap_or_default());
    assert!(report.is_ok(), "{output}");
    report.unwrap()
}

fn alone() -> Job {
    Job::met_by(&["--standalone"], "1").flag("--report=json")
}

/// A job of one worker that runs this shell script.
fn script(text: &str) -> Job {
    alone().program(["bash", "-c", text])
}

/// Runs a job on one node to its failure.
async fn failure_of(job: &Job) -> Value {
    let mut agent = job.start("a");
    assert_eq!(agent.exit(LIMIT).await, JOB_FAILED, "{}", agent.output());
    json(&agent)
}

fn text<'a>(value: &'a Value, name: &str) -> &'a str {
    assert!(value[name].is_string(), "no {name} in {value}");
    value[name].as_str().unwrap()
}

#[tokio::test]
async fn every_agent_gives_the_same_report_with_the_workers_traceback() {
    // Given a worker that records its exception, as torch's @record does, and says more on standard error,
    let recorded = r#"{"message":{"message":"ValueError: boom","extraInfo":{"py_callstack":"Traceback: frame 1\nframe 2","timestamp":"1"}}}"#;
    let program = format!(
        r#"if [ "$RANK" = 1 ]; then echo '{recorded}' > "$TORCHELASTIC_ERROR_FILE"; echo "last words" >&2; exit 3; fi
        exec sleep 1000"#
    );
    let job = Job::on_etcd("3").await.flag("--report=json").program(["bash", "-c", &program]);

    // when it fails,
    let mut agents = job.start_all(["a", "b", "c"]);
    assert_eq!(exits(&mut agents).await, [JOB_FAILED; 3]);

    // then all agents say the same, for people and for programs.
    let reports = agents.each_ref().map(json);
    assert!(reports.iter().all(|report| *report == reports[0]), "{reports:#?}");
    assert_eq!((text(&reports[0], "result"), text(&reports[0], "job")), ("failed", "job"));
    let cause = &reports[0]["cause"];
    assert_eq!(text(cause, "message"), "ValueError: boom (exit code 3)");
    assert_eq!(text(cause, "traceback"), "Traceback: frame 1\nframe 2");
    assert_eq!(cause["stderr"], serde_json::json!(["last words"]));
    assert_eq!((&cause["rank"], &cause["exit_code"], text(cause, "class")), (&1.into(), &3.into(), "own"));
    assert!(!text(cause, "host").is_empty() && cause["pid"].is_u64(), "{cause}");
    let people = agents.each_ref().map(|agent| {
        let output = agent.output();
        let (_, cause) = output.split_once("  root cause\n").unwrap_or_else(|| panic!("{output}"));
        cause.rsplit_once("\n{").unwrap().0.to_owned()
    });
    assert!(people.iter().all(|one| *one == people[0]), "{people:#?}");
    assert!(people[0].contains("    traceback\n      Traceback: frame 1\n      frame 2\n"), "{}", people[0]);
}

#[tokio::test]
async fn the_cause_is_handed_up_to_the_starter_of_the_agent() {
    let job = script("echo '{\"message\":\"std::bad_alloc\",\"errorCode\":6}' > $TORCHELASTIC_ERROR_FILE; exit 7");
    let own = job.path("own-error.json");
    let job = job.env("TORCHELASTIC_ERROR_FILE", own.to_str().unwrap());
    failure_of(&job).await;
    let handed: Value = serde_json::from_slice(&std::fs::read(&own).unwrap()).unwrap();
    assert_eq!(handed["message"]["message"], "std::bad_alloc (exit code 7)");
    assert_eq!(handed["message"]["errorCode"], 7);
    assert!(handed["message"]["extraInfo"]["timestamp"].is_string(), "{handed}");
}

#[tokio::test]
async fn an_error_file_that_is_no_error_file_does_no_harm() {
    for hostile in ["head -c 100M /dev/zero > $F", "printf '{\"message\":{\"mess' > $F", "mkfifo $F", "mkdir $F"] {
        let job = script(&format!("F=$TORCHELASTIC_ERROR_FILE; {hostile}; echo error: the true reason >&2; exit 3"));
        let cause = failure_of(&job).await["cause"].clone();
        assert_eq!(text(&cause, "message"), "error: the true reason (exit code 3)", "{hostile}");
    }
}

#[tokio::test]
async fn signals_are_named_with_who_sent_them() {
    let cause = failure_of(&script("ulimit -c 0; kill -SEGV $BASHPID")).await["cause"].clone();
    assert_eq!((&cause["exit_code"], text(&cause["killed_by"], "by")), (&(-11).into(), "fault"));
    assert_eq!(text(&cause, "message"), "signal 11 (SIGSEGV)");
    let cause = failure_of(&script("kill -KILL $BASHPID")).await["cause"].clone();
    assert_eq!((&cause["exit_code"], text(&cause["killed_by"], "by")), (&(-9).into(), "outside"));
    let cause = failure_of(&script("kill -TERM $BASHPID")).await["cause"].clone();
    assert_eq!((text(&cause, "class"), text(&cause["killed_by"], "by")), ("signalled", "outside"));
}

#[tokio::test]
async fn a_bystander_that_was_asked_to_stop_is_not_the_cause() {
    // Given two workers of a node whose agent is held still,
    let job = alone().flag("--nproc-per-node=2");
    let mut agent = job.start("a");
    let round = job.runs(1, 2).await;
    agent.signal(Signal::STOP);

    // when someone ends the one, and then the other breaks by itself,
    round.workers[0].signal(Signal::TERM);
    eventually("the first is gone", LIMIT, async || (!round.workers[0].is_alive()).then_some(())).await;
    round.workers[1].exit(5);
    eventually("the second is gone", LIMIT, async || (!round.workers[1].is_alive()).then_some(())).await;
    agent.signal(Signal::CONT);

    // then the agent, which hears of both at once, names the second.
    assert_eq!(agent.exit(LIMIT).await, JOB_FAILED);
    let cause = json(&agent)["cause"].clone();
    assert_eq!((&cause["rank"], text(&cause, "message")), (&1.into(), "error: told to exit with 5 (exit code 5)"));
}

/// A memory cgroup of this test's own below the test's; none where the machine does not let us.
struct Cgroup(PathBuf);

impl Cgroup {
    fn with_limit(bytes: u64) -> Option<Cgroup> {
        let own = std::fs::read_to_string("/proc/self/cgroup").ok()?;
        let path = |prefix: &str| own.lines().find_map(|line| line.split_once(prefix)).map(|(_, path)| path.to_owned());
        let name = format!("elastic-oom-{}", std::process::id());
        let v1 = path(":memory:").map(|path| (format!("/sys/fs/cgroup/memory{path}"), "memory.limit_in_bytes"));
        let v2 = path("0::").map(|path| (format!("/sys/fs/cgroup{path}"), "memory.max"));
        v1.into_iter().chain(v2).find_map(|(parent, limit)| {
            let directory = Path::new(&parent).join(&name);
            std::fs::create_dir(&directory).ok()?;
            let cgroup = Cgroup(directory);
            // Without swap the limit is reached at once; where there is no such file there is no swap to count.
            std::fs::write(cgroup.0.join(limit), bytes.to_string()).ok()?;
            Some(cgroup)
        })
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir(&self.0);
    }
}

#[tokio::test]
async fn the_out_of_memory_killer_is_convicted() {
    let Some(cgroup) = Cgroup::with_limit(96 << 20) else {
        return skip("OOM", "this machine lets us make no memory cgroup");
    };
    // `tail` keeps the last lines, and /dev/zero never ends its first one.
    let job = alone().within(&cgroup.0).program(["tail", "/dev/zero"]);
    let cause = failure_of(&job).await["cause"].clone();
    assert_eq!(text(&cause["killed_by"], "by"), "oom_killer", "{cause}");
    assert_eq!(text(&cause, "message"), "killed by the kernel's out-of-memory killer (signal 9 (SIGKILL))");
    assert!(text(&cause["killed_by"], "evidence").contains(&*cgroup.0.to_string_lossy()), "{cause}");
    drop(job);

    // A shell whose child is the victim says that itself; the kernel's count is reported too.
    let job = alone().within(&cgroup.0).program(["bash", "-c", "tail /dev/zero; exit $?"]);
    let cause = failure_of(&job).await["cause"].clone();
    assert_eq!((text(&cause["killed_by"], "by"), &cause["exit_code"]), ("oom_killer_beside", &137.into()), "{cause}");
}

#[tokio::test]
async fn each_restart_leaves_torchruns_attempt_directory() {
    let job = script("echo attempt $TORCHELASTIC_RESTART_COUNT; exit 1").flag("--max-restarts=2").flag("--redirects=1");
    failure_of(&job).await;
    let run = job.path("logs").read_dir().unwrap().next().unwrap().unwrap().path();
    for attempt in 0..3 {
        let log = std::fs::read_to_string(run.join(format!("attempt_{attempt}/0/stdout.log"))).unwrap();
        assert_eq!(log, format!("attempt {attempt}\n"));
    }
    assert!(!run.join("attempt_3").exists());
}

#[tokio::test]
async fn attempts_that_are_too_old_leave_no_logs_if_so_asked() {
    let go = tempfile::tempdir().unwrap();
    let wait = format!("until [ -e {} ]; do sleep 0.02; done", go.path().join("go").display());
    let job = script(&format!("echo text; [ $TORCHELASTIC_RESTART_COUNT != 3 ] || {wait}; exit 1"));
    let job = job.flag("--max-restarts=3").flag("--redirects=1").flag("--log-attempts=2");
    let mut agent = job.start("a");
    let attempts = || -> Vec<String> {
        let runs = job.path("logs").read_dir().into_iter().flatten().flatten();
        let attempts = runs.filter_map(|run| run.path().read_dir().ok()).flatten().flatten();
        let mut names: Vec<String> = attempts.map(|entry| entry.file_name().into_string().unwrap()).collect();
        names.sort();
        names
    };
    let gone = async || (attempts() == ["attempt_2", "attempt_3"]).then_some(());
    eventually("the older attempts' logs are gone", LIMIT, gone).await;
    std::fs::write(go.path().join("go"), "").unwrap();
    assert_eq!(agent.exit(LIMIT).await, JOB_FAILED, "{}", agent.output());
    assert_eq!(attempts(), ["attempt_2", "attempt_3"]);
}

#[tokio::test]
async fn a_change_of_members_keeps_the_logs_of_the_attempt() {
    let job = Job::on_etcd("1:2").await.flag("--redirects=2");
    let mut first = job.start("a");
    job.runs(1, 1).await;
    let mut second = job.start("b");
    let round = job.runs(2, 2).await;
    let attempts = |run: &Path| -> Vec<String> {
        let entries = run.read_dir().unwrap();
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
    };
    let mut all: Vec<Vec<String>> =
        job.path("logs").read_dir().unwrap().map(|run| attempts(&run.unwrap().path())).collect();
    all.iter_mut().for_each(|names| names.sort());
    all.sort();
    assert_eq!(
        all,
        [vec!["attempt_0".to_owned()], vec!["attempt_0".into(), format!("attempt_0_round_{}", round.number)]]
    );
    job.succeeds([&mut first, &mut second]).await;
}

#[tokio::test]
async fn a_console_that_is_not_read_costs_neither_the_lease_nor_a_line() {
    const LINES: u32 = 700_000;
    let job = Job::on_etcd("1").await.flag("--tee=1");
    let done = job.path("done");
    let program = format!("seq 1 {LINES}; touch {}", done.display());
    let job = job.program(["bash", "-c", &program]);

    // Given a worker that writes more than console and pipes hold, when no one reads for longer than a lease,
    let (mut agent, mut console) = job.start_into_pipe("a");
    let running = async || job.record("round").await.filter(|round| round["state"] == "running");
    eventually("the round runs", LIMIT, running).await;
    tokio::time::sleep(LEASE + Duration::from_secs(2)).await;

    // then the node is a member still, in the same round, and its worker waits;
    assert_eq!(job.record("round").await.unwrap()["number"], 1);
    assert!(job.record("nodes/").await.is_some());
    assert!(!done.exists(), "the worker waits for the console");

    // and when someone reads, every line is there, in order.
    let reader = tokio::task::spawn_blocking(move || {
        let mut text = String::new();
        console.read_to_string(&mut text).unwrap();
        text
    });
    assert_eq!(agent.exit(LIMIT).await, 0);
    let text = reader.await.unwrap();
    let lines = text.lines().filter_map(|line| line.strip_prefix("[default0]:"));
    assert!(lines.map(|line| line.parse::<u32>().unwrap()).eq(1..=LINES));
}
