//! What people get wrong: one clear message and an exit code that is not zero, in bounded time.

use elastic_tests::prelude::*;

use crate::agents::quiescing::{done, job_on, places, round};

/// Short, since the agent has nothing to wait for.
const AT_ONCE: Duration = Duration::from_secs(5);

/// The agent ends with `code` and says all of `parts` in the one line it has for people.
async fn is_refused(agent: &mut Agent, code: i32, parts: &[&str]) {
    let ended = agent.exit(LIMIT).await;
    let output = agent.output();
    assert_eq!(ended, code, "{output}");
    let lines: Vec<&str> = output.lines().filter(|line| line.starts_with("elastic-agent: ")).collect();
    assert_eq!(lines.len(), 1, "{output}");
    for part in parts {
        assert!(lines[0].contains(part), "{part:?} is not in\n{output}");
    }
    assert!(!output.contains("panicked"), "{output}");
}

#[tokio::test]
async fn no_etcd_is_waited_for_and_said_once() {
    let endpoint = format!("--rdzv-endpoint=127.0.0.1:{}", free_port());
    let job = Job::met_by(&["--rdzv-backend=etcd", &endpoint], "1").conf("join_timeout", "3s");
    let mut agent = job.start("a");
    is_refused(&mut agent, 1, &["gave up after join_timeout", "--rdzv-endpoint"]).await;
    assert_eq!(agent.output().matches("waiting for it").count(), 1, "{}", agent.output());
}

#[tokio::test]
async fn etcd_may_start_after_the_agents() {
    let mut job = Job::on_etcd("2").await;
    job.etcd_mut().kill();
    let mut agents = job.start_all(["a", "b"]);
    agents[0].says("waiting for it", LIMIT).await;
    job.etcd_mut().restart().await;
    job.runs(1, 2).await;
    job.succeeds(&mut agents).await;
}

/// Only a leader gives places, and it writes them to the store.
#[tokio::test]
async fn a_node_that_waits_for_others_does_not_outlive_join_timeout_without_etcd() {
    let mut job = Job::on_etcd("2").await.conf("join_timeout", "4s");
    let mut agent = job.start("a");
    eventually("it waits for another", LIMIT, async || job.record("nodes/a").await).await;
    job.etcd_mut().kill();
    is_refused(&mut agent, 1, &["gave up after join_timeout (4s)"]).await;
}

