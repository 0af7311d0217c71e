//! Workers: as threads of the test, or as processes of their own.

use std::net::TcpListener;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use clap::Parser;
use elastic_program::command::{self, Arguments};
use elastic_trainer::program::Task;
use elastic_trainer::{Elastic, Environment, Outcome, State, TrainError};
use serde_json::Value;

/// Nothing in these tests takes this long.
const DEADLINE: Duration = Duration::from_secs(60);

/// A command line of one task's flags.
#[derive(Parser)]
pub(crate) struct Words<T: clap::Args> {
    #[command(flatten)]
    pub(crate) flags: T,
}

/// The words of a command line. Unless the flags say otherwise, the task is the digits, and it runs on CPUs: so all
/// workers of these tests are alike, as threads and as processes, whatever the machine has.
fn words(flags: &str) -> Vec<&str> {
    let device: &[&str] = if flags.contains("--device") { &[] } else { &["--device", "cpu"] };
    let words: Vec<&str> = flags.split_whitespace().chain(device.iter().copied()).collect();
    let named = words.first().is_some_and(|first| !first.starts_with("--"));
    if named { words } else { ["digits"].into_iter().chain(words).collect() }
}

pub(crate) fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

pub(crate) fn environment(rank: u32, world_size: u32, round: u64, master_port: u16) -> Environment {
    let (master_addr, job) = ("127.0.0.1".to_owned(), "test".to_owned());
    Environment {
        rank,
        world_size,
        local_rank: rank,
        master_addr,
        master_port,
        agent_store: false,
        round,
        job,
        unnamed: false,
        agent: None,
        warm_up: false,
        record_dir: None,
        device_rank: rank,
        #[cfg(feature = "cuda")]
        cuda: Default::default(),
    }
}

/// The places of a round, by rank.
pub(crate) fn places(round: u64, world_size: u32) -> Vec<Environment> {
    let port = free_port();
    (0..world_size).map(|rank| environment(rank, world_size, round, port)).collect()
}

/// Trains in this thread with these flags.
pub(crate) fn run(flags: &str, environment: Environment) -> Result<Outcome, TrainError> {
    match Arguments::parse_from(["test"].into_iter().chain(words(flags))).command {
        command::Command::Digits(flags) => train_task(&*flags, environment),
        command::Command::Gpt(flags) => train_task(&*flags, environment),
        other => panic!("{other:?} trains nothing"),
    }
}

fn train_task<T: Task>(task: &T, environment: Environment) -> Result<Outcome, TrainError> {
    let (model, data) = task.make().unwrap();
    Elastic::new(task.settings().clone(), environment).output(&mut std::io::sink()).run(&model, &data)
}

/// Trains with a thread for each rank. Returns the outcome, which must be the same for all.
pub(crate) fn train(flags: &str, world_size: u32, round: u64) -> State {
    together(world_size, round, |environment| run(flags, environment).unwrap())
}

