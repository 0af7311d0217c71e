//! `elasticctl logs`: the workers' output, read through the agents by those who know the job's secret.

use elastic_node::logs::{LogQuery, LogStream, LogsError, READERS, open};
use elastic_proto::logs::LogsReply;
use elastic_rendezvous::job::JobSecret;
use elastic_tests::prelude::*;

/// Prints a line to each stream, waits for the file of its restart, prints another line, and fails the first time.
const WORKER: &str = r#"
echo "out $RANK $TORCHELASTIC_RESTART_COUNT"
echo "err $RANK $TORCHELASTIC_RESTART_COUNT" >&2
while [ ! -e "go-$TORCHELASTIC_RESTART_COUNT" ]; do sleep 0.05; done
echo "end $RANK $TORCHELASTIC_RESTART_COUNT"
[ "$TORCHELASTIC_RESTART_COUNT" -gt 0 ]
"#;

async fn job(nodes: &str, script: &str) -> Job {
    Job::on_etcd(nodes).await.flag("--max-restarts=1").program(["sh", "-c", script])
}

fn go(job: &Job, restart: u32) {
    job.write(&format!("go-{restart}"), "");
}

/// Runs `elasticctl logs job` with these arguments: whether it succeeded, what it printed, and what it said.
async fn logs(job: &Job, args: &[&str]) -> (bool, String, String) {
    let output = output("elasticctl", &[&["--etcd", job.store_address(), "logs", "job"], args].concat(), LIMIT).await;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (output.status.success(), text(&output.stdout), text(&output.stderr))
}

async fn lines(job: &Job, args: &[&str], count: usize) -> String {
    eventually(&format!("{count} lines of logs {args:?}"), LIMIT, async || {
        let (ok, printed, _) = logs(job, args).await;
        (ok && printed.lines().count() == count).then_some(printed)
    })
    .await
}

/// Where the node's agent listens, and the job's secret.
async fn access(job: &Job) -> (NodeId, Endpoint, JobSecret) {
    let node = eventually("a node", LIMIT, || job.record("nodes/")).await;
    let id = NodeId::new(node["name"].as_str().unwrap(), node["incarnation"].as_str().unwrap());
    let secret = job.record("secret").await.unwrap();
    let peer = serde_json::from_value(node["peer"].clone()).unwrap();
    (id, peer, serde_json::from_value(secret).unwrap())
}

const ALL: LogQuery = LogQuery { rank: None, round: None, lines: u32::MAX, follow: true };

async fn reader(node: &NodeId, peer: &Endpoint, secret: &JobSecret) -> LogStream {
    let job: JobId = "job".parse().unwrap();
    open((&job, node), peer, secret, "a test", ALL, None).await.unwrap()
}

/// The first message, which may be a refusal.
async fn first(stream: &mut LogStream) -> Result<LogsReply, LogsError> {
    let reply = within("a reply", LIMIT, stream.next()).await?;
    Ok(reply.expect("it continues"))
}

#[tokio::test]
async fn the_output_of_all_nodes_is_read_in_one_place() {
    let job = job("2", WORKER).await.flag("--redirects=1").flag("--tee=2").flag("--nproc-per-node=2");
    let mut agents = job.start_all(["a", "b"]);
    let all = lines(&job, &[], 8).await;
    for rank in 0..4 {
        for stream in ["out", "err"] {
            assert!(all.contains(&format!("[{rank}]:{stream} {rank} 0\n")), "{all}");
        }
    }
    assert_eq!(lines(&job, &["2"], 2).await, "out 2 0\nerr 2 0\n");
    let first = lines(&job, &["0"], 2).await;
    let of_a = lines(&job, &["--node", "a"], 4).await;
    let holds_rank_0 = of_a.contains("[0]:") as usize;
    assert_eq!(of_a.matches("[0]:").count() + of_a.matches("[1]:").count(), holds_rank_0 * 4, "{of_a}");
    // A node has the names that `drain` takes: its id is one, and a host with two nodes is none.
    let (id, ..) = access(&job).await;
    lines(&job, &["--node", id.as_str()], 4).await;
    let host = job.record("nodes/").await.unwrap()["host"].as_str().unwrap().to_owned();
    let (ok, _, said) = logs(&job, &["--node", &host]).await;
    assert!(!ok && said.contains("has no node"), "{said}");
    let json: serde_json::Value =
        serde_json::from_str(lines(&job, &["1", "-o", "json"], 2).await.lines().next().unwrap()).unwrap();
    assert_eq!((&json["rank"], &json["stream"], &json["line"]), (&1.into(), &"stdout".into(), &"out 1 0".into()));
    let (ok, _, said) = logs(&job, &["9"]).await;
    assert!(!ok && said.contains("job job has no rank 9 in round 1, which has 4 workers"), "{said}");
    let (ok, _, said) = logs(&job, &["--node", "c"]).await;
    assert!(!ok && said.contains("has no node \"c\": there are a, b"), "{said}");

    // The round before can be read too.
    assert_eq!(first, "out 0 0\nerr 0 0\n");
    go(&job, 0);
    eventually("rank 0 of the next round is read", LIMIT, async || {
        let (ok, printed, _) = logs(&job, &["0"]).await;
        (ok && printed == "out 0 1\nerr 0 1\n").then_some(())
    })
    .await;
    let past = lines(&job, &["--round", "1", "--lines", "1"], 8).await;
    assert_eq!((past.matches(":err ").count(), past.matches(" 0\n").count()), (4, 8), "{past}");

    go(&job, 1);
    assert_eq!(exits(&mut agents).await, [0, 0]);
    let (ok, _, said) = logs(&job, &["0"]).await;
    assert!(
        !ok && said.contains("job job, round 2 (succeeded): the agents to ask are gone")
            && said.contains("(127.0.0.1)"),
        "{said}"
    );
}

