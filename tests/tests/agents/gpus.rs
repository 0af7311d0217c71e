//! GPUs that a process of an earlier round still holds, and what `/metrics` tells of GPUs. A stand-in for NVIDIA's
//! library, compiled here, lists the GPUs, so the machine needs none. These tests do not show how a real driver behaves.

use elastic_tests::http::answer;
use elastic_tests::prelude::*;
use tokio::time::timeout;

use crate::agents::hosted::endpoint;
use crate::agents::watchdog::{get, health_port};

/// A process with the environment of a worker of node `a`, like a process that escaped from such a worker.
struct Leftover(Child);

impl Leftover {
    fn start() -> Leftover {
        let mut command = Command::new("sleep");
        command.arg("1000").env("ELASTIC_NODE", "a").env("TORCHELASTIC_RUN_ID", "job").stdin(Stdio::null());
        Leftover(command.spawn().unwrap())
    }

    fn pid(&self) -> u32 {
        self.0.id()
    }
}

impl Drop for Leftover {
    fn drop(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

/// Has the job's agents find a library that lists these processes on GPUs 0 and 1.
fn with_gpus(job: Job, first: u32, second: u32) -> Job {
    with_library(job, &format!(r#"{{"GPU-0",0,1,0,{{{first}}}}},{{"GPU-1",0,2,0,{{{second}}}}}"#))
}

/// Has the job's agents find a library that lists these GPUs, in C's notation.
pub(crate) fn with_library(job: Job, gpus: &str) -> Job {
    fake_nvml(&job.path(""), gpus);
    let folder = job.path("");
    job.env("LD_LIBRARY_PATH", folder)
}

/// Before its agent has joined, it says what it waits for, and leaves when a signal asks for it.
pub(crate) async fn lives_and_leaves(job: Job, waits_for: &str) {
    let port = free_port();
    let mut agent = job.start_with("a", &[&format!("--health-port={port}")]);
    agent.says("serving health over HTTP", LIMIT).await;
    let live = eventually("it waits for that", LIMIT, async || {
        let live = timeout(LIMIT, answer(&format!("127.0.0.1:{port}"), "/live")).await.expect("an answer");
        live.contains(waits_for).then_some(live)
    });
    assert!(live.await.contains("200 OK"));
    agent.signal(Signal::TERM);
    assert_eq!(agent.exit(AT_ONCE).await, LEFT, "{}", agent.output());
}

/// The driver keeps the thread that counts GPUs.
#[tokio::test]
async fn an_agent_whose_driver_hangs_before_it_joins_lives_and_leaves() {
    let job = with_gpus(Job::met_by(&["--standalone"], "1"), 1, 1).flag("--nproc-per-node=gpu");
    lives_and_leaves(job.env("FAKE_NVML_NEVER_COUNTS", "/"), "GPUs").await;
}

#[tokio::test]
async fn workers_start_when_an_earlier_rounds_process_has_left_the_gpu() {
    let old = Leftover::start();
    // Someone else's process also holds a GPU. The agent leaves it alone.
    let foreign = std::process::id();
    let job = Job::met_by(&["--rdzv-backend=c10d", &endpoint()], "1");
    let job = with_gpus(job, foreign, old.pid());
    let mut agent = job.start("a");
    agent.says(&format!("GPU 1 (pid {}) held by workers of an earlier round: waiting for it", old.pid()), LIMIT).await;
    assert_eq!(job.workers().len(), 0);

    drop(old);
    job.runs(1, 1).await;
    // The agent does not wait for the process again.
    job.succeeds([&mut agent]).await;
    assert_eq!(agent.output().matches("held by workers").count(), 1, "{}", agent.output());
}

#[tokio::test]
async fn who_waits_for_a_gpu_can_be_asked_to_leave() {
    let old = Leftover::start();
    let job = Job::met_by(&["--rdzv-backend=c10d", &endpoint()], "1");
    let job = with_gpus(job, old.pid(), old.pid());
    let mut agent = job.start("a");
    agent.says("held by workers of an earlier round", LIMIT).await;
    job.leaves([&mut agent]).await;
    assert_eq!(job.workers().len(), 0);
}

#[tokio::test]
async fn the_workers_gpus_are_reported_also_when_the_driver_hangs() {
    // Given workers that see two of three GPUs
    let gpus = r#"{"GPU-a",0,1,0},{"GPU-b",0,2,0,{0},3},{"GPU-c",0,3,0}"#;
    let job = with_library(Job::met_by(&["--standalone"], "1"), gpus).env("CUDA_VISIBLE_DEVICES", "2,1");
    let (lost, hangs) = (job.path("lost"), job.path("hangs"));
    let job = job.env("FAKE_NVML_LOST", &lost).env("FAKE_NVML_HANGS", &hangs);
    let mut agent = job.start_with("a", &["--health-port=0"]);
    let port = health_port(&agent).await;
    job.runs(1, 1).await;
    let told = async || {
        let text = timeout(LIMIT, get(&port, "/metrics")).await.expect("an answer");
        let lines = text.lines().filter_map(|line| line.strip_prefix("elastic_agent_gpu_"));
        let of_job = |line: &str| Some(format!("{}{{{}", line.split_once('{')?.0, line.split_once(r#"node="a","#)?.1));
        let mut lines: Vec<String> = lines.filter_map(of_job).collect();
        lines.sort();
        lines
    };
    let up = |answers: u32| {
        [("1", "b"), ("2", "c")].map(|(gpu, uuid)| format!(r#"up{{gpu="{gpu}",uuid="GPU-{uuid}"}} {answers}"#))
    };

    // Then these are reported, and the third is not
    let first =
        eventually("GPUs are reported", LIMIT, async || Some(told().await).filter(|told| !told.is_empty())).await;
    let of_one = first.iter().filter(|line| line.contains(r#"{gpu="1",uuid="GPU-b"}"#));
    assert_eq!(
        of_one.map(|line| line.replace(r#"{gpu="1",uuid="GPU-b"}"#, "")).collect::<Vec<_>>(),
        [
            "memory_bytes 85899345920",
            "memory_used_bytes 21474836480",
            "power_watts 350.5",
            "temperature_celsius 40",
            "uncorrected_errors 3",
            "up 1",
            "utilization_ratio 0.75",
        ]
    );
    assert_eq!(first.len(), 2 * 7, "{first:?}");

    // When they are lost, or the driver hangs, then only that is reported of them
    for trouble in [&lost, &hangs] {
        std::fs::write(trouble, "").unwrap();
        assert_eq!(told().await, up(0));
        assert!(get(&port, "/live").await.starts_with("HTTP/1.1 200"));
        std::fs::remove_file(trouble).unwrap();
        assert_eq!(told().await, first);
    }
    job.succeeds([&mut agent]).await;
}

#[tokio::test]
async fn without_a_driver_nothing_is_reported_of_gpus() {
    let job = Job::met_by(&["--standalone"], "1");
    let mut agent = job.start_with("a", &["--health-port=0"]);
    let port = health_port(&agent).await;
    job.runs(1, 1).await;
    let text = get(&port, "/metrics").await;
    assert!(text.contains("elastic_agent_workers{") && !text.contains("_gpu_"), "{text}");
    job.succeeds([&mut agent]).await;
}