/// Runs a thread for each rank. Returns the outcome, which must be the same for all.
pub(crate) fn together(world_size: u32, round: u64, rank: impl Fn(Environment) -> Outcome + Sync) -> State {
    let port = free_port();
    let outcomes: Vec<Outcome> = thread::scope(|scope| {
        let rank = &rank;
        let start = |number| scope.spawn(move || rank(environment(number, world_size, round, port)));
        let threads: Vec<_> = (0..world_size).map(start).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    let mut states = (0..).zip(outcomes).map(|(rank, outcome)| {
        assert_eq!(outcome.rank, rank);
        outcome.state
    });
    let first = states.next().unwrap();
    assert!(states.all(|state| state == first), "the ranks differ");
    first
}

/// A process that trains. Dropping it kills it.
pub(crate) struct Worker(Child);

impl Drop for Worker {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Where the worker finds the libraries for a GPU, or their doubles.
#[cfg(feature = "cuda")]
fn name_libraries(command: &mut Command, cuda: &elastic_cuda::Surroundings) {
    if !cuda.folders.is_empty() {
        command.env("ELASTIC_CUDA_LIBRARIES", std::env::join_paths(&cuda.folders).unwrap());
    }
    if let Some(prefix) = cuda.prefixes.first() {
        command.env("VIRTUAL_ENV", prefix);
    }
    if let Some(cache) = &cuda.cache {
        command.env("XDG_CACHE_HOME", cache);
    }
}

impl Worker {
    pub(crate) fn start(flags: &str, environment: &Environment, error_file: Option<&Path>) -> Worker {
        let mut command = Command::new(env!("CARGO_BIN_EXE_elastic-trainer"));
        command.args(words(flags)).stdout(Stdio::piped()).stderr(Stdio::piped());
        command
            .env("RANK", environment.rank.to_string())
            .env("WORLD_SIZE", environment.world_size.to_string())
            .env("LOCAL_RANK", environment.local_rank.to_string())
            .env("MASTER_ADDR", &environment.master_addr)
            .env("MASTER_PORT", environment.master_port.to_string())
            .env("ELASTIC_ROUND", environment.round.to_string())
            .env("TORCHELASTIC_RUN_ID", &environment.job)
            .env("RUST_LOG", "info");
        if let Some(socket) = &environment.agent {
            command.env("ELASTIC_AGENT_SOCKET", socket);
        }
        if environment.unnamed {
            command.env("ELASTIC_JOB_UNNAMED", "1");
        }
        if environment.warm_up {
            command.env("ELASTIC_WARM_UP", "1");
        }
        #[cfg(feature = "cuda")]
        name_libraries(&mut command, &environment.cuda);
        if let Some(path) = error_file {
            command.env("TORCHELASTIC_ERROR_FILE", path);
        }
        Worker(command.spawn().unwrap())
    }

    pub(crate) fn id(&self) -> u32 {
        self.0.id()
    }

    pub(crate) fn signal(&self, signal: rustix::process::Signal) {
        rustix::process::kill_process(rustix::process::Pid::from_child(&self.0), signal).unwrap();
    }

    /// Waits for the end, without reading what it prints. Returns the status, and what was logged.
    pub(crate) fn end_unread(mut self) -> (ExitStatus, String) {
        drop(self.0.stdout.take());
        let status = wait_for("the worker's end", || self.0.try_wait().unwrap());
        let mut logged = String::new();
        std::io::Read::read_to_string(self.0.stderr.as_mut().unwrap(), &mut logged).unwrap();
        (status, logged)
    }

    /// Waits for the end, which must be a success. Returns what was printed and what was logged.
    pub(crate) fn succeeds(self) -> (String, String) {
        let (status, printed, logged) = self.end();
        assert!(status.success(), "{logged}");
        (printed, logged)
    }

    /// Waits for the end. Returns the status, what was printed and what was logged.
    pub(crate) fn end(mut self) -> (ExitStatus, String, String) {
        let status = wait_for("the worker's end", || self.0.try_wait().unwrap());
        let read = |stream: &mut dyn std::io::Read| {
            let mut text = String::new();
            stream.read_to_string(&mut text).unwrap();
            text
        };
        let printed = read(&mut self.0.stdout.take().unwrap());
        let logged = read(&mut self.0.stderr.take().unwrap());
        (status, printed, logged)
    }
}

/// The checksum of the parameters that a run ends with, as rank 0 prints it.
pub(crate) fn checksum(printed: &str) -> &str {
    printed.lines().find_map(|line| line.strip_prefix("parameters crc32c:")).unwrap()
}

pub(crate) fn wait_for<T>(what: &str, mut condition: impl FnMut() -> Option<T>) -> T {
    let started = Instant::now();
    loop {
        if let Some(value) = condition() {
            return value;
        }
        assert!(started.elapsed() < DEADLINE, "waited in vain for {what}");
        thread::sleep(Duration::from_millis(2));
    }
}

pub(crate) fn trace(path: &Path) -> Vec<Value> {
    let text = std::fs::read_to_string(path).unwrap_or_default();
    // A kill may cut the last line short.
    text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect()
}

pub(crate) fn last_step(path: &Path, event: &str) -> Option<u64> {
    trace(path).iter().rev().find(|line| line["event"] == event).and_then(|line| line["step"].as_u64())
}