#[tokio::test]
async fn who_follows_hears_of_each_round_until_the_job_ends() {
    let job = job("2", WORKER).await.flag("--redirects=3");
    let mut agents = job.start_all(["a", "b"]);
    lines(&job, &["1"], 2).await;
    let mut all = Process::start("elasticctl", &["--etcd", &job.etcd().address(), "logs", "job", "-f"]);
    let one = Process::start("elasticctl", &["--etcd", &job.etcd().address(), "logs", "job", "1", "-f"]);
    all.says("[1]:out 1 ", LIMIT).await;
    go(&job, 0);
    for rank in 0..2 {
        all.says(&format!("[{rank}]:out {rank} 1"), LIMIT).await;
    }
    go(&job, 1);
    assert_eq!(exits(&mut agents).await, [0, 0]);
    assert_eq!(all.exit(LIMIT).await, 0);
    let log = all.output();
    for line in ["out", "err", "end"] {
        for rank in 0..2 {
            assert_eq!(log.matches(&format!("[{rank}]:{line} {rank} 1\n")).count(), 1, "{log}");
        }
    }
    assert!(log.contains("job job has succeeded"), "{log}");
    eventually("the one rank's last line", LIMIT, async || one.output().contains("end 1 1\n").then_some(())).await;
    let log = one.output();
    for line in ["out 1 0", "err 1 0", "out 1 1", "err 1 1", "end 1 1"] {
        assert_eq!(log.lines().filter(|said| *said == line).count(), 1, "{log}");
    }
    assert!(!log.contains("out 0"), "{log}");
}

#[tokio::test]
async fn no_one_reads_without_the_secret_and_it_is_never_shown() {
    let job = job("1", WORKER).await.flag("--redirects=3");
    let mut agent = job.start("a");
    agent.says("worker started", LIMIT).await;
    let (node, peer, secret) = access(&job).await;
    let refusal = first(&mut reader(&node, &peer, &JobSecret::of([0; 32])).await).await.unwrap_err().to_string();
    assert!(refusal.contains("the proof does not fit"), "{refusal}");
    let other = NodeId::new("a", "another");
    let refusal = first(&mut reader(&other, &peer, &secret).await).await.unwrap_err().to_string();
    assert!(refusal.contains("that node does not take part"), "{refusal}");
    first(&mut reader(&node, &peer, &secret).await).await.unwrap();
    agent.says("read through this agent client=a test", LIMIT).await;

    let record = job.record("secret").await.unwrap();
    let key = record["key"].as_str().unwrap();
    for command in [&["describe", "job"][..], &["jobs"], &["events", "job"]] {
        assert!(!job.ctl_ok(&[&["-o", "json"], command].concat()).await.contains(key), "{command:?}");
    }
    let worker = job_worker(&agent).await;
    assert!(!std::fs::read_to_string(format!("/proc/{worker}/environ")).unwrap().contains(key));
    assert!(!agent.output().contains(key));

    // Somebody deletes it.
    let keys = job.keys();
    job.store().txn(Txn::of([Op::delete(keys.secret())])).await.unwrap();
    let (ok, _, said) = logs(&job, &[]).await;
    assert!(!ok && said.contains("job job has no secret"), "{said}");
    go(&job, 0);
    go(&job, 1);
    assert_eq!(agent.exit(LIMIT).await, 0);
}