#[tokio::test]
async fn a_server_that_is_no_etcd_is_named() {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let server = tokio::spawn(async move {
        use tokio::io::{AsyncReadExt, AsyncWriteExt};
        while let Ok((mut stream, _)) = listener.accept().await {
            let mut request = [0; 4096];
            let _ = stream.read(&mut request).await;
            let _ = stream.write_all(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n").await;
        }
    });
    let endpoint = format!("--rdzv-endpoint={address}");
    let job = Job::met_by(&["--rdzv-backend=etcd", &endpoint], "1").conf("join_timeout", "3s");
    is_refused(&mut job.start("a"), 1, &[&address, "not etcd"]).await;
    server.abort();
}

#[tokio::test]
async fn tls_on_one_side_alone_is_named() {
    let certs = Arc::new(Certs::new());
    let secure = EtcdServer::start(EtcdOptions { tls: Some(Arc::clone(&certs)), ..EtcdOptions::default() }).await;
    let job = Job::on(&secure, "1").conf("join_timeout", "3s");
    is_refused(&mut job.start("plain"), 1, &[&secure.address(), "https"]).await;

    let plain = EtcdServer::start(EtcdOptions::default()).await;
    let job = Job::on(&plain, "1").conf("join_timeout", "3s").conf("protocol", "https");
    let job = job.conf("cacert", certs.ca.to_str().unwrap());
    is_refused(&mut job.start("secure"), 1, &[&plain.address(), "http://"]).await;
}

#[tokio::test]
async fn a_wrong_password_is_named() {
    let job = Job::on_etcd("1").await.conf("user", "trainer");
    job.etcd().enable_auth("root-secret", "secret").await;
    let file = job.path("password");
    std::fs::write(&file, "guess").unwrap();
    let job = job.conf("password_file", file.to_str().unwrap());
    let mut agent = job.start("a");
    is_refused(&mut agent, 1, &["password"]).await;
    assert!(!agent.output().contains("guess"), "the password is not shown: {}", agent.output());

    std::fs::write(&file, "secret").unwrap();
    let mut agent = job.start("a");
    job.runs(1, 1).await.exit(0);
    assert_eq!(agent.exit(LIMIT).await, 0, "{}", agent.output());
}

#[tokio::test]
async fn flags_that_mean_nothing_are_refused_at_once() {
    let job = Job::on_etcd("1").await;
    for nodes in ["3:1", "0", "-1", "a:b"] {
        let flag = format!("--nnodes={nodes}");
        let mut agent = job.start_with("a", &[&flag]);
        is_refused(&mut agent, 2, &[&flag]).await;
    }
    let long = "x".repeat(10_000);
    for id in ["a/b", "a b", "jöb", &long] {
        let mut agent = job.start_with("a", &[&format!("--rdzv-id={id}")]);
        is_refused(&mut agent, 2, &["--rdzv-id"]).await;
    }
    assert_eq!(job.record("").await, None, "nothing was written");
}

/// To other nodes a port that refuses is the proof of a death.
#[tokio::test]
async fn a_node_that_is_not_where_it_says_is_refused() {
    let job = Job::on_etcd("1:2").await;
    let elsewhere = format!("--peer-port=127.0.0.2:{}", free_port());
    let mut there = job.start_with("a", &["--local-addr=127.0.0.1", &elsewhere]);
    is_refused(&mut there, 1, &["--local-addr", "refuses connections", "this agent listens on 127.0.0.2:"]).await;
    assert_eq!(job.record("nodes/").await, None);

    // Whether an address is translated, this machine cannot know. RFC 5737 has this one.
    let translated = job.start_with("b", &["--local-addr=192.0.2.7"]);
    translated.says("192.0.2.7 is no address of this machine", LIMIT).await;
}

#[tokio::test]
async fn nodes_that_disagree_hear_both_values() {
    let job = Job::on_etcd("1:2").await;
    let mut first = job.start("a");
    let round = job.runs(1, 1).await;
    let mut second = job.start_with("b", &["--nnodes=2:4"]);
    is_refused(&mut second, 1, &["1:2", "2:4"]).await;
    assert_eq!(job.runs(1, 1).await, round, "the first continues undisturbed");
    job.succeeds([&mut first]).await;
}

#[tokio::test]
async fn a_node_with_another_command_line_is_named_once() {
    let etcd = EtcdServer::start(EtcdOptions::default()).await;
    // It fails once on each node.
    let script = "[ -e again ] || { touch again; exit 1; }";
    let job = |layers: &str| Job::on(&etcd, "2").flag("--max-restarts=3").program(["sh", "-c", script, layers]);
    let (one, other) = (job("layers=2"), job("layers=4"));
    let mut agents = [one.start("a"), other.start("b")];
    assert_eq!(exits(&mut agents).await, [0, 0], "{}", agents[0].output());
    let said: String = agents.iter().map(Agent::output).collect();
    assert_eq!(said.matches("another program or other arguments than on this node").count(), 1, "{said}");
}

#[tokio::test]
async fn workers_see_the_jobs_restarts_whatever_flag_their_node_has() {
    let job = job_on("1:2").await;
    let mut a = job.start("a");
    places(&job, 0, 1).await;
    // An operator has changed the job, so nodes with other flags are let in.
    job.ctl_ok(&["set", "job", "--max", "3"]).await;
    let mut b = job.start_with("b", &["--max-restarts=7"]);
    let two = places(&job, 1, 2).await;
    let mut c = job.start_with("c", &["--max-restarts=8", "--warm-up=60"]);
    places(&job, round(&two), 3).await;
    for worker in job.lines("started") {
        assert_eq!(worker["TORCHELASTIC_MAX_RESTARTS"], "3", "{worker}");
    }
    done(&job, [&mut a, &mut b, &mut c]).await;
}

#[tokio::test]
async fn what_cannot_run_is_refused_before_anything_is_joined() {
    let job = Job::on_etcd("1").await.program(["/no/such/program"]);
    is_refused(&mut job.start("a"), 1, &["/no/such/program", "does not exist"]).await;

    let file = job.path("not-executable");
    std::fs::write(&file, "#!/bin/sh\n").unwrap();
    std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o644)).unwrap();
    let job = job.program([file.to_str().unwrap()]);
    is_refused(&mut job.start("a"), 1, &["not executable"]).await;

    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    let job = job.program(["sleep", "1000"]);
    is_refused(&mut job.start_with("a", &[&format!("--peer-port={port}")]), 1, &[&port, "--peer-port"]).await;

    // The folder lies below a file, since root may write into any folder.
    let below = file.join("logs").display().to_string();
    is_refused(&mut job.start_with("a", &[&format!("--log-dir={below}")]), 1, &[&below]).await;
    assert_eq!(job.record("").await, None, "nothing was written");
}

