//! GPUs that a process of an earlier round still holds. A stand-in for NVIDIA's library, compiled here, lists the GPUs,
//! so the machine needs none. These tests do not show how a real driver behaves.

use std::process::{Child, Command, Stdio};

use elastic_tests::agents::{Job, LIMIT};
use rustix::process::Signal;

use crate::agents::hosted::endpoint;

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
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/../agent/tests/fixtures/fake_nvml.c");
    let built = Command::new("cc")
        .args(["-shared", "-fPIC", "-o"])
        .arg(job.path("libnvidia-ml.so.1"))
        .args([&format!("-DGPUS={gpus}"), source])
        .status()
        .expect("run the C compiler");
    assert!(built.success(), "the C compiler could not build the stand-in");
    let folder = job.path("").display().to_string();
    job.env("LD_LIBRARY_PATH", &folder)
}

#[tokio::test]
async fn workers_start_when_an_earlier_rounds_process_has_left_the_gpu() {
    let old = Leftover::start();
    // Somebody else's process also holds a GPU. The agent leaves it alone.
    let foreign = std::process::id();
    let job = Job::met_by(&["--rdzv-backend=c10d", &endpoint()], "1");
    let job = with_gpus(job, foreign, old.pid());
    let mut agent = job.start("a");
    agent.says(&format!("GPU 1 (pid {}) held by workers of an earlier round: waiting for it", old.pid()), LIMIT).await;
    assert_eq!(job.workers().len(), 0);

    drop(old);
    let round = job.runs(1, 1).await;
    // The agent does not wait for the process again.
    round.exit(0);
    assert_eq!(agent.exit(LIMIT).await, 0);
    assert_eq!(agent.output().matches("held by workers").count(), 1, "{}", agent.output());
}

#[tokio::test]
async fn who_waits_for_a_gpu_can_be_asked_to_leave() {
    let old = Leftover::start();
    let job = Job::met_by(&["--rdzv-backend=c10d", &endpoint()], "1");
    let job = with_gpus(job, old.pid(), old.pid());
    let mut agent = job.start("a");
    agent.says("held by workers of an earlier round", LIMIT).await;
    agent.signal(Signal::TERM);
    assert_eq!(agent.exit(LIMIT).await, 3);
    assert_eq!(job.workers().len(), 0);
}