#[tokio::test]
async fn a_job_that_begins_again_has_another_secret() {
    let etcd = EtcdServer::start(EtcdOptions::default()).await;
    let job = Job::on(&etcd, "1").flag("--redirects=3").program(["false"]);
    assert_eq!(job.start("a").exit(LIMIT).await, JOB_FAILED);
    let first = job.record("secret").await.unwrap();
    let script = "echo second; while [ ! -e go-0 ]; do sleep 0.05; done";
    let again = Job::on(&etcd, "1").flag("--redirects=3").program(["sh", "-c", script]);
    let mut agent = again.start("a");
    assert_eq!(lines(&again, &["0"], 1).await, "second\n");
    assert_ne!(again.record("secret").await.unwrap(), first);
    go(&again, 0);
    assert_eq!(agent.exit(LIMIT).await, 0);
}

/// The process id of the agent's worker, as its log tells it.
async fn job_worker(agent: &Agent) -> String {
    eventually("a worker", LIMIT, async || {
        let log = agent.output();
        let line = log.lines().find(|line| line.contains("worker started"))?.to_owned();
        let pid = line.split("pid=").nth(1)?;
        Some(pid.chars().take_while(char::is_ascii_digit).collect())
    })
    .await
}

#[tokio::test]
async fn readers_that_stop_reading_cost_the_job_nothing() {
    const WRITTEN: u64 = 100 << 20;
    let script = format!("yes $(seq 200 | tr -d '\n') | head -c {WRITTEN}; while [ ! -e go-0 ]; do sleep 0.05; done");
    let job = job("1", &script).await.flag("--redirects=1");
    let mut agent = job.start("a");
    agent.says("worker started", LIMIT).await;
    let (node, peer, secret) = access(&job).await;
    let mut unread = Vec::new();
    for _ in 0..READERS {
        let mut stream = reader(&node, &peer, &secret).await;
        first(&mut stream).await.unwrap();
        unread.push(stream);
    }
    let refusal = first(&mut reader(&node, &peer, &secret).await).await.unwrap_err().to_string();
    assert!(refusal.contains("8 others are reading"), "{refusal}");
    // The worker writes all that it has, though no one reads on.
    let log = || walk(&job.path("logs")).into_iter().find(|path| path.ends_with("stdout.log"));
    eventually("all is written", LIMIT, async || (log()?.metadata().ok()?.len() == WRITTEN).then_some(())).await;
    let peak = agent.kilobytes("VmHWM:");
    println!("the agent's peak: {peak} kB");
    assert!(peak < 64 << 10, "{peak} kB");
    // One that is gone makes room for another.
    unread.pop();
    eventually("a place is free", LIMIT, async || first(&mut reader(&node, &peer, &secret).await).await.ok()).await;
    let begun = std::time::Instant::now();
    go(&job, 0);
    assert_eq!(agent.exit(LIMIT).await, 0);
    assert!(begun.elapsed() < Duration::from_secs(10), "its end took {:?}", begun.elapsed());
}

fn walk(folder: &std::path::Path) -> Vec<std::path::PathBuf> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path());
    entries.flat_map(|path| if path.is_dir() { walk(&path) } else { vec![path] }).collect()
}

#[tokio::test]
async fn without_files_the_end_of_standard_error_is_there_and_a_flag_is_named() {
    let job = job("1", WORKER).await.flag("--log-dir=/dev/null");
    let mut agent = job.start("a");
    // The agent's own output is one file, and so its workers write to one pipe.
    let printed = lines(&job, &[], 2).await;
    assert_eq!(printed, "[0]:out 0 0\n[0]:err 0 0\n");
    let (ok, _, said) = logs(&job, &[]).await;
    let why = "node a: the standard output of its workers is with standard error, as both of the agent's are one file: \
               start agents with --redirects=3";
    assert!(ok && said.contains(why), "{said}");
    go(&job, 0);
    // Of the worker before, too.
    let next = "[0]:out 0 1\n[0]:err 0 1\n";
    eventually("the next worker", LIMIT, async || (logs(&job, &[]).await.1 == next).then_some(())).await;
    assert_eq!(lines(&job, &["--round", "1"], 3).await, "[0]:out 0 0\n[0]:err 0 0\n[0]:end 0 0\n");
    go(&job, 1);
    assert_eq!(agent.exit(LIMIT).await, 0);
}