#[tokio::test]
async fn a_checkpoint_folder_that_cannot_be_is_the_jobs_cause() {
    let job = Job::on_etcd("1").await.flag("--max-restarts=0");
    let file = job.path("file");
    std::fs::write(&file, "").unwrap();
    let folder = file.join("checkpoints").display().to_string();
    let trainer = binary("elastic-trainer").display().to_string();
    let job = job.program([trainer, "digits".into(), "--epochs=1".into(), format!("--checkpoint-dir={folder}")]);
    let mut agent = job.start("a");
    assert_eq!(agent.exit(LIMIT).await, JOB_FAILED);
    let output = agent.output();
    let cause = output.split_once("  root cause").map_or("", |(_, cause)| cause);
    assert!(cause.contains(&folder), "{output}");
}

#[tokio::test]
async fn a_checkpoint_folder_that_is_gone_is_named_and_can_be_given_up() {
    let job = Job::on_etcd("1").await.flag("--max-restarts=0");
    let folder = job.path("checkpoints");
    let trainer = binary("elastic-trainer").display().to_string();
    let train = [trainer, "digits".into(), "--epochs=1".into(), format!("--checkpoint-dir={}", folder.display())];

    // Given a job that has committed a checkpoint and then failed, and whose folder was lost
    let fails_after = ["sh".to_owned(), "-c".into(), r#""$0" "$@" && exit 3"#.into()].into_iter().chain(train.clone());
    let job = job.program(fails_after);
    let mut agent = job.start("a");
    assert_eq!(agent.exit(LIMIT).await, JOB_FAILED, "{}", agent.output());
    std::fs::remove_dir_all(&folder).unwrap();

    // When it is started again, then it does not begin again unasked: it names the step, the file and the way out
    let job = job.program(train);
    let step = job.record("checkpoint").await.unwrap()["step"].to_string();
    let mut agent = job.start("a");
    assert_eq!(agent.exit(LIMIT).await, JOB_FAILED);
    let output = agent.output();
    for part in [&format!("must resume from step {step}"), folder.to_str().unwrap(), "elasticctl drop-checkpoint"] {
        assert!(output.contains(part), "{part:?} is not in\n{output}");
    }

    // And that way out works
    let dropped = job.ctl_ok(&["drop-checkpoint", "job"]).await;
    assert!(dropped.contains(&format!("dropped step {step}")), "{dropped}");
    let mut agent = job.start("a");
    assert_eq!(agent.exit(LIMIT).await, 0, "{}", agent.output());
    assert!(job.ctl_ok(&["drop-checkpoint", "job"]).await.contains(&format!("dropped step {step}")));
    assert!(job.ctl_ok(&["drop-checkpoint", "job"]).await.contains("there was none"));
}

#[tokio::test]
async fn an_agent_started_twice_is_refused_with_the_owner_of_its_name() {
    let job = Job::on_etcd("1:2").await;
    let mut first = job.start("a");
    let round = job.runs(1, 1).await;
    let mut second = job.start("a");
    is_refused(&mut second, 1, &["node name `a` is in use", &first.pid().to_string(), "--node-name"]).await;
    assert_eq!(job.runs(1, 1).await, round, "the first continues undisturbed");
    round.exit(0);
    assert_eq!(first.exit(AT_ONCE).await, 0);
}

/// torchrun unpickles what it finds in the store.
#[tokio::test]
async fn what_others_wrote_into_the_store_is_refused_and_never_run() {
    let job = Job::on_etcd("1").await;
    let ran = job.path("ran");
    let pickle = format!("cos\nsystem\n(S'touch {}'\ntR.", ran.display());
    let keys = job.keys();
    job.etcd().client().await.put(keys.round(), pickle, None).await.unwrap();
    is_refused(&mut job.start("a"), 1, &[&keys.round(), "is not one of ours"]).await;
    assert!(!ran.exists());
}

#[tokio::test]
async fn a_full_etcd_is_named() {
    let etcd = EtcdServer::start(EtcdOptions::default().args(["--quota-backend-bytes", "262144"])).await;
    let mut client = etcd.client().await;
    let value = "x".repeat(64 * 1024);
    while client.put("/filler", value.clone(), None).await.is_ok() {}
    let job = Job::on(&etcd, "1").conf("join_timeout", "5s");
    is_refused(&mut job.start("a"), 1, &["space"]).await;
}
