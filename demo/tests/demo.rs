//! The demo as a person runs it, though small and without a terminal: it must check what it shows, and leave nothing.

// The helpers may panic as the tests may.
#![allow(clippy::unwrap_used)]

use std::io::Read;
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use elastic_tests::etcd::{EtcdOptions, EtcdServer, free_port};
use elastic_tests::processes::binary;
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

const LIMIT: Duration = Duration::from_secs(60);

/// A running demo whose files go to a folder of the test's own.
struct Demo {
    child: Child,
    folder: TempDir,
}

impl Demo {
    fn start(arguments: &[&str]) -> Demo {
        for needed in ["elastic-agent", "elastic-trainer"] {
            binary(needed);
        }
        let folder = tempfile::tempdir().unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_elastic-demo"));
        command.arg("--quick").args(arguments).env("TMPDIR", folder.path());
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        Demo { child: command.spawn().unwrap(), folder }
    }

    fn run(arguments: &[&str]) -> (ExitStatus, String, String) {
        Demo::start(arguments).end()
    }

    /// How it ended, and what it printed. It prints far less than a pipe holds.
    fn end(&mut self) -> (ExitStatus, String, String) {
        let started = Instant::now();
        let status = loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                break status;
            }
            if started.elapsed() > LIMIT {
                self.child.kill().unwrap();
            }
            std::thread::sleep(Duration::from_millis(20));
        };
        let (mut out, mut err) = (String::new(), String::new());
        self.child.stdout.take().unwrap().read_to_string(&mut out).unwrap();
        self.child.stderr.take().unwrap().read_to_string(&mut err).unwrap();
        (status, out, err)
    }

    fn logs(&self) -> Vec<PathBuf> {
        let entries = std::fs::read_dir(self.folder.path()).unwrap().flatten();
        let runs = entries.flat_map(|demo| std::fs::read_dir(demo.path()).into_iter().flatten().flatten());
        let files = runs.flat_map(|run| std::fs::read_dir(run.path()).into_iter().flatten().flatten());
        files.map(|file| file.path()).filter(|path| path.extension().is_some_and(|name| name == "log")).collect()
    }
}

fn shows_that_nothing_is_lost(status: ExitStatus, out: &str, err: &str) {
    assert!(status.success(), "{status}\n{out}\n{err}");
    for line in [
        "killed agent b",
        "lost b",
        "started agent b again",
        "ok     no committed step is lost or done twice",
        "ok     each epoch has each sample once",
        "ok     the loss is the undisturbed run's",
        "equal in every bit",
        "ok     the parameters are the undisturbed run's",
        "ok     the digits are learned",
        "ok     nothing of the killed agent was left",
        "ok     the other workers kept their processes",
        "all checks hold",
    ] {
        assert!(out.contains(line), "{line:?} is missing in\n{out}");
    }
    assert!(!out.contains('\x1b'), "this is no terminal");
    assert_eq!(err, "");
}

#[test]
fn the_demo_shows_that_nothing_is_lost() {
    let (status, out, err) = Demo::run(&[]);
    assert!(out.contains("embedded store of this process at 127.0.0.1:"), "{out}");
    shows_that_nothing_is_lost(status, &out, &err);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_demo_runs_on_etcd_and_takes_its_keys_out_again() {
    let etcd = EtcdServer::start(EtcdOptions::default()).await;
    let address = etcd.address();
    let (status, out, err) = tokio::task::spawn_blocking({
        let address = address.clone();
        move || Demo::run(&["--etcd", &address])
    })
    .await
    .unwrap();
    assert!(out.contains(&format!("at {address}")), "{out}");
    shows_that_nothing_is_lost(status, &out, &err);
    let everything = etcd_client::GetOptions::new().with_prefix();
    let left = etcd.client().await.get("/", Some(everything)).await.unwrap();
    assert_eq!(left.kvs().len(), 0, "{:?}", left.kvs());
}

#[test]
fn an_interrupted_demo_leaves_nothing() {
    // Given a demo whose agents run.
    let mut demo = Demo::start(&["--epochs", "100000"]);
    let started = Instant::now();
    while demo.logs().len() < 3 {
        assert!(started.elapsed() < LIMIT, "no agents");
        std::thread::sleep(Duration::from_millis(20));
    }
    // When it is interrupted.
    kill_process(Pid::from_child(&demo.child), Signal::INT).unwrap();
    let (status, out, err) = demo.end();
    // Then neither processes (it looks for them itself) nor files remain.
    assert_eq!(status.code(), Some(130), "{out}\n{err}");
    assert!(out.contains("all agents have ended"), "{out}\n{err}");
    assert_eq!(std::fs::read_dir(demo.folder.path()).unwrap().count(), 0);
}

#[test]
fn an_etcd_that_is_not_there_is_named() {
    let port = free_port();
    let (status, _, err) = Demo::run(&["--etcd", &format!("127.0.0.1:{port}")]);
    assert_eq!(status.code(), Some(1));
    assert!(err.contains(&format!("127.0.0.1:{port}")) && err.contains("refused"), "{err}");
}
